"""Parser of the atoms of answers: numbers, variables, functions, fractions, roots, matrices, sums."""

from collections.abc import Callable
from fractions import Fraction

from atts.evaluators.syntax.phrases import Phrases
from atts.evaluators.syntax.tree import (
    COMMANDS,
    EMPTY_SET,
    TWO,
    Node,
    function,
    grid,
    joined,
    number,
    quotient,
    symbol,
)
from atts.evaluators.verdict import Malformed, TooLarge, Undecided, UnknownWords

_CALLABLE = frozenset("fghFGH")
_MAYBE_CALLABLE = frozenset("pquPQRSTVNMIABCDEKLXYZW")
_INVERSES = {
    name: f"arc{name}"
    for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
}
_MANY = frozenset({"max", "min", "gcd", "lcm"})
_MAX_LITERAL = 4000  # digits; Python refuses to convert much longer ones
_E = Node("constant", text="e")
_I = Node("constant", text="i")


class Parser(Phrases):
    """What stands alone in an expression."""

    def atom(self) -> Node:
        """One atom from the stream; raises Malformed where none begins."""
        token = self.here
        if token.kind == "open":
            return self.bracketed()
        self.take()
        if token.kind in _READ:
            return _READ[token.kind](self, token.text)
        if token.kind == "word" and token.text.lower() == "inf":
            return COMMANDS["infty"]
        if token.kind == "word":
            raise UnknownWords(f"the word {token.text!r}")
        if token.kind != "currency":
            raise Malformed(f"{token.text or 'the end'!r} where a value should be")
        self.currencies.add(token.text)
        return self.factor()

    def variable(self, name: str) -> Node:
        """A variable with its subscript and primes, or a constant of one letter."""
        if name in ("e", "i") and self.here.text != "_" and not (name == "i" and self.sums_over_i):
            return _E if name == "e" else _I
        if self.is_op("_"):
            name = self.lowered(symbol(name)).text
        while prime := self.took("'", "''"):
            name += prime
        return self.called(name)

    def called(self, name: str) -> Node:
        """The variable of this name, or the function applied to the bracket that follows it."""
        following = [token.text for token in self.tokens[self.at : self.at + 6]]
        is_function = name[0] in _CALLABLE
        if name in _CALLABLE and following == ["^", "{", "-", "1", "}", "("]:
            self.at += 5
            name += "^-1"
        # a capital before a bracket with one variable or number names a function too
        is_simple = self.ahead().kind in ("symbol", "number") and self.ahead(2).text == ")"
        is_given = is_simple and self.ahead(3).text == "="  # x(t) = 5t
        is_braced = self.here.text == "{" and self.ahead().text == "("
        if (is_function and is_braced) or (
            self.here.text == "("
            and (is_function or is_given or (name[0] in _MAYBE_CALLABLE and is_simple))
        ):
            inside = self.bracketed()
            return Node(
                "call", inside.args if inside.kind in ("tuple", "list") else (inside,), name
            )
        return symbol(name)

    def command(self, name: str) -> Node:
        """What a command is, its arguments read."""
        kind, _, rest = name.partition(":")
        if name in COMMANDS:
            return COMMANDS[name]
        if kind not in _MACROS:
            raise Undecided(f"the command \\{name}")
        return _MACROS[kind](self, rest or kind)

    def stepped(self, name: str) -> Node:
        """What stands between the signs of a floor or a ceiling."""
        inside = self.items()
        self.expect("command", "r" + name[1:])
        return function(name[1:], inside)

    def argument(self, is_whole: bool = False) -> Node:
        """A macro's argument: a group, or a single digit, letter or macro; all of a number where it
        is to be whole.
        """
        token = self.here
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit() and not is_whole:
            self.tokens[self.at] = token._replace(text=token.text[1:], tight=True)
            return literal(token.text[0])
        if token.kind in ("open", "number", "symbol", "command", "function"):
            return literal(self.take().text) if token.kind == "number" and is_whole else self.atom()
        raise Malformed(f"{token.text or 'the end'!r} where an argument should be")

    def root(self) -> Node:
        """A root with its index."""
        index = TWO
        if self.here.text == "[":
            self.take()
            index = self.expression()
            self.expect("close", "]")
        if self.here.kind not in ("number", "open", "symbol", "command", "function"):
            raise Malformed("a root of nothing")
        return Node("root", (self.argument(is_whole=True), index))

    def figure(self, name: str) -> Node:
        """An angle or triangle by its letters; an angle in numbers is that of a complex number,
        after its size.
        """
        if name == "angle" and self.here.kind == "number":
            return _applied("cis", (self.factor(),), None)
        letters: list[str] = []
        while self.is_kind("symbol", "word") or self.is_op("_"):
            letters.append(self.subscript() if self.took("_") else self.take().text)
        return symbol(f"{name} {''.join(letters)}")

    def function(self, name: str) -> Node:
        """A function by name with its power and base, applied to what follows."""
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
        if (name in _MANY) == (len(arguments) == 1):
            raise (UnknownWords if name in _MANY else Malformed)(
                f"{name} of {len(arguments)} values"
            )
        node = _applied(name, arguments, base)
        return node if power is None else Node("pow", (node, power))

    def arguments(self, name: str) -> tuple[Node, ...]:
        """What a function is applied to: a bracket, or the product of what follows up to the next
        function or sign.
        """
        token = self.here
        if token.kind == "open":
            inside = self.bracketed()
            is_several = inside.kind == "tuple" or (inside.kind == "set" and name in _MANY)
            return inside.args if is_several and token.text != "|" else (inside,)
        return (self.signed(self.argument_in_line),)

    def argument_in_line(self) -> Node:
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
        """A matrix, the lines of an alignment, or the cases of a system."""
        rows = [list[Node]()]
        cells = 0
        while not self.here.text.startswith("end:"):
            if self.is_kind("end"):
                raise Malformed(f"{name} that is never ended")
            if sign := self.took("\\\\", "&"):
                rows += [[]] if sign == "\\\\" else []
            else:
                rows[-1].append(self.items())
                cells += 1
                self.within(cells, "a matrix too large")
        self.take()
        return _arranged(name, [row for row in rows if row])

    def bounds(self) -> dict[str, Node]:
        """What stands below a big operator, after "_", and above it, after "^"."""
        found = dict[str, Node]()
        while sign := self.took("_", "^"):
            found[sign] = self.argument(is_whole=True)
        return found

    def big_operator(self, name: str) -> Node:
        """A sum or product with its bounds, or a limit, which is kept as it is."""
        is_over_i = "{i=" in "".join(token.text for token in self.tokens[self.at : self.at + 9])
        self.sums_over_i += is_over_i
        bounds = self.bounds()
        lower = bounds.get("_", EMPTY_SET)
        upper = bounds.get("^")
        if name == "lim" and "_" not in bounds:
            raise Malformed("a limit without its point")
        if name == "lim" and lower.text == "->":
            return Node("opaque", (self.term(), *lower.args), name)
        if name == "lim" or lower.text != "=" or lower.args[0].kind != "symbol" or upper is None:
            raise Undecided(f"a {name} over a condition")
        body = self.term()
        self.sums_over_i -= is_over_i
        return Node("sum", (body, *lower.args, upper), name)

    def integral(self) -> Node:
        """An integral, kept as it is."""
        bounds = self.bounds()
        self.integrals += 1
        body = self.expression()
        self.integrals -= 1
        if self.take().text != "d":
            raise Undecided("an integral without its variable")
        return Node("opaque", (body, symbol(self.take().text), *bounds.values()), "int")


