"""Grammar of answers: lists, relations, expressions, read by recursive descent, bounded in depth,
linear in length.
"""

from collections.abc import Callable
from fractions import Fraction

from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.lexer import SIGNS, STARTS, Stream
from atts.evaluators.syntax.tree import (
    EMPTY_SET,
    MINUS_ONE,
    TWO,
    Node,
    function,
    joined,
    number,
    quotient,
)
from atts.evaluators.syntax.vocabulary import measure
from atts.evaluators.verdict import Malformed, Undecided

_RELATIONS = frozenset(
    {
        "=",
        "<",
        ">",
        "<=",
        ">=",
        "!=",
        "~",
        "==",
        "in",
        "->",
        "=>>",
        "<=>",
        "=<",
        "<>",
        ":=",
        "=>",
        # fmt: skip
        "notin",
        "subset",
        "subseteq",
        "supset",
        "supseteq",
        "mid",
        "&",
    }
)
_SPELLED = {"=<": "<=", "<>": "!=", ":=": "=", "=>": ">=", "==": "="}
_MARKS = frozenset({"circ", "degree", "'", "''", "'''", "*", "th", "st", "nd", "rd"})
"""What ^ may raise that is no exponent."""
_CLOSING = {"(": ")]", "[": "])", "\\{": ("\\}",), "{": ("}",), "|": ("|",)}
_BETWEEN: dict[str, Callable[[Node, Node], Node]] = {
    "over": quotient,
    "choose": lambda n, k: function("binom", n, k),
}
_BLOCKS = frozenset({"rfloor", "rceil"})


