"""Expression tree that every answer is parsed into."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

Kind = Literal[
    # value, text as it is written; an integer literal too long to compute with: text alone
    "number", "huge",
    # text; constants are pi, e, i, inf; a clock tells an hour and minutes
    "symbol", "constant", "word", "clock",
    "add", "mul", "pow", "root",  # base and exponent; radicand and index
    "func", "call",  # a function known to us, or not, applied: its name and its arguments
    "plusminus",  # both signs of one argument; text "+" or "-" says which comes first
    "percent", "degree", "quantity",  # kinds with one argument; a quantity's text is its unit
    "based",  # a numeral's digits, and as value its base
    "sum",  # text: sum or prod; args: body, variable, lower, upper
    "opaque",  # integrals, limits: kept, and not decided on; text: which
    # a tuple's text: its brackets, such as "(]"; a list's: "and" or "or" where it is written
    "tuple", "list", "set",
    "union", "setminus", "builder",  # a builder has a member of a set and its conditions
    "matrix",  # rows, each a tuple
    "relation",  # text: operators joined by a space; args: its sides
    "ratio", "congruence",  # a congruence has a value and its modulus
    # kinds that hold one value in several forms, or pairs of a value and its condition
    "aliases", "cases",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One vertex: what it is, its children, and its name or value where it has one."""

    kind: Kind
    args: tuple["Node", ...] = ()
    text: str = ""
    value: Fraction | None = None

    def walk(self) -> list["Node"]:
        """Return this node and all below it; iterative, so depth does not matter."""
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
"""Values of commands without arguments."""


def number(value: Fraction | int, text: str = "") -> Node:
    """Return a numeric leaf."""
    return Node("number", text=text, value=Fraction(value))


def symbol(name: str) -> Node:
    """Return a free variable."""
    return Node("symbol", text=name)


def joined(kind: Kind, parts: Sequence[Node]) -> Node:
    """Return these parts under one node, or the only one itself."""
    return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))


def negated(node: Node) -> Node:
    """Return minus the node, folded for literals so that -3 is one leaf."""
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
    """Return a known function applied."""
    return Node("func", args, name)


def grid(rows: Iterable[Iterable[Node]]) -> Node:
    """Return a matrix of these rows."""
    return Node("matrix", tuple(Node("tuple", tuple(row), "[]") for row in rows))


def variables(node: Node) -> frozenset[str]:
    """Return the names of the free variables; those bound by a sum or product are left out."""
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
    """Return the tree with variables replaced."""
    if node.kind == "symbol":
        return values.get(node.text, node)
    if not node.args:
        return node
    return replace(node, args=tuple(substituted(arg, values) for arg in node.args))


def canonical(node: Node) -> Node:
    """Return the tree with sums and products flattened and their parts in one order."""
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
    """Return whether a node of one of these kinds is anywhere in the tree."""
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
