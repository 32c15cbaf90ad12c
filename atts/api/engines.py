"""Build engines from addresses such as "hf:Qwen/Qwen3-1.7B", and choose default token limits for
their models.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast
from urllib.parse import parse_qs, parse_qsl, urlencode

from atts.api.keys import keys_of
from atts.api.pairs import model_sizes, run_tokens
from atts.core import Role
from atts.engine import GIVE_UP_AFTER, Engine
from atts.errors import ATTSError, OptionError
from atts.models.folders import template_of
from atts.pipelines import SMALL, Budget, Policy, ScoreRule

if TYPE_CHECKING:
    from atts.accel import SpeculationOptions, StageOptions, Zoo
    from atts.local import LocalOptions, RunDemand
    from atts.servers import RayOptions


T = TypeVar("T")
_log = logging.getLogger("atts.engines")

Speculate = Literal["auto", "draft", "suffix", "pearl", "ssd", "mirror", "off"]
_LOCAL = ("embedded", "hf", "zoo")
_NO_SERVERS = (*_LOCAL, "scripted", "ray")
_MOST_REPLICAS = 64
_WRITTEN = "{}:http://HOST:PORT/MODEL"
_MODELS = {"hf": "hf:OWNER/NAME or hf:./FOLDER", "zoo": "zoo:DIR/NAME"}


INSTRUCT = Budget("instruct models", 4096, 128, ("\n\n",))
REASONING = Budget("reasoning models", 16_000, 500)
_UNKNOWN = "models of unknown kind, treated as reasoning models"
UNKNOWN = replace(REASONING, models=_UNKNOWN)
_ANSWERS_AT_ONCE = re.compile(r"instruct|chat|-it\b|-base\b", re.IGNORECASE)
_REASONS = re.compile(r"\br1\b|qwq|think|reason|qwen3", re.IGNORECASE)
_IS_BASE = re.compile(r"-base\b", re.IGNORECASE)
# The chat template of a model that reasons before it answers contains one of these texts.
_REASONING_TEMPLATE = re.compile(
    r"think>|enable_thinking|reasoning_content|<\|channel\|>|\[THINK\]"
)
_SERVER_CLASSES = ("RemoteEngine", "ReplicaPool", "RayEngine")
# Token limit of one request, for methods that read a rollout only at its end. Even at 10 tokens per
# second, such a request ends well before `timeout_seconds`. Few rollouts need a second request.
_REQUEST_TOKENS = 4096
_ROLLOUTS = 64  # number of rollouts in flight, if the caller does not give it
_TOO_SMALL = 0.25  # warn if a token limit is below this fraction of the default for the models


def build_engine(
    name: str | Engine,
    role: Role,
    options: LocalOptions | None = None,
    *,
    speculation: SpeculationOptions | None = None,
    stages: StageOptions | None = None,
    chat: bool = False,
    lent: str = "",
    demand: RunDemand | None = None,
    give_up_after: float = GIVE_UP_AFTER,
) -> Engine:
    """Build an engine from its address without opening it; if `name` is an engine, return it
    unchanged.

    Models on this machine are "embedded", "scripted", "hf:Qwen/Qwen3-1.7B" and "hf:./folder".
    "zoo:DIR/NAME" is a model that `atts zoo add` stored (`docs/blocks.md`). With "?lossy=0.01",
    atts instead loads a replacement of this model that `atts zoo compare` stored. The replacement's
    loss is at most 0.01 nats per token, and is logged as a warning. "?replicas=2" loads the model
    into two processes, and "?stages=2" divides its layers between two processes.

    Servers are "vllm:http://host:8000/Model", "sglang:...", "llamacpp:...", "ollama:...", any chat
    API as "openai:https://host/v1/Model", or "server:..." to detect the kind of server. Several
    URLs with commas between them are replicas of one engine (`docs/servers.md`). Settings follow a
    question mark: "hf:Qwen/Qwen3-1.7B?device=cuda&dtype=bfloat16" (the fields of
    `atts.local.LocalOptions`, and of `SpeculationOptions` and `StageOptions` in `atts.accel`).
    "ray:" before any of these addresses runs the engine in the actors of a Ray cluster:
    "ray:hf:Qwen/Qwen3-1.7B?actors=4&gpus=1" (the fields of `atts.servers.RayOptions`).

    If `chat` is true, a local model without a chat template is refused before it is loaded. `lent`
    names a draft model that proposes tokens to a local model, if the two models are compatible
    (`atts.accel.accelerated`). `demand` is the load that a run puts on a model on a GPU. atts waits
    `give_up_after` seconds for a lost server, unless the server's address sets another time.

    :raises OptionError: if the address names no engine, or has an unknown setting.
    :raises UnsupportedByEngine: if the model's folder has no chat template.

    >>> build_engine("scripted", "draft").spec.name
    'draft'
    """
    if not isinstance(name, str):
        return name
    scheme, rest = check_engine_words(name)
    if scheme == "scripted":
        from atts.testing import ScriptedEngine

        return ScriptedEngine("target" if (rest or role) == "target" else "draft")
    if scheme == "ray":
        return _on_ray(rest, role, chat)
    if scheme not in _LOCAL:
        from atts.servers import RemoteOptions, server_engine

        # Here the server must only be able to sample. A run later checks the other capabilities
        # that it needs.
        defaults = RemoteOptions(give_up_after=give_up_after)
        return server_engine(scheme, rest, role, frozenset({"sample"}), defaults)
    from atts.accel import accelerated

    model, _, settings = rest.partition("?")
    if scheme == "embedded":
        from atts.models import path

        model = str(path("target" if (model or role) == "target" else "draft"))
    count = 1
    if scheme == "zoo":
        zoo = _zoo_model(model, settings)
        model = zoo.folder
        settings = zoo.settings
        count = zoo.replicas
        if zoo.loss:
            _log.warning("%s: %s", name, zoo.loss)
    words = _LocalWords.read(settings, options, speculation, stages)
    lent = _drafter_model(lent) if lent else ""
    make = partial(
        accelerated,
        model,
        name=role,
        options=words.options,
        speculation=words.speculation,
        stages=words.stages,
        chat=chat,
        lent="" if lent == model else lent,
        demand=demand,
    )
    if count == 1:
        return make()
    from atts.accel import replicated

    return replicated([make(replica=number) for number in range(count)], role)


def build_engines(
    draft: str | Engine,
    target: str | Engine,
    speculate: Speculate = "auto",
    roles: tuple[Role, ...] = ("draft", "target"),
    in_flight: tuple[int, int] | None = None,
    *,
    give_up_after: float = GIVE_UP_AFTER,
) -> tuple[Engine, Engine]:
    """Build the draft engine and the target engine of a run.

    If `draft` and `target` are the same engine object, the run has one engine; equal addresses give
    two engines. `speculate` sets how the draft model proposes tokens to the target, unless the
    target's address sets it. If `roles` has only one role, only this role's engine is built and
    returned twice. `in_flight` has the number of concurrent rollouts and the number of tokens of a
    rollout. On GPUs, these two numbers determine the memory of both models before a model is
    loaded. `give_up_after` is as in `build_engine`.

    :raises OptionError: as in `build_engine`, or if the two models cannot speculate as requested.
    """
    for words in (draft, target):
        # Check both addresses here. A misspelt setting must cause an error even if the method does
        # not use that engine.
        if isinstance(words, str):
            check_engine_words(words)
    if in_flight is None:
        in_flight = _ROLLOUTS, run_tokens(budget_of(draft, target).max_tokens)
    build = partial(build_engine, chat=True, give_up_after=give_up_after)
    if roles == ("target",):
        speculation, lent = _speculation(draft, target, speculate)
        demand = _demand(in_flight)
        only = build(target, "target", speculation=speculation, lent=lent, demand=demand)
        return only, only
    other = target if roles == ("draft", "target") else ""
    first = build(draft, "draft", demand=_demand(in_flight, other))
    if target is first or roles == ("draft",):
        return first, first
    speculation, lent = _speculation(draft, target, speculate)
    demand = _demand(in_flight)
    second = build(target, "target", speculation=speculation, lent=lent, demand=demand)
    return first, second


def _demand(in_flight: tuple[int, int], other: str | Engine = "") -> RunDemand:
    """Return the load that a run puts on one engine; `other` is an engine that is loaded later and
    also needs memory.

    If there are several GPUs, a local target gets the first GPU and its draft the second.
    """
    from atts.local import LocalOptions, RunDemand

    rollouts, tokens = in_flight
    model = _drafter_words(other)
    if not model or model.startswith("zoo:"):
        return RunDemand(rollouts, tokens)
    options = _LocalWords.read(str(other).partition("?")[2], LocalOptions(), None, None).options
    if model.startswith("embedded"):
        model = "embedded:target"
    return RunDemand(rollouts, tokens, card=1, other=_drafter_model(model), other_options=options)


def speculation_words(
    draft: str | Engine, target: str | Engine, speculate: Speculate = "auto"
) -> str:
    """Describe the source of the tokens that speculation proposes to the target.

    :raises OptionError: if these engines cannot do what `speculate` requests.

    >>> speculation_words("embedded", "vllm:http://a:8000/M")
    'nothing: atts speculates only if draft and target run on this machine'
    """
    speculation, lent = _speculation(draft, target, speculate)
    _, _, settings = str(target).partition("?")
    if {name for name, _ in parse_qsl(settings)} & {"drafter", "speculate", "k"}:
        return "the drafter named in the target's address"
    if speculation is not None:
        return "earlier texts for the same problem" if speculate == "suffix" else "the draft"
    if lent:
        return "the draft, if both models share a tokenizer and the target runs on a CPU"
    if speculate == "auto" and _is_one_loop(draft, target):
        return (
            "nothing: draft and target share blocks of a zoo and one step loop, and such a "
            "loop cannot speculate"
        )
    if speculate == "auto":
        return "nothing: atts speculates only if draft and target run on this machine"
    return "nothing"


def _speculation(
    draft: str | Engine, target: str | Engine, speculate: Speculate
) -> tuple[SpeculationOptions | None, str]:
    """Return the speculation options to add to the target's address, and the draft model to lend to
    the target.
    """
    from atts.accel import SpeculationOptions

    drafter = _drafter_words(draft)
    is_local = bool(_drafter_words(target))
    if speculate == "auto":
        return None, drafter if is_local and not _is_one_loop(draft, target) else ""
    if speculate == "off":
        return None, ""
    if not is_local:
        is_server = (
            isinstance(target, str)
            and target.partition(":")[0].partition("?")[0] not in _NO_SERVERS
        )
        advice = (
            "leave speculate out, and use the server's own flags for speculation (docs/servers.md)"
        )
        advice = (
            advice
            if is_server
            else ("leave speculate out, and configure speculation in the engine's own options")
        )
        raise OptionError(
            "speculate",
            f"{speculate} needs a target that runs on this machine (embedded or hf:MODEL); "
            f"{advice}",
        )
    if speculate == "suffix":
        return SpeculationOptions(speculate="suffix"), ""
    if not drafter:
        problem = "needs a draft that runs on this machine to propose tokens (embedded or hf:MODEL)"
        raise OptionError(
            "speculate", f"{speculate} {problem}; use another draft, or leave speculate out"
        )
    return SpeculationOptions(speculate=speculate, drafter=drafter), ""


def _is_one_loop(draft: str | Engine, target: str | Engine) -> bool:
    """Return whether draft and target are models of one zoo that share blocks, so that a single
    loop of decoding steps runs both.
    """
    from atts.models.stored_blocks import share_blocks

    if not (isinstance(draft, str) and isinstance(target, str)):
        return False
    if not all(words.startswith("zoo:") for words in (draft, target)):
        return False
    one, other = (
        _zoo_model(words[4:].partition("?")[0], words.partition("?")[2])
        for words in (draft, target)
    )
    if (one.settings, one.replicas) != (other.settings, other.replicas):
        return False
    return share_blocks(Path(one.folder), Path(other.folder), as_deep="stages=" in one.settings)


def _drafter_words(engine: str | Engine) -> str:
    """Return an engine's address without settings, or "" if its model is not on this machine."""
    words = engine.partition("?")[0] if isinstance(engine, str) else ""
    return words if words.partition(":")[0] in _LOCAL else ""


