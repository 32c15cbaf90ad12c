"""Traits of one parsed answer: its members, its letter, its sign, its digits."""

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from atts.core import Grading
from atts.evaluators.equivalence.exact import NotRational, digits_in_base
from atts.evaluators.equivalence.numeric import Value, exact
from atts.evaluators.equivalence.probing import Prober
from atts.evaluators.equivalence.views import is_name, named, signs_expanded
from atts.evaluators.syntax.tree import Node, has, number, variables
from atts.evaluators.syntax.units import Dimension, is_generic, measure
from atts.evaluators.verdict import Limits, TooLarge, Undefined

ROUNDED_DIGITS = 5  # significant digits from which a decimal may stand for a value it only rounds


def members(node: Node) -> tuple[Node, ...]:
    """What an unordered answer holds, both signs written out."""
    inner = named(node).value if node.kind == "relation" else node
    if inner.kind in ("list", "set"):
        return tuple(each for arg in inner.args for each in ((arg,) if arg.kind == "set" else members(arg)))
    if inner is not node and not has(inner, "plusminus"):
        return (node,)
    return signs_expanded(inner) if has(inner, "plusminus") else (node,)


def sign_of(value: Value) -> int:
    size = value if isinstance(value, Fraction) else value.value
    return 0 if hasattr(size, "_mpc_") else (size > 0) - (size < 0)


def variable_of(node: Node) -> str:
    """The one variable a set of reals is about, empty when it is not named."""
    if has(node, "builder"):
        return ""
    found = {side.text for each in node.walk() if each.kind == "relation" for side in each.args if is_name(side)}
    return found.pop() if len(found) == 1 else ""


def choice_letter(node: Node) -> str | None:
    """The letter of a choice: one of A to J, in either case."""
    is_letter = node.kind == "symbol" and len(node.text) == 1 and node.text.upper() in "ABCDEFGHIJ"
    return node.text.upper() if is_letter else None


def infinity(node: Node) -> int:
    if node.kind == "constant" and node.text == "inf":
        return 1
    if node.kind == "mul" and len(node.args) == 2 and infinity(node.args[1]) and node.args[0].value is not None:
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
    """8k+3, k perhaps said to be an integer, as the class of 3 modulo 8; None for what is no such class."""
    value, *said = node.args if node.kind == "list" else (node,)
    names = variables(value)
    are_whole = all(each.text == "in" and each.args[1].text == "mathbb:Z" for each in said)
    if len(names) != 1 or has(value, "relation", "func", "call") or not are_whole:
        return None
    try:
        first, second, third = (exact(value, Limits(), {name: Fraction(at) for name in names}) for at in range(3))
    except (NotRational, Undefined, TooLarge):
        return None
    is_linear = third - second == second - first != 0
    return Node("congruence", (number(first), number(abs(second - first)))) if is_linear else None


def clock(node: Node) -> str | None:
    """The time of day, in 24 hours, that a node is or, as a ratio, could be; None for anything else."""
    hours, *rest = [arg.text for arg in node.args] if node.kind == "ratio" else node.text.split(":")
    could_be = node.kind == "ratio" and len(hours) <= 2 and all(len(part) == 2 and part.isdigit() for part in rest)
    return ":".join([hours, *rest]).lstrip("0") if could_be or node.kind == "clock" else None


def mark(node: Node) -> str:
    """What a value is measured in, by its sign: percent, degrees, radians, another unit, or nothing."""
    if node.kind in ("percent", "degree"):
        return node.kind
    found = measure(node.text) if node.kind == "quantity" else None
    if found is None or not found[0]:
        return ""
    return "rad" if found[0] == (("rad", 1),) else "unit"


def counts_apart(nodes: tuple[Node, ...]) -> bool:
    """Whether members count different things or carry different names."""
    found = [named(node).name or (measure(node.text) if node.kind == "quantity" else None) for node in nodes]
    return None not in found and len(set(found)) == len(found) > 1


def decimal_digits(node: Node) -> int:
    """Significant digits of a decimal literal, zeros at its end left out; 0 for anything else."""
    if node.kind != "number" or "." not in node.text or "e" in node.text.lower():
        return 0
    return len(node.text.replace(".", "").strip("-0"))


def is_decimal(node: Node) -> bool:
    """Whether a literal has digits enough to be the rounding of another value."""
    return decimal_digits(node) >= ROUNDED_DIGITS


def terminates(value: Fraction) -> bool:
    """Whether the decimal expansion of a fraction ends."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def rounds(prober: Prober, gold: Node, answer: Node) -> bool:
    """Whether one is a decimal of enough digits and the other a value that no decimal of its kind can be."""
    decimal, other = (gold, answer) if decimal_digits(gold) else (answer, gold)
    digits = decimal_digits(decimal)
    value = None if digits < ROUNDED_DIGITS or decimal_digits(other) else prober.known(other)
    if value is None or (isinstance(value, Fraction) and terminates(value)):
        return False
    assert decimal.value is not None
    unit = Fraction(10) ** -len(decimal.text.partition(".")[2])
    low, middle, high = (
        prober.approximate(each, 200).value for each in (decimal.value - unit, value, decimal.value + unit)
    )
    return not hasattr(middle, "_mpc_") and bool(low < middle < high)


def held_to(grading: Grading, gold: Node) -> Grading:
    """The policy for one reference: only a decimal has a relative tolerance, what is exact has nothing to tolerate."""
    is_rounded = any(each.kind == "number" and set(each.text) & set(".eE") for each in gold.walk())
    return grading if is_rounded or not grading.relative else replace(grading, relative=0.0)


def is_near(prober: Prober, gold: Node, answer: Node, grading: Grading) -> bool:
    """Whether two numbers are no further apart than the policy tolerates, as in math.isclose."""
    values = [prober.known(node) if grading.relative or grading.absolute else None for node in (gold, answer)]
    one, two = (None if value is None else prober.approximate(value, 200).value for value in values)
    if one is None or two is None:
        return False
    gap, size = abs(one - two), max(abs(one), abs(two))
    return bool(gap <= max(grading.absolute, size * grading.relative) * (1 + 1e-12))


def is_unnamed(one: Dimension, two: Dimension) -> bool:
    """Whether one side is of square units of no name, and the other of squares of a length, or the same of cubes."""
    return any(is_generic(a) and b == (("m", a[0][1]),) for a, b in ((one, two), (two, one)))


def is_part(one: Dimension, two: Dimension) -> bool:
    """Whether what is counted on one side is said more closely on the other: marbles, red marbles."""
    few, many = sorted((one, two), key=len)
    return set(few) < set(many) and all(name.startswith("#") and size == 1 for name, size in many)


def may_name_one(one: Node, two: Node) -> bool:
    """Whether two names can be given to one thing."""
    if one.kind != two.kind:  # save those of a variable and of a function's value at a point
        call = one if one.kind == "call" else two
        return not (call.kind == "call" and "symbol" in (one.kind, two.kind) and call.args[0].kind == "number")
    if one.kind == "word":
        few, many = sorted(({*name.text.split()} for name in (one, two)), key=len)
        return few <= many
    if one.kind == "call":
        variables_alone = all(arg.kind == "symbol" and arg.text.islower() for arg in (*one.args, *two.args))
        return one == two or (one.text == two.text and len(one.args) == len(two.args) and variables_alone)
    return one.kind == "symbol" or (one.kind == "mul" and sorted(map(repr, one.args)) == sorted(map(repr, two.args)))
