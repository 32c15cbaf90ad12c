"""Phrases around a value: units, remarks, bases, and those that make it no value at all."""

from __future__ import annotations

from fractions import Fraction

from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.stream import Grammar
from atts.evaluators.syntax.tree import Node, number
from atts.evaluators.verdict import Prose


def phrase_after(parser: Grammar, node: Node) -> Node:
    """The value with the words that follow it folded in; raises Prose when they deny or condition it."""
    unit: list[str] = []
    while True:
        token = parser.here
        if token.kind == "word":
            word = parser.take().text
            lower = word.lower()
            if lower in vocabulary.NEGATIONS:
                raise Prose(f"the word {word!r}")
            if lower == "base" or (lower == "in" and parser.here.text == "base"):
                return _in_base(parser, node)
            if lower in vocabulary.LARGE and not unit:
                node = Node("mul", (node, number(vocabulary.LARGE[lower])))
            elif word != ".":
                unit.append(lower)
        elif token.kind == "open" and token.text == "(" and (unit or parser.remark()):
            _skip_remark(parser)
        elif unit and token.kind == "op" and token.text in ("^", "/", "*", "'", "-"):
            unit.append(_unit_sign(parser))
        elif unit and token.kind == "symbol" and token.text in ("s", "m", "h", "g", "a", "L", "N"):
            unit.append(parser.take().text)
        elif unit and token.kind == "number" and not _known(unit):
            parser.take()
        else:
            break
    if len(unit) > 6 and not _known(unit):
        raise Prose("many words after the value")
    node = _compound(parser, node, unit)
    phrase = " ".join(unit)
    return Node("quantity", (node,), phrase) if phrase.strip() else node


def _known(unit: list[str]) -> bool:
    return vocabulary.measure(" ".join(unit)) is not None


def _unit_sign(parser: Grammar) -> str:
    sign = parser.take().text
    if sign != "^":
        return "/" if sign == "/" else ""
    return "^" + parser.subscript()


def _in_base(parser: Grammar, node: Node) -> Node:
    if parser.here.text == "base":
        parser.take()
    base = parser.take().text.lower()
    value = int(base) if base.isdigit() and len(base) < 3 else vocabulary.BASES.get(base)
    if node.kind != "number" or value is None:
        raise Prose("a base in words")
    return Node("based", text=node.text, value=Fraction(value))


def _skip_remark(parser: Grammar) -> None:
    """Pass over a bracketed remark; one that denies the value counts as words after it."""
    level = 0
    while True:
        token = parser.take()
        if token.kind == "end":
            raise Prose("a remark that is never closed")
        if token.kind == "word" and token.text.lower() in ("not", "cannot", "no", "impossible", "or"):
            raise Prose(f"the word {token.text!r}")
        level += (token.kind == "open") - (token.kind == "close")
        if level == 0:
            return


def _compound(parser: Grammar, node: Node, unit: list[str]) -> Node:
    """5 feet 3 inches: the parts are summed in the unit of the first."""
    if parser.here.kind != "number" or not unit:
        return node
    first = vocabulary.measure(" ".join(unit))
    following = parser.quantity()
    second = vocabulary.measure(following.text) if following.kind == "quantity" else None
    if first is None or second is None or first[0] != second[0]:
        raise Prose("words between values")
    return Node("add", (node, Node("mul", (following.args[0], number(second[1] / first[1])))))


def phrase_before(parser: Grammar) -> Node | None:
    """Words before a value are passed over; without a value after them they are the answer themselves.

    Raises Prose when they deny or condition what follows.
    """
    found: list[str] = []
    while parser.here.kind == "word":
        found.append(parser.take().text)
    if parser.is_op(":", "="):
        if parser.is_op("="):
            return Node("word", text=" ".join(found))
        parser.take()
    token = parser.here
    if token.kind in ("end", "sep", "close"):
        return Node("word", text=" ".join(found))
    if any(word.lower() in _DENIALS or not word.isascii() for word in found) or len(found) > 12:
        raise Prose("words before the value")
    if any(word.lower()[:3] in _DATES for word in found):
        raise Prose("a date")
    return None


_DENIALS = vocabulary.NEGATIONS - {"is", "are", "was", "were", "be", "only", "both"}
_DATES = frozenset("jan feb apr jun jul aug sep oct nov dec mon tue wed thu fri sat sun".split()) | {"mar", "may"}