def check_engine_words(name: str) -> tuple[str, str]:
    """Check an engine's address without opening the engine, and return its scheme and the part
    after the scheme.

    :raises OptionError: if the address names no engine, or a server's URL or settings are
        impossible.
    """
    scheme, _, rest = name.partition(":")
    if "?" in scheme:  # The address names no model, only settings, such as "embedded?threads=1".
        scheme, _, rest = name.partition("?")
        rest = f"?{rest}"
    if scheme not in _NO_SERVERS:
        # imported here, because runs without a server do not need this module
        from atts.servers import SCHEMES

        if scheme not in SCHEMES:
            if url := _url_without_scheme(name):
                raise OptionError(
                    "engine",
                    f"{url} does not say which kind of server it is; did you mean vllm:{url}? For "
                    "other kinds, write sglang:URL, llamacpp:URL, ollama:URL, openai:URL, or "
                    "server:URL to detect the kind",
                )
            known = (*_LOCAL, "scripted", *SCHEMES, "ray")
            is_model = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
            advice = f"; for a folder or a model of the hub, hf:{name}" if is_model else ""
            raise OptionError(
                "engine",
                f"{name!r} is not the address of an engine; write SCHEME or SCHEME:MODEL{advice}",
                known,
                scheme,
            )
    if scheme in ("embedded", "scripted"):
        if rest.partition("?")[0] not in ("", "draft", "target"):
            raise OptionError(
                "engine",
                f"{name!r} is not the address of an engine; write {scheme}, {scheme}:draft or "
                f"{scheme}:target",
            )
    elif scheme == "ray" and rest.partition(":")[0] != "ray":
        check_engine_words(_ray_words(rest)[0])
    elif scheme not in _NO_SERVERS and rest:
        from atts.servers import server_engine

        server_engine(scheme, rest, scheme, frozenset())
    elif not rest or scheme == "ray":
        what = _MODELS.get(scheme) or _WRITTEN.format(scheme)
        raise OptionError("engine", f"{name!r} does not name a model; write {what}")
    return scheme, rest


