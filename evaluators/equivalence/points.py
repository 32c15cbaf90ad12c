"""Points at which two expressions are compared: mixed in sign and size, around every constant and branch of both."""

import math
import random
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from atts.evaluators.equivalence.exact import NotRational
from atts.evaluators.equivalence.numeric import exact
from atts.evaluators.syntax.tree import Node, minus, variables
from atts.evaluators.verdict import Limits, TooLarge, Undefined

Domain = Literal["real", "step", "whole", "natural"]
Point = dict[str, Fraction]

_RANKS: tuple[Domain, ...] = ("real", "step", "whole", "natural")
_NATURAL = frozenset({"factorial", "double_factorial", "binom"})
_WHOLE = frozenset({"gcd", "lcm", "mod"})
_STEPS = frozenset({"floor", "ceil"})
_TURNS = frozenset({"sin", "cos", "tan", "cot", "sec", "csc"})
_SWITCHES = _STEPS | _WHOLE | _NATURAL | frozenset({"abs", "max", "min", "sign", "ln", "log", "re", "im", "arg"})
_INDICES = frozenset("nmkjNMK")  # letters that stand for integers where something moves in steps
_SMOOTH = 6  # points for expressions without a branch: analytic ones that agree at one generic point agree
_SCATTERED = 24
_CONSTANTS = 14
_SWEEP = 120  # residues of a modulus that are all tried


def domains(*nodes: Node) -> dict[str, Domain]:
    """What each variable ranges over, by the functions it is given to: real, integer, positive or small integer."""
    found = {name: 0 for node in nodes for name in variables(node)}
    for each in (each for node in nodes for each in node.walk()):
        rank, inside = _demand(each)
        for name in variables(inside) if rank else ():
            if rank > 1 or name[0] in _INDICES:
                found[name] = max(found.get(name, 0), rank)
    return {name: _RANKS[rank] for name, rank in found.items()}


def _demand(node: Node) -> tuple[int, Node]:
    if node.kind == "func":
        is_turn = node.text in _TURNS and any(each.text == "pi" for each in node.walk())
        return (node.text in _STEPS or is_turn) + 2 * (node.text in _WHOLE) + 3 * (node.text in _NATURAL), node
    if node.kind == "pow" and (node.args[0].value or 0) < 0:
        return 2, node.args[1]
    if node.kind == "relation" and node.args[-1].kind == "congruence":
        return 2, node
    return (3, Node("add", node.args[2:])) if node.kind == "sum" else (0, node)


@lru_cache(maxsize=8192)
def _coordinate(name: str, index: int, domain: Domain) -> Fraction:
    """The value of a variable at a generic point: fixed by its name, its sign and size drawn for it alone."""
    draw = random.Random(f"{name}@{index}")
    if domain == "natural":
        return Fraction(draw.randrange(2, 12) + index)
    if domain in ("whole", "step"):
        count = index + 2 if index < 4 else draw.choice((1, 2, 6, 12, 30)) * draw.randrange(1, 3 ** (2 + index % 7))
        return Fraction(-count if domain == "step" and index > 3 and draw.random() < 0.5 else count)
    size = Fraction(draw.randrange(1_000, 9_999), draw.choice((997, 1009, 1013, 2003, 3001)))
    if index >= _SMOOTH:
        size *= Fraction(10) ** draw.randrange(-5, 6)
    return -size if index > 1 and draw.random() < 0.5 else size


def generic(ranges: dict[str, Domain], index: int) -> Point:
    """A seeded point; the first two are positive throughout, the first six of moderate size."""
    return {name: _coordinate(name, index, domain) for name, domain in ranges.items()}


def points(left: Node, right: Node, limits: Limits) -> Iterator[Point]:
    """Generic points, then, where either side has branches, scattered ones and those around its constants."""
    ranges = domains(left, right)
    switches = tuple(dict.fromkeys(each for node in (left, right) for each in _switches(node)))
    yield from (generic(ranges, index) for index in range(_SMOOTH))
    if not switches and set(ranges.values()) <= {"real"}:
        return
    yield from (generic(ranges, index) for index in range(_SMOOTH, _SMOOTH + _SCATTERED))
    constants = tuple(_constants((left, right), limits))
    for base in (generic(ranges, 0), generic(ranges, 3))[: len(ranges)]:
        for name, domain in ranges.items():
            marks = {*constants, *(mark for node in switches for mark in _marks(node, name, base, limits))}
            for value in around(marks) if domain == "real" else _whole_around(marks, domain):
                yield base | {name: value}
    if len(ranges) > 1 and set(ranges.values()) == {"real"}:  # where all are about as large as a constant
        near = [mark * factor for mark in constants for factor in (Fraction(3), Fraction(-3), Fraction(1, 7))]
        yield from ({name: value + index * value / 5 for index, name in enumerate(ranges)} for value in near)


