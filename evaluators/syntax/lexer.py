"""Lexer of cleaned text, telling words, functions, units and variables apart, and the stream a
parser reads from.
"""

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from atts.evaluators.answers.extraction import OPENING, closing
from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.tree import Node, negated
from atts.evaluators.syntax.vocabulary import FORMS, SYMBOLS, spelled, table, unit_at, words
from atts.evaluators.verdict import Limits, Malformed, TooLarge, Undecided

TokenKind = Literal[
    "number", "symbol", "command", "function", "word", "unit", "currency", "op", "open", "close", "sep", "end"
]  # fmt: skip


class Token(NamedTuple):
    """A piece of the answer; `tight` when nothing stood between it and the piece before."""

    kind: TokenKind
    text: str
    tight: bool = False


END = Token("end", "")
# kinds of token a factor can begin with
STARTS = frozenset({"number", "symbol", "command", "function", "open"})
SIGNS = ("+", "-", "pm", "mp")

_TOKEN = re.compile(
    "|".join(f"(?P<{name}>{form})" for name, form in table("tokens", dict[str, str]).items()),
    re.DOTALL,
)
FUNCTIONS = words("functions")
_ALIASES = spelled(table("function_names", dict[str, str]))
_TEXT, _UPRIGHT, _BLANK = (words(name) for name in ("text_macros", "upright", "blank"))
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
_FREE, _VALUE_AHEAD, _FACTORS, _NEXT_WORD = (
    FORMS[name] for name in ("free", "value_ahead", "factors", "next_word")
)
_WORDS_OF_TWO = words("words_of_two")
_LEADING = {"minus": "-", "negative": "-", "plus": "+"}
_ESCAPES = table("escapes", dict[str, tuple[TokenKind, str]])
_PLAIN = table("plain", dict[str, tuple[TokenKind, str]])
_ANY_CASE: dict[str, tuple[TokenKind, str]] = {
    **{word: ("sep", word) for word in words("separators")},
    **{word: ("op", sign) for word, sign in spelled(table("sign_words", dict[str, str])).items()},
}