def _url_without_scheme(name: str) -> str:
    """Return the server's URL if an address is only a URL or only HOST:PORT, or else "".

    The user, the password and the query are left out, because they may contain secrets. The path
    /v1 is left out too, because only chat APIs need it.
    """
    if not re.match(r"https?://|[\w.-]+:\d+(/|\?|$)", name):
        return ""
    url = name if "://" in name else f"http://{name}"
    scheme, _, rest = url.partition("://")
    host = rest.partition("?")[0].rpartition("@")[2].rstrip("/")
    return f"{scheme}://{host.removesuffix('/v1')}"


def _on_ray(words: str, role: Role, chat: bool) -> Engine:
    """Build an engine in Ray actors; the settings of Ray in its address are not passed to the
    actors.
    """
    from atts.accel import StageOptions
    from atts.local import LocalOptions
    from atts.servers import RayEngine

    inner, options = _ray_words(words)
    # A Ray actor is already a separate process, so the model inside it needs only a thread.
    here = LocalOptions(worker="thread")
    stages = StageOptions(stage_worker="ray")
    build = partial(build_engine, inner, role, here, stages=stages, chat=chat)
    return RayEngine(build, name=role, options=options)


def _ray_words(words: str) -> tuple[str, RayOptions]:
    """Split an address into the address of the engine that runs in the actors, and the options of
    Ray.
    """
    from atts.servers import RayOptions

    inner, _, settings = words.partition("?")
    options, rest = _with_settings(RayOptions(), settings)
    return f"{inner}?{urlencode(rest)}" if rest else inner, options


