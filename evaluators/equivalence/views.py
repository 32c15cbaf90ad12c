"""Alternative views of a parsed answer: named values, both signs, intervals, matrices worked out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from atts.evaluators.syntax.tree import INFINITY, MINUS_ONE, REALS, Node, grid, has, negated, variables
from atts.evaluators.verdict import TooLarge, Undecided

_CHAIN = frozenset({"=", "~"})
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", "~": "~"}


@dataclass(frozen=True, slots=True)
class Named:
    """A value with the name it was given, if any."""

    name: Node | None
    value: Node


def is_name(node: Node) -> bool:
    """Whether a side of an equation only says what is being given, as x, f(x), AB or |AB| do."""
    if node.kind in ("symbol", "word"):
        return True
    if node.kind == "call":
        return all(arg.kind in ("symbol", "number") for arg in node.args)
    if node.kind == "mul":
        return all(_is_point(arg) or (arg.kind == "pow" and is_name(arg.args[0])) for arg in node.args)
    if node.kind == "func" and node.text == "abs":
        return node.args[0].kind != "symbol" and is_name(node.args[0])
    if node.kind in ("tuple", "ratio", "list"):
        return all(is_name(arg) for arg in node.args)
    return False


def _is_point(node: Node) -> bool:
    """A capital letter, as the end of a segment, or a product of them."""
    if node.kind == "mul":
        return all(map(_is_point, node.args))
    return node.kind == "symbol" and node.text[0].isupper()


def named(node: Node) -> Named:
    """x = 5 as 5 named x, 5 + 6 = 11 as 11, an equation between expressions as itself."""
    if node.kind != "relation":
        return Named(None, node)
    signs = node.text.split()
    if signs[-1] in ("=>>", "<=>"):
        return named(node.args[-1])
    if signs == ["in"] and is_name(node.args[0]):
        return Named(node.args[0], node.args[1])
    if not _CHAIN.issuperset(signs):
        return Named(None, node)
    sides = list(node.args)
    while signs[-1] == "~" and len(sides) > 2 or (signs[-1] == "~" and not is_name(sides[0])):
        signs.pop()
        sides.pop()
        if not signs:
            return Named(None, sides[0])
    return _of_chain(sides, node)


def _of_chain(sides: list[Node], node: Node) -> Named:
    if is_name(sides[0]) and not _mentions(sides[-1], sides[0]):
        return Named(sides[0], sides[-1])
    if len(sides) == 2 and is_name(sides[1]) and not _mentions(sides[0], sides[1]):
        return Named(sides[1], sides[0])
    if not any(variables(side) for side in sides) or all(side.kind == "quantity" for side in sides):
        return Named(None, sides[-1])
    if len(sides) > 2:
        return Named(None, sides[-1])
    return Named(None, Node("relation", tuple(sides), "="))


def _mentions(node: Node, name: Node) -> bool:
    return name.kind == "symbol" and name.text in variables(node)


def signs_expanded(node: Node) -> tuple[Node, ...]:
    """The values a +- stands for: both, or one alone when there is none; a -+ turns with its +-."""
    count = sum(each.kind == "plusminus" for each in node.walk())
    if count == 0:
        return (node,)
    if count > 4:
        raise TooLarge("too many double signs")
    linked = any(each.kind == "plusminus" and each.text == "-" for each in node.walk())
    choices = [(1,) * count, (-1,) * count] if linked else list(product((1, -1), repeat=count))
    return tuple(_signed(node, list(choice)) for choice in choices)


def _signed(node: Node, choice: list[int]) -> Node:
    if node.kind == "plusminus":
        sign = choice.pop() * (1 if node.text == "+" else -1)
        inside = _signed(node.args[0], choice)
        return inside if sign > 0 else negated(inside)
    if not node.args:
        return node
    return Node(node.kind, tuple(_signed(arg, choice) for arg in node.args), node.text, node.value)


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of the real line; a point is closed on both sides with the same ends."""

    low: Node
    high: Node
    brackets: str


_BELOW = Node("mul", (MINUS_ONE, INFINITY))


