"""Equality of two expressions: exact where rational, else by evaluation at points around constants
and branches.
"""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from mpmath.libmp import to_str

from atts.evaluators.equivalence.approx import NOTHING, Approx, NotRational, magnitude
from atts.evaluators.equivalence.numeric import NOWHERE, Clock, Environment, Evaluator, Value, exact
from atts.evaluators.syntax.tree import Node, canonical, minus, number, substituted, variables
from atts.evaluators.syntax.vocabulary import words
from atts.evaluators.verdict import Limits, Outside, TooLarge, Undecided, Undefined

Domain = Literal["real", "step", "whole", "natural"]
Point = dict[str, Fraction]

_RANKS: tuple[Domain, ...] = ("real", "step", "whole", "natural")
_NATURAL, _WHOLE, _STEPS, _TURNS = (
    words(name) for name in ("of_naturals", "of_integers", "stepping", "turning")
)
_SWITCHES = words("switching") | _STEPS | _WHOLE | _NATURAL
_INDICES = frozenset("nmkjNMK")  # letters that stand for integers where something moves in steps
# points for expressions without a branch: analytic ones that agree at one generic point agree
_SMOOTH = 6
_SCATTERED = 24
_CONSTANTS = 14
_SWEEP = 120  # residues of a modulus that are all tried


def domains(*nodes: Node) -> dict[str, Domain]:
    """What each variable ranges over, by the functions it is given to: real, integer, positive or
    small integer.
    """
    found = {name: 0 for node in nodes for name in variables(node)}
    for each in (each for node in nodes for each in node.walk()):
        rank, inside = _demand(each)
        for name in variables(inside) if rank else ():
            if rank > 1 or name[0] in _INDICES:
                found[name] = max(found.get(name, 0), rank)
    return {name: _RANKS[rank] for name, rank in found.items()}


def _demand(node: Node) -> tuple[int, Node]:
    if node.kind == "func":
        is_turn = node.text in _TURNS and any(each.text == "pi" for each in node.walk())
        return (node.text in _STEPS or is_turn) + 2 * (node.text in _WHOLE) + 3 * (
            node.text in _NATURAL
        ), node
    if node.kind == "pow" and (node.args[0].value or 0) < 0:
        return 2, node.args[1]
    if node.kind == "relation" and node.args[-1].kind == "congruence":
        return 2, node
    return (3, Node("add", node.args[2:])) if node.kind == "sum" else (0, node)


@lru_cache(maxsize=8192)
def _coordinate(name: str, index: int, domain: Domain) -> Fraction:
    """The value of a variable at a generic point: fixed by its name, its sign and size drawn for it
    alone.
    """
    draw = random.Random(f"{name}@{index}")
    if domain == "natural":
        return Fraction(draw.randrange(2, 12) + index)
    if domain in ("whole", "step"):
        count = (
            index + 2
            if index < 4
            else draw.choice((1, 2, 6, 12, 30)) * draw.randrange(1, 3 ** (2 + index % 7))
        )
        return Fraction(-count if domain == "step" and index > 3 and draw.random() < 0.5 else count)
    size = Fraction(draw.randrange(1_000, 9_999), draw.choice((997, 1009, 1013, 2003, 3001)))
    if index >= _SMOOTH:
        size *= Fraction(10) ** draw.randrange(-5, 6)
    return -size if index > 1 and draw.random() < 0.5 else size


def generic(ranges: dict[str, Domain], index: int) -> Point:
    """A seeded point; the first two are positive throughout, the first six of moderate size."""
    return {name: _coordinate(name, index, domain) for name, domain in ranges.items()}


def points(left: Node, right: Node, limits: Limits) -> Iterator[Point]:
    """Generic points, then, where either side has branches, scattered ones and those around its
    constants.
    """
    ranges = domains(left, right)
    switches = tuple(dict.fromkeys(each for node in (left, right) for each in _switches(node)))
    yield from (generic(ranges, index) for index in range(_SMOOTH))
    if not switches and set(ranges.values()) <= {"real"}:
        return
    yield from (generic(ranges, index) for index in range(_SMOOTH, _SMOOTH + _SCATTERED))
    constants = tuple(_constants((left, right), limits))
    conditions = [each for node in (left, right) for each in node.walk() if each.kind == "relation"]
    # counts begin at 0 where one is said of 0
    least = 1 - any(arg.value == 0 for each in conditions for arg in each.args)
    for base in (generic(ranges, 0), generic(ranges, 3))[: len(ranges)]:
        for name, domain in ranges.items():
            marks = {
                *constants,
                *(mark for node in switches for mark in _marks(node, name, base, limits)),
            }
            for value in around(marks) if domain == "real" else _whole_around(marks, domain, least):
                yield base | {name: value}
    # where all are about as large as a constant
    if len(ranges) > 1 and set(ranges.values()) == {"real"}:
        near = [
            mark * factor
            for mark in constants
            for factor in (Fraction(3), Fraction(-3), Fraction(1, 7))
        ]
        yield from (
            {name: value + index * value / 5 for index, name in enumerate(ranges)} for value in near
        )


