"""HTTP servers around any engine that speak a serving engine's dialect, quirks included, and fail
on demand.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

import anyio
from anyio.from_thread import start_blocking_portal

from atts.core import Completion, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import Engine
from atts.errors import ContextOverflow, EngineError, OptionError, UnsupportedByEngine, UsageError
from atts.sampling import Seed
from atts.testing.faults import check_shares, drawn, spoilt

if TYPE_CHECKING:
    from aiohttp import web


T = TypeVar("T")
_BLOCK = 16
ServerDialect = Literal["vllm", "sglang", "llamacpp", "ollama", "chat"]
ServerFault = Literal[
    "refused", "reset", "429", "500", "truncated", "wrong_ids", "nan", "slow_loris", "hang"
]
"""refused: closed unread. reset: broken off in mid-reply. truncated: half the JSON. slow_loris: a
byte now and then.
"""


@dataclass(frozen=True, slots=True)
class ServerFaults:
    """The share of the calls that do work which fail, and how; drawn for every call from a seed.

    :raises OptionError: an unknown kind, or shares that are not probabilities or sum to more than 1.
    """

    shares: Mapping[ServerFault, float] = field(default_factory=dict[ServerFault, float])
    seed: int = 0
    retry_after: str = "0"  # said with a 429

    def __post_init__(self) -> None:
        check_shares(self.shares, get_args(ServerFault))


@dataclass(frozen=True, slots=True)
class ServerQuirks:
    """Settings of a server that change what a client sees.

    `cached_scores` opens vLLM's route that scores from the cache (--enable-scale-out); "refused":
    it is open, and does not take what scoring needs, as on processors. `logprobs` "processed" gives
    sampled log-probs after temperature: SGLang's default, vLLM's --logprobs-mode. `disconnect`
    "ignore" leaves ghosts running when a client goes away, as some releases did. `scoring`
    "ignored" takes a scoring request and answers without scores, as llama.cpp and `transformers
    serve` do. `version` is what it says it is; "" its dialect's. `speculation` other than "off" is
    reported as that server reports it; "hot" writes garbage at temperatures above 0, as a vLLM for
    processors did, "greedy" strays at temperature 0, "lossless" changes nothing; a request for one
    token is never speculated. `acceptance` is the chance of each proposed token, where all before
    it were accepted; the counters of a vLLM server follow it. `prefill` is when a chat API
    continues with a last assistant message: set by vLLM's two flags, by a mark on the message,
    always, or never (it becomes a user's); "closed" and "prefix" also refuse fields that hosted
    models do not know. `ratings` "off": it tells no likely tokens. `reasoning` other than "off"
    takes what comes before the answer out of the content: into a field of that name (Ollama's is
    "thinking" in any case), or "hidden", as OpenAI does, whose models are sampled at temperature 1
    only. `thinking` is what vLLM does with a thinking budget: close the block, ignore the budget as
    with some kinds of speculation, or refuse it, as without --reasoning-parser.
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
        """Return the request as it is carried out: broken speculation draws otherwise."""
        broken = "hot" if request.sampling.temperature else "greedy"
        # A request for one token is never speculated.
        if self.speculation == broken and request.max_tokens > 1:
            return replace(request, sampling=Sampling(8.0))
        return request


NO_SERVER_FAULTS = ServerFaults()
PLAIN_SERVER = ServerQuirks()


class BlockCache:
    """The prefixes that a server has computed, in whole blocks.

    The last block of a prompt is always computed again.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()

    def hit(self, ids: TokenIds) -> int:
        """Return the number of leading ids that are cached."""
        count = 0
        while count + _BLOCK < len(ids) and hash(ids[: count + _BLOCK]) in self._known:
            count += _BLOCK
        return count

    def keep(self, ids: TokenIds) -> None:
        """Note that these ids have been computed."""
        self._known.update(hash(ids[:end]) for end in range(_BLOCK, len(ids) + 1, _BLOCK))


class Refusal(Exception):
    """The server refuses a request: with which status, and which words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Aborted(Refusal):
    """A request was aborted while it was worked on."""

    def __init__(self) -> None:
        super().__init__(499, "aborted")


@dataclass(slots=True)
class DraftCounter:
    """Counts what a server that speculates proposed, and how much of it was accepted, by place."""

    rounds: int = 0
    proposed: int = 0
    accepted: list[int] = field(default_factory=list[int])

    def write(self, done: Completion, acceptance: tuple[float, ...]) -> None:
        """Count the rounds in which a text was written: each place is accepted with its chance."""
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
    """The engine of a server with its jobs by request id, its cache and its quirks."""

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
        """Free a request, or all whose id begins so."""
        for name in list(self.jobs):
            if name == rid or (match == "prefix" and name.startswith(rid)):
                self.jobs[name].cancel()


@dataclass(frozen=True, slots=True)
class ServerCall:
    """One call of a route: the server's state, the body and headers sent, and the call's fault."""

    state: ServerState
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    fault: ServerFault | None

    async def sample(
        self, request: SampleRequest, rid: str = "", *, spoil: bool = True
    ) -> Completion:
        """Return a completion, spoilt if the fault says so, its cached tokens counted.

        :raises Aborted: it was aborted under way.
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
        """Return the ids from `start` on and their scores, spoilt if the fault says so.

        :raises Aborted: it was aborted under way.
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
        """Refuse a call that names another model.

        :raises Refusal: it does.
        """
        if self.body.get("model") != self.state.model:
            raise Refusal(
                404,
                f"The model `{self.body.get('model')}` does not exist or you do not have access to "
                f"it.",
            )

    def check_room(self, ids: TokenIds, limit: int) -> None:
        """Refuse what does not fit the context.

        :raises Refusal: it does not.
        """
        most = self.state.context_length
        wanted = len(ids) + limit
        if wanted > most:
            words = f"This model's maximum context length is {most} tokens. However, you requested {wanted} tokens."
            raise Refusal(400, words)

    def model_row(self, owner: str) -> dict[str, Any]:
        """Return the model, as /v1/models lists it where the context is reported."""
        model = self.state.model
        row = {"id": model, "object": "model", "owned_by": owner, "root": model, "parent": None}
        return row | {"max_model_len": self.state.context_length}

    def tokens(self, name: str) -> dict[str, Any]:
        """Return the reply of /tokenize: the ids of the text under that name."""
        tokens = self.state.engine.tokenizer.encode(self.body[name])
        return {"tokens": tokens, "count": len(tokens)}

    def gauges(self, running: str, waiting: str) -> str:
        """Return the reply of /metrics: the requests at work, and none waiting."""
        labels = f'{{engine="0",model_name="{self.state.model}"}}'
        return f"{running}{labels} {float(len(self.state.jobs))}\n{waiting}{labels} 0.0\n"


@dataclass(frozen=True, slots=True)
class Routes:
    """The paths of a dialect. Requests for tokens or scores fail on demand; questions about the server do not."""

    questions: Mapping[str, Callable[[ServerCall], Any]]
    work: Mapping[str, Callable[[ServerCall], Awaitable[Any]]]


def request_of(
    ids: TokenIds, limit: int, fields: Mapping[str, Any], default: Sampling, *, seed: str = "seed"
) -> SampleRequest:
    """Return the engine's request.

    A field that was not sent has the server's own default, which is not neutral.
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
    """Return why it ended: a stop string and the model's own end are one word."""
    return "length" if done.ended == "length" else "stop"


def shown(done: Completion, stop: tuple[str, ...]) -> str:
    """Return the text up to the first stop string, which is left out."""
    places = [done.text.find(word) for word in stop if word in done.text]
    return done.text[: min(places)] if places else done.text


class DialectServer:
    """A server in a thread, on a loopback port, from `with` to the end of the block.

    `make` makes the engine it serves, again at every start. `kill` breaks every connection off,
    `restart` begins again on the same port; `faults` may be set while it runs. Needs aiohttp: `pip
    install 'atts[servers]'`.

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
        self.calls: list[str] = []  # the path of every call that does work
        self._make = make
        self._model = model
        self.key = key  # key that the server requires; may be changed while it runs
        self._loading_seconds = loading_seconds
        self._port = port
        self._random = random.Random(faults.seed)
        self._open: ExitStack | None = None
        self._state: ServerState | None = None
        self._ready_at: float | None = None

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def running(self) -> int:
        """Return the number of requests in progress."""
        return len(self._state.jobs) if self._state else 0

    @property
    def served(self) -> int:
        """Return the number of completions and scores given since its start."""
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
        """Listen; returns when it does.

        :raises BaseException: what kept it from starting.
        """
        assert self._open is None, "it runs already"
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(self._serving()))
            self._open = stack.pop_all()

    def kill(self) -> None:
        """Break off every connection and stop listening, as a killed process does.

        Killing twice is fine.
        """
        stack = self._open
        self._open = None
        if stack is not None:
            stack.close()

    def restart(self, *, quirks: ServerQuirks | None = None) -> None:
        """Kill it and begin again on the same port, with other quirks if given."""
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
        """Return whether it still loads.

        Loading begins with the first look, so that it is seen however busy the machine is.
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
        assert state is not None, "it serves while it has an engine"
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


def routes_of(dialect: ServerDialect) -> Routes:
    """Return the paths of a dialect, and what answers them."""
    routes: Routes = importlib.import_module(f"atts.testing.servers_{dialect}").ROUTES
    return routes


THINK = "<think>\n"
THINK_END = "\n</think>\n\n"
_ANSWER = "The answer"


def without_marks(text: str) -> str:
    """Return a text of the assistant as its model wrote it, without the marks around reasoning."""
    return text.replace(THINK, "").replace(THINK_END, "")


def split_reasoning(so_far: str, text: str) -> tuple[str, str]:
    """Divide what continues a text into reasoning, and content from the answer's sentence on.

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
