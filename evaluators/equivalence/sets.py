"""Sets of real numbers that answers describe, as stretches in order: intervals, inequalities, unions, set-builders."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise

from atts.evaluators.equivalence.exact import NotRational
from atts.evaluators.equivalence.numeric import exact
from atts.evaluators.equivalence.probing import Prober
from atts.evaluators.equivalence.views import FLIPPED, is_name, substituted
from atts.evaluators.syntax.tree import INFINITY, MINUS_ONE, REALS, TWO, Node, has, number, quotient, variables
from atts.evaluators.verdict import TooLarge, Undecided, Undefined

BELOW = REALS.args[0]
_PAIRS = frozenset({"()", "[]", "(]", "[)"})
_REAL_SETS = frozenset({"union", "setminus", "builder"})


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of the real line; a point is closed on both sides with the same ends."""

    low: Node
    high: Node
    brackets: str


Region = tuple[Interval, ...]
LINE: Region = (Interval(BELOW, INFINITY, "()"),)


def is_inequality(node: Node) -> bool:
    """Whether an answer says where its variable lies."""
    if node.kind == "list":
        return bool(node.args) and all(is_inequality(arg) for arg in node.args)
    return node.kind == "relation" and not set(node.text.split()) - {"<", ">", "<=", ">=", "!="}


def speaks_of_reals(node: Node) -> bool:
    """Whether an answer is a set of reals, said in more than a pair of brackets."""
    return is_inequality(node) or any(each.kind in _REAL_SETS or each.text == "cap" for each in node.walk())


