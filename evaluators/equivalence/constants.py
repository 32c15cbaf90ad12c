"""Treat answers as equal if they differ only in the letter or shift of an arbitrary constant."""

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

from atts.evaluators.equivalence import views
from atts.evaluators.syntax.tree import (
    PI,
    TWO,
    Node,
    minus,
    number,
    quotient,
    substituted,
    symbol,
    variables,
)

_MOST = 3  # constants of one answer whose letters are exchanged
# the letters of constants of integration, those of numbered ones, and those of any constant
_INTEGRATION = re.compile(r"[CcKk](?:_\d)?|const")
_NUMBERED = re.compile(r"[CcKk]_\d")
_ARBITRARY = re.compile(r"[A-Da-dKk](?:_\d)?|alpha|beta|const")
_PARAMETERS = frozenset("tskmnruvlj") | {"lambda", "mu"}
# Constants of physics with their values, each with a letter that shows that the other side uses it.
_DEFINED = {
    "hbar": (quotient(symbol("h"), Node("mul", (TWO, PI))), "h"),
    "k": (quotient(number(1), Node("mul", (number(4), PI, symbol("epsilon_0")))), "epsilon_0"),
    "k_e": (quotient(number(1), Node("mul", (number(4), PI, symbol("epsilon_0")))), "epsilon_0"),
}
_FUNCTIONS = ("y", "u", "w")  # names of an unknown function that are written without its argument


def arbitrary(names: frozenset[str]) -> frozenset[str]:
    """Return the letters that are used for arbitrary constants."""
    return frozenset(name for name in names if _ARBITRARY.fullmatch(name))


def restated(gold: Node, answer: Node) -> Iterator[tuple[Node, Node]]:
    """Yield pairs that are equal if the answers are equal up to the choice of their constants.

    Most answers give no pair: a letter is an arbitrary constant only in a solution (y = Cx, f(x) =
    cx), as a term of its own (x^2 + C), or as one of several numbered coefficients.
    """
    one = views.named(gold)
    two = views.named(answer)
    if one.name is not None and two.name is not None and not views.may_name_one(one.name, two.name):
        return
    is_solution = any(_names_a_function(name) for name in (one.name, two.name))
    arguments = {arg.text for side in (one, two) if side.name for arg in side.name.args}
    yield from _written_out(gold, answer)
    yield from _with_one_parameter(one.value, two.value)
    left = variables(one.value) - arguments
    right = variables(two.value) - arguments
    if not left or not right:
        return
    if left != right or len(left) > 1:
        yield from _renamed(gold, answer, left, right, is_solution)
    yield from _shifted(one.value, two.value)
    # an antiderivative never has a logarithm of base 10
    if _terms(one.value) and _terms(two.value):
        natural = _natural(one.value), _natural(two.value)
        if natural != (one.value, two.value):
            yield natural
            yield from _shifted(*natural)


def _names_a_function(name: Node | None) -> bool:
    return name is not None and (name.kind == "call" or name.text in _FUNCTIONS)


