"""HTTP servers for tests, which serve any engine with the API of a known server, and can simulate
faults.

The first part of the file is the server. Then each dialect has a section with its routes: the chat
API, llama.cpp, Ollama, SGLang and vLLM. The routes of SGLang and vLLM follow the sources of SGLang
0.5.23 and vLLM 0.33. The last section is a server of reward models.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import random
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args
from uuid import uuid4

import anyio
from anyio.from_thread import start_blocking_portal

from atts.core import Completion, Message, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import Engine
from atts.errors import ContextOverflow, EngineError, OptionError, UnsupportedByEngine, UsageError
from atts.sampling import Seed
from atts.testing.scripted import check_shares, drawn, spoilt

if TYPE_CHECKING:
    from aiohttp import web


T = TypeVar("T")
_BLOCK = 16
ServerDialect = Literal["vllm", "sglang", "llamacpp", "ollama", "chat"]
ServerFault = Literal[
    "refused", "reset", "429", "500", "truncated", "wrong_ids", "nan", "slow_loris", "hang"
]
"""Kinds of faults of a server.

429 and 500: the reply has this HTTP status. nan: a log-prob is NaN. wrong_ids: the reply has an
impossible token id, or another error if it has no ids. hang: the reply never comes. refused: the
server breaks the connection before it reads the request. reset: the connection breaks during the
reply. truncated: the reply is only the first half of its JSON. slow_loris: the server sends one
byte of the reply per second.
"""


@dataclass(frozen=True, slots=True)
class ServerFaults:
    """The probability of each kind of fault for a server's calls.

    For each call that requests tokens or scores, a seeded generator decides whether it has a fault,
    and which.

    :raises OptionError: a kind is unknown, or the shares are not probabilities or sum to more than
        1.
    """

    shares: Mapping[ServerFault, float] = field(default_factory=dict[ServerFault, float])
    seed: int = 0
    retry_after: str = "0"  # value of the header Retry-After in replies with status 429

    def __post_init__(self) -> None:
        check_shares(self.shares, get_args(ServerFault))


@dataclass(frozen=True, slots=True)
class ServerQuirks:
    """Settings of a test server that change its behaviour.

    - `cached_scores`: "on" opens vLLM's route that scores tokens after a cached prefix
      (--enable-scale-out). "refused" opens the route too, but refuses requests with the fields that
      scoring needs, as vLLM does on CPUs. "off" closes the route.
    - `logprobs`: "processed" returns, for sampled tokens, log-probs to which the temperature has
      been applied. This is SGLang's default, and an option of vLLM (--logprobs-mode).
    - `disconnect`: "ignore" continues a request after its client has disconnected, as some releases
      of real servers did. "abort" ends the request.
    - `scoring`: "ignored" accepts a scoring request but answers without scores, as llama.cpp and
      `transformers serve` do.
    - `version`: the version that the server reports; with "", the server reports a suitable
      version.
    - `speculation`: unless this is "off", the server reports that it speculates. "hot" writes
      garbage at temperatures above 0, as a vLLM build for CPUs did. "greedy" writes garbage at
      temperature 0. "lossless" does not change texts. Requests for a single token are served
      without speculation.
    - `acceptance`: for each position in a proposal, the probability that its token is accepted if
      all earlier tokens were accepted. The counters of a vLLM server follow these probabilities.
    - `prefill`: the condition for a chat API to continue the last message, if the assistant wrote
      it. "continue": the request has vLLM's two flags. "prefix": the message has the field
      "prefix". "trailing": always. "closed": never. If the message is not continued, it becomes a
      message of the user. "closed" and "prefix" also refuse fields that hosted servers do not know.
    - `ratings`: "off" refuses requests for the likeliest tokens.
    - `reasoning`: unless this is "off", the text before the answer is removed from the reply's
      content. It is put into the field with this name; in Ollama, the field is always "thinking".
      With "hidden", the reply does not contain this text, as with OpenAI, and only temperature 1 is
      accepted.
    - `thinking`: how vLLM treats a thinking budget. "closed" ends the think block when the budget
      is used up. "ignored" ignores the budget, as vLLM does with some kinds of speculation.
      "refused" refuses the request, as vLLM does without --reasoning-parser.
    """

    cached_scores: Literal["on", "refused", "off"] = "on"
    logprobs: Literal["raw", "processed", ""] = ""
    disconnect: Literal["abort", "ignore"] = "abort"
    scoring: Literal["honest", "ignored"] = "honest"
    version: str = ""
    prefill: Literal["continue", "prefix", "trailing", "closed"] = "continue"
    ratings: Literal["on", "off"] = "on"
    speculation: Literal["off", "lossless", "hot", "greedy"] = "off"
    acceptance: tuple[float, ...] = (0.8, 0.75, 0.7)
    reasoning: Literal["off", "reasoning", "reasoning_content", "hidden"] = "off"
    thinking: Literal["closed", "ignored", "refused"] = "closed"

    def written(self, request: SampleRequest) -> SampleRequest:
        """Return the request that the engine executes. To simulate broken speculation, its
        temperature is set to 8, at which the model writes garbage.
        """
        broken = "hot" if request.sampling.temperature else "greedy"
        # Real servers do not speculate in requests for a single token, so these stay correct.
        if self.speculation == broken and request.max_tokens > 1:
            return replace(request, sampling=Sampling(8.0))
        return request


NO_SERVER_FAULTS = ServerFaults()
PLAIN_SERVER = ServerQuirks()


class BlockCache:
    """A simulated prefix cache, in blocks of tokens. The last block of a prompt is always computed
    again, even if it is cached.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()

    def hit(self, ids: TokenIds) -> int:
        """Return how many ids at the start of `ids` are cached."""
        count = 0
        while count + _BLOCK < len(ids) and hash(ids[: count + _BLOCK]) in self._known:
            count += _BLOCK
        return count

    def keep(self, ids: TokenIds) -> None:
        """Mark the prefixes of these ids as cached."""
        self._known.update(hash(ids[:end]) for end in range(_BLOCK, len(ids) + 1, _BLOCK))