class Line:
    """Works out regions; their ends are compared in numbers where they have no variables."""

    def __init__(self, prober: Prober) -> None:
        self.prober = prober

    def region(self, node: Node) -> Region | None:
        """The set of reals a node describes, None when it describes none that can be worked out."""
        try:
            return self._region(node)
        except Undefined:
            return None

    def _region(self, node: Node) -> Region | None:
        if node.kind == "tuple" and len(node.args) == 2 and node.text in _PAIRS:
            return (Interval(*node.args, node.text),)
        if node.kind == "set":
            return self.merged(tuple(point for each in node.args for point in _point(each)))
        if node.kind in ("union", "list", "setminus") or node.text == "cap":
            return self.combined(node)
        if node.kind == "builder":
            return self.built(*node.args)
        return self.related(node) if node.kind == "relation" else None

    def combined(self, node: Node) -> Region | None:
        parts = [self._region(arg) for arg in node.args]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or len(found) > 100:
            return None
        if node.kind == "setminus":
            return self.common(found[0], self.rest(found[1]))
        either = self.merged(tuple(each for part in found for each in part))
        if node.kind == "union" or node.text == "or" or not (node.text or is_inequality(node)):
            return either
        both = found[0]
        for part in found[1:]:
            both = self.common(both, part)
        return either if not both and node.kind == "list" and not node.text else both

    def built(self, member: Node, condition: Node) -> Region | None:
        """{x : condition}, x perhaps said to be real."""
        if member.kind == "relation" and member.text == "in" and member.args[1] == REALS:
            member = member.args[0]
        if member.kind != "symbol" or variables(condition) != frozenset({member.text}):
            return None
        return self._region(condition)

    def whole(self, node: Node) -> Node:
        """The set of the integers that meet a condition, one by one; the node itself where they are not few."""
        member, condition = node.args
        if member.kind == "relation" and member.text == "in" and member.args[1].text == "mathbb:Z":
            stretches = self.built(member.args[0], condition)
            ends = [self.prober.constants(end) for each in stretches or () for end in (each.low, each.high)]
            if stretches and all(isinstance(end, Fraction) and abs(end) < 1_000 for end in ends):
                low, high = (int(pick(end for end in ends if isinstance(end, Fraction))) for pick in (min, max))
                inside = [x for x in range(low - 1, high + 2) if self.common(stretches, _point(number(x)))]
                return Node("set", tuple(number(x, str(x)) for x in inside))
        return node

    def related(self, node: Node) -> Region | None:
        """Where a relation or a chain of them holds."""
        signs, sides = node.text.split(), node.args
        if signs in (["in"], ["notin"]):
            inside = self._region(sides[1]) if is_name(sides[0]) else None
            return inside if inside is None or signs == ["in"] else self.rest(inside)
        found: Region = LINE
        for sign, left, right in zip(signs, sides, sides[1:], strict=False):
            part = self.solved(left, sign, right)
            if part is None:
                return None
            found = part if found is LINE else self.common(found, part)
        return found

    def solved(self, left: Node, sign: str, right: Node) -> Region | None:
        """Where left < right, and its like, holds for the one variable on its sides."""
        if sign not in ("<", ">", "<=", ">=", "!="):
            return None
        if not variables(left) or (is_name(right) and not is_name(left)):
            left, sign, right = right, FLIPPED[sign], left
        if is_name(left) and not has(right, "call") and not variables(right) & variables(left):
            return _ray(sign, right)
        if len(variables(left) | variables(right)) != 1:
            return None
        if left.kind == "func" and left.text == "abs" and not variables(right):
            return self.absolute(left.args[0], sign, right)
        return self.polynomial(Node("add", (left, Node("mul", (MINUS_ONE, right)))), sign)

    def absolute(self, inside: Node, sign: str, bound: Node) -> Region | None:
        if self.order(bound, number(0)) < 0:
            return () if sign in ("<", "<=") else LINE
        minus = Node("mul", (MINUS_ONE, bound))
        one, two = self.solved(inside, sign, bound), self.solved(inside, FLIPPED[sign], minus)
        if one is None or two is None:
            return None
        return self.merged(one + two) if sign in (">", ">=") else self.common(one, two)

    def polynomial(self, node: Node, sign: str) -> Region | None:
        """Where a polynomial of degree one or two in one variable is below zero, and its like."""
        (name,) = variables(node)
        try:
            values = [exact(node, self.prober.limits, {name: Fraction(x)}) for x in (0, 1, 2, 3, -5, 11)]
        except NotRational:
            return self.linear(node, name, sign)
        c, curve = values[0], (values[2] - 2 * values[1] + values[0]) / 2
        slope = values[1] - c - curve
        if any(curve * x * x + slope * x + c != y for x, y in zip((3, -5, 11), values[3:], strict=True)):
            return None
        if not curve:
            return _ray(sign if slope > 0 else FLIPPED[sign], number(-c / slope)) if slope else None
        apart = slope * slope - 4 * curve * c
        if apart < 0:
            return LINE if sign == "!=" or (curve > 0) == (sign in (">", ">=")) else ()
        root, middle = Node("root", (number(apart / (4 * curve * curve)), TWO)), number(-slope / (2 * curve))
        low, high = Node("add", (middle, Node("mul", (MINUS_ONE, root)))), Node("add", (middle, root))
        inside = Interval(low, high, "[]" if "=" in sign and sign != "!=" else "()")
        if sign == "!=":
            return self.rest(self.merged(_point(low) + _point(high)))
        if (curve > 0) == (sign in ("<", "<=")):
            return (inside,) if apart or inside.brackets == "[]" else ()
        return self.rest((Interval(low, high, "()" if inside.brackets == "[]" else "[]"),)) if apart else (
            LINE if inside.brackets == "[]" else self.rest(_point(low)))  # fmt: skip

    def linear(self, node: Node, name: str, sign: str) -> Region | None:
        at = [substituted(node, {name: number(x)}) for x in range(3)]
        first, second = (Node("add", (two, Node("mul", (MINUS_ONE, one)))) for one, two in pairwise(at))
        if not self.prober.equal(first, second):
            return None
        direction = self.order(first, number(0))
        root = Node("mul", (MINUS_ONE, quotient(at[0], first)))
        return _ray(sign if direction > 0 else FLIPPED[sign], root) if direction else None

    # -- stretches in order ----------------------------------------------------------------

    def order(self, one: Node, two: Node) -> int:
        """-1, 0 or 1 as one end lies below, at or above the other; raises Undecided for ends with variables."""
        if one == two:
            return 0
        ranks = [(node == INFINITY) - (node == BELOW) for node in (one, two)]
        if any(ranks):
            return (ranks[0] > ranks[1]) - (ranks[0] < ranks[1])
        if has(one, "symbol") or has(two, "symbol"):
            raise Undecided("ends that are not numbers")
        if self.prober.equal(one, two):
            return 0
        gap = self.prober.constants(Node("add", (one, Node("mul", (MINUS_ONE, two)))))
        above = gap > 0 if isinstance(gap, Fraction) else gap.value.real > 0
        return 1 if above else -1

    def merged(self, parts: Region) -> Region:
        """The union: disjoint stretches in order; those whose ends are not numbers are left as they are."""
        if len(parts) < 2 or any(has(end, "symbol") for each in parts for end in (each.low, each.high)):
            return parts
        if len(parts) > 200:
            raise TooLarge("too many intervals")
        found: list[Interval] = []
        for each in sorted(parts, key=cmp_to_key(self.before)):
            last = found[-1] if found else None
            gap = self.order(each.low, last.high) if last else 1
            if last is None or gap > 0 or (gap == 0 and last.brackets[1] + each.brackets[0] == ")("):
                found.append(each)
            else:
                turn = self.order(each.high, last.high)
                end = each if turn > 0 or (turn == 0 and each.brackets[1] == "]") else last
                found[-1] = Interval(last.low, end.high, last.brackets[0] + end.brackets[1])
        return tuple(found)

    def before(self, one: Interval, two: Interval) -> int:
        return self.order(one.low, two.low) or (one.brackets[0] == "(") - (two.brackets[0] == "(")

    def common(self, left: Region, right: Region) -> Region:
        """The intersection."""
        return self.merged(tuple(part for one in left for two in right for part in self.overlap(one, two)))

    def overlap(self, one: Interval, two: Interval) -> Region:
        low = max(one, two, key=cmp_to_key(self.before))
        turn = self.order(one.high, two.high)
        high = one if turn < 0 or (turn == 0 and one.brackets[1] == ")") else two
        found = Interval(low.low, high.high, low.brackets[0] + high.brackets[1])
        width = self.order(found.low, found.high)
        return (found,) if width < 0 or (width == 0 and found.brackets == "[]") else ()

    def rest(self, region: Region) -> Region:
        """The complement."""
        found, low, bracket = list[Interval](), BELOW, "("
        for each in self.merged(region):
            if each.low != BELOW:
                found.append(Interval(low, each.low, bracket + (")" if each.brackets[0] == "[" else "]")))
            low, bracket = each.high, "(" if each.brackets[1] == "]" else "["
        return tuple(found) if low == INFINITY else (*found, Interval(low, INFINITY, bracket + ")"))


def _point(end: Node) -> Region:
    return (Interval(end, end, "[]"),)


def _ray(sign: str, end: Node) -> Region:
    if sign == "!=":
        return (Interval(BELOW, end, "()"), Interval(end, INFINITY, "()"))
    if sign in ("<", "<="):
        return (Interval(BELOW, end, "(]" if sign == "<=" else "()"),)
    return (Interval(end, INFINITY, "[)" if sign == ">=" else "()"),)
