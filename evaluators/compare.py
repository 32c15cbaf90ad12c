"""Compare two parsed answers by the written policy, part by part."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from atts.evaluators import words
from atts.evaluators.exact import digits_in_base
from atts.evaluators.probing import Prober, Value
from atts.evaluators.tree import Node, has, number, quotient, variables
from atts.evaluators.verdict import Limits, TooLarge, Undecided, Undefined
from atts.evaluators.views import FLIPPED, Interval, Named, intervals, is_name, matrix, named, signs_expanded

_ROUNDED_DIGITS = 5  # significant digits from which a decimal may stand for a value it only rounds
_PAIRWISE = 64  # unordered members compared with one another; more are first matched by structure
_COLLECTIONS = ("list", "set", "tuple", "matrix", "union")


class Comparison:
    """One comparison of two answers; `rule` names what decided last.

    With strict brackets, (1,2,3) and [1,2,3] differ as (1,2) and [1,2] always do.
    """

    def __init__(self, limits: Limits, brackets: Literal["free", "strict"] = "free") -> None:
        self.limits = limits
        self.brackets = brackets
        self.prober = Prober(limits)
        self.rule = "structure"

    def ruled(self, rule: str, verdict: bool) -> bool:
        self.rule = rule
        return verdict

    def same(self, gold: Node, answer: Node) -> bool:
        """Whether two answers are the same under the policy; raises Undecided when that cannot be told."""
        if gold == answer and not has(gold, "opaque"):
            return self.ruled("structure", True)
        left, right = named(gold), named(answer)
        if left.name is not None and right.name is not None:
            return self.both_named(left, right, gold, answer)
        if (
            _is_inequality(left.value)
            or _is_inequality(right.value)
            or has(left.value, "union")
            or has(right.value, "union")
        ):
            found = self.as_intervals(gold, answer)
            if found is not None:
                return found
        if left.value.kind == "relation" or right.value.kind == "relation":
            return self.relations(gold, answer)
        return self.values(left.value, right.value)

    def both_named(self, left: Named, right: Named, gold: Node, answer: Node) -> bool:
        assert left.name is not None
        assert right.name is not None
        if left.name == right.name or "word" in (left.name.kind, right.name.kind):
            return self.same(left.value, right.value)
        if left.name.kind in ("tuple", "ratio", "list") and left.name.kind == right.name.kind:
            return False
        if left.name.kind != "symbol" or right.name.kind != "symbol":
            return self.same(left.value, right.value) and self.ruled("name", _alike(left.name, right.name))
        return self.relations(gold, answer)

    # -- relations -------------------------------------------------------------------------

    def relations(self, gold: Node, answer: Node) -> bool:
        """Equations up to a factor, inequalities up to a positive one, chains side by side."""
        if gold.kind != "relation" or answer.kind != "relation":
            return self.ruled("relation", False)
        one, two = gold.text.split(), answer.text.split()
        if len(one) != len(two) or len(one) > 1:
            return self.chains(gold, answer)
        if one[0] in ("in", "->") or two[0] in ("in", "->"):
            return one == two and all(self.same(a, b) for a, b in zip(gold.args, answer.args, strict=True))
        ratio = self.prober.proportional(_difference(gold), _difference(answer))
        if ratio is None:
            return self.ruled("relation", False)
        sign = _sign(ratio)
        if one[0] in ("=", "!=", "~"):
            return self.ruled("relation", sign != 0 and one == two)
        return self.ruled("relation", two[0] == (one[0] if sign > 0 else FLIPPED[one[0]]) and sign != 0)

    def chains(self, gold: Node, answer: Node) -> bool:
        one, two = gold.text.split(), answer.text.split()
        if len(one) != len(two):
            return self.ruled("relation", False)
        sides = answer.args
        if one != two:
            two, sides = [FLIPPED.get(sign, "?") for sign in reversed(two)], sides[::-1]
        return self.ruled(
            "relation", one == two and all(self.same(a, b) for a, b in zip(gold.args, sides, strict=True))
        )

    def as_intervals(self, gold: Node, answer: Node) -> bool | None:
        """Both as sets of reals, None when either is not one."""
        if _is_inequality(named(gold).value) and _is_inequality(named(answer).value) and gold.text == answer.text:
            if all(self.agree(a, b) for a, b in zip(gold.args, answer.args, strict=True)):
                return self.ruled("relation", True)
        left, right = intervals(gold), intervals(answer)
        if left is None or right is None or len(left) > 200 or len(right) > 200:
            return None
        names = variables(gold) | variables(answer)
        if names and _variable(gold) != _variable(answer) and _variable(gold) and _variable(answer):
            return self.ruled("interval", False)
        return self.ruled("interval", self.matched(left, right))

    def agree(self, gold: Node, answer: Node) -> bool:
        """same, with Undecided taken as no."""
        try:
            return self.same(gold, answer)
        except Undecided:
            return False

    def matched(self, left: tuple[Interval, ...], right: tuple[Interval, ...]) -> bool:
        rest = list(right)
        for interval in left:
            found = next((each for each in rest if self.same_interval(interval, each)), None)
            if found is None:
                return False
            rest.remove(found)
        return not rest

    def same_interval(self, left: Interval, right: Interval) -> bool:
        return left.brackets == right.brackets and self.same(left.low, right.low) and self.same(left.high, right.high)

    # -- collections -----------------------------------------------------------------------

    def values(self, gold: Node, answer: Node) -> bool:
        """Two answers that are no relations."""
        if has(gold, "plusminus") or has(answer, "plusminus"):
            return self.unordered(members(gold), members(answer), "set")
        gold, answer = matrix(gold) or gold, matrix(answer) or answer
        kinds = {gold.kind, answer.kind}
        if kinds & {"list", "set"}:
            return self.lists(gold, answer)
        if kinds & {"tuple", "matrix", "union", "setminus"}:
            return self.ordered(gold, answer)
        if "word" in kinds:
            return self.words(gold, answer)
        return self.plain(gold, answer)

    def lists(self, gold: Node, answer: Node) -> bool:
        """Bare lists and sets: order is free, save where one side is a tuple or names its parts."""
        if gold.kind == "tuple" or answer.kind == "tuple":
            pair, other = (gold, answer) if gold.kind == "tuple" else (answer, gold)
            if other.kind == "set":
                return self.ruled("set", False)
            return self.each(pair.args, other.args, "tuple")
        one, two = members(gold), members(answer)
        if len(one) == len(two) and _distinct(one) != _distinct(two):
            return self.each(one, two, "tuple")
        return self.unordered(one, two, "set")

    def unordered(self, one: tuple[Node, ...], two: tuple[Node, ...], rule: str) -> bool:
        """Whether each member has a counterpart on the other side."""
        common = set(one) & set(two)
        left = tuple(node for node in dict.fromkeys(one) if node not in common)
        right = tuple(node for node in dict.fromkeys(two) if node not in common)
        if not left and not right:
            return self.ruled(rule, True)
        if len(left) > _PAIRWISE or len(right) > _PAIRWISE:
            return self.ruled(rule, self.sorted_members(left, right))
        if (len(one) == 1) != (len(two) == 1):
            return self.ruled(rule, False)
        verdict = all(self.found(node, two) for node in left) and all(self.found(node, one) for node in right)
        return self.ruled(rule, verdict)

    def found(self, node: Node, others: tuple[Node, ...]) -> bool:
        """Whether an equal member is among the others; an undecided one counts only when none is equal."""
        undecided: Undecided | None = None
        for other in others:
            try:
                if self.same(node, other):
                    return True
            except Undecided as error:
                undecided = error
        if undecided:
            raise undecided
        return False

    def sorted_members(self, left: tuple[Node, ...], right: tuple[Node, ...]) -> bool:
        """Many members are compared as exact numbers only."""
        one, two = ({self.prober.constants(node) for node in side} for side in (left, right))
        if not all(isinstance(value, Fraction) for value in one | two):
            raise TooLarge("too many members to compare")
        return one == two

    def ordered(self, gold: Node, answer: Node) -> bool:
        """Tuples, vectors, matrices and intervals: entry by entry."""
        if gold.kind == "matrix" and answer.kind == "matrix":
            return self.each(gold.args, answer.args, "matrix")
        if "matrix" in (gold.kind, answer.kind):
            grid, other = (gold, answer) if gold.kind == "matrix" else (answer, gold)
            entries = _vector(grid)
            if entries is None or other.kind != "tuple":
                return self.ruled("matrix", False)
            return self.each(entries, other.args, "matrix")
        if gold.kind != "tuple" or answer.kind != "tuple":
            return self.ruled("tuple", False)
        if (
            (len(gold.args) == 2 or self.brackets == "strict")
            and gold.text != answer.text
            and gold.text
            and answer.text
        ):
            return self.ruled("interval", False)
        return self.each(gold.args, answer.args, "tuple")

    def each(self, one: tuple[Node, ...], two: tuple[Node, ...], rule: str) -> bool:
        verdict = len(one) == len(two) and all(self.same(a, b) for a, b in zip(one, two, strict=True))
        return self.ruled(rule, verdict)

    # -- single values ---------------------------------------------------------------------

    def words(self, gold: Node, answer: Node) -> bool:
        if gold.kind != "word" or answer.kind != "word":
            return self.ruled("text", _letter(gold) is not None and _letter(gold) == _letter(answer))
        return self.ruled("text", words.squashed(gold.text) == words.squashed(answer.text))

    def plain(self, gold: Node, answer: Node) -> bool:
        """Two single values, their units, percent and degree signs, bases and ratios included."""
        kinds = (gold.kind, answer.kind)
        if "quantity" in kinds:
            return self.quantities(gold, answer)
        if "ratio" in kinds:
            return self.ratios(gold, answer)
        if "based" in kinds:
            return self.ruled("base", _same_numeral(gold, answer))
        if "percent" in kinds and kinds[0] != kinds[1]:
            bare = [node.args[0] if node.kind == "percent" else node for node in (gold, answer)]
            return self.same(*bare) or self.numbers(gold, answer) or self.ruled("percent", False)
        if "degree" in kinds and kinds[0] != kinds[1]:
            bare = [node.args[0] if node.kind == "degree" else node for node in (gold, answer)]
            return self.numbers(*bare) or self.ruled("degrees", self.numbers(gold, answer))
        if _letter(gold) and _letter(answer):
            return self.ruled("text", _letter(gold) == _letter(answer))
        if has(gold, "inf", "constant") or has(answer, "constant"):
            infinite = [_infinity(node) for node in (gold, answer)]
            if infinite != [0, 0]:
                return self.ruled("infinity", infinite[0] == infinite[1])
        return self.numbers(gold, answer)

    def quantities(self, gold: Node, answer: Node) -> bool:
        """Units must not contradict each other; one left out, or not known to us, is passed over."""
        left, right = (node.args[0] if node.kind == "quantity" else node for node in (gold, answer))
        one, two = (words.measure(node.text) if node.kind == "quantity" else None for node in (gold, answer))
        if one is not None and two is not None and one != two:
            if one[0] != two[0]:
                return self.ruled("unit", False)
            return self.ruled("unit", self.same(left, Node("mul", (right, number(two[1] / one[1])))))
        return self.same(left, right)

    def ratios(self, gold: Node, answer: Node) -> bool:
        """Ratios by proportion, times of day by their digits."""
        if gold.kind == answer.kind == "ratio":
            one, two = gold.args, answer.args
            if len(one) != len(two):
                return self.ruled("ratio", False)
            if all(self.same(a, b) for a, b in zip(one, two, strict=True)):
                return self.ruled("ratio", True)
            if _is_clock(gold) or _is_clock(answer):
                return self.ruled("ratio", False)
            return self.ruled("ratio", all(self.same(quotient(a, one[0]), quotient(b, two[0])) for a, b in zip(one, two, strict=True)))  # fmt: skip  # noqa: E501
        ratio, other = (gold, answer) if gold.kind == "ratio" else (answer, gold)
        if len(ratio.args) != 2 or _is_clock(ratio):
            return self.ruled("ratio", False)
        return self.ruled("ratio", self.numbers(quotient(*ratio.args), other))

    def numbers(self, gold: Node, answer: Node) -> bool:
        """Expressions by value, then a long decimal as the rounding of what it cannot be exactly."""
        if "huge" in (gold.kind, answer.kind):
            return self.ruled("exact", False)
        if has(gold, *_COLLECTIONS) or has(answer, *_COLLECTIONS):
            raise Undecided("a collection inside an expression")
        try:
            if self.prober.equal(gold, answer):
                return self.ruled("value", True)
        except Undefined as error:
            if self.has_value(gold) != self.has_value(answer):
                return self.ruled("undefined", False)
            raise Undecided(f"no value: {error}") from error
        return self.ruled("rounding" if self.rounds(gold, answer) else "value", self.rounds(gold, answer))

    def has_value(self, node: Node) -> bool:
        """Whether a constant has a value; raises Undecided when that cannot be told."""
        try:
            self.prober.constants(node)
        except Undefined:
            return False
        return True

    def rounds(self, gold: Node, answer: Node) -> bool:
        """Whether one is a decimal of enough digits and the other a value that no decimal of its kind can be."""
        decimal, other = (gold, answer) if _digits(gold) else (answer, gold)
        digits = _digits(decimal)
        if digits < _ROUNDED_DIGITS or _digits(other) or variables(other):
            return False
        try:
            value = self.prober.constants(other)
        except (Undecided, Undefined):
            return False
        if isinstance(value, Fraction) and terminates(value):
            return False
        unit = Fraction(10) ** -len(decimal.text.partition(".")[2])
        assert decimal.value is not None
        return self.within(value, decimal.value - unit, decimal.value + unit)

    def within(self, value: Value, low: Fraction, high: Fraction) -> bool:
        if isinstance(value, Fraction):
            return low < value < high
        if hasattr(value.value, "_mpc_"):
            return False
        bounds = [self.prober.approximate(each, 200).value for each in (low, high)]
        return bool(bounds[0] < value.value < bounds[1])


def members(node: Node) -> tuple[Node, ...]:
    """What an unordered answer holds, both signs written out."""
    inner = named(node).value if node.kind == "relation" else node
    if inner.kind in ("list", "set"):
        return tuple(each for arg in inner.args for each in members(arg))
    if inner is not node and not has(inner, "plusminus"):
        return (node,)
    return signs_expanded(inner) if has(inner, "plusminus") else (node,)


def _difference(relation: Node) -> Node:
    return Node("add", (relation.args[0], Node("mul", (number(-1), relation.args[1]))))


def _sign(value: Value) -> int:
    number_ = value if isinstance(value, Fraction) else value.value
    if hasattr(number_, "_mpc_"):
        return 0
    return (number_ > 0) - (number_ < 0)


def _is_inequality(node: Node) -> bool:
    if node.kind == "list":
        return bool(node.args) and all(_is_inequality(arg) for arg in node.args)
    return node.kind == "relation" and set(node.text.split()) <= {"<", ">", "<=", ">=", "!="}


def _variable(node: Node) -> str:
    """The one variable a set of reals is about, empty when it is not named."""
    found = {side.text for each in node.walk() if each.kind == "relation" for side in each.args if is_name(side)}
    return found.pop() if len(found) == 1 else ""


def _distinct(nodes: tuple[Node, ...]) -> bool:
    """Whether members carry names, all different."""
    found = [named(node).name for node in nodes]
    return None not in found and len(set(found)) == len(found) > 1


def _alike(one: Node, two: Node) -> bool:
    return one == two or one.kind != two.kind or one.kind == "call"


def _vector(grid: Node) -> tuple[Node, ...] | None:
    if len(grid.args) == 1:
        return grid.args[0].args
    if all(len(row.args) == 1 for row in grid.args):
        return tuple(row.args[0] for row in grid.args)
    return None


def _letter(node: Node) -> str | None:
    """The letter of a choice: one of A to J, in either case."""
    return (
        node.text.upper()
        if node.kind == "symbol" and len(node.text) == 1 and node.text.upper() in "ABCDEFGHIJ"
        else None
    )


def _infinity(node: Node) -> int:
    if node.kind == "constant" and node.text == "inf":
        return 1
    if node.kind == "mul" and len(node.args) == 2 and _infinity(node.args[1]) and node.args[0].value is not None:
        return 1 if node.args[0].value > 0 else -1
    if node.kind in ("percent", "quantity"):
        return _infinity(node.args[0])
    return 0


def _same_numeral(gold: Node, answer: Node) -> bool:
    if gold.kind == answer.kind:
        try:
            return digits_in_base(gold) == digits_in_base(answer)
        except Undefined:
            return gold.text == answer.text and gold.value == answer.value
    numeral, other = (gold, answer) if gold.kind == "based" else (answer, gold)
    return other.kind == "number" and other.text == numeral.text


def _is_clock(node: Node) -> bool:
    parts = [arg.text for arg in node.args]
    return len(parts) > 1 and len(parts[0]) <= 2 and all(len(part) == 2 and part.isdigit() for part in parts[1:])


def _digits(node: Node) -> int:
    """Significant digits of a decimal literal, zeros at its end left out; 0 for anything else."""
    if node.kind != "number" or "." not in node.text or "e" in node.text.lower():
        return 0
    return len(node.text.replace(".", "").strip("-0"))


def is_decimal(node: Node) -> bool:
    """Whether a literal has digits enough to be the rounding of another value."""
    return _digits(node) >= _ROUNDED_DIGITS


def terminates(value: Fraction) -> bool:
    """Whether the decimal expansion of a fraction ends."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