def _switches(node: Node) -> Iterator[Node]:
    """What decides a branch inside an expression: arguments of functions that switch, radicands,
    conditions.
    """
    for each in node.walk():
        if not variables(each):
            continue
        is_function = each.kind == "func" and (
            each.text in _SWITCHES or each.text.startswith("arc")
        )
        if is_function or each.kind == "congruence":
            yield from each.args
        elif each.kind in ("root", "pow") and variables(each.args[0]):
            power = each.args[1].value if each.kind == "pow" else None
            yield from () if power is not None and power.denominator == 1 else each.args[:1]
        if each.kind == "relation" or (is_function and each.text in ("max", "min")):
            yield from (minus(one, two) for one, two in pairwise(each.args))


def _constants(nodes: Iterable[Node], limits: Limits) -> Iterator[Fraction]:
    """Every constant part of the trees as a number, their square roots and quotients."""
    found: dict[Fraction, None] = {}
    for node in nodes:
        for each in node.walk():
            if each.kind in ("number", "pow", "root", "mul") and not variables(each):
                value = rational(each, limits)
                if value:
                    found[abs(value)] = None
    kept = list(found)[:_CONSTANTS]
    yield from kept
    yield from (Fraction(math.isqrt(int(value))) for value in kept if value > 3)
    yield from {one / two for one in kept[:6] for two in kept[:6] if one != two}
    # where a logarithm passes a constant
    if any(each.text in ("ln", "log") for node in nodes for each in node.walk()):
        yield from (
            Fraction(round(base**value))
            for base in (math.e, 10)
            for value in kept
            if 1 < value < 300
        )


def rational(node: Node, limits: Limits, point: Point | None = None) -> Fraction | None:
    """The value of a tree as a fraction, square roots to nine digits; None where it has none of
    moderate size.
    """
    try:
        if node.kind == "root" and node.args[1].value == 2:
            return Fraction(
                math.isqrt(int(abs(exact(node.args[0], limits, point or {})) * 10**18)), 10**9
            )
        value = exact(node, limits, point or {})
    except (NotRational, Undefined, TooLarge):
        return None
    return value if value.numerator.bit_length() + value.denominator.bit_length() < 4_000 else None


def _marks(switch: Node, name: str, base: Point, limits: Limits) -> Iterator[Fraction]:
    """Where a switch that is linear in the variable passes 0, 1 and -1, or is divisible by a
    modulus beside it.
    """
    if name not in variables(switch):
        return
    first, second, third = (rational(switch, limits, base | {name: Fraction(x)}) for x in range(3))
    if (
        first is not None
        and second is not None
        and third is not None
        and third - second == second - first != 0
    ):
        yield from ((target - first) / (second - first) for target in (0, 1, -1))


def around(marks: Iterable[Fraction]) -> list[Fraction]:
    """Real numbers on both sides of each mark and of its negative, between neighbours and beyond
    the last.
    """
    crowd = sorted({Fraction(0), *(sign * mark for mark in marks for sign in (1, -1))})
    close = Fraction(1, 10**6)
    found = [(one + two) / 2 for one, two in pairwise(crowd)]
    found += [mark * factor for mark in crowd if mark for factor in (1 - close, 1 + close)]
    return [*crowd, *found, crowd[0] * 3 - 1, crowd[-1] * 3 + 1]


