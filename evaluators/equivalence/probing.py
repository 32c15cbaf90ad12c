"""Equality of two expressions: exact where rational, else by evaluation at seeded points."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any

from mpmath.libmp import to_str

from atts.evaluators.equivalence.approx import NOTHING, Approx, magnitude
from atts.evaluators.equivalence.numeric import Clock, Evaluator, Value
from atts.evaluators.equivalence.points import points
from atts.evaluators.syntax.tree import Node, canonical, number, substituted, variables
from atts.evaluators.verdict import Limits, Outside, TooLarge, Undecided, Undefined

_BITS = 200
_MOST_BITS = 6_000
_ENOUGH = 3  # points with a real value on both sides that must agree
# what a trace of rounding may leave, and what must remain to call two numbers different
_SLACK = 12
_NOWHERE: Mapping[str, Fraction] = {}
_COMPLEX = frozenset({"i", "re", "im", "arg"})  # where one of these is, complex numbers are meant


class Prober:
    """Evaluates within one budget of time, exact first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.clock = Clock(limits.milliseconds / 1000)
        self.is_of_reals = False  # whether what is compared has variables and speaks of no complex numbers
        self.apart = 0  # points at which one side alone has a value

    def value(self, node: Node, env: Mapping[str, Fraction] = _NOWHERE, bits: int = _BITS) -> Value:
        """The exact value, or an approximation when there is none.

        Raises Undefined where the expression has no value, Undecided past a cap or for what has no number.
        """
        return self.measured(node, env, bits)[0]

    def measured(self, node: Node, env: Mapping[str, Fraction], bits: int) -> tuple[Value, int, bool]:
        """The value, the bits between its largest and smallest magnitude, and whether a part of it is unreal."""
        evaluator = Evaluator(bits, self.limits, env, self.clock)
        value = evaluator.value(node)
        return value, 0 if isinstance(value, Fraction) else evaluator.spread, evaluator.has_left_reals

    def are_apart(self, env: Mapping[str, Fraction], *are_outside: bool) -> bool:
        """Whether two functions of reals have now been seen to be defined at different points.

        A function of reals has no value where a part of it is not real. Single points do not count, nor those at which
        several variables are negative: the letters of a formula are taken to be of one sign.
        """
        if self.is_of_reals and are_outside[0] != are_outside[1] and sum(x < 0 for x in env.values()) < 2:
            self.apart += 1
        return self.apart >= _ENOUGH

    def equal(self, left: Node, right: Node) -> bool:
        """Whether two expressions have the same value at every probing point, and are real at the same ones.

        Raises Undecided when too few points can be evaluated or precision does not settle it.
        """
        if not variables(left) and not variables(right):
            return self.compare_at(left, right, {}, sure=True)[2]
        if canonical(left) == canonical(right):
            return True
        inside = [each for node in (left, right) for each in node.walk()]
        self.is_of_reals = not any(each.text in _COMPLEX and each.kind in ("constant", "func") for each in inside)
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

    def is_defined(self, node: Node, env: Mapping[str, Fraction]) -> bool:
        """Whether an expression has a value at a point."""
        try:
            self.value(node, env)
        except Undefined:
            return False
        return True

    def compare_at(
        self, left: Node, right: Node, env: Mapping[str, Fraction], sure: bool = False
    ) -> tuple[bool, bool, bool]:
        """Whether each value is real, and whether they are the same, with more precision where rounding hides it.

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
            is_settled = not sure or bits > 3 * _BITS or (isinstance(first, Fraction) and isinstance(second, Fraction))
            with suppress(Undecided):
                same = self.agree(first, second, bits)
                if not same or is_settled:
                    are_apart = self.are_apart(env, is_first_out, is_second_out)
                    return is_real(first), is_real(second), same and not are_apart
            bits = 3 * bits + 1
        raise TooLarge("rounding hides the difference")

    def agree(self, first: Value, second: Value, bits: int = _BITS) -> bool:
        """Whether two values coincide within their errors; raises Undecided when the errors are too wide to say."""
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        one, two = self.approximate(first, bits), self.approximate(second, bits)
        error = max(one.error, two.error)
        gap = magnitude(one.value - two.value)
        if gap != NOTHING and gap > error + _SLACK:
            return False
        size = max(one.magnitude, two.magnitude)
        if error + _SLACK > size - bits // 3 and not (error < -bits // 2 and size <= error + _SLACK):
            raise Undecided("rounding hides the difference")
        return True

    def approximate(self, value: Value, bits: int) -> Approx:
        return Evaluator(bits, self.limits).approximate(value)

    def proportional(self, left: Node, right: Node) -> Value | None:
        """The constant c with right = c * left at every point, or None when there is none.

        Raises Undecided when it cannot be told.
        """
        is_one_zero = False
        for env in points(left, right, self.limits):
            try:
                one, two = self.value(left, env), self.value(right, env)
            except (Undefined, TooLarge):
                self.clock.look()
                continue
            if is_zero(one) or is_zero(two):
                is_one_zero = is_one_zero or is_zero(one) != is_zero(two)
                continue
            here = {name: number(value) for name, value in env.items()}
            scaled = Node("mul", (left, substituted(right, here))), Node("mul", (right, substituted(left, here)))
            return self.divide(two, one) if self.equal(*scaled) else None
        if is_one_zero:
            return None
        raise Undecided("too few points where both have a value")

    def divide(self, top: Value, bottom: Value) -> Value:
        """The quotient; raises Undefined for a zero divisor."""
        if is_zero(bottom):
            raise Undefined("a division by zero")
        if isinstance(top, Fraction) and isinstance(bottom, Fraction):
            return top / bottom
        evaluator = Evaluator(_BITS, self.limits)
        return evaluator.times(evaluator.approximate(top), evaluator.inverse(evaluator.approximate(bottom)))


def is_real(value: Value) -> bool:
    """Whether a value has no imaginary part beyond its error."""
    if isinstance(value, Fraction) or not hasattr(value.value, "_mpc_"):
        return True
    return magnitude(value.value.imag) <= value.error + _SLACK


def is_zero(value: Value) -> bool:
    """Whether a value is zero within its error."""
    return value == 0 if isinstance(value, Fraction) else value.magnitude <= max(value.error + _SLACK, NOTHING)


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
        if not gap or gap.numerator.bit_length() - gap.denominator.bit_length() <= whole.error + _SLACK:
            return written(near)
    return str(to_str(part._mpf_, 30))
