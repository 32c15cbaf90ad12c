"""A worker process that compares two expressions with sympy, and imports no module of atts."""

# The module `algebra.py` starts this file as a script. Each question is one line of JSON with two
# expression trees. Each reply is one line: true, false, null (undecided), "time" or "memory". sympy
# objects are built from the nodes of the trees. So this process never parses or executes the text
# of an answer.

import importlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

# import_module hides sympy from type checkers, because its type annotations do not help here
sympy: Any = importlib.import_module("sympy")

_MEMORY = 3 << 30  # limit on the address space of this process, in bytes
_DIGITS = 40
# Two values differ clearly if their relative difference is above this value. Errors of numerical
# integration are smaller.
_CLEARLY = sympy.Float(10) ** -12

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ln": sympy.log,
    "log": lambda x: sympy.log(x) / sympy.log(10),
    "abs": sympy.Abs,
    "ceil": sympy.ceiling,
    "max": sympy.Max,
    "min": sympy.Min,
    "double_factorial": sympy.factorial2,
    "binom": sympy.binomial,
    "mod": sympy.Mod,
    "det": lambda x: x.det(),
}
_SAME_NAME = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth sech csch floor factorial gcd lcm re im arg sign "
    "erf gamma zeta".split()
)
_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": sympy.Lt,
    ">": sympy.Gt,
    "<=": sympy.Le,
    ">=": sympy.Ge,
    "=": sympy.Eq,
    "!=": sympy.Ne,
}
_DIRECTIONS = {"lim": "+-", "lim+": "+", "lim-": "-"}

# A tree in JSON: the kind, the text and the value (a fraction as text) of its root, and its child
# trees.
Tree = tuple[str, str, str, list[Any]]


class Unknown(Exception):
    """The tree cannot be expressed in sympy."""


class TimeIsUp(BaseException):
    """The time for a question is used up. This is a BaseException, so that no handler in sympy
    catches it.
    """


