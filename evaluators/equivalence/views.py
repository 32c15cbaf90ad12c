"""Alternative views of a parsed answer: named values, both signs, labels, matrices worked out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

from atts.evaluators.syntax.tree import REALS, Kind, Node, grid, has, negated, symbol, variables
from atts.evaluators.verdict import TooLarge, Undecided

_CHAIN, _IMPLICATIONS = frozenset({"=", "~"}), frozenset({"=>>", "<=>"})
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
    return all(map(_is_point, node.args)) if node.kind == "mul" else node.kind == "symbol" and node.text[0].isupper()


def named(node: Node) -> Named:
    """x = 5 as 5 named x, 5 + 6 = 11 as 11, an equation between expressions as itself."""
    if node.kind != "relation":
        return Named(None, node)
    signs = node.text.split()
    if _IMPLICATIONS.intersection(signs):
        last = max(at for at, sign in enumerate(signs) if sign in _IMPLICATIONS) + 1
        rest = node.args[last:]
        return named(Node("relation", rest, " ".join(signs[last:])) if len(rest) > 1 else node.args[-1])
    if signs == ["in"] and is_name(node.args[0]):
        return Named(node.args[0], node.args[1])
    if not _CHAIN.issuperset(signs):
        return Named(None, node)
    sides = list(node.args)
    if len(sides) == 2 and has(sides[0], "call") and not has(sides[1], "call", "symbol"):
        return Named(sides[0], sides[1])
    while signs[-1] == "~" and len(sides) > 2 or (signs[-1] == "~" and not is_name(sides[0])):
        signs.pop()
        sides.pop()
        if not signs:
            return Named(None, sides[0])
    return _of_chain(sides, node)


def _of_chain(sides: list[Node], node: Node) -> Named:
    if is_name(sides[0]) and not _mentions(sides[-1], sides[0]):
        return Named(sides[0], sides[-1])
    if len(sides) == 2 and sides[1].kind != "word" and is_name(sides[1]) and not _mentions(sides[0], sides[1]):
        return Named(sides[1], sides[0])
    is_result = len(sides) > 2 or not any(map(variables, sides)) or all(side.kind == "quantity" for side in sides)
    return Named(None, sides[-1] if is_result else Node("relation", tuple(sides), "="))


def _mentions(node: Node, name: Node) -> bool:
    return name.kind == "symbol" and name.text in variables(node)


def signs_expanded(node: Node) -> tuple[Node, ...]:
    """The values a +- stands for: both, or one alone when there is none; a -+ turns with its +-."""
    signs = [each.text for each in node.walk() if each.kind == "plusminus"]
    if len(signs) > 4:
        raise TooLarge("too many double signs")
    choices = [[one] * len(signs) for one in (1, -1)] if "-" in signs else product((1, -1), repeat=len(signs))
    return tuple(_signed(node, list(choice)) for choice in choices)


def _signed(node: Node, choice: list[int]) -> Node:
    if node.kind == "plusminus":
        sign = choice.pop() * (1 if node.text == "+" else -1)
        inside = _signed(node.args[0], choice)
        return inside if sign > 0 else negated(inside)
    if not node.args:
        return node
    return Node(node.kind, tuple(_signed(arg, choice) for arg in node.args), node.text, node.value)


def substituted(node: Node, values: Mapping[str, Node]) -> Node:
    """The tree with variables replaced."""
    if node.kind == "symbol":
        return values.get(node.text, node)
    return replace(node, args=tuple(substituted(arg, values) for arg in node.args)) if node.args else node


def labelled(node: Node) -> dict[Node, Node] | None:
    """Several named values by their names: x=4, y=6 or (x,y)=(4,6); None for anything else."""
    pairs: Sequence[tuple[Node | None, Node]] = []
    if node.kind == "list" and node.text != "or" and all(arg.text != "in" for arg in node.args):
        pairs = [(each.name, each.value) for each in map(named, node.args)]
    elif (one := named(node)).name is not None and one.name.kind == one.value.kind == "tuple":
        pairs = list(zip(one.name.args, one.value.args, strict=False))
        pairs = pairs if len(one.name.args) == len(one.value.args) else []
    labels = {name: value for name, value in pairs if name is not None}
    return labels if labels and len(labels) == len(pairs) else None


def bound_alike(node: Node) -> Node:
    """The tree with integer parameters such as k in "k pi, k in Z" named by their order."""
    names = [
        each.args[0].text
        for each in node.walk()
        if each.kind == "relation" and each.text == "in" and each.args[0].kind == "symbol" and each.args[1] != REALS
    ]
    if not names or node.kind not in ("list", "builder"):
        return node
    return substituted(node, {name: symbol(f"#{index}") for index, name in enumerate(dict.fromkeys(names))})


def matrix(node: Node) -> Node | None:
    """The matrix an expression of matrices works out to, entries left as expressions; None when it is none.

    Raises Undecided for what we do not work out, such as powers and large products.
    """
    if node.kind == "matrix":
        return node
    if all((each.kind, each.text) == ("tuple", "[]") for each in (node, *node.args)):
        return grid(arg.args for arg in node.args) if len({len(arg.args) for arg in node.args}) == 1 else None
    if not has(node, "matrix") or node.kind in ("func", "list", "set", "tuple", "relation"):
        return None
    if node.kind not in ("add", "mul"):
        raise Undecided(f"a matrix inside a {node.kind}")
    if node.kind == "add":
        return reduce(_plus, map(matrix, node.args))
    whole = reduce(_times, (matrix(arg) for arg in node.args if has(arg, "matrix")))
    scalars = tuple(arg for arg in node.args if not has(arg, "matrix"))
    if whole is None or not scalars:
        return whole
    return grid((Node("mul", (*scalars, cell)) for cell in row.args) for row in whole.args)


def _plus(left: Node | None, right: Node | None) -> Node:
    if left is None or right is None or [len(row.args) for row in left.args] != [len(row.args) for row in right.args]:
        raise Undecided("matrices that cannot be added")
    return grid(_paired("add", *rows) for rows in zip(left.args, right.args, strict=True))


def _times(left: Node | None, right: Node | None) -> Node:
    if left is None or right is None or len(left.args[0].args) != len(right.args) or len(left.args) > 8:
        raise Undecided("a product of matrices")
    columns = [Node("tuple", column) for column in zip(*(row.args for row in right.args), strict=True)]
    return grid((Node("add", _paired("mul", row, column)) for column in columns) for row in left.args)


def _paired(kind: Kind, one: Node, two: Node) -> tuple[Node, ...]:
    return tuple(Node(kind, pair) for pair in zip(one.args, two.args, strict=True))
