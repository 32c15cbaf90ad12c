"""Tests of speculation in whole engines: torch kernels, worker types, acceptance tests, and
failures.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atts.accel import SpeculationOptions
from atts.api.engines import build_engine
from atts.core import SampleRequest, Sampling
from atts.errors import OptionError, OutOfMemory
from atts.local.batch import StepPlan
from atts.local.devices import allocate_cache
from atts.local.loop import StepLoop
from atts.local.messages import Command, SampleReply, Submit
from atts.local.scheduler import Scheduler
from atts.local.seams import Ask, Proposer, TokenProposal
from atts.sampling import Seed
from tests.local.speculating import (
    AnyLength,
    Knowing,
    Make,
    Script,
    counts,
    engine_of,
    ids_of,
    requests,
    run,
    same,
    texts,
)

HERE: dict[str, Any] = {
    "device": "cpu",
    "worker": "thread",
    "kv_tokens": 2048,
    "max_batch": 32,
    "threads": 1,
}


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 20}), ("gemma2", {})]
)
def test_in_torch_only_near_ties_may_differ(
    family: str, changes: dict[str, Any], make_model: Make
) -> None:
    """With torch, speculation may change a token only if two tokens are almost equally likely.
    Log-probabilities agree within 1e-4.

    Torch computes several rows of a sequence as a masked batch, which changes rounding.
    """
    folder = make_model(family, **changes)
    orders = requests(7)
    plain = run(folder, [orders], kernel="torch")
    for k in (1, 6):
        done = run(
            folder,
            [orders],
            Knowing(texts(plain), "partly"),
            AnyLength(6) if k > 1 else k,
            kernel="torch",
        )
        assert counts(done).accepted > 0
        assert texts(done) == texts(plain)
        for key, reply in done.replies.items():
            other = plain.replies[key]
            assert isinstance(reply, SampleReply)
            assert isinstance(other, SampleReply)
            assert reply.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.anyio
@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_an_engine_with_a_drafter_answers_as_one_without(
    worker: Any, make_model: Make, near: Path
) -> None:
    """An engine with a drafter gives the same answers as one without, in a thread and in a process,
    and its counters include proposals.
    """
    request = SampleRequest(ids_of(1, 12), 24, Sampling(0.8), Seed(3))
    answers = list[Any]()
    for drafter in ("", str(near)):
        settings: dict[str, Any] = {"worker": worker if drafter else "thread", "drafter": drafter}
        settings |= {"k": 4} if drafter else {}
        async with engine_of(make_model("llama"), **{**HERE, **settings}) as engine:
            answers.append(await engine.sample(request))
            speculation = engine.loop_stats().speculation
            assert (speculation is not None) == bool(drafter)
            if speculation is not None:
                assert speculation.proposed >= speculation.accepted > 0
                assert speculation.tested_at[0] == speculation.rounds
                assert sum(speculation.accepted_at) == speculation.accepted
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "embedded:target?drafter=embedded:draft&k=-1",
            "-1 is out of range; give a value from 0 to 32",
        ),
        (
            "embedded:target?drafter=embedded:draft&k=1000",
            "1000 is out of range; give a value from 0 to 32",
        ),
        ("embedded:target?drafter=embedded:draft&k=many", "not a whole number"),
        ("embedded:target?speculate=fast", "'fast' is not a valid value"),
        ("embedded:target?speculate=draft", "needs a draft model"),
        ("embedded:target?drafter=vllm:http://host:8000/M", "does not name a draft model"),
        ("embedded:target?drafter=hf:", "does not name a draft model"),
        ("embedded:target?drafter=embedded:deap", "embedded:deep"),
        (
            "vllm:http://host:8000/M?drafter=embedded:draft",
            "only to models that run on this machine",
        ),
        ("server:http://host:8000?speculate=auto", "only to models that run on this machine"),
        ("openai:https://host/v1/M?k=4", "only to models that run on this machine"),
    ],
)
def test_impossible_speculation_options_are_refused(words: str, problem: str) -> None:
    """Each impossible speculation option is refused before anything runs, with an error that names
    the fault.
    """
    with pytest.raises(OptionError, match=problem):
        build_engine(words, "target")


def test_speculation_options_are_parsed() -> None:
    """A drafter's name has the same form as an engine's name, and the number of proposed tokens may
    be "auto".
    """
    engine: Any = build_engine(
        "embedded:target?drafter=embedded:draft&speculate=auto&k=auto", "target"
    )
    speculation = engine._accelerator.speculation
    assert speculation.k is None
    assert Path(speculation.drafter).name == "draft"
    assert speculation.is_on
    off: Any = build_engine("embedded:target?drafter=embedded:draft&k=0", "target")
    assert not off._accelerator.speculation.is_on
    assert not SpeculationOptions().is_on


@pytest.mark.anyio
async def test_a_drafter_of_another_tokenizer_is_refused(make_model: Make, tmp_path: Path) -> None:
    """A drafter with another tokenizer is refused, because the same token ids mean different
    texts.
    """
    from transformers import AutoTokenizer

    source = make_model("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert AutoTokenizer.from_pretrained(tmp_path) is not None
    with pytest.raises(OptionError, match="their tokenizers differ"):
        async with engine_of(source, **HERE, drafter=str(tmp_path)):
            pass


def test_a_drafter_without_room_for_its_cache_is_refused(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the drafter's or the target's cache does not fit, the error names that model."""

    def scarce(config: Any, dtype: Any, device: Any, least: int | None = None) -> Any:
        if config.name == "tiny" and least is not None:
            monkeypatch.setattr("atts.local.devices._zeros", refuse)
        return allocate_cache(config, dtype, device, least)

    def refuse(*sizes: object) -> Any:
        raise MemoryError

    monkeypatch.setattr("atts.accel.build.allocate_cache", scarce)
    with pytest.raises(OutOfMemory, match="a cache of 4096 tokens does not fit"):
        run(make_model("llama"), [requests(1)], None, 4, near)


