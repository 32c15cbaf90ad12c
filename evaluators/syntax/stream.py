"""Token stream that the parser reads from, and what its parts may ask of the whole."""

from abc import ABC, abstractmethod

from atts.evaluators.syntax.lexer import END, Token
from atts.evaluators.syntax.tree import Node
from atts.evaluators.verdict import Limits, Malformed, NotMaths, TooLarge

STARTS = frozenset({"number", "symbol", "command", "function", "open"})
"""Kinds of token a factor can begin with."""


class Stream:
    """A token list and a place in it; counts nesting against the limits."""

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

    def subscript(self) -> str:
        """The text of a subscript, braces dropped."""
        if self.here.kind != "open":
            token = self.take()
            if token.kind in ("end", "close", "sep"):
                raise Malformed("a subscript without its text")
            return token.text
        self.take()
        level, parts = 1, list[str]()
        while level:
            token = self.take()
            if token.kind == "end":
                raise Malformed("a subscript that is never closed")
            level += (token.kind == "open") - (token.kind == "close")
            if level:
                parts.append(token.text)
        return "".join(parts)


class Grammar(Stream, ABC):
    """What atoms and phrases ask of the grammar that holds them; each call consumes what it reads."""

    @abstractmethod
    def items(self) -> Node: ...  # relations between separators
    @abstractmethod
    def quantity(self) -> Node: ...  # an expression and its unit
    @abstractmethod
    def expression(self) -> Node: ...  # terms joined by + and -
    @abstractmethod
    def term(self) -> Node: ...  # factors multiplied and divided
    @abstractmethod
    def factor(self) -> Node: ...  # an atom with its exponents, subscripts and marks
    @abstractmethod
    def exponent(self) -> Node: ...  # what stands after ^
    @abstractmethod
    def lowered(self, node: Node) -> Node: ...  # the node with the subscript that follows it
    @abstractmethod
    def bracketed(self) -> Node: ...  # a bracket and what it holds
    @abstractmethod
    def starts_factor(self) -> bool: ...  # whether a factor begins here
    @abstractmethod
    def remark(self) -> bool: ...  # whether a bracket here holds words


def _parts_a_set(tokens: list[Token], index: int) -> bool:
    """Whether a bar stands alone in its braces, as in {x | x > 0}."""
    before = next((at for at in range(index - 1, max(index - 40, -1), -1) if tokens[at].text in ("\\{", "\\}")), None)
    after = next(
        (at for at in range(index + 1, min(index + 200, len(tokens))) if tokens[at].text in ("\\{", "\\}")), None
    )
    if before is None or after is None or tokens[before].text != "\\{":
        return False
    return sum(token.text == "|" for token in tokens[before:after]) % 2 == 1


def paired_bars(tokens: list[Token]) -> list[Token]:
    """The tokens with every | turned into an opening or closing bracket.

    A bar with no value before it opens; of two between values the first closes; otherwise an open one is closed.
    """
    if not any(token.text == "|" for token in tokens):
        return tokens
    result: list[Token] = []
    is_open = 0
    for index, token in enumerate(tokens):
        if token.text != "|" or token.kind != "op":
            result.append(token)
            continue
        if not is_open and _parts_a_set(tokens, index):
            result.append(token._replace(text="mid"))
            continue
        before = result[-1] if result else END
        follower = tokens[index + 1] if index + 1 < len(tokens) else END
        after_value = before.kind in ("number", "symbol", "close") or before.text in ("!", "pi", "'")
        was_bar = index > 0 and tokens[index - 1].text == "|" and tokens[index - 1].kind == "op"
        opens = not after_value or not is_open or (was_bar and before.kind == "close" and follower.kind in STARTS)
        is_open += 1 if opens else -1
        result.append(Token("open" if opens else "close", "|", token.tight))
    if is_open:
        raise NotMaths("bars that do not pair")
    return result
