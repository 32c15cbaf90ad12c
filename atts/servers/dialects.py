"""The base classes of the server dialects (vLLM, SGLang, llama.cpp, Ollama, chat API), and the
helpers they share.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atts.core import SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.errors import UnsupportedByEngine
from atts.servers.client import Call, Client
from atts.servers.options import RemoteOptions
from atts.servers.replies import ModelRow, ModelRows, Tokenized, decode
from atts.servers.transport import HttpReply

LogProbs = Literal["raw", "processed", "none"]


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
class RawCompletion:
    """A server's completion before it was checked; a log-prob is None where the raw one was not
    sent.
    """

    ids: TokenIds
    logprobs: tuple[float | None, ...]
    finish: Literal["stop", "length"]
    cached_tokens: int = 0


class Dialect(ABC):
    """How one kind of server is spoken to.

    Reading raises ValueError on a reply of another shape; the engine makes it a BadReply. What only
    some servers can do is in `Scorer`, `Forcer` and `Rater`.
    """

    name: str
    speaks: Literal["ids", "text"] = "ids"
    spare: int = 1  # places of the context that the server needs for itself
    logprobs: LogProbs = "raw"  # what comes with sampled tokens, unless the probe finds otherwise
    cuts_logprobs = False  # whether processed ones are of what top-k, top-p and min-p leave
    priority_sign = 1  # -1 where a higher number means sooner

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._model = ""

    @abstractmethod
    async def identify(self, client: Client, model: str) -> Identity:
        """Ask who is there; remembers model and routes for the calls to come.

        :raises UnsupportedByEngine: another kind of server, or it does not have that model.
        """

    @abstractmethod
    def sampling(self, request: SampleRequest, rid: str) -> Call:
        """The call that continues these ids."""

    @abstractmethod
    def sampled(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """Its reply."""

    def abort(self, rid: str) -> Call | None:
        """The call that frees a request; None where closing the connection is all there is."""
        return None

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """The server's own ids of a text, no special token added; never asked where text is spoken."""
        raise AssertionError("no ids are spoken")

    async def running(self, client: Client) -> int | None:
        """How many requests the server is working on; None when it does not say."""
        return None

    async def speculation(self, client: Client) -> str | None:
        """How the server speculates, in words: "" where it does not, None where it does not say."""
        return None

    def _priority(self, request: SampleRequest | ScoreRequest) -> dict[str, int]:
        """The field for a request's priority, in the server's direction; nothing where priorities
        are not sent.
        """
        priority = request.priority if self._options.priorities == "send" else 0
        return {"priority": self.priority_sign * priority} if priority else {}


class Scorer(Dialect):
    """A dialect that can score a given suffix."""

    @abstractmethod
    def scoring(self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]) -> Call:
        """The call that scores the suffix."""

    @abstractmethod
    def scored(self, reply: bytes, request: ScoreRequest) -> Scores | None:
        """Its reply; None when scores are missing because they were cached, and skipping the cache
        would help.
        """


class Forcer(Dialect):
    """A dialect without scores that can be made to write a given token, which tells its
    log-probability.
    """

    @abstractmethod
    def forcing(self, ids: TokenIds, token: int) -> Call:
        """The call that writes this very token."""

    @abstractmethod
    def forced(self, reply: bytes, token: int) -> float:
        """Its reply."""


class Rater(Dialect):
    """A dialect that tells the likeliest next tokens with their log-probabilities: enough for a
    rating of one digit.
    """

    @abstractmethod
    def rating(self, ids: TokenIds, rid: str) -> Call:
        """The call for one token and its alternatives."""

    @abstractmethod
    def rated(self, reply: bytes) -> dict[str, float]:
        """Its reply: log-probability by text."""


def sampling_fields(sampling: Sampling, *, no_top_k: int = 0) -> dict[str, float]:
    """The sampling distribution in the names all servers share; every field is sent, for defaults
    differ.
    """
    top_k = sampling.top_k or no_top_k
    return {
        "temperature": sampling.temperature,
        "top_k": top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


def seed_of(request: SampleRequest, bits: int) -> int:
    """The request's seed as the server takes it."""
    return request.seed.key() & ((1 << bits) - 1)


def json_of(client: Client, reply: HttpReply, kind: Any) -> Any:
    """What a 200 says, as a value of that type.

    :raises ValueError: it is no such value.
    :raises EngineError: any other status.
    """
    if reply.status != 200:
        raise client.refusal(reply)
    return decode(reply.body, kind)


async def json_at(client: Client, path: str, kind: Any, body: dict[str, Any] | None = None) -> Any:
    """The JSON at a path."""
    return json_of(client, await client.look(path, body), kind)


def choose_model(client: Client, models: Sequence[ModelRow], wanted: str) -> ModelRow:
    """The row of /v1/models that is meant; the only one when none is named.

    :raises UnsupportedByEngine: it is not there, or several are and none is named.
    """
    names = [row.id for row in models]
    if wanted:
        for row in models:
            if wanted in (row.id, row.root):
                return row
        raise UnsupportedByEngine(
            client.name, f"{client.url} has no model {wanted!r}", f"It has {', '.join(names)}"
        )
    base = [row for row in models if not row.parent]
    if len(base) != 1:
        raise UnsupportedByEngine(
            client.name, f"{client.url} has {len(base)} models", f"Name one: {', '.join(names)}"
        )
    return base[0]


def short(version: str) -> str:
    """major.minor of a version."""
    return ".".join(version.split("+")[0].split(".")[:2])


async def served(client: Client, model: str) -> ModelRow:
    """The row of /v1/models that is meant; see `choose_model`."""
    return choose_model(client, (await json_at(client, "/v1/models", ModelRows)).data, model)


async def tokens_of(client: Client, body: dict[str, Any]) -> TokenIds:
    """What /tokenize makes of a text."""
    found: Tokenized = await json_at(client, "/tokenize", Tokenized, body)
    return found.tokens


async def in_queue(client: Client, running: str, waiting: str = "") -> int | None:
    """Requests at work and waiting, from the gauges of that name at /metrics; None when they are
    not there.
    """
    text = (await client.look("/metrics")).body.decode(errors="replace")
    found = metric(text, running)
    return None if found is None else found + (metric(text, waiting) or 0 if waiting else 0)


def metric(text: str, name: str) -> int | None:
    """The sum of one gauge or counter in Prometheus' text format; None when it is not there."""
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    counts = [
        re.fullmatch(r"\d{1,15}(\.\d{0,15})?(e\+0\d)?", line.rsplit(" ", 1)[-1]) for line in lines
    ]
    return sum(int(float(count[0])) for count in counts if count) if lines and all(counts) else None