class Refusal(Exception):
    """The error of a route that refuses a request; it contains the HTTP status and the message of
    the reply.
    """

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Aborted(Refusal):
    """The error of a request that was aborted while the engine worked on it."""

    def __init__(self) -> None:
        super().__init__(499, "aborted")


@dataclass(slots=True)
class DraftCounter:
    """Counts of proposed and accepted tokens on a server that speculates. Accepted tokens are
    counted per position in a proposal.
    """

    rounds: int = 0
    proposed: int = 0
    accepted: list[int] = field(default_factory=list[int])

    def write(self, done: Completion, acceptance: tuple[float, ...]) -> None:
        """Simulate how speculation would write a text, and count the proposed and accepted tokens.
        `acceptance` has, for each position in a proposal, the probability that its token is
        accepted.
        """
        random_draw = random.Random(hash(done.ids))
        self.accepted = self.accepted or [0] * len(acceptance)
        left = len(done.ids)
        while left > 0:
            self.rounds += 1
            self.proposed += len(acceptance)
            left -= 1
            for place, chance in enumerate(acceptance):
                if random_draw.random() >= chance:
                    break
                self.accepted[place] += 1
                left -= 1


@dataclass(slots=True)
class ServerState:
    """The state of a server: its engine, its requests in progress, its cache and its quirks."""

    engine: Engine
    model: str
    quirks: ServerQuirks
    cache: BlockCache = field(default_factory=BlockCache)
    jobs: dict[str, anyio.CancelScope] = field(default_factory=dict[str, anyio.CancelScope])
    served: int = 0
    drafts: DraftCounter = field(default_factory=lambda: DraftCounter())

    @property
    def context_length(self) -> int:
        """Return the context length of the engine."""
        return self.engine.spec.context_length

    def abort(self, rid: str, match: Literal["exact", "prefix"] = "exact") -> None:
        """Cancel the request with the id `rid`. If `match` is "prefix", cancel all requests whose
        id begins with `rid`.
        """
        for name in list(self.jobs):
            if name == rid or (match == "prefix" and name.startswith(rid)):
                self.jobs[name].cancel()


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A request to a route: the server's state, the request's body and headers, and the fault to
    simulate.
    """

    state: ServerState
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    fault: ServerFault | None

    async def sample(
        self, request: SampleRequest, rid: str = "", *, spoil: bool = True
    ) -> Completion:
        """Return the engine's completion and its number of cached tokens. If `spoil` is true,
        corrupt the completion as this call's fault requires.

        :raises Aborted: the request was aborted before it was finished.
        """
        state = self.state
        done = await self._job(
            rid or f"job {id(request)}", lambda: state.engine.sample(state.quirks.written(request))
        )
        cached = state.cache.hit(request.ids)
        state.cache.keep(request.ids + done.ids)
        if state.quirks.speculation != "off" and request.max_tokens > 1:
            state.drafts.write(done, state.quirks.acceptance)
        done = spoilt(self.fault if spoil else None, done, state.engine.spec.vocabulary)
        return replace(done, cached_tokens=cached)

    async def score(self, ids: TokenIds, start: int, rid: str = "") -> tuple[TokenIds, Scores]:
        """Score the ids from `start` on. Return the scored ids and their scores, corrupted as this
        call's fault requires.

        :raises Aborted: the request was aborted before it was finished.
        """
        request = ScoreRequest(ids[:start], ids[start:])
        scores = await self._job(
            rid or f"job {id(request)}", lambda: self.state.engine.score(request)
        )
        if self.fault == "wrong_ids":
            return (*request.suffix[:-1], self.state.engine.spec.vocabulary + 7), scores
        return request.suffix, spoilt(self.fault, scores, self.state.engine.spec.vocabulary)

    async def _job(self, rid: str, work: Callable[[], Awaitable[T]]) -> T:
        state = self.state
        done = list[T]()
        with anyio.CancelScope() as scope:
            state.jobs[rid] = scope
            try:
                done.append(await work())
            finally:
                state.jobs.pop(rid, None)
        if not done:
            raise Aborted
        state.served += 1
        return done[0]

    def check_model(self) -> None:
        """Check that the call requests this server's model.

        :raises Refusal: the call requests another model.
        """
        if self.body.get("model") != self.state.model:
            raise Refusal(
                404,
                f"The model `{self.body.get('model')}` does not exist or you do not have access to "
                f"it.",
            )

    def check_room(self, ids: TokenIds, limit: int) -> None:
        """Check that the prompt and the requested tokens fit into the context.

        :raises Refusal: the prompt and the requested tokens do not fit into the context.
        """
        most = self.state.context_length
        wanted = len(ids) + limit
        if wanted > most:
            words = f"This model's maximum context length is {most} tokens. However, you requested {wanted} tokens."
            raise Refusal(400, words)

    def model_row(self, owner: str) -> dict[str, Any]:
        """Return the model's entry in the reply of /v1/models, with its context length."""
        model = self.state.model
        row = {"id": model, "object": "model", "owned_by": owner, "root": model, "parent": None}
        return row | {"max_model_len": self.state.context_length}

    def tokens(self, name: str) -> dict[str, Any]:
        """Return the reply of /tokenize; `name` is the field of the request with the string to
        encode.
        """
        tokens = self.state.engine.tokenizer.encode(self.body[name])
        return {"tokens": tokens, "count": len(tokens)}

    def gauges(self, running: str, waiting: str) -> str:
        """Return the reply of /metrics: the number of running requests, and 0 waiting requests."""
        labels = f'{{engine="0",model_name="{self.state.model}"}}'
        return f"{running}{labels} {float(len(self.state.jobs))}\n{waiting}{labels} 0.0\n"


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a dialect, keyed by path.

    Routes in `work` return tokens or scores, and can have faults. Routes in `questions` return
    facts about the server, and have no faults.
    """

    questions: Mapping[str, Callable[[ServerCall], Any]]
    work: Mapping[str, Callable[[ServerCall], Awaitable[Any]]]


def request_of(
    ids: TokenIds, limit: int, fields: Mapping[str, Any], default: Sampling, *, seed: str = "seed"
) -> SampleRequest:
    """Convert a client's request to a request for the engine.

    A sampling setting that the client did not send gets the server's default, which may differ from
    that of atts.
    """
    sampling = Sampling(
        float(fields.get("temperature", default.temperature)),
        max(0, int(fields.get("top_k", default.top_k))),
        float(fields.get("top_p", default.top_p)),
        float(fields.get("min_p", default.min_p)),
    )
    stop = fields.get("stop") or ()
    stop_ids = tuple(fields.get("stop_token_ids") or ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return SampleRequest(
        ids, limit, sampling, Seed(run=int(fields.get(seed) or 0)), stops, stop_ids
    )


def finish_word(done: Completion) -> Literal["stop", "length"]:
    """Return the finish reason: "length" if the text reached the token limit, otherwise "stop"."""
    return "length" if done.ended == "length" else "stop"


def shown(done: Completion, stop: tuple[str, ...]) -> str:
    """Return the text of a completion up to, but not including, the first stop string."""
    places = [done.text.find(word) for word in stop if word in done.text]
    return done.text[: min(places)] if places else done.text


class DialectServer:
    """A context manager that runs a server in a thread, on a port of the loopback address.

    At every start, the server calls `make` to get the engine that it serves. `kill` breaks all
    connections, and `restart` starts the server again on the same port. `faults` may be changed
    while the server runs. Requires aiohttp: `pip install 'atts[servers]'`.

    >>> from atts.testing import ScriptedEngine
    >>> import urllib.request
    >>> with DialectServer(ScriptedEngine, "vllm") as server:
    ...     urllib.request.urlopen(server.url + "/health").status
    200
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        dialect: ServerDialect = "vllm",
        *,
        model: str = "toy",
        key: str = "",
        quirks: ServerQuirks = PLAIN_SERVER,
        faults: ServerFaults = NO_SERVER_FAULTS,
        loading_seconds: float = 0.0,
        port: int = 0,
    ) -> None:
        if dialect not in get_args(ServerDialect):
            raise OptionError("dialect", f"{dialect!r} is unknown", get_args(ServerDialect))
        self.dialect: ServerDialect = dialect
        self.quirks = quirks
        self.faults = faults
        # the paths of all requests for tokens or scores that the server has received
        self.calls: list[str] = []
        self._make = make
        self._model = model
        # the API key that requests must have; tests may change it while the server runs
        self.key = key
        self._loading_seconds = loading_seconds
        self._port = port
        self._random = random.Random(faults.seed)
        self._open: ExitStack | None = None
        self._state: ServerState | None = None
        self._ready_at: float | None = None

    @property
    def url(self) -> str:
        """Return the URL of the server."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def running(self) -> int:
        """Return the number of requests in progress."""
        return len(self._state.jobs) if self._state else 0

    @property
    def served(self) -> int:
        """Return how many completions and scores the server has computed since its last start."""
        return self._state.served if self._state else 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server, and return when it accepts connections.

        :raises BaseException: the server cannot start.
        """
        assert self._open is None, "the server is already running"
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(self._serving()))
            self._open = stack.pop_all()

    def kill(self) -> None:
        """Break all connections and stop listening, as if the server's process was killed. A second
        call has no effect.
        """
        stack = self._open
        self._open = None
        if stack is not None:
            stack.close()

    def restart(self, *, quirks: ServerQuirks | None = None) -> None:
        """Kill the server, and start it again on the same port. If `quirks` is given, it replaces
        the old quirks.
        """
        self.kill()
        self.quirks = quirks or self.quirks
        self.start()

    @asynccontextmanager
    async def _serving(self) -> AsyncGenerator[None]:
        from aiohttp import web

        async with self._make() as engine:
            self._state = ServerState(engine, self._model, self.quirks)
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self._answer)
            cancels = self.quirks.disconnect == "abort"
            runner = web.AppRunner(
                app, handler_cancellation=cancels, access_log=None, shutdown_timeout=0.0
            )
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self._port, backlog=4096, reuse_address=True)
            await site.start()
            self._port = runner.addresses[0][1]
            self._ready_at = None
            yield
            for scope in list(self._state.jobs.values()):
                scope.cancel()
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        path = request.path
        if self._is_loading():
            return _error(503, "Loading model", "unavailable_error")
        if path == "/health":
            return web.Response()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _json({"error": "Unauthorized"}, 401)
        routes = routes_of(self.dialect)
        fault: ServerFault | None = None
        if path in routes.work:
            self.calls.append(path)
            fault = drawn(self.faults.shares, self._random.random()) if self.faults.shares else None
        elif path not in routes.questions:
            return _json({"detail": "Not Found"}, 404)
        return await self._respond(request, routes, fault)

    def _is_loading(self) -> bool:
        """Return True while the server pretends to load its model.

        The loading time begins at the first request, so that a client sees it even on a busy
        machine.
        """
        now = asyncio.get_running_loop().time()
        if self._ready_at is None:
            self._ready_at = now + self._loading_seconds
        return now < self._ready_at

    async def _respond(
        self, request: web.Request, routes: Routes, fault: ServerFault | None
    ) -> web.StreamResponse:
        from aiohttp import web

        state = self._state
        assert state is not None, "the server must have an engine to serve"
        if fault == "refused":
            return _broken(request)
        if fault == "429":
            return _json(
                {"error": {"message": "Too many requests"}},
                429,
                {"Retry-After": self.faults.retry_after},
            )
        if fault == "500":
            return _error(500, "Internal server error", "InternalServerError")
        if fault == "hang":
            await asyncio.sleep(3600)
        try:
            body: Any = await request.json() if request.can_read_body else {}
            call = ServerCall(state, body, request.headers, fault)
            path = request.path
            reply = (
                await routes.work[path](call)
                if path in routes.work
                else routes.questions[path](call)
            )
        except Refusal as refusal:
            return _error(refusal.status, str(refusal), "BadRequestError")
        except (
            UsageError,
            ContextOverflow,
            UnsupportedByEngine,
            KeyError,
            ValueError,
            TypeError,
        ) as error:
            return _error(400, str(error), "BadRequestError")
        except EngineError as error:
            return _error(500, str(error), "InternalServerError")
        if isinstance(reply, str):
            return web.Response(text=reply)
        return await _delivered(request, json.dumps(reply).encode(), fault)


