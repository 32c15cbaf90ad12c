"""Evaluate a tree exactly while its numbers are rational, or else approximately with an error
bound.
"""

import hashlib
import math
import operator
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeGuard

import mpmath

from atts.evaluators.syntax.tree import OTHERWISE, PI, Node, minus, number, variables
from atts.evaluators.verdict import (
    Limits,
    OutOfTime,
    Outside,
    TooLarge,
    Undecided,
    Undefined,
)

# ---- exact arithmetic with fractions


class NotRational(Exception):
    """The value is not known to be rational, but it can still be approximated."""


def digits_in_base(node: Node) -> int:
    """Return the integer that a numeral such as 1011 in base 2 denotes. Raises Undefined for a
    digit that its base does not have.
    """
    assert node.value is not None
    try:
        return int(node.text, int(node.value))
    except ValueError as error:
        raise Undefined(f"{node.text!r} in base {node.value}") from error


def rational_power(base: Fraction, exponent: Fraction, limits: Limits) -> Fraction:
    """Return base ** exponent if it is rational. An odd root of a negative number is its real root.

    Raises Undefined for a negative power of zero, NotRational for an irrational root, and TooLarge
    if the result has too many bits.
    """
    if base == 0 and exponent < 0:
        raise Undefined("a division by zero")
    if exponent.denominator != 1:
        base = _rational_root(base, exponent.denominator)
    if abs(base) == 1:
        return base ** (exponent.numerator % 2)
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base and size * abs(exponent.numerator) > limits.bits + size:
        raise TooLarge(f"a power with more than {limits.bits} bits")
    return base**exponent.numerator


def _rational_root(base: Fraction, index: int) -> Fraction:
    if index > 200 or (base < 0 and index % 2 == 0):
        raise NotRational("a root")
    if base < 0:
        return -_rational_root(-base, index)
    return Fraction(_integer_root(base.numerator, index), _integer_root(base.denominator, index))


