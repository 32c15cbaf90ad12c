"""Real and complex functions by name, each with the derivative its error grows by."""

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


_SLOPES: dict[str, Callable[[Any, Number], Number]] = {
    "sin cos": _circular,
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
    "abs": Arithmetic.abs,
    "sign": Arithmetic.sign,
    "re": Arithmetic.real,
    "im": Arithmetic.imaginary,
    "arg": Arithmetic.argument,
    **{name: _smooth(name.replace("arc", "a"), slope) for names, slope in _SLOPES.items() for name in names.split()},
}