class _LocalWords(NamedTuple):
    """The options of a local engine, after the settings in its address have changed them."""

    options: LocalOptions
    speculation: SpeculationOptions
    stages: StageOptions

    @classmethod
    def read(
        cls,
        settings: str,
        options: LocalOptions | None,
        speculation: SpeculationOptions | None,
        stages: StageOptions | None,
    ) -> _LocalWords:
        """Apply the settings of an engine's address to the options, and return the updated options.
        Each setting must be a field of one of the options.

        :raises OptionError: a setting is unknown or impossible.
        """
        from atts.accel import SpeculationOptions, StageOptions
        from atts.local import LocalOptions

        own, rest = _with_settings(options or LocalOptions(), settings)
        drafting, rest = _with_settings(speculation or SpeculationOptions(), urlencode(rest))
        staged, rest = _with_settings(stages or StageOptions(), urlencode(rest))
        for name in rest:
            known = [
                key.name for each in (own, drafting, staged) for key in keys_of(type(each), each)
            ]
            raise OptionError("engine", f"{name!r} is not a setting of a local engine", known, name)
        if drafting.drafter:
            drafting = replace(drafting, drafter=_drafter_model(drafting.drafter))
        own.check()
        drafting.check()
        staged.check()
        return cls(own, drafting, staged)