class _Lexer:
    """One pass over the text; text macros are entered recursively, to a bounded depth."""

    def __init__(self, limits: Limits, loose: bool = False) -> None:
        self.limits = limits
        # whether letters in a formula that are the symbol of a unit are taken for one
        self.loose = loose
        self.saw_loose = False
        self.has_ended = False  # what follows is a reason
        self.tokens: list[Token] = []
        self.gap = True

    def add(self, kind: TokenKind, text: str) -> None:
        if len(self.tokens) >= self.limits.tokens:
            raise TooLarge(f"more than {self.limits.tokens} tokens")
        self.tokens.append(Token(kind, text, not self.gap))
        self.gap = False

    def after(self, *kinds: TokenKind) -> bool:
        return bool(self.tokens) and self.tokens[-1].kind in kinds

    def run(self, text: str, mode: Literal["maths", "text"], depth: int) -> None:
        if depth > 8:
            raise TooLarge("text macros nested too deeply")
        position = 0
        length = len(text)
        while position < length and not self.has_ended:
            found = _TOKEN.match(text, position)
            assert found is not None
            position = found.end()
            kind = found.lastgroup
            piece = found[kind] if kind else ""
            if kind == "blank":
                self.gap = True
            elif kind in ("command", "letters") and (end := self.unit(text, found.start(), mode)):
                position = end
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

    def unit(self, text: str, start: int, mode: Literal["maths", "text"]) -> int | None:
        """Where the unit that begins here after a value ends, added as one token; None when none
        does.
        """
        if not self.after("number", "close") and not (
            (self.tokens and self.tokens[-1].text.lower() in _LIKE_NUMBERS)
            or (self.after("symbol") and text.startswith("\\text", start))
        ):
            return None
        found = unit_at(text, start)
        if found is None:
            return None
        phrase, end = found
        first, _, rest = phrase.partition(" ")
        if mode == "maths" and text[start] != "\\" and first in SYMBOLS and len(first) < 4:
            if not _FREE.match(text, end):
                return None
            is_word = first in vocabulary.ATTACHED or (len(first) > 2 and vocabulary.is_word(first))
            if rest[:1] == "^" and len(first) == 1 and not self.after("number"):
                return None
            is_part = self.gap and FORMS["amount"].match(text, end)  # 7 h 4 min
            if not rest and not is_part and (len(first) == 1 or (first.islower() and not is_word)):
                self.saw_loose = self.saw_loose or (self.gap and self.after("number", "close"))
                if not (self.loose and self.gap and self.after("number", "close")):
                    return None
                phrase = "~" + phrase
        self.add("unit", phrase)
        return end

    def other(self, char: str) -> None:
        if char == "\\":
            raise Malformed("a backslash with nothing after it")
        if char == "." and self.after("number"):
            raise Undecided("a full stop after a number")
        if char in "~@#.":
            self.gap = True
        else:
            self.add("word", char)

    def command(self, name: str, text: str, position: int, depth: int) -> int:
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
        """\\begin, \\end and \\mathbb carry their argument in the token; column layouts are
        dropped.
        """
        if name == "mathbb" and position < len(text) and text[position].isalpha():
            self.add("command", f"mathbb:{text[position]}")
            return position + 1
        content, position = _group(text, position)
        self.add("command", f"{name}:{content.strip()}")
        if name == "begin" and content.strip() in ("array", "tabular"):
            position = _group(text, position)[1] if OPENING.match(text, position) else position
        return position

    def text_macro(self, name: str, text: str, position: int, depth: int) -> int:
        if not OPENING.match(text, position):
            return position  # \rm 5, \bf x: the switch is dropped
        content, after = _group(text, position)
        inside = content.strip()
        if name in _UPRIGHT and len(inside) == 1 and inside.isalpha() and inside.isascii():
            self.add("symbol", inside)
        else:
            self.gap = True
            self.run(content, "text" if name in _UPRIGHT else "maths", depth + 1)
        self.gap = self.gap or name in _UPRIGHT
        return after

    def letters(self, run: str, mode: Literal["maths", "text"], ahead: str = "") -> None:
        lower = run.lower()
        if lower in _ANY_CASE:
            self.add(*_ANY_CASE[lower])
        elif lower in ("since", "because"):
            self.has_ended = bool(self.tokens)
        elif (
            lower == "a"
            and (next_ := _NEXT_WORD.match(ahead))
            and next_[1] in vocabulary.NEUTRAL | vocabulary.LABELS
        ):
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
            and run.lower() not in ("re", "im", "det", "arg")
        ):
            self.add("function", _ALIASES.get(run, run))
        elif len(run) == 1:
            self.add(
                "word" if mode == "text" and run == "a" and self.after("word") else "symbol", run
            )
        elif mode == "text" or self._is_word(run):
            self.add("word", run)
        # factors side by side, save a known function at their start, or a root or pi after one
        # letter
        else:
            for piece in _FACTORS.findall(run):
                self.letters(piece, "maths")

    def _is_word(self, run: str) -> bool:
        if run.lower() in vocabulary.ATTACHED and self.after(
            "number", "close", "command", "symbol", "word"
        ):
            return True
        return run[1:] not in ("sqrt", "pi") and (
            run[:1].lower() + run[1:] in _WORDS_OF_TWO or vocabulary.is_word(run)
        )


def _group(text: str, position: int) -> tuple[str, int]:
    """What stands between the brace at or after `position` and its partner, and where that ends."""
    opening = OPENING.match(text, position)
    if opening is None:
        raise Malformed("a macro without its argument")
    end = closing(text, opening.end())
    if end is None:
        raise Malformed("a brace that is never closed")
    return text[opening.end() : end - 1], end


def tokens(text: str, limits: Limits) -> Iterator[list[Token]]:
    """The tokens of a cleaned answer, without an end mark; then those with letters taken for units,
    where some may be.

    Raises Malformed for unknown commands and unclosed text, TooLarge past the token limit.
    """
    for loose in (False, True):
        lexer = _Lexer(limits, loose)
        lexer.run(text, "maths", 0)
        yield lexer.tokens
        if not lexer.saw_loose:
            return


