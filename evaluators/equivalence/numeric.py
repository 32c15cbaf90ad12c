"""Evaluation of a tree: exact in rational numbers, else to high precision with a running error
bound.
"""

import hashlib
import operator
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeGuard

from atts.evaluators.equivalence import approx
from atts.evaluators.equivalence.approx import NOTHING, Approx, Arithmetic, NotRational, magnitude
from atts.evaluators.syntax.tree import OTHERWISE, PI, Node, minus, number, variables
from atts.evaluators.verdict import Limits, Outside, TooLarge, Undecided, Undefined

Value = Fraction | Approx
Environment = Mapping[str, Fraction]
NOWHERE: Environment = {}


class Clock:
    """Processor time for one pair; looked at seldom: that costs as much as many a comparison."""

    def __init__(self, seconds: float) -> None:
        self.end = time.thread_time() + seconds
        self.ticks = 0

    def look(self) -> None:
        """Raise TooLarge when the time is over."""
        if time.thread_time() > self.end:
            raise TooLarge("evaluation takes too long")


def exact(node: Node, limits: Limits, env: Environment = NOWHERE) -> Fraction:
    """The value of the tree with its variables bound by `env`.

    Raises NotRational when rationals do not suffice, Undefined for a division by zero, TooLarge
    past a cap.
    """
    value = Evaluator(0, limits, env).value(node)
    assert isinstance(value, Fraction)
    return value


