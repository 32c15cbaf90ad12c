"""Tests of ranking by length: the rate of a short run is unbiased although short chunks finish
first.
"""

import heapq
import json
import math
import random
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from atts.calibration import MODES, Calibrator, Mode, StoredScores, replay_scores
from atts.calibration.pools import LengthStrata
from atts.errors import CalibrationInputError

Records = list[dict[str, Any]]


def chunks(number: int, draw: random.Random) -> list[tuple[float, float]]:
    """Sample lengths and scores whose logarithms have a correlation of 0.54, as measured on a real
    pair of models. A limit cuts some of the lengths.
    """
    found: list[tuple[float, float]] = []
    for _ in range(number):
        place = draw.gauss(0, 1)
        score = 0.54 * place + math.sqrt(1 - 0.54**2) * draw.gauss(0, 1)
        found.append(
            (
                min(500.0, 60 + 5 * round(math.exp(4 + 0.5 * place))),
                math.exp(abs(0.6 + 0.15 * score)),
            )
        )
    return found


def arrivals(number: int, in_flight: int, seed: int, lasts_with_length: bool = True) -> Records:
    """Simulate the first chunks of a run; a chunk begins when another one ends.

    A chunk lasts as long as its length or, without `lasts_with_length`, as long as the length of a
    random other chunk.
    """
    draw = random.Random(seed)
    made = chunks(number, draw)
    durations = [length for length, _ in (made if lasts_with_length else draw.sample(made, number))]
    going: list[tuple[float, int]] = []
    found = Records()
    waiting = list(range(number))[::-1]
    now = 0.0
    while waiting or going:
        while waiting and len(going) < in_flight:
            place = waiting.pop()
            heapq.heappush(going, (now + durations[place] + 1e-6 * draw.random(), place))
        now, place = heapq.heappop(going)
        length, score = made[place]
        record = {
            "question": place // 16,
            "sample": place % 16,
            "turn": 0,
            "score": score,
            "length": length,
        }
        found.append({**record, "issue": len(found)})
    return found


def realised(in_flight: int, by_length: bool, number: int = 400, **options: Any) -> float:
    """Return the mean realised rate of mode `marginal` at nominal rate 0.2."""
    runs = (arrivals(number, in_flight, seed, **options) for seed in range(16))
    rates = (
        replay_scores(run, 0.2, "marginal", seed=at, by_length=by_length).escalated
        for at, run in enumerate(runs)
    )
    return fmean(rates)


@pytest.mark.parametrize("in_flight", [64, 256])
def test_marginal_mode_keeps_its_rate_when_long_chunks_score_worse_and_come_later(
    in_flight: int,
) -> None:
    """If long chunks score worse and end later, ranks among all chunks are biased, but ranks by
    length give a rate within 0.01 of the nominal one.
    """
    assert realised(in_flight, by_length=False) > 0.22
    assert realised(in_flight, by_length=True) == pytest.approx(0.2, abs=0.01)


def test_ranks_are_unbiased_if_time_does_not_depend_on_length() -> None:
    """If durations are shuffled, ranks by length and ranks among all chunks both keep the rate. The
    bias of ranks among all chunks therefore comes from the order of arrival.
    """
    assert realised(256, by_length=False, lasts_with_length=False) == pytest.approx(0.2, abs=0.01)
    assert realised(256, by_length=True, lasts_with_length=False) == pytest.approx(0.2, abs=0.01)


def test_short_and_long_chunks_escalate_equally_often() -> None:
    """If chunks are ranked by length, the shorter and the longer half of them escalate equally
    often. If they are ranked among all chunks, the longer half escalates more often.
    """
    run = arrivals(1200, 64, 3)
    middle = sorted(record["length"] for record in run)[600]

    def shares(by_length: bool) -> tuple[float, float]:
        done = replay_scores(run, 0.2, "marginal", by_length=by_length)
        pairs = list(zip(run, done.decisions, strict=True))
        return (
            fmean(decision.escalate for record, decision in pairs if record["length"] <= middle),
            fmean(decision.escalate for record, decision in pairs if record["length"] > middle),
        )

    short, long = shares(True)
    assert abs(long - short) < 0.05
    short, long = shares(False)
    assert long - short > 0.15