async def _delivered(
    request: web.Request, data: bytes, fault: ServerFault | None
) -> web.StreamResponse:
    from aiohttp import web

    kind = "application/json"
    if fault == "truncated":
        return web.Response(body=data[: len(data) // 2], content_type=kind)
    if fault not in ("reset", "slow_loris"):
        return web.Response(body=data, content_type=kind)
    response = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": str(len(data))})
    await response.prepare(request)
    if fault == "reset":
        await response.write(data[: len(data) // 2])
        return _broken(request, response)
    for byte in data:
        await response.write(bytes([byte]))
        await asyncio.sleep(1.0)
    return response


def _broken(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    from aiohttp import web

    if request.transport is not None:
        request.transport.abort()
    return response or web.Response()


def _json(value: Any, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    from aiohttp import web

    return web.Response(
        body=json.dumps(value).encode(),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def _error(status: int, message: str, kind: str) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "code": status}}, status)


THINK = "<think>\n"
THINK_END = "\n</think>\n\n"
_ANSWER = "The answer"


def without_marks(text: str) -> str:
    """Remove the <think> tags around the reasoning in a text of the assistant. The toy model itself
    never writes such tags.
    """
    return text.replace(THINK, "").replace(THINK_END, "")


def split_reasoning(so_far: str, text: str) -> tuple[str, str]:
    """Split the text that continues `so_far` into reasoning and content. The content begins with
    "The answer".

    >>> split_reasoning("", "So 4.\\n\\nThe answer is 4.")
    ('So 4.\\n\\n', 'The answer is 4.')
    """
    if THINK_END in so_far:
        return "", text
    before = without_marks(so_far)
    start = (before + text).find(_ANSWER)
    if start < 0:
        return text, ""
    cut = max(0, start - len(before))
    return text[:cut], text[cut:]


# request fields that OpenAI and other hosted servers do not know, and therefore refuse
_STRICT = (
    "top_k",
    "min_p",
    "continue_final_message",
    "add_generation_prompt",
)


def chat_models(call: ServerCall) -> dict[str, Any]:
    """Answer GET /v1/models. The reply does not contain the context length."""
    return {
        "object": "list",
        "data": [{"id": call.state.model, "object": "model", "owned_by": "host"}],
    }


async def chat_completions(call: ServerCall) -> Any:
    """Answer POST /v1/chat/completions, with the quirks of the simulated chat server."""
    body = call.body
    quirks = call.state.quirks
    call.check_model()
    if quirks.prefill in ("closed", "prefix"):
        for name in _STRICT:
            if name in body:
                raise Refusal(400, f"Unrecognized request argument supplied: {name}")
    if quirks.reasoning == "hidden" and float(body.get("temperature", 1.0)) != 1.0:
        raise Refusal(
            400,
            f"Unsupported value: 'temperature' does not support {body['temperature']} with this "
            "model. Only the default (1) value is supported.",
        )
    ids = conversation(call, body["messages"])
    limit = int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)
    call.check_room(ids, limit)
    request = request_of(ids, limit, body, Sampling())
    done = await call.sample(request, spoil=False)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_word(done)}
    text = None if call.fault == "nan" else shown(done, request.stop)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    reasoning = ""
    if quirks.reasoning != "off" and text is not None:
        reasoning, content = split_reasoning(_so_far(body["messages"]), text)
        # For an empty content, vLLM's reasoning parsers send null, but OpenAI sends an empty text.
        message["content"] = content if quirks.reasoning == "hidden" else content or None
        if quirks.reasoning != "hidden":
            message[quirks.reasoning] = reasoning or None
    choice["message"] = message
    if body.get("logprobs"):
        if quirks.ratings == "off":
            raise Refusal(400, "You are not allowed to request logprobs from this model.")
        row = {"token": done.text, "logprob": done.logprobs[0]}
        choice["logprobs"] = {
            "content": [row | {"top_logprobs": await _digits(call, ids)}],
            "refusal": None,
        }
    usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": len(done.ids)}
    usage |= {"prompt_tokens_details": {"cached_tokens": done.cached_tokens}}
    if quirks.reasoning == "hidden":
        spent = len(call.state.engine.tokenizer.encode(reasoning))
        usage |= {"completion_tokens_details": {"reasoning_tokens": spent}}
    choices = [] if call.fault == "wrong_ids" else [choice]
    head = {"id": "chatcmpl-1", "object": "chat.completion", "model": call.state.model}
    return head | {"choices": choices, "usage": usage}


def conversation(call: ServerCall, rows: list[dict[str, Any]]) -> TokenIds:
    """Return the token ids of a conversation with these messages.

    The quirk `prefill` decides whether the answer continues a last message of the assistant.
    """
    messages = [Message(row["role"], without_marks(row["content"])) for row in rows]
    if messages and messages[-1].role == "assistant":
        wanted: dict[str, bool] = {
            "continue": call.body.get("continue_final_message") is True
            and call.body.get("add_generation_prompt") is False,
            "prefix": bool(rows[-1].get("prefix")),
            "trailing": True,
            "closed": False,
        }
        if not wanted[call.state.quirks.prefill]:
            # Like SGLang, treat the last message as one of the user, and report no error.
            messages[-1] = Message("user", messages[-1].content)
    return call.state.engine.tokenizer.render(messages)


def _so_far(rows: list[dict[str, Any]]) -> str:
    """Return the text that the answer continues: the last message if it is the assistant's,
    otherwise "".
    """
    return rows[-1]["content"] if rows and rows[-1]["role"] == "assistant" else ""


async def _digits(call: ServerCall, ids: TokenIds) -> list[dict[str, Any]]:
    """Return the ten digits with their log-probs, where a real server would return the likeliest
    tokens.
    """
    rows: list[dict[str, Any]] = []
    for digit in range(10):
        (token, *_) = call.state.engine.tokenizer.encode(str(digit))
        _, scores = await call.score((*ids, token), len(ids))
        rows.append({"token": str(digit), "logprob": scores.logprobs[0], "bytes": [48 + digit]})
    return rows


CHAT_ROUTES = Routes({"/v1/models": chat_models}, {"/v1/chat/completions": chat_completions})


_DEFAULT = Sampling(0.8, 40, 0.95, 0.05)


def props(call: ServerCall) -> dict[str, Any]:
    """Answer GET /props, llama.cpp's route for facts about the server."""
    state = call.state
    return {
        "default_generation_settings": {"n_ctx": state.context_length},
        "model_path": f"/models/{state.model}",
        "model_alias": state.model,
        "build_info": state.quirks.version or "b9200-00dc805",
    }


async def completion(call: ServerCall) -> Any:
    """Answer POST /completion, with llama.cpp's sampling defaults.

    If the request has a `logit_bias`, return the biased token and its log-probability.
    """
    body = call.body
    most = call.state.context_length
    ids = tuple(body["prompt"])
    limit = int(body.get("n_predict", -1))
    if len(ids) >= most:
        raise Refusal(400, f"the request exceeds the available context size ({most} tokens)")
    if body.get("logit_bias"):
        return await _forced(call, ids, int(body["logit_bias"][0][0]))
    limit = most - len(ids) if limit < 0 else min(limit, most - len(ids))
    request = request_of(ids, limit, body, _DEFAULT)
    done = await call.sample(request)
    word = (
        next((word for word in request.stop if word in done.text), "")
        if done.ended == "delimiter"
        else ""
    )
    return _reply(call.state, done, word)


async def ignoring(call: ServerCall) -> Any:
    """Answer POST /v1/completions, but never return log-probs of the prompt, even if they are
    requested.
    """
    prompt = call.body["prompt"]
    ids = call.state.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    done = await call.sample(
        SampleRequest(ids, max(1, int(call.body.get("max_tokens", 16))), Sampling(0.0))
    )
    rows = [
        {"id": token, "logprob": value}
        for token, value in zip(done.ids, done.logprobs, strict=True)
    ]
    return {
        "choices": [
            {
                "index": 0,
                "text": done.text,
                "finish_reason": "length",
                "logprobs": {"content": rows},
            }
        ]
    }


def _reply(state: ServerState, done: Completion, word: str) -> Any:
    pairs = list(zip(done.ids, done.logprobs, strict=True))
    # llama.cpp removes the log-probs of the stop word. It counts the tokens of the stop word alone,
    # and this count may differ from that inside the text.
    if word:
        pairs = pairs[: max(0, len(pairs) - len(state.engine.tokenizer.encode(word)))]
    kinds = {"length": "limit", "end": "eos", "delimiter": "word"}
    return {
        "content": done.text[: done.text.find(word)] if word else done.text,
        "tokens": done.ids,
        "stop": True,
        "stop_type": kinds[done.ended],
        "stopping_word": word,
        "completion_probabilities": [
            {"id": token, "logprob": value, "top_logprobs": []} for token, value in pairs
        ],
        "truncated": False,
        "timings": {"cache_n": done.cached_tokens},
    }


async def _forced(call: ServerCall, ids: TokenIds, token: int) -> Any:
    state = call.state
    ids_scored, scores = await call.score((*ids, token), len(ids))
    done = Completion(
        ids_scored, state.engine.tokenizer.decode((token,)), "length", scores.logprobs
    )
    return _reply(state, replace(done, cached_tokens=state.cache.hit(ids)), "")


LLAMACPP_ROUTES = Routes(
    {
        "/props": props,
        "/metrics": lambda call: f"llamacpp:requests_processing {len(call.state.jobs)}\n",
        "/tokenize": lambda call: call.tokens("content"),
    },
    {"/completion": completion, "/v1/completions": ignoring},
)


_SMALL = 64  # context length, in tokens, for requests that do not set it
_DEFAULT_OLLAMA = Sampling(0.8, 40, 0.9)


def tags(call: ServerCall) -> dict[str, Any]:
    """Answer GET /api/tags with the name of the server's model and the tag "latest"."""
    return {
        "models": [
            {"name": f"{call.state.model}:latest", "model": f"{call.state.model}:latest", "size": 1}
        ]
    }


def show(call: ServerCall) -> dict[str, Any]:
    """Answer POST /api/show, Ollama's route for facts about a model."""
    _check_model(call)
    return {
        "model_info": {"toy.context_length": call.state.context_length},
        "capabilities": ["completion"],
    }


async def chat(call: ServerCall) -> Any:
    """Answer POST /api/chat with Ollama's sampling defaults; streaming is not simulated.

    If the last message is from the assistant, the answer continues it.
    """
    body = call.body
    _check_model(call)
    if body.get("stream", True):
        raise Refusal(400, "this test server does not stream")
    options: Mapping[str, Any] = body.get("options") or {}
    ids = call.state.engine.tokenizer.render(
        [Message(row["role"], without_marks(row["content"])) for row in body["messages"]]
    )
    room = min(int(options.get("num_ctx", _SMALL)), call.state.context_length)
    if len(ids) >= room:
        if body.get("truncate") is False:
            raise Refusal(400, "the input length exceeds the context length")
        ids = ids[-room + 1 :]
    request = request_of(
        ids, min(int(options.get("num_predict", 128)), room - len(ids)), options, _DEFAULT_OLLAMA
    )
    done = await call.sample(request, spoil=False)
    text = None if call.fault == "nan" else shown(done, request.stop)
    message = {"role": "assistant", "content": text}
    if call.state.quirks.reasoning != "off" and text is not None:
        last = body["messages"][-1]
        so_far = last["content"] if last["role"] == "assistant" else ""
        message["thinking"], message["content"] = split_reasoning(so_far, text)
    reason = "load" if call.fault == "wrong_ids" else finish_word(done)
    counts = {"prompt_eval_count": len(ids), "eval_count": len(done.ids), "total_duration": 1}
    return {
        "model": body["model"],
        "message": message,
        "done": True,
        "done_reason": reason,
        **counts,
    }


def _check_model(call: ServerCall) -> None:
    if call.body.get("model") not in (call.state.model, f"{call.state.model}:latest"):
        raise Refusal(404, f"model {call.body.get('model')!r} not found")


OLLAMA_ROUTES = Routes(
    {
        "/api/version": lambda call: {"version": call.state.quirks.version or "0.12.11"},
        "/api/tags": tags,
        "/api/show": show,
    },
    {"/api/chat": chat},
)


def server_info(call: ServerCall) -> dict[str, str | None]:
    """Answer GET /server_info, SGLang's route for facts about the server."""
    model = call.state.model
    quirks = call.state.quirks
    algorithm = None if quirks.speculation == "off" else "STANDALONE"
    names = {"model_path": model, "tokenizer_path": model, "speculative_algorithm": algorithm}
    return {"version": quirks.version or "0.5.23", **names}


def abort_sglang(call: ServerCall) -> dict[str, str]:
    """Answer POST /abort_request: abort all requests whose id begins with `rid`. An empty `rid`
    aborts all requests.
    """
    call.state.abort(call.body["rid"], "prefix")
    return {}


async def generate_sglang(call: ServerCall) -> Any:
    """Answer POST /generate: sample new tokens or, if none are requested, score the input from
    `logprob_start_len` on.
    """
    body = call.body
    most = call.state.context_length
    ids = tuple(body["input_ids"])
    settings = body["sampling_params"]
    rid = str(body["rid"])
    if len(ids) >= most:
        raise Refusal(
            400,
            f"The input ({len(ids)} tokens) is longer than the model's context length ({most} "
            f"tokens).",
        )
    limit = int(settings.get("max_new_tokens", 128))
    if limit == 0:
        return await _scored(call, rid)
    # Like SGLang, lower the token limit if it exceeds the context, and report no error.
    limit = min(limit, most - len(ids) - 2)
    request = request_of(ids, limit, settings, Sampling(), seed="sampling_seed")
    try:
        return _completion(call.state, await call.sample(request, rid), request, rid)
    except Aborted:
        reason = {"type": "abort", "message": "Abort before prefill", "status_code": None}
        return {"text": "", "output_ids": [], "meta_info": {"id": rid, "finish_reason": reason}}


async def _scored(call: ServerCall, rid: str) -> Any:
    body = call.body
    state = call.state
    ids = tuple(body["input_ids"])
    start = int(body.get("logprob_start_len", -1))
    meta: dict[str, Any] = {
        "id": rid,
        "prompt_tokens": len(ids),
        "finish_reason": {"type": "length", "length": 0},
    }
    if body.get("return_logprob") and start >= 0 and state.quirks.scoring == "honest":
        if start > len(ids):
            raise Refusal(400, "logprob_start_len is beyond the input")
        cached = min(state.cache.hit(ids), start)
        ids_scored, scores = await call.score(ids, start + 1, rid)
        rows = [
            [value, token, None] for value, token in zip(scores.logprobs, ids_scored, strict=True)
        ]
        meta |= {"input_token_logprobs": [[None, ids[start], None], *rows], "cached_tokens": cached}
        state.cache.keep(ids)
    return {"text": "", "output_ids": [], "meta_info": meta}


def _completion(state: ServerState, done: Completion, request: SampleRequest, rid: str) -> Any:
    heat = request.sampling.temperature
    # Processed log-probs are those after temperature. Dividing raw log-probs by the temperature is
    # a rough approximation, because the results do not sum to probability 1.
    divide = heat if state.quirks.logprobs != "raw" and heat > 0 else 1.0
    rows = [
        [value / divide, token, None] for value, token in zip(done.logprobs, done.ids, strict=True)
    ]
    reason: dict[str, Any] = {"type": "length", "length": len(done.ids)}
    if done.ended != "length":
        matched = next((stop for stop in request.stop if stop in done.text), done.ids[-1])
        reason = {"type": "stop", "matched": matched}
    meta = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": len(request.ids),
        "completion_tokens": len(done.ids),
        "cached_tokens": done.cached_tokens,
        "output_token_logprobs": rows,
    }
    return {"text": done.text, "output_ids": done.ids, "meta_info": meta}


SGLANG_ROUTES = Routes(
    {
        "/server_info": server_info,
        "/v1/models": lambda call: {"object": "list", "data": [call.model_row("sglang")]},
        "/metrics": lambda call: call.gauges("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        "/tokenize": lambda call: call.tokens("prompt"),
        "/abort_request": abort_sglang,
    },
    {"/generate": generate_sglang},
)


# sampling settings for fields that a request omits; vLLM reads them from a model's
# generation_config.json
_DEFAULT_VLLM = Sampling(0.6, 20, 0.95)
_CLAMP = -9999.0
_THINK = "<think>"
_THINK_END = "</think>"


async def completions_vllm(call: ServerCall) -> Any:
    """Answer POST /v1/completions: continue a prompt of token ids, and score the prompt if
    requested.
    """
    body = call.body
    state = call.state
    call.check_model()
    rid = f"cmpl-{call.headers.get('X-Request-Id') or uuid4().hex}-0"
    ids = tuple(body["prompt"])
    limit = int(body.get("max_tokens", 16))
    call.check_room(ids, limit)
    wants_scores = body.get("prompt_logprobs") is not None
    choice: dict[str, Any] = {"index": 0, "prompt_logprobs": None}
    is_scored = wants_scores and state.quirks.scoring == "honest"
    if is_scored:
        rows: list[Any] = await _prompt_rows(call, ids, rid)
        choice["prompt_logprobs"] = rows
        for place in range(1, len(ids)) if body["prompt_logprobs"] else ():
            rows[place] |= await _likeliest(call, ids[:place], int(body["prompt_logprobs"]))
    request = request_of(ids, limit, body, _DEFAULT_VLLM)
    # If the reply has scores, the fault has changed these already, so the completion stays correct.
    done = await _thought(call, request, rid, spoil=not is_scored)
    text = done.text if body.get("include_stop_str_in_output") else shown(done, request.stop)
    choice |= {
        "text": text,
        "finish_reason": finish_word(done),
        "stop_reason": _stop_reason(done, request),
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = done.ids
    if body.get("logprobs") is not None:
        values = sent_logprobs(state, done, request)
        choice["logprobs"] = {
            "token_logprobs": values,
            "tokens": [f"token_id:{token}" for token in done.ids],
        }
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(done.ids)}
    details = {
        "prompt_tokens_details": {"cached_tokens": 0 if wants_scores else done.cached_tokens}
    }
    names = {"model": body["model"], "system_fingerprint": f"vllm-{state.quirks.version}"}
    return {
        "id": rid,
        "object": "text_completion",
        **names,
        "choices": [choice],
        "usage": usage | details,
    }


async def _thought(
    call: ServerCall, request: SampleRequest, rid: str, *, spoil: bool
) -> Completion:
    """Return a completion. If the prompt opens a think block, close the block when its token budget
    is used up.
    """
    budget = call.body.get("thinking_token_budget")
    quirks = call.state.quirks
    if budget is not None and quirks.thinking == "refused":
        raise Refusal(400, "thinking_token_budget is set but reasoning_config is not configured.")
    tokenizer = call.state.engine.tokenizer
    _, opened, thoughts = tokenizer.decode(request.ids).rpartition(_THINK)
    if budget is None or quirks.thinking == "ignored" or not opened or _THINK_END in thoughts:
        return await call.sample(request, rid, spoil=spoil)
    left = min(request.max_tokens, max(0, budget - len(tokenizer.encode(thoughts))))
    begun = Completion((), "", "length", ())
    if left:
        begun = await call.sample(replace(request, max_tokens=left), rid, spoil=spoil)
        if begun.ended != "length" or _THINK_END in begun.text or left == request.max_tokens:
            return begun
    end = tokenizer.encode(_THINK_END)[: request.max_tokens - left]
    ids = begun.ids + end
    logprobs = (*begun.logprobs, *[0.0] * len(end))
    if len(ids) == request.max_tokens:
        return Completion(ids, tokenizer.decode(ids), "length", logprobs, begun.cached_tokens)
    rest = await call.sample(
        replace(request, ids=request.ids + ids, max_tokens=request.max_tokens - len(ids)),
        rid,
        spoil=spoil,
    )
    text = tokenizer.decode(ids) + rest.text
    return Completion(ids + rest.ids, text, rest.ended, logprobs + rest.logprobs)


async def generate_vllm(call: ServerCall) -> Any:
    """Answer POST /inference/v1/generate: score the tokens after a prefix, which may be cached.

    If the cache also contains some of the tokens to score, the scores are null.
    """
    body = call.body
    state = call.state
    _check_open(call)
    if "token_ids" not in body:
        raise Refusal(400, "token_ids: field required")
    call.check_model()
    ids = tuple(body["token_ids"])
    settings = body["sampling_params"]
    start = int(settings["prompt_logprob_start"])
    wanted = settings["prompt_logprob_token_ids"]
    if state.quirks.cached_scores == "refused":
        raise Refusal(
            400,
            "prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1).",
        )
    rid = f"generate-tokens-{body['request_id']}"
    call.check_room(ids, int(settings["max_tokens"]))
    if len(wanted) != len(ids) - 1 - start:
        raise Refusal(
            400, f"prompt_logprob_token_ids has {len(wanted)} rows, expected {len(ids) - 1 - start}"
        )
    hit = 0 if settings.get("skip_reading_prefix_cache") else state.cache.hit(ids)
    packed = None
    if hit <= start and state.quirks.scoring == "honest":
        ids_scored, scores = await call.score(ids, start + 1, rid)
        # The reply has no ids that could be wrong, so the fault "wrong_ids" removes one score
        # instead.
        ids_lost = call.fault == "wrong_ids"
        packed = (
            _packed(scores.logprobs[:-1] if ids_lost else scores.logprobs) if ids_scored else None
        )
    state.cache.keep(ids)
    usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": hit}}
    return {
        "request_id": body["request_id"],
        "choices": [],
        "prompt_token_id_logprobs": packed,
        "usage": usage,
    }


def abort_vllm(call: ServerCall) -> str:
    """Answer POST /inference/v1/abort_requests: abort the requests with these ids; ignore unknown
    ids.
    """
    _check_open(call)
    for rid in call.body["request_ids"]:
        call.state.abort(rid)
    return ""


def _check_open(call: ServerCall) -> None:
    if call.state.quirks.cached_scores == "off":
        raise Refusal(403, "This endpoint is disabled; start with --enable-scale-out")


def sent_logprobs(state: ServerState, done: Completion, request: SampleRequest) -> list[float]:
    """Return the log-probs that the server sends for sampled tokens.

    With the quirk `logprobs` "processed", they are divided by the temperature, and also by 2 if
    sampling filters tokens. Both divisions are rough approximations of what a real server does.
    """
    heat = request.sampling.temperature
    is_cut = request.sampling != Sampling(request.sampling.temperature)
    divide = heat * (1 + is_cut) if state.quirks.logprobs == "processed" and heat > 0 else 1.0
    return [
        max(_CLAMP, value / divide) if not math.isnan(value) else value for value in done.logprobs
    ]


async def _prompt_rows(
    call: ServerCall, ids: TokenIds, rid: str
) -> list[dict[str, dict[str, Any]] | None]:
    ids_scored, scores = await call.score(ids, 1, rid)
    pairs = zip(ids_scored, scores.logprobs, strict=True)
    rows = [
        {str(token): {"logprob": max(_CLAMP, v) if v == v else v, "rank": 1}} for token, v in pairs
    ]
    return [None, *rows]


async def _likeliest(call: ServerCall, ids: TokenIds, top: int) -> dict[str, dict[str, Any]]:
    """Return the `top` likeliest tokens after these ids. To find them, the engine scores every
    token of the vocabulary.
    """
    found: list[tuple[float, int]] = []
    for token in range(call.state.engine.spec.vocabulary):
        scores = await call.state.engine.score(ScoreRequest(ids, (token,)))
        found.append((scores.logprobs[0], token))
    found.sort(reverse=True)
    return {
        str(token): {"logprob": max(_CLAMP, value), "rank": rank}
        for rank, (value, token) in enumerate(found[:top], start=1)
    }


def _packed(values: tuple[float, ...]) -> str:
    import numpy as np

    file = io.BytesIO()
    np.save(
        file,
        np.array(
            [max(_CLAMP, value) if value == value else value for value in values], "f4"
        ).reshape(-1, 1),
    )
    return base64.b64encode(file.getvalue()).decode()


def _stop_reason(done: Completion, request: SampleRequest) -> str | int | None:
    """Return the stop string or stop id that ended the text; None if the text ended for another
    reason.
    """
    if done.ended != "delimiter":
        return done.ids[-1] if done.ids[-1] in request.stop_ids else None
    return next((stop for stop in request.stop if stop in done.text), done.ids[-1])


def metrics(call: ServerCall) -> str:
    """Answer GET /metrics. If the server speculates, the reply includes its counters of
    speculation.
    """
    text = call.gauges("vllm:num_requests_running", "vllm:num_requests_waiting")
    if call.state.quirks.speculation == "off":
        return text
    drafts = call.state.drafts
    # The counters begin at high values, as if the server had run for a long time. This catches
    # clients that do not use differences between two replies.
    counts = {
        "drafts": 400_000 + drafts.rounds,
        "draft_tokens": 1_200_000 + drafts.proposed,
        "accepted_tokens": 900_000 + sum(drafts.accepted),
    }
    lines = [
        f'vllm:spec_decode_num_{name}_total{{engine="0"}} {float(count)}\n'
        for name, count in counts.items()
    ]
    for place, count in enumerate(drafts.accepted):
        labels = f'engine="0",position="{place}"'
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f"{name}{{{labels}}} {float(300_000 + count)}\n")
    return text + "".join(lines)


VLLM_ROUTES = Routes(
    {
        "/version": lambda call: {"version": call.state.quirks.version or "0.33.0"},
        "/v1/models": lambda call: {"object": "list", "data": [call.model_row("vllm")]},
        "/metrics": metrics,
        "/tokenize": lambda call: (
            call.tokens("prompt") | {"max_model_len": call.state.context_length}
        ),
        "/inference/v1/abort_requests": abort_vllm,
    },
    {"/v1/completions": completions_vllm, "/inference/v1/generate": generate_vllm},
)


_ROUTES: dict[ServerDialect, Routes] = {
    "chat": CHAT_ROUTES,
    "llamacpp": LLAMACPP_ROUTES,
    "ollama": OLLAMA_ROUTES,
    "sglang": SGLANG_ROUTES,
    "vllm": VLLM_ROUTES,
}


def routes_of(dialect: ServerDialect) -> Routes:
    """Return a dialect's routes: the function that answers each path."""
    return _ROUTES[dialect]


RewardRoute = Literal["/pooling", "/classify", ""]
Rewards = Callable[[str, Sequence[str]], float]
"""A function that takes a problem and the steps of a solution, and returns the probability that the
last step is correct.
"""


class RewardServer:
    """A context manager that runs a server of a reward model, whose rewards a Python function
    computes.

    vLLM's route `/pooling` returns one row of numbers for each separator. With `pools` "all", it
    returns a row for each word, as models without step pooling do. The route `/classify` returns
    one row for the whole text.

    In the dialect of SGLang, the server receives token ids. It converts them to text with `decode`,
    and treats the text as one step. If `route` is "", the server has no route for rewards, like the
    server of a model that generates text.

    >>> with RewardServer(lambda problem, steps: 0.9) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self,
        rewards: Rewards,
        dialect: Literal["vllm", "sglang"] = "vllm",
        *,
        model: str = "toy-prm",
        separator: str = "<extra_0>",
        route: RewardRoute = "/pooling",
        pools: Literal["step", "all"] = "step",
        numbers: int = 2,
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
    ) -> None:
        self.rewards = rewards
        self.dialect = dialect
        self.model = model
        self.separator = separator
        self.route = "/classify" if dialect == "sglang" and route else route
        self.pools = pools
        self.numbers = numbers  # how many rewards a row of a reply contains
        self.decode = decode
        # bodies of all requests for rewards that the server has received
        self.bodies: list[dict[str, Any]] = []
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Return the URL of the server."""
        assert self._http is not None, "the server has a URL only while it is open"
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def address(self) -> str:
        """Return the server's address in the form that the setting `score.reward` requires."""
        return f"{self.dialect}:{self.url}/{self.model}"

    def __enter__(self) -> Self:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                found = self.path == "/v1/models"
                self._reply(
                    200 if found else 404, {"data": [{"id": server.model}]} if found else {}
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != server.route:
                    self._reply(404, {"detail": "Not Found"})
                    return
                server.bodies.append(body)
                self._reply(200, server.answer(body))

            def log_message(self, format: str, *args: Any) -> None:
                """Do nothing, because the server must not print log lines."""

            def _reply(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def answer(self, body: dict[str, Any]) -> Any:
        """Return the reply to a request for rewards."""
        if self.dialect == "sglang":
            text = self.decode(body["input_ids"])
            return [{"embedding": self.row(self.rewards("", [text])), "meta_info": {}}]
        problem = body["messages"][0]["content"]
        text = body["messages"][-1]["content"]
        if self.route == "/classify":
            row = self.row(self.rewards(problem, [text]))
            return {"object": "list", "data": [{"index": 0, "probs": row, "num_classes": len(row)}]}
        steps = text.split(self.separator)[:-1] if self.pools == "step" else text.split()
        rows = [self.row(self.rewards(problem, steps[: n + 1])) for n in range(len(steps))]
        return {"object": "list", "data": [{"index": 0, "object": "pooling", "data": rows}]}

    def row(self, chance: float) -> list[float]:
        """Return a reward in the form that a reward model sends: a row of numbers."""
        return [1 - chance, chance] if self.numbers == 2 else [chance] * self.numbers