def _written_out(gold: Node, answer: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the pair with a constant of physics written in the letters of the other side."""
    left = variables(gold)
    right = variables(answer)
    for name, (meaning, needed) in _DEFINED.items():
        for here, there in ((left, right), (right, left)):
            if name in here - there and needed in there - here:
                yield substituted(gold, {name: meaning}), substituted(answer, {name: meaning})


def _with_one_parameter(gold: Node, answer: Node) -> Iterator[tuple[Node, Node]]:
    """Yield (t, t+1) and (s, s+1) with the same letter, because a family's parameter may have any
    letter.
    """
    if gold.kind != "tuple" or answer.kind != "tuple":
        return
    one = variables(gold)
    two = variables(answer)
    if len(one) == len(two) == 1 and one != two and (one | two) <= _PARAMETERS:
        (name,) = two
        yield gold, substituted(answer, {name: symbol(*one)})


def _renamed(
    gold: Node, answer: Node, left: frozenset[str], right: frozenset[str], is_solution: bool
) -> Iterator[tuple[Node, Node]]:
    """Yield the pair with the answer's constants renamed to those of the reference."""
    exchanged = _ARBITRARY if is_solution else _NUMBERED
    shared = {name for name in left & right if exchanged.fullmatch(name)}
    ours = sorted((left - right) | shared)
    theirs = sorted((right - left) | shared)
    if not 1 <= len(ours) == len(theirs) <= _MOST:
        return
    for names, others, node in ((ours, theirs, gold), (theirs, ours, answer)):
        if not _are_arbitrary(names, others, views.named(node).value, is_solution):
            return
    for order in permutations(ours):
        if list(order) != theirs:
            letters = {name: symbol(new) for name, new in zip(theirs, order, strict=True)}
            yield gold, substituted(answer, letters)


def _are_arbitrary(names: list[str], others: list[str], body: Node, is_solution: bool) -> bool:
    """Return whether these letters of an answer are constants that may have any name."""
    if not all(_ARBITRARY.fullmatch(name) for name in names):
        return False
    if is_solution and all(_INTEGRATION.fullmatch(name) for name in names):
        return True
    if not _is_linear(body, frozenset(names)):
        return False
    if is_solution:
        return True
    if not variables(body) - set(names):
        return False
    if len(names) > 1:  # A cos t + B sin t needs c_1 and c_2 on the other side
        return any(all(map(_NUMBERED.fullmatch, each)) for each in (names, others))
    is_of_integration = all(_INTEGRATION.fullmatch(name) for name in (*names, *others))
    return is_of_integration and _is_term(body, names[0])


def _shifted(one: Node, two: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the difference of two antiderivatives and its value at one point; it may be any
    constant.
    """
    for left in _terms(one):
        for right in _terms(two):
            if "C" not in (left, right) and not left[0] == right[0] == "C":
                continue
            whole = minus(_without(one, left), _without(two, right))
            names = sorted(variables(whole))
            # an arbitrary constant must be added to a function: 2 + C is not an antiderivative
            if not names or not variables(_without(one, left)) or not _is_of_functions(names):
                continue
            point = {name: number(Fraction(1, 2 + at)) for at, name in enumerate(names)}
            yield whole, substituted(whole, point)


def _natural(node: Node) -> Node:
    """Return the tree with log as the natural logarithm."""
    args = tuple(map(_natural, node.args))
    name = "ln" if node.kind == "func" and node.text == "log" else node.text
    return replace(node, args=args, text=name) if args else node


def _terms(body: Node) -> list[str]:
    return [
        name
        for name in sorted(variables(body))
        if _INTEGRATION.fullmatch(name) and _is_term(body, name)
    ]


def _is_of_functions(names: list[str]) -> bool:
    """Return whether one of the letters is a usual variable, and none is another constant."""
    return any(name in "xyztsuvr" or name in ("theta", "phi") for name in names) and not any(
        map(_ARBITRARY.fullmatch, names)
    )


def _without(body: Node, name: str) -> Node:
    return substituted(body, {name: number(0)})


def _is_term(node: Node, name: str) -> bool:
    """Return whether a letter is added to the rest, times a number at most."""
    if node.kind == "symbol":
        return node.text == name
    if node.kind not in ("add", "mul"):
        return False
    inside = [arg for arg in node.args if name in variables(arg)]
    if len(inside) != 1 or not _is_term(inside[0], name):
        return False
    return node.kind == "add" or not any(variables(arg) for arg in node.args if arg != inside[0])


def _is_linear(node: Node, names: frozenset[str]) -> bool:
    """Return whether letters are coefficients: added, and never multiplied by one another."""
    if node.kind == "symbol" or not variables(node) & names:
        return True
    if node.kind not in ("add", "mul"):
        return False
    inside = [arg for arg in node.args if variables(arg) & names]
    if node.kind == "mul" and len(inside) > 1:
        return False
    return all(_is_linear(arg, names) for arg in inside)
