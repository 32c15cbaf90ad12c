"""Tests of servers that fail: every wrong reply is noticed, retries are limited, and no request is
left at a server.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from atts.api import Setup, evaluate_sync
from atts.concurrency import collect, task_group
from atts.core import Completion, Message, SampleRequest, ScoreRequest, Scores
from atts.errors import (
    BadReply,
    ContextOverflow,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    FingerprintError,
    OptionError,
    UnsupportedByEngine,
)
from atts.pipelines import Policy
from atts.run import RunOptions, RunResult
from atts.sampling import Seed
from atts.servers import ApiKey, RemoteEngine, RemoteOptions, ReplicaPool
from atts.servers.probing import Known, Seen, ServerProbe
from atts.testing import (
    ScriptedEngine,
    ServerFaults,
    ServerQuirks,
    ToyTokenizer,
    toy_problems,
)
from atts.testing.servers import DialectServer

Serve = Callable[..., DialectServer]
Connect = Callable[..., RemoteEngine]
PROMPT = ToyTokenizer().render([Message("user", "Start at 4. +3, -2. What is the result?")])
REQUEST = SampleRequest(PROMPT, 24)
LASTING: dict[str, type[EngineError]] = {
    "refused": EngineUnavailable, "reset": EngineUnavailable, "429": EngineUnavailable, "500": EngineUnavailable,
    "truncated": BadReply, "wrong_ids": BadReply, "nan": BadReply, "hang": EngineTimeout, "slow_loris": EngineTimeout,
}  # fmt: skip
ALL = {
    "refused": 0.04, "reset": 0.04, "429": 0.04, "500": 0.04, "truncated": 0.04,
    "wrong_ids": 0.03, "nan": 0.03, "slow_loris": 0.02, "hang": 0.02,
}  # fmt: skip


class Stalling(ScriptedEngine):
    """An engine that can be made to hang."""

    stall = False

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample as the toy engine does, after a stall if one is set."""
        if self.stall:
            await anyio.sleep(3600)
        return await super().sample(request)


def hurry(remote: RemoteEngine, seconds: float) -> None:
    """Set the deadline of each later call to this many seconds, so that a hanging server is noticed
    soon.
    """
    client = remote._opened()  # pyright: ignore[reportPrivateUsage]
    client.options = replace(client.options, timeout_seconds=seconds)


async def until(true: Callable[[], bool]) -> None:
    """Wait until a condition is true, however slow the machine is."""
    with anyio.fail_after(120):
        while not true():  # noqa: ASYNC110  # what a server in a thread does can only be polled
            await anyio.sleep(0.005)


async def time_out(
    remote: RemoteEngine, server: DialectServer, request: SampleRequest
) -> list[str]:
    """Send a request that times out at a hanging server, and return the calls that reached the
    server.

    If none reached it, because the machine is busy, repeat with a longer deadline.
    """
    for patience in (0.5, 2.0, 8.0, 32.0):
        hurry(remote, patience)
        before = len(server.calls)
        with pytest.raises(EngineTimeout):
            await remote.sample(request)
        if reached := server.calls[before:]:
            return reached
    raise AssertionError("the request never reached the server")


def seeded(number: int) -> SampleRequest:
    """Make a request with this number as its seed."""
    return replace(REQUEST, seed=Seed(run=number))


