"""Tests of caps on calls, tokens and dollars: no cap is exceeded, with any order of calls and after
any kill.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from atts.concurrency import task_group
from atts.core import Problem, Role, SampleRequest, ScoreRequest, Usage
from atts.errors import EngineUnavailable, JournalCorrupt, OptionError
from atts.journal import OpenProblem
from atts.ledger import (
    LEDGER,
    Account,
    Amount,
    Caps,
    LedgerFile,
    LimitReached,
    Price,
    cost_of,
    most_of,
    prices_of,
    read_ledger,
    read_prices,
    taken_by,
)
from atts.run import (
    EngineCalls,
    EscalationCounter,
    Recorder,
    RunLengthEstimate,
    RunOptions,
    Stop,
    evaluate,
)
from atts.run.calls import ProblemLog
from atts.testing import Faults, Latency, ScriptedEngine, run_virtual, toy_problems
from tests.run.conftest import World

PRICES: dict[Role, Price] = {"draft": Price(0.1, 0.4, 0.05), "target": Price(1.5, 6.0)}
NUMBERS = [field.name for field in fields(Amount)]


def check(account: Account) -> None:
    """Check that spent and reserved amounts together are within the account's caps."""
    assert account.caps.exceeded_by(account.spent + account.reserved) == ""
    assert all(getattr(account.reserved, name) >= 0 for name in NUMBERS)
    assert all(getattr(account.spent, name) >= 0 for name in NUMBERS)


def unwritten_log(stop: Stop | None = None) -> ProblemLog:
    """Make the log of a problem in a run without a journal; call this inside the event loop."""
    recorder = Recorder(None, (), EscalationCounter(), RunLengthEstimate(1, samples=1))
    return ProblemLog(recorder, OpenProblem(Problem("p", "?")), stop or Stop(), "instant")


amounts = st.builds(
    Amount,
    st.just(1),
    st.integers(0, 50),
    st.integers(0, 200),
    st.integers(0, 5 * 10**9),
)


