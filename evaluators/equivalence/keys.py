"""Sort keys of answers: strong ones imply equality, loose ones suggest it."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from typing import Any

import mpmath

from atts.evaluators.equivalence.exact import NotRational, digits_in_base, exact
from atts.evaluators.equivalence.points import Point, generic
from atts.evaluators.equivalence.probing import Prober, is_real, written
from atts.evaluators.equivalence.sets import Line
from atts.evaluators.equivalence.traits import difference, is_decimal, members, terminates
from atts.evaluators.equivalence.views import named
from atts.evaluators.syntax.reading import Reading
from atts.evaluators.syntax.tree import Node, has, number, quotient, variables
from atts.evaluators.syntax.units import measure
from atts.evaluators.verdict import Limits, Undecided, Undefined

_COLLECTIONS = ("list", "set", "tuple", "union", "matrix", "setminus")
_NOT_VALUES = (*_COLLECTIONS, "word", "relation", "plusminus", "opaque", "huge", "ratio", "based", "quantity")


class Keys:
    """Computes the keys of parsed answers."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

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
        """Answers that are equal under the policy share a loose key, or are both texts."""
        found = {"text:" + reading.squashed} if reading.squashed else set[str]()
        if reading.choice:
            found.add("letter:" + reading.choice)
        for tree in reading.trees:
            found |= self.tokens(tree)
        return frozenset(found)

    def tokens(self, node: Node) -> set[str]:
        """The loose keys of one tree."""
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
            return {inside} | (self.number_tokens(quotient(*node.args)) if len(node.args) == 2 else set())
        if node.kind == "based":
            plain = self.number_tokens(number(int(node.text))) if node.text.isdigit() else set[str]()
            return {f"value:{digits_in_base(node):x}/1"} | plain
        if node.kind in ("word", "huge", "opaque"):
            return set()
        return self.number_tokens(node)

    def number_tokens(self, node: Node) -> set[str]:
        """The value at a whole point; and four digits of it where a decimal may be its rounding."""
        names, prober = variables(node), Prober(self.limits)
        value = prober.value(node, _at(names, 0))
        found = {"value:" + written(value)}
        terminating = isinstance(value, Fraction) and terminates(value) and not is_decimal(node)
        if not names and not terminating and is_real(value):
            found |= _near(prober.approximate(value, 200).value)
        return found

    def unit_tokens(self, node: Node) -> set[str]:
        known = measure(node.text)
        if known is None:
            return set()
        return {"unit:" + token for token in self.tokens(Node("mul", (node.args[0], number(known[1]))))}

    def relation_tokens(self, node: Node) -> set[str]:
        view = named(node)
        found = self._tokens(view.value) if view.value.kind != "relation" else set[str]()
        stretches = Line(Prober(self.limits)).region(node)
        if stretches:
            found.add(self.collected([end for each in stretches for end in (each.low, each.high)]))
        if len(node.args) == 2:
            found |= self.difference_tokens(node)
        elif view.value.kind == "relation":
            found.add(self.collected(list(node.args)))
        return found

    def difference_tokens(self, node: Node) -> set[str]:
        """An equation up to a factor: the ratio of its two sides' difference at two points."""
        sides = difference(node)
        names, prober = variables(sides), Prober(self.limits)
        try:
            first, second = (prober.value(sides, _at(names, index)) for index in (0, 1))
            return {"equation:" + written(prober.divide(first, second))}
        except (Undecided, Undefined):
            return set()

    def collection_tokens(self, node: Node) -> set[str]:
        inside = list(members(node)) if node.kind in ("list", "set") else _entries(node)
        found = {self.collected(inside)}
        if len(inside) == 1:
            found |= self._tokens(inside[0])
        return found

    def collected(self, nodes: list[Node]) -> str:
        """One token for members in any order: the least token of each."""
        return "all:" + ";".join(sorted({min(self.tokens(node), key=_rank, default="?") for node in nodes}))


def _entries(node: Node) -> list[Node]:
    if node.kind in _COLLECTIONS:
        return [entry for arg in node.args for entry in _entries(arg)]
    return [node]


def _rank(token: str) -> tuple[bool, str]:
    return (not token.startswith("near"), token)  # a rounding and its value must choose alike


def _near(value: Any) -> set[str]:
    """Four digits of a real number, cut off and rounded, so that a long decimal and what it rounds share one."""
    text = str(mpmath.nstr(getattr(value, "real", value), 12, min_fixed=0, max_fixed=0))
    mantissa, _, exponent = text.partition("e")
    scaled = abs(float(mantissa)) * 1000
    sign = "-" if mantissa.startswith("-") else ""
    found = {(int(scaled), int(exponent or 0)), (int(scaled + 0.5), int(exponent or 0))}
    return {
        f"near:{sign}{1000 if digits == 10_000 else digits}e{power + (digits == 10_000)}" for digits, power in found
    }


def _at(names: frozenset[str], index: int) -> Point:
    """A point fixed by the names alone, whole, so that most functions have a value there."""
    return generic(dict.fromkeys(names, "natural"), index)