# After each planted status 429 the client sends fewer requests, down to one at a time. Each planted
# hang then blocks the other calls until its deadline, so on a busy machine this test takes minutes.
@pytest.mark.timeout(800)
@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_thirty_percent_of_failures_of_every_kind_change_no_answer(
    serve: Serve, client: Connect, dialect: str
) -> None:
    """If 30 % of calls fail, each call gives the correct reply or a retryable error.

    A caller that retries gets every reply once.
    """
    server = serve(dialect, faults=ServerFaults(seed=5))
    async with client(server.url) as remote:
        requests = [seeded(number) for number in range(20)]
        want = [(await remote.sample(request)).ids for request in requests]
        hurry(remote, 0.5)
        server.faults = ServerFaults(ALL)  # type: ignore[arg-type]
        calls = len(server.calls)

        async def insist(request: SampleRequest) -> Completion:
            patience = (
                # a longer deadline after each time-out, because on a busy machine a slow server
                # need not be hanging
                0.5
            )
            for _ in range(20):
                try:
                    done = await remote.sample(request)
                    scores = await remote.score(ScoreRequest(request.ids, done.ids))
                except EngineTimeout:
                    patience = min(10.0, 2 * patience)
                    hurry(remote, max(patience, remote._opened().options.timeout_seconds))  # pyright: ignore[reportPrivateUsage]
                    continue
                except EngineError as error:
                    if not error.retryable:
                        raise
                    continue
                assert scores.logprobs == pytest.approx(done.logprobs, abs=1e-4)
                return done
            raise AssertionError("twenty tries, and no answer")

        got = await collect([partial(insist, request) for request in requests])
        server.faults = ServerFaults()
    assert [done.ids for done in got] == want
    assert len(server.calls) - calls < 20 * 20
    assert not any(math.isnan(value) for done in got for value in done.logprobs)


@pytest.mark.anyio
async def test_a_failure_that_lasts_is_tried_a_few_times_and_named(
    serve: Serve, client: Connect
) -> None:
    """A call to a server that keeps failing ends after a limited number of attempts or at the
    deadline. The error's class names the kind of failure.
    """
    server = serve("vllm")
    async with client(server.url) as remote:
        for fault, error in LASTING.items():
            server.faults = ServerFaults({fault: 1.0})  # type: ignore[dict-item]
            if error is EngineTimeout:
                assert await time_out(remote, server, REQUEST) == ["/v1/completions"], fault
                hurry(remote, 60.0)
            else:
                before = len(server.calls)
                with pytest.raises(error):
                    await remote.sample(REQUEST)
                assert server.calls[before:].count("/v1/completions") == 3, fault
            server.faults = ServerFaults()
            assert (await remote.sample(REQUEST)).ids


@pytest.mark.anyio
async def test_a_request_the_server_refuses_is_not_repeated(serve: Serve, client: Connect) -> None:
    """A request that the server refuses with status 400 is not repeated, and an overflow that only
    the server notices is a ContextOverflow.
    """
    server = serve("vllm")
    async with client(server.url) as remote:
        remote._spec = replace(remote.spec, context_length=4096)  # pyright: ignore[reportPrivateUsage]
        before = len(server.calls)
        with pytest.raises(ContextOverflow):
            await remote.sample(replace(REQUEST, max_tokens=2000))
        assert len(server.calls) == before + 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("dialect", "disconnect"), [("vllm", "abort"), ("sglang", "ignore"), ("llamacpp", "abort")]
)
async def test_cancelling_leaves_the_server_nothing_to_do(
    serve: Serve, client: Connect, dialect: str, disconnect: str
) -> None:
    """Cancelled requests are aborted at the server, even if it ignores closed connections. If the
    server accepts request ids, they are aborted by id.
    """
    engine = Stalling(context_length=1024)
    server = serve(dialect, lambda: engine, quirks=ServerQuirks(disconnect=disconnect))  # type: ignore[arg-type]
    async with client(server.url) as remote:
        engine.stall = True
        async with task_group() as group:
            for number in range(30):
                group.start_soon(remote.sample, replace(seeded(number), max_tokens=500))
            await until(lambda: server.running == 30)
            group.cancel_scope.cancel()
        await until(lambda: not server.running)
        assert remote.stats().in_flight == 0


@pytest.mark.anyio
async def test_a_deadline_aborts_too(serve: Serve, client: Connect) -> None:
    """A call that exceeds its deadline frees its slot at the server."""
    engine = Stalling(context_length=1024)
    server = serve("sglang", lambda: engine, quirks=ServerQuirks(disconnect="ignore"))
    async with client(server.url) as remote:
        engine.stall = True
        await time_out(remote, server, replace(REQUEST, max_tokens=500))
        await until(lambda: not server.running)


