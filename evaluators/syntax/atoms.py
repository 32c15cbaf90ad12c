"""Parser of atoms: numbers, variables, functions, fractions, roots, matrices, sums."""

from collections.abc import Callable
from fractions import Fraction

from atts.evaluators.syntax.stream import Grammar
from atts.evaluators.syntax.tree import (
    EMPTY_SET,
    INFINITY,
    MINUS_ONE,
    REALS,
    TWO,
    Node,
    function,
    grid,
    number,
    quotient,
    symbol,
)
from atts.evaluators.verdict import Malformed, NotMaths, TooLarge, UnknownWords

_CALLABLE = frozenset("fghFGH")
_MAYBE_CALLABLE = frozenset("pquPQRSTVNMIABCDEKLXYZW")
_INVERSES = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")}
_MANY = frozenset({"max", "min", "gcd", "lcm"})
_MAX_LITERAL = 4000  # digits; Python refuses to convert much longer ones


def atom(parser: Grammar) -> Node:
    """One atom from the stream; raises Malformed where none begins."""
    token = parser.here
    if token.kind == "number":
        return literal(parser.take().text)
    if token.kind == "symbol":
        return _variable(parser)
    if token.kind == "command":
        return _command(parser)
    if token.kind == "function":
        return _function(parser)
    if token.kind == "open":
        return parser.bracketed()
    if token.kind == "op" and token.text in ("pm", "mp"):
        sign = parser.take().text
        return Node("plusminus", (parser.factor(),), "+" if sign == "pm" else "-")
    if token.kind == "word":
        return _word(parser)
    if token.kind == "currency":
        parser.currencies.add(parser.take().text)
        return parser.factor()
    raise Malformed(f"{token.text or 'the end'!r} where a value should be")


def _word(parser: Grammar) -> Node:
    word = parser.take().text
    if word.lower() == "inf":
        return INFINITY
    raise UnknownWords(f"the word {word!r}")


def _variable(parser: Grammar) -> Node:
    name = parser.take().text
    if name in ("e", "i") and parser.here.text != "_":
        return Node("constant", text=name)
    if parser.is_op("_"):
        node = parser.lowered(symbol(name))
        name = node.text
    while parser.is_op("'", "''"):
        name += parser.take().text
    return called(parser, name)


def called(parser: Grammar, name: str) -> Node:
    """The variable of this name, or the function applied to the bracket that follows it."""
    following = [token.text for token in parser.tokens[parser.at : parser.at + 6]]
    if name in _CALLABLE and following == ["^", "{", "-", "1", "}", "("]:
        parser.at += 5
        name += "^-1"
    head = name[0]
    if parser.here.text == "(" and (head in _CALLABLE or (head in _MAYBE_CALLABLE and _simple_argument(parser))):
        inside = parser.bracketed()
        arguments = inside.args if inside.kind in ("tuple", "list") else (inside,)
        return Node("call", arguments, name)
    if parser.here.text == "{" and head in _CALLABLE and parser.ahead().text == "(":
        parser.take()
        inside = parser.bracketed()
        parser.expect("close", "}")
        return Node("call", inside.args if inside.kind == "tuple" else (inside,), name)
    return symbol(name)


def _simple_argument(parser: Grammar) -> bool:
    """Whether the bracket ahead holds one variable or number, so that a capital before it names a function."""
    return parser.ahead().kind in ("symbol", "number") and parser.ahead(2).text == ")"


def _command(parser: Grammar) -> Node:
    name = parser.take().text
    if name in _COMMANDS:
        return _COMMANDS[name](parser)
    if name in _SIGNS:
        return _SIGNS[name]
    if name in ("lfloor", "lceil"):
        inside = parser.items()
        parser.expect("command", "r" + name[1:])
        return function(name[1:], inside)
    if name in ("angle", "triangle"):
        return _named_figure(parser, name)
    if name.startswith("begin:"):
        return _environment(parser, name.partition(":")[2])
    if name in ("sum", "prod"):
        return _big_operator(parser, name)
    if name.startswith("accent:"):
        return _accented(name.partition(":")[2], argument(parser))
    if name.startswith("mathbb:"):
        return REALS if name == "mathbb:R" else symbol(name)
    if name.startswith("based:"):
        digits, base = name[6:].split("_")
        return Node("based", text=digits, value=number(int(base)).value)
    raise NotMaths(f"the command \\{name}")


