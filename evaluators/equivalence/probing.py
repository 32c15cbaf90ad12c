"""Decide whether two expressions are equal, by exact arithmetic or by their values at some points."""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from mpmath.libmp import to_str

from atts.evaluators.equivalence.evaluation import (
    NOTHING,
    NOWHERE,
    Approx,
    Budget,
    Environment,
    Evaluator,
    NotRational,
    Value,
    exact,
    magnitude,
)
from atts.evaluators.syntax.tree import Node, canonical, minus, number, substituted, variables
from atts.evaluators.syntax.vocabulary import words
from atts.evaluators.verdict import Limits, Outside, TooLarge, Undecided, Undefined

Domain = Literal["real", "step", "whole", "natural"]
Point = dict[str, Fraction]

_RANKS: tuple[Domain, ...] = ("real", "step", "whole", "natural")
_NATURAL = words("of_naturals")
_WHOLE = words("of_integers")
_STEPS = words("stepping")
_TURNS = words("turning")
_SWITCHES = words("switching") | _STEPS | _WHOLE | _NATURAL
_INDICES = frozenset("nmkjNMK")  # letters that usually are integers, such as n in floor(n/2)
# Expressions without branches are compared at this number of random points. Such expressions are
# analytic, so agreement at one random point practically proves equality.
_SMOOTH = 6
_SCATTERED = 24
_CONSTANTS = 14
_SWEEP = 120  # for moduli up to this number, all residues are tried


# ---- points at which expressions are compared


def domains(*nodes: Node) -> dict[str, Domain]:
    """Return the domain of each variable, derived from the functions that are applied to it.

    "real": all real numbers. "step": all integers. "whole": positive integers. "natural": small
    positive integers.
    """
    ranks = {name: 0 for node in nodes for name in variables(node)}
    for node in nodes:
        for each in node.walk():
            rank, inside = _demand(each)
            if not rank:
                continue
            for name in variables(inside):
                if rank > 1 or name[0] in _INDICES:
                    ranks[name] = max(ranks.get(name, 0), rank)
    return {name: _RANKS[rank] for name, rank in ranks.items()}


def _demand(node: Node) -> tuple[int, Node]:
    """Return the domain to which a node restricts variables, as an index of `_RANKS`, and the
    subtree that contains these variables.
    """
    if node.kind == "func":
        is_turn = node.text in _TURNS and any(each.text == "pi" for each in node.walk())
        rank = int(node.text in _STEPS or is_turn)
        rank += 2 * (node.text in _WHOLE) + 3 * (node.text in _NATURAL)
        return rank, node
    if node.kind == "pow" and (node.args[0].value or 0) < 0:
        return 2, node.args[1]
    if node.kind == "relation" and node.args[-1].kind == "congruence":
        return 2, node
    return (3, Node("add", node.args[2:])) if node.kind == "sum" else (0, node)


@lru_cache(maxsize=8192)
def _coordinate(name: str, index: int, domain: Domain) -> Fraction:
    """Return the pseudo-random value of a variable at a generic point.

    It depends only on the variable's name, the point's index and the domain.
    """
    draw = random.Random(f"{name}@{index}")
    if domain == "natural":
        return Fraction(draw.randrange(2, 12) + index)
    if domain in ("whole", "step"):
        if index < 4:
            count = index + 2
        else:
            count = draw.choice((1, 2, 6, 12, 30)) * draw.randrange(1, 3 ** (2 + index % 7))
        is_negative = domain == "step" and index > 3 and draw.random() < 0.5
        return Fraction(-count if is_negative else count)
    size = Fraction(draw.randrange(1_000, 9_999), draw.choice((997, 1009, 1013, 2003, 3001)))
    if index >= _SMOOTH:
        size *= Fraction(10) ** draw.randrange(-5, 6)
    return -size if index > 1 and draw.random() < 0.5 else size


def generic(ranges: dict[str, Domain], index: int) -> Point:
    """Return the generic point with this index, which has a pseudo-random value for each variable.

    All values of the first two points are positive. Those of the first six points have a moderate
    size.
    """
    return {name: _coordinate(name, index, domain) for name, domain in ranges.items()}


