"""Handshake with a server: wait until it is ready, find its dialect and model, describe it as an
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from atts.concurrency import clock
from atts.engine import Capability, EngineSpec, Tokenizer
from atts.errors import EngineError, EngineUnavailable, OptionError, UnsupportedByEngine
from atts.servers.chat import ChatDialect
from atts.servers.client import Client
from atts.servers.dialects import Dialect, Identity, Rater, Scorer
from atts.servers.llamacpp import LlamaCppDialect
from atts.servers.ollama import OllamaDialect
from atts.servers.options import DIALECTS
from atts.servers.sglang import SglangDialect
from atts.servers.vllm import VllmDialect

_log = logging.getLogger("atts.servers")
_log.addHandler(logging.NullHandler())
_LOOK_AGAIN_SECONDS = 5.0  # at a server that did not come back in time
_AUTO = (
    ("/server_info", "sglang"),
    ("/props", "llamacpp"),
    ("/version", "vllm"),
    ("/api/version", "ollama"),
)
_KNOWN: Mapping[str, type[Dialect]] = {
    kind.name: kind
    for kind in (VllmDialect, SglangDialect, LlamaCppDialect, OllamaDialect, ChatDialect)
}


async def wait_ready(client: Client) -> None:
    """Wait while the server says that it is loading.

    :raises EngineUnavailable: it cannot be reached, or still loads after `wait_seconds`.
    """
    now = clock()
    patience = client.options.wait_seconds
    told = False
    give_up = now() + patience
    while (reply := await client.look("/health")).status == 503:
        if now() >= give_up:
            raise EngineUnavailable(
                client.name, f"{client.url} is still loading after {patience:g} s"
            )
        if not told:
            _log.warning(
                "engine %s: %s is still loading; waiting up to %g s",
                client.name,
                client.url,
                patience,
            )
            told = True
        await anyio.sleep(min(1.0, patience / 10))
    if reply.status in (401, 403):
        raise client.refusal(reply)


class Watch:
    """Waits for a server that was lost; of the calls that ask at once, one looks and the others
    hear what it saw.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._now = clock()
        self._lost_at: float | None = None
        self._looked_at = 0.0
        self._one = anyio.Lock()

    def seen(self) -> None:
        """It has answered."""
        self._lost_at = None

    async def comes_back(self) -> bool:
        """Whether it is there, or there again within `wait_seconds` of its loss."""
        was_lost = self._lost_at is not None
        async with self._one:
            if self._lost_at is None and (was_lost or await self._is_there()):
                return True
            if self._lost_at is None:
                self._lost_at = self._now()
                self._say(
                    "is lost; waiting up to %g s for it to come back",
                    self._client.options.wait_seconds,
                )
            return await self._wait(self._lost_at, self._client.options.wait_seconds)

    async def _wait(self, since: float, patience: float) -> bool:
        now = self._now
        if now() - since >= patience and now() - self._looked_at < _LOOK_AGAIN_SECONDS:
            return False  # said before
        while not await self._is_there():
            if now() - since >= patience:
                self._say("did not come back within %g s", patience)
                return False
            await anyio.sleep(min(1.0, patience / 10))
        self._say("is back after %.0f s", now() - since)
        self._lost_at = None
        return True

    def _say(self, words: str, seconds: float) -> None:
        _log.warning(f"engine %s: %s {words}", self._client.name, self._client.url, seconds)

    async def _is_there(self) -> bool:
        self._looked_at = self._now()
        try:
            return (await self._client.look("/health")).status != 503
        except EngineError:
            return False


async def find_dialect(client: Client, name: str) -> Dialect:
    """The dialect of that name; "auto" asks each in turn.

    :raises UnsupportedByEngine: nothing known answers.
    """
    if name != "auto":
        return _KNOWN[name](client.options)
    replies = [(await client.look(path), candidate) for path, candidate in _AUTO]
    for reply, candidate in replies:
        if reply.status == 200:
            return _KNOWN[candidate](client.options)
    for reply, _ in replies:
        if reply.status in (401, 403):
            raise client.refusal(reply)
    advice = f"Is the URL right? Or say which dialect it speaks: {', '.join(DIALECTS)}"
    raise UnsupportedByEngine(client.name, f"nothing at {client.url} is known", advice)


async def identify(client: Client, dialect: Dialect, model: str) -> Identity:
    """Who answers.

    :raises UnsupportedByEngine: it speaks another dialect, or lacks the model.
    """
    try:
        return await dialect.identify(client, model)
    except ValueError as error:
        advice = "Is it another kind of server?"
        raise UnsupportedByEngine(
            client.name, f"{client.url} does not speak {dialect.name}", advice
        ) from error


def describe(name: str, dialect: Dialect, identity: Identity, tokenizer: Tokenizer) -> EngineSpec:
    """The server as an engine, before anything was seen of what it claims.

    :raises UnsupportedByEngine: it does not say how long its context is.
    """
    if identity.context_length <= dialect.spare:
        raise UnsupportedByEngine(name, "it does not say how long its context is")
    end: Any = getattr(tokenizer, "end_id", None)
    return EngineSpec(
        name=name,
        model=identity.model,
        tokenizer=tokenizer.digest,
        context_length=identity.context_length - dialect.spare,
        end_ids=tuple(getattr(tokenizer, "end_ids", () if end is None else (end,))),
        vocabulary=vocabulary_of(tokenizer),
        engine=identity.engine,
        dtype="of the server",
        logprobs=dialect.logprobs,
        capabilities=claimed(dialect),
    )


def claimed(dialect: Dialect) -> frozenset[Capability]:
    """What servers of this kind can do at best."""
    optional: dict[Capability, bool] = {
        "score": isinstance(dialect, Scorer),
        "rate": isinstance(dialect, Rater),
    }
    return frozenset({"sample", *(capability for capability, there in optional.items() if there)})


def require(
    name: str, identity: Identity, can: frozenset[Capability], needs: frozenset[Capability]
) -> None:
    """Refuse a kind of server that cannot do what is needed; one that scores can rate.

    :raises UnsupportedByEngine: naming what it lacks.
    """
    missing = needs - can - ({"rate"} if "score" in can else frozenset())
    if missing:
        problem = (
            f"{identity.engine} cannot {' or '.join(sorted(missing))}, which the pipeline needs"
        )
        raise UnsupportedByEngine(name, problem, "Serve this model with vLLM or SGLang")


async def open_tokenizer(wanted: Tokenizer | str | Path | None, hint: str, name: str) -> Tokenizer:
    """The tokenizer that was given, or the one at the folder or hub id that was named or that the
    server named.

    :raises ModelLoadError: there is none.
    """
    if wanted is not None and not isinstance(wanted, str | Path):
        return wanted
    return await to_thread.run_sync(_load_tokenizer, str(wanted or hint), name)


def _load_tokenizer(model: str, name: str) -> Tokenizer:
    from atts.models.folders import find_tokenizer
    from atts.models.tokenizers import ModelTokenizer

    return ModelTokenizer(find_tokenizer(model, name), name)


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """How many ids there are.

    :raises OptionError: the tokenizer does not say.
    """
    found: Any = getattr(tokenizer, "vocabulary", None)
    if not isinstance(found, int):
        raise OptionError(
            "tokenizer",
            f"{type(tokenizer).__name__} has no attribute `vocabulary`, the number of its ids",
        )
    return found
