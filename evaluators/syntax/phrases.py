"""Parser of phrases around a value: neutral words are skipped, units and counts bind to it, others
make it text.
"""

from collections.abc import Sequence
from fractions import Fraction

from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.grammar import Grammar, stated_property
from atts.evaluators.syntax.lexer import END, Token
from atts.evaluators.syntax.tree import OTHERWISE, TWO, Node, number, symbol
from atts.evaluators.syntax.vocabulary import TAILS, measure, words
from atts.evaluators.verdict import Prose, UnknownWords

_PROPERTIES = words("properties")
_CONDITIONS = words("conditions")
REST = words("rest")
_LEANING = words("leaning")
_ROUGH = words("rough") | {"~"}
_PASSED_OVER = {"-", "=", "~", "or"} | vocabulary.NEUTRAL | vocabulary.APPROXIMATE
_RAISED = {"squared": TWO, "cubed": number(3, "3")}


class Phrases(Grammar):
    """What words may stand before a value, after it and between two."""

    def phrase_after(self, node: Node) -> Node:
        """The value with what follows it: its unit, its modulus or base, remarks, and words that
        change it.
        """
        unit = ""
        while True:
            token = self.here
            if token.kind in ("unit", "currency") and not unit:
                unit = self.take().text
                node = self.compound(node, unit.lstrip("~"))
            elif token.kind == "word":
                node = self.word_after(node, self.take().text)
            elif self.is_op("pmod", "mod"):
                node = self.modulo(node)
            elif token.text == "(" and self.ahead().text in ("mod", "base"):
                self.take()
                node = self.modulo(node) if self.is_op("mod") else self.in_base(node)
                self.expect("close", ")")
            elif token.text == "(" and self.remark():
                node = self.remarked(node)
            elif not unit:
                return node
            else:
                return Node(
                    "quantity", (node,), unit.lstrip("~"), Fraction(1) if unit[0] == "~" else None
                )

    def word_after(self, node: Node, word: str) -> Node:
        """The value as a word after it changes it."""
        lower = word.lower()
        if lower == "base" or (lower == "in" and self.here.text == "base"):
            return self.in_base(node)
        if lower in vocabulary.LARGE:
            return Node("mul", (node, number(vocabulary.LARGE[lower])))
        if lower in REST:
            return Node("cases", (node, OTHERWISE))
        if lower in _RAISED:
            return Node("pow", (node, _RAISED[lower]))
        if lower in vocabulary.SHARES and node.kind == "number":
            return Node("mul", (node, number(Fraction(1, vocabulary.SHARES[lower]))))
        if lower in ("am", "pm"):
            return _clock(node, lower)
        if lower in _PROPERTIES and node.kind == "symbol":
            return Node("relation", (node, stated_property(lower)), "=")
        if (
            lower in TAILS
            or word in (".", "all")
            or (lower == "in" and self.here.text.lower() in ("total", "all"))
        ):
            return node
        raise unknown([word])

    def modulo(self, node: Node) -> Node:
        """The class of a value by the modulus that is said after it."""
        return Node(
            "congruence", (node, self.factor() if self.take().text == "pmod" else self.expression())
        )

    def in_base(self, node: Node) -> Node:
        """The value as a numeral of the base that is said after it."""
        if self.here.text == "base":
            self.take()
        base = vocabulary.base(self.take().text)
        if node.kind != "number" or base is None:
            raise Prose("a base in words")
        return Node("based", text=node.text, value=base)

    def remarked(self, node: Node) -> Node:
        """A bracketed remark: an approximation is passed over, another form of the value has to be
        equal to it.
        """
        self.take()
        said: list[str] = []
        while (
            self.is_kind("word", "sep")
            or self.is_op("~", "=")
            or (self.is_op("-") and self.ahead().kind == "word")
        ):
            said.append(self.take().text.lower())
        value = None
        if self.here.text != ")":
            if not {*said} <= _PASSED_OVER:
                raise unknown(said)
            value = self.items()
        elif (count := vocabulary.number_in_words(" ".join(said))) is not None:
            value = number(count, str(count))
        elif not {*said} <= _PASSED_OVER:
            raise unknown(said)
        self.expect("close", ")")
        return (
            node if value is None or not _ROUGH.isdisjoint(said) else Node("aliases", (node, value))
        )

    def compound(self, node: Node, unit: str) -> Node:
        """5 feet 3 inches: the parts are summed in the unit of the first."""
        if self.here.kind != "number":
            return node
        whole = joined_quantities(Node("quantity", (node,), unit), self.quantity())
        if whole is None:
            raise UnknownWords("words between values")
        return whole.args[0]

    def taken_together(self, before: Node, link: str, item: Node) -> Node | None:
        """Two amounts as one, a value with its condition, or a case with one condition more; None
        for two items.
        """
        is_statement = item.kind in ("relation", "word") or (
            item.kind == "symbol" and link in ("if", "when")
        )
        if link in _CONDITIONS and is_statement and item.text != "in":
            return Node("cases", (before, item))
        if (
            link == "and"
            and before.kind == "cases"
            and item.kind == "relation"
            and self.here.text not in _CONDITIONS
        ):
            return Node("cases", (before.args[0], Node("list", (before.args[1], item), "and")))
        return joined_quantities(before, item) if link == "and" else None

    def phrase_before(self) -> Node | None:
        """Words before a value: neutral ones are passed over, those that name it are its name,
        others make it text.
        """
        found: list[str] = []
        while self.is_kind("word", "unit"):
            found.append(self.take().text)
        if found and found[-1].lower() == "from" and self.is_kind("number"):
            raise UnknownWords("a stretch between two values")
        end = self.end_of_label()
        if end is not None:
            label = self.tokens[self.at : end]
            names = [token.text for token in label if token.kind != "word"]
            return self.label(
                [*found, *(token.text for token in label if token.kind == "word")], names, end
            )
        if self.is_kind("end", "sep", "close") or self.here.text.startswith(("end:", "\\\\", "&")):
            return (
                OTHERWISE if " ".join(found).lower() in REST else Node("word", text=" ".join(found))
            )
        lower = {word.lower() for word in found}
        if len(found) > 12 or not lower <= vocabulary.NEUTRAL | vocabulary.LABELS:
            raise unknown(found)
        if lower <= vocabulary.NEUTRAL:
            return None
        if found[-1].lower() in _LEANING:
            raise UnknownWords(f"the words {' '.join(found)!r}")
        self.tokens.insert(self.at, Token("op", "="))
        return self.label(found, [], self.at)

    def end_of_label(self) -> int | None:
        """Where the sign stands that parts a name in words from its value."""
        for at in range(self.at, min(self.at + 12, len(self.tokens))):
            token = self.tokens[at]
            if token.kind == "op" and token.text in ("=", ":"):
                return at
            if (
                token.kind not in ("word", "symbol", "command", "open", "close", "number")
                or token.text == "frac"
            ):
                break
        return None

    def label(self, words: list[str], names: list[str], end: int) -> Node | None:
        """The name that words and symbols before a sign give to what follows; None when they only
        announce it.
        """
        names += [word for word in words if len(word) > 1 and word.isupper()]  # of figures
        words = [word.lower() for word in words if word not in names]
        if any(
            word not in vocabulary.NEUTRAL | vocabulary.LABELS and measure(word) is None
            for word in words
        ):
            raise unknown(words)
        telling = sorted({*words} - vocabulary.NEUTRAL)
        self.at = end
        if telling or names:
            self.tokens[end] = Token("op", "=")
            return (
                Node("word", text=" ".join([*telling, *names]))
                if telling
                else symbol("".join(names))
            )
        self.take()
        return None if self.here is not END else Node("word")


def unknown(words: Sequence[str]) -> Prose:
    """The error for words that leave no value: denied or conditioned, or not known to us."""
    denials = [word for word in words if word.lower() in vocabulary.NEGATIONS]
    return (
        Prose(f"the word {denials[0]!r}")
        if denials
        else UnknownWords(f"the words {' '.join(words)!r}")
    )


def _clock(node: Node, half: str) -> Node:
    parts = [arg.text for arg in node.args] if node.kind == "ratio" else [node.text, "00"]
    if not all(part.isdigit() for part in parts) or not 0 < int(parts[0]) < 13:
        raise UnknownWords(f"the word {half!r}")
    return Node("clock", text=":".join([str(int(parts[0]) % 12 + 12 * (half == "pm")), *parts[1:]]))


def joined_quantities(first: Node, second: Node) -> Node | None:
    """Two amounts of one kind as one, the first in the larger unit; None when they are none."""
    one, two = (measure(node.text) if node.kind == "quantity" else None for node in (first, second))
    if one is None or two is None or one[0] != two[0] or not one[0] or one[1] <= two[1]:
        return None
    rest = Node("mul", (*second.args, number(two[1] / one[1])))
    return Node("quantity", (Node("add", (*first.args, rest)),), first.text)