def points(left: Node, right: Node, limits: Limits) -> Iterator[Point]:
    """Yield the points at which two expressions are compared.

    The first points are pseudo-random. If an expression has branches, further points follow. They
    are close to the constants in the expressions, and to the values where a branch changes.
    """
    ranges = domains(left, right)
    switches = tuple(dict.fromkeys(each for node in (left, right) for each in _switches(node)))
    for index in range(_SMOOTH):
        yield generic(ranges, index)
    if not switches and set(ranges.values()) <= {"real"}:
        return
    for index in range(_SMOOTH, _SMOOTH + _SCATTERED):
        yield generic(ranges, index)
    constants = tuple(_constants((left, right), limits))
    conditions = [each for node in (left, right) for each in node.walk() if each.kind == "relation"]
    # Counting starts at 0 if a condition contains the number 0, otherwise at 1.
    least = 1 - any(arg.value == 0 for each in conditions for arg in each.args)
    for base in (generic(ranges, 0), generic(ranges, 3))[: len(ranges)]:
        for name, domain in ranges.items():
            marks = {*constants}
            for switch in switches:
                marks.update(_marks(switch, name, base, limits))
            if domain == "real":
                values = around(marks)
            else:
                values = _whole_around(marks, domain, least)
            for value in values:
                yield base | {name: value}
    # Add points at which all variables are close to each other and to a multiple of one constant.
    if len(ranges) > 1 and set(ranges.values()) == {"real"}:
        for mark in constants:
            for factor in (Fraction(3), Fraction(-3), Fraction(1, 7)):
                near = mark * factor
                yield {name: near + index * near / 5 for index, name in enumerate(ranges)}


def _switches(node: Node) -> Iterator[Node]:
    """Yield the nodes whose sign selects a branch: arguments of functions such as abs, radicands of
    roots, and differences that conditions test.
    """
    for each in node.walk():
        if not variables(each):
            continue
        is_switch = each.text in _SWITCHES or each.text.startswith("arc")
        is_function = each.kind == "func" and is_switch
        if is_function or each.kind == "congruence":
            yield from each.args
        elif each.kind in ("root", "pow") and variables(each.args[0]):
            power = each.args[1].value if each.kind == "pow" else None
            if power is None or power.denominator != 1:
                yield each.args[0]
        if each.kind == "relation" or (is_function and each.text in ("max", "min")):
            for one, two in pairwise(each.args):
                yield minus(one, two)


def _constants(nodes: Iterable[Node], limits: Limits) -> Iterator[Fraction]:
    """Yield the absolute values of the constants in the trees, and numbers derived from them, such
    as square roots and quotients.
    """
    sizes: dict[Fraction, None] = {}
    has_logarithm = False
    for node in nodes:
        for each in node.walk():
            has_logarithm = has_logarithm or each.text in ("ln", "log")
            if each.kind in ("number", "pow", "root", "mul") and not variables(each):
                value = rational(each, limits)
                if value:
                    sizes[abs(value)] = None
    kept = list(sizes)[:_CONSTANTS]
    yield from kept
    for value in kept:
        if value > 3:
            yield Fraction(math.isqrt(int(value)))
    yield from {one / two for one in kept[:6] for two in kept[:6] if one != two}
    # add arguments at which a logarithm is close to a constant of the expressions
    if has_logarithm:
        for base in (math.e, 10):
            for value in kept:
                if 1 < value < 300:
                    yield Fraction(round(base**value))


def rational(node: Node, limits: Limits, point: Point | None = None) -> Fraction | None:
    """Return the value of a tree as a fraction. A square root is rounded to nine digits.

    The result is None if the value is not rational or has too many digits.
    """
    try:
        if node.kind == "root" and node.args[1].value == 2:
            square = abs(exact(node.args[0], limits, point or {}))
            return Fraction(math.isqrt(int(square * 10**18)), 10**9)
        value = exact(node, limits, point or {})
    except (NotRational, Undefined, TooLarge):
        return None
    return value if value.numerator.bit_length() + value.denominator.bit_length() < 4_000 else None


