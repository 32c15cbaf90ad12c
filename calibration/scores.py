"""The scale of scores, and stored scores with their question, turn and fingerprint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert

from atts.calibration.state import read_state, strict
from atts.errors import CalibrationInputError, FingerprintError, OptionError, counted
from atts.files import from_json, read_ordinary

Worse = Literal["higher", "lower"]
Measure = Literal["log", "linear"]

FEW_SCORES = 40
"""Ranks among fewer scores than this number are unreliable."""

# Scores of one question are correlated, so the scores of fewer questions than this number say little
# about new questions.
_FEW_QUESTIONS = 10

# Sums of float32 log-probabilities are rounded, so a score may be outside its domain by this much.
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Scale:
    """The domain of a score, with the direction in which scores get worse.

    `low` and `high` are the inclusive bounds of the domain. `worse` says whether weak chunks have
    higher or lower scores. `measure` says whether scores are compared by their logarithms ("log",
    for perplexities) or directly ("linear", for mean log-probabilities and the marks of a judge).
    """

    name: str
    low: float
    high: float
    worse: Worse = "higher"
    measure: Measure = "linear"

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise CalibrationInputError("score domain", (self.low, self.high), "low < high")
        if self.measure == "log" and self.low <= 0:
            raise CalibrationInputError(
                "score domain", (self.low, self.high), "low > 0 for a logarithmic measure"
            )

    def nonconformity(self, score: object, what: str = "score") -> float:
        """Return the score as a nonconformity, for which larger is always worse.

        The nonconformity is never NaN, and it is infinite only if the score is infinite.

        :raises CalibrationInputError: naming the score as `what`, if it is not a number, is NaN, or
        lies outside the domain.

        >>> PERPLEXITY.nonconformity(1.0), LOG_PROB.nonconformity(-2.5)
        (0.0, 2.5)
        """
        # Every decision calls this function, so skip the slow conversion if the score is a float.
        if type(score) is float:
            value = score
        else:
            value = plain_number(what, score, f"a number, {self.domain}")
        # Comparisons with NaN are False, so NaN is refused below.
        if not self.low <= value <= self.high:
            if not self.low - _SLACK <= value <= self.high + _SLACK:
                raise CalibrationInputError(what, value, self.domain)
            value = min(max(value, self.low), self.high)
        if self.measure == "log":
            value = math.log(value)
        return value if self.worse == "higher" else -value

    @property
    def domain(self) -> str:
        """Return a description of the domain, such as "a perplexity in [1, inf]"."""
        return f"a {self.name} in [{self.low:g}, {self.high:g}]"


def plain_number(what: str, value: object, expected: str = "a number") -> float:
    """Return any real number as a float, including NumPy numbers.

    :raises CalibrationInputError: naming the value as `what`, if it is not a number; strings and
    booleans are refused.
    """
    if not isinstance(value, (bool, str, bytes)):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            pass
    raise CalibrationInputError(what, value, expected)


PERPLEXITY = Scale("perplexity", 1.0, math.inf, "higher", "log")
LOG_PROB = Scale("mean log-prob", -math.inf, 0.0, "lower")
REAL = Scale("number", -math.inf, math.inf)
SCALES = {"perplexity": PERPLEXITY, "logprob": LOG_PROB, "real": REAL}


def scale_named(name: str) -> Scale:
    """Return the scale with this name.

    :raises OptionError: for an unknown name.
    """
    if name not in SCALES:
        raise OptionError(name, "is not a scale of scores", sorted(SCALES))
    return SCALES[name]


# The header of an .npy file with a one-dimensional array. The two groups match the data type and
# the length of the array.
_HEADER = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|[\x02\x03]\x00....)"
    rb"\{'descr': '([<>|][fiu][1248])', 'fortran_order': (?:False|True), 'shape': \((\d{1,15}),\), \} *\n",
    re.DOTALL,
)


class _State(Struct):
    scale: str
    fingerprint: dict[str, Any]
    scores: tuple[float | Literal["inf", "-inf"], ...]
    questions: tuple[str, ...]
    turns: tuple[Annotated[int, Meta(ge=0)], ...]
    lengths: tuple[Annotated[float, Meta(gt=0)], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredScores:
    """The scores of a calibration run, and the conditions under which they were made.

    Each score has a question and a turn. An empty question means that the question is unknown; such
    scores count as independent, which they rarely are. `lengths` has the length of each chunk in
    tokens or any other unit, or is empty.
    """

    scores: tuple[float, ...]
    questions: tuple[str, ...]
    turns: tuple[int, ...]
    scale: Scale = PERPLEXITY
    fingerprint: Mapping[str, object] = field(default_factory=dict[str, object])
    lengths: tuple[float, ...] = ()
    nonconformity: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.scores) == len(self.questions) == len(self.turns):
            sizes = (len(self.scores), len(self.questions), len(self.turns))
            raise CalibrationInputError(
                "stored scores", sizes, "exactly one question and one turn for each score"
            )
        is_complete = len(self.lengths) in (0, len(self.scores))
        if not is_complete or not all(0 < length < math.inf for length in self.lengths):
            raise CalibrationInputError(
                "lengths of stored scores",
                len(self.lengths),
                "a number above 0 for each score, or no lengths at all",
            )
        nonconformity = tuple(
            self.scale.nonconformity(score, f"score {number}")
            for number, score in enumerate(self.scores, 1)
        )
        object.__setattr__(self, "nonconformity", nonconformity)

    @classmethod
    def of(
        cls,
        scores: Iterable[float],
        per_question: int | None = None,
        scale: Scale = PERPLEXITY,
        fingerprint: Mapping[str, object] | None = None,
        lengths: Iterable[float] = (),
    ) -> StoredScores:
        """Return stored scores of turn 0, in the order given.

        With `per_question`, every group of that many consecutive scores belongs to one question.

        :raises CalibrationInputError: if the last question would be incomplete, or a value is not a
        score.
        """
        values = tuple(
            plain_number(f"score {number}", score) for number, score in enumerate(scores, 1)
        )
        if per_question is not None and (per_question < 1 or len(values) % per_question):
            raise CalibrationInputError(
                "per_question",
                per_question,
                f"a number that divides {counted(len(values), 'score')} evenly",
            )
        if per_question is None:
            questions = [""] * len(values)
        else:
            questions = [f"stored {place // per_question}" for place in range(len(values))]
        return cls(
            scores=values,
            questions=tuple(questions),
            turns=(0,) * len(values),
            scale=scale,
            fingerprint=dict(fingerprint or {}),
            lengths=tuple(lengths),
        )

    @classmethod
    def from_records(
        cls,
        records: Iterable[Mapping[str, Any]],
        scale: Scale = PERPLEXITY,
        fingerprint: Mapping[str, object] | None = None,
    ) -> StoredScores:
        """Make stored scores from records with the key "score". The keys "question", "turn" and
        "length" are optional.

        :raises CalibrationInputError: if a record has no score, or its turn or length is invalid.
        """
        rows = list(records)
        for number, row in enumerate(rows, 1):
            if "score" not in row:
                fields = ", ".join(map(str, row))
                raise CalibrationInputError(
                    f"record {number}",
                    f"a record without a score (fields: {fields})",
                    'a field "score"',
                )
        turns = [
            whole_number(f"turn of record {number}", row.get("turn", 0))
            for number, row in enumerate(rows, 1)
        ]
        lengths = list[float]()
        if all(row.get("length") for row in rows):  # Lengths are used only if every record has one.
            lengths = [
                plain_number(f"length of record {number}", row["length"])
                for number, row in enumerate(rows, 1)
            ]
        return cls(
            scores=tuple(row["score"] for row in rows),
            questions=tuple(str(row.get("question", "")) for row in rows),
            turns=tuple(turns),
            scale=scale,
            fingerprint=dict(fingerprint or {}),
            lengths=tuple(lengths),
        )

    def records(self) -> list[dict[str, Any]]:
        """Return the scores as records with question, turn and length, as `from_records` reads
        them.
        """
        rows = zip(self.scores, self.rows(), strict=True)
        return [
            {"score": score, "question": question, "turn": turn, "length": length}
            for score, (_, question, turn, length) in rows
        ]

    def rows(self) -> Iterator[tuple[float, str, int, float | None]]:
        """Yield nonconformity, question, turn and length of every score."""
        lengths = self.lengths or (None,) * len(self)
        yield from zip(self.nonconformity, self.questions, self.turns, lengths, strict=True)

    @property
    def warning(self) -> str:
        """Return a warning if these scores are too few for a precise calibrator, otherwise ""."""
        scores = counted(len(self), "score")
        if not self.clustered:
            is_rough = len(self) < FEW_SCORES
            return (
                f"a calibrator from {scores} is rough; use at least {FEW_SCORES} scores"
                if is_rough
                else ""
            )
        questions = len(set(self.questions))
        if len(self) >= FEW_SCORES and questions >= _FEW_QUESTIONS:
            return ""
        return (
            f"a calibrator from {scores} of {counted(questions, 'question')} is rough; use at "
            f"least {FEW_SCORES} scores of at least {_FEW_QUESTIONS} questions"
        )

    @property
    def clustered(self) -> bool:
        """Return True if the question of every score is known."""
        return bool(self.questions) and all(self.questions)

    def __len__(self) -> int:
        return len(self.scores)

    def state(self) -> dict[str, Any]:
        """Return the scores and their conditions as values for JSON, with infinite scores as
        strings.
        """
        state: dict[str, Any] = {
            "kind": "atts scores",
            "version": 1,
            "scale": self.scale.name,
            "fingerprint": dict(self.fingerprint),
            "scores": [score if math.isfinite(score) else str(score) for score in self.scores],
            "questions": list(self.questions),
            "turns": list(self.turns),
        }
        if self.lengths:
            state["lengths"] = list(self.lengths)
        return state

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> StoredScores:
        """Return the stored scores that `state` describes.

        :raises CalibrationInputError: if `state` is not the state of stored scores.
        """
        scales = {scale.name: scale for scale in SCALES.values()}
        try:
            saved = convert(dict(state), _State)
        except ValidationError as error:
            raise CalibrationInputError(
                "stored scores", str(error), "a file written by `atts calibration import`"
            ) from None
        if saved.scale not in scales:
            raise CalibrationInputError("scale", saved.scale, f"one of {', '.join(sorted(scales))}")
        return cls(
            scores=tuple(float(score) for score in saved.scores),
            questions=saved.questions,
            turns=saved.turns,
            scale=scales[saved.scale],
            fingerprint=saved.fingerprint,
            lengths=saved.lengths,
        )


def labels_of(records: Iterable[Mapping[str, Any]]) -> tuple[bool | None, ...]:
    """Return, for each record, whether its field "correct" is true.

    The value is None for a record without that field.

    :raises CalibrationInputError: if a value is neither true nor false.
    """
    labels = list[bool | None]()
    for number, record in enumerate(records, 1):
        label = record.get("correct")
        if label is None:
            labels.append(None)
        elif isinstance(label, bool | int) and label in (0, 1):
            labels.append(bool(label))
        else:
            raise CalibrationInputError(
                f"correct of record {number}", label, "true, false, or a missing field"
            )
    return tuple(labels)


def whole_number(what: str, value: object) -> int:
    """Return the value if it is a whole number of at least 0.

    :raises CalibrationInputError: naming the value as `what`, if it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise CalibrationInputError(what, value, "a whole number of at least 0")
    return int(value)


