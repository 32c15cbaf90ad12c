"""What a kind of server must tell us how to do: ask, read, abort; everything in pure functions but the questions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from atts.core import SampleRequest, ScoreRequest, Scores, TokenIds
from atts.errors import UnsupportedByEngine
from atts.remote.client import Call, Client
from atts.remote.transport import Reply

CLAMPED = -9999.0  # vLLM's way to write minus infinity in JSON


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answers at a URL."""

    engine: str  # kind and major.minor version, such as "vllm 0.33"
    version: str
    model: str
    context_length: int
    tokenizer: str = ""  # where the server took it from, when it says
    routes: frozenset[str] = frozenset()  # optional ones that are open


@dataclass(frozen=True, slots=True)
class Sampled:
    """A server's completion before anybody believed it; a log-prob is None where the raw one was not sent."""

    ids: TokenIds
    logprobs: tuple[float | None, ...]
    finish: Literal["stop", "length"]
    cached_tokens: int = 0


class Dialect(Protocol):
    """How one kind of server is spoken to.

    Reading raises KeyError, IndexError, TypeError or ValueError on a reply of another shape; the engine makes it a
    BadReply.
    """

    name: str
    can_score: bool
    spare: int  # places of the context that the server needs for itself
    logprobs: Literal["raw", "processed"]  # what comes with sampled tokens, unless the probe finds otherwise

    async def identify(self, client: Client, model: str) -> Identity:
        """Ask who is there; remembers model and routes for the calls to come.

        :raises UnsupportedByEngine: another kind of server, or it does not have that model.
        """
        ...

    def sampling(self, request: SampleRequest, rid: str) -> Call:
        """The call that continues these ids."""
        ...

    def sampled(self, reply: Any, request: SampleRequest) -> Sampled:
        """Its reply."""
        ...

    def scoring(self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]) -> Call:
        """The call that scores the suffix."""
        ...

    def scored(self, reply: Any, request: ScoreRequest) -> Scores | None:
        """Its reply; None when scores are missing because they were cached, and skipping the cache would help."""
        ...

    def forcing(self, ids: TokenIds, token: int) -> Call | None:
        """A call that writes this very token, for its log-probability; None where that cannot be asked."""
        ...

    def forced(self, reply: Any, token: int) -> float:
        """Its reply."""
        ...

    def abort(self, rid: str) -> Call | None:
        """The call that frees a request; None where closing the connection is all there is."""
        ...

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """The server's own ids of a text, no special token added."""
        ...

    async def running(self, client: Client) -> int | None:
        """How many requests the server is working on; None when it does not say."""
        ...


def seed_of(request: SampleRequest, bits: int) -> int:
    """The request's seed as the server takes it."""
    return request.seed.key() & ((1 << bits) - 1)


def logprob_of(value: float) -> float:
    """A log-probability as sent; what was clamped for JSON is minus infinity again."""
    return float("-inf") if value <= CLAMPED else float(value)


def finish_of(word: object) -> Literal["stop", "length"]:
    """Why a server stopped.

    :raises ValueError: for another reason, such as an abort that was not ours.
    """
    if word == "stop":
        return "stop"
    if word == "length":
        return "length"
    raise ValueError(f"it ended because of {word!r}")


def json_of(client: Client, reply: Reply, path: str) -> Any:
    """What a 200 says.

    :raises EngineError: any other status, or no JSON.
    """
    if reply.status != 200:
        raise client.refusal(reply)
    try:
        return json.loads(reply.body)
    except ValueError as error:
        raise UnsupportedByEngine(client.name, f"{client.url}{path} does not answer in JSON") from error


async def json_at(client: Client, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON at a path."""
    method: Literal["GET", "POST"] = "GET" if body is None else "POST"
    return json_of(client, await client.look(path, body, method=method), path)


def choose_model(client: Client, models: list[dict[str, Any]], wanted: str) -> dict[str, Any]:
    """The row of /v1/models that is meant; the only one when none is named.

    :raises UnsupportedByEngine: it is not there, or several are and none is named.
    """
    names = [str(row.get("id")) for row in models]
    if wanted:
        for row in models:
            if wanted in (row.get("id"), row.get("root")):
                return row
        raise UnsupportedByEngine(client.name, f"{client.url} has no model {wanted!r}", f"It has {', '.join(names)}")
    base = [row for row in models if not row.get("parent")]
    if len(base) != 1:
        raise UnsupportedByEngine(client.name, f"{client.url} has {len(base)} models", f"Name one: {', '.join(names)}")
    return base[0]


def short(version: str) -> str:
    """major.minor of a version."""
    return ".".join(version.split("+")[0].split(".")[:2])


def metric(text: str, name: str) -> int | None:
    """The sum of one gauge in Prometheus' text format; None when it is not there."""
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines)) if lines else None
