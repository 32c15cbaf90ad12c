"""Phrases around a value: neutral words are passed over, units and counts bind to it, any other word makes it text."""

from collections.abc import Sequence
from fractions import Fraction

from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.lexer import END, Token
from atts.evaluators.syntax.stream import Grammar
from atts.evaluators.syntax.tree import OTHERWISE, THREE, TWO, Node, number, symbol
from atts.evaluators.syntax.units import TAILS, measure
from atts.evaluators.verdict import Prose, UnknownWords

_PROPERTIES = frozenset({"even", "odd", "prime", "rational", "irrational", "composite"})
_CONDITIONS = frozenset({"if", "when", "for", "where"})
REST = frozenset({"otherwise", "else", "elsewhere"})
_LEANING = frozenset({"of", "from", "per", "for", "first", "second", "last", "next"})
"""Words that say of the value after them which ones are meant, or what else is."""
_RAISED = {"squared": TWO, "cubed": THREE}


def unknown(words: Sequence[str]) -> Prose:
    """The error for words that leave no value: denied or conditioned, or not known to us."""
    denials = [word for word in words if word.lower() in vocabulary.NEGATIONS]
    return Prose(f"the word {denials[0]!r}") if denials else UnknownWords(f"the words {' '.join(words)!r}")


def phrase_after(parser: Grammar, node: Node) -> Node:
    """The value with what follows it: its unit, its modulus or base, remarks, and words that change it."""
    unit = ""
    while True:
        token = parser.here
        if token.kind in ("unit", "currency") and not unit:
            unit = parser.take().text
            node = _compound(parser, node, unit)
        elif token.kind == "word":
            node = _word_after(parser, node, parser.take().text)
        elif token.kind == "op" and token.text in ("pmod", "mod"):
            node = modulo(parser, node)
        elif token.text == "(" and parser.ahead().text == "mod":
            parser.take()
            node = modulo(parser, node)
            parser.expect("close", ")")
        elif token.text == "(" and parser.remark():
            node = _remark(parser, node)
        else:
            return (
                Node("quantity", (node,), unit.lstrip("~"), Fraction(1) if unit[0] == "~" else None) if unit else node
            )


def _word_after(parser: Grammar, node: Node, word: str) -> Node:
    lower = word.lower()
    share = vocabulary.SHARES.get("half" if lower == "halves" else lower.removesuffix("s"))
    if lower == "base" or (lower == "in" and parser.here.text == "base"):
        return _in_base(parser, node)
    if lower in vocabulary.LARGE:
        return Node("mul", (node, number(vocabulary.LARGE[lower])))
    if lower in REST:
        return Node("cases", (node, OTHERWISE))
    if lower in _RAISED:
        return Node("pow", (node, _RAISED[lower]))
    if share and node.kind == "number":
        return Node("mul", (node, number(Fraction(1, share))))
    if lower in ("am", "pm"):
        return _clock(node, lower)
    if lower in _PROPERTIES and node.kind == "symbol":
        return Node("relation", (node, stated_property(lower)), "=")
    if lower in TAILS or word == "." or (lower == "in" and parser.here.text.lower() in ("total", "all")):
        return node
    if lower == "all":
        return node
    raise unknown([word])


def stated_property(word: str) -> Node:
    if word in ("even", "odd"):
        return Node("congruence", (number(int(word == "odd")), TWO))
    return Node("word", text=word)


def modulo(parser: Grammar, node: Node) -> Node:
    """The class of a value by the modulus that is said after it."""
    is_braced = parser.take().text == "pmod"
    return Node("congruence", (node, parser.factor() if is_braced else parser.expression()))


def _clock(node: Node, half: str) -> Node:
    parts = [arg.text for arg in node.args] if node.kind == "ratio" else [node.text, "00"]
    if not all(part.isdigit() for part in parts) or not 0 < int(parts[0]) < 13:
        raise UnknownWords(f"the word {half!r}")
    hour = int(parts[0]) % 12 + 12 * (half == "pm")
    return Node("clock", text=":".join([str(hour), *parts[1:]]))


def _in_base(parser: Grammar, node: Node) -> Node:
    if parser.here.text == "base":
        parser.take()
    base = parser.take().text.lower()
    value = int(base) if base.isdigit() and len(base) < 3 else vocabulary.BASES.get(base)
    if node.kind != "number" or value is None:
        raise Prose("a base in words")
    return Node("based", text=node.text, value=Fraction(value))


