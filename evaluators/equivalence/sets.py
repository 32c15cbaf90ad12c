"""Sets of real numbers that answers describe, as their ends in order: intervals, inequalities,
unions, set-builders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise
from typing import NamedTuple

from atts.evaluators.equivalence.approx import NotRational
from atts.evaluators.equivalence.numeric import exact
from atts.evaluators.equivalence.probing import Prober
from atts.evaluators.equivalence.views import FLIPPED, is_name
from atts.evaluators.syntax.tree import (
    MINUS_ONE,
    REALS,
    Node,
    has,
    minus,
    number,
    quotient,
    substituted,
    variables,
)
from atts.evaluators.verdict import TooLarge, Undecided, Undefined

BELOW, INFINITY = REALS.args
_PAIRS = frozenset({"()", "[]", "(]", "[)"})
_REAL_SETS = frozenset({"union", "setminus", "builder"})


class End(NamedTuple):
    """A place on the real line: just before a number, or just after it."""

    value: Node
    after: bool


Region = tuple[End, ...]
"""A set of reals: it begins at the first end, stops at the second, begins again at the third, and
so on.
"""
_LOWEST = End(BELOW, True)
_HIGHEST = End(INFINITY, False)


def is_inequality(node: Node) -> bool:
    """Whether an answer says where its variable lies."""
    if node.kind == "list":
        return bool(node.args) and all(is_inequality(arg) for arg in node.args)
    return node.kind == "relation" and not set(node.text.split()) - {"<", ">", "<=", ">=", "!="}


def speaks_of_reals(node: Node) -> bool:
    """Whether an answer is a set of reals, said in more than a pair of brackets."""
    return is_inequality(node) or any(
        each.kind in _REAL_SETS or each.text == "cap" for each in node.walk()
    )


@dataclass(frozen=True)
class Line:
    """Works out regions; their ends are compared in numbers where they have no variables."""

    prober: Prober

    def region(self, node: Node) -> Region | None:
        """The set of reals a node describes, None when it describes none that can be worked out."""
        try:
            return self._region(node)
        except Undefined:
            return None

    def _region(self, node: Node) -> Region | None:
        if node.kind == "tuple" and len(node.args) == 2 and node.text in _PAIRS:
            return End(node.args[0], node.text[0] == "("), End(node.args[1], node.text[1] == "]")
        if node.kind == "set":
            return self.shared(list(map(_point, node.args)), 1)
        if node.kind in ("union", "list", "setminus") or node.text == "cap":
            return self.combined(node)
        if node.kind == "builder":
            return self.built(*node.args)
        return self.related(node) if node.kind == "relation" else None

    def combined(self, node: Node) -> Region | None:
        parts = [part for arg in node.args if (part := self._region(arg)) is not None]
        about = [variables(arg) for arg in node.args if arg.kind == "relation"]
        if (
            len(parts) < len(node.args)
            or len(parts) > 100
            or (about and not frozenset.intersection(*about))
        ):
            return None
        if node.kind == "setminus":
            return self.shared([parts[0], _rest(parts[1])], 2)
        either = self.shared(parts, 1)
        if node.kind == "union" or node.text == "or" or not (node.text or is_inequality(node)):
            return either
        both = self.shared(parts, len(parts))
        return either if not both and node.kind == "list" and not node.text else both

    def built(self, member: Node, condition: Node) -> Region | None:
        """{x : condition}, x perhaps said to be real."""
        if member.kind == "relation" and member.text == "in" and member.args[1] == REALS:
            member = member.args[0]
        if member.kind != "symbol" or variables(condition) != frozenset({member.text}):
            return None
        return self._region(condition)

    def whole(self, node: Node) -> Node:
        """The set of the integers that meet a condition, one by one; the node itself where they are
        not few.
        """
        member, condition = node.args
        if member.kind == "relation" and member.text == "in" and member.args[1].text == "mathbb:Z":
            inside = self.built(member.args[0], condition) or ()
            ends = [
                end for each in inside if isinstance(end := self.prober.value(each.value), Fraction)
            ]
            if ends and len(ends) == len(inside) and all(abs(end) < 1_000 for end in ends):
                near = range(int(min(ends)) - 1, int(max(ends)) + 2)
                found = [x for x in near if self.shared([inside, _point(number(x))], 2)]
                return Node("set", tuple(number(x, str(x)) for x in found))
        return node

    def related(self, node: Node) -> Region | None:
        """Where a relation or a chain of them holds."""
        signs = node.text.split()
        sides = node.args
        if signs in (["in"], ["notin"]):
            inside = self._region(sides[1]) if is_name(sides[0]) else None
            return inside if inside is None or signs == ["in"] else _rest(inside)
        links = list(zip(signs, sides, sides[1:], strict=False))
        parts = [
            part
            for sign, left, right in links
            if (part := self.solved(left, sign, right)) is not None
        ]
        about = [variables(left) | variables(right) for _, left, right in links]
        if len(parts) < len(links) or not frozenset.intersection(*about):
            return None
        return parts[0] if len(parts) == 1 else self.shared(parts, len(parts))

    def solved(self, left: Node, sign: str, right: Node) -> Region | None:
        """Where left < right, and its like, holds for the one variable on its sides."""
        if sign in ("!=", "="):
            signs, least = (("<", ">"), 1) if sign == "!=" else (("<=", ">="), 2)
            below, above = (self.solved(left, sign, right) for sign in signs)
            return None if below is None or above is None else self.shared([below, above], least)
        if sign not in ("<", ">", "<=", ">="):
            return None
        if not variables(left) or (is_name(right) and not is_name(left)):
            left, sign, right = right, FLIPPED[sign], left
        if is_name(left) and not has(right, "call") and not variables(right) & variables(left):
            return _ray(sign, right)
        if len(variables(left) | variables(right)) != 1:
            return None
        if left.kind == "func" and left.text == "abs" and not variables(right):
            return self.absolute(left.args[0], sign, right)
        return self.polynomial(minus(left, right), sign)

    def absolute(self, inside: Node, sign: str, bound: Node) -> Region | None:
        one = self.solved(inside, sign, bound)
        two = self.solved(inside, FLIPPED[sign], Node("mul", (MINUS_ONE, bound)))
        return (
            None
            if one is None or two is None
            else self.shared([one, two], 1 if sign in (">", ">=") else 2)
        )

    def polynomial(self, node: Node, sign: str) -> Region | None:
        """Where a polynomial of degree one or two in one variable is below zero, and its like."""
        (name,) = variables(node)
        try:
            values = [
                exact(node, self.prober.limits, {name: Fraction(x)}) for x in (0, 1, 2, 3, -5, 11)
            ]
        except NotRational:
            return self.linear(node, name, sign)
        c = values[0]
        curve = (values[2] - 2 * values[1] + values[0]) / 2
        slope = values[1] - c - curve
        if any(
            curve * x * x + slope * x + c != y for x, y in zip((3, -5, 11), values[3:], strict=True)
        ):
            return None
        if not curve:
            return _ray(sign if slope > 0 else FLIPPED[sign], number(-c / slope)) if slope else None
        is_between = (curve > 0) == (sign in ("<", "<="))
        between: Region = ()
        if (apart := slope * slope - 4 * curve * c) >= 0:
            root = Node("root", (number(apart / (4 * curve * curve)), number(2)))
            middle = number(-slope / (2 * curve))
            is_closed = (sign in ("<=", ">=")) == is_between
            low = End(minus(middle, root), not is_closed)
            high = End(Node("add", (middle, root)), is_closed)
            between = self.shared([(low, high)], 1)
        return between if is_between else _rest(between)

    def linear(self, node: Node, name: str, sign: str) -> Region | None:
        at = [substituted(node, {name: number(x)}) for x in range(3)]
        first, second = (minus(two, one) for one, two in pairwise(at))
        if not self.prober.equal(first, second):
            return None
        direction = self.order(first, number(0))
        root = Node("mul", (MINUS_ONE, quotient(at[0], first)))
        return _ray(sign if direction > 0 else FLIPPED[sign], root) if direction else None

    def order(self, one: Node, two: Node) -> int:
        """-1, 0 or 1 as one number lies below, at or above the other; raises Undecided for those
        with variables.
        """
        if one == two:
            return 0
        ranks = [(node == INFINITY) - (node == BELOW) for node in (one, two)]
        if any(ranks):
            return (ranks[0] > ranks[1]) - (ranks[0] < ranks[1])
        if has(one, "symbol") or has(two, "symbol"):
            raise Undecided("ends that are not numbers")
        if self.prober.equal(one, two):
            return 0
        gap = self.prober.value(minus(one, two))
        return 1 if (gap > 0 if isinstance(gap, Fraction) else gap.value.real > 0) else -1

    def before(self, one: End, two: End) -> int:
        return self.order(one.value, two.value) or one.after - two.after

    def shared(self, regions: Sequence[Region], least: int) -> Region:
        """What at least so many of these sets hold: their union for one, their intersection for
        all.
        """
        stretches = [
            pair for region in regions for pair in zip(region[::2], region[1::2], strict=True)
        ]
        if least == 1 and any(has(end.value, "symbol") for pair in stretches for end in pair):
            stretches.sort(key=lambda pair: (pair[0] != _LOWEST, pair[1] == _HIGHEST, repr(pair)))
            return tuple(end for pair in stretches for end in pair)
        if len(stretches) > 200:
            raise TooLarge("too many intervals")
        turns = [
            turn
            for low, high in stretches
            if self.before(low, high) < 0
            for turn in ((low, 1), (high, -1))
        ]
        found = list[End]()
        depth = 0
        before = cmp_to_key(self.before)
        for end, turn in sorted(turns, key=lambda turn: before(turn[0])):
            if (depth >= least) != (depth + turn >= least):
                if found and self.before(found[-1], end) == 0:
                    found.pop()
                else:
                    found.append(end)
            depth += turn
        return tuple(found)


def _point(value: Node) -> Region:
    return End(value, False), End(value, True)


def _ray(sign: str, end: Node) -> Region:
    if sign in ("<", "<="):
        return _LOWEST, End(end, sign == "<=")
    return End(end, sign == ">"), _HIGHEST


def _rest(region: Region) -> Region:
    """The complement."""
    begun = region[1:] if region and region[0].value == BELOW else (_LOWEST, *region)
    return begun[:-1] if begun and begun[-1].value == INFINITY else (*begun, _HIGHEST)
