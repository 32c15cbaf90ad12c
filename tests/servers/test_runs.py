"""Tests of whole evaluations over servers that fail, and of parsing server addresses."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.api import Setup, build_engine
from atts.cli.app import run as command
from atts.concurrency import background, task_group
from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores
from atts.errors import FingerprintError, OptionError, UnsupportedByEngine
from atts.graph import RetryPolicy
from atts.journal import JOURNAL
from atts.pipelines import Answers, Chunking, Policy, ScoreRule, ThresholdGate
from atts.run import RunOptions, RunResult, RunSpec, evaluate
from atts.servers import RemoteEngine, RemoteOptions, ReplicaPool
from atts.servers.addresses import read_servers
from atts.testing import (
    TARGET,
    Latency,
    ScriptedEngine,
    ServerFaults,
    ToyModel,
    ToyTokenizer,
    toy_answer,
    toy_groups,
    toy_problems,
)
from atts.testing.servers import DialectServer, ServerQuirks

Serve = Callable[..., DialectServer]
# Clients check the server's identity again only after a lost connection or a changed model name,
# not after some time. Tests count requests, and on a busy machine seconds may pass between two
# requests.
OPTIONS = RemoteOptions(
    timeout_seconds=60.0,
    delay_seconds=0.01,
    wait_seconds=20.0,
    idle_seconds=1e9,
    recheck_seconds=1e9,
    recheck_requests=10**9,
)
HURRIED = replace(OPTIONS, timeout_seconds=4.0)  # some calls hang until this deadline
FAULTS = {
    "refused": 0.05, "reset": 0.05, "429": 0.05, "500": 0.05, "truncated": 0.04,
    "wrong_ids": 0.02, "nan": 0.02, "slow_loris": 0.004, "hang": 0.004,
}  # fmt: skip


class Endless(ScriptedEngine):
    """An engine that answers a probe but never finishes a real request."""

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample as the toy engine does if the request is short; never finish otherwise."""
        if request.max_tokens > 12:
            await anyio.sleep(3600)
        return await super().sample(request)


def engine(role: Role) -> Callable[[], ScriptedEngine]:
    """Return a factory of the toy model of a role, with some latency."""
    return lambda: ScriptedEngine(role, latency=Latency(per_sample=0.005, per_score=0.002))


def remote(server: DialectServer, name: str, options: RemoteOptions = OPTIONS) -> RemoteEngine:
    """Make an engine on a toy server."""
    return RemoteEngine(server.url, name=name, tokenizer=ToyTokenizer(), options=options)


@pytest.fixture
def plan(serve: Serve) -> tuple[RunSpec, list[DialectServer]]:
    """Plan a run with a draft on llama.cpp's dialect and a target on two SGLang replicas."""
    servers = [
        serve("llamacpp", engine("draft")), serve("sglang", engine("target")), serve("sglang", engine("target"))
    ]  # fmt: skip
    pool = ReplicaPool(
        [(str(n), remote(server, "target", HURRIED)) for n, server in enumerate(servers[1:])],
        name="target",
    )
    policy = Policy(samples=3, turns=6, chunking=Chunking(12, 12, ()), early_stop="none")
    retries = RetryPolicy(calls=8, rollouts=3, delay_seconds=0.05)
    answers = Answers(toy_answer, toy_groups)
    return RunSpec(
        remote(servers[0], "draft", HURRIED),
        pool,
        policy,
        ThresholdGate(1.3),
        answers,
        concurrency=9,
        retries=retries,
    ), servers


class Trouble:
    """A listener that runs each action once the server has answered a given number of requests."""

    def __init__(self, server: DialectServer, left: list[tuple[int, Callable[[], object]]]) -> None:
        self.server = server
        self.left = left

    def recalled(self, event: object) -> None: ...

    def notify(self, event: object) -> None:
        """Run the actions that are due by the server's count of answered requests."""
        while self.left and self.server.served >= self.left[0][0]:
            self.left.pop(0)[1]()


class Renamed(ScriptedEngine):
    """The toy target under the name of the toy draft."""

    def __init__(self) -> None:
        super().__init__("draft", model=ToyModel(TARGET, ToyTokenizer()))