def _integer_root(value: int, index: int) -> int:
    """Return the root of an integer, of the degree `index`; raise NotRational if it is not an
    integer.
    """
    if index == 2 or value < 2:
        root = math.isqrt(value)
    else:
        root = 1 << -(-value.bit_length() // index)
        # Newton's method for an integer root. It starts at or above the root and decreases.
        while True:
            better = ((index - 1) * root + value // root ** (index - 1)) // index
            if better >= root:
                break
            root = better
    if root**index != value:
        raise NotRational("an irrational root")
    return root


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise NotRational("not an integer")
    return int(value)


def _factorial(args: list[Fraction], limits: Limits) -> Fraction:
    n = _whole(args[0])
    if n < 0:
        raise Undefined("the factorial of a negative integer")
    if n > 20 and n * n.bit_length() > 2 * limits.bits:
        raise TooLarge("a factorial with too many bits")
    return Fraction(math.factorial(n))


def _double_factorial(args: list[Fraction], limits: Limits) -> Fraction:
    if not 0 <= args[0] <= 2000:
        raise NotRational("a double factorial")
    return Fraction(math.prod(range(_whole(args[0]), 0, -2)))


def _binom(args: list[Fraction], limits: Limits) -> Fraction:
    n, k = args
    is_whole = n.denominator == 1
    if k.denominator != 1 or (k < 0 and not is_whole):
        raise NotRational("a generalised binomial")
    if k < 0 or (is_whole and 0 <= n < k):
        return Fraction(0)
    if is_whole and n >= 0:
        if min(k, n - k) * n.numerator.bit_length() > limits.bits:
            raise TooLarge("a binomial coefficient with too many bits")
        return Fraction(math.comb(int(n), int(k)))
    if k > 200:
        raise TooLarge("a generalised binomial")
    return math.prod((n - i for i in range(int(k))), start=Fraction(1)) / math.factorial(int(k))


def _lcm(args: list[Fraction], limits: Limits) -> Fraction:
    if sum(int(arg).bit_length() for arg in args) > limits.bits:
        raise TooLarge("a least common multiple")
    return Fraction(math.lcm(*map(_whole, args)))


def _mod(args: list[Fraction], limits: Limits) -> Fraction:
    if _whole(args[1]) == 0:
        raise Undefined("a division by zero")
    return Fraction(_whole(args[0]) % _whole(args[1]))


def remainder(node: Node, modulus: int) -> int | None:
    """Return the remainder of an integer expression modulo `modulus`; None if it is not known to be
    an integer.

    Powers are reduced while they are computed, so the numbers never become large.
    """
    if node.kind == "number" and node.value is not None and node.value.denominator == 1:
        return int(node.value) % modulus
    if node.kind in ("add", "mul"):
        total = 0 if node.kind == "add" else 1
        for arg in node.args:
            part = remainder(arg, modulus)
            if part is None:
                return None
            total = (total + part if node.kind == "add" else total * part) % modulus
        return total
    if node.kind == "pow":
        base = remainder(node.args[0], modulus)
        power = node.args[1].value
        if base is not None and power is not None and power.denominator == 1 and power >= 0:
            return pow(base, int(power), modulus)
    return None


def _only(at: int, value: int) -> Callable[[list[Fraction], Limits], Fraction]:
    """Return a function that evaluates cos, ln or the like exactly: it returns `value` for the
    argument `at`.

    For any other argument it raises NotRational, so that the caller can approximate the value. The
    logarithm of 0 raises Undefined.
    """

    def rule(args: list[Fraction], limits: Limits) -> Fraction:
        if args[0] == at:
            return Fraction(value)
        if at and not args[0]:
            raise Undefined("the logarithm of zero")
        raise NotRational("transcendental")

    return rule


EXACT: dict[str, Callable[[list[Fraction], Limits], Fraction]] = {
    "factorial": _factorial,
    "double_factorial": _double_factorial,
    "binom": _binom,
    "abs": lambda args, limits: abs(args[0]),
    "floor": lambda args, limits: Fraction(math.floor(args[0])),
    "ceil": lambda args, limits: Fraction(math.ceil(args[0])),
    "max": lambda args, limits: max(args),
    "min": lambda args, limits: min(args),
    "gcd": lambda args, limits: Fraction(math.gcd(*map(_whole, args))),
    "lcm": _lcm,
    "mod": _mod,
    "sign": lambda args, limits: Fraction((args[0] > 0) - (args[0] < 0)),
    "re": lambda args, limits: args[0],
    "im": lambda args, limits: Fraction(0),
    "cos": _only(0, 1),
    **dict.fromkeys(("sin", "tan", "arctan", "arcsin"), _only(0, 0)),
    **dict.fromkeys(("ln", "log"), _only(1, 0)),
}


# ---- approximate values with error bounds


# a real or complex number of this thread's mpmath context; mpmath has no type annotations
Number = Any
NOTHING = -(10**9)  # stands for the magnitude of zero, which would be minus infinity
MAX_MAGNITUDE = 1 << 24  # absolute values above 2**MAX_MAGNITUDE are not computed

_local = threading.local()


def context(bits: int) -> Any:
    """Return this thread's mpmath context with a precision of `bits` bits."""
    arithmetic = getattr(_local, "context", None)
    if arithmetic is None:
        arithmetic = _local.context = mpmath.MPContext()
    arithmetic.prec = bits
    return arithmetic


# Compute mpmath's constants once, with more bits than any later computation needs. All threads
# share mpmath's cache of constants, and mpmath fills the cache without a lock.
_CONSTANTS = [+getattr(context(6_500), name) for name in ("pi", "e", "ln2", "ln10")]


@dataclass(frozen=True, slots=True)
class Approx:
    """An approximate value. Its absolute error is below 2**error."""

    value: Number
    error: int

    @property
    def magnitude(self) -> int:
        """Return an integer m with |value| < 2**m. It exceeds the smallest such integer by at most
        two.
        """
        return magnitude(self.value)

    @property
    def is_complex(self) -> bool:
        """Return True if the value has an imaginary part."""
        return hasattr(self.value, "_mpc_") and bool(self.value.imag)

    @property
    def is_negative(self) -> bool:
        """Return True if the approximate value is a negative real number."""
        return not self.is_complex and bool(self.value.real < 0)

    @property
    def may_vanish(self) -> bool:
        """Return True if the value is zero, or too close to zero for its error bound to tell."""
        return self.magnitude == NOTHING or self.magnitude <= self.error + 4


def magnitude(value: Number) -> int:
    """Return an integer m with |value| < 2**m, at most two above the smallest one; `NOTHING` for
    zero.
    """
    parts = getattr(value, "_mpc_", None)
    if parts is None:
        _, mantissa, exponent, bits = value._mpf_
        return int(exponent + bits) if mantissa else NOTHING
    sizes = [(exponent + bits if mantissa else NOTHING) for _, mantissa, exponent, bits in parts]
    return max(sizes) + 1


class Arithmetic:
    """Arithmetic at one precision. Each result has a bound on its accumulated rounding error.

    `spread` is the largest gap in magnitude, in bits, between the terms of one operation. The
    precision must be at least this large. `has_left_reals` is true if some intermediate value was
    not a real number.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.mp: Any = context(bits) if bits else None
        self.spread = 0
        self.has_left_reals = False

    def widen(self, bits: int) -> None:
        """Record the gap in magnitude, in bits, between the largest and the smallest term of one
        operation.
        """
        if bits > 32:
            self.spread = max(self.spread, bits)

    def rounded(self, value: Number, error: int) -> Approx:
        """Return the value with its error bound, which includes the rounding of this operation.

        `error` is the exponent of the error that comes from the inputs.
        """
        return Approx(value, max(error, magnitude(value) - self.bits) + 1)

    def rational(self, value: Fraction) -> Approx:
        """Return an exact fraction as an approximation."""
        number = self.mp.mpf(value.numerator) / value.denominator
        self.widen(max(value.numerator.bit_length(), value.denominator.bit_length()))
        return Approx(number, magnitude(number) - self.bits + 1)

    def times(self, left: Approx, right: Approx) -> Approx:
        """Return the product of two approximations."""
        error = max(left.error + max(right.magnitude, right.error), right.error + left.magnitude)
        return self.rounded(left.value * right.value, error + 1)

    def inverse(self, item: Approx) -> Approx:
        """Return the reciprocal of a value; raise Undefined if the value may be zero."""
        if item.may_vanish:
            raise Undefined("a division by zero")
        value = 1 / item.value
        return self.rounded(value, item.error + 2 * magnitude(value) + 2)

    def rational_power(self, base: Approx, power: Fraction) -> Approx:
        """Return base ** (p/q). If q is odd, the result is the real root."""
        if base.may_vanish and power < 0:
            raise Undefined("a division by zero")
        if base.may_vanish and power == 0:
            return self.rational(Fraction(1))
        if base.may_vanish:
            error = int(power * base.error) if power < 1 else base.error
            return Approx(self.mp.mpf(0), max(error + 2, NOTHING))
        if power.denominator == 1 and abs(power) < 1 << 16:
            value = base.value ** int(power)
        elif power.denominator % 2 and power.denominator < 1 << 16 and base.is_negative:
            value = (-1) ** power.numerator * self.mp.power(
                -base.value, self.mp.mpf(power.numerator) / power.denominator
            )
        else:
            if abs(power) * max(abs(base.magnitude), 1) > MAX_MAGNITUDE:
                raise TooLarge("a power of enormous size")
            value = self.mp.power(base.value, self.mp.mpf(power.numerator) / power.denominator)
        growth = abs(power.numerator).bit_length() - power.denominator.bit_length() + 2
        relative = max(
            base.error - base.magnitude + 2, -self.bits + max(abs(base.magnitude), 1).bit_length()
        )
        return self.rounded(value, magnitude(value) + relative + growth)

    def exp(self, item: Approx) -> Approx:
        """Return e raised to the power of a value."""
        if item.magnitude > 22:
            raise TooLarge("an exponential of enormous size")
        value = self.mp.exp(item.value)
        return self.rounded(
            value, magnitude(value) + max(item.error, item.magnitude - self.bits) + 2
        )

    def by_direction(self, name: str, item: Approx) -> Approx:
        """Return the logarithm or the complex angle of a value. `name` is the mpmath function, such
        as "log10" or "arg".
        """
        if item.may_vanish:
            raise Undefined(f"the {name} of zero")
        return self.rounded(getattr(self.mp, name)(item.value), item.error - item.magnitude + 3)

    def sign(self, item: Approx) -> Approx:
        """Return the sign of a value; raise Undecided if the value cannot be distinguished from
        zero.
        """
        if item.may_vanish:
            raise Undecided("rounding errors leave a sign unknown")
        return Approx(self.mp.sign(item.value), NOTHING)


Slope = Callable[[Any, Number, Number], Number]
"""A function that bounds how much an error in an argument grows. Its parameters are the mpmath
context, the argument, and the argument's error.
"""


def _smooth(name: str, slope: Slope) -> Callable[[Arithmetic, Approx], Approx]:
    """Return a function that applies the mpmath function `name` and gives the result an error
    bound.
    """

    def rule(arithmetic: Arithmetic, item: Approx) -> Approx:
        if item.magnitude > 100:
            raise TooLarge("a function of a huge number")
        error = max(item.error, item.magnitude - arithmetic.bits)
        value = getattr(arithmetic.mp, name)(item.value)
        growth = magnitude(slope(arithmetic.mp, item.value, arithmetic.mp.ldexp(1, error)))
        if 2 * growth > -error - 4:
            # only half of the bits of the result are certain, so compute with more bits
            arithmetic.widen(_HALVED)
        if growth > arithmetic.bits // 2 + 2:
            raise Undefined(f"a pole of {name}")
        return arithmetic.rounded(value, error + max(growth, 0) + 3)

    return rule


_HALVED = 400  # bits that are added where a result has only half as many certain bits


def _root(mp: Any, inside: Number, radius: Number) -> Number:
    """Bound the slope of a function whose derivative is 1 / sqrt(inside).

    If the argument's error `radius` is larger than `inside`, the slope may be infinite, but the
    function then changes by at most about sqrt(radius). In that case return 1 / sqrt(radius): the
    error times this value is sqrt(radius).
    """
    return 1 / mp.sqrt(max(abs(inside), radius))


_SLOPES: dict[str, Slope] = {
    "sin cos": lambda mp, x, radius: mp.cosh(mp.im(x)),
    "tan sec": lambda mp, x, radius: 1 / mp.cos(x) ** 2,
    "cot csc": lambda mp, x, radius: 1 / mp.sin(x) ** 2,
    "sinh cosh": lambda mp, x, radius: mp.cosh(mp.re(x)),
    "coth csch": lambda mp, x, radius: 1 / mp.sinh(x) ** 2,
    "tanh sech": lambda mp, x, radius: 1 / mp.cosh(x) ** 2,
    "arctan arccot": lambda mp, x, radius: 1 / (1 + x * x),
    "erf": lambda mp, x, radius: 2 * mp.exp(mp.im(x) ** 2),
    "arcsec arccsc": lambda mp, x, radius: _root(mp, x * x - 1, radius) / x,
    "arcsin arccos": lambda mp, x, radius: _root(mp, 1 - x * x, radius),
    "arcsinh": lambda mp, x, radius: _root(mp, 1 + x * x, radius),
    "arccosh": lambda mp, x, radius: _root(mp, x * x - 1, radius),
    "arctanh": lambda mp, x, radius: 1 / (1 - x * x),
}
FUNCTIONS: dict[str, Callable[[Arithmetic, Approx], Approx]] = {
    "ln": lambda arithmetic, item: arithmetic.by_direction("log", item),
    "log": lambda arithmetic, item: arithmetic.by_direction("log10", item),
    "abs": lambda arithmetic, item: Approx(abs(item.value), item.error + 1),
    "sign": Arithmetic.sign,
    "re": lambda arithmetic, item: Approx(arithmetic.mp.re(item.value), item.error),
    "im": lambda arithmetic, item: Approx(arithmetic.mp.im(item.value), item.error),
    "arg": lambda arithmetic, item: arithmetic.by_direction("arg", item),
    **{
        name: _smooth(name.replace("arc", "a"), slope)
        for names, slope in _SLOPES.items()
        for name in names.split()
    },
}


# ---- evaluating expression trees

Value = Fraction | Approx
Environment = Mapping[str, Fraction]
NOWHERE: Environment = {}


class Budget:
    """The limit on the work of one comparison: evaluation steps, weighted by the number of digits.

    The counted work is the same on every machine, so no verdict depends on the speed of the
    machine. As a safety net, the thread's CPU time is limited too. The clock is read rarely,
    because reading it is slow.
    """

    def __init__(self, limits: Limits) -> None:
        self.left = limits.work
        self.seconds = limits.seconds
        self.end: float | None = None
        self.spent_since_look = 0

    def spend(self, bits: int) -> None:
        """Count one evaluation step on numbers with this many bits; raise TooLarge if the budget is
        used up.
        """
        cost = 1 + bits // 256
        self.left -= cost
        if self.left < 0:
            raise TooLarge("too much work")
        self.spent_since_look += cost
        if self.spent_since_look > 4096:
            self.spent_since_look = 0
            now = time.thread_time()
            if self.end is None:
                self.end = now + self.seconds
            elif now > self.end:
                raise OutOfTime

    def check(self) -> None:
        """Raise TooLarge if the budget is used up."""
        if self.left < 0:
            raise TooLarge("too much work")


def exact(node: Node, limits: Limits, env: Environment = NOWHERE) -> Fraction:
    """Return the exact value of a tree. `env` has the values of its variables.

    Raises NotRational if a value is not rational, Undefined for a division by zero, and TooLarge if
    a limit is exceeded.
    """
    value = Evaluator(0, limits, env).value(node)
    assert isinstance(value, Fraction)
    return value


class Evaluator(Arithmetic):
    """An evaluator of trees for one set of variable values.

    It computes exactly while numbers are rational, and otherwise at one precision. At a precision
    of 0 bits, an irrational value raises NotRational. A tree that is not a number raises Undecided.
    """

    def __init__(
        self, bits: int, limits: Limits, env: Environment = NOWHERE, budget: Budget | None = None
    ) -> None:
        super().__init__(bits)
        self.limits = limits
        self.env = env
        self.budget = budget
        self.steps = 0

    def value(self, node: Node) -> Value:
        """Return the value of a tree, with an error bound if the value is not exact."""
        self.steps += 1
        if self.steps > self.limits.steps:
            raise TooLarge("evaluation takes too long")
        rule = _RULES.get(node.kind)
        if rule is None:
            raise self.lacking(f"a {node.kind} has no numeric value")
        try:
            result = rule(self, node)
            if self.budget:
                self.budget.spend(self.size_of(result))
            if node.kind in _SMALL and isinstance(result, Fraction):
                return result
            return self.checked(result)
        # mpmath raises ValueError where a function is infinite, such as gamma(0)
        except (ZeroDivisionError, ValueError) as error:
            raise Undefined(f"no value: {error}") from error

    def size_of(self, result: Value) -> int:
        """Return the size of a result in bits, which measures the cost of computing it."""
        if isinstance(result, Fraction):
            return result.numerator.bit_length() + result.denominator.bit_length()
        # A function value in mpmath costs as much as several multiplications, so count 4 times the
        # bits.
        return 4 * self.bits

    def lacking(self, why: str) -> Exception:
        """Return the error to raise for a tree without a numeric value.

        The error is NotRational if only exact values are allowed, and Undecided otherwise.
        """
        return Undecided(why) if self.bits else NotRational(why)

    def checked(self, result: Value) -> Value:
        """Return the value, or an approximation of it if it has too many digits for exact
        arithmetic.

        Raises Undefined if the value is not finite, and TooLarge if it is enormous.
        """
        if isinstance(result, Fraction):
            return result if self.fits(result) else self.approximate(result)
        if not self.mp.isfinite(result.value):
            raise Undefined("not finite")
        if abs(result.magnitude) > MAX_MAGNITUDE and result.magnitude != NOTHING:
            raise TooLarge("a number of enormous size")
        self.has_left_reals |= hasattr(result.value, "_mpc_")
        return result

    def fits(self, value: Fraction) -> bool:
        """Return True if a fraction is small enough for exact arithmetic."""
        return max(value.numerator.bit_length(), value.denominator.bit_length()) <= self.limits.bits

    def approximate(self, value: Value) -> Approx:
        """Return a value as an approximation; raise NotRational if only exact values are allowed."""
        if isinstance(value, Approx):
            return value
        if not self.bits and self.fits(value):
            raise NotRational("a function")
        if not self.bits:
            raise TooLarge(f"a number with more than {self.limits.bits} bits")
        return self.rational(value)

    def symbol(self, node: Node) -> Value:
        """Return the value of a variable."""
        bound = self.env.get(node.text)
        if bound is None:
            raise self.lacking(f"no value for {node.text}")
        return bound

    def constant(self, node: Node) -> Value:
        """Return pi, e or i as an approximation; raise NotRational if only exact values are
        allowed.
        """
        if not self.bits:
            raise NotRational(node.text)
        if node.text == "i":
            return Approx(self.mp.mpc(0, 1), NOTHING)
        if node.text == "inf":
            raise Undecided("infinity in an expression")
        return Approx(+(self.mp.pi if node.text == "pi" else self.mp.e), 3 - self.bits)

    def add(self, node: Node) -> Value:
        """Return a sum; its rational terms are added exactly."""
        whole, terms = self.split(node, operator.add, Fraction(0))
        if not terms:
            return whole
        terms += [self.approximate(whole)] if whole else []
        total = self.mp.mpf(0)
        error = NOTHING
        for index, term in enumerate(terms):
            total += term.value
            error = max(error, term.error, magnitude(total) - self.bits)
            if index < 8 or index % 8 == 0:
                error += 1
        sizes = {term.magnitude for term in terms} - {NOTHING}
        if sizes:
            self.widen(max(sizes) - min(sizes))
        return Approx(total, error)

    def mul(self, node: Node) -> Value:
        """Return a product; its rational factors are multiplied exactly."""
        whole, factors = self.split(node, operator.mul, Fraction(1))
        total: Value = whole
        for factor in factors if whole else ():
            total = factor if total == 1 else self.times(self.approximate(total), factor)
        return total

    def split(
        self, node: Node, operation: Callable[[Fraction, Fraction], Fraction], start: Fraction
    ) -> tuple[Fraction, list[Approx]]:
        """Combine the rational arguments of a node exactly, as long as the result has few digits.

        Return the combined value, and the other arguments as approximations.
        """
        whole = start
        others = list[Approx]()
        for arg in node.args:
            value = self.value(arg)
            if isinstance(value, Fraction):
                together = operation(whole, value)
                if self.fits(together):
                    whole = together
                    continue
            others.append(self.approximate(value))
        return whole, others

    def pow(self, node: Node) -> Value:
        """Return a power. Raises Undefined for a negative base if the exponent contains a variable
        and is not an integer.
        """
        base, exponent = node.args
        power = self.value(exponent)
        left = self.value(base)
        below = left < 0 if isinstance(left, Fraction) else left.is_negative and not left.may_vanish
        if below and not _is_whole(power) and variables(exponent):
            raise Undefined("a negative number to a variable power")
        return self.power(left, power)

    def power(self, base: Value, power: Value) -> Value:
        """Return one value raised to the power of another. It is exact if the result is
        rational.
        """
        if isinstance(base, Fraction) and isinstance(power, Fraction):
            try:
                return rational_power(base, power, self.limits)
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
        """Return a root of any degree, such as a cube root."""
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
        """Return the number that a value with a percent or degree sign stands for, such as 1/2 for
        50 %.
        """
        return self.value(Node("mul", (*node.args, *_SCALES[node.kind])))

    def sum(self, node: Node) -> Value:
        """Return the value of a sum or product over an index. Every term must be rational."""
        body, variable, lower, upper = node.args
        low = self.value(lower)
        high = self.value(upper)
        if not _is_whole(low) or not _is_whole(high):
            raise self.lacking("bounds of a sum")
        first = int(low)
        last = int(high)
        if last - first >= self.limits.terms:
            raise TooLarge(f"more than {self.limits.terms} terms")
        total = Fraction(int(node.text == "prod"))
        outer = self.env
        for index in range(first, last + 1):
            self.env = {**outer, variable.text: Fraction(index)}
            term = self.value(body)
            if not isinstance(term, Fraction):
                raise Undecided("a sum of terms that are not rational")
            total = total + term if node.text == "sum" else total * term
            if not self.fits(total):
                raise TooLarge(f"an integer with more than {self.limits.bits} bits")
        self.env = outer
        return total

    def cases(self, node: Node) -> Value:
        """Return the value of the first case whose condition is true; raise Outside if none is
        true.
        """
        for value, condition in zip(node.args[::2], node.args[1::2], strict=True):
            if self.holds(condition):
                return self.value(value)
        raise Outside("no case applies")

    def holds(self, condition: Node) -> bool:
        """Return True if a condition is true for these values of the variables.

        Raises Undecided if the condition does not compare numbers.
        """
        if condition.kind == "list" and condition.text != "mixed":
            parts = (self.holds(part) for part in condition.args)
            return any(parts) if condition.text == "or" else all(parts)
        if condition == OTHERWISE:
            return True
        if condition.kind != "relation":
            raise Undecided("a condition that is written in words")
        signs = condition.text.split()
        return all(
            self.compare(a, s, b)
            for a, s, b in zip(condition.args, signs, condition.args[1:], strict=False)
        )

    def compare(self, left: Node, sign: str, right: Node) -> bool:
        """Return True if the relation `sign` holds between two sides. The sides of a congruence may
        differ by a multiple of the modulus.
        """
        if right.kind == "congruence" and sign in ("=", "!="):
            turns = self.difference(left, right.args[0]) / self.difference(right.args[1], number(0))
            return (turns.denominator == 1) == (sign == "=")
        if sign not in _ORDERS:
            raise Undecided(f"the condition {sign}")
        return _ORDERS[sign](self.difference(left, right), 0)

    def difference(self, left: Node, right: Node) -> Fraction:
        """Return left - right if it is rational, or else only its sign as 1 or -1."""
        gap = self.value(minus(left, right))
        if isinstance(gap, Fraction):
            return gap
        if gap.may_vanish or gap.is_complex:
            raise Undecided("rounding errors leave it unknown whether a condition is true")
        return Fraction(1 if gap.value.real > 0 else -1)

    def call(self, node: Node) -> Value:
        """Return a pseudo-random number as the value of an unknown function.

        It depends only on the function's name and arguments, so the same call always has the same
        value.
        """
        parts = [self.approximate(self.value(arg)) for arg in node.args]
        key = node.text + "".join("/" + self.mp.nstr(part.value, 40) for part in parts)
        digest = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return self.rational(Fraction(digest, 1 << 62))

    def func(self, node: Node) -> Value:
        """Return the value of a known function. It is exact for rational arguments if possible."""
        if node.text == "mod":
            modulus = self.value(node.args[1])
            if _is_whole(modulus) and modulus != 0:
                rest = remainder(node.args[0], int(modulus))
                if rest is not None:
                    return Fraction(rest)
        args = [self.value(arg) for arg in node.args]
        known = [arg for arg in args if isinstance(arg, Fraction)]
        if len(known) == len(args) and node.text in EXACT:
            try:
                return EXACT[node.text](known, self.limits)
            except NotRational:
                if not self.bits:
                    raise
        near = [self.approximate(arg) for arg in args]
        if node.text not in FUNCTIONS and max(item.magnitude for item in near) > self.limits.bits:
            raise TooLarge(f"{node.text} of a number with more than {self.limits.bits} bits")
        if node.text in ("floor", "ceil"):
            return self.stepped(node.text, near[0])
        if node.text == "max":
            return max(near, key=lambda item: self.mp.re(item.value))
        if node.text == "min":
            return min(near, key=lambda item: self.mp.re(item.value))
        rule = FUNCTIONS.get(node.text)
        if rule is None:
            raise Undecided(f"the function {node.text}")
        size = near[0].magnitude
        if size != NOTHING:
            # If |x| is about 2**size, tanh(x), coth(x) and erf(x) may differ from 1 by only 2**-(3
            # * 4**size). So more bits are needed.
            is_flat = node.text in ("tanh", "coth", "erf") and size > 0
            self.widen(3 << min(2 * size, 20) if is_flat else 2 * abs(size))
        return rule(self, near[0])

    def stepped(self, name: str, item: Approx) -> Approx:
        """Return the floor or ceiling of a value.

        A value within its error bound of an integer is regarded as this integer.
        """
        if item.is_complex:
            raise Undecided("floor or ceil of a complex number")
        nearest = self.mp.nint(item.value)
        if magnitude(nearest - item.value) <= item.error + 8:
            if item.error > 16 - self.bits + max(item.magnitude, 0):
                raise Undecided("rounding errors leave the value of floor or ceil unknown")
            return Approx(nearest, NOTHING)
        step = self.mp.floor if name == "floor" else self.mp.ceil
        return Approx(step(item.value), NOTHING)


def _is_whole(value: Value) -> TypeGuard[Fraction]:
    return isinstance(value, Fraction) and value.denominator == 1


# Exact values of these nodes are not checked for size here. Sums and products check it while they
# are computed.
_SMALL = frozenset({"number", "symbol", "add", "mul"})
_SCALES = {"percent": (number(Fraction(1, 100)),), "degree": (number(Fraction(1, 180)), PI)}
_ORDERS: dict[str, Callable[[Fraction, int], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq, "!=": operator.ne,
}  # fmt: skip
_KINDS = "symbol constant add mul pow root cases call func sum".split()
_RULES: dict[str, Callable[[Evaluator, Node], Value]] = {
    "number": lambda evaluator, node: node.value or Fraction(),
    "based": lambda evaluator, node: Fraction(digits_in_base(node)),
    **dict.fromkeys(_SCALES, Evaluator.scaled),
    **{kind: getattr(Evaluator, kind) for kind in _KINDS},
}
