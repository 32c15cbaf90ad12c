"""Tests of saved calibrators: they continue exactly, can be merged, and are refused if damaged."""

import json
import math
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import pytest

from atts.calibration import MODES, Calibrator, Mode, StoredScores
from atts.calibration.controllers import Adaptive
from atts.calibration.scores import check_fingerprint, read_scores
from atts.calibration.state import read_state, strict, write_state
from atts.errors import CalibrationInputError, FingerprintError, StorageError

STORED = StoredScores.of(
    [1 + 0.013 * k for k in range(1, 97)], 16, fingerprint={"model": "m", "limits": (500, 15)}
)


def stream(count: int, seed: int = 0) -> list[tuple[float, str, int]]:
    """Sample scores with ties and infinities over a few questions and turns."""
    draw = random.Random(seed)
    return [
        (
            draw.choice([1 + draw.expovariate(2), 1.25, math.inf]),
            f"q{draw.randrange(6)}",
            draw.randrange(3),
        )
        for _ in range(count)
    ]


def play(calibrator: Calibrator, part: list[tuple[float, str, int]], first: int = 0) -> list[Any]:
    """Decide on a part of a stream, with issue numbers that are slightly out of order."""
    decisions = list[Any]()
    for place, (score, question, turn) in enumerate(part, first):
        decision = calibrator.decide(score, question, turn, place, place ^ 1)
        calibrator.observe(decision)
        decisions.append(decision)
    return decisions


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"decay": 0.9}])
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_calibrator_continues_exactly(
    mode: Mode, options: dict[str, Any], tmp_path: Path
) -> None:
    """A calibrator that is saved to a file with scores in flight makes the same later decisions."""
    whole = Calibrator(0.3, mode, stored=STORED, seed=7, **options)
    half = Calibrator(0.3, mode, stored=STORED, seed=7, **options)
    scores = stream(301)
    expected = play(whole, scores)
    assert play(half, scores[:151]) == expected[:151]
    half.save(tmp_path / "half.json")
    again = Calibrator.load(tmp_path / "half.json", fingerprint={"model": "m", "limits": [500, 15]})
    rest = play(again, scores[151:], 151)
    assert [d.action for d in rest] == [d.action for d in expected[151:]]
    assert [d.p for d in rest] == pytest.approx([d.p for d in expected[151:]])
    assert (again.decided, again.escalated) == (whole.decided, whole.escalated)
    assert "Infinity" not in (tmp_path / "half.json").read_text()


@pytest.mark.parametrize("mode", ["marginal", "aci", "question", "question-turn"])
def test_calibrators_of_two_shards_can_be_merged(mode: Mode) -> None:
    """The calibrators of two shards can be merged: their pools and counts add up, and the merged
    calibrator continues to decide.
    """
    left, right = (Calibrator(0.4, mode, stored=STORED) for _ in range(2))
    both = Calibrator(0.4, mode, stored=STORED)
    for calibrator, part in (
        (left, stream(90, 1)),
        (right, stream(110, 2)),
        (both, stream(90, 1) + stream(110, 2)),
    ):
        for place, (score, question, turn) in enumerate(part):
            calibrator.observe(calibrator.decide(score, question, turn, place))
    left.merge(json.loads(json.dumps(strict(right.state()))))
    assert left.decided == both.decided == 200
    if mode in ("marginal", "aci"):
        for score in (1.1, 1.25, 1.8, 9.0):
            assert left.p_value(score) == both.p_value(score)
            assert left.p_value(score, 1) == both.p_value(score, 1)
    assert (
        (left.decide(1.0, "q1", 0, 0).p or 0)
        < 0.1
        < 0.6
        < (left.decide(math.inf, "q1", 0, 0).p or 0)
    )


