"""Arithmetic and functions of numbers with a running error bound, in a private context of each thread."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from atts.evaluators.verdict import TooLarge, Undecided, Undefined

Number = Any  # an mpf or mpc of the thread's context; mpmath has no types
NOTHING = -(10**9)  # the magnitude of zero
MAX_MAGNITUDE = 1 << 24  # bits of exponent past which a value is not computed

_local = threading.local()


def context(bits: int) -> Any:
    """This thread's own arithmetic at `bits` of precision."""
    arithmetic = getattr(_local, "context", None)
    if arithmetic is None:
        arithmetic = _local.context = mpmath.MPContext()
    arithmetic.prec = bits
    return arithmetic


# mpmath's cache of constants, shared by all threads, is filled without a lock: once, here, past any precision used
_CONSTANTS = [+getattr(context(6_500), name) for name in ("pi", "e", "ln2", "ln10")]


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
    def is_complex(self) -> bool:
        """Whether it has an imaginary part."""
        return hasattr(self.value, "_mpc_") and bool(self.value.imag)

    @property
    def is_negative(self) -> bool:
        """Whether it is a negative real number, or close to one."""
        return not self.is_complex and bool(self.value.real < 0)

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


class Arithmetic:
    """Arithmetic at one precision; every result carries the error it has gathered.

    `spread` is the precision that what was computed asks for: a term beside which another is 2**spread times larger.
    `has_left_reals` says that some part of what was computed is no real number.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.mp: Any = context(bits) if bits else None
        self.spread = 0
        self.has_left_reals = False

    def widen(self, bits: int) -> None:
        """Note that so many bits lie between the largest and the smallest magnitude that meet."""
        if bits > 32:
            self.spread = max(self.spread, bits)

    def rounded(self, value: Number, error: int) -> Approx:
        """A computed value whose inputs' errors amount to `error`; rounding at this precision is added."""
        return Approx(value, max(error, magnitude(value) - self.bits) + 1)

    def rational(self, value: Fraction) -> Approx:
        """An exact rational as an approximation."""
        number = self.mp.mpf(value.numerator) / value.denominator
        self.widen(max(value.numerator.bit_length(), value.denominator.bit_length()))
        return Approx(number, magnitude(number) - self.bits + 1)

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

    def rational_power(self, base: Approx, power: Fraction) -> Approx:
        """base ** (p/q), the real root where q is odd."""
        if base.may_vanish:
            return self.zero_power(base, power)
        if power.denominator == 1 and abs(power) < 1 << 16:
            value = base.value ** int(power)
        elif power.denominator % 2 and power.denominator < 1 << 16 and base.is_negative:
            flips = -1 if power.numerator % 2 else 1
            value = flips * self.mp.power(-base.value, self.mp.mpf(power.numerator) / power.denominator)
        else:
            if abs(power) * max(abs(base.magnitude), 1) > MAX_MAGNITUDE:
                raise TooLarge("a power of enormous size")
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

    def exp(self, item: Approx) -> Approx:
        """e to the item."""
        if item.magnitude > 22:
            raise TooLarge("an exponential of enormous size")
        value = self.mp.exp(item.value)
        return self.rounded(value, magnitude(value) + max(item.error, item.magnitude - self.bits) + 2)

    def ln(self, item: Approx) -> Approx:
        """The principal logarithm."""
        return self.by_direction("log", item)

    def by_direction(self, name: str, item: Approx) -> Approx:
        """A function whose slope is one over its argument: the logarithm, and its imaginary part."""
        if item.may_vanish:
            raise Undefined(f"the {name} of zero")
        return self.rounded(getattr(self.mp, name)(item.value), item.error - item.magnitude + 3)

    def log(self, item: Approx) -> Approx:
        return self.times(self.ln(item), self.inverse(self.ln(self.rational(Fraction(10)))))

    def sign(self, item: Approx) -> Approx:
        if item.may_vanish:
            raise Undecided("a sign too close to call")
        return Approx(self.mp.sign(item.value), NOTHING)


def _smooth(name: str, slope: Callable[[Any, Number], Number]) -> Callable[[Arithmetic, Approx], Approx]:
    """A function of mpmath with the derivative its error grows by."""

    def rule(arithmetic: Arithmetic, item: Approx) -> Approx:
        if item.magnitude > 100:
            raise TooLarge("a function of a huge number")
        value = getattr(arithmetic.mp, name)(item.value)
        growth = magnitude(slope(arithmetic.mp, item.value))
        if growth > arithmetic.bits // 2:
            raise Undefined(f"a pole of {name}")
        noise = max(item.error, item.magnitude - arithmetic.bits)
        return arithmetic.rounded(value, noise + max(growth, 0) + 3)

    return rule


def _root_slope(sign: int, one: int) -> Callable[[Any, Number], Number]:
    def slope(mp: Any, x: Number) -> Number:
        inside = abs(one + sign * x * x)
        return 1 / mp.sqrt(inside) if magnitude(inside) > -mp.prec // 2 else mp.mpf(1)

    return slope


_SLOPES: dict[str, Callable[[Any, Number], Number]] = {
    "sin cos": lambda mp, x: mp.cosh(mp.im(x)),
    "tan sec": lambda mp, x: 1 / mp.cos(x) ** 2,
    "cot csc": lambda mp, x: 1 / mp.sin(x) ** 2,
    "sinh cosh": lambda mp, x: mp.cosh(mp.re(x)),
    "coth csch": lambda mp, x: 1 / mp.sinh(x) ** 2,
    "tanh sech arctan arccot": lambda mp, x: mp.mpf(1),
    "erf": lambda mp, x: mp.mpf(2),
    "arcsec arccsc": lambda mp, x: mp.mpf(4),
    "arcsin arccos": _root_slope(-1, 1),
    "arcsinh": _root_slope(1, 1),
    "arccosh": _root_slope(1, -1),
    "arctanh": lambda mp, x: 1 / (1 - x * x),
}
FUNCTIONS: dict[str, Callable[[Arithmetic, Approx], Approx]] = {
    "ln": Arithmetic.ln,
    "log": Arithmetic.log,
    "abs": lambda arithmetic, item: Approx(abs(item.value), item.error + 1),
    "sign": Arithmetic.sign,
    "re": lambda arithmetic, item: Approx(arithmetic.mp.re(item.value), item.error),
    "im": lambda arithmetic, item: Approx(arithmetic.mp.im(item.value), item.error),
    "arg": lambda arithmetic, item: arithmetic.by_direction("arg", item),
    **{name: _smooth(name.replace("arc", "a"), slope) for names, slope in _SLOPES.items() for name in names.split()},
}
