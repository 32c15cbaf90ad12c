"""Functions that extract a part of a parsed answer, such as its name, members, labels or matrix."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from atts.core import Grading
from atts.evaluators.equivalence.evaluation import NotRational, digits_in_base, exact
from atts.evaluators.equivalence.probing import Prober
from atts.evaluators.syntax.tree import (
    REALS,
    Node,
    canonical,
    grid,
    has,
    negated,
    number,
    quotient,
    substituted,
    symbol,
    variables,
)
from atts.evaluators.syntax.vocabulary import FORMS, Dimension, is_generic, measure, squashed, words
from atts.evaluators.verdict import Limits, TooLarge, Undecided, Undefined

_INTEGERS = frozenset("nkmljt")
PARAMETERS = frozenset("tskmnruvljabcpq") | {"lambda", "mu", "alpha", "beta"}
_INNER_CAPITAL = re.compile("[a-z][A-Z]")
_CHAIN = frozenset({"=", "~"})
_IMPLICATIONS = frozenset({"=>>", "<=>"})
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!=", "~": "~"}


# ---- names of values


class Named(NamedTuple):
    """A value with its name. The name is None if the value has none."""

    name: Node | None
    value: Node


def unapplied(node: Node, names: frozenset[str]) -> Node:
    """Return the tree with g(a+b) read as a product instead of a function call, if g is one of the
    variables `names`.
    """
    args = tuple(unapplied(arg, names) for arg in node.args)
    if node.kind == "call" and node.text in names and [arg.kind for arg in args] == ["add"]:
        return Node("mul", (symbol(node.text), *args))
    return replace(node, args=args) if args else node


def is_name(node: Node) -> bool:
    """Return True if a node is only a name, such as x, f(x), AB or |AB|."""
    if node.kind in ("symbol", "word"):
        return True
    if node.kind == "call":
        return all(arg.kind in ("symbol", "number") for arg in node.args)
    if node.kind == "mul":
        return all(
            _is_point(arg) or (arg.kind == "pow" and is_name(arg.args[0])) for arg in node.args
        )
    if node.kind == "func" and node.text == "abs":
        return node.args[0].kind != "symbol" and is_name(node.args[0])
    if node.kind in ("tuple", "ratio", "list"):
        return all(is_name(arg) for arg in node.args)
    return False


def _is_point(node: Node) -> bool:
    """Return True if a node is a product of capital letters, each of which may name a point."""
    if node.kind == "mul":
        return all(map(_is_point, node.args))
    return node.kind == "symbol" and node.text[0].isupper()


def named(node: Node) -> Named:
    """Split an answer such as "x = 5" into the name x and the value 5.

    "5 + 6 = 11" is the value 11 without a name. Any other equation is a value without a name.
    """
    # "A(1, 2)" is the point A with its coordinates
    if [arg.kind for arg in node.args] == ["symbol", "tuple"] and _is_point(node.args[0]):
        return Named(*node.args)
    if node.kind != "relation":
        return Named(None, node)
    signs = node.text.split()
    has_conclusion = bool({*signs} - _IMPLICATIONS) or not any(map(variables, node.args))
    if _IMPLICATIONS.intersection(signs) and has_conclusion:
        last = max(at for at, sign in enumerate(signs) if sign in _IMPLICATIONS) + 1
        rest = node.args[last:]
        if len(rest) == 1:
            return named(rest[0])
        return named(Node("relation", rest, " ".join(signs[last:])))
    if signs == ["in"] and is_name(node.args[0]):
        return Named(node.args[0], node.args[1])
    if not _CHAIN.issuperset(signs):
        return Named(None, node)
    sides = list(node.args)
    if len(sides) == 2 and has(sides[0], "call") and not has(sides[1], "call", "symbol"):
        return Named(sides[0], sides[1])
    # Drop approximate values at the end, as in x = 1/3 ~ 0.33, if an exact value comes before them.
    while signs[-1] == "~" and (len(sides) > 2 or not is_name(sides[0])):
        signs.pop()
        sides.pop()
        if not signs:
            return Named(None, sides[0])
    return _of_chain(sides)


def _of_chain(sides: list[Node]) -> Named:
    """Return the name and the value of a chain of equalities, such as x = 2/4 = 1/2."""
    last = variables(sides[-1])
    between = [names for names in map(variables, sides[1:-1]) if names]
    # A middle side has other variables than the last side, as in x = 2y = 3z. Then x does not name
    # a value.
    is_tied = last and any(not names & last for names in between)
    if is_name(sides[0]) and not _mentions(sides[-1], sides[0]) and not is_tied:
        return Named(sides[0], sides[-1])
    if len(sides) == 2 and sides[1].kind != "word" and is_name(sides[1]):
        if not _mentions(sides[0], sides[1]):
            return Named(sides[1], sides[0])
    # Neither end is a name. So the chain is a calculation, whose last side is its result, or an
    # equation.
    is_result = (
        (len(sides) > 2 and last <= variables(sides[0]))
        or not any(map(variables, sides))
        or all(side.kind == "quantity" for side in sides)
    )
    if is_result:
        return Named(None, sides[-1])
    return Named(None, Node("relation", tuple(sides), " ".join("=" * (len(sides) - 1))))


def _mentions(node: Node, name: Node) -> bool:
    return name.kind == "symbol" and name.text in variables(node)


def may_name_one(one: Node, two: Node) -> bool:
    """Return True if two names can denote the same value."""
    if one.kind != two.kind:
        call, other = (one, two) if one.kind == "call" else (two, one)
        if call.kind != "call" or other.kind != "symbol":
            return True
        # A function value such as f(2) cannot be called "x". A function of x cannot be called "x"
        # either.
        return call.args[0].kind != "number" and other not in call.args
    if one.kind == "word":
        few, many = sorted(({*name.text.split()} for name in (one, two)), key=len)
        return few <= many
    if one.kind == "call":
        arguments = (*one.args, *two.args)
        are_variables = all(arg.kind == "symbol" and arg.text.islower() for arg in arguments)
        is_same_function = one.text == two.text and len(one.args) == len(two.args)
        return one == two or (is_same_function and are_variables)
    if one.kind == "mul":
        return canonical(one) == canonical(two)
    return one.kind == "symbol"


def shortened(node: Node, other: Node) -> Node:
    """Shorten m+n = 100+13 = 113 to m+n = 113, if the other answer is also an equation."""
    if node.kind != "relation" or other.kind != "relation" or {*node.text.split()} != {"="}:
        return node
    first, *results = node.args
    if len(results) < 2 or is_name(first) or not variables(first) or any(map(variables, results)):
        return node
    return Node("relation", (first, results[-1]), "=")


def unbold(node: Node, other: Node) -> Node:
    """Replace bold letters by letters with arrows if the other answer has arrows, else by plain
    letters.
    """
    names = [each.text for each in node.walk() if each.text.startswith("bold ")]
    if not names:
        return node
    has_arrows = any(each.text.startswith("vec ") for each in other.walk())
    put = "vec " if has_arrows else ""
    return substituted(node, {name: symbol(name.replace("bold ", put)) for name in names})


def concluded(node: Node, other: Node) -> Node:
    """Return the last equation of a list such as m=3, n=17, m+n=20, which combines the values
    before it.

    The list is returned unchanged if the other answer is a list too.
    """
    if node.kind != "list" or node.text == "or" or other.kind in ("list", "set", "tuple"):
        return node
    *given, last = node.args
    names = {named(arg).name for arg in given}
    if None in names or last.kind != "relation" or last.text != "=" or is_name(last.args[0]):
        return node
    known = {name.text for name in names if name is not None}
    asked = variables(last.args[0])
    return last if asked and asked <= known else node


def stated_value(equation: Node, other: Node) -> Node | None:
    """Return the value v of an equation `expression = v`, if the other answer is a value.

    For example, m+n = 46 and |z| = 5 state a value. The result is None for equations that are
    themselves the answer. These are equations with 0, equations of curves in x, y and z, and
    residue classes of an unknown.
    """
    if equation.kind == "congruence":
        return equation.args[0] if _is_of_digits(equation) else None
    if equation.kind != "relation" or equation.text != "=":
        return None
    left, right = equation.args
    if right.kind == "congruence":
        is_unknown = left.kind == "symbol" and left.text[0].islower()
        return None if is_unknown and not _is_of_digits(right) else right.args[0]
    if variables(right) and not variables(left):
        left, right = right, left
    names = variables(left)
    if not names or names & (variables(right) | variables(other)):
        return None
    if right.value == 0 or right.kind == "symbol" or _is_curve(left, names):
        return None
    return None if _is_multiple(left) else right


def _is_of_digits(congruence: Node) -> bool:
    """Return True if a residue class gives the last digits of a number: its modulus is 100, 1000 or
    a larger power of 10.
    """
    modulus = congruence.args[1].value
    return modulus is not None and re.fullmatch("100+", str(modulus)) is not None


def _is_multiple(node: Node) -> bool:
    """Return True if one side of an equation is a number times one unknown, as in 2x = 3."""
    if node.kind != "mul" or len(node.args) != 2:
        return False
    factor, unknown = node.args
    is_unknown = unknown.kind == "symbol" and len(unknown.text) == 1 and unknown.text.islower()
    return is_unknown and factor.value is not None and abs(factor.value) != 1


def with_quotients(node: Node) -> Node:
    """Replace ratios such as a:b, which are sides of an equation, by quotients."""
    sides = [
        quotient(*side.args) if side.kind == "ratio" and len(side.args) == 2 else side
        for side in node.args
    ]
    return replace(node, args=tuple(sides))


def residue(node: Node) -> Node:
    """Convert the value "3 mod 7" to the residue class of 3 modulo 7. Any other node is returned
    unchanged.
    """
    if node.kind != "func" or node.text != "mod" or any(arg.value is None for arg in node.args):
        return node
    return Node("congruence", node.args)


def with_terms(node: Node, limit: int) -> Node:
    """Write out all terms of a list such as 1, 3, ..., 9, if they are evenly spaced."""
    at = [index for index, arg in enumerate(node.args) if arg.text == "…"]
    if node.kind not in ("set", "list") or len(at) != 1:
        return node
    before = [arg.value for arg in node.args[: at[0]]]
    after = [arg.value for arg in node.args[at[0] + 1 :]]
    known = [value for value in (*before, *after) if value is not None]
    if len(before) < 2 or not after or len(known) != len(before) + len(after):
        return node
    first = known[0]
    step = known[1] - first
    last = known[-1]
    if not step or (last - first) % step or not 0 < (last - first) / step < limit:
        return node
    terms = [first + step * count for count in range(int((last - first) / step) + 1)]
    if terms[: len(before)] != before or terms[-len(after) :] != after:
        return node
    return Node(node.kind, tuple(map(number, terms)), node.text)


def _is_curve(node: Node, names: frozenset[str]) -> bool:
    """Return True if one side of an equation is a polynomial in x, y and z, other than a sum or
    product of variables.
    """
    if len(names) < 2 or not names <= {"x", "y", "z"}:
        return False
    for each in node.walk():
        if not variables(each):
            continue
        is_power = each.kind == "pow" and (each.args[1].value or 0) >= 1
        if each.kind not in ("add", "mul", "symbol") and not is_power:
            # Logarithms and quotients are rare in equations of curves, so this is not such an
            # equation.
            return False
    if node.kind == "mul":
        return any(factor.kind != "symbol" for factor in node.args)
    terms = node.args if node.kind == "add" else (node,)
    for term in terms:
        is_negated = term.kind == "mul" and len(term.args) == 2 and term.args[0].value == -1
        if (term.args[1] if is_negated else term).kind != "symbol":
            return True
    return False


# ---- members of lists and sets, and their names


def signs_expanded(node: Node) -> tuple[Node, ...]:
    """Return the values of an expression with signs such as +-, one for each choice of the signs.

    Without the sign -+, each +- is chosen independently. With -+, all signs change together, and -+
    has the opposite sign of +-.
    """
    signs = [each.text for each in node.walk() if each.kind == "plusminus"]
    if len(signs) > 4:
        raise TooLarge("too many double signs")
    if "-" in signs:
        choices = [[one] * len(signs) for one in (1, -1)]
    else:
        choices = [[*choice] for choice in product((1, -1), repeat=len(signs))]
    return tuple(_signed(node, choice) for choice in choices)


def _signed(node: Node, choice: list[int]) -> Node:
    if node.kind == "plusminus":
        sign = choice.pop() * (1 if node.text == "+" else -1)
        inside = _signed(node.args[0], choice)
        return inside if sign > 0 else negated(inside)
    if not node.args:
        return node
    return Node(node.kind, tuple(_signed(arg, choice) for arg in node.args), node.text, node.value)


def labelled(node: Node) -> dict[Node, Node] | None:
    """Return the values of an answer with several names, such as x=4, y=6 or (x,y)=(4,6).

    The result is a dictionary from names to values, or None if the answer does not have such a
    form.
    """
    pairs: Sequence[tuple[Node | None, Node]] = [
        (each.args[0], each.args[1]) for each in equations(node)
    ]
    if node.kind == "list" and node.text != "or" and all(arg.text != "in" for arg in node.args):
        pairs = [(each.name, each.value) for each in map(named, node.args)]
    else:
        whole = named(node)
        if whole.name is not None and whole.name.kind == whole.value.kind == "tuple":
            names = whole.name.args
            values = whole.value.args
            pairs = list(zip(names, values, strict=True)) if len(names) == len(values) else []
    labels = {name: value for name, value in pairs if name is not None}
    return labels if labels and len(labels) == len(pairs) else None


def equations(node: Node) -> tuple[Node, ...]:
    """Return the equations x=1 and y=1 for a chain such as x=y=1; empty for any other node."""
    *names, value = node.args or (node,)
    is_chain = node.kind == "relation" and {*node.text.split()} == {"="}
    if not is_chain or variables(value) or len(names) < 2:
        return ()
    if any(name.kind != "symbol" for name in names):
        return ()
    return tuple(Node("relation", (name, value), "=") for name in names)


def grouped(node: Node) -> Node:
    """Group a list such as "x=1, y=8 or x=2, y=7" into points with named coordinates.

    Other nodes are returned unchanged.
    """
    if node.kind != "list":
        return node
    names = [named(arg).name for arg in node.args]
    parts: list[tuple[Node, ...]] = [equations(arg) for arg in node.args]
    if None not in names and names.count(names[0]) > 1:
        size = names.index(names[0], 1)
        if size > 1 and names == names[:size] * (len(names) // size):
            parts = [node.args[at : at + size] for at in range(0, len(names), size)]
    if not all(parts):
        return node
    return Node("list", tuple(Node("tuple", tuple(sorted(part, key=repr)), "()") for part in parts))


class Family(NamedTuple):
    """A family of values: a value that depends on parameters, and the set that contains the
    parameters.
    """

    value: Node
    names: tuple[str, ...]
    home: str


def family(node: Node) -> Family | None:
    """Return an answer such as "k pi, k in Z" as a family; None for any other node."""
    if node.kind == "builder":
        values = [node.args[0]]
        home = node.args[1]
    elif node.kind == "list" and len(node.args) > 1:
        *values, home = node.args
    else:
        return None
    if home.kind != "relation" or home.text != "in" or home.args[0].kind != "symbol":
        return None
    where = "mathbb:R" if home.args[1] == REALS else home.args[1].text
    if not where.startswith("mathbb:"):
        return None
    names = [home.args[0].text]
    # In "(s, t+s), s, t in R", the letters before the last comma are parameters too.
    while len(values) > 1 and values[-1].kind == "symbol":
        names.append(values[-1].text)
        values = values[:-1]
    are_values = all(each.kind != "relation" or each.text == "=" for each in values)
    used = frozenset[str]().union(*(variables(named(each).value) for each in values))
    if not are_values or not used.issuperset(names):
        return None
    value = values[0] if len(values) == 1 else Node("list", tuple(values), node.text)
    return Family(value, tuple(names), where)


def free(node: Node, other: Node) -> Node:
    """Remove "k in Z" from "k pi, k in Z", if the other answer does not say that its parameter is
    an integer.

    The parameter gets the letter that it has in the other answer.
    """
    whole = family(node)
    if whole is None or family(other) is not None:
        return node
    is_simple = (
        whole.value.kind not in ("list", "tuple") and named(whole.value).value.kind != "tuple"
    )
    if other.kind in ("list", "set", "builder") and is_simple:
        return node
    letters = PARAMETERS if whole.home == "mathbb:R" else _INTEGERS
    if node.kind == "builder" and not variables(named(other).value) & letters:
        return node
    names = variables(named(other).value) - variables(named(whole.value).value)
    if labels := labelled(other):
        names = frozenset[str]().union(*map(variables, labels.values())) - variables(whole.value)
    name = whole.names[0]
    is_other = len(names) == 1 == len(whole.names) and names <= letters
    if not is_other or name in variables(other):
        return whole.value
    return substituted(whole.value, {name: symbol(*names)})


def implied(node: Node, other: Family) -> Family | None:
    """Return an answer such as "k pi" as a family that takes its parameter's set from the other
    answer.

    The result is None unless the answer's only letter usually stands for an integer, such as k.
    """
    value = named(node).value if node.kind != "list" else node
    parts = [named(arg).value for arg in value.args] if value.kind == "list" else [value]
    names = frozenset[str]().union(*map(variables, parts))
    return (
        Family(node, tuple(names), other.home) if len(names) == 1 and names <= _INTEGERS else None
    )


def entries(node: Node) -> tuple[Node, ...]:
    """Return the coordinates of a point, without their names."""
    if labels := labelled(node):
        return tuple(value for _, value in sorted(labels.items(), key=lambda item: item[0].text))
    value = named(node).value
    return value.args if value.kind == "tuple" else (value,)


def says_alike(gold: Node, answer: Node) -> bool:
    """Return True if two phrases are equal except for framing words, as in "Bob" and "Bob wins"."""
    one = spelt(gold)
    two = spelt(answer)
    if one == two:
        return True
    if not one or not two:
        return False
    few, many = sorted((one, two), key=len)
    head, inside, tail = many.partition(few)
    if not inside or (head and head[-1] != " ") or (tail and tail[0] != " "):
        return False
    is_framed = FORMS["before_phrase"].fullmatch(head) and FORMS["after_phrase"].fullmatch(tail)
    return is_framed is not None


def unframed(phrase: str) -> str:
    """Return a phrase without its framing words, such as "wins"."""
    framed = FORMS["framed_phrase"].fullmatch(phrase)
    return framed[1] if framed else phrase


def spelt(node: Node) -> str | None:
    """Return the string that is compared for a word or a product of letters; None for other trees.

    Case matters only if a capital follows a small letter, as in NaCl.
    """
    text = node.text if node.kind in ("word", "symbol") else letters(node)
    text = re.sub(r"\bprime numbers?\b", "primes", text)
    text = re.sub(r"\b(odd|even) (?:number|integer)s?\b", r"\1 integers", text)
    if not text:
        return None
    return text if _INNER_CAPITAL.search(text) else squashed(text)


def letters(node: Node) -> str:
    """Return the letters of a product of variables, or of a name such as AB; empty for other nodes."""
    if node.kind == "symbol" and node.text.isalpha():
        return node.text
    parts = [part.text for part in node.args if part.kind == "symbol" and len(part.text) == 1]
    is_run = node.kind == "mul" and len(parts) == len(node.args)
    return "".join(parts) if is_run else ""


def bound_alike(node: Node) -> Node:
    """Replace the names of integer parameters, as in "k pi, k in Z", by #0, #1 and so on, because
    the names do not matter.
    """
    if node.kind not in ("list", "builder"):
        return node
    inside = node.walk()
    names = list[str]()
    for each in inside:
        if each.kind != "relation" or each.text != "in":
            continue
        name, home = each.args
        if name.kind == "symbol" and home != REALS and inside.count(name) > 1:
            names.append(name.text)
    order = enumerate(dict.fromkeys(names))
    return substituted(node, {name: symbol(f"#{index}") for index, name in order})


def members(node: Node) -> tuple[Node, ...]:
    """Return the members of a list or set, including those of nested lists.

    A member with a +- sign is returned as two members.
    """
    inside = named(node).value if node.kind == "relation" else node
    if inside.kind in ("list", "set"):
        parts = list[Node]()
        for arg in inside.args:
            parts.extend((arg,) if arg.kind == "set" else members(arg))
        return tuple(parts)
    return signs_expanded(inside) if has(inside, "plusminus") else (node,)


def are_of_one_function(*lists: Node) -> bool:
    """Return True if all equations of the lists define one function, as f(x)=0 and f(x)=x do."""
    names = {named(arg).name for node in lists for arg in node.args}
    return len(names) == 1 and all(name is not None and name.kind == "call" for name in names)


def counts_apart(nodes: tuple[Node, ...]) -> bool:
    """Return True if all members have different names or different units, as in "3 cats, 5
    dogs".
    """
    kinds = list[object]()
    for node in nodes:
        unit = measure(node.text) if node.kind == "quantity" else None
        kinds.append(named(node).name or unit)
    return None not in kinds and len(set(kinds)) == len(kinds) > 1


def variable_of(node: Node) -> str:
    """Return the variable of a set of real numbers; "" if the set has none or several."""
    names = [] if has(node, "builder") else list(variables(node))
    return names[0] if len(names) == 1 else ""


# ---- reading values as matrices


def matrix(node: Node) -> Node | None:
    """Return the matrix that a node denotes; None if it denotes none.

    The matrix may also be written as a tuple of rows, or transposed. Raises Undecided for sums,
    products and powers of matrices, which only sympy can compute.
    """
    if node.kind == "matrix":
        return node
    if all((each.kind, each.text) == ("tuple", "[]") for each in (node, *node.args)):
        if len({len(arg.args) for arg in node.args}) != 1:
            return None
        return grid(arg.args for arg in node.args)
    if node.kind == "pow" and node.args[1].text == "T" and node.args[0].kind in ("matrix", "tuple"):
        rows = node.args[0].args if node.args[0].kind == "matrix" else node.args[:1]
        return grid(zip(*(row.args for row in rows), strict=True))
    if not has(node, "matrix") or node.kind in ("func", "list", "set", "tuple", "relation"):
        return None
    raise Undecided(f"a matrix inside a {node.kind}")


# ---- signs, infinities, residue classes, times of day


def infinity(node: Node) -> int:
    """Return 1 for plus infinity, -1 for minus infinity, and 0 for any other node."""
    if node.kind == "constant" and node.text == "inf":
        return 1
    if node.kind == "mul" and len(node.args) == 2:
        sign = node.args[0].value
        if infinity(node.args[1]) and sign is not None:
            return 1 if sign > 0 else -1
    if node.kind in ("percent", "quantity"):
        return infinity(node.args[0])
    return 0


def same_numeral(gold: Node, answer: Node) -> bool:
    """Return True if two numerals are equal; if one has no base, the digits are compared."""
    if gold.kind == answer.kind:
        with suppress(Undefined):
            return digits_in_base(gold) == digits_in_base(answer)
        return gold.text == answer.text and gold.value == answer.value
    numeral, other = (gold, answer) if gold.kind == "based" else (answer, gold)
    return other.kind == "number" and other.text == numeral.text


def progression(node: Node) -> Node | None:
    """Convert a progression such as 8k+3, with an integer k, to the residue class of 3 modulo 8;
    None for other nodes.
    """
    value, *homes = node.args if node.kind in ("list", "builder") else (node,)
    names = variables(value)
    are_whole = all(each.text == "in" and each.args[1].text == "mathbb:Z" for each in homes)
    if len(names) != 1 or has(value, "relation", "func", "call") or not are_whole:
        return None
    try:
        first, second, third = (
            exact(value, Limits(), {name: Fraction(at) for name in names}) for at in range(3)
        )
    except (NotRational, Undefined, TooLarge):
        return None
    if not third - second == second - first != 0:
        return None
    return Node("congruence", (number(first), number(abs(second - first))))


def clock(node: Node) -> str | None:
    """Return the time of day that a node states; None if it states none.

    A ratio such as 3:45 may also be a time of day.
    """
    hours, *rest = [arg.text for arg in node.args] if node.kind == "ratio" else node.text.split(":")
    could_be = (
        node.kind == "ratio"
        and len(hours) <= 2
        and all(len(part) == 2 and part.isdigit() for part in rest)
    )
    return ":".join([hours, *rest]).lstrip("0") if could_be or node.kind == "clock" else None


def mark(node: Node) -> str:
    """Return the kind of a value's unit: "percent", "degree", "rad", "unit" for any other unit, or
    "" for none.
    """
    if node.kind in ("percent", "degree"):
        return node.kind
    unit = measure(node.text) if node.kind == "quantity" else None
    if unit is None or not unit[0]:
        return ""
    return "rad" if unit[0] == (("rad", 1),) else "unit"


def is_unnamed(one: Dimension, two: Dimension) -> bool:
    """Return True if one unit is unnamed, such as "square units", and the other is the same power
    of a named length.
    """
    pairs = ((one, two), (two, one))
    return any(is_generic(a) and b == (("m", a[0][1]),) for a, b in pairs)


def is_part(one: Dimension, two: Dimension) -> bool:
    """Return True if one unit describes the counted things more precisely, as "red marbles" does
    for "marbles".
    """
    few, many = sorted((one, two), key=len)
    return set(few) < set(many) and all(name.startswith("#") and size == 1 for name, size in many)


# ---- variables that are assumed to be positive

# `_SIGNED`: letters of positions, angles and counts, which may be negative. `_SIZES`: letters that
# nearly always stand for a positive size.
_SIGNED = words("signed_letters")
_SIZES = words("letters_of_sizes")
_EVEN = ("abs", "sign", "max", "min", "re", "im", "arg", "floor", "ceil")


def sizes(grading: Grading, gold: Node, answer: Node) -> frozenset[str]:
    """Return the variables that the grading policy assumes to be positive; empty for most pairs.

    By default, these are variables of a formula that has a root or logarithm and a letter for a
    size. Letters for sizes are letters of physics (G, rho), capital letters and letters with an
    index.

    Letters of positions, angles and counts are never assumed to be positive. If the formula has a
    function such as abs or sign, the result is empty.
    """
    names = variables(gold) | variables(answer)
    if not names or grading.variables == "real":
        return frozenset()
    if grading.variables == "positive":
        return names
    positive = names - _SIGNED
    is_formula = len(names) > 1 and any(
        name in _SIZES or "_" in name or (len(name) == 1 and name.isupper()) for name in positive
    )
    if not is_formula:
        return frozenset()
    inside = gold.walk() + answer.walk()
    if any(node.kind in ("func", "call") and node.text in _EVEN for node in inside):
        return frozenset()
    return positive if any(map(_depends_on_signs, inside)) else frozenset()


def _depends_on_signs(node: Node) -> bool:
    """Return True if a node can be simplified when its variables are positive, as a root or
    logarithm can.
    """
    if node.kind == "pow":
        power = node.args[1].value
        return bool(variables(node.args[0])) and (power is None or power.denominator != 1)
    return node.kind == "root" or node.text in ("ln", "log")


# ---- decimal numbers and tolerances


def decimal_digits(node: Node) -> int:
    """Return the number of digits of a decimal, without leading and trailing zeros; 0 for other
    nodes.
    """
    if node.kind != "number" or "." not in node.text or "e" in node.text.lower():
        return 0
    return len(node.text.replace(".", "").strip("-0"))


def is_decimal(node: Node) -> bool:
    """Return True if a node is a decimal with at least five digits, which may be a rounded
    value.
    """
    return decimal_digits(node) >= 5


def terminates(value: Fraction) -> bool:
    """Return True if a fraction has a finite decimal expansion."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def rounds(prober: Prober, gold: Node, answer: Node) -> bool:
    """Return True if one node is a decimal with enough digits that results from rounding or
    truncating the other node's value.

    The other value must not have a finite decimal expansion.
    """
    decimal, other = (gold, answer) if decimal_digits(gold) else (answer, gold)
    value = prober.known(other) if is_decimal(decimal) and not decimal_digits(other) else None
    if value is None or (isinstance(value, Fraction) and terminates(value)):
        return False
    assert decimal.value is not None
    unit = Fraction(10) ** -len(decimal.text.partition(".")[2])
    ends = decimal.value - unit, value, decimal.value + unit
    low, middle, high = (prober.approximate(each).value for each in ends)
    return not hasattr(middle, "_mpc_") and bool(low < middle < high)


def policy_for(grading: Grading, gold: Node) -> Grading:
    """Return the grading policy for one reference.

    The relative tolerance applies only if the reference contains a decimal.
    """
    is_rounded = any(each.kind == "number" and set(each.text) & set(".eE") for each in gold.walk())
    return grading if is_rounded or not grading.relative else replace(grading, relative=0.0)


def is_near(prober: Prober, gold: Node, answer: Node, grading: Grading) -> bool:
    """Return True if the difference of two numbers is within the policy's tolerance, as in
    math.isclose.
    """
    if not grading.relative and not grading.absolute:
        return False
    one = prober.known(gold)
    two = prober.known(answer)
    if one is None or two is None:
        return False
    first = prober.approximate(one).value
    second = prober.approximate(two).value
    gap = abs(first - second)
    size = max(abs(first), abs(second))
    return bool(gap <= max(grading.absolute, size * grading.relative) * (1 + 1e-12))