def check_fingerprint(what: str, stored: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise an error if the conditions differ in any field; a field that only one of them has also
    counts as a difference.

    :raises FingerprintError: naming each difference, if a field differs.
    """
    absent = "(not recorded)"
    different = list[tuple[str, object, object]]()
    for name in {**stored, **now}:
        old = stored.get(name, absent)
        new = now.get(name, absent)
        if strict(old) != strict(new):
            different.append((name, old, new))
    if different:
        raise FingerprintError(what, different)


def check_stored(
    stored: StoredScores, now: Mapping[str, object], mode: str, *, by_length: bool
) -> None:
    """Raise an error if a calibrator of this mode cannot start from these stored scores.

    :raises FingerprintError: if the scores were made under other conditions.
    :raises CalibrationInputError: if mode "split" has no stored scores, or if lengths are needed
        but not known.
    """
    if not len(stored) and mode == "split":
        raise CalibrationInputError(
            "stored scores",
            0,
            'at least one, because rate scope "split" does not learn from the run',
        )
    if len(stored):
        check_fingerprint("the calibration", stored.fingerprint, now)
        if by_length and not stored.lengths:
            raise CalibrationInputError(
                "stored scores",
                "without lengths",
                "the length of every chunk, because by_length is set",
            )


def read_scores(
    path: Path,
    per_question: int | None = None,
    scale: Scale = PERPLEXITY,
    fingerprint: Mapping[str, object] | None = None,
) -> StoredScores:
    """Return the scores of a file.

    The format is JSON Lines of records, an .npy array, JSON {question: [scores]}, or a saved state.
    An .npy file is read without unpickling: a file that contains Python objects is refused.

    :raises CalibrationInputError: if the file has none of these formats, or contains something that
    is not a score.
    """
    if path.suffix == ".npy":
        return StoredScores.of(_read_array(path), per_question, scale, fingerprint)
    try:
        text = read_ordinary(path).decode("utf-8")
    except UnicodeDecodeError:
        raise CalibrationInputError(
            str(path), "not text", "JSON Lines, a .npy array or JSON"
        ) from None
    if path.suffix == ".json" or is_state(text):
        return _read_mapping(path, text, scale, fingerprint)
    return StoredScores.from_records(parse_lines(text.splitlines(), str(path)), scale, fingerprint)


def is_state(text: str) -> bool:
    """Return True if a file's content is a saved state, False if it has one record per line."""
    return text.startswith('{"kind": "atts ')


def parse_lines(lines: Sequence[str], source: str) -> list[dict[str, Any]]:
    """Parse a string in JSON Lines format into records. Blank lines are skipped.

    :raises CalibrationInputError: if a line is not a JSON object; the error names the line.
    """
    records = list[dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = from_json(line)
        except ValueError as error:
            raise CalibrationInputError(
                f"{source}, line {number}", line[:60], f"one JSON object ({error})"
            ) from None
        if not isinstance(record, dict):
            raise CalibrationInputError(f"{source}, line {number}", line[:60], "one JSON object")
        records.append(record)
    return records


def _read_array(path: Path) -> Sequence[float]:
    """Read an .npy file that contains a one-dimensional array of numbers.

    The header must declare one dimension, and exactly as many numbers as the file has. `numpy.load`
    is not used, because it may unpickle objects, and allocates as much memory as the header
    declares.
    """
    data = read_ordinary(path)
    header = _HEADER.match(data)
    if header is None:
        raise CalibrationInputError(
            str(path),
            "a file of another kind",
            "an .npy file with a one-dimensional array of numbers",
        )
    kind = np.dtype(header[1].decode())
    count = int(header[2])
    numbers = data[header.end() :]
    if len(numbers) != count * kind.itemsize:
        raise CalibrationInputError(
            str(path), f"{len(numbers)} bytes", f"{count} numbers of {kind.itemsize} bytes each"
        )
    return [float(value) for value in np.frombuffer(numbers, kind)]


def _read_mapping(
    path: Path, text: str, scale: Scale, fingerprint: Mapping[str, object] | None
) -> StoredScores:
    try:
        table = from_json(text)
    except ValueError as problem:
        raise CalibrationInputError(str(path), str(problem), "JSON {question: [scores]}") from None
    kind = table.get("kind") if isinstance(table, dict) else None
    if kind == "atts scores":
        return StoredScores.restore(read_state(path))
    if kind == "atts calibrator":
        # The stored scores with which the calibrator was created, without live scores.
        return StoredScores.restore(read_state(path)["stored"])
    is_mapping = isinstance(table, dict)
    if not is_mapping or not all(isinstance(scores, list) for scores in table.values()):
        raise CalibrationInputError(str(path), type(table).__name__, "JSON {question: [scores]}")
    records = [
        {"question": name, "score": score} for name, scores in table.items() for score in scores
    ]
    return StoredScores.from_records(records, scale, fingerprint)
