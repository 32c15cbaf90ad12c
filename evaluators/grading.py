"""Grade records: compare each answer or text with its reference, and count the verdicts."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from atts.core import AnswerKind, Grading, Problem
from atts.errors import DatasetError, OptionError
from atts.evaluators.answers import Extraction, Fallback, extraction
from atts.evaluators.datasets.tables import LETTERS, json_line
from atts.evaluators.equivalence.pairs import equivalent, matches_reference
from atts.evaluators.metrics.wilson import wilson_interval
from atts.evaluators.programs import judge_program
from atts.evaluators.syntax.vocabulary import FORMS
from atts.evaluators.verdict import STRICT, Verdict, changed

_KINDS: dict[str, AnswerKind] = {
    "math": "math",
    "choice": "choice",
    "text": "text",
    "answer": "math",
}
_PERCENT_AFTER_BOX = re.compile(r"\}\$?\s*(?:\\?%|percent\b)[^{}]*\Z")
# References of at least this many characters are regarded as worked solutions. The answer is then
# extracted from the solution.
_PROSE = 200


@dataclass(frozen=True, slots=True)
class GradedRecord:
    """The verdict on one record, with its answer and the name of the rule that extracted the
    answer.
    """

    index: int
    id: str
    verdict: Verdict
    answer: str | None
    # the name of the rule that extracted the answer; "given" if the record contains the answer
    # itself
    found_by: str
    # The record's own statement of whether its answer is correct; None without such a statement. It
    # is used to count disagreements.
    expected: bool | None = None
    # The reference answers with which the answer was compared. From a worked solution, only its
    # answer is kept.
    golds: tuple[str, ...] = ()
    kind: AnswerKind = "math"

    def as_json(self) -> dict[str, object]:
        """Return the verdict as a dictionary, which is written as one line of JSON."""
        return {
            "type": "verdict",
            "index": self.index,
            "id": self.id,
            **asdict(self.verdict),
            "references": list(self.golds),
            "answer": self.answer,
            "found_by": self.found_by,
        }


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be graded, with the reason."""

    index: int
    error: DatasetError

    def as_json(self) -> dict[str, object]:
        """Return the reason as a dictionary, which is written as one line of JSON."""
        return {"type": "bad_record", "index": self.index, "problem": str(self.error)}