class Ledger(RuleBasedStateMachine):
    """A state machine: under one common cap, requests open, reserve, get replies, fail and end in
    any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ceiling = Account(Caps(40, 300, 2_000, 0.05))
        self.requests: list[Account] = []
        self.open: list[tuple[Any, Any]] = []
        self.charged = Amount()

    @rule(calls=st.none() | st.integers(1, 9), tokens=st.none() | st.integers(1, 500))
    def begin(self, calls: int | None, tokens: int | None) -> None:
        """Open a request with its own caps."""
        caps = Caps(max_calls=calls, max_total_tokens=tokens)
        self.requests.append(Account(caps, name=f"r{len(self.requests)}", inside=self.ceiling))

    @rule(most=amounts, at=st.integers(0, 100))
    def reserve(self, most: Amount, at: int) -> None:
        """Reserve a call; if it is refused, check that the named cap is really used up."""
        if not self.requests:
            return
        account = self.requests[at % len(self.requests)]
        context = account.reserved_now(most)
        names = [one.caps.exceeded_by(one.spent + one.reserved + most) for one in account.accounts]
        if any(names):
            with pytest.raises(LimitReached, match=next(filter(None, names))):
                context.__enter__()
        else:
            self.open.append((context, context.__enter__()))

    @rule(at=st.integers(0, 100), share=st.floats(0, 1), answered=st.booleans())
    def settle(self, at: int, share: float, answered: bool) -> None:
        """End a call, either with a reply that used part of the reservation, or as failed and
        charged in full.
        """
        if not self.open:
            return
        context, reservation = self.open.pop(at % len(self.open))
        taken = reservation.most
        if answered:
            values = (int(getattr(taken, name) * share) for name in NUMBERS[1:])
            taken = Amount(1, *values)
            reservation.answered(taken)
        self.charged += taken
        context.__exit__(None, None, None)

    @invariant()
    def within(self) -> None:
        """Check that no cap is exceeded, and that the common account equals the sum of its
        requests.
        """
        for account in (self.ceiling, *self.requests):
            check(account)
        assert sum((one.spent for one in self.requests), Amount()) == self.ceiling.spent
        assert self.ceiling.spent == self.charged


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("requests", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_random_requests_on_the_scripted_engine_keep_every_cap(requests: int) -> None:
    """Requests of random size keep every cap, although a third of them is cancelled and engines
    fail.
    """
    draw = random.Random(7)
    ceiling = Account(Caps(max_calls=3 * requests, max_cost=requests * 1e-4), prices=PRICES)
    refused = 0
    begun = 0

    async def one(engine: ScriptedEngine, role: Role, number: int) -> None:
        nonlocal refused, begun
        caps = Caps(
            max_calls=draw.choice([None, 1, 3]),
            max_total_tokens=draw.choice([None, 20, 120]),
            max_cost=draw.choice([None, 1e-5, 1e-4]),
        )
        account = Account(caps, name=f"r{number}", prices=PRICES, inside=ceiling)
        calls = EngineCalls(engine, role, None, 60.0, unwritten_log(), account=account)
        ids = engine.tokenizer.encode("Start at 4. +3, -2.")
        cancelled_at = draw.choice([0.004, 1.0, 10.0])

        async def ask() -> None:
            nonlocal begun
            for _ in range(draw.randint(1, 4)):
                begun += 1
                try:
                    if draw.random() < 0.4:
                        await calls.score(ScoreRequest(ids, ids[:3]))
                    else:
                        await calls.sample(SampleRequest(ids, draw.randint(1, 40)))
                except EngineUnavailable:
                    pass
                check(account)
                check(ceiling)
            scope.cancel()

        async def end() -> None:
            nonlocal refused
            await account.exhausted()
            refused += 1
            scope.cancel()

        with anyio.move_on_after(cancelled_at) as scope:
            async with task_group() as group:
                group.start_soon(ask)
                group.start_soon(end)
        assert account.reserved == Amount()
        check(account)

    async def main() -> None:
        latency = Latency(per_sample=0.002, per_score=0.001, sampled_token=0.001)
        faults = Faults({"refused": 0.05})
        draft = ScriptedEngine("draft", latency=latency, faults=faults)
        target = ScriptedEngine("target", latency=latency, faults=faults)
        async with draft, target:
            for start in range(0, requests, 250):
                async with task_group() as group:
                    for number in range(start, min(requests, start + 250)):
                        role: Role = "draft" if number % 2 else "target"
                        group.start_soon(one, draft if number % 2 else target, role, number)
        assert ceiling.reserved == Amount()

    run_virtual(main)
    assert refused > requests / 20, "the caps must have refused many calls"
    assert ceiling.unanswered.calls > requests / 50, "many calls must have been cut or have failed"
    assert ceiling.spent.calls <= begun


def test_a_call_waits_for_what_others_reserved_and_did_not_use() -> None:
    """A call waits for calls whose reservations fill the cap, because they may use less than they
    reserved.
    """
    account = Account(Caps(max_total_tokens=100))
    order: list[str] = []

    async def first() -> None:
        with account.reserved_now(Amount(1, 0, 80)) as reservation:
            await anyio.sleep(1)
            order.append("first")
            reservation.answered(Amount(1, 0, 30))

    async def second() -> None:
        await anyio.sleep(0.1)
        await account.room(Amount(1, 0, 60))
        order.append("second")

    async def main() -> None:
        async with task_group() as group:
            group.start_soon(first)
            group.start_soon(second)

    run_virtual(main)
    assert order == ["first", "second"]
    assert account.limit == ""


@pytest.mark.parametrize(
    ("caps", "limit"),
    [
        (Caps(max_calls=40), "max_calls"),
        (Caps(max_target_tokens=60), "max_target_tokens"),
        (Caps(max_total_tokens=2_500), "max_total_tokens"),
        (Caps(max_cost=0.001), "max_cost"),
    ],
)
def test_a_run_stops_at_its_cap_and_resumes_with_a_higher_one(
    world: World, tmp_path: Path, caps: Caps, limit: str
) -> None:
    """A run that stopped at its cap resumes with a higher cap, remembers its spending, and ends
    like a run without caps.
    """
    problems = toy_problems(6)
    directory = tmp_path / "run"

    def session(caps: Caps) -> tuple[Any, Account]:
        directory.mkdir(exist_ok=True)
        with LedgerFile(directory / LEDGER) as file:
            account = Account(caps, prices=PRICES, file=file, spent=file.total)

            async def main() -> Any:
                options = RunOptions(directory, account=account, signals="ignore")
                return await evaluate(problems, world.plan(), options)

            return run_virtual(main), account

    result, account = session(caps)
    assert (result.status, result.why) == ("stopped", f"{limit} is used up")
    check(account)
    assert result.exit_code == 130
    before = account.spent
    assert before.calls > 0

    result, account = session(Caps())
    assert result.status == "finished"
    assert account.spent.calls > before.calls
    assert read_ledger(directory / LEDGER)[""] == account.spent

    async def alone() -> Any:
        return await evaluate(problems, world.plan(), RunOptions(signals="ignore"))

    assert [one.answer for one in result.problems] == [
        one.answer for one in run_virtual(alone).problems
    ]


def test_a_request_at_its_cap_answers_from_finished_rollouts(world: World) -> None:
    """A served request that reaches its cap is answered from the rollouts that finished within the
    cap.
    """
    account = Account(Caps(max_total_tokens=3_000), prices=PRICES)

    async def main() -> Any:
        options = RunOptions(account=account, on_limit="conclude", signals="ignore")
        return await evaluate(toy_problems(1), world.plan(concurrency=1), options)

    result = run_virtual(main)
    assert result.status == "finished"
    assert account.limit == "max_total_tokens"
    outcome = next(result.outcomes())
    ends = {rollout.finish for rollout in outcome.rollouts}
    assert "cancelled" in ends
    assert outcome.answer is not None
    check(account)


_KILLED = """
import sys
from atts.ledger import Account, Amount, Caps, LedgerFile
file = LedgerFile(__import__("pathlib").Path(sys.argv[1]))
account = Account(Caps(), file=file, spent=file.total)
number = 0
while True:
    with account.reserved_now(Amount(1, 2, 10)) as reservation:
        print(number, flush=True)
        number += 1
        reservation.answered(Amount(1, 1, 7))
