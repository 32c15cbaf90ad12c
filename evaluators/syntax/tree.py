"""The expression tree into which every answer is parsed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

Kind = Literal[
    # A number has a value, and the text as written. An integer that is too long for arithmetic has
    # only the text.
    "number", "huge",
    # Nodes that have only a text. The constants are pi, e, i and inf. A clock is a time of day such
    # as 3:45.
    "symbol", "constant", "word", "clock",
    # a power has a base and an exponent; a root has a radicand and an index
    "add", "mul", "pow", "root",
    "func", "call",  # a known function, and an unknown one; each has a name and arguments
    "plusminus",  # one argument with the sign ± or ∓; the text is the upper sign
    "percent", "degree", "quantity",  # one argument each; the text of a quantity is its unit
    "based",  # a numeral with a base; its digits are the text, and its base is the value
    "sum",  # text: "sum" or "prod"; arguments: body, variable, lower and upper bound
    # an operation that is not evaluated; the text names it, such as "int", "lim" or "cap"
    "opaque",
    # the text of a tuple is its brackets, such as "(]"; the text of a list is "and", "or" or empty
    "tuple", "list", "set",
    "union", "setminus", "builder",  # a builder has the form of a member and the condition for it
    "matrix",  # the arguments of a matrix are its rows, and each row is a tuple
    # the arguments of a relation are its sides; the text has its signs, joined by spaces
    "relation",
    "ratio", "congruence",  # a congruence has a value and its modulus
    # aliases are several forms of one value; cases are pairs of a value and its condition
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
"""The nodes of commands that have no arguments, by name."""


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
    """Return left - right."""
    return Node("add", (left, Node("mul", (MINUS_ONE, right))))


def quotient(top: Node, bottom: Node) -> Node:
    """Return top / bottom."""
    return Node("mul", (top, Node("pow", (bottom, MINUS_ONE))))


def function(name: str, *args: Node) -> Node:
    """Return a node for a known function with these arguments."""
    return Node("func", args, name)


def grid(rows: Iterable[Iterable[Node]]) -> Node:
    """Return the matrix with these rows."""
    return Node("matrix", tuple(Node("tuple", tuple(row), "[]") for row in rows))


def variables(node: Node) -> frozenset[str]:
    """Return the names of the free variables, which excludes the index of a sum or product."""
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
