"""Repeated scores: copied draws are noticed, siblings that write the same chunk are left alone."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from atts.calibration import StoredScores, examine
from atts.calibration.drift import DriftMonitor, DuplicateScores
from atts.calibration.health import first_alarm

ArrayOf = Callable[..., StoredScores]


def alike(seed: int, questions: int = 40, texts: int = 6) -> StoredScores:
    """Questions whose sixteen siblings choose among few texts, each with its own score."""
    draw = np.random.default_rng(seed)
    levels = draw.gamma(2.0, 0.2, questions)
    menu = np.exp(levels[:, None] * draw.gamma(4.0, 0.25, (questions, texts)) + 1e-3)
    chosen = draw.integers(texts, size=(questions, 16))
    return StoredScores.of(np.take_along_axis(menu, chosen, axis=1).ravel().tolist(), 16)


def watched(stored: StoredScores, live: StoredScores, most: int = 300) -> DriftMonitor:
    """A monitor of the stored scores that has seen so many live ones, of other questions."""
    monitor = DriftMonitor(stored)
    for nonconformity, question in list(zip(live.nonconformity, live.questions, strict=True))[
        :most
    ]:
        monitor.observe(nonconformity, f"live {question}", 0)
    return monitor


def whole(stored: StoredScores, seed: int) -> StoredScores:
    """Whole questions of the same array, drawn with replacement."""
    rows = np.array(stored.scores).reshape(-1, 16)
    return StoredScores.of(
        rows[np.random.default_rng(seed).integers(len(rows), size=20)].ravel().tolist(), 16
    )


def copies(stored: StoredScores, every: int) -> StoredScores:
    """The same scores, one in so many a copy of the one before."""
    scores = stored.scores
    return StoredScores.of(
        [scores[at - (at % every == every - 1)] for at in range(len(scores))], 16
    )


def test_siblings_that_write_the_same_chunk_are_no_fault() -> None:
    """Most scores repeat, in the calibration and in the run: no alarm; the report says what they
    are worth.
    """
    stored = alike(0)
    found = DuplicateScores.of(stored)
    assert found.within > 0.5
    assert (found.across, found.fault) == (0, "")
    assert not DriftMonitor(stored).events
    assert sum(bool(watched(stored, whole(stored, seed)).events) for seed in range(10)) <= 1
    warnings = " ".join(examine(stored, 0.4).warnings)
    assert "siblings that wrote the same chunk" in warnings
    assert "worth about" in warnings


@pytest.mark.parametrize("every", [2, 10])
def test_copied_draws_are_noticed_once_the_siblings_of_the_run_do_not_repeat(
    every: int, array_of: ArrayOf
) -> None:
    """At the first look, for half of the draws and for a tenth of them."""
    for seed in range(5):
        events = watched(copies(array_of(), every), whole(array_of(), seed)).events
        assert [(event.kind, event.scores) for event in events] == [("duplicates", 64)]
        assert "copied" in events[0].message


def test_copies_of_whole_draws_in_few_questions_are_a_fault_at_once(array_of: ArrayOf) -> None:
    """A published array: two of fifteen questions have two distinct scores of sixteen, the others
    repeat nothing.
    """
    found = DuplicateScores.of(array_of("e0abbf88"))
    assert found.within == pytest.approx(1 - 212 / 240)
    assert found.distinct == pytest.approx(13 / 15)
    assert DriftMonitor(array_of("e0abbf88")).events[0].scores == 0
    assert not DriftMonitor(array_of()).events


def test_a_score_of_two_questions_is_a_fault_at_once() -> None:
    """Questions read twice under two names; chunks that were certain meet by nature."""
    scores = [1.1 + k**0.5 / 7 for k in range(320)]
    twice = StoredScores.of([*scores, *scores], 16)
    assert DuplicateScores.of(twice).across == 1
    assert "another question" in DriftMonitor(twice).events[0].message
    certain = StoredScores.of([1.0 if k % 16 == 0 else score for k, score in enumerate(scores)], 16)
    assert DuplicateScores.of(certain).across == 0
    assert not DriftMonitor(certain).events


def test_repeats_of_unknown_questions_are_a_fault_at_once() -> None:
    """Nothing could explain them."""
    events = DriftMonitor(StoredScores.of(list(alike(1).scores))).events
    assert "not known" in events[0].message


def test_without_a_run_to_compare_with_a_doubt_is_a_fault() -> None:
    """The check of a file alone says both explanations; the scores of a run settle it."""
    stored = alike(2)
    assert "siblings" in first_alarm(stored).events[0].message
    assert not first_alarm(stored, whole(stored, 0)).events


def test_scores_on_a_coarse_grid_are_not_called_repeats() -> None:
    """Marks out of ten tie by nature."""
    marks = [1.0 + (k * 7 % 10) / 2 for k in range(400)]
    assert DuplicateScores.of(StoredScores.of(marks, 16)).within == 0


def test_single_samples_of_questions_cannot_tell(array_of: ArrayOf) -> None:
    """A run with one sample a question repeats nothing by nature: copied draws are not read into
    that.
    """
    live: Iterator[float] = iter(whole(array_of(), 3).nonconformity)
    monitor = DriftMonitor(copies(array_of(), 2))
    for number in range(100):
        monitor.observe(next(live), f"live {number}", 0)
    assert all(event.kind != "duplicates" for event in monitor.events)