class Failing(Proposer):
    """A proposer that proposes once and then fails."""

    def __init__(self) -> None:
        self._asked = 0

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Propose impossible tokens once, then fail."""
        self._asked += 1
        if self._asked > 1:
            raise ValueError("no more ideas")
        return [TokenProposal((10**9, -5, 3)) for _ in asks]


def test_a_failing_proposer_is_not_asked_again(make_model: Make) -> None:
    """After a proposer failed, it is not called again, the texts do not change, and the counters
    give the reason.
    """
    plain = run(make_model("llama"), [requests(3)])
    done = run(make_model("llama"), [requests(3)], Failing(), 4)
    assert same(plain, done)
    assert counts(done).proposed == 0
    assert counts(done).trouble == "speculation is off: Failing failed (ValueError: no more ideas)"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("a kernel broke")], ids=["memory", "broken"]
)
def test_a_failed_step_is_repeated_without_proposals(
    error: Exception, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed step is repeated without proposals, so no text changes and no caller notices.

    After a lack of memory, later proposals are shorter.
    """
    orders = requests(4)
    compute = StepLoop._run  # pyright: ignore[reportPrivateUsage]
    seen = list[int]()
    plain = run(make_model("llama"), [orders])

    def scarce(loop: StepLoop, plan: StepPlan, *rest: Any) -> Any:
        seen.append(max(map(len, plan.proposals), default=0))
        if seen[-1] > 3:
            raise error
        return compute(loop, plan, *rest)

    monkeypatch.setattr(StepLoop, "_run", scarce)
    done = run(make_model("llama"), [orders], Knowing(texts(plain), "right"), 8)
    assert same(plain, done)
    assert done.stats.shrunk == done.stats.preempted == 0
    assert seen.count(8) == 1 if isinstance(error, MemoryError) else seen.count(8) > 1
    assert (2 in seen) == isinstance(error, MemoryError)


def test_log_probabilities_do_not_depend_on_the_batch(make_model: Make) -> None:
    """A request gets the same log-probabilities alone and in a batch with requests that filter
    tokens.
    """
    order = Submit(1, SampleRequest(ids_of(1, 12), 20, Sampling(0.7), Seed(1)))
    other = Submit(2, SampleRequest(ids_of(2, 12), 20, Sampling(0.7, top_k=9, min_p=0.01), Seed(2)))
    alone = run(make_model("llama"), [[order]])
    beside = run(make_model("llama"), [[order, other]])
    assert alone.replies[1] == beside.replies[1]