@pytest.mark.anyio
async def test_an_upgrade_that_changes_the_convention_is_refused(
    serve: Serve, client: Connect
) -> None:
    """If a server restarts with another convention for log-probabilities, this is noticed before
    any of its replies is used.
    """
    server = serve("sglang")
    async with client(
        server.url, options=RemoteOptions(idle_seconds=0.0, delay_seconds=0.01)
    ) as remote:
        await remote.sample(REQUEST)
        server.restart(quirks=ServerQuirks(logprobs="raw"))
        with pytest.raises(
            EngineError,
            match=r"changed while in use.*processed.*raw|lost the connection|cannot reach",
        ):
            await remote.sample(REQUEST)
        with pytest.raises(UnsupportedByEngine, match="changed while in use"):
            await remote.sample(REQUEST)


@pytest.mark.anyio
async def test_a_model_swapped_behind_a_url_is_noticed_with_its_first_reply(
    serve: Serve, client: Connect
) -> None:
    """A model that is swapped without a restart is noticed by the name in its first reply, and the
    reply is not used.
    """
    server = serve("vllm")
    options = RemoteOptions(idle_seconds=1e9, recheck_seconds=1e9)
    async with client(server.url, options=options) as remote:
        for _ in range(3):
            await remote.sample(REQUEST)
        checks = len(server.calls)
        await remote.sample(REQUEST)
        assert len(server.calls) == checks + 1, "steady replies under one name must cause no check"
        assert server._state is not None  # pyright: ignore[reportPrivateUsage]
        server._state.quirks = ServerQuirks(version="0.99.0")  # pyright: ignore[reportPrivateUsage]
        for _ in range(2):
            with pytest.raises(UnsupportedByEngine, match="changed while in use"):
                await remote.sample(REQUEST)


class Swappable(ScriptedEngine):
    """A toy draft whose weights can become the target's, while name and tokenizer stay the same."""

    def __init__(self) -> None:
        super().__init__("draft", context_length=1024)
        self._other = ScriptedEngine("target", context_length=1024)
        self.is_swapped = False

    async def open(self) -> None:
        """Open both models."""
        await super().open()
        await self._other.open()

    async def _sample(self, request: SampleRequest) -> Completion:
        verb = self._other._sample if self.is_swapped else super()._sample
        return await verb(request)

    async def _score(self, request: ScoreRequest) -> Scores:
        verb = self._other._score if self.is_swapped else super()._score
        return await verb(request)


async def many(remote: RemoteEngine, requests: int) -> None:
    """Request `count` texts, one after the other."""
    for number in range(requests):
        await remote.sample(replace(REQUEST, seed=Seed(run=number)))


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
async def test_other_weights_under_the_same_name_are_noticed_after_some_replies(
    serve: Serve, client: Connect, dialect: str
) -> None:
    """Other weights under the same name are noticed after some replies, without a broken
    connection.

    The error has the log-probabilities of both models.
    """
    models: list[Swappable] = []

    def make() -> Swappable:
        models.append(Swappable())
        return models[-1]

    server = serve(dialect, make)
    options = RemoteOptions(idle_seconds=1e9, recheck_seconds=1e9, recheck_requests=5)
    async with client(server.url, options=options) as remote:
        await many(remote, 12)
        models[-1].is_swapped = True
        words = r"changed while in use \(log-probs of a (fixed|known) text was .* and is now "
        with pytest.raises(UnsupportedByEngine, match=words):
            await many(remote, 5)
        with pytest.raises(UnsupportedByEngine, match="changed while in use"):
            await remote.sample(REQUEST)