def test_calibrators_with_different_settings_are_not_merged() -> None:
    """Calibrators with another rate, mode, stored scores or conditions are not merged, and the
    error names the difference.
    """
    mine = Calibrator(0.4, "marginal", stored=STORED)
    other = StoredScores.of([1.5] * 32, 16, fingerprint=STORED.fingerprint)
    for strange, words in (
        (Calibrator(0.3, "marginal", stored=STORED), "rate"),
        (Calibrator(0.4, "question", stored=STORED), "mode"),
        (Calibrator(0.4, "marginal", stored=other), "stored"),
    ):
        with pytest.raises(CalibrationInputError, match=words):
            mine.merge(strange.state())
    with pytest.raises(FingerprintError):
        mine.merge(
            Calibrator(0.4, "marginal", stored=STORED, fingerprint=None).state()
            | {"fingerprint": {}}
        )
    waiting = Calibrator(0.4, "marginal", stored=STORED)
    waiting.observe(waiting.decide(1.5, "q", 0, 0, issue=3))
    with pytest.raises(CalibrationInputError, match="merge"):
        mine.merge(waiting.state())


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """A missing, truncated, edited or foreign calibrator file is refused with an error that names
    the file, without a traceback of json.
    """
    path = tmp_path / "calibrator.json"
    with pytest.raises(CalibrationInputError, match="read"):
        Calibrator.load(path)
    Calibrator(0.4, stored=STORED).save(path)
    text = path.read_text()
    for cut in (0, 1, len(text) // 2, len(text) - 3):
        path.write_text(text[:cut])
        with pytest.raises(CalibrationInputError, match="calibrator.json"):
            Calibrator.load(path)
    path.write_text(text.replace('"decided": 0', '"decided": 5'))
    with pytest.raises(CalibrationInputError, match="altered"):
        Calibrator.load(path)
    write_state(path, STORED.state())
    with pytest.raises(CalibrationInputError, match="state"):
        Calibrator.load(path)
    path.write_text("[1, 2]")
    with pytest.raises(CalibrationInputError, match="digest"):
        read_state(path)


def test_a_state_of_other_conditions_is_refused(tmp_path: Path) -> None:
    """A state is restored only if each field of its fingerprint is equal and present in both the
    state and the run.
    """
    Calibrator(0.4, stored=STORED).save(tmp_path / "c.json")
    with pytest.raises(FingerprintError, match="limits"):
        Calibrator.load(tmp_path / "c.json", fingerprint={"model": "m"})
    with pytest.raises(FingerprintError, match="engine"):
        check_fingerprint("it", {"model": "m"}, {"model": "m", "engine": "local 0.1"})


def test_an_old_state_survives_a_failed_write(tmp_path: Path) -> None:
    """A failed write raises StorageError and leaves the earlier file unchanged."""
    path = tmp_path / "c.json"
    Calibrator(0.4, stored=STORED).save(path)
    before = path.read_text()
    with pytest.raises(StorageError):
        Calibrator(0.4).save(tmp_path / "absent" / "c.json")
    with pytest.raises(CalibrationInputError, match="number"):
        write_state(path, {"kind": "x", "value": math.nan})
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["c.json"]


def test_scores_are_read_from_every_supported_file(tmp_path: Path, shared_data: Path) -> None:
    """JSON Lines, {question: [scores]}, atts' own file and a published array give stored scores;
    pickles are refused.
    """
    import numpy as np

    lines = tmp_path / "scores.jsonl"
    lines.write_text('{"question": 3, "turn": 1, "score": 1.5}\n\n{"score": 2.0}\n')
    assert read_scores(lines).questions == ("3", "")
    mapping = tmp_path / "scores.json"
    mapping.write_text('{"7": [1.5, 1.7], "8": [2.0]}')
    assert read_scores(mapping).questions == ("7", "7", "8")
    write_state(mapping, STORED.state())
    assert read_scores(mapping).scores == STORED.scores
    np.save(tmp_path / "objects.npy", np.array({"a": [1.5]}), allow_pickle=True)
    with pytest.raises(CalibrationInputError, match="objects.npy"):
        read_scores(tmp_path / "objects.npy")
    for text in ('{"turn": 1}', "[1]", '{"score": 1.5', '{"score": "x"}'):
        lines.write_text(text)
        with pytest.raises(CalibrationInputError):
            read_scores(lines)
    published = sorted((shared_data / "traces" / "calibration").glob("*ec846181.npy"))[0]
    assert len(read_scores(published, 16)) == 1600


@pytest.mark.parametrize("mode", MODES)
def test_an_ended_question_keeps_only_its_scores(mode: Mode) -> None:
    """Ending a question changes no decision on other questions, also after a save, and the ended
    question uses memory only for its scores.
    """
    stored = [1.0 + number / 50 for number in range(100)]
    keeping, letting = (Calibrator(0.3, mode, stored=stored, seed=5) for _ in range(2))
    draws = random.Random(3)
    sizes: list[int] = []
    issue = 0
    for question in range(60):
        for sample in range(4):
            for turn in range(3):
                score = 1 + draws.expovariate(2.0)
                decisions = [
                    calibrator.decide(score, f"q{question}", turn, sample, issue)
                    for calibrator in (keeping, letting)
                ]
                assert decisions[0] == decisions[1]
                for calibrator, decision in zip((keeping, letting), decisions, strict=True):
                    calibrator.observe(decision)
                issue += 1
        letting.forget(f"q{question}")
        letting = Calibrator.restored(letting.state())
        sizes.append(
            len(
                re.findall(
                    r"q\d+", json.dumps([letting.state()[part] for part in ("controller", "pool")])
                )
            )
        )
    assert sizes == [0] * 60


def test_scores_that_wait_are_dropped_with_their_question() -> None:
    """If a question ends while one of its scores waits to join the pools, the score is dropped."""
    calibrator = Calibrator(0.3, "question-turn", hold=8)
    late = calibrator.decide(1.5, "slow", issue=0)
    early = calibrator.decide(1.2, "quick", issue=1)
    calibrator.observe(early)
    calibrator.forget("quick")
    calibrator.observe(late)
    calibrator.forget("slow")
    assert "quick" not in json.dumps(calibrator.state())
    assert "slow" not in json.dumps(calibrator.state())


@pytest.mark.parametrize(
    "change",
    [
        {"mode": ["aci"]}, {"mode": "none"}, {"stored": None}, {"tuning": {"x": 1}}, {"rate": "1/0"}, {"options": []},
        {"decided": True}, {"decided": -1}, {"escalated": 10**9}, {"pool": "x"}, {"order": {}}, {"alert": [1]},
        {"monitor": None}, {"fingerprint": 3}, {"controller": {"a": 1}}, {"seed": "x"}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_with_wrong_fields_is_refused(change: dict[str, Any]) -> None:
    """A state in which any single field is changed or missing is refused with a message."""
    calibrator = Calibrator(0.3, "aci", stored=STORED)
    play(calibrator, stream(20))
    state = json.loads(json.dumps(strict(calibrator.state())))
    assert Calibrator.restored(state).decided == 20
    with pytest.raises(CalibrationInputError):
        Calibrator.restored({**state, **change})
    with pytest.raises(CalibrationInputError):
        Calibrator.restored(
            {name: part for name, part in state.items() if name not in change}
            if "more" not in change
            else {}
        )


@pytest.mark.parametrize("mode", [*MODES, "by length"])
def test_memory_per_chunk_is_a_few_numbers(mode: Mode | Literal["by length"]) -> None:
    """While questions begin and end, a calibrator stores only one score for each chunk. This takes
    a few times eight bytes per chunk.
    """
    by_length = mode == "by length"
    draw = random.Random(5)
    stored = STORED if mode == "split" else ()  # split mode stores no live score
    calibrator = Calibrator(
        0.3, "marginal" if mode == "by length" else mode, by_length=by_length, stored=stored
    )
    held: list[int] = []
    tracemalloc.start()
    for issue in range(2400):
        question = f"q{issue // 12}"
        length = draw.uniform(10, 500)
        score = 1 + draw.expovariate(2)
        turn = issue // 4 % 3
        decision = calibrator.decide(score, question, turn, issue % 4, issue, length=length)
        calibrator.observe(decision)
        if issue % 12 == 11:
            calibrator.forget(question)
        if issue % 1200 == 1199:
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # with lengths each score is kept three times
    assert held[1] - held[0] < (60 if by_length else 36) * 1200


def test_merged_levels_add_up_as_distances_from_the_rate() -> None:
    """If both shards escalated too little, the merged calibrator makes up for the sum of both
    deficits. A surplus in one shard and a deficit in the other cancel.
    """

    def level(deficits: list[bool]) -> tuple[Adaptive, float]:
        controller = Adaptive(0.2, 0.01)
        for escalated in deficits:
            controller.update(None, "q", 0, escalated)
        return controller, controller.current_rate(1.0, "q", 0)

    short = [False] * 10
    one, first = level(short)
    assert first == pytest.approx(0.22)
    other, _ = level(short)
    one.merge(other.state())
    assert one.current_rate(1.0, "q", 0) == pytest.approx(0.24)
    over, _ = level([True] * 5)
    one.merge(over.state())
    assert one.current_rate(1.0, "q", 0) == pytest.approx(0.20)
    fresh = Adaptive(0.2, 0.01)
    fresh.merge(one.state())
    assert fresh.current_rate(1.0, "q", 0) == one.current_rate(1.0, "q", 0)
