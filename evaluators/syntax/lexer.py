"""The lexer of cleaned text, which distinguishes words, functions, units and variables."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from atts.evaluators.answers import OPENING, closing
from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.vocabulary import FORMS, SYMBOLS, spelled, table, unit_at, words
from atts.evaluators.verdict import Limits, Malformed, TooLarge, Undecided

TokenKind = Literal[
    "number", "symbol", "command", "function", "word", "unit", "currency", "op", "open", "close", "sep", "end"
]  # fmt: skip
Mode = Literal["maths", "text"]


class Token(NamedTuple):
    """A token of the answer; `tight` if nothing is between it and the token before."""

    kind: TokenKind
    text: str
    tight: bool = False


END = Token("end", "")
# kinds of token with which a factor can begin
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
    """Yield the tokens of a cleaned answer, without an end mark.

    If letters of a formula may be units, two token lists are yielded; the second reads them as
    units. Raises Malformed for unknown commands and unclosed text, TooLarge past the token limit.
    """
    for loose in (False, True):
        lexer = _Lexer(limits, loose)
        lexer.run(text, "maths", 0)
        yield lexer.tokens
        if not lexer.saw_loose:
            return


class _Lexer:
    """One pass over the text; text macros are read recursively, to a bounded depth."""

    def __init__(self, limits: Limits, loose: bool = False) -> None:
        self.limits = limits
        # whether letters in a formula that could be a unit's symbol are read as the unit
        self.loose = loose
        self.saw_loose = False
        self.has_ended = False  # the rest of the line gives a reason
        self.tokens: list[Token] = []
        self.gap = True

    def add(self, kind: TokenKind, text: str) -> None:
        """Append a token; raise TooLarge beyond the limit."""
        if len(self.tokens) >= self.limits.tokens:
            raise TooLarge(f"more than {self.limits.tokens} tokens")
        self.tokens.append(Token(kind, text, not self.gap))
        self.gap = False

    def after(self, *kinds: TokenKind) -> bool:
        """Return whether the last token is of one of these kinds."""
        return bool(self.tokens) and self.tokens[-1].kind in kinds

    def run(self, text: str, mode: Mode, depth: int) -> None:
        """Append the tokens of a text."""
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
        """Add the unit that begins here after a value; return its end, or None for no unit."""
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
        if text[end:].lstrip(" }").startswith("_"):  # not a unit, such as the H of 2 H_2O
            return None
        first, _, rest = phrase.partition(" ")
        # plain letters of a formula are ambiguous: "5 m" may be metres or a product
        if mode == "maths" and text[start] != "\\" and first in SYMBOLS and len(first) < 4:
            if not _FREE.match(text, end) or self._is_in_root():
                return None
            is_word = first in vocabulary.ATTACHED or (len(first) > 2 and vocabulary.is_word(first))
            if rest[:1] == "^" and len(first) == 1 and not self.after("number"):
                return None
            is_part = self.gap and FORMS["amount"].match(text, end)  # as in 7 h 4 min
            is_doubtful = len(first) == 1 or (first.islower() and not is_word)
            is_product = bool(rest) and all(
                len(part) == 1 and part != "/" for part in phrase.split()
            )
            names = [part for part in phrase.split() if part[0] != "^"]
            if len(names) > 1 and all(len(name) == 1 and name.isupper() for name in names):
                is_product = True  # C V^2
            if is_product and not is_part:  # 2 g h
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
        """Return whether the innermost open brace belongs to a root, in which 3mg is a product."""
        depth = 0
        for at in range(len(self.tokens) - 1, 0, -1):
            text = self.tokens[at].text
            depth += (text == "}") - (text == "{")
            if depth < 0:
                return self.tokens[at - 1].text == "sqrt"
            if len(self.tokens) - at > 40:
                break
        return False

    def other(self, char: str) -> None:
        """Read a character that no other rule reads."""
        if char == "\\":
            raise Malformed("a backslash with nothing after it")
        if char == "." and self.after("number"):
            raise Undecided("the full stop ends a sentence after a number")
        if char in "~@#.":
            self.gap = True
        else:
            self.add("word", char)

    def command(self, name: str, text: str, position: int, depth: int) -> int:
        """Add a command; return the position after its arguments."""
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
        """Add \\begin, \\end or \\mathbb with its argument in the token; drop column layouts."""
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
        """Add the content of a text macro; return the position after it."""
        if not OPENING.match(text, position):
            return position  # a font switch, as in \rm 5 or \bf x, is dropped
        content, after = _group(text, position)
        inside = content.strip()
        is_letter = len(inside) == 1 and inside.isalpha() and inside.isascii()
        if name in _UPRIGHT and is_letter:
            self.add("symbol", inside)
        elif name in _BOLD and is_letter and inside not in "efghijk":  # functions, unit vectors
            self.add("symbol", f"bold {inside}")
        else:
            self.gap = True
            self.run(content, "text" if name in _UPRIGHT else "maths", depth + 1)
        self.gap = self.gap or name in _UPRIGHT
        return after

    def letters(self, run: str, mode: Mode, ahead: str = "") -> None:
        """Add a run of letters: a separator, sign, function, variable, word, or a product."""
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
            # The letters are factors side by side; a known function at their start, or a root or pi
            # after one letter, stays whole.
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
    """Return the content of the braces at `position`, and the position after them."""
    opening = OPENING.match(text, position)
    if opening is None:
        raise Malformed("a macro without its argument")
    end = closing(text, opening.end())
    if end is None:
        raise Malformed("a brace that is never closed")
    return text[opening.end() : end - 1], end


def paired_bars(tokens: list[Token]) -> list[Token]:
    """Return the tokens with every | turned into an opening or closing bracket.

    A bar without a value before it opens. Of two bars between values the first closes. Any other
    bar closes an open one.
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
        raise Undecided("bars that do not pair")
    return result


def _parts_a_set(tokens: list[Token], index: int) -> bool:
    """Return whether a bar is the only one in its braces, as in {x | x > 0}."""
    near = range(max(index - 39, 0), min(index + 200, len(tokens)))
    braces = [at for at in near if tokens[at].text in ("\\{", "\\}")]
    before = [at for at in braces if at < index]
    after = [at for at in braces if at > index]
    if not before or not after or tokens[before[-1]].text != "\\{":
        return False
    return sum(token.text == "|" for token in tokens[before[-1] : after[0]]) % 2 == 1
