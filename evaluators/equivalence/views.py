"""Views of a parsed answer: its names, members, labels, signs, matrix, letter and digits."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import NamedTuple

from atts.core import Grading
from atts.evaluators.equivalence.approx import NotRational, digits_in_base
from atts.evaluators.equivalence.numeric import exact
from atts.evaluators.equivalence.probing import Prober
from atts.evaluators.syntax.tree import (
    REALS,
    Kind,
    Node,
    grid,
    has,
    negated,
    number,
    substituted,
    symbol,
    variables,
)
from atts.evaluators.syntax.vocabulary import Dimension, is_generic, measure, squashed
from atts.evaluators.verdict import Limits, TooLarge, Undecided, Undefined

_CHAIN = frozenset({"=", "~"})
_IMPLICATIONS = frozenset({"=>>", "<=>"})
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", "~": "~"}


class Named(NamedTuple):
    """A value with the name it was given, if any."""

    name: Node | None
    value: Node


def unapplied(node: Node, names: frozenset[str]) -> Node:
    """The tree with g(a+b) as a product where g is a variable elsewhere."""
    args = tuple(unapplied(arg, names) for arg in node.args)
    if node.kind == "call" and node.text in names and [arg.kind for arg in args] == ["add"]:
        return Node("mul", (symbol(node.text), *args))
    return replace(node, args=args) if args else node


def is_name(node: Node) -> bool:
    """Whether a side of an equation only says what is being given, as x, f(x), AB or |AB| do."""
    if node.kind in ("symbol", "word"):
        return True
    if node.kind == "call":
        return all(arg.kind in ("symbol", "number") for arg in node.args)
    if node.kind == "mul":
        return all(
            _is_point(arg) or (arg.kind == "pow" and is_name(arg.args[0])) for arg in node.args
        )
    if node.kind == "func" and node.text == "abs":
        return node.args[0].kind != "symbol" and is_name(node.args[0])
    if node.kind in ("tuple", "ratio", "list"):
        return all(is_name(arg) for arg in node.args)
    return False


def _is_point(node: Node) -> bool:
    """A capital letter, as the end of a segment, or a product of them."""
    return (
        all(map(_is_point, node.args))
        if node.kind == "mul"
        else node.kind == "symbol" and node.text[0].isupper()
    )


def named(node: Node) -> Named:
    """x = 5 as 5 named x, 5 + 6 = 11 as 11, an equation between expressions as itself."""
    # A(1, 2)
    if [arg.kind for arg in node.args] == ["symbol", "tuple"] and _is_point(node.args[0]):
        return Named(*node.args)
    if node.kind != "relation":
        return Named(None, node)
    signs = node.text.split()
    if _IMPLICATIONS.intersection(signs) and (
        {*signs} - _IMPLICATIONS or not any(map(variables, node.args))
    ):
        last = max(at for at, sign in enumerate(signs) if sign in _IMPLICATIONS) + 1
        rest = node.args[last:]
        return named(
            Node("relation", rest, " ".join(signs[last:])) if len(rest) > 1 else node.args[-1]
        )
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
    last = variables(sides[-1])
    between = [*filter(None, map(variables, sides[1:-1]))]
    is_tied = last and any(not names & last for names in between)  # x = 2y = 3z
    if is_name(sides[0]) and not _mentions(sides[-1], sides[0]) and not is_tied:
        return Named(sides[0], sides[-1])
    if (
        len(sides) == 2
        and sides[1].kind != "word"
        and is_name(sides[1])
        and not _mentions(sides[0], sides[1])
    ):
        return Named(sides[1], sides[0])
    # else an equation of its variables
    is_result = len(sides) > 2 and variables(sides[-1]) <= variables(sides[0])
    is_result = (
        is_result
        or not any(map(variables, sides))
        or all(side.kind == "quantity" for side in sides)
    )
    return Named(
        None,
        sides[-1]
        if is_result
        else Node("relation", tuple(sides), " ".join("=" * (len(sides) - 1))),
    )


def _mentions(node: Node, name: Node) -> bool:
    return name.kind == "symbol" and name.text in variables(node)


def signs_expanded(node: Node) -> tuple[Node, ...]:
    """The values a +- stands for: both, or one alone when there is none; a -+ turns with its +-."""
    signs = [each.text for each in node.walk() if each.kind == "plusminus"]
    if len(signs) > 4:
        raise TooLarge("too many double signs")
    choices = (
        [[one] * len(signs) for one in (1, -1)]
        if "-" in signs
        else product((1, -1), repeat=len(signs))
    )
    return tuple(_signed(node, list(choice)) for choice in choices)


def _signed(node: Node, choice: list[int]) -> Node:
    if node.kind == "plusminus":
        sign = choice.pop() * (1 if node.text == "+" else -1)
        inside = _signed(node.args[0], choice)
        return inside if sign > 0 else negated(inside)
    if not node.args:
        return node
    return Node(node.kind, tuple(_signed(arg, choice) for arg in node.args), node.text, node.value)


def labelled(node: Node) -> dict[Node, Node] | None:
    """Several named values by their names: x=4, y=6 or (x,y)=(4,6); None for anything else."""
    pairs: Sequence[tuple[Node | None, Node]] = [
        (each.args[0], each.args[1]) for each in equations(node)
    ]
    if node.kind == "list" and node.text != "or" and all(arg.text != "in" for arg in node.args):
        pairs = [(each.name, each.value) for each in map(named, node.args)]
    elif (one := named(node)).name is not None and one.name.kind == one.value.kind == "tuple":
        pairs = list(zip(one.name.args, one.value.args, strict=False))
        pairs = pairs if len(one.name.args) == len(one.value.args) else []
    labels = {name: value for name, value in pairs if name is not None}
    return labels if labels and len(labels) == len(pairs) else None


def equations(node: Node) -> tuple[Node, ...]:
    """x=y=1 as x=1 and y=1; nothing for what is no such chain."""
    *names, value = node.args or (node,)
    is_chain = node.kind == "relation" and {*node.text.split()} == {"="} and not variables(value)
    is_chain = is_chain and len(names) > 1 and all(name.kind == "symbol" for name in names)
    return tuple(Node("relation", (name, value), "=") for name in names) if is_chain else ()


def grouped(node: Node) -> Node:
    """x=1, y=8 or x=2, y=7 as two points, each value with its name; any other node as it is."""
    names = [named(arg).name for arg in node.args] if node.kind == "list" else []
    size = (
        names.index(names[0], 1) if None not in names and names.count((*names, None)[0]) > 1 else 1
    )
    parts = [*map(equations, node.args)] if names else [()]
    if size > 1 and names == names[:size] * (len(names) // size):
        parts = [node.args[at : at + size] for at in range(0, len(names), size)]
    if not all(parts):
        return node
    return Node("list", tuple(Node("tuple", tuple(sorted(part, key=repr)), "()") for part in parts))


def free(node: Node, other: Node) -> Node:
    """k pi, k in Z as k pi, beside an answer that does not say what k is."""
    value, said = node.args if node.kind == "list" and len(node.args) == 2 else (node, node)
    is_whole = said.kind == "relation" and said.text == "in" and said.args[1].text == "mathbb:Z"
    is_free = is_whole and said.args[0].text in variables(value) and value.text in ("", "=")
    return value if is_free and other.kind != "list" else node


def spelt(node: Node) -> str | None:
    """A word, or letters side by side, as they are compared; None for anything else."""
    letters = [part.text for part in node.args if part.kind == "symbol" and len(part.text) == 1]
    is_run = node.kind == "mul" and len(letters) == len(node.args)
    return (
        squashed("".join(letters) if is_run else node.text)
        if is_run or node.kind == "word"
        else None
    )


def bound_alike(node: Node) -> Node:
    """The tree with integer parameters such as k in "k pi, k in Z" named by their order."""
    if node.kind not in ("list", "builder"):
        return node
    inside = node.walk()
    homes = [each.args for each in inside if each.kind == "relation" and each.text == "in"]
    names = [
        name.text
        for name, home in homes
        if name.kind == "symbol" and home != REALS and inside.count(name) > 1
    ]
    return substituted(
        node, {name: symbol(f"#{index}") for index, name in enumerate(dict.fromkeys(names))}
    )


def matrix(node: Node) -> Node | None:
    """The matrix an expression of matrices works out to, entries left as expressions; None when it
    is none.

    Raises Undecided for what we do not work out, such as powers and large products.
    """
    if node.kind == "matrix":
        return node
    if all((each.kind, each.text) == ("tuple", "[]") for each in (node, *node.args)):
        return (
            grid(arg.args for arg in node.args)
            if len({len(arg.args) for arg in node.args}) == 1
            else None
        )
    if node.kind == "pow" and node.args[1].text == "T" and node.args[0].kind in ("matrix", "tuple"):
        rows = node.args[0].args if node.args[0].kind == "matrix" else node.args[:1]
        return grid(zip(*(row.args for row in rows), strict=True))
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
    if (
        left is None
        or right is None
        or [len(row.args) for row in left.args] != [len(row.args) for row in right.args]
    ):
        raise Undecided("matrices that cannot be added")
    return grid(_paired("add", *rows) for rows in zip(left.args, right.args, strict=True))


def _times(left: Node | None, right: Node | None) -> Node:
    if (
        left is None
        or right is None
        or len(left.args[0].args) != len(right.args)
        or len(left.args) > 8
    ):
        raise Undecided("a product of matrices")
    columns = [
        Node("tuple", column) for column in zip(*(row.args for row in right.args), strict=True)
    ]
    return grid(
        (Node("add", _paired("mul", row, column)) for column in columns) for row in left.args
    )


def _paired(kind: Kind, one: Node, two: Node) -> tuple[Node, ...]:
    return tuple(Node(kind, pair) for pair in zip(one.args, two.args, strict=True))


def members(node: Node) -> tuple[Node, ...]:
    """What an unordered answer holds, both signs written out."""
    inner = named(node).value if node.kind == "relation" else node
    if inner.kind in ("list", "set"):
        return tuple(
            each for arg in inner.args for each in ((arg,) if arg.kind == "set" else members(arg))
        )
    if inner is not node and not has(inner, "plusminus"):
        return (node,)
    return signs_expanded(inner) if has(inner, "plusminus") else (node,)


def variable_of(node: Node) -> str:
    """The one variable a set of reals is about, empty when it is not named."""
    found = [] if has(node, "builder") else list(variables(node))
    return found[0] if len(found) == 1 else ""


def infinity(node: Node) -> int:
    if node.kind == "constant" and node.text == "inf":
        return 1
    if (
        node.kind == "mul"
        and len(node.args) == 2
        and infinity(node.args[1])
        and node.args[0].value is not None
    ):
        return 1 if node.args[0].value > 0 else -1
    if node.kind in ("percent", "quantity"):
        return infinity(node.args[0])
    return 0


def same_numeral(gold: Node, answer: Node) -> bool:
    if gold.kind == answer.kind:
        with suppress(Undefined):
            return digits_in_base(gold) == digits_in_base(answer)
        return gold.text == answer.text and gold.value == answer.value
    numeral, other = (gold, answer) if gold.kind == "based" else (answer, gold)
    return other.kind == "number" and other.text == numeral.text


def progression(node: Node) -> Node | None:
    """8k+3, k perhaps said to be an integer, as the class of 3 modulo 8; None for what is no such
    class.
    """
    value, *said = node.args if node.kind in ("list", "builder") else (node,)
    names = variables(value)
    are_whole = all(each.text == "in" and each.args[1].text == "mathbb:Z" for each in said)
    if len(names) != 1 or has(value, "relation", "func", "call") or not are_whole:
        return None
    try:
        first, second, third = (
            exact(value, Limits(), {name: Fraction(at) for name in names}) for at in range(3)
        )
    except (NotRational, Undefined, TooLarge):
        return None
    is_linear = third - second == second - first != 0
    return Node("congruence", (number(first), number(abs(second - first)))) if is_linear else None


def clock(node: Node) -> str | None:
    """The time of day, in 24 hours, that a node is or, as a ratio, could be; None for anything
    else.
    """
    hours, *rest = [arg.text for arg in node.args] if node.kind == "ratio" else node.text.split(":")
    could_be = (
        node.kind == "ratio"
        and len(hours) <= 2
        and all(len(part) == 2 and part.isdigit() for part in rest)
    )
    return ":".join([hours, *rest]).lstrip("0") if could_be or node.kind == "clock" else None


def mark(node: Node) -> str:
    """What a value is measured in, by its sign: percent, degrees, radians, another unit, or
    nothing.
    """
    if node.kind in ("percent", "degree"):
        return node.kind
    found = measure(node.text) if node.kind == "quantity" else None
    if found is None or not found[0]:
        return ""
    return "rad" if found[0] == (("rad", 1),) else "unit"


def counts_apart(nodes: tuple[Node, ...]) -> bool:
    """Whether members count different things or carry different names."""
    found = [
        named(node).name or (measure(node.text) if node.kind == "quantity" else None)
        for node in nodes
    ]
    return None not in found and len(set(found)) == len(found) > 1


def decimal_digits(node: Node) -> int:
    """Significant digits of a decimal literal, zeros at its end left out; 0 for anything else."""
    if node.kind != "number" or "." not in node.text or "e" in node.text.lower():
        return 0
    return len(node.text.replace(".", "").strip("-0"))


def is_decimal(node: Node) -> bool:
    """Whether a literal has digits enough to be the rounding of another value."""
    return decimal_digits(node) >= 5


def terminates(value: Fraction) -> bool:
    """Whether the decimal expansion of a fraction ends."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def rounds(prober: Prober, gold: Node, answer: Node) -> bool:
    """Whether one is a decimal of enough digits and the other a value that no decimal of its kind
    can be.
    """
    decimal, other = (gold, answer) if decimal_digits(gold) else (answer, gold)
    value = prober.known(other) if is_decimal(decimal) and not decimal_digits(other) else None
    if value is None or (isinstance(value, Fraction) and terminates(value)):
        return False
    assert decimal.value is not None
    unit = Fraction(10) ** -len(decimal.text.partition(".")[2])
    ends = decimal.value - unit, value, decimal.value + unit
    low, middle, high = (prober.approximate(each).value for each in ends)
    return not hasattr(middle, "_mpc_") and bool(low < middle < high)


