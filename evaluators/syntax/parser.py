"""The lexer and the parser of answers: recursive descent, bounded in depth and linear in length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from atts.evaluators.answers import OPENING, closing
from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.tree import (
    COMMANDS,
    EMPTY_SET,
    MINUS_ONE,
    OTHERWISE,
    TWO,
    Node,
    function,
    grid,
    joined,
    negated,
    number,
    quotient,
    symbol,
    variables,
)
from atts.evaluators.syntax.vocabulary import (
    FORMS,
    SYMBOLS,
    TAILS,
    measure,
    spelled,
    table,
    unit_at,
    words,
)
from atts.evaluators.verdict import Limits, Malformed, Prose, TooLarge, Undecided, UnknownWords

TokenKind = Literal[
    "number", "symbol", "command", "function", "word", "unit", "currency", "op", "open", "close", "sep", "end"
]  # fmt: skip
Mode = Literal["maths", "text"]


class Token(NamedTuple):
    """A token of an answer. `tight` is true if no space precedes it."""

    kind: TokenKind
    text: str
    tight: bool = False


END = Token("end", "")
# Kinds of tokens that can begin a factor of a product.
STARTS = frozenset({"number", "symbol", "command", "function", "open"})
SIGNS = ("+", "-", "pm", "mp")

_TOKEN = re.compile(
    "|".join(f"(?P<{name}>{form})" for name, form in table("tokens", dict[str, str]).items()),
    re.DOTALL,
)
FUNCTIONS = words("functions")
_ALIASES = spelled(table("function_names", dict[str, str]))
_TEXT = words("text_macros")
_UPRIGHT = words("upright")
_BLANK = words("blank")
_BOLD = words("bold")
_COMMANDS: dict[str, tuple[TokenKind, str]] = {
    **{name: ("symbol", name.removeprefix("var")) for name in words("letters")},
    **{name: ("function", _ALIASES.get(name, name)) for name in FUNCTIONS | _ALIASES.keys()},
    **{
        name: (kind, text)
        for kind, commands in table("commands", dict[TokenKind, dict[str, str]]).items()
        for name, text in spelled(commands).items()
    },
}
_LIKE_NUMBERS = frozenset({"pi", "infty", "!", "%", "degree", "circ"}) | vocabulary.LARGE.keys()
_FREE = FORMS["free"]
_VALUE_AHEAD = FORMS["value_ahead"]
_FACTORS = FORMS["factors"]
_NEXT_WORD = FORMS["next_word"]
_WORDS_OF_TWO = words("words_of_two")
_LEADING = {"minus": "-", "negative": "-", "plus": "+"}
_ESCAPES = table("escapes", dict[str, tuple[TokenKind, str]])
_PLAIN = table("plain", dict[str, tuple[TokenKind, str]])
_ANY_CASE: dict[str, tuple[TokenKind, str]] = {
    **{word: ("sep", word) for word in words("separators")},
    **{word: ("op", sign) for word, sign in spelled(table("sign_words", dict[str, str])).items()},
}


def tokens(text: str, limits: Limits) -> Iterator[list[Token]]:
    """Yield a list of the tokens of a cleaned answer, without an end mark.

    If letters of a formula may be units, as in 5 m, a second list is yielded in which these letters
    are units. Raises Malformed for a brace that is never closed, Undecided for an unknown command,
    and TooLarge if there are too many tokens.
    """
    for loose in (False, True):
        lexer = _Lexer(limits, loose)
        lexer.run(text, "maths", 0)
        yield lexer.tokens
        if not lexer.saw_loose:
            return


class _Lexer:
    """A lexer that reads the text once. Text macros are read recursively, up to a fixed depth."""

    def __init__(self, limits: Limits, loose: bool = False) -> None:
        self.limits = limits
        # True: in a formula, read a letter after a number as a unit, even if it may be a variable.
        self.loose = loose
        self.saw_loose = False
        # True if the remaining text only gives a reason, such as "because ...". It is then ignored.
        self.has_ended = False
        self.tokens: list[Token] = []
        self.gap = True

    def add(self, kind: TokenKind, text: str) -> None:
        """Append a token; raise TooLarge if there are too many tokens."""
        if len(self.tokens) >= self.limits.tokens:
            raise TooLarge(f"more than {self.limits.tokens} tokens")
        self.tokens.append(Token(kind, text, not self.gap))
        self.gap = False

    def after(self, *kinds: TokenKind) -> bool:
        """Return True if the last token has one of these kinds."""
        return bool(self.tokens) and self.tokens[-1].kind in kinds

    def run(self, text: str, mode: Mode, depth: int) -> None:
        """Append the tokens of a text to `tokens`."""
        if depth > 8:
            raise TooLarge("text macros nested too deeply")
        position = 0
        while position < len(text) and not self.has_ended:
            match = _TOKEN.match(text, position)
            assert match is not None
            start = position
            position = match.end()
            kind = match.lastgroup
            piece = match[kind] if kind else ""
            if kind in ("command", "letters"):
                end = self.unit(text, start, mode)
                if end:
                    position = end
                    continue
            if kind == "blank":
                self.gap = True
            elif kind == "command":
                position = self.command(piece.strip("\\* "), text, position, depth)
            elif kind == "escaped":
                if piece in _ESCAPES:
                    self.add(*_ESCAPES[piece])
                self.gap = True
            elif kind == "letters":
                self.letters(piece, mode, text[position : position + 16])
            elif kind == "based":
                self.add("command", "based:" + re.sub(r"[{}\s]", "", piece).upper())
            elif kind == "other":
                self.other(piece)
            else:
                self.add(kind, piece)  # type: ignore[arg-type]  # the remaining groups are token kinds

    def unit(self, text: str, start: int, mode: Mode) -> int | None:
        """Add the token of a unit that follows a value, and return the position after the unit.

        The result is None if there is no unit at this position.
        """
        follows_value = self.after("number", "close")
        if self.tokens and self.tokens[-1].text.lower() in _LIKE_NUMBERS:
            follows_value = True
        if self.after("symbol") and text.startswith("\\text", start):
            follows_value = True
        if not follows_value:
            return None
        unit = unit_at(text, start)
        if unit is None:
            return None
        phrase, end = unit
        # A letter with a subscript is not a unit, such as H in 2 H_2O.
        if text[end:].lstrip(" }").startswith("_"):
            return None
        first, _, rest = phrase.partition(" ")
        # In a formula, "5 m" may mean 5 metres or 5 times m. Upright letters are clearly a unit.
        if mode == "maths" and text[start] != "\\" and first in SYMBOLS and len(first) < 4:
            if not _FREE.match(text, end) or self._is_in_root():
                return None
            is_word = first in vocabulary.ATTACHED or (len(first) > 2 and vocabulary.is_word(first))
            if rest[:1] == "^" and len(first) == 1 and not self.after("number"):
                return None
            # Units may be followed by another number and unit, as in 7 h 4 min.
            is_part = self.gap and FORMS["amount"].match(text, end)
            is_doubtful = len(first) == 1 or (first.islower() and not is_word)
            is_product = bool(rest) and all(
                len(part) == 1 and part != "/" for part in phrase.split()
            )
            names = [part for part in phrase.split() if part[0] != "^"]
            if len(names) > 1 and all(len(name) == 1 and name.isupper() for name in names):
                # several capital letters are a product, such as C V^2, not a unit
                is_product = True
            # several single letters are a product, such as 2 g h, not a unit
            if is_product and not is_part:
                return None
            if not rest and not is_part and is_doubtful:
                is_parted = self.gap and self.after("number", "close")
                self.saw_loose = self.saw_loose or is_parted
                if not (self.loose and is_parted):
                    return None
                phrase = "~" + phrase
        self.add("unit", phrase)
        return end

    def _is_in_root(self) -> bool:
        """Return True if the innermost open brace belongs to a root, such as \\sqrt{...} or
        \\sqrt[3]{...}. Letters in a root are variables and not units, so 3mg is a product there.
        """
        depth = 0
        for at in range(len(self.tokens) - 1, 0, -1):
            text = self.tokens[at].text
            depth += (text == "}") - (text == "{")
            if depth < 0:
                before = at - 1
                if self.tokens[before].text == "]":
                    while before > 0 and self.tokens[before].text != "[":
                        before -= 1
                    before -= 1
                return self.tokens[before].text == "sqrt"
            if len(self.tokens) - at > 40:
                break
        return False

    def other(self, char: str) -> None:
        """Add a token for a character that no other rule reads."""
        if char == "\\":
            raise Malformed("a backslash with nothing after it")
        if char == "." and self.after("number"):
            raise Undecided(
                "the full stop after the number ends a sentence, and is not a decimal point"
            )
        if char in "~@#.":
            self.gap = True
        else:
            self.add("word", char)

    def command(self, name: str, text: str, position: int, depth: int) -> int:
        """Add the token of a command; return the position after the command."""
        if name in _COMMANDS:
            self.add(*_COMMANDS[name])
        elif name in _TEXT:
            return self.text_macro(name, text, position, depth)
        elif name in ("color", "textcolor", "mathcolor"):
            return _group(text, position)[1]
        elif name in ("begin", "end", "mathbb"):
            return self.named(name, text, position)
        elif name in _BLANK:
            self.gap = True
        elif name in ("quadx", "quady"):
            self.gap = True
            self.add("symbol", name[-1])
        else:
            raise Undecided(f"the command \\{name}")
        return position

    def named(self, name: str, text: str, position: int) -> int:
        """Add a token for \\begin, \\end or \\mathbb with its argument. The column layout of a
        table is ignored.
        """
        if name == "mathbb" and position < len(text) and text[position].isalpha():
            self.add("command", f"mathbb:{text[position]}")
            return position + 1
        content, position = _group(text, position)
        self.add("command", f"{name}:{content.strip()}")
        if name == "begin" and content.strip() in ("array", "tabular"):
            if OPENING.match(text, position):
                position = _group(text, position)[1]
        return position

    def text_macro(self, name: str, text: str, position: int, depth: int) -> int:
        """Add the content of a text macro, and return the position after the macro."""
        if not OPENING.match(text, position):
            # without braces, a command such as \rm only changes the font, so ignore it
            return position
        content, after = _group(text, position)
        inside = content.strip()
        is_letter = len(inside) == 1 and inside.isalpha() and inside.isascii()
        if name in _UPRIGHT and is_letter:
            self.add("symbol", inside)
        # A bold letter is a vector. Letters from "efghijk" in bold are names of functions or unit
        # vectors.
        elif name in _BOLD and is_letter and inside not in "efghijk":
            self.add("symbol", f"bold {inside}")
        else:
            self.gap = True
            self.run(content, "text" if name in _UPRIGHT else "maths", depth + 1)
        self.gap = self.gap or name in _UPRIGHT
        return after

    def letters(self, run: str, mode: Mode, ahead: str = "") -> None:
        """Add the tokens of a sequence of letters.

        The letters may be a separator, sign, function, variable, word or product.
        """
        lower = run.lower()
        if lower in _ANY_CASE:
            self.add(*_ANY_CASE[lower])
        elif lower in ("since", "because"):
            self.has_ended = bool(self.tokens)
        elif lower == "a" and self._is_article(ahead):
            self.add("word", lower)
        elif (
            lower == "to"
            and self.after("number")
            and (not ahead.strip() or _VALUE_AHEAD.match(ahead))
        ):
            self.add("op", ":")
        elif lower in _LEADING and _VALUE_AHEAD.match(ahead):
            self.add("op", _LEADING[lower])
        elif run in _PLAIN:
            self.add(*_PLAIN[run])
        elif (
            len(run) > 1
            and (run in FUNCTIONS or run in _ALIASES)
            and lower not in ("re", "im", "det", "arg")
        ):
            self.add("function", _ALIASES.get(run, run))
        elif len(run) == 1:
            is_article = mode == "text" and run == "a" and self.after("word")
            self.add("word" if is_article else "symbol", run)
        elif mode == "text" or (self._is_word(run) and not (len(run) == 2 and ahead[:1] == "^")):
            self.add("word", run)
        else:
            # Several letters, such as ab, are a product of single letters. Exceptions are the name
            # of a function at the start, and "sqrt" or "pi" after one letter.
            for piece in _FACTORS.findall(run):
                self.letters(piece, "maths")

    def _is_article(self, ahead: str) -> bool:
        following = _NEXT_WORD.match(ahead)
        if following is None:
            return False
        is_sentence = self.after("word") and vocabulary.is_word(following[1])
        return is_sentence or following[1] in vocabulary.NEUTRAL | vocabulary.LABELS

    def _is_word(self, run: str) -> bool:
        follows_value = self.after("number", "close", "command", "symbol", "word")
        if run.lower() in vocabulary.ATTACHED and follows_value:
            return not self._is_in_root()
        if run[1:] in ("sqrt", "pi"):
            return False
        return run[:1].lower() + run[1:] in _WORDS_OF_TWO or vocabulary.is_word(run)


def _group(text: str, position: int) -> tuple[str, int]:
    """Return the content of the braces that open at `position`, and the position after the closing
    brace.
    """
    opening = OPENING.match(text, position)
    if opening is None:
        raise Malformed("a macro without its argument")
    end = closing(text, opening.end())
    if end is None:
        raise Malformed("a brace that is never closed")
    return text[opening.end() : end - 1], end


def paired_bars(tokens: list[Token]) -> list[Token]:
    """Return the tokens with every | replaced by an opening or closing bracket.

    A bar without a value before it is an opening bracket. Of two bars between values, the first is
    a closing bracket. Any other bar closes an open bar. The bar in {x | x > 0} is renamed "mid".
    """
    if not any(token.text == "|" for token in tokens):
        return tokens
    result: list[Token] = []
    is_open = 0
    was_bar = False
    for index, token in enumerate(tokens):
        before = result[-1] if result else END
        follower = tokens[index + 1] if index + 1 < len(tokens) else END
        is_bar = token.text == "|" and token.kind == "op"
        if not is_bar:
            result.append(token)
        elif not is_open and _parts_a_set(tokens, index):
            result.append(token._replace(text="mid"))
        else:
            after_value = before.kind in ("number", "symbol", "close")
            if before.text in ("!", "pi", "'"):
                after_value = True
            reopens = was_bar and before.kind == "close" and follower.kind in STARTS
            opens = not after_value or not is_open or reopens
            is_open += 1 if opens else -1
            result.append(Token("open" if opens else "close", "|", token.tight))
        was_bar = is_bar
    if is_open:
        raise Undecided("a bar | without its counterpart")
    return result


def _parts_a_set(tokens: list[Token], index: int) -> bool:
    """Return True if this bar separates the member of a set from its condition, as in {x | x > 0}.

    The test is whether the braces around the bar contain an odd number of bars.
    """
    near = range(max(index - 39, 0), min(index + 200, len(tokens)))
    braces = [at for at in near if tokens[at].text in ("\\{", "\\}")]
    before = [at for at in braces if at < index]
    after = [at for at in braces if at > index]
    if not before or not after or tokens[before[-1]].text != "\\{":
        return False
    return sum(token.text == "|" for token in tokens[before[-1] : after[0]]) % 2 == 1


_RELATIONS = frozenset(
    "= < > <= >= != ~ == in -> ->+ ->- =>> <=> =< <> := => notin subset subseteq supset supseteq mid & "
    "parallel perp".split()
)
_RELATION_SPELLINGS = {"=<": "<=", "<>": "!=", ":=": "=", "=>": ">=", "==": "="}
_MARKS = frozenset({"circ", "degree", "'", "''", "'''", "*", "th", "st", "nd", "rd"})
"""Symbols after ^ that are not exponents, such as the degree sign."""
_CLOSING = {"(": ")]", "[": "])", "\\{": ("\\}",), "{": ("}",), "|": ("|",), "⟨": "⟩"}
_INFIX: dict[str, Callable[[Node, Node], Node]] = {
    "over": quotient,
    "choose": lambda n, k: function("binom", n, k),
}
_LIMITS = {"->": "lim", "->+": "lim+", "->-": "lim-"}
_BLOCK_ENDS = frozenset({"rfloor", "rceil"})

_CALLABLE = frozenset("fghFGH")
_MAYBE_CALLABLE = frozenset("pquPQRSTVNMIABCDEKLXYZW")
# Greek letters that may be functions, and the variables that their argument may contain. With other
# variables, the letter is a factor of a product.
_SPECIAL = {"zeta": frozenset("s"), "Gamma": frozenset("nsxzt")}
_INVERSES = {
    name: f"arc{name}"
    for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
}
_MANY_ARGUMENTS = frozenset({"max", "min", "gcd", "lcm"})
# numbers with more digits are not converted, because Python refuses to convert very long numbers
_MAX_LITERAL = 4000
_E = Node("constant", text="e")
_I = Node("constant", text="i")

_PROPERTIES = words("properties")
_CONDITIONS = words("conditions")
_REST = words("rest")
_LEANING = words("leaning")
_ROUGH = words("rough") | {"~"}
_PASSED_OVER = {"-", "=", "~", "or"} | vocabulary.NEUTRAL | vocabulary.APPROXIMATE
_RAISED = {"squared": TWO, "cubed": number(3, "3")}


class Stream:
    """The list of tokens to parse, with the current position and a limit on the nesting depth."""

    def __init__(self, tokens: list[Token], limits: Limits) -> None:
        self.tokens = paired_bars(tokens)
        self.limits = limits
        self.at = 0
        self.depth = 0

    @property
    def here(self) -> Token:
        """Return the next token, or an end token after the last."""
        if self.at < len(self.tokens):
            return self.tokens[self.at]
        return END

    def ahead(self, distance: int = 1) -> Token:
        """Return the token that is `distance` positions after the next token."""
        index = self.at + distance
        if index < len(self.tokens):
            return self.tokens[index]
        return END

    def take(self) -> Token:
        """Return the next token and advance the position."""
        token = self.here
        self.at += 1
        return token

    def is_op(self, *texts: str) -> bool:
        """Return True if the next token is one of the given operators."""
        token = self.here
        return token.kind == "op" and token.text in texts

    def is_kind(self, *kinds: str) -> bool:
        """Return True if the next token has one of these kinds."""
        return self.here.kind in kinds

    def took(self, *texts: str) -> str:
        """Take the next token if it is one of these signs, and return its text; else return ""."""
        if self.is_op(*texts):
            return self.take().text
        return ""

    def signed(self, read: Callable[[], Node]) -> Node:
        """Parse plus and minus signs, and the node after them, which `read` parses.

        Raises TooLarge if the nesting is too deep.
        """
        self.depth += 1
        self.within(self.depth, "nested too deeply", self.limits.depth)
        signs = list[str]()
        while sign := self.took(*SIGNS):
            signs.append(sign)
        node = read()
        self.depth -= 1
        for sign in signs:
            if sign == "pm":
                node = Node("plusminus", (node,), "+")
            elif sign == "mp":
                node = Node("plusminus", (node,), "-")
        return negated(node) if signs.count("-") % 2 else node

    def expect(self, kind: str, text: str) -> None:
        """Take the next token; raise Malformed if it is a different token."""
        token = self.take()
        if token.kind != kind or token.text != text:
            raise Malformed(f"expected {text!r}, found {token.text or 'the end'!r}")

    def within(self, count: int, what: str, most: int | None = None) -> None:
        """Raise TooLarge if `count` exceeds `most`, which is by default the largest allowed number
        of items.
        """
        if count > (most or self.limits.items):
            raise TooLarge(what)

    def subscript(self) -> str:
        """Parse a subscript, and return its text without the braces."""
        start = self.at
        level = 0
        while level or self.at == start:
            kind = self.take().kind
            if kind == "end" or (not level and kind in ("close", "sep")):
                raise Malformed("a subscript without text or without a closing brace")
            level += (kind == "open") - (kind == "close")
        texts = [token.text for token in self.tokens[start : self.at]]
        if len(texts) > 1:
            texts = texts[1:-1]
        return "".join(texts)


class Parser(Stream):
    """A recursive-descent parser of answers. Each method parses one rule of the grammar, and
    advances past the tokens of this rule.
    """

    def __init__(self, tokens: list[Token], limits: Limits) -> None:
        super().__init__(tokens, limits)
        # Number of integrals that contain the current position. Inside an integral, "dx" is not d
        # times x.
        self.integrals = 0
        # Number of sums over i that contain the current position. Inside such a sum, "i" is not the
        # imaginary unit.
        self.sums_over_i = 0
        self.in_set = False
        # the currency signs seen so far in the current amount of money
        self.currencies: set[str] = set()

    # ---- parsing lists and relations

    def answer(self) -> Node:
        """Parse the whole answer; raise Malformed if tokens remain."""
        node = self.items()
        if self.here.kind != "end":
            raise Malformed(f"{self.here.text!r} does not belong here")
        return node

    def items(self) -> Node:
        """Parse relations separated by commas or by words such as "or". Return a list node, or the
        relation itself if it is the only one.
        """
        items: list[Node] = []
        links: set[str] = set()
        while True:
            link = ""
            while self.is_kind("sep"):
                link = self.take().text
                links.add(link)
            if self.is_kind("end", "close") or self.is_op("&", "\\\\"):
                break
            item = self.relation()
            *value, condition = item.args or (item,)
            # A value may be followed by its condition in brackets, as in "5 (x > 0)".
            if item.kind == "mul" and condition.kind == "relation":
                items.append(joined("mul", value))
                item = condition
            whole = self.taken_together(items[-1], link, item) if items else None
            if whole:
                items[-1] = whole
            else:
                items.append(item)
            self.within(len(items), f"more than {self.limits.items} items")
            if not self.is_kind("sep"):
                break
        if not items:
            raise Malformed("a value is missing")
        if len(items) == 1:
            return items[0]
        if all(item.kind == "cases" for item in items):
            return Node("cases", tuple(part for item in items for part in item.args))
        if {"and", "or"} <= links:
            link = "mixed"
        elif "or" in links:
            link = "or"
        else:
            link = "and" if "and" in links else ""
        return Node("list", tuple(items), link)

    def taken_together(self, before: Node, link: str, item: Node) -> Node | None:
        """Return one node for a value and its condition, or for two amounts such as 5 feet and 3
        inches.

        The result is None if the two items are separate.
        """
        is_statement = item.kind in ("relation", "word")
        if item.kind == "symbol" and link in ("if", "when"):
            is_statement = True
        if link in _CONDITIONS and is_statement and item.text != "in":
            return Node("cases", (before, item))
        if link != "and":
            return None
        continues_condition = before.kind == "cases" and item.kind == "relation"
        if continues_condition and self.here.text not in _CONDITIONS:
            value, condition = before.args[0], before.args[1]
            return Node("cases", (value, Node("list", (condition, item), "and")))
        return joined_quantities(before, item)

    def relation(self) -> Node:
        """Parse expressions that are joined by relation signs, such as 0 < x <= 1."""
        sides = [self.side()]
        signs: list[str] = []
        while self.is_op(*_RELATIONS) and not (self.in_set and self.here.text == "mid"):
            sign = self.take().text
            if sign == "&":
                continue
            signs.append(_RELATION_SPELLINGS.get(sign, sign))
            while self.took("&", "="):
                pass
            sides.append(self.side())
        if signs == ["="] and sides[1].kind == "word":
            sides[1] = stated_property(sides[1].text)
        return sides[0] if not signs else Node("relation", tuple(sides), " ".join(signs))

    def side(self) -> Node:
        """Parse one side of a relation: an expression, or sets that are joined by union signs."""
        parts = [self.quantity()]
        while sign := self.took("cup", "cap", "setminus", "wedge", "vee"):
            if sign in ("cup", "vee"):
                parts.append(self.quantity())
                continue
            both = (joined("union", parts), self.quantity())
            if sign == "setminus":
                parts = [Node("setminus", both)]
            else:
                parts = [Node("opaque", both, "cap")]
        return joined("union", parts)

    # ---- parsing amounts with units

    def quantity(self) -> Node:
        """Parse an expression, and a unit or remark after it."""
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
        if self.is_kind("word", "open", "unit", "currency", "op"):
            return self.phrase_after(node)
        return node

    def priced(self, node: Node) -> Node:
        """Return an amount of money as a quantity with its currency. A rate after the amount, as in
        $8 per hour, is parsed too.
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
            if measure(other) != measure(unit):
                unit = f"{unit} {other}"
        if measure(unit) is None:
            raise Undecided(f"the unit {unit}")
        return Node("quantity", (node,), unit)

    def ratio(self, first: Node) -> Node:
        """Parse the second and all further parts of a ratio."""
        parts = [first]
        while self.ahead().kind in STARTS and self.took(":"):
            parts.append(self.expression())
        if self.is_op(":"):
            raise Malformed("a ratio without its second part")
        return Node("ratio", tuple(parts))

    # ---- words before and after a value: neutral words are skipped, but units and numbers are kept

    def phrase_after(self, node: Node) -> Node:
        """Parse everything that follows a value: its unit, modulus or base, remarks, and words that
        change the value.
        """
        unit = ""
        while True:
            token = self.here
            if token.kind in ("unit", "currency") and not unit:
                unit = self.take().text
                node = self.compound(node, unit.lstrip("~"))
            elif token.kind == "word":
                node = self.word_after(node, self.take().text)
            elif self.took("bmod"):
                node = function("mod", node, self.expression())
            elif self.is_op("pmod", "mod"):
                node = self.modulo(node)
            elif token.text == "(" and self.ahead().text in ("mod", "bmod", "base"):
                self.take()
                is_modulus = self.is_op("mod", "bmod")
                node = self.modulo(node) if is_modulus else self.in_base(node)
                self.expect("close", ")")
            elif token.text == "(" and self.remark():
                node = self.remarked(node)
            elif not unit:
                return node
            else:
                # The lexer marks a unit with "~" if it may be a variable. In the tree, the value 1
                # means the same.
                guess = Fraction(1) if unit[0] == "~" else None
                return Node("quantity", (node,), unit.lstrip("~"), guess)

    def word_after(self, node: Node, word: str) -> Node:
        """Return the value as changed by the word after it, such as 5 million; raise Undecided for
        an unknown word.
        """
        lower = word.lower()
        if lower == "base" or (lower == "in" and self.here.text == "base"):
            return self.in_base(node)
        if lower in vocabulary.LARGE:
            return Node("mul", (node, number(vocabulary.LARGE[lower])))
        if lower in _REST:
            return Node("cases", (node, OTHERWISE))
        if lower in _RAISED:
            return Node("pow", (node, _RAISED[lower]))
        if lower in vocabulary.SHARES and node.kind == "number":
            return Node("mul", (node, number(Fraction(1, vocabulary.SHARES[lower]))))
        if lower in ("am", "pm"):
            return _clock(node, lower)
        if lower in _PROPERTIES and node.kind == "symbol":
            return Node("relation", (node, stated_property(lower)), "=")
        is_in_all = lower == "in" and self.here.text.lower() in ("total", "all")
        if lower in TAILS or word in (".", "all") or is_in_all:
            return node
        raise unknown([word])

    def modulo(self, node: Node) -> Node:
        """Parse the modulus after a value, and return the residue class of the value."""
        modulus = self.factor() if self.take().text == "pmod" else self.expression()
        return Node("congruence", (node, modulus))

    def in_base(self, node: Node) -> Node:
        """Parse the base after a numeral, and return the numeral in this base."""
        if self.here.text == "base":
            self.take()
        base = vocabulary.base(self.take().text)
        if node.kind != "number" or base is None:
            raise Prose("a base that is written in words")
        return Node("based", text=node.text, value=base)

    def remarked(self, node: Node) -> Node:
        """Parse a remark in brackets after a value.

        An exact value in the remark is kept as another form of the same value. An approximate value
        is ignored.
        """
        self.take()
        remark: list[str] = []
        while (
            self.is_kind("word", "sep")
            or self.is_op("~", "=")
            or (self.is_op("-") and self.ahead().kind == "word")
        ):
            remark.append(self.take().text.lower())
        value = None
        if self.here.text != ")":
            if not {*remark} <= _PASSED_OVER:
                raise unknown(remark)
            value = self.items()
        elif (count := vocabulary.number_in_words(" ".join(remark))) is not None:
            value = number(count, str(count))
        elif not {*remark} <= _PASSED_OVER:
            raise unknown(remark)
        self.expect("close", ")")
        if value is None or not _ROUGH.isdisjoint(remark):
            return node
        return Node("aliases", (node, value))

    def compound(self, node: Node, unit: str) -> Node:
        """Parse the second part of an amount such as 5 feet 3 inches.

        The result is the sum of the parts, in the unit of the first part.
        """
        if self.here.kind != "number":
            return node
        whole = joined_quantities(Node("quantity", (node,), unit), self.quantity())
        if whole is None:
            raise UnknownWords("words between the values of a quantity")
        return whole.args[0]

    def phrase_before(self) -> Node | None:
        """Parse the words before a value. Neutral words are skipped, and other known words become
        the value's name.
        """
        phrase: list[str] = []
        while self.is_kind("word", "unit"):
            phrase.append(self.take().text)
        if phrase and phrase[-1].lower() == "from" and self.is_kind("number"):
            raise UnknownWords("a range between two values")
        end = self.end_of_label()
        if end is not None:
            label = self.tokens[self.at : end]
            names = [token.text for token in label if token.kind != "word"]
            further = [token.text for token in label if token.kind == "word"]
            return self.label([*phrase, *further], names, end)
        ends_here = self.is_kind("end", "sep", "close")
        if ends_here or self.here.text.startswith(("end:", "\\\\", "&")):
            if " ".join(phrase).lower() in _REST:
                return OTHERWISE
            return Node("word", text=" ".join(phrase))
        lower = {word.lower() for word in phrase}
        if len(phrase) > 12 or not lower <= vocabulary.NEUTRAL | vocabulary.LABELS:
            raise unknown(phrase)
        if lower <= vocabulary.NEUTRAL:
            return None
        if phrase[-1].lower() in _LEANING:
            raise UnknownWords(f"the words {' '.join(phrase)!r}")
        self.tokens.insert(self.at, Token("op", "="))
        return self.label(phrase, [], self.at)

    def end_of_label(self) -> int | None:
        """Return the position of the sign = or : between a name in words and its value; None
        without a sign.
        """
        kinds = ("word", "symbol", "command", "open", "close", "number")
        depth = 0
        for at in range(self.at, min(self.at + 12, len(self.tokens))):
            token = self.tokens[at]
            depth += (token.kind == "open") - (token.kind == "close")
            if depth < 0:  # here ends a bracket that was opened before the name, as in [ABC] = 84
                break
            if token.kind == "op" and token.text in ("=", ":"):
                return at
            if token.kind not in kinds or token.text == "frac":
                break
        return None

    def label(self, words: list[str], names: list[str], end: int) -> Node | None:
        """Return the name of a value, from the words and symbols before it.

        The result is None if the words only introduce the value, as in "answer: 5".
        """
        # Words in capital letters, such as ABC, are names of geometric figures.
        names += [word for word in words if len(word) > 1 and word.isupper()]
        words = [word.lower() for word in words if word not in names]
        known = vocabulary.NEUTRAL | vocabulary.LABELS
        if any(word not in known and measure(word) is None for word in words):
            raise unknown(words)
        telling = sorted({*words} - vocabulary.NEUTRAL)
        self.at = end
        if telling:
            self.tokens[end] = Token("op", "=")
            return Node("word", text=" ".join([*telling, *names]))
        if names:
            self.tokens[end] = Token("op", "=")
            return symbol("".join(names))
        self.take()
        return None if self.here is not END else Node("word")

    # ---- parsing sums, products and powers

    def expression(self) -> Node:
        """Parse terms joined by + and -."""
        terms = [self.signed(self.term)]
        while self.is_op(*SIGNS):
            terms.append(self.signed(self.term))
            self.within(len(terms), "too many terms")
        return joined("add", terms)

    def term(self) -> Node:
        """Parse factors that are joined by multiplication and division signs, or written next to
        each other.
        """
        factors = [self.factor()]
        while True:
            if self.took("*"):
                factors.append(self.signed(self.factor))
            # the cross product or inner product of two vectors
            elif product := self.took("cross", "inner"):
                pair = (joined("mul", factors), self.signed(self.factor))
                factors = [_vector_product(product, *pair)]
            elif self.is_op("/"):
                if self.currencies and self.ahead().kind == "word" and measure(self.ahead().text):
                    # after an amount of money, a slash and a unit mean a rate, such as $9/hour
                    break
                self.take()
                factors.append(Node("pow", (self.signed(self.factor), MINUS_ONE)))
            elif self.starts_factor():
                factors[-1:] = self.adjacent(factors[-1])
            else:
                break
            self.within(len(factors), "too many factors")
        return joined("mul", factors)

    def starts_factor(self) -> bool:
        """Return True if the next token begins a factor."""
        token = self.here
        if token.kind == "op":
            return False
        ends_integral = token.kind == "symbol" and token.text == "d"
        if self.integrals and ends_integral and self.ahead().kind == "symbol":
            return False
        if token.kind == "open" and self.remark():
            return False
        if token.text in _BLOCK_ENDS or token.text.startswith("end:"):
            return False
        return token.kind in STARTS

    def remark(self) -> bool:
        """Return True if the bracket at this position contains words, as in (approximately 0.5)."""
        inside = self.ahead()
        return self.here.text == "(" and (
            inside.kind == "word" or inside.text in ("mod", "bmod", "or", "~")
        )

    def adjacent(self, before: Node) -> tuple[Node, ...]:
        """Parse a factor that directly follows another factor. Return both, or one sum if they are
        a mixed number such as 2 1/2.

        The factor is read only once, because a second attempt would double the work at every level
        of nesting.
        """
        is_whole = before.kind == "number" and before.value is not None and "." not in before.text
        if self.here.kind == "number":
            if is_whole and not self.here.tight:
                fraction = self.slash_fraction()
                if fraction:
                    return (Node("add", (before, fraction)),)
            if before.kind in ("number", "huge"):
                raise Malformed("two numbers side by side")
            return before, self.factor()
        is_fraction = is_whole and self.here.text == "frac"
        after = self.factor()
        if is_fraction and _is_proper(after):
            return (Node("add", (before, after)),)
        return before, after

    def slash_fraction(self) -> Node | None:
        """Parse a fraction a/b of two integers with 0 < a < b.

        The result is None if the next tokens are not such a fraction.
        """
        top = self.here
        bottom = self.ahead(2)
        if self.ahead().text != "/" or bottom.kind != "number":
            return None
        if not (top.text.isdigit() and bottom.text.isdigit()):
            return None
        if len(top.text) > 18 or len(bottom.text) > 18:
            return None
        if not 0 < int(top.text) < int(bottom.text):
            return None
        self.at += 3
        return quotient(number(int(top.text), top.text), number(int(bottom.text), bottom.text))

    def factor(self) -> Node:
        """Parse a number, name, command or bracket, with its exponents, subscripts, and signs such
        as ! and %.
        """
        node = self.atom()
        while self.here.kind == "op":
            text = self.here.text
            if text in ("^", "**"):
                node = self.raised(node)
            elif text == "!":
                node = self.factorial(node)
            elif text == "%":
                self.take()
                node = Node("percent", (node,))
            elif text in ("degree", "circ"):
                self.take()
                node = Node("degree", (node,))
            elif text == "'" and node.kind in ("degree", "number"):
                raise Undecided("minutes of arc")
            elif text == "_":
                node = self.lowered(node)
            else:
                break
        return node

    def factorial(self, node: Node) -> Node:
        """Parse the factorial signs after a value. Two signs mean the double factorial."""
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
        """Parse the part after ^.

        This part is an exponent, a degree sign, a prime, or the ending of an ordinal number such as
        5^th.
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
        """Parse an exponent, which may have an exponent itself: a^b^c means a^(b^c)."""
        node = self.atom()
        if self.is_op("^", "**"):
            return self.raised(node)
        return self.factorial(node) if self.is_op("!") else node

    def lowered(self, node: Node) -> Node:
        """Parse a subscript: the base of a numeral, or a part of the name of a variable."""
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

    # ---- parsing numbers, names and brackets

    def bracketed(self) -> Node:
        """Parse brackets ( … ), [ … ], { … } or \\{ … \\}, which contain a group, tuple, interval
        or set.
        """
        opening = self.take().text
        if (opening, self.here.text) == ("\\{", "\\}"):
            self.take()
            return EMPTY_SET
        outer = self.in_set
        self.in_set = opening == "\\{"
        inside = self.items()
        if sign := self.took(*_INFIX):
            inside = _INFIX[sign](inside, self.relation())
        if self.in_set and self.took("mid", ":"):
            inside = Node("builder", (inside, self.items()))
        self.in_set = outer
        token = self.take()
        if token.kind != "close" or token.text not in _CLOSING[opening]:
            raise Malformed(f"{opening!r} is closed by {token.text or 'nothing'!r}")
        members = inside.args if inside.kind == "list" else (inside,)
        if opening == "|":
            return function("abs", inside)
        if opening == "\\{":
            return inside if inside.kind == "builder" else Node("set", members)
        if opening == "{":
            return inside
        if opening == "⟨" and len(members) == 1:
            return Node("call", members, "mean")
        if opening == "⟨":
            return Node("tuple", members, "()")
        if len(members) == 1:
            if (opening, token.text) in (("(", "]"), ("[", ")")):
                raise Malformed("an interval with one end")
            return inside
        return Node("tuple", members, opening + token.text)

    def atom(self) -> Node:
        """Parse one number, name, command or bracket; raise Malformed if none begins here."""
        token = self.here
        if token.kind == "open":
            return self.bracketed()
        self.take()
        if token.kind == "number":
            return literal(token.text)
        if token.kind == "symbol":
            return self.variable(token.text)
        if token.kind == "command":
            return self.command(token.text)
        if token.kind == "function":
            return self.function(token.text)
        if token.kind == "word" and token.text.lower() == "inf":
            return COMMANDS["infty"]
        if token.kind == "word":
            raise UnknownWords(f"the word {token.text!r}")
        if token.kind != "currency":
            raise Malformed(f"found {token.text or 'the end'!r} instead of a value")
        self.currencies.add(token.text)
        return self.factor()

    def variable(self, name: str) -> Node:
        """Parse a variable with its subscript and primes, or one of the constants e and i."""
        is_index = name == "i" and self.sums_over_i
        if name in ("e", "i") and self.here.text != "_" and not is_index:
            return _E if name == "e" else _I
        if self.is_op("_"):
            name = self.lowered(symbol(name)).text
        while prime := self.took("'", "''"):
            name += prime
        return self.called(name)

    def called(self, name: str) -> Node:
        """Parse the arguments in brackets after a name. Return the function call, or the variable
        if there are no arguments.
        """
        if name in _SPECIAL and self.here.text == "(":
            inside = self.bracketed()
            # zeta may also be a root of unity; then zeta(1 + zeta) is a product.
            if inside.kind == "tuple" or not variables(inside) <= _SPECIAL[name]:
                return Node("mul", (symbol(name), inside))
            return function(name.lower(), inside)
        following = [token.text for token in self.tokens[self.at : self.at + 6]]
        is_function = name[0] in _CALLABLE
        if name in _CALLABLE and following == ["^", "{", "-", "1", "}", "("]:
            self.at += 5
            name += "^-1"
        # A capital letter is a function if exactly one variable or number follows in brackets.
        is_simple = self.ahead().kind in ("symbol", "number") and self.ahead(2).text == ")"
        # In an equation such as x(t) = 5t, the name on the left is a function.
        is_given = is_simple and self.ahead(3).text == "="
        is_braced = self.here.text == "{" and self.ahead().text == "("
        is_applied = self.here.text == "(" and (
            is_function or is_given or (name[0] in _MAYBE_CALLABLE and is_simple)
        )
        if not is_applied and not (is_function and is_braced):
            return symbol(name)
        inside = self.bracketed()
        arguments = inside.args if inside.kind in ("tuple", "list") else (inside,)
        return Node("call", arguments, name)

    def command(self, name: str) -> Node:
        """Parse a command with its arguments."""
        kind, _, rest = name.partition(":")
        if name in COMMANDS:
            return COMMANDS[name]
        match kind:
            case "frac":
                return self.fraction()
            case "binom":
                top = self.argument()
                return function("binom", top, self.argument())
            case "sqrt":
                return self.root()
            case "int":
                return self.integral()
            case "begin":
                return self.environment(rest)
            case "accent":
                return _accented(rest, self.argument())
            case "mathbb":
                return symbol(f"mathbb:{rest}")
            case "based":
                digits, _, base = rest.partition("_")
                return Node("based", text=digits, value=Fraction(base))
            case "lfloor" | "lceil":
                return self.stepped(kind)
            case "angle" | "triangle":
                return self.figure(kind)
            case "sum" | "prod" | "lim":
                return self.big_operator(kind)
            case _:
                raise Undecided(f"the command \\{name}")

    def stepped(self, name: str) -> Node:
        """Parse a floor or a ceiling, including its closing sign."""
        inside = self.items()
        self.expect("command", "r" + name[1:])
        return function(name[1:], inside)

    def argument(self, is_whole: bool = False) -> Node:
        """Parse the argument of a macro: a group, or a single digit, letter or macro.

        If `is_whole` is true, a number with several digits is one argument.
        """
        token = self.here
        if token.kind == "number" and is_whole:
            return literal(self.take().text)
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            # In TeX, an argument without braces is one digit: \frac12 is one half. Take only the
            # first digit.
            self.tokens[self.at] = token._replace(text=token.text[1:], tight=True)
            return literal(token.text[0])
        if token.kind in STARTS:
            return self.atom()
        raise Malformed(f"found {token.text or 'the end'!r} instead of an argument")

    def root(self) -> Node:
        """Parse a root, with its index if there is one."""
        index = TWO
        if self.here.text == "[":
            self.take()
            index = self.expression()
            self.expect("close", "]")
        if self.here.kind not in STARTS:
            raise Malformed("a root without an argument")
        return Node("root", (self.argument(is_whole=True), index))

    def figure(self, name: str) -> Node:
        """Parse an angle or triangle that is named by its letters.

        A number after the angle sign is the argument of a complex number, whose modulus precedes
        the sign.
        """
        if name == "angle" and self.here.kind == "number":
            return _applied("cis", (self.factor(),), None)
        letters: list[str] = []
        while self.is_kind("symbol", "word") or self.is_op("_"):
            letters.append(self.subscript() if self.took("_") else self.take().text)
        return symbol(f"{name} {''.join(letters)}")

    def function(self, name: str) -> Node:
        """Parse a function with its power, its base and its arguments."""
        power: Node | None = None
        base: Node | None = None
        while sign := self.took("^", "_"):
            if sign == "^":
                power = self.signed(self.tower)
            else:
                base = self.argument(is_whole=True)
        if power is not None and power.value == -1 and name in _INVERSES:
            name = _INVERSES[name]
            power = None
        arguments = self.arguments(name)
        if name in _MANY_ARGUMENTS and len(arguments) == 1:
            if not variables(arguments[0]):
                raise UnknownWords(f"{name} of 1 values")
            # "max" of a single expression may mean the largest value that the expression can have.
            return Node("call", arguments, name)
        if name not in _MANY_ARGUMENTS and len(arguments) != 1:
            raise Malformed(f"{name} of {len(arguments)} values")
        node = _applied(name, arguments, base)
        return node if power is None else Node("pow", (node, power))

    def arguments(self, name: str) -> tuple[Node, ...]:
        """Parse the arguments of a function.

        Without brackets, the only argument is the product of the factors up to the next function or
        sign.
        """
        token = self.here
        if token.kind != "open":
            return (self.signed(self.argument_in_line),)
        inside = self.bracketed()
        is_several = inside.kind == "tuple" or (inside.kind == "set" and name in _MANY_ARGUMENTS)
        return inside.args if is_several and token.text != "|" else (inside,)

    def argument_in_line(self) -> Node:
        """Parse the factors that are the argument of a function without brackets."""
        factors = [self.factor()]
        while (
            self.starts_factor()
            and self.is_kind("symbol", "command", "number")
            and factors[-1].kind != "func"
        ):
            factors.append(self.factor())
            self.within(len(factors), "too many factors")
        return joined("mul", factors)

    def environment(self, name: str) -> Node:
        """Parse a matrix, the lines of an alignment, or the cases of a system."""
        rows = [list[Node]()]
        cells = 0
        while not self.here.text.startswith("end:"):
            if self.is_kind("end"):
                raise Malformed(f"{name} that is never ended")
            if sign := self.took("\\\\", "&"):
                if sign == "\\\\":
                    rows.append([])
                continue
            rows[-1].append(self.items())
            cells += 1
            self.within(cells, "a matrix too large")
        self.take()
        return _arranged(name, [row for row in rows if row])

    def bounds(self) -> dict[str, Node]:
        """Parse the bounds of a sum, product or integral.

        The results are keyed by the sign that precedes each bound: "_" for the lower bound, "^" for
        the upper bound.
        """
        bounds = dict[str, Node]()
        while sign := self.took("_", "^"):
            bounds[sign] = self.argument(is_whole=True)
        return bounds

    def big_operator(self, name: str) -> Node:
        """Parse a sum or product with its bounds, or a limit. The limit is not evaluated."""
        is_over_i = "{i=" in "".join(token.text for token in self.tokens[self.at : self.at + 9])
        self.sums_over_i += is_over_i
        bounds = self.bounds()
        lower = bounds.get("_", EMPTY_SET)
        upper = bounds.get("^")
        if name == "lim" and "_" not in bounds:
            raise Malformed("a limit without the point that its variable approaches")
        if name == "lim" and lower.text in _LIMITS:
            return Node("opaque", (self.term(), *lower.args), _LIMITS[lower.text])
        if name == "lim" or lower.text != "=" or lower.args[0].kind != "symbol" or upper is None:
            raise Undecided(f"a {name} whose range is a condition")
        body = self.term()
        self.sums_over_i -= is_over_i
        return Node("sum", (body, *lower.args, upper), name)

    def integral(self) -> Node:
        """Parse an integral. It is not evaluated."""
        bounds = self.bounds()
        self.integrals += 1
        body = self.expression()
        self.integrals -= 1
        if self.take().text != "d":
            raise Undecided("an integral without its variable")
        variable = symbol(self.take().text)
        if len(bounds) == 1:
            raise Undecided("an integral with one bound")
        ends = (bounds["_"], bounds["^"]) if bounds else ()
        return Node("opaque", (body, variable, *ends), "int")

    def fraction(self) -> Node:
        """Parse a fraction, or a derivative d/dx with the term that it is applied to."""
        top = self.argument()
        bottom = self.argument()
        derivative = _derivative(top, bottom)
        if derivative is None or not self.starts_factor():
            return quotient(top, bottom)
        variable, order = derivative
        node = self.term()
        for _ in range(order):
            node = Node("opaque", (node, variable), "diff")
        return node


def literal(text: str) -> Node:
    """Return the node for a number. A number that is too long for arithmetic is kept only as
    text.
    """
    mantissa, _, exponent = text.lower().rstrip(".").partition("e")
    if len(mantissa) > _MAX_LITERAL:
        return Node("huge", text=mantissa.lstrip("0") or "0")
    if mantissa.isdigit() and not exponent:
        return Node("number", text=text, value=Fraction(int(mantissa)))
    if abs(int(exponent or 0)) > 20_000:
        raise TooLarge("an exponent above 20000")
    return Node("number", text=text, value=Fraction(mantissa) * Fraction(10) ** int(exponent or 0))


def unknown(words: Sequence[str]) -> Prose:
    """Return the error for words that make a value unclear, such as "not" or an unknown word."""
    denials = [word for word in words if word.lower() in vocabulary.NEGATIONS]
    if denials:
        return Prose(f"the word {denials[0]!r}")
    return UnknownWords(f"the words {' '.join(words)!r}")


def stated_property(word: str) -> Node:
    """Return the node for a property that an answer states, such as even, odd or prime."""
    if word in ("even", "odd"):
        return Node("congruence", (number(int(word == "odd")), TWO))
    return Node("word", text=word)


def joined_quantities(first: Node, second: Node) -> Node | None:
    """Return the sum of two amounts such as 5 feet and 3 inches.

    The result is None unless both units have the same dimension and the first unit is larger.
    """
    if first.kind != "quantity" or second.kind != "quantity":
        return None
    one = measure(first.text)
    two = measure(second.text)
    if one is None or two is None or one[0] != two[0] or not one[0] or one[1] <= two[1]:
        return None
    rest = Node("mul", (*second.args, number(two[1] / one[1])))
    return Node("quantity", (Node("add", (*first.args, rest)),), first.text)


def _derivative(top: Node, bottom: Node) -> tuple[Node, int] | None:
    """Return the variable and the order of a derivative such as d/dx, or None."""
    operator, order = top, 1
    if top.kind == "pow":
        operator, power = top.args
        order = int(power.value) if power.value in (2, 3, 4) else 0
    if operator.kind != "symbol" or operator.text not in ("d", "partial") or not order:
        return None
    if bottom.kind != "mul" or len(bottom.args) != 2 or bottom.args[0] != operator:
        return None
    variable = bottom.args[1]
    if order > 1 and variable.kind == "pow" and variable.args[1].value == order:
        variable = variable.args[0]
    elif order > 1:
        return None
    return (variable, order) if variable.kind == "symbol" else None


def _vector_product(name: str, left: Node, right: Node) -> Node:
    """Return a cross or inner product of two vectors with its factors in sorted order.

    The cross product b x a becomes -(a x b). A product whose first factor contains nabla stays
    unchanged.
    """
    if "nabla" in variables(left) or repr(left) <= repr(right):
        return Node("call", (left, right), name)
    turned = Node("call", (right, left), name)
    return negated(turned) if name == "cross" else turned


def _clock(node: Node, half: str) -> Node:
    parts = [arg.text for arg in node.args] if node.kind == "ratio" else [node.text, "00"]
    if not all(part.isdigit() for part in parts) or not 0 < int(parts[0]) < 13:
        raise UnknownWords(f"the word {half!r}")
    hour = int(parts[0]) % 12 + 12 * (half == "pm")
    return Node("clock", text=":".join([str(hour), *parts[1:]]))


def _is_proper(node: Node) -> bool:
    """Return True if a fraction of two integers is positive and below one, as in a mixed number."""
    match node:
        case Node("mul", (Node(value=Fraction() as top), Node("pow", (bottom, power)))):
            if power is not MINUS_ONE or not isinstance(bottom.value, Fraction):
                return False
            return top.denominator == bottom.value.denominator == 1 and 0 < top < bottom.value
        case _:
            return False


def _arranged(name: str, rows: list[list[Node]]) -> Node:
    """Return the node for an environment, such as a matrix, from the nodes of its cells."""
    if not rows:
        raise Malformed(f"{name} without content")
    kind = name.rstrip("*")
    if kind in ("cases", "dcases", "rcases"):
        cases = [_case(row) for row in rows]
        if all(len(case) == 2 for case in cases):
            return Node("cases", tuple(part for case in cases for part in case))
    if kind in ("cases", "aligned", "align", "gathered", "split"):
        return joined("list", [cell for row in rows for cell in row])
    if len({len(row) for row in rows}) != 1:
        raise Malformed("rows of different lengths")
    if len(rows) == 1 and len(rows[0]) == 1:
        return rows[0][0]
    return function("det", grid(rows)) if name == "vmatrix" else grid(rows)


def _case(row: list[Node]) -> list[Node]:
    """Return the value and the condition in one row of a case distinction, or an empty list if the
    row is not such a pair.

    Both may be in the same cell.
    """
    parts = row
    if len(row) == 1 and row[0].kind in ("cases", "list"):
        parts = list(row[0].args)
    if len(parts) == 2 and parts[1].kind in ("relation", "word", "list", "symbol"):
        return parts
    return []


def _accented(accent: str, node: Node) -> Node:
    """Return a letter with an accent as a variable. Two points with a bar are the segment between
    them.
    """
    if accent == "bar" and node.kind == "mul" and all(part.text.isupper() for part in node.args):
        return node
    letters = node.args if node.kind == "mul" else (node,)
    if all(part.kind == "symbol" for part in letters):
        return symbol(f"{accent} " + "".join(part.text for part in letters))
    return Node("call", (node,), accent)


def _applied(name: str, arguments: tuple[Node, ...], base: Node | None) -> Node:
    """Apply a function to its arguments. The result has only functions that the evaluator knows."""
    if name in ("log", "lg", "ln"):
        if base is None:
            return function("ln" if name == "ln" else "log", *arguments)
        return quotient(function("ln", *arguments), function("ln", base))
    if name == "sqrt":
        return Node("root", (*arguments, TWO))
    if name == "cbrt":
        return Node("root", (*arguments, number(3, "3")))
    if name == "exp":
        return Node("pow", (_E, *arguments))
    if name == "cis":
        return Node("pow", (_E, Node("mul", (_I, *arguments))))
    return function(name, *arguments)
