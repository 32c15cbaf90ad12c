"""The expression tree into which every answer is parsed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

Kind = Literal[
    # A number has a value, and its text as it is written; an integer literal that is too long to
    # compute with has only the text.
    "number", "huge",
    # These have a text. Constants are pi, e, i and inf; a clock gives an hour and minutes.
    "symbol", "constant", "word", "clock",
    "add", "mul", "pow", "root",  # base and exponent; radicand and index
    "func", "call",  # a known or an unknown function with its name and arguments
    "plusminus",  # both signs of one argument; text "+" or "-" says which comes first
    "percent", "degree", "quantity",  # kinds with one argument; a quantity's text is its unit
    "based",  # a numeral's digits, and as value its base
    "sum",  # text: sum or prod; args: body, variable, lower, upper
    "opaque",  # integrals and limits, which are not evaluated; the text says which
    # a tuple's text: its brackets, such as "(]"; a list's: "and" or "or" where it is written
    "tuple", "list", "set",
    "union", "setminus", "builder",  # a set-builder has a member of the set and its conditions
    "matrix",  # rows, each a tuple
    "relation",  # text: operators joined by a space; args: its sides
    "ratio", "congruence",  # a congruence has a value and its modulus
    # kinds with one value in several forms, or with pairs of a value and its condition
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
        """Return this node and all nodes below it, without recursion, so that the depth does not
        matter.
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
"""Values of commands without arguments."""


def number(value: Fraction | int, text: str = "") -> Node:
    """Return a numeric leaf."""
    return Node("number", text=text, value=Fraction(value))


def symbol(name: str) -> Node:
    """Return a free variable."""
    return Node("symbol", text=name)


def joined(kind: Kind, parts: Sequence[Node]) -> Node:
    """Return a node of these parts, or the part itself if there is only one."""
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
    """Return a known function applied."""
    return Node("func", args, name)


def grid(rows: Iterable[Iterable[Node]]) -> Node:
    """Return a matrix of these rows."""
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
    """Return the tree with variables replaced."""
    if node.kind == "symbol":
        return values.get(node.text, node)
    if not node.args:
        return node
    return replace(node, args=tuple(substituted(arg, values) for arg in node.args))


def canonical(node: Node) -> Node:
    """Return the tree with sums and products flattened and their parts sorted."""
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