def intervals(node: Node) -> tuple[Interval, ...] | None:
    """The real set a node describes as intervals and points, None when it describes none."""
    value = named(node).value
    if value.kind == "tuple" and len(value.args) == 2 and value.text:
        return (Interval(*value.args, value.text),)
    if value.kind == "set":
        return tuple(Interval(each, each, "[]") for each in value.args)
    if value.kind in ("union", "list"):
        parts = [intervals(arg) for arg in value.args]
        found = [part for part in parts if part is not None]
        return tuple(each for part in found for each in part) if len(found) == len(parts) else None
    if value.kind == "setminus" and value.args[0] == REALS and value.args[1].kind == "set":
        return _punctured(value.args[1].args)
    return _of_inequality(value) if value.kind == "relation" else None


def _punctured(points: tuple[Node, ...]) -> tuple[Interval, ...] | None:
    if len(points) != 1:
        return None
    return (Interval(_BELOW, points[0], "()"), Interval(points[0], INFINITY, "()"))


def _of_inequality(node: Node) -> tuple[Interval, ...] | None:
    signs, sides = node.text.split(), list(node.args)
    if signs == ["!="] and is_name(sides[0]) and not variables(sides[1]):
        return _punctured((sides[1],))
    if signs[0] in (">", ">="):
        signs, sides = [FLIPPED.get(sign, "?") for sign in reversed(signs)], sides[::-1]
    if not all(sign in ("<", "<=") for sign in signs):
        return None
    if len(sides) == 3 and is_name(sides[1]) and not (variables(sides[0]) or variables(sides[2])):
        return (Interval(sides[0], sides[2], ("[" if signs[0] == "<=" else "(") + ("]" if signs[1] == "<=" else ")")),)
    if len(sides) != 2:
        return None
    if is_name(sides[0]) and not variables(sides[1]):
        return (Interval(_BELOW, sides[1], "(" + ("]" if signs[0] == "<=" else ")")),)
    if is_name(sides[1]) and not variables(sides[0]):
        return (Interval(sides[0], INFINITY, ("[" if signs[0] == "<=" else "(") + ")"),)
    return None


def matrix(node: Node) -> Node | None:
    """The matrix an expression of matrices works out to, entries left as expressions; None when it is none.

    Raises Undecided for what we do not work out, such as powers and large products.
    """
    if node.kind == "matrix":
        return node
    if not has(node, "matrix") or node.kind in ("func", "list", "set", "tuple", "relation"):
        return None
    if node.kind == "add":
        parts = [matrix(arg) for arg in node.args]
        total = parts[0]
        for part in parts[1:]:
            total = _matrix_sum(total, part)
        return total
    if node.kind == "mul":
        return _matrix_product(node)
    raise Undecided(f"a matrix inside a {node.kind}")


def _matrix_sum(left: Node | None, right: Node | None) -> Node:
    if left is None or right is None or len(left.args) != len(right.args):
        raise Undecided("matrices that cannot be added")
    rows = list(zip(left.args, right.args, strict=True))
    if any(len(one.args) != len(two.args) for one, two in rows):
        raise Undecided("matrices that cannot be added")
    return grid((Node("add", pair) for pair in zip(one.args, two.args, strict=True)) for one, two in rows)


def _matrix_product(node: Node) -> Node:
    scalars = tuple(arg for arg in node.args if not has(arg, "matrix"))
    found = [matrix(arg) for arg in node.args if has(arg, "matrix")]
    total = found[0]
    for right in found[1:]:
        total = _times(total, right)
    if total is None:
        raise Undecided("a product of matrices")
    if not scalars:
        return total
    return grid((Node("mul", (*scalars, cell)) for cell in row.args) for row in total.args)


def _times(left: Node | None, right: Node | None) -> Node:
    if left is None or right is None or len(left.args[0].args) != len(right.args) or len(left.args) > 8:
        raise Undecided("a product of matrices")
    columns = list(zip(*(row.args for row in right.args), strict=True))

    def cell(row: Node, column: tuple[Node, ...]) -> Node:
        return Node("add", tuple(Node("mul", pair) for pair in zip(row.args, column, strict=True)))

    return grid((cell(row, column) for column in columns) for row in left.args)
