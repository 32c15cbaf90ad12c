"""Powers, roots and functions of numbers: exact while they stay rational, else with a running error
bound.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from atts.evaluators.syntax.tree import Node
from atts.evaluators.verdict import Limits, TooLarge, Undecided, Undefined


class NotRational(Exception):
    """The value is not rational, or not found to be by these rules; numbers can still be probed."""


def digits_in_base(node: Node) -> int:
    """The integer a numeral with a base denotes; raises Undefined for a digit the base lacks."""
    assert node.value is not None
    try:
        return int(node.text, int(node.value))
    except ValueError as error:
        raise Undefined(f"{node.text!r} in base {node.value}") from error


def rational_power(base: Fraction, exponent: Fraction, limits: Limits) -> Fraction:
    """base ** exponent when rational; odd roots of negative numbers are the real ones.

    Raises Undefined for zero to a negative power, NotRational for irrational roots, TooLarge past
    the bit cap.
    """
    if base == 0 and exponent < 0:
        raise Undefined("a division by zero")
    if exponent.denominator != 1:
        base = _rational_root(base, exponent.denominator)
    if abs(base) == 1:
        return base ** (exponent.numerator % 2)
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base and size * abs(exponent.numerator) > limits.bits + size:
        raise TooLarge(f"a power past {limits.bits} bits")
    return base**exponent.numerator


def _rational_root(base: Fraction, index: int) -> Fraction:
    if index > 200 or (base < 0 and index % 2 == 0):
        raise NotRational("a root")
    if base < 0:
        return -_rational_root(-base, index)
    return Fraction(_integer_root(base.numerator, index), _integer_root(base.denominator, index))


def _integer_root(value: int, index: int) -> int:
    """The exact integer root; raises NotRational when there is none."""
    if index == 2 or value < 2:
        root = math.isqrt(value)
    else:
        root = 1 << -(-value.bit_length() // index)
        while (
            better := ((index - 1) * root + value // root ** (index - 1)) // index
        ) < root:  # Newton from above
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
        raise TooLarge("a factorial past the bit cap")
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
            raise TooLarge("a binomial past the bit cap")
        return Fraction(math.comb(int(n), int(k)))
    if k > 200:
        raise TooLarge("a generalised binomial")
    return math.prod((n - i for i in range(int(k))), start=Fraction(1)) / math.factorial(int(k))


def _lcm(args: list[Fraction], limits: Limits) -> Fraction:
    if sum(int(arg).bit_length() for arg in args) > limits.bits:
        raise TooLarge("a least common multiple")
    return Fraction(math.lcm(*map(_whole, args)))


def _only(at: int, value: int) -> Callable[[list[Fraction], Limits], Fraction]:
    """A transcendental function, rational at one point alone; a logarithm has no value at 0."""

    def rule(args: list[Fraction], limits: Limits) -> Fraction:
        if args[0] == at:
            return Fraction(value)
        raise (
            Undefined("the logarithm of zero")
            if at and not args[0]
            else NotRational("transcendental")
        )

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
    "sign": lambda args, limits: Fraction((args[0] > 0) - (args[0] < 0)),
    "re": lambda args, limits: args[0],
    "im": lambda args, limits: Fraction(0),
    "cos": _only(0, 1),
    **dict.fromkeys(("sin", "tan", "arctan", "arcsin"), _only(0, 0)),
    **dict.fromkeys(("ln", "log"), _only(1, 0)),
}


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


# mpmath's cache of constants, shared by all threads, is filled without a lock: once, here, past any
# precision used
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
    return (
        max((exponent + bits if mantissa else NOTHING) for _, mantissa, exponent, bits in parts) + 1
    )


class Arithmetic:
    """Arithmetic at one precision; every result carries the error it has gathered.

    `spread` is the precision that what was computed asks for: a term beside which another is
    2**spread times larger. `has_left_reals` says that some part of what was computed is no real
    number.
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
        """A computed value whose inputs' errors amount to `error`; rounding at this precision is
        added.
        """
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
        if base.may_vanish and power < 0:
            raise Undefined("a division by zero")
        if base.may_vanish and power == 0:
            return self.rational(Fraction(1))
        if base.may_vanish:
            return Approx(
                self.mp.mpf(0),
                max((int(power * base.error) if power < 1 else base.error) + 2, NOTHING),
            )
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
        """e to the item."""
        if item.magnitude > 22:
            raise TooLarge("an exponential of enormous size")
        value = self.mp.exp(item.value)
        return self.rounded(
            value, magnitude(value) + max(item.error, item.magnitude - self.bits) + 2
        )

    def by_direction(self, name: str, item: Approx) -> Approx:
        """A function whose slope is one over its argument: the logarithm, and its imaginary part."""
        if item.may_vanish:
            raise Undefined(f"the {name} of zero")
        return self.rounded(getattr(self.mp, name)(item.value), item.error - item.magnitude + 3)

    def sign(self, item: Approx) -> Approx:
        if item.may_vanish:
            raise Undecided("a sign too close to call")
        return Approx(self.mp.sign(item.value), NOTHING)


def _smooth(
    name: str, slope: Callable[[Any, Number], Number]
) -> Callable[[Arithmetic, Approx], Approx]:
    """A function of mpmath with the derivative its error grows by."""

    def rule(arithmetic: Arithmetic, item: Approx) -> Approx:
        if item.magnitude > 100:
            raise TooLarge("a function of a huge number")
        value = getattr(arithmetic.mp, name)(item.value)
        growth = magnitude(slope(arithmetic.mp, item.value))
        if growth > arithmetic.bits // 2:
            raise Undefined(f"a pole of {name}")
        return arithmetic.rounded(
            value, max(item.error, item.magnitude - arithmetic.bits) + max(growth, 0) + 3
        )

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