class _ZooModel(NamedTuple):
    """The model that the address of a zoo engine names."""

    folder: str  # folder of the model, or of the lossy replacement that is loaded instead
    settings: str  # settings in the address that the local engine reads
    # how much the replacement loses compared with the original model, as a text for the log
    loss: str
    replicas: int


def _zoo_model(words: str, settings: str) -> _ZooModel:
    zoo, name = _zoo(words)
    named = dict(parse_qsl(settings, keep_blank_values=True))
    bound = named.pop("lossy", None)
    count = named.pop("replicas", "1")
    model = zoo.model(name)
    if not count.isdecimal() or not 1 <= int(count) <= _MOST_REPLICAS:
        raise OptionError(
            "replicas",
            f"{count!r} is not a valid number of processes; give a whole number from 1 to "
            f"{_MOST_REPLICAS}",
        )
    found = _ZooModel(str(zoo.folder(name)), urlencode(named), "", int(count))
    if bound is None:
        if model.loss:
            advice = (
                f"write zoo:DIR/{model.loss.model}?lossy=NATS with {model.loss.nats:.3g} or more, "
                f"or use {name!r} only as a drafter"
            )
            raise OptionError(
                "engine", f"{name!r} is a lossy replacement of {model.loss.model!r}: {advice}"
            )
        return found
    try:
        kept = zoo.within(name, float(bound))
    except ValueError:
        raise OptionError(
            "lossy", f"{bound!r} is not a number; give a bound in nats per token, such as 0.01"
        ) from None
    stands = (
        ", ".join(f"{other} as {place}" for place, other in kept.loss.stands.items())
        if kept.loss
        else ""
    )
    loss = (
        f"the lossy replacement {kept.name} is used instead of the model ({stands}). Its loss: "
        f"{kept.loss}"
    )
    return found._replace(folder=str(zoo.folder(kept.name)), loss=loss)


def _zoo(words: str) -> tuple[Zoo, str]:
    """Split a zoo model's path into the zoo and the model's name."""
    from atts.accel import Zoo

    directory, _, name = words.rstrip("/").rpartition("/")
    return Zoo(Path(directory or ".").expanduser()), name


def _drafter_model(words: str) -> str:
    """Return the folder or hub id of a draft model from the address of its engine."""
    scheme, _, model = words.partition(":")
    if scheme == "embedded" and model in ("", "draft", "target", "deep"):
        from atts.models import path

        return str(path(cast(Any, model or "draft")))
    if scheme == "zoo" and model:
        zoo, name = _zoo(model)
        return str(zoo.folder(name))
    if scheme != "hf" or not model or "?" in model:
        known = "embedded:draft, embedded:deep, hf:OWNER/NAME, hf:./FOLDER or zoo:DIR/NAME"
        raise OptionError(
            "drafter",
            f"{words!r} does not name a draft model; write one of {known}, without settings",
        )
    return model