class Evaluator(Arithmetic):
    """Evaluates trees under one environment, exactly as far as numbers stay rational, else at one
    precision.

    At a precision of no bits what is not rational raises NotRational. Raises Undecided where there
    is no number.
    """

    def __init__(
        self, bits: int, limits: Limits, env: Environment = NOWHERE, clock: Clock | None = None
    ) -> None:
        super().__init__(bits)
        self.limits = limits
        self.env = env
        self.clock = clock
        self.steps = 0

    def value(self, node: Node) -> Value:
        """The value of a tree, with its error bound where it is not exact."""
        self.steps += 1
        if self.steps > self.limits.steps:
            raise TooLarge("evaluation takes too long")
        if self.clock:
            self.clock.ticks += 1
            if not self.clock.ticks % 128:
                self.clock.look()
        rule = _RULES.get(node.kind)
        if rule is None:
            raise self.lacking(f"no number for a {node.kind}")
        try:
            result = rule(self, node)
            return (
                result
                if node.kind in _SMALL and isinstance(result, Fraction)
                else self.checked(result)
            )
        except (ZeroDivisionError, ValueError) as error:  # mpmath's own words for a pole
            raise Undefined(f"no value: {error}") from error

    def lacking(self, why: str) -> Exception:
        """The error for what has no number: at a precision, or in rational numbers."""
        return Undecided(why) if self.bits else NotRational(why)

    def checked(self, result: Value) -> Value:
        if isinstance(result, Fraction):
            return result if self.fits(result) else self.approximate(result)
        if not self.mp.isfinite(result.value):
            raise Undefined("not finite")
        if abs(result.magnitude) > approx.MAX_MAGNITUDE and result.magnitude != NOTHING:
            raise TooLarge("a number of enormous size")
        self.has_left_reals |= hasattr(result.value, "_mpc_")
        return result

    def fits(self, value: Fraction) -> bool:
        """Whether a fraction is small enough to be computed with exactly."""
        return max(value.numerator.bit_length(), value.denominator.bit_length()) <= self.limits.bits

    def approximate(self, value: Value) -> Approx:
        """A value as an approximation; raises NotRational and TooLarge where all has to be exact."""
        if isinstance(value, Approx):
            return value
        if not self.bits:
            raise (
                NotRational("a function")
                if self.fits(value)
                else TooLarge(f"past {self.limits.bits} bits")
            )
        return self.rational(value)

    def symbol(self, node: Node) -> Value:
        bound = self.env.get(node.text)
        if bound is None:
            raise self.lacking(f"no value for {node.text}")
        return bound

    def constant(self, node: Node) -> Value:
        if not self.bits:
            raise NotRational(node.text)
        if node.text == "i":
            return Approx(self.mp.mpc(0, 1), NOTHING)
        if node.text == "inf":
            raise Undecided("infinity in an expression")
        return Approx(+(self.mp.pi if node.text == "pi" else self.mp.e), 3 - self.bits)

    def add(self, node: Node) -> Value:
        whole, terms = self.split(node, operator.add, Fraction(0))
        if not terms:
            return whole
        terms += [self.approximate(whole)] if whole else []
        total = self.mp.mpf(0)
        error = NOTHING
        for index, term in enumerate(terms):
            total += term.value
            error = max(error, term.error, magnitude(total) - self.bits) + (
                1 if index < 8 or index % 8 == 0 else 0
            )
        sizes = {term.magnitude for term in terms} - {NOTHING}
        if sizes:
            self.widen(max(sizes) - min(sizes))
        return Approx(total, error)

    def mul(self, node: Node) -> Value:
        whole, factors = self.split(node, operator.mul, Fraction(1))
        total: Value = whole
        for factor in factors if whole else ():
            total = factor if total == 1 else self.times(self.approximate(total), factor)
        return total

    def split(
        self, node: Node, operation: Callable[[Fraction, Fraction], Fraction], start: Fraction
    ) -> tuple[Fraction, list[Approx]]:
        """What the exact arguments come to together, and the others."""
        whole = start
        others = list[Approx]()
        for arg in node.args:
            value = self.value(arg)
            if isinstance(value, Fraction) and self.fits(together := operation(whole, value)):
                whole = together
            else:
                others.append(self.approximate(value))
        return whole, others

    def pow(self, node: Node) -> Value:
        base, exponent = node.args
        power = self.value(exponent)
        left = self.value(base)
        below = left < 0 if isinstance(left, Fraction) else left.is_negative and not left.may_vanish
        if below and not _is_whole(power) and variables(exponent):
            raise Undefined("a varying power of a negative number")
        return self.power(left, power)

    def power(self, base: Value, power: Value) -> Value:
        if isinstance(base, Fraction) and isinstance(power, Fraction):
            try:
                return approx.rational_power(base, power, self.limits)
            except (NotRational, TooLarge):
                if not self.bits:
                    raise
        left = self.approximate(base)
        if isinstance(power, Fraction):
            self.widen(power.denominator.bit_length())
            return self.rational_power(left, power)
        self.widen(-power.magnitude)
        if left.magnitude == NOTHING:
            raise Undefined("a power of zero")
        return self.exp(self.times(power, self.by_direction("log", left)))

    def root(self, node: Node) -> Value:
        index = self.value(node.args[1])
        base = self.value(node.args[0])
        if isinstance(index, Approx):
            return self.exp(
                self.times(self.inverse(index), self.by_direction("log", self.approximate(base)))
            )
        if index == 0:
            raise Undefined("a root of index zero")
        return self.power(base, 1 / index)

    def scaled(self, node: Node) -> Value:
        return self.value(Node("mul", (*node.args, *_SCALES[node.kind])))

    def sum(self, node: Node) -> Value:
        body, variable, lower, upper = node.args
        first, last = (
            int(bound) if _is_whole(bound := self.value(end)) else None for end in (lower, upper)
        )
        if first is None or last is None:
            raise self.lacking("bounds of a sum")
        if last - first >= self.limits.terms:
            raise TooLarge(f"more than {self.limits.terms} terms")
        total = Fraction(int(node.text == "prod"))
        outer = self.env
        for index in range(first, last + 1):
            self.env = {**outer, variable.text: Fraction(index)}
            term = self.value(body)
            if not isinstance(term, Fraction):
                raise Undecided("a sum of what is not rational")
            total = total + term if node.text == "sum" else total * term
            if not self.fits(total):
                raise TooLarge(f"an integer past {self.limits.bits} bits")
        self.env = outer
        return total

    def cases(self, node: Node) -> Value:
        """The value of the first case that applies."""
        for value, condition in zip(node.args[::2], node.args[1::2], strict=True):
            if self.holds(condition):
                return self.value(value)
        raise Outside("no case applies")

    def holds(self, condition: Node) -> bool:
        """Whether a condition is true here; raises Undecided for what is not one in numbers."""
        if condition.kind == "list" and condition.text != "mixed":
            return (any if condition.text == "or" else all)(
                self.holds(part) for part in condition.args
            )
        if condition == OTHERWISE:
            return True
        if condition.kind != "relation":
            raise Undecided("a condition in words")
        signs = condition.text.split()
        return all(
            self.compare(a, s, b)
            for a, s, b in zip(condition.args, signs, condition.args[1:], strict=False)
        )

    def compare(self, left: Node, sign: str, right: Node) -> bool:
        if right.kind == "congruence" and sign in ("=", "!="):
            turns = self.difference(left, right.args[0]) / self.difference(right.args[1], number(0))
            return (turns.denominator == 1) == (sign == "=")
        if sign not in _ORDERS:
            raise Undecided(f"the condition {sign}")
        return _ORDERS[sign](self.difference(left, right), 0)

    def difference(self, left: Node, right: Node) -> Fraction:
        """A difference as a fraction, or of its sign alone."""
        gap = self.value(minus(left, right))
        if isinstance(gap, Fraction):
            return gap
        if gap.may_vanish or gap.is_complex:
            raise Undecided("a condition too close to call")
        return Fraction(1 if gap.value.real > 0 else -1)

    def call(self, node: Node) -> Value:
        """An unknown function: a reproducible arbitrary number for each name and argument."""
        parts = [self.approximate(self.value(arg)) for arg in node.args]
        key = node.text + "".join("/" + self.mp.nstr(part.value, 40) for part in parts)
        digest = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return self.rational(Fraction(digest, 1 << 62))

    def func(self, node: Node) -> Value:
        """Exact for rational arguments where it can be; floor and ceiling by a guarded rounding
        otherwise.
        """
        args = [self.value(arg) for arg in node.args]
        known = [arg for arg in args if isinstance(arg, Fraction)]
        if len(known) == len(args) and node.text in approx.EXACT:
            try:
                return approx.EXACT[node.text](known, self.limits)
            except NotRational:
                if not self.bits:
                    raise
        near = [self.approximate(arg) for arg in args]
        if (
            node.text not in approx.FUNCTIONS
            and max(item.magnitude for item in near) > self.limits.bits
        ):
            raise TooLarge(f"{node.text} of a number past {self.limits.bits} bits")
        if node.text in ("floor", "ceil"):
            return self.stepped(node.text, near[0])
        if node.text in ("max", "min"):
            return (max if node.text == "max" else min)(
                near, key=lambda item: self.mp.re(item.value)
            )
        rule = approx.FUNCTIONS.get(node.text)
        if rule is None:
            raise Undecided(f"the function {node.text}")
        size = near[0].magnitude
        if size != NOTHING:  # how near to a constant a function comes there
            self.widen(
                3 << min(2 * size, 20)
                if node.text in ("tanh", "coth", "erf") and size > 0
                else 2 * abs(size)
            )
        return rule(self, near[0])

    def stepped(self, name: str, item: Approx) -> Approx:
        if item.is_complex:
            raise Undecided("a step of a complex number")
        nearest = self.mp.nint(item.value)
        if magnitude(nearest - item.value) <= item.error + 8:
            if item.error > 16 - self.bits + max(item.magnitude, 0):
                raise Undecided("a step too close to call")
            return Approx(nearest, NOTHING)
        return Approx((self.mp.floor if name == "floor" else self.mp.ceil)(item.value), NOTHING)


def _is_whole(value: Value) -> TypeGuard[Fraction]:
    return isinstance(value, Fraction) and value.denominator == 1


# exact values are bounded where they are made
_SMALL = frozenset({"number", "symbol", "add", "mul"})
_SCALES = {"percent": (number(Fraction(1, 100)),), "degree": (number(Fraction(1, 180)), PI)}
_ORDERS: dict[str, Callable[[Fraction, int], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq, "!=": operator.ne,
}  # fmt: skip
_KINDS = "symbol constant add mul pow root cases call func sum".split()
_RULES: dict[str, Callable[[Evaluator, Node], Value]] = {
    "number": lambda evaluator, node: node.value or Fraction(),
    "based": lambda evaluator, node: Fraction(approx.digits_in_base(node)),
    **dict.fromkeys(_SCALES, Evaluator.scaled),
    **{kind: getattr(Evaluator, kind) for kind in _KINDS},
}