@pytest.mark.anyio
async def test_a_run_is_not_resumed_on_other_weights_under_the_same_name(
    serve: Serve, tmp_path: Path
) -> None:
    """A run is not resumed on other weights under the same name: the error has the old and new
    scores of a fixed text.

    The old scores are in the run's manifest, and the run directory is unchanged.
    """
    servers = [serve("vllm", make, model="one") for make in (engine("draft"), Renamed)]
    policy = Policy(samples=2, turns=3, early_stop="none")
    answers = Answers(toy_answer, toy_groups)

    async def run(server: DialectServer, problems: int) -> RunResult:
        draft = remote(server, "draft")
        target = remote(server, "target")
        todo = RunSpec(draft, target, policy, ThresholdGate(1.3), answers)
        return await evaluate(
            toy_problems(problems), todo, options=RunOptions(directory=tmp_path / "run")
        )

    first = await run(servers[0], 2)
    assert first.status == "finished"
    before = (tmp_path / "run" / JOURNAL).read_bytes()
    with pytest.raises(
        FingerprintError, match=r"engines.target: log-probabilities of a fixed text"
    ):
        await run(servers[1], 2)
    assert (tmp_path / "run" / JOURNAL).read_bytes() == before
    servers[0].restart()
    assert (await run(servers[0], 2)).status == "finished"


@pytest.mark.anyio
async def test_every_problem_ends_once_while_servers_fail_and_restart(
    plan: tuple[RunSpec, list[DialectServer]], tmp_path: Path
) -> None:
    """Each problem has exactly one outcome although a third of the calls fails and a replica is
    killed and returns.
    """
    todo, servers = plan

    def fail() -> None:
        for number, server in enumerate(servers):
            server.faults = ServerFaults(FAULTS, seed=number)  # type: ignore[arg-type]

    trouble = Trouble(servers[1], [(1, fail), (30, servers[2].kill), (50, servers[2].start)])
    problems = toy_problems(6, 5)
    result = await evaluate(
        problems, todo, RunOptions(tmp_path / "run", signals="ignore", listeners=[trouble])
    )
    assert not trouble.left
    assert Counter(outcome.problem.id for outcome in result.outcomes()) == {
        problem.id: 1 for problem in problems
    }
    assert all(outcome.status in ("answered", "unanswered") for outcome in result.outcomes())
    for server in servers:
        server.faults = ServerFaults()
    with anyio.fail_after(120):
        while any(server.running for server in servers):  # noqa: ASYNC110
            await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_a_run_that_is_stopped_leaves_servers_idle(
    plan: tuple[RunSpec, list[DialectServer]],
) -> None:
    """Cancelling a run, as Ctrl-C does, ends all its requests at the servers."""
    todo, servers = plan
    async with task_group() as group:
        group.start_soon(evaluate, toy_problems(40, 5), todo, RunOptions(signals="ignore"))
        with anyio.fail_after(120):
            while not any(server.calls for server in servers[1:]) or not any(  # noqa: ASYNC110
                server.running for server in servers
            ):
                await anyio.sleep(0.002)
        group.cancel_scope.cancel()
    with anyio.fail_after(120):
        while any(server.running for server in servers):  # noqa: ASYNC110
            await anyio.sleep(0.01)


def test_addresses_of_servers_are_parsed() -> None:
    """A server address SCHEME:URL/MODEL may have several URLs, and settings after a question mark;
    the error about a wrong address names the fault.
    """
    one = build_engine("vllm:http://h:8000/Qwen/Qwen3-8B?in_flight=7&timeout=3&wait=9", "target")
    assert isinstance(one, RemoteEngine)
    assert (one.url, one.options.in_flight, one.options.timeout_seconds) == (
        "http://h:8000",
        7,
        3.0,
    )
    assert one.options.wait_seconds == 9.0
    pool = build_engine("server:http://a:1,http://b:2", "draft")
    assert isinstance(pool, ReplicaPool)
    assert [load.name for load in pool.load()] == ["http://a:1", "http://b:2"]
    for words in (
        "vllm:h:8000",
        "vllm:",
        "vlm:http://h",
        "vllm:http://h?in_fligth=3",
        "vllm:http://h?timeout=x",
        "vllm:http://h?wait=-1",
    ):
        with pytest.raises(OptionError):
            build_engine(words, "draft")