"""


def test_a_killed_process_forgets_no_reservation(tmp_path: Path) -> None:
    """After kill -9 each dispatched call is charged: a settled call with its actual amount, any
    other with its whole reservation.
    """
    path = tmp_path / LEDGER
    announced = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(200):
            child.stdout.readline()
            announced += 1
        os.kill(child.pid, signal.SIGKILL)
        announced += len(child.stdout.read().splitlines())
        child.wait()
        child.stdout.close()
        spent = read_ledger(path)[""]
        assert announced <= spent.calls <= announced + 3
        assert 7 * spent.calls <= spent.total_tokens <= 7 * spent.calls + 3 * 3


def test_a_torn_last_line_is_ignored_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    """An incomplete last line of a ledger is ignored, because its call was never dispatched; a
    damaged line is an error.
    """
    path = tmp_path / LEDGER
    with LedgerFile(path) as file:
        account = Account(file=file)
        for _ in range(3):
            with account.reserved_now(Amount(1, 0, 5)):
                pass
    whole = path.read_bytes()
    path.write_bytes(whole + b'["reserve","",9,1,')
    assert read_ledger(path)[""] == Amount(3, 0, 15)
    path.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(JournalCorrupt, match="line 1 is damaged"):
        LedgerFile(path)


def test_a_long_ledger_is_compacted_to_its_sum(tmp_path: Path) -> None:
    """A long ledger is compacted: its size stays bounded although a call is always in flight, and
    every call is counted.
    """
    path = tmp_path / LEDGER
    file = LedgerFile(path, most_lines=50)
    account = Account(file=file)
    with account.reserved_now(Amount(1, 0, 1_000)):
        for _ in range(300):
            with account.reserved_now(Amount(1, 0, 5)) as reservation:
                reservation.answered(Amount(1, 0, 2))
            assert len(path.read_bytes().splitlines()) <= 53
        # a kill at this point would leave the file like this
        assert sum(read_ledger(path).values(), Amount()) == Amount(301, 0, 1_600)
    file.close()
    with LedgerFile(path) as again:
        assert again.total == account.spent
    assert len(path.read_bytes().splitlines()) == 1


def test_a_named_account_survives_restarts(tmp_path: Path) -> None:
    """A named account keeps its counts of calls and of calls without a reply, however often the
    file is reopened.
    """
    path = tmp_path / LEDGER
    for session in range(1, 4):
        with LedgerFile(path, most_lines=10, keep=["mine"]) as file:
            for _ in range(20):
                for name in ("mine", "other"):
                    number = file.reserve(name, Amount(1, 0, 9))
                    file.settle(name, number, Amount(1, 0, 4))
            number = file.reserve("mine", Amount(1, 0, 7))
            file.settle("mine", number, Amount(1, 0, 7), is_answered=False)
            mine = file.spent_by("mine")
            assert mine.answered == Amount(20 * session, 0, 80 * session)
            assert mine.unanswered == Amount(session, 0, 7 * session)
            so_far = Amount(41 * session, 0, 167 * session)
            assert sum(read_ledger(path).values(), Amount()) == so_far
    total = Amount(41 * 3, 0, 167 * 3)
    with LedgerFile(path, keep=["mine"]) as file:
        assert file.total == total
        file.merge("mine")
    with LedgerFile(path) as file:
        assert file.total == total
        assert read_ledger(path) == {"": total}


def test_a_cancelled_call_is_charged_as_the_most_it_could_take() -> None:
    """A cancelled call is charged with its whole reservation, because the engine may have done the
    work although no reply came.
    """
    account = Account(prices=PRICES)

    async def main() -> SampleRequest:
        async with ScriptedEngine("target", latency=Latency(per_sample=5.0)) as engine:
            calls = EngineCalls(engine, "target", None, 60.0, unwritten_log(), account=account)
            request = SampleRequest(engine.tokenizer.encode("Start at 4."), 30)
            with anyio.move_on_after(1):
                await calls.sample(request)
            return request

    request = run_virtual(main)
    assert account.spent == most_of("target", request, PRICES) == account.unanswered
    assert account.as_json()["cancelled"]["calls"] == 1


def test_a_call_that_waited_is_not_begun_after_the_run_was_stopped() -> None:
    """A call that waits for budget is neither made nor charged if the run is stopped meanwhile."""

    async def main() -> Account:
        async with ScriptedEngine("target", latency=Latency(per_sample=5.0)) as engine:
            ids = engine.tokenizer.encode(toy_problems(1)[0].text)
            request = SampleRequest(ids, 400)
            most = most_of("target", request, PRICES).total_tokens
            account = Account(Caps(max_total_tokens=2 * most - 1), prices=PRICES)
            stop = Stop()
            log = unwritten_log(stop)
            calls = EngineCalls(engine, "target", None, 60.0, log, account=account)
            async with task_group() as group:
                group.start_soon(calls.sample, request)
                group.start_soon(calls.sample, replace(request, rollout="another"))
                await anyio.sleep(1)
                assert stop.calls == 1
                stop.request()
                await anyio.sleep(20)
                assert account.spent.total_tokens < most, (
                    "the cap must leave room for the second call"
                )
                group.cancel_scope.cancel()
            return account

    account = run_virtual(main)
    assert account.spent.calls == 1
    assert account.reserved == account.unanswered == Amount()


def test_a_reply_costs_what_its_model_costs() -> None:
    """A reply is charged by its model's prices, exact to the picodollar.

    Cached tokens have their own price, and written tokens the output price.
    """

    async def main() -> None:
        async with ScriptedEngine("draft") as engine:
            request = SampleRequest(engine.tokenizer.encode("Start at 4. +3."), 20)
            reply = replace(await engine.sample(request), cached_tokens=2)
            taken = taken_by("draft", request, reply, PRICES)
            read = len(request.ids) - 2
            written = len(reply.ids)
            assert taken.total_tokens == read + 2 + written
            assert taken.picodollars == 100_000 * read + 50_000 * 2 + 400_000 * written

    run_virtual(main)


def test_prices_are_read_by_model_or_role(tmp_path: Path) -> None:
    """A price file names models or roles; the price of a role applies to whichever model has the
    role.
    """
    path = tmp_path / "prices.toml"
    path.write_text('["Qwen/Qwen3-32B"]\ninput = 0.1\noutput = 0.3\n[draft]\ninput=0\noutput=0\n')
    prices = prices_of(read_prices(path), {"draft": "any", "target": "Qwen/Qwen3-32B"})
    assert prices == {"draft": Price(0, 0), "target": Price(0.1, 0.3)}
    usage = Usage(target_tokens=1_000_000, target_prefill_tokens=2_000_000, draft_tokens=5)
    assert cost_of(usage, prices, ("draft", "target")) == pytest.approx(0.5)
    assert cost_of(usage, {}, ("target",)) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[m]\ninput = 1\n", "output"),
        ("[m]\ninput = -1\noutput = 1\n", "not a price"),
        ("[m]\ninput = 1\noutput = 1\ncached = 2\n", "above the input price"),
        ("[m]\ninput = 1\noutput = 1\nprice = 2\n", "price"),
        ("m = \n", "not TOML"),
        ("m = 3\n", "object"),
    ],
)
def test_a_wrong_price_file_is_refused_with_a_message(
    tmp_path: Path, text: str, problem: str
) -> None:
    """The message names the fault in the price file."""
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=problem):
        read_prices(path)
    with pytest.raises(OptionError, match="cannot be read"):
        read_prices(tmp_path / "missing.toml")


@pytest.mark.parametrize("name", ["max_calls", "max_target_tokens", "max_total_tokens", "max_cost"])
def test_an_impossible_cap_is_refused(name: str) -> None:
    """A cap of 0 is refused as a mistake, because nothing could run."""
    with pytest.raises(OptionError, match=name):
        Caps(**{name: 0})