def _whole_around(marks: Iterable[Fraction], domain: Domain, least: int) -> list[Fraction]:
    """Integers at, beside and twice each mark; all residues of small ones."""
    known = sorted({abs(math.floor(mark)) for mark in marks})
    found = {mark + step for mark in known for step in (-1, 0, 1, mark)}
    found |= set(range(1, max((mark for mark in known if mark <= _SWEEP), default=0) + 1))
    large = ((slope, mark) for mark in known[:8] for slope in range(2, 8) if mark > _SWEEP)
    for slope, modulus in large:  # where 2n+1 and the like are multiples of an odd modulus
        if math.gcd(slope, modulus) == 1:
            found |= {shift * pow(slope, -1, modulus) % modulus for shift in range(-5, 6)}
    if domain == "step":
        found |= {-value for value in found}
    return [Fraction(value) for value in sorted(found) if domain == "step" or value >= least]


_BITS = 200
_MOST_BITS = 6_000
_ENOUGH = 3  # points with a real value on both sides that must agree
# what a trace of rounding may leave, and what must remain to call two numbers different
_SLACK = 12
_COMPLEX = frozenset({"i", "re", "im", "arg"})  # where one of these is, complex numbers are meant


class Prober:
    """Evaluates within one budget of time, exact first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.clock = Clock(limits.milliseconds / 1000)
        # whether what is compared has variables and speaks of no complex numbers
        self.is_of_reals = False
        self.apart = 0  # points at which one side alone has a value

    def value(self, node: Node, env: Environment = NOWHERE, bits: int = _BITS) -> Value:
        """The exact value, or an approximation when there is none.

        Raises Undefined where the expression has no value, Undecided past a cap or for what has no
        number.
        """
        return self.measured(node, env, bits)[0]

    def measured(self, node: Node, env: Environment, bits: int) -> tuple[Value, int, bool]:
        """The value, the bits between its largest and smallest magnitude, and whether a part of it
        is unreal.
        """
        evaluator = Evaluator(bits, self.limits, env, self.clock)
        value = evaluator.value(node)
        return (
            value,
            0 if isinstance(value, Fraction) else evaluator.spread,
            evaluator.has_left_reals,
        )

    def are_apart(self, env: Environment, *are_outside: bool) -> bool:
        """Whether two functions of reals have now been seen to be defined at different points.

        A function of reals has no value where a part of it is not real. Single points do not count,
        nor those at which several variables are negative: the letters of a formula are taken to be
        of one sign.
        """
        if (
            self.is_of_reals
            and are_outside[0] != are_outside[1]
            and sum(x < 0 for x in env.values()) < 2
        ):
            self.apart += 1
        return self.apart >= _ENOUGH

    def equal(self, left: Node, right: Node) -> bool:
        """Whether two expressions have the same value at every probing point, and are real at the
        same ones.

        Raises Undecided when too few points can be evaluated or precision does not settle it.
        """
        if not variables(left) and not variables(right):
            return self.compare_at(left, right, {}, sure=True)[2]
        if canonical(left) == canonical(right):
            return True
        inside = [each for node in (left, right) for each in node.walk()]
        self.is_of_reals = not any(
            each.text in _COMPLEX and each.kind in ("constant", "func") for each in inside
        )
        self.apart = agreed = 0
        unreal = list[bool]()
        for one, two, same in self.comparisons(left, right):
            if one != two or (one and not same):
                return False
            agreed += one
            unreal += [] if one else [same]
        if agreed >= _ENOUGH:
            return True
        if len(unreal) >= _ENOUGH:
            return all(unreal)
        raise Undecided("too few points where both have a value")

    def comparisons(self, left: Node, right: Node) -> Iterator[tuple[bool, bool, bool]]:
        """compare_at for every point where both sides can be evaluated."""
        for env in points(left, right, self.limits):
            try:
                found = self.compare_at(left, right, env)
            except Outside:
                if self.is_defined(left, env) != self.is_defined(right, env):
                    yield True, False, False
            except (Undefined, TooLarge):
                self.clock.look()
            else:
                yield found

    def known(self, node: Node) -> Value | None:
        """The value of a tree, None where it has none, or none that can be told."""
        try:
            return self.value(node)
        except (Undecided, Undefined):
            return None

    def is_defined(self, node: Node, env: Environment) -> bool:
        """Whether an expression has a value at a point."""
        try:
            self.value(node, env)
        except Undefined:
            return False
        return True

    def compare_at(
        self, left: Node, right: Node, env: Environment, sure: bool = False
    ) -> tuple[bool, bool, bool]:
        """Whether each value is real, and whether they are the same, with more precision where
        rounding hides it.

        `sure` asks for more precision as well before saying that two computed values are the same.
        """
        bits = _BITS
        while bits <= _MOST_BITS:
            first, one, is_first_out = self.measured(left, env, bits)
            second, two, is_second_out = self.measured(right, env, bits)
            needed = max(one, two) + _BITS
            if needed > bits:  # so that what is small beside what is large is seen
                bits = needed
                continue
            is_settled = (
                not sure
                or bits > 3 * _BITS
                or (isinstance(first, Fraction) and isinstance(second, Fraction))
            )
            with suppress(Undecided):
                same = self.agree(first, second, bits)
                if not same or is_settled:
                    are_apart = self.are_apart(env, is_first_out, is_second_out)
                    return is_real(first), is_real(second), same and not are_apart
            bits = 3 * bits + 1
        raise TooLarge("rounding hides the difference")

    def agree(self, first: Value, second: Value, bits: int = _BITS) -> bool:
        """Whether two values coincide within their errors; raises Undecided when the errors are too
        wide to say.
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
        if error + _SLACK > size - bits // 3 and not (
            error < -bits // 2 and size <= error + _SLACK
        ):
            raise Undecided("rounding hides the difference")
        return True

    def approximate(self, value: Value, bits: int = _BITS) -> Approx:
        return Evaluator(bits, self.limits).approximate(value)

    def proportional(self, left: Node, right: Node) -> int:
        """The sign of the constant c with right = c * left at every point, 0 when there is none.

        Raises Undecided when it cannot be told.
        """
        is_one_zero = False
        for env in points(left, right, self.limits):
            try:
                one = self.value(left, env)
                two = self.value(right, env)
            except (Undefined, TooLarge):
                self.clock.look()
                continue
            if is_zero(one) or is_zero(two):
                is_one_zero = is_one_zero or is_zero(one) != is_zero(two)
                continue
            here = {name: number(value) for name, value in env.items()}
            scaled = (
                Node("mul", (left, substituted(right, here))),
                Node("mul", (right, substituted(left, here))),
            )
            return sign_of(one) * sign_of(two) if self.equal(*scaled) else 0
        if is_one_zero:
            return 0
        raise Undecided("too few points where both have a value")

    def divide(self, top: Value, bottom: Value) -> Value:
        """The quotient; raises Undefined for a zero divisor."""
        if is_zero(bottom):
            raise Undefined("a division by zero")
        if isinstance(top, Fraction) and isinstance(bottom, Fraction):
            return top / bottom
        evaluator = Evaluator(_BITS, self.limits)
        return evaluator.times(
            evaluator.approximate(top), evaluator.inverse(evaluator.approximate(bottom))
        )