def _switches(node: Node) -> Iterator[Node]:
    """What decides a branch inside an expression: arguments of functions that switch, radicands, conditions."""
    for each in node.walk():
        if not variables(each):
            continue
        is_function = each.kind == "func" and (each.text in _SWITCHES or each.text.startswith("arc"))
        if is_function or each.kind == "congruence":
            yield from each.args
        elif each.kind in ("root", "pow") and variables(each.args[0]):
            power = each.args[1].value if each.kind == "pow" else None
            yield from () if power is not None and power.denominator == 1 else each.args[:1]
        if each.kind == "relation" or (is_function and each.text in ("max", "min")):
            yield from (minus(one, two) for one, two in pairwise(each.args))


def _constants(nodes: Iterable[Node], limits: Limits) -> Iterator[Fraction]:
    """Every constant part of the trees as a number, their square roots and quotients."""
    found: dict[Fraction, None] = {}
    for node in nodes:
        for each in node.walk():
            if each.kind in ("number", "pow", "root", "mul") and not variables(each):
                value = rational(each, limits)
                if value:
                    found[abs(value)] = None
    kept = list(found)[:_CONSTANTS]
    yield from kept
    yield from (Fraction(math.isqrt(int(value))) for value in kept if value > 3)
    yield from {one / two for one in kept[:6] for two in kept[:6] if one != two}
    if any(each.text in ("ln", "log") for node in nodes for each in node.walk()):  # where a logarithm passes a constant
        yield from (Fraction(round(base**value)) for base in (math.e, 10) for value in kept if 1 < value < 300)


def rational(node: Node, limits: Limits, point: Point | None = None) -> Fraction | None:
    """The value of a tree as a fraction, square roots to nine digits; None where it has none of moderate size."""
    try:
        if node.kind == "root" and node.args[1].value == 2:
            inside = exact(node.args[0], limits, point or {})
            return Fraction(math.isqrt(int(abs(inside) * 10**18)), 10**9)
        value = exact(node, limits, point or {})
    except (NotRational, Undefined, TooLarge):
        return None
    return value if value.numerator.bit_length() + value.denominator.bit_length() < 4_000 else None


def _marks(switch: Node, name: str, base: Point, limits: Limits) -> Iterator[Fraction]:
    """Where a switch that is linear in the variable passes 0, 1 and -1, or is divisible by a modulus beside it."""
    if name not in variables(switch):
        return
    first, second, third = (rational(switch, limits, base | {name: Fraction(x)}) for x in range(3))
    if first is not None and second is not None and third is not None and third - second == second - first != 0:
        yield from ((target - first) / (second - first) for target in (0, 1, -1))


def around(marks: Iterable[Fraction]) -> list[Fraction]:
    """Real numbers on both sides of each mark and of its negative, between neighbours and beyond the last."""
    crowd = sorted({Fraction(0), *(sign * mark for mark in marks for sign in (1, -1))})
    close = Fraction(1, 10**6)
    found = [(one + two) / 2 for one, two in pairwise(crowd)]
    found += [mark * factor for mark in crowd if mark for factor in (1 - close, 1 + close)]
    return [*crowd, *found, crowd[0] * 3 - 1, crowd[-1] * 3 + 1]


def _whole_around(marks: Iterable[Fraction], domain: Domain) -> list[Fraction]:
    """Integers at, beside and twice each mark; all residues of small ones."""
    known = sorted({abs(math.floor(mark)) for mark in marks})
    found = {mark + step for mark in known for step in (-1, 0, 1, mark)}
    found |= set(range(1, max((mark for mark in known if mark <= _SWEEP), default=0) + 1))
    large = ((slope, mark) for mark in known[:8] for slope in range(2, 8) if mark > _SWEEP)
    for slope, modulus in large:  # where 2n+1 and the like are multiples of an odd modulus
        if math.gcd(slope, modulus) == 1:
            found |= {shift * pow(slope, -1, modulus) % modulus for shift in range(-5, 6)}
    if domain == "step":
        found |= {-value for value in found}
    return [Fraction(value) for value in sorted(found) if domain == "step" or value > 0]