@pytest.mark.anyio
async def test_other_weights_are_noticed_by_a_run_that_needs_only_entropies(
    serve: Serve, client: Connect
) -> None:
    """Replies to requests for entropies also count towards the next check of the model."""
    models: list[Swappable] = []

    def make() -> Swappable:
        models.append(Swappable())
        return models[-1]

    server = serve("vllm", make)
    options = RemoteOptions(idle_seconds=1e9, recheck_seconds=1e9, recheck_requests=5)
    async with client(server.url, options=options) as remote:

        async def score(requests: int) -> None:
            for number in range(requests):
                suffix = REQUEST.ids[1 + number % 3 :]
                await remote.score(ScoreRequest(REQUEST.ids, suffix, entropies=True))

        await score(12)
        models[-1].is_swapped = True
        with pytest.raises(UnsupportedByEngine, match="changed while in use"):
            await score(5)


@pytest.mark.anyio
async def test_replies_do_not_wait_for_the_check_of_the_model(
    serve: Serve, client: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one request checks the model, other requests are answered."""
    look = ServerProbe.glance
    goes_on = anyio.Event()
    looks = list[int]()
    is_looking = anyio.Event()
    almost_all = anyio.Event()
    answered = list[int]()

    async def slow_look(probe: ServerProbe, known: Known) -> Seen:
        looks.append(len(answered))
        is_looking.set()
        await goes_on.wait()
        return await look(probe, known)

    monkeypatch.setattr(ServerProbe, "glance", slow_look)
    server = serve("vllm", lambda: ScriptedEngine("draft"))
    options = RemoteOptions(idle_seconds=1e9, recheck_seconds=1e9, recheck_requests=5)
    async with client(server.url, options=options) as remote:

        async def ask(number: int) -> None:
            await remote.sample(replace(REQUEST, seed=Seed(sample=number)))
            answered.append(number)
            if len(answered) == 39:
                almost_all.set()

        async with task_group() as group:
            for number in range(40):
                group.start_soon(ask, number)
            with anyio.fail_after(20):
                await is_looking.wait()
                await almost_all.wait()
            assert len(looks) == 1
            goes_on.set()
        # five more replies cause one more check; when it happens depends on the order of replies
        for number in range(40, 45):
            await ask(number)
    assert len(looks) == 2


class SwapLater:
    """A listener that swaps a model's weights during a run."""

    def __init__(self, model: Callable[[], Swappable], after: int) -> None:
        self._model = model
        self._left = after

    def recalled(self, event: object) -> None:
        """Ignore events of an earlier session."""

    def notify(self, event: object) -> None:
        """Swap the weights once, after a number of events."""
        self._left -= 1
        if self._left == 0:
            self._model().is_swapped = True


def test_a_run_ends_if_its_model_is_swapped_and_resumes_with_the_old_one(
    serve: Serve, client: Connect, tmp_path: Path
) -> None:
    """If the model is swapped during a run, the run ends with exit code 3 and keeps everything
    recorded.

    With the old model, it resumes.
    """
    models: list[Swappable] = []

    def make() -> Swappable:
        models.append(Swappable())
        return models[-1]

    draft = serve("vllm", make, model="one")
    target = serve("vllm", lambda: ScriptedEngine("target"))
    options = RemoteOptions(delay_seconds=0.01, wait_seconds=20.0, recheck_requests=16)

    def run(*listeners: SwapLater) -> RunResult:
        setup = Setup(
            draft=client(draft.url, options=options, name="draft"),
            target=client(target.url, options=options, name="target"),
            policy=Policy(samples=4, early_stop="none"),
        )
        return evaluate_sync(
            toy_problems(12),
            setup,
            directory=tmp_path / "run",
            options=RunOptions(listeners=listeners),
        )

    with pytest.raises(UnsupportedByEngine, match="log-probs of a fixed text was") as raised:
        run(SwapLater(lambda: models[0], 200))
    assert raised.value.exit_code == 3
    models[0].is_swapped = False
    again = run()
    assert (again.status, len(again.problems)) == ("finished", 12)


@pytest.mark.anyio
async def test_other_weights_after_a_reconnection_are_refused(
    serve: Serve, client: Connect
) -> None:
    """If a server restarts with other weights under the same name, even its first reply is refused."""
    models: list[Swappable] = []

    def make() -> Swappable:
        models.append(Swappable())
        models[-1].is_swapped = len(models) > 1
        return models[-1]

    server = serve("vllm", make)
    async with client(server.url) as remote:
        await remote.sample(REQUEST)
        server.kill()
        with pytest.raises(EngineUnavailable):
            await remote.sample(REQUEST)
        server.start()
        with pytest.raises(UnsupportedByEngine, match="log-probs of a fixed text was"):
            await remote.sample(REQUEST)


@pytest.mark.anyio
async def test_replicas_with_other_weights_under_one_name_are_refused(
    serve: Serve, client: Connect
) -> None:
    """Replicas with different weights under one name are refused as a pool, because a pool mixes
    their replies.
    """
    models: list[Swappable] = []

    def make() -> Swappable:
        models.append(Swappable())
        models[-1].is_swapped = len(models) > 1
        return models[-1]

    replicas = [(str(n), client(serve("vllm", make).url)) for n in range(2)]
    with pytest.raises(FingerprintError, match="fixed text"):
        async with ReplicaPool(replicas, name="pool"):
            pass


@pytest.mark.anyio
async def test_the_same_server_may_come_back(serve: Serve, client: Connect) -> None:
    """If a server restarts unchanged, the run continues after one check of the server."""
    server = serve("vllm")
    async with client(server.url) as remote:
        want = await remote.sample(REQUEST)
        server.restart()
        assert (await remote.sample(REQUEST)).ids == want.ids


@pytest.mark.anyio
async def test_steady_calls_cause_no_identity_check(serve: Serve, client: Connect) -> None:
    """Consecutive calls cause no check of the server's identity, however long they continue."""
    now = 0.0

    class Passing(ScriptedEngine):
        """A server for which each request takes a second by the client's clock."""

        async def sample(self, request: SampleRequest) -> Completion:
            nonlocal now
            now += 1.0
            return await super().sample(request)

    server = serve("vllm", lambda: Passing(context_length=1024))
    async with client(server.url, options=RemoteOptions(idle_seconds=2.0)) as remote:
        now = remote._clock()  # pyright: ignore[reportPrivateUsage]
        remote._clock = lambda: now  # pyright: ignore[reportPrivateUsage]
        before = len(server.calls)
        for _ in range(5):
            await remote.sample(replace(REQUEST, max_tokens=10))
        assert len(server.calls) == before + 5
        now += 2.0  # the server is checked only after two seconds without replies
        await remote.sample(replace(REQUEST, max_tokens=10))
        assert len(server.calls) > before + 6


@pytest.mark.anyio
async def test_a_loading_server_is_waited_for_with_a_message(
    serve: Serve, client: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """If a server answers with status 503 while it loads, atts waits with a message. The status is
    a failure only if loading never ends.
    """
    server = serve("llamacpp", loading_seconds=0.5)
    with caplog.at_level(logging.WARNING, logger="atts.servers"):
        async with client(server.url) as remote:
            assert (await remote.sample(REQUEST)).ids
    assert sum("still loading" in record.message for record in caplog.records) == 1
    never = serve("vllm", loading_seconds=3600)
    with pytest.raises(EngineUnavailable, match="still loading"):
        await client(never.url, options=RemoteOptions(wait_seconds=0.3)).__aenter__()


@pytest.mark.anyio
async def test_wrong_settings_of_a_server_are_named(serve: Serve, client: Connect) -> None:
    """The error about a wrong URL, model, tokenizer or dialect of a server names the wrong setting
    and a remedy.
    """
    server = serve("vllm")
    system = r"Connection refused|ConnectError: all attempts"  # trio words this error differently
    with pytest.raises(EngineUnavailable, match=rf"reach http://127.0.0.1:9 \((?:{system})"):
        await client("http://127.0.0.1:9").__aenter__()
    with pytest.raises(
        EngineUnavailable, match="vLLM opens its port only when its model is loaded"
    ):
        await client("http://127.0.0.1:9").__aenter__()
    with pytest.raises(UnsupportedByEngine, match="has no model 'other'.*toy"):
        await client(server.url, model="other").__aenter__()
    with pytest.raises(FingerprintError, match="tokenizer"):
        await client(server.url, tokenizer=ToyTokenizer("other")).__aenter__()
    with pytest.raises(UnsupportedByEngine, match="dialect"):
        await client(server.url, dialect="sglang").__aenter__()
    with pytest.raises(UnsupportedByEngine, match="does not recognise the server at"):
        await client(server.url + "/v2").__aenter__()
    with pytest.raises(OptionError, match="dialect"):
        client(server.url, dialect="vlm")
    with pytest.raises(OptionError, match="URL"):
        client("localhost:8000")


@pytest.mark.anyio
async def test_keys_are_used_and_never_shown(
    serve: Serve,
    client: Connect,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A valid key opens the engine; for an invalid or missing key the error says where to put a
    key.

    No message, log, spec or repr contains the key.
    """
    caplog.set_level(logging.DEBUG)
    server = serve("vllm", key="secret-good")
    with pytest.raises(UnsupportedByEngine, match="needs an API key.*ATTS_API_KEY"):
        await client(server.url).__aenter__()
    monkeypatch.setenv("ATTS_API_KEY", "secret-expired")
    with pytest.raises(UnsupportedByEngine, match="refused the API key") as refused:
        await client(server.url).__aenter__()
    file = anyio.Path(str(tmp_path)) / "key"
    await file.write_text("secret-good\n")
    options = RemoteOptions(key=ApiKey(file=Path(str(file))))
    async with client(server.url, options=options) as remote:
        assert (await remote.sample(REQUEST)).ids
        said = f"{remote.spec} {remote.options!r} {vars(remote)} {refused.value!r} {caplog.text}"
    assert "secret" not in said.replace("/key", "")


@pytest.mark.anyio
async def test_a_proxy_in_the_environment_is_used_only_when_asked_for(
    serve: Serve, client: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default atts uses no proxy from the environment, and mentions a proxy only if the
    connection fails.

    With the setting `proxy="environment"`, atts uses the proxy.
    """
    server = serve("vllm")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    async with client(server.url) as remote:
        assert (await remote.sample(REQUEST)).ids
    with pytest.raises(EngineUnavailable, match=r"(?i)http_proxy is set but was not used"):
        await client("http://127.0.0.1:9").__aenter__()
    with pytest.raises(EngineUnavailable, match=r"(?i)used the proxy in http_proxy"):
        await client(server.url, options=RemoteOptions(proxy="environment")).__aenter__()


@pytest.mark.anyio
async def test_status_429_lowers_the_limit_of_requests_in_flight(
    serve: Serve, client: Connect
) -> None:
    """Status 429 lowers the limit of requests in flight, and each request is still answered in the
    end.
    """
    server = serve("vllm", faults=ServerFaults({}, retry_after="0.05"))
    options = RemoteOptions(in_flight=64, attempts=8, delay_seconds=0.02)
    async with client(server.url, options=options) as remote:
        server.faults = ServerFaults({"429": 0.2}, retry_after="0.02")
        done = await collect([partial(remote.sample, seeded(number)) for number in range(64)])
        server.faults = ServerFaults()
        assert len(done) == 64
        limit = remote._opened().limit  # pyright: ignore[reportPrivateUsage]
        assert (limit.slots or 64) < 64
        assert limit.in_use == 0


def test_a_killed_server_interrupts_no_thread(serve: Serve) -> None:
    """Starting and killing servers leaves no thread behind and interrupts none."""
    before = threading.active_count()
    server = serve("vllm")
    server.kill()
    server.kill()
    deadline = time.monotonic() + 120
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
