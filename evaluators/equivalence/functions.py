"""Real and complex functions by name, each with the derivative its error grows by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atts.evaluators.equivalence.approx import Approx, Arithmetic, Number, is_complex, magnitude
from atts.evaluators.verdict import Enormous, Undefined


def _smooth(name: str, slope: Callable[[Any, Number], Number]) -> Callable[[Arithmetic, Approx], Approx]:
    """A function of mpmath with the derivative its error grows by."""

    def rule(arithmetic: Arithmetic, item: Approx) -> Approx:
        if item.magnitude > 100:
            raise Enormous("a function of a huge number")
        try:
            value = getattr(arithmetic.mp, name)(item.value)
            growth = magnitude(slope(arithmetic.mp, item.value))
        except (ValueError, ZeroDivisionError) as error:
            raise Undefined(f"{name}: {error}") from error
        if growth > arithmetic.bits // 2:
            raise Undefined(f"a pole of {name}")
        noise = max(item.error, item.magnitude - arithmetic.bits)
        return arithmetic.rounded(value, noise + max(growth, 0) + 3)

    return rule


def _circular(mp: Any, x: Number) -> Number:
    return mp.cosh(mp.im(x)) if is_complex(x) else mp.mpf(1)


def _root_slope(sign: int, one: int) -> Callable[[Any, Number], Number]:
    def slope(mp: Any, x: Number) -> Number:
        inside = abs(one + sign * x * x)
        return 1 / mp.sqrt(inside) if magnitude(inside) > -mp.prec // 2 else mp.mpf(1)

    return slope


FUNCTIONS: dict[str, Callable[[Arithmetic, Approx], Approx]] = {
    "ln": Arithmetic.ln,
    "log": Arithmetic.log,
    "abs": Arithmetic.abs,
    "sign": Arithmetic.sign,
    "re": Arithmetic.real,
    "im": Arithmetic.imaginary,
    "arg": Arithmetic.argument,
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
