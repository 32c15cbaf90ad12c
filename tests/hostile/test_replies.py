"""Tests of malformed replies: each number, word and list of a valid reply is replaced by an
impossible value.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from itertools import count
from typing import Any, TypeVar, cast

import pytest

from atts.core import Message, SampleRequest, Sampling, ScoreRequest
from atts.engine import Tokenizer
from atts.errors import BadReply, EngineError
from atts.servers import DIALECTS, RemoteOptions
from atts.servers.chat import TextDialect, TextTokenizer
from atts.servers.client import Call, Client, HttpReply, Traffic
from atts.servers.dialect import DialectClient
from atts.servers.engine import describe, find_dialect, identify
from atts.testing import ScriptedEngine, ServerQuirks, ToyTokenizer
from atts.testing.servers import Refusal, ServerCall, ServerState, routes_of

pytestmark = pytest.mark.anyio
T = TypeVar("T")


@pytest.fixture
def anyio_backend() -> str:
    """Use one back end only, because reading a reply waits for nothing."""
    return "asyncio"


KINDS = ("vllm without the cache", *sorted(DIALECTS))
TEXT_KINDS = [name for name, kind in DIALECTS.items() if issubclass(kind, TextDialect)]
NAN = float("nan")
IMPOSSIBLE: tuple[Any, ...] = (
    True, False, "1", "-0.5", NAN, float("inf"), 1e308, -1e18, 10**30, -(10**30), 10**400, [], {}, [[]], {"a": 1},
    "\ud800",
)  # fmt: skip
"""Values that are impossible in place of a number, a list or an object."""
SHAPES = (
    b"", b"null", b"[]", b"{}", b'"x"', b"1e999", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"NaN", b"\x00",
    b'{"choices": ' + b"[" * 5000 + b"]" * 5000 + b"}",
)  # fmt: skip
QUESTION = [Message("user", "Start at 4. +3. What is the result?")]


class Canned:
    """A client that calls a server in this process. Fixed replies may replace the server's replies
    to one path or to all paths.
    """

    name = "hostile"
    url = "http://hostile"
    options = RemoteOptions()

    def __init__(self, kind: str, engine: ScriptedEngine) -> None:
        quirks = ServerQuirks(cached_scores="off") if "without" in kind else ServerQuirks()
        self.state = ServerState(engine, "toy", quirks)
        self.routes = routes_of(cast(Any, kind.split()[0]))
        self.prefix = "/v1" if kind == "chat" else ""
        self.replies: dict[str, bytes] = {}
        self.heard: dict[str, Any] = {}
        self.traffic = Traffic()

    async def ask(
        self, make: Callable[[str], Call], read: Callable[[bytes], T], abort: Any, tokens: int
    ) -> T:
        """Send one call and read its reply, as a real client does."""
        call = make("0" * 32)
        return read((await self.look(call.path, call.body)).body)

    async def look(self, path: str, body: Any = None) -> HttpReply:
        """Return the fixed reply to this path if there is one; otherwise call the server."""
        path = self.prefix + path
        if (text := self.replies.get(path, self.replies.get("*"))) is not None:
            return HttpReply(200, text)
        sent = ServerCall(self.state, json.loads(json.dumps(body or {})), {}, None)
        try:
            known = path in self.routes.work
            reply = (
                await self.routes.work[path](sent) if known else self.routes.questions[path](sent)
            )
        except (Refusal, KeyError) as error:
            return HttpReply(getattr(error, "status", 404), b"")
        text = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.heard[path] = text
        return HttpReply(200, text)

    def refusal(self, reply: HttpReply) -> EngineError:
        return EngineError(self.name, str(reply.status))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of a JSON value."""
    if path:
        yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, part in cast(Any, items):
        yield from places(part, (*path, name))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return the value with one part changed or removed."""
    changed = deepcopy(value)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = new
    return changed


def spoilt(text: bytes) -> Iterator[tuple[tuple[Any, ...], Any, bytes]]:
    """Yield the JSON text with each part replaced by each impossible value, with the name of the
    part and the value.
    """
    try:
        whole = json.loads(text)
    except ValueError:
        return  # a reply with the server's metrics is not JSON but text
    for path in places(whole):
        for new in IMPOSSIBLE:
            if not may_be(path[-1], new):
                yield path, new, json.dumps(replaced(whole, path, new)).encode()


def may_be(name: Any, new: Any) -> bool:
    """Return whether a correct server may send the value `new` in the field `name`.

    Strings may be any text. Counts may be missing, and so may log-probabilities of llama.cpp.
    """
    if isinstance(new, str):
        return name in ("content", "token", "finish_reason")
    if isinstance(new, dict):
        return name in ("usage", "prompt_tokens_details", "timings")
    return bool(new == []) and name == "completion_probabilities"


@asynccontextmanager
async def opened(kind: str) -> AsyncGenerator[tuple[Canned, DialectClient]]:
    """Open a client of a server whose replies are correct until the client is connected."""
    async with ScriptedEngine("target") as engine:
        client = Canned(kind, engine)
        dialect = await find_dialect(cast(Client, client), kind.split()[0])
        found = await identify(cast(Client, client), dialect, "")
        tokenizer: Tokenizer = TextTokenizer() if dialect.speaks == "text" else ToyTokenizer()
        spec = describe("hostile", dialect, found, tokenizer)
        yield client, DialectClient(cast(Client, client), dialect, spec, tokenizer)


def calls(requests: DialectClient) -> dict[str, Callable[[], Any]]:
    """Return every call that this server supports."""
    ids = requests.tokenizer.render(QUESTION)
    sample = SampleRequest(ids, 6, Sampling(temperature=1.0))
    found: dict[str, Callable[[], Any]] = {"sample": lambda: requests.sample_raw(sample)}
    if "score" in requests.spec.capabilities:
        found["score"] = lambda: requests.score(ScoreRequest(ids, (7, 8, 9)))
    elif "rate" in requests.spec.capabilities:
        numbers = count()  # the client remembers ratings, so each call rates another text
        found["rate"] = lambda: requests.ratings((*ids, next(numbers)))
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_an_impossible_part_makes_a_reply_bad(kind: str) -> None:
    """A reply with an impossible value is refused if atts reads this value. Values that atts does
    not read have no effect.
    """
    async with opened(kind) as (client, requests):
        for verb, call in calls(requests).items():
            client.replies = {}
            client.heard = {}
            refused = 0
            expected = await call()
            ((at, text),) = client.heard.items()
            for path, new, client.replies[at] in spoilt(text):
                try:
                    got = await call()
                except BadReply:
                    refused += 1
                else:
                    assert got == expected, f"{verb}: {new!r} was accepted at {path}"
            assert refused > 40


def mangled(text: bytes, draws: random.Random) -> bytes:
    """Replace, leave out or move several parts of a reply, or cut, double and change its bytes."""
    for _ in range(draws.randrange(1, 5)):
        if draws.random() < 0.25 or not (ways := list(places(json.loads(text)))):
            at, to = sorted(draws.choices(range(len(text) + 1), k=2))
            return draws.choice(
                (
                    text[:at],
                    text[at:to],
                    text[:to] + text[at:],
                    text[:at] + draws.randbytes(3) + text[to:],
                )
            )
        whole = json.loads(text)
        way = draws.choice(ways)
        new = draws.choice(IMPOSSIBLE)
        if draws.random() < 0.3:
            new = whole
            for name in draws.choice(ways):
                new = new[name]
        text = json.dumps(replaced(whole, way, new)).encode()
    return text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_mangled_reply_is_bad_or_plausible(kind: str) -> None:
    """Each of `ATTS_FUZZ` mangled replies is either refused, or gives a result whose numbers are
    possible.
    """
    ended = Counter[str]()
    async with opened(kind) as (client, requests):
        for verb, call in calls(requests).items():
            client.replies = {}
            client.heard = {}
            await call()
            ((at, text),) = client.heard.items()
            for number in range(int(os.environ.get("ATTS_FUZZ", "200"))):
                client.replies[at] = mangled(text, random.Random(f"{kind} {verb} {number}"))
                try:
                    got = await call()
                except BadReply:
                    ended["refused"] += 1
                    continue
                ended["taken"] += 1
                logprobs = getattr(got, "logprobs", ())
                assert all(
                    value is None or (type(value) is float and value <= 0) for value in logprobs
                ), number
                assert all(
                    type(value) is int and value >= 0 for value in getattr(got, "ids", ())
                ), number
    sys.stderr.write(f"fuzz: {kind}: {ended.total()} replies, {dict(ended)}\n")
    assert ended["refused"] > ended["taken"]


@pytest.mark.parametrize("kind", KINDS)
async def test_no_reply_raises_anything_but_a_bad_reply(kind: str) -> None:
    """Replies of a wrong shape, cut replies, deeply nested replies and replies in another encoding
    raise only BadReply, in calls and while connecting.
    """
    async with opened(kind) as (client, requests):
        for text in SHAPES:
            client.replies = {"*": text}
            for call in calls(requests).values():
                with pytest.raises(BadReply):
                    await call()
            with pytest.raises(EngineError):
                await identify(cast(Client, client), requests.dialect, "")
            assert await requests.dialect.running(cast(Client, client)) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_servers_description_is_read_strictly(kind: str) -> None:
    """If any part of a server's description is replaced, atts still describes the server or raises
    one of its own errors.
    """
    async with opened(kind) as (client, requests):
        asked = client.heard
        assert asked
        for at, honest in asked.items():
            for _, _, text in spoilt(honest):
                client.replies = {at: text}
                try:
                    found = await identify(cast(Client, client), requests.dialect, "")
                except EngineError:
                    continue
                assert type(found.context_length) is int
                assert 0 <= found.context_length < 1 << 53
                assert all(
                    type(part) is str
                    for part in (found.model, found.version, found.engine, found.tokenizer)
                )


@pytest.mark.parametrize("gauge", ["nan", "inf", "1e400", "-1", "", "x", "9" * 5000, "1 2 3"])
async def test_impossible_gauges_are_ignored(gauge: str) -> None:
    """If a server's gauge has an impossible value, the number of running requests is unknown."""
    async with opened("vllm") as (client, requests):
        client.replies = {"/metrics": f"vllm:num_requests_running{{a=1}} {gauge}\n".encode()}
        assert await requests.dialect.running(cast(Client, client)) in (None, 3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TEXT_KINDS])
async def test_a_reply_with_too_many_tokens_is_refused(kind: str) -> None:
    """A reply with the requested number of tokens is accepted, and one with one token more is
    refused.
    """
    async with opened(kind) as (client, requests):
        ids = requests.tokenizer.render(QUESTION)
        client.heard = {}
        assert len((await requests.sample_raw(SampleRequest(ids, 6))).ids) == 6
        client.replies = client.heard
        with pytest.raises(BadReply, match="6 tokens, but only 5 were requested"):
            await requests.sample_raw(SampleRequest(ids, 5))