_READ: dict[str, Callable[[Parser, str], Node]] = {
    "number": lambda _, text: literal(text),
    "symbol": Parser.variable,
    "command": Parser.command,
    "function": Parser.function,
}
_MACROS: dict[str, Callable[[Parser, str], Node]] = {
    "frac": lambda self, _: quotient(self.argument(), self.argument()),
    "binom": lambda self, _: function("binom", self.argument(), self.argument()),
    "sqrt": lambda self, _: self.root(),
    "int": lambda self, _: self.integral(),
    "begin": Parser.environment,
    "accent": lambda self, rest: _accented(rest, self.argument()),
    "mathbb": lambda _, rest: symbol(f"mathbb:{rest}"),
    "based": lambda _, rest: Node(
        "based", text=rest.partition("_")[0], value=Fraction(rest.partition("_")[2])
    ),
    **dict.fromkeys(("lfloor", "lceil"), Parser.stepped),
    **dict.fromkeys(("angle", "triangle"), Parser.figure),
    **dict.fromkeys(("sum", "prod", "lim"), Parser.big_operator),
}


def _arranged(name: str, rows: list[list[Node]]) -> Node:
    """What the cells of an environment are together."""
    if not rows:
        raise Malformed(f"{name} of nothing")
    kind = name.rstrip("*")
    if kind in ("cases", "dcases", "rcases") and all(len(row) == 2 for row in map(_case, rows)):
        return Node("cases", tuple(part for row in rows for part in _case(row)))
    if kind in ("cases", "aligned", "align", "gathered", "split"):
        return joined("list", [cell for row in rows for cell in row])
    if len({len(row) for row in rows}) != 1:
        raise Malformed("rows of different lengths")
    if rows == [rows[0]] and len(rows[0]) == 1:
        return rows[0][0]
    return function("det", grid(rows)) if name == "vmatrix" else grid(rows)


