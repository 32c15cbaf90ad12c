"""Equality of two expressions: exact where rational, else by evaluation at seeded points."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from mpmath.libmp import to_str

from atts.evaluators.equivalence.approx import NOTHING, Approx, magnitude
from atts.evaluators.equivalence.exact import NotRational, exact
from atts.evaluators.equivalence.numeric import Evaluator
from atts.evaluators.syntax.tree import Node, has, variables
from atts.evaluators.verdict import Limits, TooLarge, Undecided, Undefined

Value = Fraction | Approx
Domain = Literal["real", "whole", "steps"]
_BITS = (200, 640, 1600)
_POINTS = {"real": 6, "whole": 6, "steps": 28}
_STEPS = frozenset({"floor", "ceil", "gcd", "lcm"})
_DISCRETE = frozenset({"factorial", "double_factorial", "binom"})
# what a trace of rounding may leave, and what must remain to call two numbers different
_SLACK = 12


@lru_cache(maxsize=8192)
def _coordinate(name: str, index: int, domain: Domain) -> Fraction:
    """The value a variable takes at a probing point: fixed by its name, mixed in sign and size."""
    draw = random.Random(f"{name}@{index}")
    if domain == "steps":  # consecutive at first, so that a shifted step shows
        return Fraction(index + 2 if index < 14 else draw.randrange(2, 60))
    if domain == "whole":
        return Fraction(draw.randrange(2, 12) + 3 * index)
    size = Fraction(draw.randrange(1_000, 9_999), draw.choice((997, 1009, 1013, 2003, 3001)))
    return -size if index % 3 == 1 else size / 7 if index % 3 == 2 else size


def point(names: frozenset[str], index: int, domain: Domain) -> Mapping[str, Fraction]:
    """A probing point for these variables."""
    return {name: _coordinate(name, index, domain) for name in names}


def domain_of(*nodes: Node) -> Domain:
    """Whole numbers where something only makes sense on them, many where it moves in steps, real numbers elsewhere."""
    if any(each.kind == "func" and each.text in _STEPS and variables(each) for node in nodes for each in node.walk()):
        return "steps"
    for node in nodes:
        for each in node.walk():
            if each.kind == "func" and each.text in _DISCRETE and variables(each):
                return "whole"
            if each.kind == "pow" and (each.args[0].value or 0) < 0 and variables(each.args[1]):
                return "whole"
            if each.kind == "sum" and (variables(each.args[2]) or variables(each.args[3])):
                return "whole"
    return "real"


class Prober:
    """Evaluates within one budget of time, exact first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.deadline = time.thread_time() + limits.milliseconds / 1000

    def value(self, node: Node, env: Mapping[str, Fraction], bits: int = _BITS[0]) -> Value:
        """The exact value, or an approximation when there is none.

        Raises Undefined where the expression has no value, Undecided past a cap or for what has no number.
        """
        try:
            return exact(node, self.limits, env)
        except NotRational:
            pass
        except TooLarge:
            if has(node, "sum"):
                raise
        return Evaluator(bits, self.limits, env, self.deadline).value(node)

    def equal(self, left: Node, right: Node) -> bool:
        """Whether two expressions have the same value at every point where both have a real one.

        Raises Undecided when no point can be evaluated or precision does not settle it.
        """
        names = variables(left) | variables(right)
        if not names:
            return self.compare_at(left, right, {}, sure=True)[1]
        domain = domain_of(left, right)
        agreed = 0
        unreal: list[bool] = []
        for index in range(_POINTS[domain]):
            env = point(names, index, domain)
            try:
                real, same = self.compare_at(left, right, env)
            except Undefined:
                continue
            if not real:
                unreal.append(same)
            elif not same:
                return False
            else:
                agreed += 1
        if agreed >= 2:
            return True
        if len(unreal) >= 3:
            return all(unreal)
        raise Undecided("too few points where both have a value")

    def compare_at(self, left: Node, right: Node, env: Mapping[str, Fraction], sure: bool = False) -> tuple[bool, bool]:
        """Whether both values are real, and whether they are the same, with more precision where rounding hides it.

        `sure` asks for the next precision as well before saying that two computed values are the same.
        """
        for bits in _BITS:
            first, second = self.value(left, env, bits), self.value(right, env, bits)
            real = is_real(first) and is_real(second)
            if isinstance(first, Fraction) and isinstance(second, Fraction):
                return real, first == second
            try:
                same = self.agree(first, second, bits)
            except Undecided:
                if bits == _BITS[-1]:
                    raise
                continue
            if not same or not sure or bits > _BITS[0]:
                return real, same
        raise Undecided("rounding hides the difference")

    def agree(self, first: Value, second: Value, bits: int = _BITS[0]) -> bool:
        """Whether two values coincide within their errors; raises Undecided when the errors are too wide to say."""
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        one, two = self.approximate(first, bits), self.approximate(second, bits)
        error = max(one.error, two.error)
        gap = magnitude(one.value - two.value)
        if gap > error + _SLACK:
            return False
        size = max(one.magnitude, two.magnitude)
        if error + _SLACK > size - bits // 3 and not (error < -bits // 2 and size <= error + _SLACK):
            raise Undecided("rounding hides the difference")
        return True

    def approximate(self, value: Value, bits: int) -> Approx:
        if isinstance(value, Approx):
            return value
        return Evaluator(bits, self.limits, {}, self.deadline).rational(value)

    def proportional(self, left: Node, right: Node) -> Fraction | Approx | None:
        """The constant c with right = c * left at every point, or None when there is none.

        Raises Undecided when it cannot be told.
        """
        names = variables(left) | variables(right)
        domain = domain_of(left, right)
        ratio: Value | None = None
        agreed = 0
        for index in range(_POINTS[domain]):
            env = point(names, index, domain)
            try:
                first, second = self.value(left, env), self.value(right, env)
                if is_zero(first) or is_zero(second):
                    if is_zero(first) != is_zero(second):
                        return None
                    continue
                quotient = self.divide(second, first)
            except Undefined:
                continue
            if ratio is not None and not self.agree(ratio, quotient):
                return None
            ratio = quotient
            agreed += 1
        if ratio is None or (agreed < 2 and names):
            raise Undecided("too few points where both have a value")
        return ratio

    def divide(self, top: Value, bottom: Value) -> Value:
        """The quotient; raises Undefined for a zero divisor."""
        if is_zero(bottom):
            raise Undefined("a division by zero")
        if isinstance(top, Fraction) and isinstance(bottom, Fraction):
            return top / bottom
        evaluator = Evaluator(_BITS[0], self.limits, {}, self.deadline)
        one, two = self.approximate(top, _BITS[0]), self.approximate(bottom, _BITS[0])
        return evaluator.times(one, evaluator.inverse(two))

    def constants(self, node: Node) -> Value:
        """The value of a tree without variables; raises Undecided when it has some."""
        if variables(node):
            raise Undecided("variables")
        return self.value(node, {})


