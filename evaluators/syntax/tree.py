"""The expression tree into which every answer is parsed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

Kind = Literal[
    # A number has a value, and the text as written; an integer that is too long to compute with has
    # only the text.
    "number", "huge",
    # Nodes that have only a text. The constants are pi, e, i and inf; a clock is a time such as
    # 3:45.
    "symbol", "constant", "word", "clock",
    "add", "mul", "pow", "root",  # arguments: base and exponent; radicand and index
    "func", "call",  # a known or an unknown function with its name and arguments
    "plusminus",  # one argument with both signs; the text is the first sign, "+" or "-"
    "percent", "degree", "quantity",  # kinds with one argument; the text of a quantity is its unit
    "based",  # a numeral: the text is its digits, the value is its base
    "sum",  # text: "sum" or "prod"; arguments: body, variable, lower and upper bound
    "opaque",  # an integral or a limit, which is not evaluated; the text says which of them
    # text of a tuple: its brackets, such as "(]"; text of a list: "and" or "or", if written
    "tuple", "list", "set",
    "union", "setminus", "builder",  # a set-builder has a member of the set and its conditions
    "matrix",  # a matrix: its arguments are rows, and each row is a tuple
    # a relation: the text is its operators, joined by spaces; the arguments are its sides
    "relation",
    "ratio", "congruence",  # a congruence has a value and its modulus
    # one value in several forms; pairs of a value and its condition
    "aliases", "cases",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a tree, with its kind, its children, and its name or value if it has one."""

    kind: Kind
    args: tuple["Node", ...] = ()
    text: str = ""
    value: Fraction | None = None

    def walk(self) -> list["Node"]:
        """Return this node and all nodes below it; without recursion, so that any depth is
        possible.
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
"""The nodes of commands without arguments."""


def number(value: Fraction | int, text: str = "") -> Node:
    """Return the leaf of a number."""
    return Node("number", text=text, value=Fraction(value))


def symbol(name: str) -> Node:
    """Return the leaf of a variable."""
    return Node("symbol", text=name)


def joined(kind: Kind, parts: Sequence[Node]) -> Node:
    """Return a node with these parts, or the part itself if there is only one."""
    return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))


def negated(node: Node) -> Node:
    """Return the negative of the node; a literal such as -3 becomes one leaf."""
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
    """Return a known function applied to arguments."""
    return Node("func", args, name)


def grid(rows: Iterable[Iterable[Node]]) -> Node:
    """Return the matrix with these rows."""
    return Node("matrix", tuple(Node("tuple", tuple(row), "[]") for row in rows))


def variables(node: Node) -> frozenset[str]:
    """Return the names of the free variables, without those bound by a sum or product."""
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
    """Return the tree with nested sums and products flattened, and their parts sorted."""
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
    """Return whether the tree contains a node of one of these kinds."""
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
