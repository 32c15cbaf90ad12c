"""Sets of real numbers, such as intervals and inequalities, stored as a sorted list of their ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise
from typing import NamedTuple

from atts.evaluators.equivalence.evaluation import NotRational, exact
from atts.evaluators.equivalence.probing import Prober
from atts.evaluators.equivalence.views import FLIPPED, Family, entries, is_name, members, named
from atts.evaluators.syntax.tree import (
    MINUS_ONE,
    REALS,
    Node,
    has,
    minus,
    number,
    quotient,
    substituted,
    symbol,
    variables,
)
from atts.evaluators.verdict import TooLarge, Undecided, Undefined

BELOW, INFINITY = REALS.args
_PAIRS = frozenset({"()", "[]", "(]", "[)"})
_REAL_SETS = frozenset({"union", "setminus", "builder"})


class End(NamedTuple):
    """The end of an interval: the position directly before or directly after a number."""

    value: Node
    after: bool


Region = tuple[End, ...]
"""A set of real numbers, as the sorted ends of its intervals.

The first, third, ... end begins an interval, and the second, fourth, ... end closes it.
"""
_LOWEST = End(BELOW, True)
_HIGHEST = End(INFINITY, False)


def is_inequality(node: Node) -> bool:
    """Return True if an answer restricts its variable by inequalities."""
    if node.kind == "list":
        return bool(node.args) and all(is_inequality(arg) for arg in node.args)
    return node.kind == "relation" and not set(node.text.split()) - {"<", ">", "<=", ">=", "!="}


def speaks_of_reals(node: Node) -> bool:
    """Return True if an answer is a set of real numbers other than a single interval in
    brackets.
    """
    return is_inequality(node) or any(
        each.kind in _REAL_SETS or each.text == "cap" for each in node.walk()
    )


@dataclass(frozen=True)
class Line:
    """A builder of sets of real numbers. It orders the ends of intervals by numeric value."""

    prober: Prober

    def region(self, node: Node) -> Region | None:
        """Return the set of real numbers that a node describes; None if it cannot be computed."""
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
        """Return the set of real numbers that a union, list, difference or intersection denotes."""
        parts = list[Region]()
        for arg in node.args:
            part = self._region(arg)
            if part is None:
                return None
            parts.append(part)
        subjects = [variables(arg) for arg in node.args if arg.kind == "relation"]
        if subjects and not frozenset.intersection(*subjects):
            return None
        parts = list(dict.fromkeys(parts))
        if len(parts) > 100:
            raise TooLarge("too many intervals")
        if node.kind == "setminus":
            return self.shared([parts[0], _rest(parts[1])], 2)
        either = self.shared(parts, 1)
        if node.kind == "union" or node.text == "or" or not (node.text or is_inequality(node)):
            return either
        both = self.shared(parts, len(parts))
        # In the list "x < 1, x > 3", the conditions exclude each other. So the list means that one
        # of them holds.
        return either if not both and node.kind == "list" and not node.text else both

    def built(self, member: Node, condition: Node) -> Region | None:
        """Return the set {x : condition}. The condition may also state that x is real."""
        if member.kind == "relation" and member.text == "in" and member.args[1] == REALS:
            member = member.args[0]
        if member.kind != "symbol" or variables(condition) != frozenset({member.text}):
            return None
        return self._region(condition)

    def whole(self, node: Node) -> Node:
        """Return a set such as {x in Z : 0 < x < 3} with its members listed.

        The node is returned unchanged if a bound is not rational, or if its absolute value is 1000
        or more.
        """
        member, condition = node.args
        is_whole = member.kind == "relation" and member.text == "in"
        if not is_whole or member.args[1].text != "mathbb:Z":
            return node
        inside = self.built(member.args[0], condition) or ()
        ends = [self.prober.value(each.value) for each in inside]
        exact_ends = [end for end in ends if isinstance(end, Fraction) and abs(end) < 1_000]
        if not ends or len(exact_ends) < len(ends):
            return node
        near = range(int(min(exact_ends)) - 1, int(max(exact_ends)) + 2)
        members = [x for x in near if self.shared([inside, _point(number(x))], 2)]
        return Node("set", tuple(number(x, str(x)) for x in members))

    def related(self, node: Node) -> Region | None:
        """Solve a relation. In a chain such as 0 < x <= 3, every part must be true."""
        signs = node.text.split()
        sides = node.args
        if signs in (["in"], ["notin"]):
            inside = self._region(sides[1]) if is_name(sides[0]) else None
            return inside if inside is None or signs == ["in"] else _rest(inside)
        parts = list[Region]()
        subjects = list[frozenset[str]]()
        if len(signs) > 100:
            raise TooLarge("too many relations")
        for sign, left, right in zip(signs, sides, sides[1:], strict=False):
            part = self.solved(left, sign, right)
            if part is None:
                return None
            parts.append(part)
            subjects.append(variables(left) | variables(right))
        if not frozenset.intersection(*subjects):
            return None
        return parts[0] if len(parts) == 1 else self.shared(parts, len(parts))

    def solved(self, left: Node, sign: str, right: Node) -> Region | None:
        """Solve a single relation such as 2x < 3, and return the solutions as a set."""
        if sign in ("!=", "="):
            suffix = "" if sign == "!=" else "="
            below = self.solved(left, "<" + suffix, right)
            above = self.solved(left, ">" + suffix, right)
            if below is None or above is None:
                return None
            return self.shared([below, above], 1 if sign == "!=" else 2)
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
        """Solve an inequality between an absolute value and a bound."""
        one = self.solved(inside, sign, bound)
        two = self.solved(inside, FLIPPED[sign], Node("mul", (MINUS_ONE, bound)))
        if one is None or two is None:
            return None
        return self.shared([one, two], 1 if sign in (">", ">=") else 2)

    def polynomial(self, node: Node, sign: str) -> Region | None:
        """Solve an inequality between a polynomial of degree one or two and zero.

        For any other expression, the result is None.
        """
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
        for x, y in zip((3, -5, 11), values[3:], strict=True):
            if curve * x * x + slope * x + c != y:
                return None  # The values do not fit a polynomial of degree at most 2.
        if not curve and not slope:
            return None
        if not curve:
            return _ray(sign if slope > 0 else FLIPPED[sign], number(-c / slope))
        is_between = (curve > 0) == (sign in ("<", "<="))
        between: Region = ()
        apart = slope * slope - 4 * curve * c
        if apart >= 0:
            root = Node("root", (number(apart / (4 * curve * curve)), number(2)))
            middle = number(-slope / (2 * curve))
            is_closed = (sign in ("<=", ">=")) == is_between
            low = End(minus(middle, root), not is_closed)
            high = End(Node("add", (middle, root)), is_closed)
            between = self.shared([(low, high)], 1)
        return between if is_between else _rest(between)

    def linear(self, node: Node, name: str, sign: str) -> Region | None:
        """Solve an inequality between a linear expression and zero.

        The coefficients may be irrational.
        """
        at = [substituted(node, {name: number(x)}) for x in range(3)]
        first, second = (minus(two, one) for one, two in pairwise(at))
        if not self.prober.equal(first, second):
            return None
        direction = self.order(first, number(0))
        root = Node("mul", (MINUS_ONE, quotient(at[0], first)))
        return _ray(sign if direction > 0 else FLIPPED[sign], root) if direction else None

    def order(self, one: Node, two: Node) -> int:
        """Return -1, 0 or 1 if the first number is less than, equal to or greater than the second.

        Raises Undecided if one of them contains a variable.
        """
        if one == two:
            return 0
        ranks = [(node == INFINITY) - (node == BELOW) for node in (one, two)]
        if any(ranks):
            return (ranks[0] > ranks[1]) - (ranks[0] < ranks[1])
        if has(one, "symbol") or has(two, "symbol"):
            raise Undecided("an interval whose ends are not numbers")
        if self.prober.equal(one, two):
            return 0
        gap = self.prober.value(minus(one, two))
        size = gap if isinstance(gap, Fraction) else gap.value.real
        return 1 if size > 0 else -1

    def before(self, one: End, two: End) -> int:
        """Return -1, 0 or 1 if the first end is before, equal to or after the second."""
        return self.order(one.value, two.value) or one.after - two.after

    def shared(self, regions: Sequence[Region], least: int) -> Region:
        """Return the numbers that are in at least `least` of the sets.

        If `least` is 1, the result is the union of the sets. If it is the number of sets, the
        result is their intersection.
        """
        stretches = [
            pair for region in regions for pair in zip(region[::2], region[1::2], strict=True)
        ]
        # Interval ends that contain variables cannot be sorted by value. So keep the intervals of
        # the union whole, in a fixed order.
        if least == 1 and any(has(end.value, "symbol") for pair in stretches for end in pair):
            stretches.sort(key=lambda pair: (pair[0] != _LOWEST, pair[1] == _HIGHEST, repr(pair)))
            return tuple(end for pair in stretches for end in pair)
        if len(stretches) > 200:
            raise TooLarge("too many intervals")
        turns = list[tuple[End, int]]()
        for low, high in stretches:
            if self.before(low, high) < 0:
                turns += [(low, 1), (high, -1)]
        ends = list[End]()
        depth = 0
        before = cmp_to_key(self.before)
        for end, turn in sorted(turns, key=lambda turn: before(turn[0])):
            if (depth >= least) != (depth + turn >= least):
                if ends and self.before(ends[-1], end) == 0:
                    ends.pop()
                else:
                    ends.append(end)
            depth += turn
        return tuple(ends)


def _point(value: Node) -> Region:
    return End(value, False), End(value, True)


def _ray(sign: str, end: Node) -> Region:
    if sign in ("<", "<="):
        return _LOWEST, End(end, sign == "<=")
    return End(end, sign == ">"), _HIGHEST


def _rest(region: Region) -> Region:
    """Return the complement of a set of reals."""
    begun = region[1:] if region and region[0].value == BELOW else (_LOWEST, *region)
    return begun[:-1] if begun and begun[-1].value == INFINITY else (*begun, _HIGHEST)


# ---- families of values, such as pi/4 + k pi for every integer k

_MOST_CLASSES = 2_000


def same_classes(prober: Prober, one: Family, two: Family) -> bool | None:
    """Return True if two families with an integer parameter have the same values; None if unknown.

    Each family is a union of arithmetic progressions, perhaps one for even and one for odd
    integers. The families have the same values if their remainders modulo a common period are the
    same.
    """
    try:
        sides = [_progressions(prober, each) for each in (one, two)]
        if not all(sides):
            return None
        base, unit = sides[0][0]
        scaled = [
            [
                (_share(prober, minus(start, base), unit), _share(prober, step, unit))
                for start, step in side
            ]
            for side in sides
        ]
    except (Undecided, Undefined):
        return None
    steps = list[Fraction]()
    for start, step in (each for side in scaled for each in side):
        if start is None or step is None:
            return None
        steps.append(abs(step))
    period = Fraction(
        math.lcm(*(step.numerator for step in steps)),
        math.gcd(*(step.denominator for step in steps)),
    )
    if sum(period / step for step in steps) > _MOST_CLASSES:
        return None
    first, second = (
        {
            (start + at * abs(step)) % period
            for start, step in side
            if start is not None and step is not None
            for at in range(int(period / abs(step)))
        }
        for side in scaled
    )
    return first == second


def _progressions(prober: Prober, family: Family) -> list[tuple[Node, Node]]:
    """Return the first value and the step of each arithmetic progression that a family consists of.

    The list is empty if some values do not form a progression.
    """
    found = list[tuple[Node, Node]]()
    for member in members(family.value):
        value = named(member).value
        names = variables(value)
        if len(names) != 1 or not names <= {*family.names} or has(value, "tuple", "relation"):
            return []
        (name,) = names
        at = [substituted(value, {name: number(count)}) for count in range(8)]
        for points in (at[:5], at[::2], at[1::2]):
            steps = [minus(later, sooner) for sooner, later in pairwise(points)]
            is_even = all(prober.equal(steps[0], step) for step in steps[1:])
            if is_even and not prober.equal(steps[0], number(0)):
                found.append((points[0], steps[0]))
                if points == at[:5]:
                    break
            elif points != at[:5]:
                return []
    return found


def _share(prober: Prober, part: Node, unit: Node) -> Fraction | None:
    """Return part / unit as a fraction; None if it is not equal to a fraction with a small
    denominator.
    """
    value = prober.value(quotient(part, unit))
    if isinstance(value, Fraction):
        return value
    if value.is_complex or abs(value.value.real) > 1_000_000:
        return None
    nearest = Fraction(float(value.value.real)).limit_denominator(1_000)
    return nearest if prober.equal(part, Node("mul", (number(nearest), unit))) else None


def reparametrised(prober: Prober, one: Family, two: Family) -> Node | None:
    """Return the value of the second family, expressed with the parameter of the first family.

    The second parameter is replaced by the linear function of the first that makes one pair of
    entries equal. If this function cannot be found, the parameter is only renamed. The result is
    None if the function does not map the parameter's set onto itself.
    """
    (name,) = one.names
    (other,) = two.names
    renamed = substituted(two.value, {other: symbol(name)})
    pairs = zip(entries(one.value), entries(two.value), strict=False)
    pair = next(
        (each for each in pairs if name in variables(each[0]) and other in variables(each[1])), None
    )
    if pair is None:
        return renamed
    values = [
        [substituted(side, {letter: number(at)}) for at in range(3)]
        for side, letter in zip(pair, (name, other), strict=True)
    ]
    try:
        slopes = [minus(each[1], each[0]) for each in values]
        are_linear = all(
            prober.equal(minus(each[2], each[1]), slope)
            for each, slope in zip(values, slopes, strict=True)
        )
        if not are_linear or prober.equal(slopes[1], number(0)):
            return renamed
        factor = _share(prober, slopes[0], slopes[1])
        shift = _share(prober, minus(values[0][0], values[1][0]), slopes[1])
    except (Undecided, Undefined):
        return renamed
    if factor is None or shift is None or not factor:
        return renamed
    if one.home != "mathbb:R" and (abs(factor) != 1 or shift.denominator != 1):
        return None
    if one.home not in ("mathbb:R", "mathbb:Z") and (factor != 1 or shift):
        return None
    change = Node("add", (Node("mul", (number(factor), symbol(name))), number(shift)))
    return substituted(two.value, {other: change})