def held_to(grading: Grading, gold: Node) -> Grading:
    """The policy for one reference: only a decimal has a relative tolerance, what is exact has
    nothing to tolerate.
    """
    is_rounded = any(each.kind == "number" and set(each.text) & set(".eE") for each in gold.walk())
    return grading if is_rounded or not grading.relative else replace(grading, relative=0.0)


def is_near(prober: Prober, gold: Node, answer: Node, grading: Grading) -> bool:
    """Whether two numbers are no further apart than the policy tolerates, as in math.isclose."""
    values = [
        prober.known(node) if grading.relative or grading.absolute else None
        for node in (gold, answer)
    ]
    one, two = (None if value is None else prober.approximate(value).value for value in values)
    if one is None or two is None:
        return False
    gap = abs(one - two)
    size = max(abs(one), abs(two))
    return bool(gap <= max(grading.absolute, size * grading.relative) * (1 + 1e-12))


def is_unnamed(one: Dimension, two: Dimension) -> bool:
    """Whether one side is of square units of no name, and the other of squares of a length, or the
    same of cubes.
    """
    return any(is_generic(a) and b == (("m", a[0][1]),) for a, b in ((one, two), (two, one)))


def is_part(one: Dimension, two: Dimension) -> bool:
    """Whether what is counted on one side is said more closely on the other: marbles, red marbles."""
    few, many = sorted((one, two), key=len)
    return set(few) < set(many) and all(name.startswith("#") and size == 1 for name, size in many)


def may_name_one(one: Node, two: Node) -> bool:
    """Whether two names can be given to one thing."""
    if one.kind != two.kind:  # save those of a variable and of a function's value at a point
        call = one if one.kind == "call" else two
        return not (
            call.kind == "call"
            and "symbol" in (one.kind, two.kind)
            and call.args[0].kind == "number"
        )
    if one.kind == "word":
        few, many = sorted(({*name.text.split()} for name in (one, two)), key=len)
        return few <= many
    if one.kind == "call":
        variables_alone = all(
            arg.kind == "symbol" and arg.text.islower() for arg in (*one.args, *two.args)
        )
        return one == two or (
            one.text == two.text and len(one.args) == len(two.args) and variables_alone
        )
    return one.kind == "symbol" or (
        one.kind == "mul" and sorted(map(repr, one.args)) == sorted(map(repr, two.args))
    )
