"""Token stream that the parser reads from, and what its parts may ask of the whole."""

from collections.abc import Callable

from atts.evaluators.syntax.lexer import END, Token
from atts.evaluators.syntax.tree import Node
from atts.evaluators.verdict import Limits, Malformed, NotMaths, TooLarge

STARTS = frozenset({"number", "symbol", "command", "function", "open"})
"""Kinds of token a factor can begin with."""


class Stream:
    """A token list and a place in it; counts nesting against the limits.

    What is declared first is the grammar's: each reads, and passes over, what it names.
    """

    items: Callable[[], Node]  # relations between separators
    quantity: Callable[[], Node]  # an expression and its unit
    expression: Callable[[], Node]  # terms joined by + and -
    term: Callable[[], Node]  # factors multiplied and divided
    factor: Callable[[], Node]  # an atom with its exponents, subscripts and marks
    exponent: Callable[[], Node]  # what stands after ^
    lowered: Callable[[Node], Node]  # the node with the subscript that follows it
    bracketed: Callable[[], Node]  # a bracket and what it holds
    starts_factor: Callable[[], bool]  # whether a factor begins here
    remark: Callable[[], bool]  # whether a bracket here holds words

    def __init__(self, tokens: list[Token], limits: Limits) -> None:
        self.tokens = paired_bars(tokens)
        self.limits = limits
        self.at = 0
        self.depth = 0
        self.integrals = 0
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

    def is_negated(self) -> bool:
        """Whether the plus and minus signs here, passed over, come to a minus."""
        flips = 0
        while sign := self.took("+", "-"):
            flips += sign == "-"
        return flips % 2 == 1

    def is_kind(self, *kinds: str) -> bool:
        """Whether a token of one of these kinds is next."""
        return self.here.kind in kinds

    def expect(self, kind: str, text: str) -> None:
        """Pass over this token; raises Malformed when it is not there."""
        token = self.take()
        if token.kind != kind or token.text != text:
            raise Malformed(f"expected {text!r}, found {token.text or 'the end'!r}")

    def deeper(self) -> None:
        """One level further in; raises TooLarge past the limit. Who calls it takes it back."""
        self.depth += 1
        if self.depth > self.limits.depth:
            raise TooLarge(f"nested deeper than {self.limits.depth}")

    def within(self, count: int, what: str) -> None:
        """Raises TooLarge for more of something than a list may hold."""
        if count > self.limits.items:
            raise TooLarge(what)

    def subscript(self) -> str:
        """The text of a subscript, braces dropped."""
        token, level, parts = self.take(), 1, list[str]()
        if token.kind in ("end", "close", "sep"):
            raise Malformed("a subscript without its text")
        if token.kind != "open":
            return token.text
        while True:
            token = self.take()
            if token.kind == "end":
                raise Malformed("a subscript that is never closed")
            level += (token.kind == "open") - (token.kind == "close")
            if not level:
                return "".join(parts)
            parts.append(token.text)


def _parts_a_set(tokens: list[Token], index: int) -> bool:
    """Whether a bar stands alone in its braces, as in {x | x > 0}."""
    near = range(max(index - 39, 0), min(index + 200, len(tokens)))
    braces = [at for at in near if tokens[at].text in ("\\{", "\\}")]
    before, after = [at for at in braces if at < index], [at for at in braces if at > index]
    if not before or not after or tokens[before[-1]].text != "\\{":
        return False
    return sum(token.text == "|" for token in tokens[before[-1] : after[0]]) % 2 == 1


def paired_bars(tokens: list[Token]) -> list[Token]:
    """The tokens with every | turned into an opening or closing bracket.

    A bar with no value before it opens; of two between values the first closes; otherwise an open one is closed.
    """
    if not any(token.text == "|" for token in tokens):
        return tokens
    result: list[Token] = []
    is_open, was_bar = 0, False
    for index, token in enumerate(tokens):
        before, follower = result[-1] if result else END, tokens[index + 1] if index + 1 < len(tokens) else END
        is_bar = token.text == "|" and token.kind == "op"
        if not is_bar:
            result.append(token)
        elif not is_open and _parts_a_set(tokens, index):
            result.append(token._replace(text="mid"))
        else:
            after_value = before.kind in ("number", "symbol", "close") or before.text in ("!", "pi", "'")
            opens = not after_value or not is_open or (was_bar and before.kind == "close" and follower.kind in STARTS)
            is_open += 1 if opens else -1
            result.append(Token("open" if opens else "close", "|", token.tight))
        was_bar = is_bar
    if is_open:
        raise NotMaths("bars that do not pair")
    return result
