"""Evaluate a tree to high precision with a running error bound, in a private context of each thread."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from atts.evaluators.exact import Environment, NotRational, digits_in_base, exact
from atts.evaluators.tree import Node
from atts.evaluators.verdict import Enormous, Limits, TooLarge, Undecided, Undefined

Number = Any  # an mpf or mpc of the thread's context; mpmath has no types
NOTHING = -(10**9)  # the magnitude of zero
_MAX_MAGNITUDE = 1 << 24  # bits of exponent past which a value is not computed
_WARM_BITS = 2_500

_local = threading.local()
_warming = threading.Lock()


def context(bits: int) -> Any:
    """This thread's own arithmetic at `bits` of precision, its constants computed beforehand.

    mpmath keeps computed constants in a cache shared by all threads and fills it without a lock; filling it once,
    past any precision used here, is what makes evaluation safe in every thread.
    """
    arithmetic = getattr(_local, "context", None)
    if arithmetic is None:
        with _warming:
            arithmetic = mpmath.MPContext()
            arithmetic.prec = _WARM_BITS
            _local.constants = [+each for each in (arithmetic.pi, arithmetic.e, arithmetic.ln2, arithmetic.ln10)]
            _local.context = arithmetic
    arithmetic.prec = bits
    return arithmetic


@dataclass(frozen=True, slots=True)
class Approx:
    """A value whose absolute error is below 2**error."""

    value: Number
    error: int

    @property
    def magnitude(self) -> int:
        """The exponent m with |value| < 2**m, at most two too large."""
        return magnitude(self.value)

    @property
    def may_vanish(self) -> bool:
        """Whether the value is zero, or cannot be told from zero."""
        return self.magnitude == NOTHING or self.magnitude <= self.error + 4


def magnitude(value: Number) -> int:
    """The exponent m with |value| < 2**m, at most two too large; NOTHING for zero."""
    parts = getattr(value, "_mpc_", None)
    if parts is None:
        _, mantissa, exponent, bits = value._mpf_
        return int(exponent + bits) if mantissa else NOTHING
    return max((exponent + bits if mantissa else NOTHING) for _, mantissa, exponent, bits in parts) + 1


class Evaluator:
    """Evaluates trees under one environment at one precision; raises Undecided where it cannot."""

    def __init__(self, bits: int, limits: Limits, env: Environment, deadline: float) -> None:
        self.bits = bits
        self.limits = limits
        self.env = env
        self.deadline = deadline
        self.steps = 0
        self.mp = context(bits)

    def value(self, node: Node) -> Approx:
        """The value of a tree with its error bound."""
        self.steps += 1
        if self.steps > self.limits.steps or (self.steps % 64 == 0 and time.thread_time() > self.deadline):
            raise TooLarge("numeric evaluation takes too long")
        rule = _RULES.get(node.kind)
        if rule is None:
            raise Undecided(f"no number for a {node.kind}")
        try:
            return self.checked(rule(self, node))
        except (ZeroDivisionError, ValueError) as error:  # mpmath's own words for a pole
            raise Undefined(f"no value: {error}") from error

    def checked(self, result: Approx) -> Approx:
        if not self.mp.isfinite(result.value):
            raise Undefined("not finite")
        if abs(result.magnitude) > _MAX_MAGNITUDE and result.magnitude != NOTHING:
            raise Enormous("a number of enormous size")
        return result

    def rounded(self, value: Number, error: int) -> Approx:
        """A computed value whose inputs' errors amount to `error`; rounding at this precision is added."""
        return Approx(value, max(error, magnitude(value) - self.bits) + 1)

    def rational(self, value: Fraction) -> Approx:
        """An exact rational as an approximation."""
        number = self.mp.mpf(value.numerator) / value.denominator
        return Approx(number, magnitude(number) - self.bits + 1)

    # -- leaves and arithmetic -------------------------------------------------------------

    def number(self, node: Node) -> Approx:
        assert node.value is not None
        return self.rational(node.value)

    def symbol(self, node: Node) -> Approx:
        bound = self.env.get(node.text)
        if bound is None:
            raise Undecided(f"no value for {node.text}")
        return self.rational(bound)

    def constant(self, node: Node) -> Approx:
        if node.text == "i":
            return Approx(self.mp.mpc(0, 1), NOTHING)
        if node.text == "inf":
            raise Undecided("infinity in an expression")
        number = +(self.mp.pi if node.text == "pi" else self.mp.e)
        return Approx(number, 3 - self.bits)

    def add(self, node: Node) -> Approx:
        total, error = self.mp.mpf(0), NOTHING
        for index, arg in enumerate(node.args):
            term = self.value(arg)
            total += term.value
            error = max(error, term.error, magnitude(total) - self.bits) + (1 if index < 8 or index % 8 == 0 else 0)
        return Approx(total, error)

    def mul(self, node: Node) -> Approx:
        total = Approx(self.mp.mpf(1), NOTHING)
        for arg in node.args:
            total = self.times(total, self.value(arg))
        return total

    def times(self, left: Approx, right: Approx) -> Approx:
        """The product."""
        error = max(left.error + max(right.magnitude, right.error), right.error + left.magnitude)
        return self.rounded(left.value * right.value, error + 1)

    def inverse(self, item: Approx) -> Approx:
        """The reciprocal; raises Undefined for zero and for what may be zero at this precision."""
        if item.may_vanish:
            raise Undefined("a division by zero")
        value = 1 / item.value
        return self.rounded(value, item.error + 2 * magnitude(value) + 2)

    def pow(self, node: Node) -> Approx:
        base, exponent = node.args
        power = self.exponent(exponent)
        if isinstance(power, Fraction):
            return self.rational_power(self.value(base), power)
        left = self.value(base)
        if left.magnitude == NOTHING:
            raise Undefined("a power of zero")
        return self.exp(self.times(power, self.ln(left)))

    def exponent(self, node: Node) -> Fraction | Approx:
        try:
            return exact(node, self.limits, self.env)
        except NotRational:
            return self.value(node)

    def rational_power(self, base: Approx, power: Fraction) -> Approx:
        """base ** (p/q), the real root where q is odd."""
        if base.may_vanish:
            return self.zero_power(base, power)
        if power.denominator == 1 and abs(power) < 1 << 16:
            value = base.value ** int(power)
        elif power.denominator % 2 and power.denominator < 1 << 16 and _is_negative(base.value):
            flips = -1 if power.numerator % 2 else 1
            value = flips * self.mp.power(-base.value, self.mp.mpf(power.numerator) / power.denominator)
        else:
            self.affordable(base, power)
            value = self.mp.power(base.value, self.mp.mpf(power.numerator) / power.denominator)
        growth = abs(power.numerator).bit_length() - power.denominator.bit_length() + 2
        relative = max(base.error - base.magnitude + 2, -self.bits + max(abs(base.magnitude), 1).bit_length())
        return self.rounded(value, magnitude(value) + relative + growth)

    def zero_power(self, base: Approx, power: Fraction) -> Approx:
        if power < 0:
            raise Undefined("a division by zero")
        if power == 0:
            return self.rational(Fraction(1))
        scaled = int(power * base.error) if power < 1 else base.error
        return Approx(self.mp.mpf(0), max(scaled + 2, NOTHING))

    def affordable(self, base: Approx, power: Fraction) -> None:
        if abs(power) * max(abs(base.magnitude), 1) > _MAX_MAGNITUDE:
            raise Enormous("a power of enormous size")

    def root(self, node: Node) -> Approx:
        index = self.exponent(node.args[1])
        base = self.value(node.args[0])
        if isinstance(index, Approx):
            return self.exp(self.times(self.inverse(index), self.ln(base)))
        if index == 0:
            raise Undefined("a root of index zero")
        return self.rational_power(base, 1 / index)

    def percent(self, node: Node) -> Approx:
        return self.times(self.value(node.args[0]), self.rational(Fraction(1, 100)))

    def degree(self, node: Node) -> Approx:
        radians = self.times(self.constant(Node("constant", text="pi")), self.rational(Fraction(1, 180)))
        return self.times(self.value(node.args[0]), radians)

    def based(self, node: Node) -> Approx:
        return self.rational(Fraction(digits_in_base(node)))

    def quantity(self, node: Node) -> Approx:
        return self.value(node.args[0])

    def sum(self, node: Node) -> Approx:
        body, variable, lower, upper = node.args
        first, last = self.exponent(lower), self.exponent(upper)
        if not (isinstance(first, Fraction) and isinstance(last, Fraction)) or {
            first.denominator,
            last.denominator,
        } != {1}:
            raise Undecided("a sum without whole bounds")
        if last - first >= self.limits.terms:
            raise TooLarge(f"more than {self.limits.terms} terms")
        total = self.rational(Fraction(0 if node.text == "sum" else 1))
        outer = self.env
        for index in range(int(first), int(last) + 1):
            self.env = {**outer, variable.text: Fraction(index)}
            term = self.value(body)
            if node.text == "sum":
                total = self.rounded(total.value + term.value, max(total.error, term.error) + 1)
            else:
                total = self.times(total, term)
        self.env = outer
        return total

    def call(self, node: Node) -> Approx:
        """An unknown function: a reproducible arbitrary number for each name and argument."""
        parts = [self.value(arg) for arg in node.args]
        key = node.text + "".join("/" + self.mp.nstr(part.value, 20) for part in parts)
        digest = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return self.rational(Fraction(digest, 1 << 62))

    # -- functions -------------------------------------------------------------------------

    def func(self, node: Node) -> Approx:
        if node.text in ("floor", "ceil", "factorial", "double_factorial", "binom", "gcd", "lcm"):
            return self.discrete(node)
        args = [self.value(arg) for arg in node.args]
        if node.text in ("max", "min"):
            return (max if node.text == "max" else min)(args, key=lambda item: self.mp.re(item.value))
        rule = _FUNCTIONS.get(node.text)
        if rule is None:
            raise Undecided(f"the function {node.text}")
        return rule(self, args[0])

    def discrete(self, node: Node) -> Approx:
        """Functions of integers: exact when their arguments are, gamma or a guarded rounding otherwise."""
        try:
            return self.rational(exact(node, self.limits, self.env))
        except NotRational:
            pass
        args = [self.value(arg) for arg in node.args]
        if node.text in ("floor", "ceil"):
            return self.stepped(node.text, args[0])
        if any(arg.magnitude > 24 for arg in args):
            raise TooLarge("a factorial of a huge number")
        values = [self.mp.gamma(arg.value + 1) for arg in args]
        if node.text == "factorial":
            return self.rounded(values[0], args[0].error + magnitude(values[0]) + 8)
        if node.text == "binom":
            n, k = args
            value = values[0] / values[1] / self.mp.gamma(n.value - k.value + 1)
            return self.rounded(value, max(n.error, k.error) + magnitude(value) + 10)
        raise Undecided(f"the function {node.text}")

    def stepped(self, name: str, item: Approx) -> Approx:
        if _is_complex(item.value):
            raise Undecided("a step of a complex number")
        nearest = self.mp.nint(item.value)
        if magnitude(nearest - item.value) <= item.error + 8:
            if item.error > 16 - self.bits + max(item.magnitude, 0):
                raise Undecided("a step too close to call")
            return Approx(nearest, NOTHING)
        return Approx((self.mp.floor if name == "floor" else self.mp.ceil)(item.value), NOTHING)

    def exp(self, item: Approx) -> Approx:
        """e to the item."""
        if item.magnitude > 22:
            raise Enormous("an exponential of enormous size")
        value = self.mp.exp(item.value)
        return self.rounded(value, magnitude(value) + max(item.error, item.magnitude - self.bits) + 2)

    def ln(self, item: Approx) -> Approx:
        """The principal logarithm."""
        if item.may_vanish:
            raise Undefined("the logarithm of zero")
        return self.rounded(self.mp.log(item.value), item.error - item.magnitude + 3)

    def log(self, item: Approx) -> Approx:
        return self.times(self.ln(item), self.inverse(self.ln(self.rational(Fraction(10)))))

    def abs(self, item: Approx) -> Approx:
        return Approx(abs(item.value), item.error + 1)

    def sign(self, item: Approx) -> Approx:
        if item.may_vanish:
            raise Undecided("a sign too close to call")
        return Approx(self.mp.sign(item.value), NOTHING)

    def real(self, item: Approx) -> Approx:
        return Approx(self.mp.re(item.value), item.error)

    def imaginary(self, item: Approx) -> Approx:
        return Approx(self.mp.im(item.value), item.error)

    def argument(self, item: Approx) -> Approx:
        if item.may_vanish:
            raise Undefined("the argument of zero")
        return self.rounded(self.mp.arg(item.value), item.error - item.magnitude + 3)


