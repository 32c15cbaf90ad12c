"""Powers, roots and functions of rational numbers, exact where their values are rational and of bounded size."""

import math
from collections.abc import Callable
from fractions import Fraction

from atts.evaluators.syntax.tree import Node
from atts.evaluators.verdict import Limits, TooLarge, Undefined


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

    Raises Undefined for zero to a negative power, NotRational for irrational roots, TooLarge past the bit cap.
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
        while (better := ((index - 1) * root + value // root ** (index - 1)) // index) < root:  # Newton from above
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
        raise Undefined("the logarithm of zero") if at and not args[0] else NotRational("transcendental")

    return rule


FUNCTIONS: dict[str, Callable[[list[Fraction], Limits], Fraction]] = {
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