def _case(row: list[Node]) -> list[Node]:
    """The value of a case and its condition, which may stand in one cell."""
    row = list(row[0].args) if len(row) == 1 and row[0].kind == "cases" else row
    parts = [
        part
        for cell in row
        for part in (cell.args if cell.kind == "list" and len(row) == 1 else (cell,))
    ]
    return (
        parts if len(parts) == 2 and parts[1].kind in ("relation", "word", "list", "symbol") else []
    )


def _accented(accent: str, node: Node) -> Node:
    """A marked letter is a variable of its own; a bar over two points is their segment."""
    if accent == "bar" and node.kind == "mul" and all(part.text.isupper() for part in node.args):
        return node
    if node.kind == "symbol" or (
        node.kind == "mul" and all(part.kind == "symbol" for part in node.args)
    ):
        return symbol(f"{accent} " + "".join(part.text for part in node.args or (node,)))
    return Node("call", (node,), accent)


_SPELLED: dict[str, Callable[[Node], Node]] = {
    "sqrt": lambda node: Node("root", (node, TWO)),
    "cbrt": lambda node: Node("root", (node, number(3, "3"))),
    "exp": lambda node: Node("pow", (_E, node)),
    "cis": lambda node: Node("pow", (_E, Node("mul", (_I, node)))),
}


def _applied(name: str, arguments: tuple[Node, ...], base: Node | None) -> Node:
    """A function of its arguments, spelled by those that are computed."""
    if name in ("log", "lg", "ln"):
        top = function("ln" if name == "ln" or base is not None else "log", *arguments)
        return top if base is None else quotient(top, function("ln", base))
    return _SPELLED[name](*arguments) if name in _SPELLED else function(name, *arguments)


def literal(text: str) -> Node:
    """A number token as a leaf; longer ones than can be computed with stay text."""
    mantissa, _, exponent = text.lower().rstrip(".").partition("e")
    if len(mantissa) > _MAX_LITERAL:
        return Node("huge", text=mantissa.lstrip("0") or "0")
    if mantissa.isdigit() and not exponent:
        return Node("number", text=text, value=Fraction(int(mantissa)))
    if abs(int(exponent or 0)) > 20_000:
        raise TooLarge("an exponent past 20000")
    return Node("number", text=text, value=Fraction(mantissa) * Fraction(10) ** int(exponent or 0))