def _is_complex(value: Number) -> bool:
    return hasattr(value, "_mpc_") and bool(value.imag)


def _is_negative(value: Number) -> bool:
    return not _is_complex(value) and bool(value.real < 0)


def _smooth(name: str, slope: Callable[[Any, Number], Number]) -> Callable[[Evaluator, Approx], Approx]:
    """A function of mpmath with the derivative its error grows by."""

    def rule(evaluator: Evaluator, item: Approx) -> Approx:
        if item.magnitude > 100:
            raise Enormous("a function of a huge number")
        try:
            value = getattr(evaluator.mp, name)(item.value)
            growth = magnitude(slope(evaluator.mp, item.value))
        except (ValueError, ZeroDivisionError) as error:
            raise Undefined(f"{name}: {error}") from error
        if growth > evaluator.bits // 2:
            raise Undefined(f"a pole of {name}")
        noise = max(item.error, item.magnitude - evaluator.bits)
        return evaluator.rounded(value, noise + max(growth, 0) + 3)

    return rule


def _circular(mp: Any, x: Number) -> Number:
    return mp.cosh(mp.im(x)) if _is_complex(x) else mp.mpf(1)


def _root_slope(sign: int, one: int) -> Callable[[Any, Number], Number]:
    def slope(mp: Any, x: Number) -> Number:
        inside = abs(one + sign * x * x)
        return 1 / mp.sqrt(inside) if magnitude(inside) > -mp.prec // 2 else mp.mpf(1)

    return slope