def _remark(parser: Grammar, node: Node) -> Node:
    """A bracketed remark: an approximation is passed over, another form of the value has to be equal to it."""
    parser.take()
    words: list[str] = []
    while (
        parser.is_kind("word", "sep") or parser.is_op("~", "=") or (parser.is_op("-") and parser.ahead().kind == "word")
    ):
        words.append(parser.take().text.lower())
    plain = [
        word for word in words if word not in {"-"} | vocabulary.NEUTRAL | vocabulary.APPROXIMATE | {"=", "~", "or"}
    ]
    if parser.here.text == ")":
        parser.take()
        said = vocabulary.number_in_words(" ".join(words))
        if said is not None:
            return Node("aliases", (node, number(said, str(said))))
        if plain:
            raise unknown(words)
        return node
    if plain:
        raise unknown(words)
    value = parser.items()
    parser.expect("close", ")")
    is_rounded = any(word in _ROUGH or word == "~" for word in words)
    return node if is_rounded else Node("aliases", (node, value))


_ROUGH = vocabulary.APPROXIMATE - {"or", "ie", "i.e", "equivalently", "also", "aka", "same", "as", "is"}


def _compound(parser: Grammar, node: Node, unit: str) -> Node:
    """5 feet 3 inches: the parts are summed in the unit of the first."""
    if parser.here.kind != "number":
        return node
    following = parser.quantity()
    whole = joined_quantities(Node("quantity", (node,), unit.lstrip("~")), following)
    if whole is None:
        raise UnknownWords("words between values")
    return whole.args[0]


def joined_quantities(first: Node, second: Node) -> Node | None:
    """Two amounts of one kind as one, the first in the larger unit; None when they are none."""
    if first.kind != "quantity" or second.kind != "quantity":
        return None
    one, two = measure(first.text), measure(second.text)
    if one is None or two is None or one[0] != two[0] or not one[0] or one[1] <= two[1]:
        return None
    return Node(
        "quantity", (Node("add", (*first.args, Node("mul", (*second.args, number(two[1] / one[1]))))),), first.text
    )


def joined(parser: Grammar, before: Node, link: str, item: Node) -> Node | None:
    """Two amounts as one, a value with its condition, or a case with one condition more; None for two items."""
    is_statement = item.kind in ("relation", "word") or (item.kind == "symbol" and link in ("if", "when"))
    if link in _CONDITIONS and is_statement and item.text != "in":
        return Node("cases", (before, item))
    if link == "and" and before.kind == "cases" and item.kind == "relation" and parser.here.text not in _CONDITIONS:
        return Node("cases", (before.args[0], Node("list", (before.args[1], item), "and")))
    return joined_quantities(before, item) if link == "and" else None


def phrase_before(parser: Grammar) -> Node | None:
    """Words before a value: neutral ones are passed over, those that name it are its name, others make it text."""
    found: list[str] = []
    start = parser.at
    while parser.here.kind in ("word", "unit"):
        found.append(parser.take().text)
    end = _end_of_label(parser)
    if end is not None:
        names = [token.text for token in parser.tokens[parser.at : end] if token.kind != "word"]
        found += [token.text for token in parser.tokens[parser.at : end] if token.kind == "word"]
        return _label(parser, found, names, end)
    if parser.here.kind in ("end", "sep", "close") or parser.here.text.startswith(("end:", "\\\\", "&")):
        return OTHERWISE if " ".join(found).lower() in REST else Node("word", text=" ".join(found))
    if len(found) > 12 or any(word.lower() not in vocabulary.NEUTRAL | vocabulary.LABELS for word in found):
        raise unknown(found)
    if any(word.lower() not in vocabulary.NEUTRAL for word in found):
        if found[-1].lower() in _LEANING:
            raise UnknownWords(f"the words {' '.join(found)!r}")
        parser.tokens.insert(parser.at, Token("op", "="))
        return _label(parser, found, [], parser.at)
    return None if parser.at > start else Node("word")


def _end_of_label(parser: Grammar) -> int | None:
    """Where the sign stands that parts a name in words from its value."""
    at = parser.at
    while at < len(parser.tokens) and at < parser.at + 12:
        token = parser.tokens[at]
        if token.kind == "op" and token.text in ("=", ":"):
            return at
        if token.kind not in ("word", "symbol", "command", "open", "close", "number") or token.text.startswith("frac"):
            return None
        at += 1
    return None


def _label(parser: Grammar, words: list[str], names: list[str], end: int) -> Node | None:
    """The name that words and symbols before a sign give to what follows; None when they only announce it."""
    names += [word for word in words if len(word) > 1 and word.isupper()]  # of figures
    words = [word.lower() for word in words if word not in names]
    if any(word not in vocabulary.NEUTRAL | vocabulary.LABELS and measure(word) is None for word in words):
        raise unknown(words)
    telling = sorted({*words} - vocabulary.NEUTRAL)
    parser.at = end
    if telling:
        parser.tokens[end] = Token("op", "=")
        return Node("word", text=" ".join([*telling, *names]))
    if names:
        parser.tokens[end] = Token("op", "=")
        return symbol("".join(names))
    parser.take()
    return None if parser.here is not END else Node("word")