def _marks(switch: Node, name: str, base: Point, limits: Limits) -> Iterator[Fraction]:
    """Yield the values of a variable at which the expression `switch` is 0, 1 or -1, if it is
    linear in the variable.
    """
    if name not in variables(switch):
        return
    first, second, third = (rational(switch, limits, base | {name: Fraction(x)}) for x in range(3))
    if first is None or second is None or third is None:
        return
    if third - second == second - first != 0:
        for target in (0, 1, -1):
            yield (target - first) / (second - first)


def around(marks: Iterable[Fraction]) -> list[Fraction]:
    """Return the given numbers, their negatives and 0, with real numbers close to, between and
    beyond them.
    """
    crowd = sorted({Fraction(0), *(sign * mark for mark in marks for sign in (1, -1))})
    close = Fraction(1, 10**6)
    between = [(one + two) / 2 for one, two in pairwise(crowd)]
    near = [mark * factor for mark in crowd if mark for factor in (1 - close, 1 + close)]
    return [*crowd, *between, *near, crowd[0] * 3 - 1, crowd[-1] * 3 + 1]


def _whole_around(marks: Iterable[Fraction], domain: Domain, least: int) -> list[Fraction]:
    """Return integers close to each given number or its double, and all residues modulo each small
    number.
    """
    known = sorted({abs(math.floor(mark)) for mark in marks})
    values = {mark + step for mark in known for step in (-1, 0, 1, mark)}
    values |= set(range(1, max((mark for mark in known if mark <= _SWEEP), default=0) + 1))
    # Add integers n for which a term such as 2n + 1 is close to a multiple of a large modulus.
    for slope in range(2, 8):
        for modulus in known[:8]:
            if modulus > _SWEEP and math.gcd(slope, modulus) == 1:
                inverse = pow(slope, -1, modulus)
                values |= {shift * inverse % modulus for shift in range(-5, 6)}
    if domain == "step":
        values |= {-value for value in values}
    return [Fraction(value) for value in sorted(values) if domain == "step" or value >= least]


# ---- comparing the values of two expressions

_BITS = 200
_MOST_BITS = 6_000
_ENOUGH = 3  # two expressions are equal if they agree at this number of points with real values
# Two values differ only if their difference is 2**_SLACK times as large as the error bound.
_SLACK = 12
# an expression with one of these names may have complex values
_COMPLEX = frozenset({"i", "re", "im", "arg"})


class _AtPoint(NamedTuple):
    """The comparison of two values at one point: whether each value is real, and whether they are
    equal.
    """

    is_first_real: bool
    is_second_real: bool
    is_same: bool


