"""Tests of `atts tune`: it derives a server's best number of proposed tokens from its step times
and counters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from atts.api.tuning import LoadTiming, TuneAdvice, advise
from atts.cli.app import run as command
from atts.local import LocalEngine, LocalOptions
from atts.models import path
from atts.servers import DraftCounts
from atts.testing import ServerQuirks
from atts.testing.servers import DialectServer

Serve = Callable[..., DialectServer]
# acceptance at each position, provided that all earlier positions were accepted
SHARES = (0.8, 0.75, 0.7)


def embedded() -> LocalEngine:
    """Make an engine of the embedded draft, whose tokenizer is on this machine."""
    return LocalEngine(
        path("draft"), name="draft", options=LocalOptions(worker="thread", kv_tokens=8192)
    )


def timings(
    cost: Callable[[float], float], loads: Sequence[int], shares: Sequence[float] = SHARES
) -> list[LoadTiming]:
    """Make the counters of a server with these acceptance rates, whose steps of `rows` tokens take
    `cost(rows)` seconds.
    """
    made = list[LoadTiming]()
    for load in loads:
        steps = 10_000
        accepted = list[int]()
        left = float(steps)
        for share in shares:
            left *= share
            accepted.append(round(left))
        tokens = steps + sum(accepted)
        seconds = steps / load * cost(load * (1 + len(shares)))
        drafted = DraftCounts(steps, steps * len(shares), tuple(accepted)) if shares else None
        made.append(LoadTiming(load, tokens, seconds, drafted))
    return made


LOADS = (1, 2, 4, 8, 16, 32, 64)


def test_free_rows_give_the_longest_proposal() -> None:
    """If a step takes the same time for any number of tokens, the longest proposal is recommended."""
    found = advise(timings(lambda rows: 0.02, LOADS), 3)
    assert [each.length for each in found.loads] == [3] * len(LOADS)
    assert json.loads(found.config) == {"method": "ngram", "num_speculative_tokens": 3}
    assert found.acceptance == pytest.approx((0.8, 0.6, 0.42), abs=0.01)
    assert ["at least 4 tokens" in warning for warning in found.warnings] == [True]


def test_rows_at_full_cost_give_no_proposals() -> None:
    """If a step's time is proportional to its number of tokens, and steps without proposals were
    timed too, the advice is "none".
    """

    def cost(rows: float) -> float:
        return 0.01 * rows

    found = advise(timings(cost, LOADS, ()) + timings(cost, LOADS), 3)
    assert [each.length for each in found.loads] == [0] * len(LOADS)
    assert found.config == "none"
    assert str(found).splitlines()[-1] == "--speculative-config none"


def test_steps_that_were_never_timed_are_named() -> None:
    """The advice lists the step sizes without a measurement.

    For example, a server that always proposes three tokens takes no step of fewer than four tokens.
    """
    found = advise(timings(lambda rows: 0.01 * rows, LOADS), 3)
    assert [each.length for each in found.loads][2:] == [0] * len(LOADS[2:])
    assert "at least 4 tokens" in found.warnings[0]


def test_proposals_grow_shorter_with_the_load() -> None:
    """If a step takes the same time for up to 48 tokens, the advice is long proposals at small
    loads and none at large loads.
    """
    found = advise(timings(lambda rows: 0.02 * max(1.0, rows / 48), LOADS), 6)
    lengths = [each.length for each in found.loads]
    assert lengths[0] >= 3
    assert lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True)
    config = json.loads(found.config)
    ranges = config["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert all(length > 0 for *_, length in ranges), "a range of 0 would hit a defect of the server"
    assert all(one[1] + 1 == other[0] for one, other in zip(ranges, ranges[1:], strict=False))
    warning = found.warnings[-1]
    assert f"--concurrency at {ranges[-1][1]}" in warning


def test_the_forecast_of_the_length_in_use_is_near_what_was_measured() -> None:
    """For the proposal length in use, the forecast is within 10 % of the measurement at every load,
    also for nonlinear costs.
    """
    found = advise(timings(lambda rows: 0.01 + 0.0004 * rows, LOADS), 4)
    for each in found.loads:
        assert each.forecast == pytest.approx(each.measured, rel=0.1)


def test_the_choice_is_the_best_of_all_lengths_by_enumeration() -> None:
    """With exact step times and acceptance rates, no other proposal length gives over 3 % more
    tokens per second.
    """

    def cost(rows: float) -> float:
        return 0.01 + 0.0008 * rows

    found = advise(timings(cost, LOADS), 3)
    for each in found.loads:
        goodputs = list[float]()
        expected = 1.0
        share = 1.0
        for length in range(4):
            goodputs.append(each.load * expected / cost(each.load * (1 + length)))
            if length < 3:
                share *= SHARES[length]
                expected += share
        assert goodputs[each.length] >= 0.97 * max(goodputs)


def test_a_server_that_proposed_nothing_gets_no_advice() -> None:
    """A server that proposed nothing gets no advice, because its acceptance is unknown even though
    its steps are timed.
    """
    found = advise(timings(lambda rows: 0.02, LOADS, ()), 4)
    assert found.config == "none"
    assert found.acceptance == ()
    assert "tune again" in found.warnings[0]
    assert all(each.step_ms == pytest.approx(20) for each in found.loads)


def test_the_order_of_timings_does_not_matter() -> None:
    """The advice depends only on the set of measurements, not on their order."""
    made = timings(lambda rows: 0.01 + 0.0008 * rows, LOADS)
    assert [each.length for each in advise(made, 3).loads] == [
        each.length for each in advise(made[::-1], 3).loads
    ]


@pytest.mark.parametrize("speculation", ["off", "lossless"])
def test_a_server_is_tuned_by_its_counters(
    serve: Serve, speculation: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server is tuned by the counters that it publishes over HTTP; only their growth during the
    command counts.
    """
    quirks = ServerQuirks(speculation=speculation, acceptance=SHARES)
    server = serve("vllm", embedded, model="owner/draft", quirks=quirks)
    words = f"vllm:{server.url}/owner/draft?tokenizer={path('draft')}"
    asked = ["tune", words, "--load", "1,4", "--tokens", "48", "--most", "4"]
    assert command([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["load"] for each in found["loads"]] == [1, 4]
    assert all(each["measured"] > 0 and each["step_ms"] > 0 for each in found["loads"])
    if speculation == "off":
        assert (found["config"], found["acceptance"]) == ("none", [])
        return
    assert found["acceptance"][0] == pytest.approx(0.8, abs=0.12)
    assert found["acceptance"] == sorted(found["acceptance"], reverse=True)
    assert command(asked) == 0
    assert "--speculative-config " in capsys.readouterr().out


@pytest.mark.parametrize("load", ["a", "4,1", "0", "1,1"])
def test_loads_that_do_not_rise_are_refused(
    serve: Serve, load: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error about loads that are not in increasing order names the flag, and the exit code is
    2.
    """
    server = serve("vllm", embedded, model="owner/draft")
    words = f"vllm:{server.url}/owner/draft?tokenizer={path('draft')}"
    assert command(["tune", words, "--load", load]) == 2
    assert "--load" in capsys.readouterr().err


def test_if_no_load_pays_the_advice_has_no_setting() -> None:
    """If speculation gains nothing at any load, the advice is the word "none"."""
    assert TuneAdvice("ngram", (0.5,), ()).config == "none"
