"""Tests of the structures that rank scores, against a sorted list."""

import math
import random
import tracemalloc
from bisect import bisect_left, bisect_right, insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atts.calibration import Calibrator, Mode
from atts.calibration.pools import (
    MINIMUM,
    ByTurn,
    Fading,
    Pooled,
    Ranks,
    Residuals,
    ScoreHistory,
    Window,
)
from atts.errors import CalibrationInputError

VALUES = st.one_of(
    st.integers(0, 6).map(float), st.floats(allow_nan=False), st.sampled_from([math.inf, -math.inf])
)


@given(st.lists(VALUES, max_size=60), VALUES)
def test_counts_and_selection_match_a_sorted_list(values: list[float], probe: float) -> None:
    """Counts and selected scores equal those of a sorted list, with ties and infinities as well."""
    pool = Ranks()
    ordered = sorted(values)
    for value in values:
        pool.add(value)
    assert list(pool) == ordered
    assert pool.counts(probe) == (bisect_left(ordered, probe), ordered.count(probe))
    assert [pool.kth(k + 1) for k in range(len(ordered))] == ordered


@pytest.mark.parametrize("kinds", [3, 10_000])
def test_large_pools_split_and_shrink_correctly(kinds: int) -> None:
    """Pools match a sorted list while blocks split, ties span blocks, and all scores are removed."""
    draw = random.Random(kinds)
    pool = Ranks()
    ordered = list[float]()
    for step in range(6000):
        value = float(draw.randrange(kinds))
        pool.add(value)
        insort(ordered, value)
        if step % 3 == 2:
            gone = ordered.pop(draw.randrange(len(ordered)))
            pool.remove(gone)
        if step % 97 == 0:
            left = bisect_left(ordered, value)
            right = bisect_right(ordered, value)
            assert pool.counts(value) == (left, right - left)
            assert pool.kth(len(ordered) // 2 + 1) == ordered[len(ordered) // 2]
    assert list(pool) == ordered
    for value in ordered:
        pool.remove(value)
    assert len(pool) == 0
    assert pool.counts(1.0) == (0, 0)


def test_a_stored_score_takes_ten_bytes() -> None:
    """Scores are kept as raw numbers instead of objects, because a long run stores a score per
    chunk.
    """
    count = 30_000
    tracemalloc.start()
    pool = Ranks(place / count for place in range(count // 2))
    for place in range(count // 2, count):
        pool.add(place / count)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10 * len(pool)


def test_absent_scores_and_ranks_are_errors() -> None:
    """Removing a score that is not in the pool raises KeyError, and selecting a rank outside the
    pool raises IndexError.
    """
    pool = Ranks([1.0])
    with pytest.raises(KeyError):
        pool.remove(2.0)
    with pytest.raises(KeyError):
        Ranks().remove(2.0)
    for k in (0, 2):
        with pytest.raises(IndexError):
            pool.kth(k)


@given(st.lists(VALUES, max_size=40), st.integers(1, 10), VALUES)
def test_a_window_is_the_last_scores(values: list[float], width: int, probe: float) -> None:
    """A window contains exactly the last `width` scores, in order."""
    window = Window(width)
    for value in values:
        window.add(value)
    kept = values[-width:]
    assert list(window) == kept
    assert window.rank(probe) == (
        sum(v < probe for v in kept),
        sum(v == probe for v in kept),
        len(kept),
    )


@given(
    st.lists(st.integers(0, 4).map(float), max_size=400),
    st.sampled_from([0.5, 0.9, 0.99]),
    st.integers(0, 4),
)
def test_a_fading_memory_has_geometric_weights(
    values: list[float], decay: float, probe: float
) -> None:
    """The weighted rank and size of a fading memory equal sums of decay^age, up to a dropped
    remainder of a billionth.
    """
    memory = Fading(decay)
    for value in values:
        memory.add(value)
    weights = [decay ** (len(values) - at) for at in range(len(values))]
    expected = (
        sum(w for w, v in zip(weights, values, strict=True) if v < probe),
        sum(w for w, v in zip(weights, values, strict=True) if v == probe),
        sum(weights),
    )
    assert tuple(memory.rank(probe)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("memory", [Window(), Window(5), Fading(0.8)])
def test_memories_are_rebuilt_from_their_scores(memory: ScoreHistory) -> None:
    """If the scores of a memory are added to an empty memory of the same kind, both give the same
    ranks.
    """
    draw = random.Random(0)
    for _ in range(300):
        memory.add(draw.choice([draw.random(), 0.5]))
    again = Window(None if len(memory) == 300 else 5) if isinstance(memory, Window) else Fading(0.8)
    for score in memory:
        again.add(score)
    assert tuple(again.rank(0.5)) == pytest.approx(tuple(memory.rank(0.5)))


def test_memory_of_a_fading_pool_is_bounded() -> None:
    """However many scores are added to a fading pool, it keeps only about 21 / (1 - decay)
    scores.
    """
    memory = Fading(0.9)
    for step in range(20_000):
        memory.add(float(step % 7))
    assert len(memory) <= 21 / 0.1


@pytest.mark.parametrize(
    ("build", "value"), [(Window, 0), (Fading, 0.0), (Fading, 1.0), (Fading, math.nan)]
)
def test_impossible_memories_are_refused(build: type[Window] | type[Fading], value: float) -> None:
    """A window of size 0 and a decay outside (0, 1) are errors."""
    with pytest.raises(CalibrationInputError):
        build(value)  # type: ignore[arg-type]  # the mistake under test


def test_only_a_mode_that_asks_by_turn_keeps_pools_of_turns() -> None:
    """Pools by turn exist only in modes that use them: scope `question` ranks among all turns, so
    pools by turn would only waste memory.
    """
    turns: dict[str, int] = {}
    modes: tuple[Mode, ...] = ("question", "question-turn")
    for mode in modes:
        calibrator = Calibrator(0.2, mode)
        for place in range(60):
            calibrator.observe(calibrator.decide(1.0 + place % 7, f"q{place % 5}", place % 3))
        turns[mode] = len(calibrator.state()["pool"]["base"]["ranks"]["turns"])
    assert turns == {"question": 0, "question-turn": 3}


def test_a_turn_is_ranked_among_all_turns_until_its_pool_is_large_enough() -> None:
    """While turn 1 has few scores, its new scores are ranked among those of all turns; later they
    are ranked only among those of turn 1.
    """
    by_turn = ByTurn()
    everything = Pooled()
    for place in range(MINIMUM + 5):
        for pool in (by_turn, everything):
            pool.add(1.0 + place / 100, f"q{place}", 0)
    for place in range(MINIMUM):
        assert by_turn.rank(5.0, "new", 1) == everything.rank(5.0, "new", 1)
        for pool in (by_turn, everything):
            pool.add(4.0 + place / 10, f"q{place}", 1)
    alone = Pooled()
    for place in range(MINIMUM):
        alone.add(4.0 + place / 10, f"q{place}", 1)
    assert by_turn.rank(5.0, "new", 1) == alone.rank(5.0, "new", 1)
    assert by_turn.rank(5.0, "new", 1) != everything.rank(5.0, "new", 1)
    # a turn without scores is ranked like a score without a turn
    assert by_turn.rank(5.0, "new", 9) == by_turn.rank(5.0, "new", None)


def test_siblings_count_for_their_question_alone() -> None:
    """A score ranks lower if its siblings were all worse, and siblings change the ranks of no other
    question.
    """
    calibrator = Calibrator(0.3, "question-turn")
    for place in range(40):
        question = f"q{place % 8}"
        score = 9.0 + place / 100 if question == "q0" else 2.0 + place / 100
        calibrator.observe(calibrator.decide(score, question, 0))
    hard = calibrator.p_value(5.0, ("q0", 0))
    easy = calibrator.p_value(5.0, ("q1", 0))
    unknown = calibrator.p_value(5.0, ("fresh", 0))
    assert hard < unknown < easy


def test_a_question_with_wide_scores_ranks_its_outliers_lower() -> None:
    """With a prior, ranks in a question depend on the question's own spread as well as on the
    spread of all questions. Ranks in other questions do not change.
    """

    def pool(prior: float) -> Residuals:
        residuals = Residuals(Window, None, 1.0, prior)
        for place in range(60):
            question = f"q{place % 6}"
            spread = 8.0 if question == "q0" else 0.1
            residuals.add(5.0 + spread * (-1) ** (place // 6), question, 0)
        return residuals

    plain = pool(0.0)
    blended = pool(20.0)
    assert blended.rank(9.0, "q0", 0).p(1.0) < plain.rank(9.0, "q0", 0).p(1.0) - 0.01
    for question in (None, "fresh"):
        assert blended.rank(9.0, question, 0) == plain.rank(9.0, question, 0)
