"""Scores: their declared scale, and stored ones with question, turn and fingerprint."""

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
from atts.errors import CalibrationInputError, FingerprintError, OptionError
from atts.files import from_json, read_ordinary

Worse = Literal["higher", "lower"]
Measure = Literal["log", "linear"]

_SLACK = 1e-6  # sums of float32 log-probs may miss a closed end of the domain by this much


@dataclass(frozen=True, slots=True)
class Scale:
    """The declaration a score comes with.

    `low` and `high` bound the domain (both ends belong to it), `worse` says which end a weak chunk
    is near, and `measure` whether differences are read on the logarithm (perplexities) or as they
    are (mean log-probs, judge marks).
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
        """The score on the scale everything here is computed on: larger is worse, never NaN,
        infinite only if the score is.

        :raises CalibrationInputError: naming it as `what`, if it is not a number, is NaN, or lies
            outside the domain.

        >>> PERPLEXITY.nonconformity(1.0), LOG_PROB.nonconformity(-2.5)
        (0.0, 2.5)
        """
        value = (
            score if type(score) is float else plain_number(what, score, f"a number, {self.domain}")
        )
        if not self.low <= value <= self.high:
            if not self.low - _SLACK <= value <= self.high + _SLACK:
                raise CalibrationInputError(what, value, self.domain)
            value = min(max(value, self.low), self.high)
        if self.measure == "log":
            value = math.log(value)
        return value if self.worse == "higher" else -value

    @property
    def domain(self) -> str:
        """The domain in words."""
        return f"a {self.name} in [{self.low:g}, {self.high:g}]"


def plain_number(what: str, value: object, expected: str = "a number") -> float:
    """Any real number as a float, numpy's included.

    :raises CalibrationInputError: naming it as `what`, if it is none; texts and truth values are
        none.
    """
    try:
        if not isinstance(value, (bool, str, bytes)):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        pass
    raise CalibrationInputError(what, value, expected)


PERPLEXITY = Scale("perplexity", 1.0, math.inf, "higher", "log")
LOG_PROB = Scale("mean log-prob", -math.inf, 0.0, "lower")
REAL = Scale("number", -math.inf, math.inf)
SCALES = {"perplexity": PERPLEXITY, "logprob": LOG_PROB, "real": REAL}


def scale_named(name: str) -> Scale:
    """One of the declared scales by name.

    :raises OptionError: for an unknown name.
    """
    if name not in SCALES:
        raise OptionError(name, "is not a scale of scores", sorted(SCALES))
    return SCALES[name]


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
    """Scores of a calibration run, each with its question and turn, and the conditions they were
    made under.

    An empty question means that it is not known; such scores count as independent, which they
    rarely are. `lengths` are those of the chunks, in tokens or any other unit, or none.
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
            raise CalibrationInputError("stored scores", sizes, "a question and a turn for each")
        if len(self.lengths) not in (0, len(self.scores)) or not all(
            0 < one < math.inf for one in self.lengths
        ):
            raise CalibrationInputError(
                "lengths of stored scores", len(self.lengths), "a number above 0 for each, or none"
            )
        made = (
            self.scale.nonconformity(score, f"score {number}")
            for number, score in enumerate(self.scores, 1)
        )
        object.__setattr__(self, "nonconformity", tuple(made))

    @classmethod
    def of(
        cls,
        scores: Iterable[float],
        per_question: int | None = None,
        scale: Scale = PERPLEXITY,
        fingerprint: Mapping[str, object] | None = None,
        lengths: Iterable[float] = (),
    ) -> StoredScores:
        """Scores of turn 0 in a row; with `per_question`, that many consecutive ones belong to one
        question.

        :raises CalibrationInputError: if the scores are not whole questions, or one is no score.
        """
        values = tuple(
            plain_number(f"score {number}", score) for number, score in enumerate(scores, 1)
        )
        if per_question is not None and (per_question < 1 or len(values) % per_question):
            raise CalibrationInputError(
                "per_question", per_question, f"a divisor of {len(values)} scores"
            )
        names = (
            f"stored {at // per_question}" if per_question else "" for at in range(len(values))
        )
        return cls(
            values, tuple(names), (0,) * len(values), scale, dict(fingerprint or {}), tuple(lengths)
        )

    @classmethod
    def from_records(
        cls,
        records: Iterable[Mapping[str, Any]],
        scale: Scale = PERPLEXITY,
        fingerprint: Mapping[str, object] | None = None,
    ) -> StoredScores:
        """Records {"score"} with optional "question", "turn" and "length".

        :raises CalibrationInputError: if a record has no score, or an impossible turn or length.
        """
        rows = list(records)
        for number, row in enumerate(rows, 1):
            if "score" not in row:
                fields = ", ".join(map(str, row))
                raise CalibrationInputError(
                    f"record {number}", f"without a score ({fields})", 'a field "score"'
                )
        known = rows if all(row.get("length") for row in rows) else ()
        return cls(
            tuple(row["score"] for row in rows),
            tuple(str(row.get("question", "")) for row in rows),
            tuple(
                whole_number(f"turn of record {number}", row.get("turn", 0))
                for number, row in enumerate(rows, 1)
            ),
            scale,
            dict(fingerprint or {}),
            tuple(
                plain_number(f"length of record {number}", row["length"])
                for number, row in enumerate(known, 1)
            ),
        )

    def records(self) -> list[dict[str, Any]]:
        """The way back from `from_records`: score, question, turn and length of each."""
        rows = zip(self.scores, self.rows(), strict=True)
        return [
            {"score": score, "question": question, "turn": turn, "length": length}
            for score, (_, question, turn, length) in rows
        ]

    def rows(self) -> Iterator[tuple[float, str, int, float | None]]:
        """Nonconformity, question, turn and length of every score."""
        yield from zip(
            self.nonconformity,
            self.questions,
            self.turns,
            self.lengths or (None,) * len(self),
            strict=True,
        )

    @property
    def clustered(self) -> bool:
        """Whether every score names its question."""
        return bool(self.questions) and all(self.questions)

    def __len__(self) -> int:
        return len(self.scores)

    def state(self) -> dict[str, Any]:
        """The scores and their conditions as strict JSON, infinite scores as strings."""
        return {
            "kind": "atts scores",
            "version": 1,
            "scale": self.scale.name,
            "fingerprint": dict(self.fingerprint),
            "scores": [score if math.isfinite(score) else str(score) for score in self.scores],
            "questions": list(self.questions),
            "turns": list(self.turns),
            **({"lengths": list(self.lengths)} if self.lengths else {}),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> StoredScores:
        """The inverse of `state`."""
        names = {scale.name: scale for scale in SCALES.values()}
        try:
            found = convert(dict(state), _State)
        except ValidationError as error:
            raise CalibrationInputError(
                "stored scores", str(error), "what `atts calibration import` writes"
            ) from None
        if found.scale not in names:
            raise CalibrationInputError("scale", found.scale, f"one of {', '.join(sorted(names))}")
        values = tuple(map(float, found.scores))
        scale = names[found.scale]
        return cls(values, found.questions, found.turns, scale, found.fingerprint, found.lengths)


def labels_of(records: Iterable[Mapping[str, Any]]) -> tuple[bool | None, ...]:
    """Whether the answer that each record's chunk led to was right, by its field "correct"; None
    where it has none.

    :raises CalibrationInputError: one is neither true nor false.
    """
    found = tuple(record.get("correct") for record in records)
    for number, label in enumerate(found, 1):
        if label is not None and (not isinstance(label, bool | int) or label not in (0, 1)):
            raise CalibrationInputError(
                f"correct of record {number}", label, "true, false, or no such field"
            )
    return tuple(None if label is None else bool(label) for label in found)


def whole_number(what: str, value: object) -> int:
    """A count from 0.

    :raises CalibrationInputError: naming it as `what`, if it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise CalibrationInputError(what, value, "a whole number from 0")
    return int(value)


def check_fingerprint(what: str, stored: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse a state made under other conditions: every field that either side names must be equal.

    :raises FingerprintError: naming each difference.
    """
    absent = "(not recorded)"
    pairs = [(name, stored.get(name, absent), now.get(name, absent)) for name in {**stored, **now}]
    different = [(name, old, new) for name, old, new in pairs if strict(old) != strict(new)]
    if different:
        raise FingerprintError(what, different)


def check_stored(
    stored: StoredScores, now: Mapping[str, object], mode: str, *, by_length: bool
) -> None:
    """Refuse stored scores with which a calibrator of this mode, under these conditions, could not
    begin.

    :raises FingerprintError: they were made under other conditions.
    :raises CalibrationInputError: there are none and mode "split" wants some; or wanted lengths are
        not known.
    """
    if not len(stored) and mode == "split":
        raise CalibrationInputError(
            "stored scores", 0, 'at least one for mode "split", which learns nothing live'
        )
    if len(stored):
        check_fingerprint("the calibration", stored.fingerprint, now)
        if by_length and not stored.lengths:
            raise CalibrationInputError(
                "stored scores", "without lengths", "the length of every chunk, by_length"
            )


def read_scores(
    path: Path,
    per_question: int | None = None,
    scale: Scale = PERPLEXITY,
    fingerprint: Mapping[str, object] | None = None,
) -> StoredScores:
    """Scores from a file: JSON Lines of records, a published .npy array, or JSON {question:
    [scores]}.

    A .npy file is read without unpickling: one that holds Python objects is refused.

    :raises CalibrationInputError: if it is none of these, or holds something that is no score.
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
    """Whether it is a whole state of ours, under whatever name it was written, not records line by
    line.
    """
    return text.startswith('{"kind": "atts ')


def parse_lines(lines: Sequence[str], source: str) -> list[dict[str, Any]]:
    """JSON Lines as records; blank lines are skipped.

    :raises CalibrationInputError: naming the line that is not a JSON object.
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
    """The numbers of an .npy file of one row, whose header must say so and promise as many as there
    are.
    """
    data = read_ordinary(path)
    header = _HEADER.match(data)
    if header is None:
        raise CalibrationInputError(str(path), "no array of plain numbers", "one row of numbers")
    kind = np.dtype(header[1].decode())
    count = int(header[2])
    numbers = data[header.end() :]
    if len(numbers) != count * kind.itemsize:
        raise CalibrationInputError(
            str(path), f"{len(numbers)} bytes", f"{count} numbers of {kind.itemsize} bytes"
        )
    return [float(value) for value in np.frombuffer(numbers, kind)]


def _read_mapping(
    path: Path, text: str, scale: Scale, fingerprint: Mapping[str, object] | None
) -> StoredScores:
    try:
        table = from_json(text)
    except ValueError as problem:
        raise CalibrationInputError(str(path), str(problem), "JSON {question: [scores]}") from None
    if isinstance(table, dict) and table.get("kind") == "atts scores":
        return StoredScores.restore(read_state(path))
    if isinstance(table, dict) and table.get("kind") == "atts calibrator":
        return StoredScores.restore(read_state(path)["stored"])  # what it started from
    if not isinstance(table, dict) or not all(
        isinstance(scores, list) for scores in table.values()
    ):
        raise CalibrationInputError(str(path), type(table).__name__, "JSON {question: [scores]}")
    records = [
        {"question": name, "score": score} for name, scores in table.items() for score in scores
    ]
    return StoredScores.from_records(records, scale, fingerprint)
