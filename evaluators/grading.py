"""Grading of records: a reference beside an answer or a reasoning text, one verdict each, and their
tally.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from atts.core import AnswerKind, Grading, Problem
from atts.errors import DatasetError, OptionError
from atts.evaluators.answers.extraction import Extraction, Fallback, extraction
from atts.evaluators.datasets.catalogue import LETTERS
from atts.evaluators.equivalence.grouping import equivalent
from atts.evaluators.metrics.wilson import wilson_interval
from atts.evaluators.verdict import STRICT, Verdict, changed

_KINDS: dict[str, AnswerKind] = {
    "math": "math",
    "choice": "choice",
    "text": "text",
    "answer": "math",
}
# characters from which a reference is taken for a worked solution, to be extracted from
_PROSE = 200


@dataclass(frozen=True, slots=True)
class GradedRecord:
    """One record's verdict, the answer it is about, and how that was found when it came from a
    text.
    """

    index: int
    id: str
    verdict: Verdict
    answer: str | None
    found_by: str  # "given", or the rule of the extraction
    expected: bool | None = None  # the record's own opinion, when it carries one

    def as_json(self) -> dict[str, object]:
        """The record as one line of output."""
        told = {"type": "verdict", "index": self.index, "id": self.id, **asdict(self.verdict)}
        return {**told, "answer": self.answer, "found_by": self.found_by}


def grade(
    records: Iterable[Mapping[str, Any]],
    kind: AnswerKind = "math",
    *,
    fallback: Fallback = "statement",
    grading: Grading = STRICT,
    source: str = "records",
) -> Iterator[GradedRecord]:
    """A verdict for each record that has `gold` and either `answer` or `text`, in order.

    A record's own `kind`, `relative`, `absolute` and `units` win over those given here. Raises
    DatasetError at the first record that cannot be graded as one.
    """
    for index, record in enumerate(records):
        where = f"{source}, record {index + 1}"
        gold = _text(record, "gold", where)
        own = _KINDS.get(str(record.get("kind", kind)))
        if own is None:
            raise DatasetError(
                where, f"kind {record['kind']!r} is not one", f"Known: {', '.join(_KINDS)}"
            )
        found = _answer(record, own, fallback, where)
        if "text" in record:
            own = "math" if own == "text" else own
            gold = reference(gold, own)
        try:  # the policy with what the record itself says of it
            policy = changed(
                grading, {name: record.get(name) for name in ("relative", "absolute", "units")}
            )
        except OptionError as error:
            raise DatasetError(where, str(error)) from None
        if found.answer is None:
            verdict = Verdict("different", "cut" if found.rule == "cut" else "no answer")
        else:
            verdict = equivalent(gold, found.answer, own, grading=policy)
        expected = record["expected"] if isinstance(record.get("expected"), bool) else None
        yield GradedRecord(
            index, str(record.get("id", index)), verdict, found.answer, found.rule, expected
        )


@dataclass(slots=True)
class GradeTally:
    """Counts over graded records, so that no rate is read without what it leaves out."""

    status: Counter[str] = field(default_factory=Counter[str])
    rules: Counter[str] = field(default_factory=Counter[str])
    agreed: Counter[str] = field(default_factory=Counter[str])

    def add(self, graded: GradedRecord) -> None:
        """Count one record."""
        self.status[graded.verdict.status] += 1
        self.rules[graded.verdict.rule] += 1
        if graded.expected is not None:
            self.agreed["of"] += 1
            self.agreed["right"] += graded.verdict.is_equal == graded.expected
            self.agreed["false_equal"] += graded.verdict.is_equal and not graded.expected

    def as_json(self) -> dict[str, object]:
        """The tally as one line of output; accuracy counts what is unscored as not right."""
        n = sum(self.status.values())
        share = self.status["equal"] / n if n else None
        found: dict[str, object] = {"type": "summary", "n": n}
        found |= {name: self.status[name] for name in ("equal", "different", "unscored")}
        found |= {
            "accuracy": share,
            "interval": None if share is None else wilson_interval(share, n),
        }
        found |= {"no_answer": self.rules["no answer"], "cut": self.rules["cut"]}
        found["rules"] = dict(sorted(self.rules.items()))
        if self.agreed:
            found["expected"] = {name: self.agreed[name] for name in ("of", "right", "false_equal")}
        return found


def reference(gold: str, kind: AnswerKind = "math") -> str:
    """The answer in a reference that may be a worked solution; a short one without boxes is the
    answer itself.
    """
    if "box" not in gold and len(gold) < _PROSE:
        return gold
    return extraction(gold, kind).answer or gold


def judge(problem: Problem, answer: str) -> Verdict:
    """The verdict on an answer to a problem that has a reference, by the problem's own policy."""
    assert problem.answer is not None, "only problems with a reference are graded"
    grading = problem.grading or STRICT
    if problem.kind == "choice" and grading.choices == "text":
        said = [equivalent(choice, answer, "math").is_equal for choice in problem.choices]
        answer = LETTERS[said.index(True)] if said.count(True) == 1 else answer
    return equivalent(problem.answer, answer, problem.kind, grading=grading)


def _answer(
    record: Mapping[str, Any], kind: AnswerKind, fallback: Fallback, where: str
) -> Extraction:
    if "text" in record:
        return extraction(
            _text(record, "text", where), "math" if kind == "text" else kind, fallback=fallback
        )
    if "answer" not in record:
        raise DatasetError(
            where, "has neither `answer` nor `text`", "Name one of them; `gold` is the reference"
        )
    if record["answer"] is None:
        return Extraction(None, "none")
    return Extraction(_text(record, "answer", where), "given")


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        problem = (
            f"has no `{name}`"
            if name not in record
            else f"`{name}` is {type(value).__name__}, not text"
        )
        raise DatasetError(where, problem)
    return value
