"""Grouping of answers into classes of equal ones for voting: by keys of their values, then by comparison."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

import mpmath

from atts.core import AnswerKind
from atts.evaluators.equivalence.exact import NotRational, digits_in_base
from atts.evaluators.equivalence.fast import equivalent
from atts.evaluators.equivalence.numeric import Value, exact
from atts.evaluators.equivalence.points import Point, generic
from atts.evaluators.equivalence.probing import Prober, is_real, written
from atts.evaluators.equivalence.sets import Line, speaks_of_reals
from atts.evaluators.equivalence.traits import clock, is_decimal, members, terminates
from atts.evaluators.equivalence.views import labelled, named
from atts.evaluators.syntax.reading import Reading, read
from atts.evaluators.syntax.tree import Node, has, minus, number, quotient, variables
from atts.evaluators.syntax.units import measure
from atts.evaluators.syntax.vocabulary import squashed
from atts.evaluators.verdict import LIMITS, Limits, Undecided, Undefined

_CROWD = 48  # answers under one loose key past which each is compared with the first few only


def group(answers: Sequence[str | None], kind: AnswerKind = "math", *, limits: Limits = LIMITS) -> list[int]:
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


_COLLECTIONS = ("list", "set", "tuple", "union", "matrix", "setminus", "builder")
_NOT_VALUES = (*_COLLECTIONS, "word", "relation", "plusminus", "opaque", "huge", "ratio", "based", "quantity",
               "clock", "congruence", "cases", "aliases")  # fmt: skip


class Keys:
    """Computes the keys of parsed answers."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.values: dict[int, tuple[Node, Value]] = {}

    def value(self, node: Node) -> Value:
        """The value at a whole point, computed once for each of the last few trees."""
        if id(node) not in self.values:
            if len(self.values) > 60:
                self.values.clear()
            self.values[id(node)] = node, Prober(self.limits).value(node, _at(variables(node), 0))
        return self.values[id(node)][1]

    def strong(self, reading: Reading) -> str:
        """Answers with the same strong key are equal under the policy."""
        with suppress(Undecided, Undefined):
            if reading.trees:
                return self.of_node(reading.trees[0])
        return "text:" + "".join(reading.text.split())

    def of_node(self, node: Node) -> str:
        """The exact value of a rational number, the tree of anything else."""
        if not has(node, *_NOT_VALUES, "percent", "degree") and not is_decimal(node):
            with suppress(NotRational):
                return "v:" + written(exact(node, self.limits))
        return repr(node)

    def loose(self, reading: Reading) -> frozenset[str]:
        """Answers that are equal under the policy share a loose key, or are both texts.

        A key with "<" at its end belongs to a decimal that may be the rounding of what has the same key with ">".
        """
        found = {"text:" + reading.squashed} if reading.squashed else set[str]()
        if reading.choice:
            found.add("letter:" + reading.choice)
        for tree in reading.trees:
            found |= self.tokens(tree) | self.near(tree)
        return frozenset(found)

    def tokens(self, node: Node) -> set[str]:
        """The loose keys of one tree, save those of roundings."""
        try:
            return self._tokens(node)
        except (Undecided, Undefined):
            return set()

    def _tokens(self, node: Node) -> set[str]:
        if has(node, "plusminus") and node.kind not in ("list", "set", "relation"):
            return {self.collected(list(members(node)))}
        if node.kind == "relation":
            return self.relation_tokens(node)
        if node.kind in _COLLECTIONS:
            return self.collection_tokens(node)
        if node.kind in ("percent", "degree"):
            return self._tokens(node.args[0]) | self.number_tokens(node)
        if node.kind == "quantity":
            return self._tokens(node.args[0]) | self.unit_tokens(node)
        if node.kind == "ratio":
            inside = self.collected(list(node.args))
            value = self.number_tokens(quotient(*node.args)) if len(node.args) == 2 else set[str]()
            return {inside, f"clock:{clock(node)}"} | value
        if node.kind == "based":
            plain = self.number_tokens(number(int(node.text))) if node.text.isdigit() else set[str]()
            return {f"value:{digits_in_base(node):x}/1"} | plain
        if node.kind == "cases":
            with suppress(Undecided, Undefined):
                return {"cases"} | self.number_tokens(node)
        if node.kind in ("cases", "congruence", "clock"):
            return {f"{node.kind}:{clock(node)}" if node.kind == "clock" else node.kind}
        if node.kind == "aliases":
            return self.tokens(node.args[0]) | self.tokens(node.args[1])
        if node.kind == "word":
            return {"word:" + node.text}
        return set() if node.kind in ("huge", "opaque") else self.number_tokens(node)

    def number_tokens(self, node: Node) -> set[str]:
        """The value at a whole point."""
        return {"value:" + written(self.value(node))}

    def near(self, node: Node) -> set[str]:
        """Five digits of a decimal and of its neighbours, or of a value that decimals may round."""
        value = named(node).value
        if value.kind in _COLLECTIONS and value.args:
            return self.nearly_all(_entries(value))
        size = None if value.kind in _NOT_VALUES else self.rounded(value)
        if size is None:
            return set()
        if not is_decimal(value):
            return {f"near:{_digits(size, 5)}>"}
        unit = mpmath.mpf(10) ** (int(mpmath.floor(mpmath.log10(abs(size)))) - 4)
        return {f"near:{_digits(size + step * unit, 5)}<" for step in (-1, 0, 1)}

    def rounded(self, node: Node) -> Any | None:
        """A decimal, or a value that one may round, to full precision; None for what is neither."""
        if variables(node):
            return None
        try:
            value = self.value(node)
        except (Undecided, Undefined):
            return None
        has_end = isinstance(value, Fraction) and terminates(value)
        if not is_real(value) or not value or (has_end and not is_decimal(node)):
            return None
        return mpmath.re(Prober(self.limits).approximate(value, 200).value)

    def nearly_all(self, nodes: list[Node]) -> set[str]:
        """Three digits of each entry, where some entry may be a rounding or have one."""
        found = [(node, self.rounded(node)) for node in nodes[:_MANY]]
        if all(size is None for _, size in found):
            return set()
        shown = sorted(
            min(self.tokens(named(node).value), default="?") if size is None else _digits(size, 3)
            for node, size in found
        )
        has_decimals = any(size is not None and is_decimal(node) for node, size in found)
        return {f"near:{';'.join(shown)}{'<' if has_decimals else '>'}"}

    def unit_tokens(self, node: Node) -> set[str]:
        known = measure(node.text)
        if known is None:
            return set()
        return {"unit:" + token for token in self.tokens(Node("mul", (node.args[0], number(known[1]))))}

    def relation_tokens(self, node: Node) -> set[str]:
        view = named(node)
        found = self._tokens(view.value) if view.value.kind != "relation" else set[str]()
        found |= self.region_tokens(node)
        if len(node.args) == 2:
            found |= self.difference_tokens(node)
        elif view.value.kind == "relation":
            found.add(self.collected(list(node.args)))
        return found

    def region_tokens(self, node: Node) -> set[str]:
        """The ends of the set of reals that an answer describes."""
        stretches = Line(Prober(self.limits)).region(node)
        return {self.collected([end.value for end in stretches])} if stretches else set()

    def difference_tokens(self, node: Node) -> set[str]:
        """An equation up to a factor: the ratio of its two sides' difference at two points."""
        sides = minus(*node.args)
        names, prober = variables(sides), Prober(self.limits)
        try:
            first, second = (prober.value(sides, _at(names, index)) for index in (0, 1))
            return {"equation:" + written(prober.divide(first, second))}
        except (Undecided, Undefined):
            return set()

    def collection_tokens(self, node: Node) -> set[str]:
        inside = list(members(node)) if node.kind in ("list", "set") else _entries(node)
        labels = labelled(node)
        found = {self.collected(inside)}
        if labels:
            found.add(self.collected(list(labels.values())))
        if speaks_of_reals(node):
            found |= self.region_tokens(node)
        if len(inside) == 1 or node.text == "or":
            found |= {token for each in inside for token in self.tokens(each)}
        return found

    def collected(self, nodes: list[Node]) -> str:
        """One token for members in any order: the least token of each."""
        return "all:" + ";".join(sorted({min(self.tokens(named(node).value), default="?") for node in nodes}))


_MANY = 40  # entries of a collection that are looked at for roundings


def _digits(value: Any, count: int) -> str:
    return str(mpmath.nstr(value, count, strip_zeros=False, min_fixed=0, max_fixed=0))


def _entries(node: Node) -> list[Node]:
    if node.kind in _COLLECTIONS:
        return [entry for arg in node.args for entry in _entries(arg)]
    return [node]


def _at(names: frozenset[str], index: int) -> Point:
    """A point fixed by the names alone, whole, so that most functions have a value there."""
    return generic(dict.fromkeys(names, "natural"), index)