class Builder:
    """A builder of sympy objects from trees. A name that is in both trees gives the same symbol."""

    def __init__(self, *trees: Tree, positive: Sequence[str] = ()) -> None:
        self.assumptions = {name: {"positive": True} for name in positive}
        # True if the trees contain an integral without bounds. The value of such an integral is
        # known only up to a constant.
        self.indefinite = False
        for tree in trees:
            self.assume(tree)

    def assume(self, tree: Tree) -> None:
        """Record what the tree implies about its variables.

        An index of a sum is an integer, and variables in the index's bounds are positive integers.
        The variable x is positive if the tree contains x > 0.
        """
        kind, text, _, args = tree
        if kind == "sum":
            self.assumptions[args[1][1]] = {"integer": True}
            for bound in args[2:]:
                for name in _names(bound):
                    self.assumptions[name] = {"integer": True, "positive": True}
        if kind == "relation" and text == ">" and args[0][0] == "symbol" and args[1][2] == "0":
            self.assumptions[args[0][1]] = {"positive": True}
        for arg in args:
            self.assume(arg)

    def symbol(self, name: str) -> Any:
        """Return the sympy symbol for a name. It has the properties that `assume` recorded, or else
        is real.
        """
        return sympy.Symbol(name, **self.assumptions.get(name, {"real": True}))

    def build(self, tree: Tree) -> Any:
        """Return the sympy object for a tree; raise Unknown if there is none."""
        kind, text, value, args = tree
        if value and kind == "number":
            return sympy.Rational(value)
        if kind == "symbol":
            return self.symbol(text)
        if kind == "constant":
            return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}[text]
        if kind == "based":
            return sympy.Integer(int(text, int(value)))
        if kind == "opaque" or kind == "sum":
            return self.operator(kind, text, args)
        if kind == "matrix":
            return sympy.Matrix([[self.build(cell) for cell in row[3]] for row in args])
        if kind == "cases":
            return self.piecewise(args)
        if kind in ("union", "setminus"):
            combine = sympy.Union if kind == "union" else sympy.Complement
            return combine(*(self.region(arg) for arg in args))
        parts = [self.build(arg) for arg in args]
        match kind:
            case "add":
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                return total
            case "mul":
                total = parts[0]
                for part in parts[1:]:
                    total = total * part
                return total
            case "pow":
                return parts[0] ** parts[1]
            case "root":
                return self.root(*parts)
            case "percent":
                return parts[0] / 100
            case "degree":
                return parts[0] * sympy.pi / 180
            case "func":
                return self.function(text, parts)
            case "call":
                return sympy.Function(text)(*parts)
            case "set":
                return sympy.FiniteSet(*parts)
            case _:
                raise Unknown(kind)

    def region(self, tree: Tree) -> Any:
        """Return the sympy set for a tree. A pair in brackets is an interval."""
        kind, text, _, args = tree
        if kind == "tuple" and text in ("()", "[]", "(]", "[)") and len(args) == 2:
            low, high = (self.build(arg) for arg in args)
            return sympy.Interval(low, high, text[0] == "(", text[1] == ")")
        return self.build(tree)

    def root(self, radicand: Any, index: Any) -> Any:
        """Return a root. An odd root of a negative number is its real root."""
        if index.is_odd and radicand.is_negative:
            return -sympy.root(-radicand, index)
        return sympy.root(radicand, index)

    def function(self, name: str, args: list[Any]) -> Any:
        """Apply a known function to its arguments."""
        if name.startswith("arc"):
            return getattr(sympy, "a" + name[3:])(*args)
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*args)
        if name in _SAME_NAME:
            return getattr(sympy, name)(*args)
        raise Unknown(name)

    def operator(self, kind: str, text: str, args: list[Tree]) -> Any:
        """Return the value of a sum, product, integral, limit, derivative or intersection."""
        if text == "cap":
            return sympy.Intersection(*(self.region(arg) for arg in args))
        parts = [self.build(arg) for arg in args]
        if kind == "sum":
            body, index, low, high = parts
            whole = (sympy.Sum if text == "sum" else sympy.Product)(body, (index, low, high))
            return _where_it_converges(whole.doit())
        if text == "int" and len(parts) == 4:
            return _where_it_converges(sympy.Integral(parts[0], tuple(parts[1:])).doit())
        if text == "int" and len(parts) == 2:
            self.indefinite = True
            return sympy.Integral(*parts).doit()
        if text in _DIRECTIONS:
            return sympy.limit(*parts, _DIRECTIONS[text])
        if text == "diff":
            return sympy.diff(*parts)
        raise Unknown(text)

    def piecewise(self, args: list[Tree]) -> Any:
        """Return the sympy expression that selects the value of the first true case."""
        pairs = [
            (self.build(value), self.condition(condition))
            for value, condition in zip(args[::2], args[1::2], strict=True)
        ]
        return sympy.Piecewise(*pairs)

    def condition(self, tree: Tree) -> Any:
        """Return the sympy form of a condition on variables."""
        kind, text, _, args = tree
        if kind == "word" and text == "otherwise":
            return True
        if kind == "list" and text != "mixed":
            parts = [self.condition(arg) for arg in args]
            return sympy.Or(*parts) if text == "or" else sympy.And(*parts)
        if kind != "relation":
            raise Unknown(kind)
        sides = [self.build(arg) for arg in args]
        links = zip(sides, text.split(), sides[1:], strict=False)
        return sympy.And(*(_RELATIONS[sign](left, right) for left, sign, right in links))


def _where_it_converges(whole: Any) -> Any:
    """Return the closed form of a series or integral, on the assumption that it converges."""
    is_conditional = isinstance(whole, sympy.Piecewise) and len(whole.args) == 2
    if is_conditional and whole.args[1][0].has(sympy.Sum, sympy.Integral, sympy.Product):
        return whole.args[0][0]
    return whole


def _names(tree: Tree) -> list[str]:
    kind, text, _, args = tree
    return [text] if kind == "symbol" else [name for arg in args for name in _names(arg)]


def are_equal(one: Tree, two: Tree, positive: Sequence[str] = ()) -> bool | None:
    """Return True or False if sympy can decide whether two trees are equal, else None."""
    builder = Builder(one, two, positive=positive)
    left = builder.build(one)
    right = builder.build(two)
    if isinstance(left, sympy.MatrixBase) or isinstance(right, sympy.MatrixBase):
        return _matrices(left, right)
    if isinstance(left, sympy.Set) or isinstance(right, sympy.Set):
        if not (isinstance(left, sympy.Set) and isinstance(right, sympy.Set)):
            return False
        gap = sympy.SymmetricDifference(left, right)
        return None if gap.is_empty is None else bool(gap.is_empty)
    if builder.indefinite:
        return _antiderivatives(left, right, one, two)
    return _expressions(left, right)