class Stream:
    """A token list and a place in it; counts nesting against the limits."""

    def __init__(self, tokens: list[Token], limits: Limits) -> None:
        self.tokens = paired_bars(tokens)
        self.limits = limits
        self.at = 0
        self.depth = 0
        self.integrals = self.sums_over_i = 0
        self.in_set = False
        self.currencies: set[str] = set()

    @property
    def here(self) -> Token:
        """The next token."""
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def ahead(self, distance: int = 1) -> Token:
        """The token that many places further on."""
        index = self.at + distance
        return self.tokens[index] if index < len(self.tokens) else END

    def take(self) -> Token:
        """The next token, passed over."""
        token = self.here
        self.at += 1
        return token

    def is_op(self, *texts: str) -> bool:
        """Whether one of these signs is next."""
        token = self.here
        return token.kind == "op" and token.text in texts

    def took(self, *texts: str) -> str:
        """Which of these signs was next, passed over; empty for none."""
        return self.take().text if self.is_op(*texts) else ""

    def signed(self, read: Callable[[], Node]) -> Node:
        """What is read after the signs that stand here, with them; raises TooLarge where too much
        stands around it.
        """
        self.depth += 1
        self.within(self.depth, "nested too deeply", self.limits.depth)
        signs = list[str]()
        while sign := self.took(*SIGNS):
            signs.append(sign)
        node = read()
        self.depth -= 1
        for sign in signs:
            node = (
                Node("plusminus", (node,), "+" if sign == "pm" else "-")
                if sign in ("pm", "mp")
                else node
            )
        return negated(node) if signs.count("-") % 2 else node

    def is_kind(self, *kinds: str) -> bool:
        """Whether a token of one of these kinds is next."""
        return self.here.kind in kinds

    def expect(self, kind: str, text: str) -> None:
        """Pass over this token; raises Malformed when it is not there."""
        token = self.take()
        if token.kind != kind or token.text != text:
            raise Malformed(f"expected {text!r}, found {token.text or 'the end'!r}")

    def within(self, count: int, what: str, most: int | None = None) -> None:
        """Raises TooLarge for more of something than a list may hold, or than so many."""
        if count > (most or self.limits.items):
            raise TooLarge(what)

    def subscript(self) -> str:
        """The text of a subscript, braces dropped."""
        start = self.at
        level = 0
        while level or self.at == start:
            kind = self.take().kind
            if kind == "end" or (not level and kind in ("close", "sep")):
                raise Malformed("a subscript without its text or its end")
            level += (kind == "open") - (kind == "close")
        texts = [token.text for token in self.tokens[start : self.at]]
        return "".join(texts[1:-1] if len(texts) > 1 else texts)


def _parts_a_set(tokens: list[Token], index: int) -> bool:
    """Whether a bar stands alone in its braces, as in {x | x > 0}."""
    near = range(max(index - 39, 0), min(index + 200, len(tokens)))
    braces = [at for at in near if tokens[at].text in ("\\{", "\\}")]
    before = [at for at in braces if at < index]
    after = [at for at in braces if at > index]
    if not before or not after or tokens[before[-1]].text != "\\{":
        return False
    return sum(token.text == "|" for token in tokens[before[-1] : after[0]]) % 2 == 1


def paired_bars(tokens: list[Token]) -> list[Token]:
    """The tokens with every | turned into an opening or closing bracket.

    A bar with no value before it opens; of two between values the first closes; otherwise an open
    one is closed.
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
            after_value = before.kind in ("number", "symbol", "close") or before.text in (
                "!",
                "pi",
                "'",
            )
            opens = (
                not after_value
                or not is_open
                or (was_bar and before.kind == "close" and follower.kind in STARTS)
            )
            is_open += 1 if opens else -1
            result.append(Token("open" if opens else "close", "|", token.tight))
        was_bar = is_bar
    if is_open:
        raise Undecided("bars that do not pair")
    return result