def test_texts_do_not_depend_on_how_steps_cut_them(make_model: Make, near: Path) -> None:
    """Texts stay the same if requests come and go at random, and if the number of tokens per step
    varies.
    """
    shuffled = random.Random(4)
    orders: list[Any] = list(requests(20, 20))
    steps: list[list[Any]] = [[] for _ in range(15)]
    for order in orders:
        steps[shuffled.randrange(15)].append(order)
    plain, done = (
        run(make_model("llama"), steps, None, lengths, near) for lengths in (0, AnyLength(8))
    )
    assert texts(plain) == texts(done)
    assert plain.stats.sampled_tokens == done.stats.sampled_tokens


def test_time_spent_on_choosing_lengths_is_not_step_time(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured time of a step excludes the time to choose proposal lengths and to learn from
    results. Only a few steps are measured.
    """
    now = [0.0]
    told = list[tuple[float, float]]()

    class Slow(AnyLength):
        def choose(self, plan: StepPlan) -> list[int]:
            now[0] += 3
            return super().choose(plan)

        def observed(
            self, plan: StepPlan, rounds: Sequence[Any], seconds: tuple[float, float]
        ) -> None:
            now[0] += 10
            told.append(seconds)

    monkeypatch.setattr("atts.accel.build.thread_time", lambda: now[0])
    run(make_model("llama"), [requests(2)], None, Slow(1), near)
    assert len(told) > 5
    assert set(told) == {(0, 0)}


def test_work_between_two_steps_counts_for_the_second(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time between two steps, for planning, replies and reports, is added to the second step,
    however many tokens it has.
    """
    now = [0.0]
    told = list[float]()
    plan = Scheduler.schedule

    class Told(AnyLength):
        def observed(
            self, plan: StepPlan, rounds: Sequence[Any], seconds: tuple[float, float]
        ) -> None:
            told.append(seconds[1])

    def planned(scheduler: Scheduler) -> StepPlan:
        now[0] += 500 if len(told) == 9 else 5
        return plan(scheduler)

    monkeypatch.setattr(Scheduler, "schedule", planned)
    monkeypatch.setattr("atts.accel.build.thread_time", lambda: now[0])
    run(make_model("llama"), [requests(2)], None, Told(1), near)
    assert len(told) > 15
    assert told[0] == 0
    assert set(told[1:9]) == {5}
    assert 5 < told[9] < 6
    assert told[-1] < told[9]


def test_waiting_for_requests_is_not_step_time(
    make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that the loop waits for requests does not count as step time, also before the first
    request.
    """
    now = [0.0]
    told = list[float]()
    take = Script.take

    class Told(AnyLength):
        def observed(
            self, plan: StepPlan, rounds: Sequence[Any], seconds: tuple[float, float]
        ) -> None:
            told.append(seconds[1])

    def waiting(inbox: Script, *, wait: bool) -> list[Command]:
        now[0] += 500 if wait else 5
        return take(inbox, wait=wait)

    monkeypatch.setattr(Script, "take", waiting)
    monkeypatch.setattr("atts.accel.build.thread_time", lambda: now[0])
    run(
        make_model("llama"),
        [[order] for order in requests(1, 2)] + [[]] * 9 + [requests(2)],
        None,
        Told(0),
        near,
    )
    assert len(told) > 15
    assert set(told) == {0, 5}


def test_a_repeated_step_is_not_learned_from(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step fails and is repeated, its duration is not used to choose proposal lengths. It took
    the time of two steps, and no proposal was verified.
    """
    orders = requests(2)
    compute = StepLoop._run  # pyright: ignore[reportPrivateUsage]
    plain = run(make_model("llama"), [orders])
    broken = list[StepPlan]()
    told = list[bool]()

    def breaking(loop: StepLoop, plan: StepPlan, *rest: Any) -> Any:
        if plan.proposals and len(told) % 2:
            broken.append(plan)
            raise RuntimeError("a kernel broke")
        return compute(loop, plan, *rest)

    class Said(AnyLength):
        def observed(
            self, plan: StepPlan, rounds: Sequence[Any], seconds: tuple[float, float]
        ) -> None:
            told.append(any(plan is each for each in broken))

    monkeypatch.setattr(StepLoop, "_run", breaking)
    assert same(
        plain, run(make_model("llama"), [orders], Knowing(texts(plain), "right"), Said(4, 1))
    )
    assert broken
    assert told
    assert not any(told)
