"""Extraction of the final answer from a reasoning text."""

from dataclasses import dataclass
from typing import Literal, get_args

from atts.core import AnswerKind
from atts.errors import OptionError
from atts.evaluators.answers.boxes import PATTERNS, boxes, last_group
from atts.evaluators.answers.statements import marked, overruled, stated, trailing_number, turn_end

Fallback = Literal["none", "statement", "number"]
Rule = Literal["given", "box", "marker", "statement", "number", "cut", "none"]


@dataclass(frozen=True, slots=True)
class Extraction:
    """An answer and what it was found by; None with the rule "cut" when a box was begun and never closed."""

    answer: str | None
    rule: Rule


def extract(text: str, kind: AnswerKind = "math", *, fallback: Fallback = "statement") -> str | None:
    """The final answer of a reasoning text, None when it gives none.

    The last box that is not empty counts, or the last few when the text joins them ("\\boxed{3} and \\boxed{5}").
    Without a box an explicit mark counts ("Answer: 5", "#### 5"), then with the default fallback a last sentence
    that states a value, and with fallback="number" the last number anywhere. A cut box is no answer. Raises
    OptionError for an unknown kind or fallback.

    >>> extract(r"So $x = \\boxed{\\frac{1}{2}}$.")
    '\\\\frac{1}{2}'
    """
    return extraction(text, kind, fallback=fallback).answer


def extraction(text: str, kind: AnswerKind = "math", *, fallback: Fallback = "statement") -> Extraction:
    """As extract, with the rule that found the answer: boxes first, then marks, then what `fallback` allows."""
    if kind not in get_args(AnswerKind):
        raise OptionError(f"kind {kind}", "is not a kind of answer", get_args(AnswerKind))
    if fallback not in get_args(Fallback):
        raise OptionError(f"fallback {fallback}", "is not one", get_args(Fallback))
    text = text[: turn_end(text)]
    found, open_at = boxes(text)
    if group := last_group(found, text):
        final = overruled(text[found[-1].end :], kind)
        return Extraction(", ".join(group), "box") if final is None else Extraction(final, "marker")
    whole = PATTERNS["cut_box"].sub("", text) if open_at is None else text[:open_at]
    if (said := marked(whole, kind)) is not None:
        return Extraction(said, "marker")
    if len(whole) < len(text):
        return Extraction(None, "cut")
    if fallback != "none" and (said := stated(text, kind)) is not None:
        return Extraction(said, "statement")
    if fallback == "number" and (said := trailing_number(text)) is not None:
        return Extraction(said, "number")
    return Extraction(None, "none")