def read_records(lines: Iterable[str], source: str) -> Iterator[Mapping[str, Any] | DatasetError]:
    """Yield the JSON object on each line, or a DatasetError for a line without one. Blank lines are
    skipped.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json_line(line, number, source)
            except DatasetError as error:
                yield error


def grade(
    records: Iterable[Mapping[str, Any]],
    kind: AnswerKind = "math",
    *,
    fallback: Fallback = "statement",
    grading: Grading = STRICT,
    source: str = "records",
) -> Iterator[GradedRecord]:
    """Yield the verdict on each record in order. A record has `gold` and either `answer` or `text`.

    If `gold` is a list of references, an answer that is equal to one of them is correct. A record's
    `kind`, `relative`, `absolute`, `units`, `rounding` and `variables` take precedence over the
    arguments. If the text in the field `problem` says that all numbers are positive, the variables
    are assumed to be positive.

    Raises DatasetError at the first record that cannot be graded. The function `grade_all` reports
    such records and continues.
    """
    for each in grade_all(records, kind, fallback=fallback, grading=grading, source=source):
        if isinstance(each, BadRecord):
            raise each.error
        yield each


def grade_all(
    records: Iterable[Mapping[str, Any] | DatasetError],
    kind: AnswerKind = "math",
    *,
    fallback: Fallback = "statement",
    grading: Grading = STRICT,
    source: str = "records",
) -> Iterator[GradedRecord | BadRecord]:
    """Yield the verdicts of `grade`, and a BadRecord for each record that cannot be graded.

    A DatasetError among `records` stands for a line that could not be read.
    """
    for index, record in enumerate(records):
        if isinstance(record, DatasetError):
            yield BadRecord(index, record)
            continue
        try:
            yield _graded(index, record, kind, fallback, grading, source)
        except DatasetError as error:
            yield BadRecord(index, error)


def _graded(
    index: int,
    record: Mapping[str, Any],
    kind: AnswerKind,
    fallback: Fallback,
    grading: Grading,
    source: str,
) -> GradedRecord:
    """Return the verdict on one record; raise DatasetError if it cannot be graded."""
    where = f"{source}, record {index + 1}"
    golds = _references(record, where)
    kind_of_record = _KINDS.get(str(record.get("kind", kind)))
    if kind_of_record is None:
        known = f"Known: {', '.join(_KINDS)}"
        raise DatasetError(where, f"{record['kind']!r} is not a known kind of answer", known)
    extracted = _answer(record, kind_of_record, fallback, where)
    if "text" in record:
        if kind_of_record == "text":
            kind_of_record = "math"
        golds = [reference(gold, kind_of_record) for gold in golds]
    fields = ("relative", "absolute", "units", "rounding", "variables")
    stated_policy = {name: record.get(name) for name in fields}
    try:
        policy = changed(grading, stated_policy)
    except OptionError as error:
        raise DatasetError(where, str(error)) from None
    policy = _for_problem(policy, str(record.get("problem", "")))
    if extracted.answer is None:
        verdict = Verdict("different", "cut" if extracted.rule == "cut" else "no answer")
    else:
        verdict = matches_reference(golds, extracted.answer, kind_of_record, grading=policy)
    return GradedRecord(
        index,
        str(record.get("id", index)),
        verdict,
        extracted.answer,
        extracted.rule,
        expected=record["expected"] if isinstance(record.get("expected"), bool) else None,
        golds=tuple(golds),
        kind=kind_of_record,
    )


@dataclass(slots=True)
class GradeTally:
    """Counts of graded records, by verdict. The verdict "unscored" means that the answers could not
    be compared.
    """

    status: Counter[str] = field(default_factory=Counter[str])
    rules: Counter[str] = field(default_factory=Counter[str])
    agreed: Counter[str] = field(default_factory=Counter[str])
    bad_records: int = 0

    def add(self, graded: GradedRecord) -> None:
        """Count one record."""
        self.status[graded.verdict.status] += 1
        self.rules[graded.verdict.rule] += 1
        if graded.expected is not None:
            self.agreed["of"] += 1
            self.agreed["right"] += graded.verdict.is_equal == graded.expected
            self.agreed["false_equal"] += graded.verdict.is_equal and not graded.expected

    def as_json(self) -> dict[str, object]:
        """Return the counts as a dictionary, which is written as one line of JSON.

        Unscored answers count as wrong in the accuracy.
        """
        n = sum(self.status.values())
        share = self.status["equal"] / n if n else None
        tally: dict[str, object] = {
            "type": "summary",
            "n": n,
            "equal": self.status["equal"],
            "different": self.status["different"],
            "unscored": self.status["unscored"],
            "accuracy": share,
            "interval": None if share is None else wilson_interval(share, n),
            "no_answer": self.rules["no answer"],
            "cut": self.rules["cut"],
            "judged": self.rules["judged"],
            "bad_records": self.bad_records,
            "rules": dict(sorted(self.rules.items())),
        }
        if self.agreed:
            tally["expected"] = {name: self.agreed[name] for name in ("of", "right", "false_equal")}
        return tally


def reference(gold: str, kind: AnswerKind = "math") -> str:
    """Return the answer in a reference, which may be a worked solution.

    A short reference without boxes is itself the answer.
    """
    if "box" not in gold and len(gold) < _PROSE:
        return gold
    answer = extraction(gold, kind).answer
    if answer is None:
        return gold
    is_percent = _PERCENT_AFTER_BOX.search(gold) and answer[-1:].isdigit()
    return answer + r"\%" if is_percent else answer


def judge(problem: Problem, answer: str) -> Verdict:
    """Return the verdict on an answer to a problem, under the problem's grading policy."""
    assert problem.answer is not None, "the problem does not have a reference to grade against"
    if problem.kind == "code":
        return judge_program(problem.answer, answer)
    grading = _for_problem(problem.grading or STRICT, problem.text)
    if problem.kind == "choice" and grading.choices == "text":
        are_equal = [equivalent(choice, answer, "math").is_equal for choice in problem.choices]
        if are_equal.count(True) == 1:
            answer = LETTERS[are_equal.index(True)]
    return matches_reference(problem.answer, answer, problem.kind, grading=grading)


def _for_problem(grading: Grading, text: str) -> Grading:
    """Return the grading policy, with variables assumed to be positive if the problem's text says
    that its numbers are.

    A policy whose `variables` is not the default is returned unchanged.
    """
    if grading.variables != "formula" or not FORMS["says_positive"].search(text):
        return grading
    return replace(grading, variables="positive")


def _answer(
    record: Mapping[str, Any], kind: AnswerKind, fallback: Fallback, where: str
) -> Extraction:
    """Return the answer of a record, or extract it from the record's text."""
    if "text" in record:
        text = _text(record, "text", where)
        return extraction(text, "math" if kind == "text" else kind, fallback=fallback)
    if "answer" not in record:
        raise DatasetError(
            where,
            "the record has neither `answer` nor `text`",
            "Add one of the two fields; `gold` is the reference",
        )
    if record["answer"] is None:
        return Extraction(None, "none")
    return Extraction(_text(record, "answer", where), "given")


def _references(record: Mapping[str, Any], where: str) -> list[str]:
    """Return the references of a record: one, or a list of alternatives."""
    gold = record.get("gold")
    if not isinstance(gold, list):
        return [_text(record, "gold", where)]
    several = cast(list[object], gold)
    return [_text({"gold": each}, "gold", where) for each in several]


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field of a record as a string; raise DatasetError if it is neither a string nor a
    number.
    """
    value = record.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return value
    if name not in record:
        raise DatasetError(where, f"the field `{name}` is missing")
    raise DatasetError(where, f"`{name}` is {type(value).__name__}, not a string")