def _with_settings(base: T, settings: str) -> tuple[T, dict[str, str]]:
    """Apply an address's settings to the options. Return the updated options and the settings that
    are not option fields.
    """
    known = {key.name: key for key in keys_of(type(base), base)}
    given = dict(parse_qsl(settings, keep_blank_values=True))
    if given.get("k") == "auto":
        del given["k"]
    changes = {
        name: known[name].read(words, f"engine {name}")
        for name, words in given.items()
        if name in known
    }
    changed = replace(cast(Any, base), **changes)
    return changed, {name: words for name, words in given.items() if name not in known}


def budget_of(*engines: str | Engine, reads_chunks: bool = True) -> Budget:
    """Return the default token limits for these models: the largest of their budgets, cut to the
    shortest known context.

    Give only the models that a method uses. If `reads_chunks` is false, the method reads a rollout
    only at its end. Chunks are then as long as a request may be, because models end their answers
    themselves, and every cut costs another request. Base models continue after an answer, so their
    chunks stay short.

    A model counts as a reasoning model if its chat template has reasoning markers such as "think>".
    The template is read from the model's folder, or from the folder of the tokenizer that a
    server's address names. Without a template, the model's name decides. A model of unknown kind
    gets the limits of reasoning models, because a limit that is too low makes rollouts useless.

    >>> budget_of("embedded", "embedded").max_tokens, budget_of("vllm:http://a:8001", "vllm:http://b:8000").max_tokens
    (512, 16000)
    """
    # REASONING and UNKNOWN have the same limits. If one model is known to reason, it sets them.
    largest = max(map(_model_budget, engines), key=lambda one: (one.max_tokens, one == REASONING))
    contexts = [length for length in map(known_context, engines) if length is not None]
    names = [_engine_words(engine) for engine in engines]
    has_base = any(_IS_BASE.search(name) for name in names)
    # Each chunk may be as long as one request, except for the budget SMALL. Its stop strings end a
    # chunk long before a token limit would.
    if not reads_chunks and not has_base and largest is not SMALL:
        tokens = min(largest.max_tokens, _REQUEST_TOKENS)
        largest = replace(largest, chunk_tokens=tokens, stop=())
    return largest.within(min(contexts)) if contexts else largest


def budget_warnings(policy: Policy, budget: Budget) -> Iterator[str]:
    """Yield a warning, with the command-line flag, for each token limit that looks too small for
    the models.
    """
    bounds = policy.bounds(budget)
    if bounds.max_tokens < _TOO_SMALL * budget.max_tokens and budget is not SMALL:
        yield (
            f"--max-tokens {bounds.max_tokens:,} looks too small for {budget.models}, whose "
            f"default is {budget.max_tokens:,}: many rollouts would be cut before they answer; "
            "leave --max-tokens out (atts reduces the default to the models' contexts), or raise it"
        )
    per_turn = bounds.draft_tokens
    if policy.drafter == "target":
        per_turn = bounds.target_tokens
    # With takeover "continue", the draft's chunk stays in the text and the target adds a chunk. So
    # an escalated turn has the tokens of both chunks.
    elif policy.takeover == "continue":
        per_turn += bounds.target_tokens
    most = bounds.turns * per_turn
    if policy.turns is not None and most < bounds.max_tokens:
        yield (
            f"--turns {bounds.turns} ends a rollout after at most {most:,} of its "
            f"{bounds.max_tokens:,} tokens; leave --turns out to allow as many turns as the "
            "tokens need"
        )


def unknown_kind_advice(policy: Policy, budget: Budget) -> str:
    """Return advice for models of unknown kind, or "" if the kind is known or sets no length."""
    are_set = policy.max_tokens is not None and policy.chunking.draft_tokens is not None
    if are_set or not budget.models.startswith(_UNKNOWN):
        return ""
    return (
        "if no model reasons, add ?tokenizer=FOLDER to the servers' addresses (its chat template "
        "then sets the lengths), or give --max-tokens N and --set chunking.draft_tokens=N"
    )