_FUNCTIONS: dict[str, Callable[[Evaluator, Approx], Approx]] = {
    "ln": Evaluator.ln,
    "log": Evaluator.log,
    "abs": Evaluator.abs,
    "sign": Evaluator.sign,
    "re": Evaluator.real,
    "im": Evaluator.imaginary,
    "arg": Evaluator.argument,
    "sin": _smooth("sin", _circular),
    "cos": _smooth("cos", _circular),
    "tan": _smooth("tan", lambda mp, x: 1 / mp.cos(x) ** 2),
    "cot": _smooth("cot", lambda mp, x: 1 / mp.sin(x) ** 2),
    "sec": _smooth("sec", lambda mp, x: 1 / mp.cos(x) ** 2),
    "csc": _smooth("csc", lambda mp, x: 1 / mp.sin(x) ** 2),
    "sinh": _smooth("sinh", lambda mp, x: mp.cosh(mp.re(x))),
    "cosh": _smooth("cosh", lambda mp, x: mp.cosh(mp.re(x))),
    "tanh": _smooth("tanh", lambda mp, x: mp.mpf(1)),
    "coth": _smooth("coth", lambda mp, x: 1 / mp.sinh(x) ** 2),
    "sech": _smooth("sech", lambda mp, x: mp.mpf(1)),
    "csch": _smooth("csch", lambda mp, x: 1 / mp.sinh(x) ** 2),
    "arcsin": _smooth("asin", _root_slope(-1, 1)),
    "arccos": _smooth("acos", _root_slope(-1, 1)),
    "arctan": _smooth("atan", lambda mp, x: mp.mpf(1)),
    "arccot": _smooth("acot", lambda mp, x: mp.mpf(1)),
    "arcsec": _smooth("asec", lambda mp, x: mp.mpf(4)),
    "arccsc": _smooth("acsc", lambda mp, x: mp.mpf(4)),
    "arcsinh": _smooth("asinh", _root_slope(1, 1)),
    "arccosh": _smooth("acosh", _root_slope(1, -1)),
    "arctanh": _smooth("atanh", lambda mp, x: 1 / (1 - x * x)),
    "erf": _smooth("erf", lambda mp, x: mp.mpf(2)),
}

_RULES: dict[str, Callable[[Evaluator, Node], Approx]] = {
    "number": Evaluator.number, "symbol": Evaluator.symbol, "constant": Evaluator.constant, "add": Evaluator.add,
    "mul": Evaluator.mul, "pow": Evaluator.pow, "root": Evaluator.root, "percent": Evaluator.percent,
    "degree": Evaluator.degree, "based": Evaluator.based, "quantity": Evaluator.quantity, "sum": Evaluator.sum,
    "call": Evaluator.call, "func": Evaluator.func,
}  # fmt: skip
