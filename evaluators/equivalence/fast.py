"""Verdict on two answer texts, in bounded time: by their spelling, then by their trees."""

from itertools import product
from typing import get_args

from atts.core import AnswerKind, Grading
from atts.errors import OptionError
from atts.evaluators.equivalence.compare import Comparer
from atts.evaluators.equivalence.views import held_to
from atts.evaluators.syntax.cleaning import spaceless
from atts.evaluators.syntax.reading import Reading, read
from atts.evaluators.syntax.vocabulary import squashed
from atts.evaluators.verdict import LIMITS, STRICT, Limits, Malformed, Prose, TooLarge, Undecided, Undefined, Verdict

_PHRASE = 4  # words


def equivalent(
    gold: str, answer: str, kind: AnswerKind = "math", *, limits: Limits = LIMITS, grading: Grading = STRICT
) -> Verdict:
    """Whether `answer` is the reference answer `gold`; symmetric, thread-safe, bounded in time and memory.

    `grading` says which numbers may be off and whether units may be missing. No text is evaluated as code. What cannot
    be decided is "unscored". Raises OptionError for an unknown kind.

    >>> equivalent(r"\\frac{1}{2}", "0.5").status
    'equal'
    >>> equivalent("12", "21").status
    'different'
    """
    if kind not in get_args(AnswerKind):
        raise OptionError(f"kind {kind}", "is not a kind of answer", get_args(AnswerKind))
    if not gold.strip():
        return Verdict("unscored", "no reference")
    if not answer.strip():
        return Verdict("different", "no answer")
    if kind == "text":
        return _verdict(squashed(gold) == squashed(answer) != "", "text")
    if spaceless(gold) == spaceless(answer):
        return Verdict("equal", "same text")
    one, two = read(gold, limits), read(answer, limits)
    return _by_text(one, two, kind) or _by_trees(one, two, limits, grading)


def _verdict(same: bool, rule: str) -> Verdict:
    return Verdict("equal" if same else "different", rule)


def _unscored(error: Undecided | Undefined) -> Verdict:
    detail = f"no value: {error}" if isinstance(error, Undefined) else str(error)
    return Verdict("unscored", "limits" if isinstance(error, TooLarge) else "undecided", detail)


def _by_text(one: Reading, two: Reading, kind: AnswerKind) -> Verdict | None:
    """What the texts alone decide: the same spelling, and choices."""
    if not one.text or not two.text:
        return Verdict("unscored", "no reference") if not one.text else Verdict("different", "no answer")
    if spaceless(one.text) == spaceless(two.text):
        return Verdict("equal", "same text")
    if one.choice and two.choice and (one.is_letter or two.is_letter or kind == "choice"):
        return _verdict(one.choice == two.choice, "choice")
    if kind == "choice" and (one.choice or two.choice):
        first, second = (reading.choice or reading.text.strip("(). ").upper() for reading in (one, two))
        return _verdict(first == second, "choice")
    return None


def _by_trees(one: Reading, two: Reading, limits: Limits, grading: Grading) -> Verdict:
    """Equal when any pair of readings is, else what the first pair says."""
    first: Verdict | None = None
    for gold, answer in product(one.trees, two.trees):
        comparison = Comparer(limits, held_to(grading, gold), brackets="free" if first is None else "strict")
        try:
            found = _verdict(comparison.same(gold, answer), comparison.rule)
        except (Undecided, Undefined) as error:
            found = _unscored(error)
        except RecursionError:  # little of the stack was left to us
            found = _unscored(TooLarge("too deep for the stack at hand"))
        if found.is_equal:
            return found
        first = first or found
    return first or _unread(one, two)


def _unread(one: Reading, two: Reading) -> Verdict:
    """The verdict when a side is no expression: the same phrase, or an answer that cannot be the reference."""
    if one.squashed and one.squashed == two.squashed and not isinstance(one.problem or two.problem, Malformed):
        return Verdict("equal", "text")
    readable, problem = (two, one.problem) if one.problem else (one, two.problem)
    assert problem is not None
    if isinstance(problem, Malformed):
        return Verdict("different", "malformed", str(problem))
    if type(problem) is Prose and readable.trees:
        return Verdict("different", "prose", str(problem))
    are_short = all(len(reading.squashed.split()) <= _PHRASE for reading in (one, two))  # names and dates, no sentences
    if isinstance(one.problem, Prose) and isinstance(two.problem, Prose) and are_short:
        return Verdict("different", "text")
    return _unscored(problem)