def _accented(accent: str, node: Node) -> Node:
    """A marked letter is a variable of its own; a bar over two points is their segment."""
    if accent == "bar" and node.kind == "mul" and all(part.text.isupper() for part in node.args):
        return node
    if node.kind == "symbol" or (node.kind == "mul" and all(part.kind == "symbol" for part in node.args)):
        return symbol(f"{accent} " + "".join(part.text for part in node.args or (node,)))
    return Node("call", (node,), accent)


def argument(parser: Grammar) -> Node:
    """A macro's argument: a group, or a single digit, letter or macro."""
    token = parser.here
    if token.kind == "open":
        return parser.bracketed()
    if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
        parser.tokens[parser.at] = token._replace(text=token.text[1:], tight=True)
        return literal(token.text[0])
    if token.kind in ("number", "symbol", "command", "function"):
        return atom(parser)
    raise Malformed(f"{token.text or 'the end'!r} where an argument should be")


def _root(parser: Grammar) -> Node:
    index = TWO
    if parser.here.text == "[":
        parser.take()
        index = parser.expression()
        parser.expect("close", "]")
    token = parser.here
    if token.kind == "number":
        radicand = literal(parser.take().text)
    elif token.kind in ("open", "symbol", "command", "function"):
        radicand = atom(parser) if token.kind != "symbol" else argument(parser)
    else:
        raise Malformed("a root of nothing")
    return Node("root", (radicand, index))


def _named_figure(parser: Grammar, name: str) -> Node:
    letters: list[str] = []
    if name == "angle" and parser.here.kind == "number":  # of a complex number, after its size
        return _applied("cis", (parser.factor(),), None)
    while parser.here.kind in ("symbol", "word") or (parser.here.kind == "op" and parser.here.text == "_"):
        if parser.is_op("_"):
            parser.take()
            letters.append(parser.subscript())
        else:
            letters.append(parser.take().text)
    return symbol(f"{name} {''.join(letters)}")


def _function(parser: Grammar) -> Node:
    name = parser.take().text
    power: Node | None = None
    base: Node | None = None
    while parser.is_op("^", "_"):
        if parser.take().text == "^":
            power = parser.exponent()
        else:
            base = argument_or_number(parser)
    if power is not None and power.value == -1 and name in _INVERSES:
        name, power = _INVERSES[name], None
    arguments = _arguments(parser, name)
    if name not in _MANY and len(arguments) != 1:
        raise Malformed(f"{name} of {len(arguments)} values")
    node = _applied(name, arguments, base)
    return node if power is None else Node("pow", (node, power))


def argument_or_number(parser: Grammar) -> Node:
    """A subscript of log: a group or a whole number."""
    return literal(parser.take().text) if parser.here.kind == "number" else argument(parser)


def _applied(name: str, arguments: tuple[Node, ...], base: Node | None) -> Node:
    if name in ("log", "lg", "ln"):
        natural = name == "ln" or base is not None
        top = function("ln" if natural else "log", *arguments)
        return top if base is None else quotient(top, function("ln", base))
    if name == "sqrt" or name == "cbrt":
        return Node("root", (arguments[0], TWO if name == "sqrt" else number(3)))
    if name == "exp":
        return Node("pow", (Node("constant", text="e"), arguments[0]))
    if name == "cis":
        return Node("pow", (Node("constant", text="e"), Node("mul", (Node("constant", text="i"), arguments[0]))))
    return function(name, *arguments)


def _arguments(parser: Grammar, name: str) -> tuple[Node, ...]:
    """What a function is applied to: a bracket, or the product of what follows up to the next function or sign."""
    token = parser.here
    if token.kind == "open":
        bars = token.text == "|"
        inside = parser.bracketed()
        if bars:
            return (inside,)
        if inside.kind == "tuple" or (inside.kind == "set" and name in _MANY):
            return inside.args
        return (inside,)
    parser.deeper()
    flips = 0
    while parser.is_op("+", "-"):
        flips += parser.take().text == "-"
    factors = [parser.factor()]
    while parser.starts_factor() and parser.here.kind in ("symbol", "command", "number") and factors[-1].kind != "func":
        factors.append(parser.factor())
        if len(factors) > parser.limits.items:
            raise TooLarge("too many factors")
    parser.depth -= 1
    node = factors[0] if len(factors) == 1 else Node("mul", tuple(factors))
    return (Node("mul", (MINUS_ONE, node)) if flips % 2 else node,)


