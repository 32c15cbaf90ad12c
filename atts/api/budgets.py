"""Budgets of a run: how long its rollouts and chunks may be, by the models that are named, none of
them loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

from atts.api.pairs import model_sizes
from atts.engine import Engine
from atts.pipelines import SMALL, Budget, Policy

INSTRUCT = Budget("instruct models", 4096, 256)
REASONING = Budget("reasoning models", 16_000, 500)
_ANSWERS_AT_ONCE = re.compile(r"instruct|chat|-it\b|-base\b", re.IGNORECASE)
_REASONS = re.compile(r"\br1\b|qwq|think|reason|qwen3", re.IGNORECASE)
_SERVERS = ("RemoteEngine", "ReplicaPool", "RayEngine")
_IS_BASE = re.compile(r"-base\b", re.IGNORECASE)
# Tokens of one request that nothing reads before it is over. At 10 tokens a second they come well
# within `timeout_seconds`, and few rollouts are longer.
_REQUEST_TOKENS = 4096
_TOO_SMALL = 0.25  # of what such models need


def budget_of(*engines: str | Engine, reads_chunks: bool = True) -> Budget:
    """Return what these models need: the largest of their budgets, within the shortest of their
    contexts that is known. Only the models that a method asks belong here.

    Where nothing `reads_chunks` before a rollout is over, a chunk is as long as one request may
    be: models end their answers themselves, and every cut is one more request. Base models go on
    after an answer, and are cut all the same.

    A model whose name does not say that it answers at once is taken to reason: a rollout that is
    cut is worth nothing, and one that was allowed too much costs nothing.

    >>> budget_of("embedded", "embedded").max_tokens, budget_of("vllm:http://a:8001", "vllm:http://b:8000").max_tokens
    (512, 16000)
    """
    largest = max(map(_budget, engines), key=lambda budget: budget.max_tokens)
    contexts = [length for length in map(known_context, engines) if length is not None]
    names = [_words(engine) for engine in engines]
    if not reads_chunks and largest is not SMALL and not any(map(_IS_BASE.search, names)):
        largest = replace(largest, chunk_tokens=min(largest.max_tokens, _REQUEST_TOKENS))
    return largest.within(min(contexts)) if contexts else largest


def budget_warnings(policy: Policy, budget: Budget) -> Iterator[str]:
    """Yield a warning for each length that looks too small for these models, naming its flag."""
    bounds = policy.bounds(budget)
    if bounds.max_tokens < _TOO_SMALL * budget.max_tokens and budget is not SMALL:
        yield (
            f"--max-tokens {bounds.max_tokens:,} looks too small for {budget.models}, which get "
            f"{budget.max_tokens:,}: "
            "many rollouts would be cut before they answer; leave it out, or raise it"
        )
    per_turn = bounds.draft_tokens + bounds.target_tokens * (policy.takeover == "continue")
    if policy.drafter == "target":
        per_turn = bounds.target_tokens
    if (most := bounds.turns * per_turn) < bounds.max_tokens and policy.turns is not None:
        yield (
            f"--turns {bounds.turns} ends a rollout after {most:,} of its {bounds.max_tokens:,} "
            f"tokens; "
            "leave it out: as many turns are made as the tokens need"
        )


def known_context(engine: str | Engine) -> int | None:
    """Tokens that the model holds, where its words or its folder say so."""
    words, _, settings = _words(engine).partition("?")
    scheme, _, model = words.removeprefix("ray:").partition(":")
    said = [*parse_qs(settings).get("context", ()), *parse_qs(settings).get("kv_tokens", ())]
    lengths = [int(word) for word in said if word.isdecimal() and int(word) > 0]
    if scheme == "hf":
        lengths += _context_of_folder(Path(model).expanduser())
        lengths += [size.context for name, size in model_sizes().items() if name == model]
    return min(lengths, default=None)


def _context_of_folder(folder: Path) -> Iterator[int]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    length = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if isinstance(length, int) and length > 0:
        yield length


def _budget(engine: str | Engine) -> Budget:
    words = _words(engine).removeprefix("ray:").partition("?")[0]
    scheme, _, model = words.partition(":")
    if scheme in ("embedded", "scripted"):
        return SMALL
    # The scheme is no part of a model's name: "chat:" says how a server is asked, not what it serves.
    if _ANSWERS_AT_ONCE.search(model) and not _REASONS.search(model):
        return INSTRUCT
    return REASONING


def _words(engine: str | Engine) -> str:
    """What names the engine on a command line; one of a program's own kind is held to be as small
    as the scripted.
    """
    if isinstance(engine, str):
        return engine
    kind = type(engine).__name__
    model = Path(str(getattr(engine, "model", "")))
    # in the package's own folder
    if kind == "LocalEngine" and (Path(model).parent / "__init__.py").exists():
        return "embedded"
    return f"hf:{model}" if kind == "LocalEngine" else "server:" if kind in _SERVERS else "scripted"