def is_real(value: Value) -> bool:
    """Whether a value has no imaginary part beyond its error."""
    if isinstance(value, Fraction) or not hasattr(value.value, "_mpc_"):
        return True
    return magnitude(value.value.imag) <= value.error + _SLACK


def sign_of(value: Value) -> int:
    """1 or -1 for a real number that is not zero."""
    size = value if isinstance(value, Fraction) else value.value
    return 0 if hasattr(size, "_mpc_") else (size > 0) - (size < 0)


def is_zero(value: Value) -> bool:
    """Whether a value is zero within its error."""
    return (
        value == 0
        if isinstance(value, Fraction)
        else value.magnitude <= max(value.error + _SLACK, NOTHING)
    )


def written(value: Value) -> str:
    """A value as text: a fraction in lowest terms where it is one, else thirty significant digits."""
    if isinstance(value, Fraction):
        return f"{value.numerator:x}/{value.denominator:x}"
    if is_zero(value):
        return "0/1"
    if value.error > value.magnitude - 130:
        raise Undecided("too little precision")
    real, imaginary = (_component(part, value) for part in (value.value.real, value.value.imag))
    return real if imaginary == "0/1" else f"{real}+i{imaginary}"


def _component(part: Any, whole: Approx) -> str:
    """A real or imaginary part: zero, a small fraction, or thirty digits."""
    if magnitude(part) <= max(whole.error + _SLACK, whole.magnitude - 130):
        return "0/1"
    sign, mantissa, exponent, _ = part._mpf_
    if abs(exponent) < 2_000:
        precise = Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** int(exponent)
        near = precise.limit_denominator(1 << 30)
        gap = abs(precise - near)
        if (
            not gap
            or gap.numerator.bit_length() - gap.denominator.bit_length() <= whole.error + _SLACK
        ):
            return written(near)
    return str(to_str(part._mpf_, 30))