def test_give_up_after_applies_to_every_server() -> None:
    """The setup's `give_up_after` applies to each server whose address sets no value of its own."""
    setup = Setup(
        draft="vllm:http://a:1/m?give_up_after=7",
        target="openai:gpt",
        give_up_after=90.0,
        method="cascade",
    )
    draft, target = setup.engines()
    assert isinstance(draft, RemoteEngine)
    assert isinstance(target, RemoteEngine)
    assert (draft.options.give_up_after, target.options.give_up_after) == (7.0, 90.0)
    defaults = RemoteOptions(give_up_after=90.0)
    replicas = read_servers("vllm", "http://a:1/m?give_up_after=7,http://b:1/m", defaults)
    assert [one.options.give_up_after for one in replicas] == [7.0, 90.0]
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="give_up_after"):
            Setup(give_up_after=seconds)


def test_the_probe_command_says_what_is_wrong(
    serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The probe command exits with 3 for a fault of the server and 2 for wrong arguments, with one
    line on stderr.
    """
    from atts.models import path

    server = serve("vllm")
    locked = serve("vllm", key="good")
    embedded = str(path("draft"))
    for words, code, said in (
        (["http://127.0.0.1:9"], 3, "cannot reach"),
        (["localhost"], 2, "is not a URL"),
        ([server.url, "--model", "other"], 3, "has no model"),
        ([server.url, "--tokenizer", embedded], 2, "tokenizer"),
        ([server.url, "--tokenizer", str(tmp_path)], 3, "no tokenizer"),
        ([server.url, "--dialect", "sglang"], 3, "dialect"),
        ([locked.url], 3, "API key"),
        ([locked.url, "--key-file", str(tmp_path / "none")], 2, "key file"),
    ):
        assert command(["probe", *words]) == code, words
        out = capsys.readouterr()
        assert said in out.err, words
        assert not out.out


def test_the_probe_command_waits_for_a_server_that_loads_and_says_so(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probe command reports on stderr that it waits for a loading server; if loading never
    ends, the exit code is 3.
    """
    assert (
        command(["probe", serve("chat", loading_seconds=0.4).url + "/v1", "--dialect", "chat"]) == 0
    )
    out = capsys.readouterr()
    assert out.err.count("still loading") == 1
    assert "can rate and sample" in out.out
    never = serve("vllm", loading_seconds=3600)
    assert command(["probe", never.url, "--wait", "0.2"]) == 3
    assert "still loading after" in capsys.readouterr().err


@pytest.mark.anyio
async def test_a_key_that_expires_in_mid_run_ends_it_with_the_reason(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a key expires during a run, the run ends at once, says where the key belongs, and leaves
    no request at the server.

    All further requests would fail in the same way.
    """
    monkeypatch.setenv("ATTS_API_KEY", "secret-old")
    server = serve("sglang", engine("draft"), key="secret-old")
    policy = Policy(samples=3, turns=6, chunking=Chunking(12, 12, ()), early_stop="none")
    todo = RunSpec(remote(server, "draft"), ScriptedEngine("target"), policy, ThresholdGate(1.3),
                Answers(toy_answer, toy_groups))  # fmt: skip

    async def expire() -> None:
        while server.served < 30:  # noqa: ASYNC110
            await anyio.sleep(0.002)
        server.key = "secret-new"

    async with background(expire):
        with pytest.raises(
            UnsupportedByEngine, match="refused the API key.*ATTS_API_KEY"
        ) as refused:
            await evaluate(toy_problems(40, 5), todo, RunOptions(signals="ignore"))
    assert "secret" not in str(refused.value)
    with anyio.fail_after(120):
        while server.running:  # noqa: ASYNC110
            await anyio.sleep(0.01)


def test_ctrl_c_leaves_the_server_nothing_to_do(serve: Serve, tmp_path: Path) -> None:
    """After two Ctrl-C the process exits with code 130, and no request is left at the server."""
    server = serve("chat", lambda: Endless("target"))
    words = [
        "eval",
        "arithmetic[:8]",
        "--method",
        "target-only",
        "--draft",
        "scripted",
        "--report",
        "none",
    ]
    words += [
        "--target",
        f"chat:{server.url}/v1/toy",
        "--samples",
        "4",
        "--out",
        str(tmp_path / "run"),
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "atts", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 120
        while server.running < 16 and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        # the first Ctrl-C lets calls finish, which never happens here; the second cancels them
        for patience in (
            0.5,
            30.0,
            30.0,
        ):
            run.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                # a busy machine may merge two signals into one, so a third may be needed
                run.wait(patience)
                break
        out, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 130, (out, said)
    deadline = time.monotonic() + 120
    while server.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.running == 0


@pytest.mark.slow
def test_the_probe_command_describes_a_server_of_the_embedded_model(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probe command describes a server of the embedded model, and `--need` fails for abilities
    that the server lacks.
    """
    from atts.local import LocalEngine, LocalOptions
    from atts.models import path

    options = LocalOptions(worker="thread")
    server = serve("llamacpp", lambda: LocalEngine(path("draft"), name="draft", options=options))
    words = ["probe", server.url, "--tokenizer", str(path("draft"))]
    assert command([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"].startswith("llamacpp")
    assert found["can"] == ["sample"]
    assert command([*words, "--need", "score"]) == 5


class CountedScores(ScriptedEngine):
    """An engine that counts its scoring requests."""

    asked = 0

    async def score(self, request: ScoreRequest) -> Scores:
        """Score as the toy engine does, and count the call."""
        self.asked += 1
        return await super().score(request)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "changes", "extra"),
    [
        ("draft-only", {}, "none"),
        ("coin", {}, "none"),
        # the score and the vote of method `atts` need log-probabilities only of scored chunks
        ("atts", {}, "none"),
        # this score compares the log-probabilities of both models
        ("atts", {"score": ScoreRule("speculative")}, "draft"),
        ("draft-only", {"vote": "confidence"}, "draft"),
        ("target-only", {"vote": "confidence"}, "target"),
    ],
)
async def test_raw_log_probs_are_fetched_only_where_they_are_used(
    serve: Serve, method: str, changes: dict[str, Any], extra: str
) -> None:
    """Raw log-probabilities are requested only if a score, vote or stop needs them.

    SGLang returns processed ones by default, so raw ones take a second request.
    """
    models: dict[Role, CountedScores] = {role: CountedScores(role) for role in ("draft", "target")}
    quirks = ServerQuirks(logprobs="processed")
    engines = {
        role: remote(serve("sglang", lambda m=m: m, quirks=quirks), role)
        for role, m in models.items()
    }
    policy = replace(
        Policy(samples=2, turns=4, chunking=Chunking(12, 12, ()), early_stop="none"), **changes
    )
    setup = Setup(policy=policy, method=method, rate=0.3)
    async with engines["draft"] as draft, engines["target"] as target:
        for model in models.values():
            model.asked = 0
        plan = replace(setup.plan(draft, target), answers=Answers(toy_answer, toy_groups))
        result = await evaluate(toy_problems(2), plan, RunOptions(engines="are open"))
    chunks = [
        c
        for o in result.outcomes()
        for r in o.rollouts
        for t in r.turns
        for c in (*t.chunks, *t.discarded)
    ]
    judged = sum(
        t.score is not None for o in result.outcomes() for r in o.rollouts for t in r.turns
    )
    written = {role: sum(chunk.author == role for chunk in chunks) for role in models}
    assert chunks
    assert models["draft"].asked == (written["draft"] if extra == "draft" else 0)
    assert models["target"].asked == judged + (written["target"] if extra == "target" else 0)
    if extra == "none":
        assert (
            sum(
                t.tokens_written("draft")
                for o in result.outcomes()
                for r in o.rollouts
                for t in r.turns
            )
            > 0
        )