def score_warnings(policy: Policy) -> Iterator[str]:
    """Yield a warning if the score kind is "speculative" and a sampling temperature is not 1. The
    score is then not the probability that speculative sampling accepts the draft's tokens.

    The score is computed from raw log-probabilities, because servers return only raw
    log-probabilities for a given text.
    """
    target = policy.target_sampling or policy.sampling
    temperatures = (policy.sampling.temperature, target.temperature)
    if policy.score.kind == "speculative" and temperatures != (1.0, 1.0):
        yield (
            "score.kind=speculative compares the models at temperature 1, but they are sampled "
            f"at {temperatures[0]:g} (draft) and {temperatures[1]:g} (target): the score still "
            "ranks chunks, but it is not the probability of acceptance; give --temperature 1 "
            "to make it this probability"
        )


def known_context(engine: str | Engine) -> int | None:
    """Return the context length of a model if its address or its folder states the length, or else
    None.
    """
    words, _, settings = _engine_words(engine).partition("?")
    scheme, _, model = words.removeprefix("ray:").partition(":")
    stated = [*parse_qs(settings).get("context", ()), *parse_qs(settings).get("kv_tokens", ())]
    lengths = [int(word) for word in stated if word.isdecimal() and int(word) > 0]
    folder = _folder_of(scheme, model)
    if folder is not None:
        lengths += _context_of_folder(folder)
    if scheme == "hf":
        lengths += [size.context for name, size in model_sizes().items() if name == model]
    return min(lengths, default=None)


def _folder_of(scheme: str, model: str) -> Path | None:
    """Return the folder of a model on this machine if its address names a folder, or else None."""
    if scheme == "hf":
        return Path(model).expanduser()
    if scheme != "zoo":
        return None
    try:
        zoo, name = _zoo(model)
        return zoo.folder(name)
    except ATTSError:  # Ignore the error here, because opening the engine raises it again.
        return None


def _tokenizer_folder(settings: str) -> Path | None:
    """Return the folder of the tokenizer, if the settings of a server's address name an existing
    folder.
    """
    for name in parse_qs(settings).get("tokenizer", ()):
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
    return None


def _context_of_folder(folder: Path) -> Iterator[int]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    length = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if isinstance(length, int) and length > 0:
        yield length


def budget_of_folder(folder: Path) -> Budget | None:
    """Return the budget that a folder's chat template shows, or None if it cannot be read."""
    template = template_of(folder)
    if template is None:
        return None
    return REASONING if _REASONING_TEMPLATE.search(template) else INSTRUCT


def _model_budget(engine: str | Engine) -> Budget:
    words, _, settings = _engine_words(engine).removeprefix("ray:").partition("?")
    scheme, _, model = words.partition(":")
    if scheme in ("embedded", "scripted"):
        return SMALL
    # Search only the model's name for "chat", not the scheme: "chat:" names a kind of server, not a
    # chat model.
    folder = _folder_of(scheme, model) or _tokenizer_folder(settings)
    shown = budget_of_folder(folder) if folder is not None else None
    if shown is not None:
        return shown
    if _ANSWERS_AT_ONCE.search(model) and not _REASONS.search(model):
        return INSTRUCT
    return REASONING if _REASONS.search(model) else UNKNOWN


def _engine_words(engine: str | Engine) -> str:
    """Return an engine's address as it would be written on the command line.

    An engine object of an unknown class gets the address "scripted", so its default token limits
    are small.
    """
    if isinstance(engine, str):
        return engine
    kind = type(engine).__name__
    model = Path(str(getattr(engine, "model", "")))
    if kind == "LocalEngine" and (model.parent / "__init__.py").exists():
        return "embedded"  # Only the embedded models are stored inside a Python package.
    if kind == "LocalEngine":
        return f"hf:{model}"
    return "server:" if kind in _SERVER_CLASSES else "scripted"


def beside_reward_model(target: Engine, rule: ScoreRule) -> Engine:
    """Return the target, joined with a reward model if the score rule names one.

    :raises OptionError: if the address does not name a reward model.
    """
    if rule.kind != "prm" or not rule.reward:
        return target
    # imported here, because runs without a reward model do not need this module
    from atts.servers import RemoteRewardModel, RewardedTarget

    return RewardedTarget(target, RemoteRewardModel(rule.reward, rule.separator))
