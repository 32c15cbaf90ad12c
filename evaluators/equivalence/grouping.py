"""Grouping of answers into classes of equal ones for voting, independent of their order."""

from collections import defaultdict
from collections.abc import Sequence

from atts.core import AnswerKind
from atts.evaluators.equivalence.fast import equivalent
from atts.evaluators.equivalence.keys import Keys
from atts.evaluators.syntax.reading import read
from atts.evaluators.syntax.vocabulary import squashed
from atts.evaluators.verdict import Limits

_DEFAULT = Limits()
_CROWD = 48  # answers under one loose key past which each is compared with the first few only


def group(answers: Sequence[str | None], kind: AnswerKind = "math", *, limits: Limits = _DEFAULT) -> list[int]:
    """The class of each answer, numbered by first appearance; -1 for None and for empty answers, which abstain.

    Two answers in one class are equal under `equivalent`; equal ones share a class unless that would join answers
    that differ (10 and 0.1 stay apart when 10% comes too). The partition does not depend on the order. Time grows
    nearly linearly: answers are keyed by their values, and only those whose keys meet are compared.

    >>> group(["1/2", "0.5", "2", None, r"\\frac{2}{4}"])
    [0, 0, 1, -1, 0]
    """
    texts = sorted({answer for answer in answers if answer is not None and answer.strip()})
    classes = _Classes(kind, limits).of(texts)
    numbers: dict[int, int] = {}
    return [
        numbers.setdefault(classes[answer], len(numbers)) if answer is not None and answer.strip() else -1
        for answer in answers
    ]


class _Classes:
    """One grouping: strong keys first, then comparisons in an order fixed by the texts alone."""

    def __init__(self, kind: AnswerKind, limits: Limits) -> None:
        self.kind: AnswerKind = kind
        self.limits = limits
        self.keys = Keys(limits)
        self.verdicts: dict[tuple[int, int], str] = {}
        self.texts: list[str] = []  # one representative of each strong key, its least text

    def of(self, texts: Sequence[str]) -> dict[str, int]:
        """A class number for each of the sorted, distinct texts."""
        strong: dict[str, int] = {}
        owner: dict[str, int] = {}
        loose: dict[str, list[int]] = defaultdict(list)
        for text in texts:
            reading = read(text, self.limits)
            key = squashed(reading.text) if self.kind == "text" else self.keys.strong(reading)
            if key not in strong:
                strong[key] = len(self.texts)
                for token in () if self.kind == "text" else sorted(self.keys.loose(reading)):
                    loose[token].append(strong[key])
                self.texts.append(text)
            owner[text] = strong[key]
        merged = self.merge(loose)
        return {text: merged[index] for text, index in owner.items()}

    def merge(self, loose: dict[str, list[int]]) -> list[int]:
        """Join representatives whose loose keys meet and that are equal, keeping apart whatever differs."""
        parent = list(range(len(self.texts)))
        inside: dict[int, list[int]] = {index: [index] for index in parent}
        for left, right in sorted(_pairs(loose)):
            one, two = parent[left], parent[right]
            if one == two or self.verdict(left, right) != "equal":
                continue
            if all(self.verdict(a, b) == "equal" for a in inside[one] for b in inside[two]):
                for member in inside[two]:
                    parent[member] = one
                inside[one] += inside.pop(two)
        return parent

    def verdict(self, left: int, right: int) -> str:
        pair = (min(left, right), max(left, right))
        if pair not in self.verdicts:
            one, two = self.texts[pair[0]], self.texts[pair[1]]
            self.verdicts[pair] = equivalent(one, two, self.kind, limits=self.limits).status
        return self.verdicts[pair]


def _pairs(loose: dict[str, list[int]]) -> set[tuple[int, int]]:
    """Answers to compare: those of one key; decimals with what they may round."""
    found: set[tuple[int, int]] = set()
    for token, indices in loose.items():
        if token.endswith(">"):
            continue
        others = loose.get(f"{token[:-1]}>", []) if token.endswith("<") else indices
        hubs = indices if len(indices) * len(others) <= _CROWD**2 else indices[:4]
        found |= {(min(a, b), max(a, b)) for a in hubs for b in others if a != b}
    return found