class Prober:
    """An evaluator of expressions at points, with a limit on its work. It computes exactly if
    possible.
    """

    def __init__(self, limits: Limits, budget: Budget | None = None) -> None:
        self.limits = limits
        self.budget = budget or Budget(limits)
        # Names of variables that are sizes, such as lengths. Only positive values are tried for
        # them.
        self.positive = frozenset[str]()
        # True if neither expression contains i, Re, Im or arg, so that both are regarded as real
        # functions.
        self.is_of_reals = False
        # number of points at which only one of the expressions is defined over the real numbers
        self.apart = 0

    def value(self, node: Node, env: Environment = NOWHERE, bits: int = _BITS) -> Value:
        """Return the exact value, or an approximation if the value is not rational.

        Raises Undefined if the expression has no value. Raises Undecided if it is not a number or
        exceeds a limit.
        """
        return self.measured(node, env, bits)[0]

    def measured(self, node: Node, env: Environment, bits: int) -> tuple[Value, int, bool]:
        """Return the value, the precision in bits that it needs, and whether an intermediate value
        is not real.
        """
        evaluator = Evaluator(bits, self.limits, env, self.budget)
        value = evaluator.value(node)
        spread = 0 if isinstance(value, Fraction) else evaluator.spread
        return value, spread, evaluator.has_left_reals

    def are_apart(self, env: Environment, *are_outside: bool) -> bool:
        """Count a point at which only one of two real functions is defined. Return True after the
        third such point.

        A real function is not defined where an intermediate value is not real. Points with several
        negative variables do not count, because all letters of a formula are assumed to have one
        sign.
        """
        is_one_outside = are_outside[0] != are_outside[1]
        if self.is_of_reals and is_one_outside and sum(x < 0 for x in env.values()) < 2:
            self.apart += 1
        return self.apart >= _ENOUGH

    def equal(self, left: Node, right: Node) -> bool:
        """Return True if two expressions have equal values and are real at the same points.

        Raises Undecided if too few points can be evaluated, or if the precision is too low.
        """
        if not variables(left) and not variables(right):
            return self.compare_at(left, right, {}, sure=True).is_same
        if canonical(left) == canonical(right):
            return True
        inside = [each for node in (left, right) for each in node.walk()]
        self.is_of_reals = not any(
            each.text in _COMPLEX and each.kind in ("constant", "func") for each in inside
        )
        self.apart = 0
        agreed = 0
        unreal = list[bool]()
        for at in self.comparisons(left, right):
            if at.is_first_real != at.is_second_real:
                return False
            if at.is_first_real and not at.is_same:
                return False
            if at.is_first_real:
                agreed += 1
            else:
                unreal.append(at.is_same)
        if agreed >= _ENOUGH:
            return True
        if len(unreal) >= _ENOUGH:
            return all(unreal)
        raise Undecided("too few points at which both expressions have a value")

    def comparisons(self, left: Node, right: Node) -> Iterator[_AtPoint]:
        """Yield a comparison of the values for each point at which both sides can be evaluated."""
        for point in points(left, right, self.limits):
            env = point
            if self.positive:
                env = {
                    name: abs(value) if name in self.positive else value
                    for name, value in point.items()
                }
                if any(not env[name] for name in self.positive & env.keys()):
                    continue
            try:
                at = self.compare_at(left, right, env)
            except Outside:
                if self.is_defined(left, env) != self.is_defined(right, env):
                    yield _AtPoint(True, False, False)
            except (Undefined, TooLarge):
                self.budget.check()
            else:
                yield at

    def known(self, node: Node) -> Value | None:
        """Return the value of a tree, or None if the value cannot be computed."""
        try:
            return self.value(node)
        except (Undecided, Undefined):
            return None

    def is_defined(self, node: Node, env: Environment) -> bool:
        """Return True if an expression has a value at a point."""
        try:
            self.value(node, env)
        except Undefined:
            return False
        return True

    def compare_at(self, left: Node, right: Node, env: Environment, sure: bool = False) -> _AtPoint:
        """Compare two values at a point. The precision is increased if rounding hides the
        difference.

        If `sure` is true, two approximate values are equal only if they also agree at a higher
        precision.
        """
        bits = _BITS
        while bits <= _MOST_BITS:
            first, one, is_first_out = self.measured(left, env, bits)
            second, two, is_second_out = self.measured(right, env, bits)
            needed = max(one, two) + _BITS
            # With too few bits, a small term is lost in a sum with a large term. So use more bits.
            if needed > bits:
                bits = needed
                continue
            are_exact = isinstance(first, Fraction) and isinstance(second, Fraction)
            is_settled = not sure or bits > 3 * _BITS or are_exact
            with suppress(Undecided):
                same = self.agree(first, second, bits)
                if not same or is_settled:
                    are_apart = self.are_apart(env, is_first_out, is_second_out)
                    return _AtPoint(is_real(first), is_real(second), same and not are_apart)
            bits = 3 * bits + 1
        raise TooLarge("rounding errors may exceed the difference")

    def agree(self, first: Value, second: Value, bits: int = _BITS) -> bool:
        """Return True if two values are equal within their error bounds.

        Raises Undecided if the error bounds are too large.
        """
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        one = self.approximate(first, bits)
        two = self.approximate(second, bits)
        error = max(one.error, two.error)
        gap = magnitude(one.value - two.value)
        if gap != NOTHING and gap > error + _SLACK:
            return False
        size = max(one.magnitude, two.magnitude)
        is_tiny = error < -bits // 3 and size <= error + _SLACK
        if error + _SLACK > size - bits // 3 and not is_tiny:
            raise Undecided("rounding errors may exceed the difference")
        return True

    def approximate(self, value: Value, bits: int = _BITS) -> Approx:
        """Return a value as an approximation with `bits` bits."""
        return Evaluator(bits, self.limits).approximate(value)

    def proportional(self, left: Node, right: Node) -> int:
        """Return the sign of the constant c if right = c * left at every point, or 0 if such a
        constant does not exist.

        Raises Undecided if too few points can be evaluated.
        """
        is_one_zero = False
        for env in points(left, right, self.limits):
            try:
                one = self.value(left, env)
                two = self.value(right, env)
            except (Undefined, TooLarge):
                self.budget.check()
                continue
            if is_zero(one) or is_zero(two):
                is_one_zero = is_one_zero or is_zero(one) != is_zero(two)
                continue
            here = {name: number(value) for name, value in env.items()}
            scaled_left = Node("mul", (left, substituted(right, here)))
            scaled_right = Node("mul", (right, substituted(left, here)))
            if not self.equal(scaled_left, scaled_right):
                return 0
            return sign_of(one) * sign_of(two)
        if is_one_zero:
            return 0
        raise Undecided("too few points at which both expressions have a value")

    def divide(self, top: Value, bottom: Value) -> Value:
        """Return the quotient of two values; raise Undefined if the divisor is zero."""
        if is_zero(bottom):
            raise Undefined("a division by zero")
        if isinstance(top, Fraction) and isinstance(bottom, Fraction):
            return top / bottom
        evaluator = Evaluator(_BITS, self.limits)
        inverse = evaluator.inverse(evaluator.approximate(bottom))
        return evaluator.times(evaluator.approximate(top), inverse)