def is_real(value: Value) -> bool:
    """Whether a value has no imaginary part beyond its error."""
    if isinstance(value, Fraction) or not hasattr(value.value, "_mpc_"):
        return True
    return magnitude(value.value.imag) <= value.error + _SLACK


def is_zero(value: Value) -> bool:
    """Whether a value is zero within its error."""
    if isinstance(value, Fraction):
        return value == 0
    return value.magnitude == NOTHING or value.magnitude <= value.error + _SLACK


def written(value: Value) -> str:
    """A value as text: a fraction in lowest terms where it is one, else thirty significant digits."""
    if isinstance(value, Fraction):
        return f"{value.numerator:x}/{value.denominator:x}"
    size = value.magnitude
    if size == NOTHING or size <= value.error + _SLACK:
        return "0/1"
    if value.error > size - 130:
        raise Undecided("too little precision")
    real = value.value.real if hasattr(value.value, "_mpc_") else value.value
    imaginary = value.value.imag if hasattr(value.value, "_mpc_") else None
    parts = [_component(part, size, value.error) for part in (real, imaginary) if part is not None]
    return parts[0] if len(parts) == 1 or parts[1] == "0/1" else "+i".join(parts)


def _component(part: Any, size: int, error: int) -> str:
    """A real or imaginary part: zero, a small fraction, or thirty digits."""
    if magnitude(part) <= max(error + _SLACK, size - 130):
        return "0/1"
    sign, mantissa, exponent, _ = part._mpf_
    if abs(exponent) < 2_000:
        precise = Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** int(exponent)
        near = precise.limit_denominator(1 << 30)
        gap = abs(precise - near)
        if not gap or gap.numerator.bit_length() - gap.denominator.bit_length() <= error + _SLACK:
            return written(near)
    return str(to_str(part._mpf_, 30))
