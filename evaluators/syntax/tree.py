"""The expression tree into which every answer is parsed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

Kind = Literal[
    # "number" has a value, and the text as written. "huge" is an integer that is too long for
    # arithmetic, and has only the text.
    "number", "huge",
    # These have only a text. The constants are pi, e, i and inf. A clock is a time of day, such as
    # 3:45.
    "symbol", "constant", "word", "clock",
    # The arguments of "pow" are base and exponent; those of "root" are radicand and index.
    "add", "mul", "pow", "root",
    "func", "call",  # "func" is a known function, "call" an unknown one; the text is the name
    "plusminus",  # one argument after ± or ∓; the text is the upper sign, + or -
    "percent", "degree", "quantity",  # one argument each; the text of a quantity is its unit
    "based",  # a number in another base; the text is its digits, and the value is the base
    "sum",  # the text is "sum" or "prod"; the arguments are body, variable and both bounds
    # An operation that is not computed here. The text names it, such as "int", "lim" or "cap".
    "opaque",
    # The text of "tuple" is its brackets, such as "(]". The text of "list" is "and", "or" or empty.
    "tuple", "list", "set",
    # a builder such as {2k | k in Z} has a member, 2k, and a condition
    "union", "setminus", "builder",
    "matrix",  # the arguments are the rows, each a "tuple"
    # The arguments are the sides. The text is the relation signs, joined by spaces.
    "relation",
    "ratio", "congruence",  # "congruence" has a value and a modulus
    # The arguments of "aliases" are forms of one value. Those of "cases" are values and conditions
    # in turn.
    "aliases", "cases",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an expression tree: its kind, its child nodes, its text and its value."""

    kind: Kind
    args: tuple["Node", ...] = ()
    text: str = ""
    value: Fraction | None = None

    def walk(self) -> list["Node"]:
        """Return this node and all nodes below it. The function is not recursive, so trees may have
        any depth.
        """
        nodes: list[Node] = []
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(node.args)
        return nodes


TWO = Node("number", text="2", value=Fraction(2))
MINUS_ONE = Node("number", text="-1", value=Fraction(-1))
INFINITY = Node("constant", text="inf")
EMPTY_SET = Node("set")
PI = Node("constant", text="pi")
OTHERWISE = Node("word", text="otherwise")
REALS = Node("tuple", (Node("mul", (MINUS_ONE, INFINITY)), INFINITY), "()")
COMMANDS = {
    "pi": PI,
    "infty": INFINITY,
    "emptyset": EMPTY_SET,
    "ldots": Node("symbol", text="…"),
    "mathbb:R": REALS,
}
"""The node of each LaTeX command that has no arguments."""


def number(value: Fraction | int, text: str = "") -> Node:
    """Return a node for a number."""
    return Node("number", text=text, value=Fraction(value))


def symbol(name: str) -> Node:
    """Return a node for a variable."""
    return Node("symbol", text=name)


def joined(kind: Kind, parts: Sequence[Node]) -> Node:
    """Return a node with these parts, or the part itself if there is only one."""
    return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))


def negated(node: Node) -> Node:
    """Return the negative of the node. For a literal such as 3, the result is one node, -3."""
    if node.kind == "number" and node.value is not None:
        text = node.text[1:] if node.text.startswith("-") else "-" + node.text
        return Node("number", text=text, value=-node.value)
    if node.kind in ("degree", "percent"):
        return Node(node.kind, tuple(map(negated, node.args)))
    return Node("mul", (MINUS_ONE, node))


def minus(left: Node, right: Node) -> Node:
    """Return a node for left - right."""
    return Node("add", (left, Node("mul", (MINUS_ONE, right))))


def quotient(top: Node, bottom: Node) -> Node:
    """Return a node for top / bottom."""
    return Node("mul", (top, Node("pow", (bottom, MINUS_ONE))))


def function(name: str, *args: Node) -> Node:
    """Return a node for a known function with these arguments."""
    return Node("func", args, name)


def grid(rows: Iterable[Iterable[Node]]) -> Node:
    """Return a matrix node with these rows."""
    return Node("matrix", tuple(Node("tuple", tuple(row), "[]") for row in rows))


def variables(node: Node) -> frozenset[str]:
    """Return the names of the free variables, without the indices of sums and products."""
    names: set[str] = set()
    bound: set[str] = set()
    stack = [node]
    while stack:
        each = stack.pop()
        if each.kind == "symbol":
            names.add(each.text)
        elif each.args:
            stack.extend(each.args)
            if each.kind == "sum":
                bound.add(each.args[1].text)
    return frozenset(names - bound)


def substituted(node: Node, values: Mapping[str, Node]) -> Node:
    """Return the tree with variables replaced by the nodes of `values`."""
    if node.kind == "symbol":
        return values.get(node.text, node)
    if not node.args:
        return node
    return replace(node, args=tuple(substituted(arg, values) for arg in node.args))


def canonical(node: Node) -> Node:
    """Return the tree in a canonical form: nested sums and products are flattened, and their parts
    are sorted.
    """
    if not node.args:
        return node
    args = tuple(map(canonical, node.args))
    if node.kind in ("add", "mul"):
        flat = list[Node]()
        for arg in args:
            flat.extend(arg.args if arg.kind == node.kind else (arg,))
        args = tuple(sorted(flat, key=repr))
    return Node(node.kind, args, node.text, node.value)


def has(node: Node, *kinds: str) -> bool:
    """Return True if the tree contains a node of one of these kinds."""
    if node.kind in kinds:
        return True
    stack = [*node.args]
    while stack:
        each = stack.pop()
        if each.kind in kinds:
            return True
        if each.args:
            stack.extend(each.args)
    return False