def _matrices(left: Any, right: Any) -> bool | None:
    if not (isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase)):
        return False
    if left.shape != right.shape:
        return False
    verdicts = [_expressions(one, two) for one, two in zip(left, right, strict=True)]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _antiderivatives(left: Any, right: Any, one: Tree, two: Tree) -> bool | None:
    """Compare an integral without bounds with an antiderivative.

    If they agree, but the antiderivative lacks an arbitrary constant, the result is None.
    """
    written = one if one[0] != "opaque" else two
    integral = two if written is one else one
    if integral[0] != "opaque" or len(integral[3]) != 2:
        return None
    variable = integral[3][1][1]
    symbol = sympy.Symbol(variable, real=True)
    verdict = _expressions(sympy.diff(left, symbol), sympy.diff(right, symbol))
    names_constant = not {"C", "c", "K", "C_1", "c_1"}.isdisjoint(_names(written))
    if verdict and written[0] != "opaque" and not names_constant:
        return None
    return verdict


def _expressions(left: Any, right: Any) -> bool | None:
    """Compare two expressions; return None if sympy cannot decide.

    They differ if their values clearly differ, and are equal if sympy finds a proof.
    """
    if left == right:
        return True
    infinite = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
    if left in infinite or right in infinite:
        return None if sympy.nan in (left, right) or sympy.zoo in (left, right) else False
    gap = left - right
    # Comparing numeric values takes less time than a proof, so do it first.
    if _has_clear_gap(left, right):
        return False
    # If one method of proof raises an error, try the next method.
    with suppress(Exception):
        if sympy.simplify(gap) == 0:
            return True
    with suppress(Exception):
        if gap.equals(0):
            return True
    with suppress(Exception):
        if _is_zero_on_each_side(gap):
            return True
    with suppress(Exception):
        rewritten = sympy.simplify(gap.rewrite(sympy.gamma))
        if sympy.gammasimp(sympy.expand_func(rewritten)) == 0:
            return True
    return None


def _is_zero_on_each_side(gap: Any) -> bool:
    """Return True if sympy proves that a difference is zero for positive and for negative values of
    its only variable.
    """
    names = [name for name in gap.free_symbols if not name.is_integer and not name.is_positive]
    if len(names) != 1:
        return False
    size = sympy.Dummy("size", positive=True)
    return all(sympy.simplify(gap.subs(names[0], value)) == 0 for value in (size, -size))


def _has_clear_gap(left: Any, right: Any) -> bool:
    """Return True if the values of two expressions differ by far more than the rounding error.

    They must differ at two points, or at one point if they have no variables.
    """
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    seen = 0
    for index in range(4):
        point = {}
        for at, name in enumerate(names):
            size = 3 + index + 2 * at
            is_count = name.is_integer
            point[name] = sympy.Integer(size) if is_count else sympy.Rational(7 * size + 4, 5)
        with suppress(Exception):
            one = left.subs(point).doit().evalf(_DIGITS)
            two = right.subs(point).doit().evalf(_DIGITS)
            if not (one.is_number and two.is_number):
                continue
            if one.has(sympy.nan, sympy.zoo, sympy.oo) or two.has(sympy.nan, sympy.zoo, sympy.oo):
                continue
            size = max(abs(one), abs(two), sympy.S.One / 10**6)
            if abs(one - two) > size * _CLEARLY:
                seen += 1
            if seen == 2 or (seen and not names):
                return True
    return False


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _time_is_up(*_: object) -> None:
    raise TimeIsUp


def main() -> None:
    """Answer the questions on standard input until it ends. Each question has a time limit."""
    _limit_memory()
    signal.signal(signal.SIGALRM, _time_is_up)
    print("ready", flush=True)  # noqa: T201  # the protocol's first line
    for line in sys.stdin:
        reply: bool | str | None = None
        try:
            question = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, question["seconds"])
            reply = are_equal(question["one"], question["two"], question["positive"])
        except TimeIsUp:
            reply = "time"
        except MemoryError:
            reply = "memory"
        except Exception:  # noqa: BLE001  # after any error, sympy has not decided
            reply = None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