class Grammar(Stream):
    """Recursive descent over a token list; every method consumes what it reads."""

    atom: Callable[[], Node]  # these are of the layers above
    called: Callable[[str], Node]
    phrase_before: Callable[[], Node | None]
    phrase_after: Callable[[Node], Node]
    taken_together: Callable[[Node, str, Node], Node | None]

    def answer(self) -> Node:
        """The whole answer; raises Malformed when something is left over."""
        node = self.items()
        if self.here.kind != "end":
            raise Malformed(f"{self.here.text!r} does not belong here")
        return node

    def items(self) -> Node:
        """Relations between separators; one alone stands for itself."""
        found: list[Node] = []
        said: set[str] = set()
        while True:
            link = ""
            while self.is_kind("sep"):
                link = self.take().text
                said.add(link)
            if self.is_kind("end", "close") or self.is_op("&", "\\\\"):
                break
            item = self.relation()
            *value, condition = item.args or (item,)
            if item.kind == "mul" and condition.kind == "relation":  # its condition in brackets
                found.append(joined("mul", value))
                item = condition
            whole = self.taken_together(found[-1], link, item) if found else None
            found[-1 if whole else len(found) :] = [whole or item]
            self.within(len(found), f"more than {self.limits.items} items")
            if not self.is_kind("sep"):
                break
        if not found:
            raise Malformed("nothing where a value should be")
        if len(found) > 1 and all(item.kind == "cases" for item in found):
            return Node("cases", tuple(part for item in found for part in item.args))
        link = "or" if "or" in said else "and" if "and" in said else ""
        return (
            found[0]
            if len(found) == 1
            else Node("list", tuple(found), "mixed" if {"and", "or"} <= said else link)
        )

    def relation(self) -> Node:
        """Sides joined by relation signs, such as 0 < x <= 1."""
        sides = [self.side()]
        signs: list[str] = []
        while (
            self.is_kind("op")
            and self.here.text in _RELATIONS
            and not (self.in_set and self.here.text == "mid")
        ):
            sign = self.take().text
            if sign != "&":
                signs.append(_SPELLED.get(sign, sign))
                while self.took("&", "="):
                    pass
                sides.append(self.side())
        if signs == ["="] and sides[1].kind == "word":
            sides[1] = stated_property(sides[1].text)
        return sides[0] if not signs else Node("relation", tuple(sides), " ".join(signs))

    def side(self) -> Node:
        """One side of a relation: sets joined by union signs, or an expression with its unit."""
        parts = [self.quantity()]
        while sign := self.took("cup", "cap", "setminus", "wedge", "vee"):
            if sign in ("cup", "vee"):
                parts.append(self.quantity())
            else:
                both = joined("union", parts), self.quantity()
                parts = [
                    Node("setminus", both) if sign == "setminus" else Node("opaque", both, "cap")
                ]
        return joined("union", parts)

    def quantity(self) -> Node:
        """An expression, then perhaps its unit or a remark."""
        if not self.in_set:
            self.took(":")
        if self.here.kind == "word":
            label = self.phrase_before()
            if label is not None:
                return label
        outer = self.currencies
        self.currencies = set()
        node = self.expression()
        if self.is_op(":") and not self.in_set:
            node = self.ratio(node)
        if self.currencies:
            node = self.priced(node)
        self.currencies = outer
        return (
            self.phrase_after(node)
            if self.is_kind("word", "open", "unit", "currency", "op")
            else node
        )

    def priced(self, node: Node) -> Node:
        """An amount whose currency sign stood before it; what follows may be its rate, as in $8 per
        hour.
        """
        if len(self.currencies) > 1:
            raise Undecided("several currencies")
        unit = " ".join(self.currencies)
        while self.is_kind("word") and self.here.text.lower() in vocabulary.LARGE:
            node = Node("mul", (node, number(vocabulary.LARGE[self.take().text.lower()])))
        if self.here.text in ("per", "/") and self.ahead().kind == "word":
            self.take()
            unit += f" per {self.take().text}"
        elif self.is_kind("unit"):
            other = self.take().text
            unit = unit if measure(other) == measure(unit) else f"{unit} {other}"
        if measure(unit) is None:
            raise Undecided(f"the unit {unit}")
        return Node("quantity", (node,), unit)

    def ratio(self, first: Node) -> Node:
        parts = [first]
        while self.ahead().kind in STARTS and self.took(":"):
            parts.append(self.expression())
        if self.is_op(":"):
            raise Malformed("a ratio without its second part")
        return Node("ratio", tuple(parts))

    def expression(self) -> Node:
        """Terms joined by + and -."""
        terms = [self.signed(self.term)]
        while self.is_op(*SIGNS):
            terms.append(self.signed(self.term))
            self.within(len(terms), "too many terms")
        return joined("add", terms)

    def term(self) -> Node:
        """Factors joined by multiplication and division signs, or by nothing."""
        factors = [self.factor()]
        while True:
            if self.took("*"):
                factors.append(self.signed(self.factor))
            elif self.is_op("/"):
                if self.currencies and self.ahead().kind == "word" and measure(self.ahead().text):
                    break  # $9/hour
                self.take()
                factors.append(Node("pow", (self.signed(self.factor), MINUS_ONE)))
            elif self.starts_factor():
                factors[-1:] = self.beside(factors[-1])
            else:
                break
            self.within(len(factors), "too many factors")
        return joined("mul", factors)

    def starts_factor(self) -> bool:
        token = self.here
        if token.kind == "op":
            return False
        if (
            self.integrals
            and token.kind == "symbol"
            and token.text == "d"
            and self.ahead().kind == "symbol"
        ):
            return False
        if token.kind == "open" and self.remark():
            return False
        return (
            token.kind in STARTS and token.text not in _BLOCKS and not token.text.startswith("end:")
        )

    def remark(self) -> bool:
        """Whether a bracket holds words, such as (approximately 0.5)."""
        return self.here.text == "(" and (
            self.ahead().kind == "word" or self.ahead().text in ("mod", "or", "~")
        )

    def beside(self, before: Node) -> tuple[Node, ...]:
        """A factor and what is written right after it: two factors, or the mixed number of an
        integer and a fraction.

        What follows is read once: to try it as a fraction and then read it again would double the
        work at every level of nesting.
        """
        is_whole = before.kind == "number" and before.value is not None and "." not in before.text
        if self.here.kind == "number":
            if is_whole and not self.here.tight and (fraction := self.slash_fraction()):
                return (Node("add", (before, fraction)),)
            if before.kind in ("number", "huge"):
                raise Malformed("two numbers side by side")
            return before, self.factor()
        is_fraction = is_whole and self.here.text == "frac"
        after = self.factor()
        return (
            (Node("add", (before, after)),)
            if is_fraction and _is_proper(after)
            else (before, after)
        )

    def slash_fraction(self) -> Node | None:
        """a/b of plain integers ahead, below one, read as one number."""
        top = self.here
        slash = self.ahead()
        bottom = self.ahead(2)
        if (
            slash.text != "/"
            or bottom.kind != "number"
            or not (top.text.isdigit() and bottom.text.isdigit())
        ):
            return None
        if len(top.text) > 18 or len(bottom.text) > 18 or not 0 < int(top.text) < int(bottom.text):
            return None
        self.at += 3
        return quotient(number(int(top.text), top.text), number(int(bottom.text), bottom.text))

    def factor(self) -> Node:
        """An atom with everything raised, lowered or put after it."""
        node = self.atom()
        while self.here.kind == "op":
            text = self.here.text
            if text in ("^", "**"):
                node = self.raised(node)
            elif text == "!":
                node = self.factorial(node)
            elif text in ("%", "degree", "circ"):
                self.take()
                node = Node("percent" if text == "%" else "degree", (node,))
            elif text == "'" and node.kind in ("degree", "number"):
                raise Undecided("minutes of arc")
            elif text == "_":
                node = self.lowered(node)
            else:
                break
        return node

    def factorial(self, node: Node) -> Node:
        count = 0
        while self.took("!"):
            count += 1
        if count == 2:
            return function("double_factorial", node)
        self.within(count, "too many factorials", self.limits.depth)
        for _ in range(count):
            node = function("factorial", node)
        return node

    def raised(self, base: Node) -> Node:
        """The base with what stands after ^: an exponent, a degree sign, a prime, or the end of an
        ordinal.
        """
        self.take()
        mark = self.here.text.lower()
        length = 1
        if self.here.text == "{":
            inside = [token.text.lower() for token in self.tokens[self.at + 1 : self.at + 5]]
            length = inside.index("}") + 2 if "}" in inside else 0
            mark = "".join(inside[: length - 2]) if length else ""
        if mark not in _MARKS:
            return Node("pow", (base, self.signed(self.tower)))
        self.at += length
        if mark in ("circ", "degree"):
            return Node("degree", (base,))
        if mark[0] in "'*" and base.kind == "symbol":
            return self.called(f"{base.text}{mark}")
        if base.kind != "number" and mark != "'":
            raise Undecided(f"the mark {mark}")
        return base

    def tower(self) -> Node:
        """What stands after ^ and its signs: an atom with its own exponents, so that towers group
        to the right.
        """
        node = self.atom()
        if self.is_op("^", "**"):
            return self.raised(node)
        return self.factorial(node) if self.is_op("!") else node

    def lowered(self, node: Node) -> Node:
        """A subscript: the base of a numeral, or part of a variable's name."""
        self.take()
        name = self.subscript()
        if node.kind in ("number", "huge"):
            base = vocabulary.base(name)
            if base is None or not 2 <= base <= 36:
                raise Undecided(f"the base {name!r}")
            return Node("based", text=node.text, value=base)
        if node.kind in ("symbol", "call"):
            return Node(node.kind, node.args, f"{node.text}_{name}")
        if node.kind in ("add", "mul"):
            raise Undecided("a subscript on an expression")
        return node

    def bracketed(self) -> Node:
        """( … ), [ … ], { … } or \\{ … \\}: a group, tuple, interval or set."""
        opening = self.take().text
        if (opening, self.here.text) == ("\\{", "\\}"):
            self.take()
            return EMPTY_SET
        outer = self.in_set
        self.in_set = opening == "\\{"
        inside = self.items()
        if sign := self.took(*_BETWEEN):
            inside = _BETWEEN[sign](inside, self.relation())
        if self.in_set and self.took("mid", ":"):
            inside = Node("builder", (inside, self.items()))
        self.in_set = outer
        token = self.take()
        if token.kind != "close" or token.text not in _CLOSING[opening]:
            raise Malformed(f"{opening!r} closed by {token.text or 'nothing'!r}")
        members = inside.args if inside.kind == "list" else (inside,)
        if opening == "|":
            return function("abs", inside)
        if opening == "\\{":
            return inside if inside.kind == "builder" else Node("set", members)
        if opening == "{":
            return inside
        if len(members) == 1:
            if (opening, token.text) in (("(", "]"), ("[", ")")):
                raise Malformed("an interval with one end")
            return inside
        return Node("tuple", members, opening + token.text)


def _is_proper(node: Node) -> bool:
    """Whether a fraction is of plain integers and below one, as in a mixed number."""
    match node:
        case Node(
            "mul",
            (Node(value=Fraction() as top), Node("pow", (Node(value=Fraction() as bottom), power))),
        ):
            return (
                power is MINUS_ONE
                and top.denominator == bottom.denominator == 1
                and 0 < top < bottom
            )
        case _:
            return False


def stated_property(word: str) -> Node:
    """What a number that is even, odd or prime is equal to."""
    is_parity = word in ("even", "odd")
    return (
        Node("congruence", (number(int(word == "odd")), TWO))
        if is_parity
        else Node("word", text=word)
    )