def stored() -> StoredScores:
    """Make stored scores with lengths."""
    run = arrivals(160, 64, 9)
    return StoredScores.from_records(run)


@pytest.mark.parametrize("mode", MODES)
def test_a_restored_calibrator_continues_equally_in_every_mode(mode: Mode) -> None:
    """In every mode a calibrator saved as JSON and restored continues exactly, even while scores
    wait for an earlier issue number. Its guarantee states that chunks are ranked by length.
    """
    run = arrivals(240, 64, 1)
    random.Random(2).shuffle(run)
    start = stored() if mode == "split" else ()

    def steps(calibrator: Calibrator, part: Records) -> list[tuple[float | None, bool]]:
        found: list[tuple[float | None, bool]] = []
        for record in part:
            names = ("sample", "issue", "length")
            decision = calibrator.decide(
                record["score"],
                str(record["question"]),
                record["turn"],
                **{name: record[name] for name in names},
            )
            calibrator.observe(decision)
            found.append((decision.p, decision.escalate))
        return found

    whole, half = (Calibrator(0.3, mode, stored=start, by_length=True) for _ in range(2))
    expected = steps(whole, run)
    assert steps(half, run[:130]) == expected[:130]
    again = Calibrator.restored(json.loads(json.dumps(half.state())))
    assert steps(again, run[130:]) == expected[130:]
    assert again.state()["lengths"] == whole.state()["lengths"]
    assert "about the same length" in again.guarantee


def test_merging_counts_common_stored_scores_once() -> None:
    """If two merged calibrators started from the same stored scores, these scores are counted once."""
    one, other = (
        Calibrator(0.3, "marginal", stored=stored(), by_length=True, drift="report")
        for _ in range(2)
    )
    for calibrator, length in ((one, 100.0), (other, 101.0)):
        calibrator.observe(calibrator.decide(1.5, "q", length=length))
    one.merge(other.state())
    held = sum(len(row[2]) // 2 for row in one.state()["lengths"]["strata"])
    assert held == 160 + 2


@pytest.mark.parametrize("length", [None, 0, -3.0, math.inf, math.nan])
def test_an_impossible_length_is_refused_if_lengths_are_used(length: float | None) -> None:
    """With ranking by length, the error names the impossible length; without ranking by length the
    same length is accepted.
    """
    with pytest.raises(CalibrationInputError, match="length"):
        Calibrator(0.2, "aci", by_length=True).decide(1.5, length=length)
    assert Calibrator(0.2, "aci").decide(1.5, length=length).length is None


def test_stored_scores_without_lengths_are_refused() -> None:
    """Ranking by length refuses stored scores of which some or all lack a length."""
    with pytest.raises(CalibrationInputError, match="without lengths"):
        Calibrator(0.2, "split", stored=[1.2, 1.5], by_length=True)
    with pytest.raises(CalibrationInputError, match="lengths"):
        replace(stored(), lengths=(1.0, 2.0))
    assert StoredScores.restore(stored().state()) == stored()


def test_equal_lengths_stay_one_stratum_and_infinite_scores_rank_worst() -> None:
    """Chunks that were cut at the length limit have equal lengths, and are ranked only among each
    other. Infinite scores rank worst.
    """
    strata = LengthStrata()
    for place in range(500):
        strata.add(float(place), 128.0)
    assert strata.rank(250.0, 128.0) == (250, 1, 500)
    calibrator = Calibrator(0.2, "marginal", by_length=True)
    for place in range(50):
        calibrator.observe(calibrator.decide(1.5 + place / 100, length=128.0 + place))
    assert calibrator.decide(math.inf, length=128).escalate
    calibrator.observe(calibrator.decide(math.inf, length=128))
    assert calibrator.decide(1.5, length=128).p == pytest.approx(0.02, abs=0.06)