def _environment(parser: Grammar, name: str) -> Node:
    """A matrix, the lines of an alignment, or the cases of a system."""
    rows: list[list[Node]] = [[]]
    parser.deeper()
    count = 0
    while not parser.here.text.startswith("end:"):
        token = parser.here
        if token.kind == "end":
            raise Malformed(f"{name} that is never ended")
        if token.kind == "op" and token.text == "\\\\":
            parser.take()
            rows.append([])
        elif token.kind == "op" and token.text == "&":
            parser.take()
        else:
            rows[-1].append(parser.items())
            count += 1
            if count > parser.limits.items:
                raise TooLarge("a matrix too large")
    parser.take()
    parser.depth -= 1
    rows = [row for row in rows if row]
    if not rows:
        raise Malformed(f"{name} of nothing")
    if name.rstrip("*") in ("cases", "dcases", "rcases") and all(len(row) == 2 for row in map(_case, rows)):
        return Node("cases", tuple(part for row in rows for part in _case(row)))
    if name.rstrip("*") in ("cases", "aligned", "align", "gathered", "split"):
        members = tuple(cell for row in rows for cell in row)
        return members[0] if len(members) == 1 else Node("list", members)
    if len({len(row) for row in rows}) != 1:
        raise Malformed("rows of different lengths")
    if rows == [rows[0]] and len(rows[0]) == 1:
        return rows[0][0]
    return function("det", grid(rows)) if name == "vmatrix" else grid(rows)


def _case(row: list[Node]) -> list[Node]:
    """The value of a case and its condition, which may stand in one cell."""
    row = list(row[0].args) if len(row) == 1 and row[0].kind == "cases" else row
    parts = [part for cell in row for part in (cell.args if cell.kind == "list" and len(row) == 1 else (cell,))]
    return parts if len(parts) == 2 and parts[1].kind in ("relation", "word", "list", "symbol") else []


def _big_operator(parser: Grammar, name: str) -> Node:
    variable, lower, upper = symbol("k"), None, None
    while parser.is_op("_", "^"):
        if parser.take().text == "_":
            bound = parser.bracketed() if parser.here.kind == "open" else argument(parser)
            if bound.kind != "relation" or bound.text != "=" or bound.args[0].kind != "symbol":
                raise NotMaths("a sum over a condition")
            variable, lower = bound.args
        else:
            upper = argument_or_number(parser)
    if lower is None or upper is None:
        raise NotMaths("a sum without bounds")
    return Node("sum", (parser.term(), variable, lower, upper), name)


def _integral(parser: Grammar) -> Node:
    bounds: list[Node] = []
    while parser.is_op("_", "^"):
        parser.take()
        bounds.append(argument_or_number(parser))
    parser.integrals += 1
    body = parser.expression()
    parser.integrals -= 1
    if parser.here.text != "d":
        raise NotMaths("an integral without its variable")
    parser.take()
    return Node("opaque", (body, symbol(parser.take().text), *bounds), "int")


def _limit(parser: Grammar) -> Node:
    parser.expect("op", "_")
    bound = parser.bracketed() if parser.here.kind == "open" else argument(parser)
    if bound.kind != "relation" or bound.text != "->":
        raise NotMaths("a limit without its point")
    return Node("opaque", (parser.term(), *bound.args), "lim")


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


_SIGNS = {"pi": Node("constant", text="pi"), "infty": INFINITY, "emptyset": EMPTY_SET, "ldots": symbol("…")}
_COMMANDS: dict[str, Callable[[Grammar], Node]] = {
    "frac": lambda parser: quotient(argument(parser), argument(parser)),
    "binom": lambda parser: function("binom", argument(parser), argument(parser)),
    "sqrt": _root,
    "int": _integral,
    "lim": _limit,
}