def is_real(value: Value) -> bool:
    """Return True if the imaginary part of a value is zero within its error bound."""
    if isinstance(value, Fraction) or not hasattr(value.value, "_mpc_"):
        return True
    return magnitude(value.value.imag) <= value.error + _SLACK


def sign_of(value: Value) -> int:
    """Return the sign of a real number; 0 for a complex number."""
    size = value if isinstance(value, Fraction) else value.value
    return 0 if hasattr(size, "_mpc_") else (size > 0) - (size < 0)


def is_zero(value: Value) -> bool:
    """Return True if a value is zero within its error bound."""
    if isinstance(value, Fraction):
        return value == 0
    return value.magnitude <= max(value.error + _SLACK, NOTHING)


def written(value: Value) -> str:
    """Return a value as a string: a hexadecimal fraction if it is rational, or else a decimal with
    thirty digits.

    Raises Undecided if the value is not precise enough.
    """
    if isinstance(value, Fraction):
        return f"{value.numerator:x}/{value.denominator:x}"
    if is_zero(value):
        return "0/1"
    if value.error > value.magnitude - 130:
        raise Undecided("too little precision")
    real = _component(value.value.real, value)
    imaginary = _component(value.value.imag, value)
    return real if imaginary == "0/1" else f"{real}+i{imaginary}"


def _component(part: Any, whole: Approx) -> str:
    """Return the real or imaginary part of a value as a string: a small fraction, or a decimal with
    thirty digits.
    """
    if magnitude(part) <= max(whole.error + _SLACK, whole.magnitude - 130):
        return "0/1"
    sign, mantissa, exponent, _ = part._mpf_
    if abs(exponent) < 2_000:
        precise = Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** int(exponent)
        near = precise.limit_denominator(1 << 30)
        gap = abs(precise - near)
        bits = gap.numerator.bit_length() - gap.denominator.bit_length()
        if not gap or bits <= whole.error + _SLACK:
            return written(near)
    return str(to_str(part._mpf_, 30))
