"""Group equal answers into classes; in large groups, only answers that share a key are compared."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import combinations
from typing import Any

import mpmath

from atts.core import AnswerKind
from atts.evaluators.equivalence.algebra import without_asking
from atts.evaluators.equivalence.compare import COLLECTIONS
from atts.evaluators.equivalence.evaluation import NotRational, Value, exact
from atts.evaluators.equivalence.pairs import arbitrary, equivalent
from atts.evaluators.equivalence.probing import Point, Prober, generic, is_real, written
from atts.evaluators.equivalence.regions import Line, speaks_of_reals
from atts.evaluators.equivalence.views import (
    bound_alike,
    clock,
    is_decimal,
    labelled,
    members,
    named,
    stated_value,
    terminates,
    unframed,
)
from atts.evaluators.programs import ProgramVotes
from atts.evaluators.syntax.reading import Reading, read, spaceless
from atts.evaluators.syntax.tree import (
    Node,
    has,
    minus,
    number,
    quotient,
    substituted,
    variables,
)
from atts.evaluators.syntax.vocabulary import measure, squashed
from atts.evaluators.verdict import LIMITS, Limits, OutOfTime, Undecided, Undefined

# In a group of at most this number of answers with a common loose key, all pairs are compared. In a
# larger group, each answer is compared only with the first few.
_CROWD = 48
# With at most this number of different answers, all pairs are compared, even pairs without a common
# key.
_FEW = 16


def group(
    answers: Sequence[str | None], kind: AnswerKind = "math", *, limits: Limits = LIMITS
) -> list[int]:
    """Group equal answers into classes, and return the index of each answer's class.

    Classes are numbered by first appearance. The index -1 stands for a missing or empty answer,
    which abstains.

    Two answers in one class are always equal under `equivalent`. Equal answers share a class,
    unless this would join different answers. For example, 10 and 0.1 stay in two classes, even if
    10 % is among the answers. The classes do not depend on the order of the answers.

    Time grows nearly linearly with the number of answers. If there are many different answers, only
    those that share a lookup key are compared. The keys are computed from the answers' values.

    >>> group(["1/2", "0.5", "2", None, r"\\frac{2}{4}"])
    [0, 0, 1, -1, 0]
    """
    if kind == "code":
        return ProgramVotes(None).group(answers)
    texts = sorted({answer for answer in answers if answer is not None and answer.strip()})
    classes = _Classes(kind, limits).of(texts)
    numbers: dict[int, int] = {}
    labels = list[int]()
    for answer in answers:
        if answer is None or not answer.strip():
            labels.append(-1)
        else:
            labels.append(numbers.setdefault(classes[answer], len(numbers)))
    return labels


def takes_long(answers: Sequence[str | None], kind: AnswerKind = "math") -> bool:
    """Return True if `group` would have to wait for sympy's worker process. An event loop should
    then call `group` in a thread.
    """
    with without_asking() as questions:
        group(answers, kind)
    return bool(questions)


class _Classes:
    """A builder of classes of equal answers. Answers with the same strong key start in one class;
    comparisons then merge classes.

    The order of the comparisons depends only on the answers' texts.
    """

    def __init__(self, kind: AnswerKind, limits: Limits) -> None:
        self.kind: AnswerKind = kind
        self.limits = limits
        self.keys = Keys(limits)
        self.verdicts: dict[tuple[int, int], str] = {}
        # the first text of each class; the texts of a class have the same strong key
        self.texts: list[str] = []

    def of(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the class index of each text. `texts` must be sorted and without duplicates."""
        strong: dict[str, int] = {}
        index_of: dict[str, int] = {}
        loose: dict[str, list[int]] = defaultdict(list)
        for text in texts:
            reading = read(text, self.limits)
            key = squashed(reading.text) if self.kind == "text" else self.keys.strong(reading)
            if key not in strong:
                strong[key] = len(self.texts)
                self.texts.append(text)
                if self.kind != "text":
                    for token in sorted(self.keys.loose(reading)):
                        loose[token].append(strong[key])
            index_of[text] = strong[key]
        merged = self.merge(loose)
        return {text: merged[index] for text, index in index_of.items()}

    def merge(self, loose: dict[str, list[int]]) -> list[int]:
        """Merge classes whose answers are equal, and return the new index of each class.

        Only classes that share a loose key are compared, unless there are few classes. Each class
        is compared by its first text. Merged classes are merged further only if all pairs of their
        first texts are equal.
        """
        parent = list(range(len(self.texts)))
        inside: dict[int, list[int]] = {index: [index] for index in parent}
        pairs = _pairs(loose)
        if self.kind != "text" and len(self.texts) <= _FEW:
            pairs = set(combinations(range(len(self.texts)), 2))
        for left, right in sorted(pairs):
            one = parent[left]
            two = parent[right]
            if one == two or self.verdict(left, right) != "equal":
                continue
            if all(self.verdict(a, b) == "equal" for a in inside[one] for b in inside[two]):
                for member in inside[two]:
                    parent[member] = one
                inside[one] += inside.pop(two)
        return parent

    def verdict(self, left: int, right: int) -> str:
        """Return the cached result of comparing the first texts of two classes, such as "equal"."""
        pair = (min(left, right), max(left, right))
        if pair not in self.verdicts:
            one = self.texts[pair[0]]
            two = self.texts[pair[1]]
            self.verdicts[pair] = equivalent(one, two, self.kind, limits=self.limits).status
        return self.verdicts[pair]


def _pairs(loose: dict[str, list[int]]) -> set[tuple[int, int]]:
    """Return the pairs of indices of answers that should be compared.

    The two answers share a loose key, or one is a decimal that the other may round to. If very many
    answers share a key, only the first four are paired with all others.
    """
    pairs: set[tuple[int, int]] = set()
    for token, indices in loose.items():
        if token.endswith(">"):
            continue
        others = loose.get(f"{token[:-1]}>", []) if token.endswith("<") else indices
        hubs = indices if len(indices) * len(others) <= _CROWD**2 else indices[:4]
        pairs |= {(min(a, b), max(a, b)) for a in hubs for b in others if a != b}
    return pairs


_COLLECTIONS = (*COLLECTIONS, "setminus", "builder")
_NOT_VALUES = (*_COLLECTIONS, "word", "relation", "plusminus", "opaque", "huge", "ratio", "based", "quantity",
               "clock", "congruence", "cases", "aliases")  # fmt: skip


class Keys:
    """A maker of lookup keys, which are strings. Answers with the same strong key are equal, and
    answers that may be equal share a loose key.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.values: dict[int, tuple[Node, Value]] = {}

    def value(self, node: Node) -> Value:
        """Return the value of a tree at a fixed point, which gives each variable an integer. Recent
        values are cached.
        """
        if id(node) not in self.values:
            if len(self.values) > 60:
                self.values.clear()
            self.values[id(node)] = node, Prober(self.limits).value(node, _at(variables(node), 0))
        return self.values[id(node)][1]

    def strong(self, reading: Reading) -> str:
        """Return the strong key of an answer. Two answers with the same strong key are equal."""
        if not reading.trees:
            return "text:" + spaceless(reading.text)
        node = reading.trees[0]
        # Answers such as "(C) 46" are equal only if both the letter and the text after it are
        # equal.
        if reading.lettered:
            return f"choice:{reading.choice}:{node!r}"
        if not has(node, *_NOT_VALUES, "percent", "degree") and not is_decimal(node):
            with suppress(NotRational, Undecided, Undefined):
                return "v:" + written(exact(node, self.limits))
        return repr(node)

    def loose(self, reading: Reading) -> frozenset[str]:
        """Return the loose keys of an answer. Answers that may be equal share at least one.

        A key that ends in "<" belongs to a decimal. It counts as shared with an exact value that
        may round to the decimal, whose key ends in ">".
        """
        phrases = {reading.squashed, unframed(reading.squashed)} - {""}
        keys = {"text:" + phrase for phrase in phrases}
        if reading.choice:
            keys.add("letter:" + reading.choice)
        for tree in reading.trees:
            keys |= self.tokens(tree) | self.near(tree)
        return frozenset(keys)

    def tokens(self, node: Node) -> set[str]:
        """Return the loose keys of one tree, except those of `near`.

        Keys that cannot be computed are left out.
        """
        keys = set[str]()
        with suppress(Undecided, Undefined, OutOfTime):
            keys.update(self._tokens(bound_alike(node)))
        return keys

    def _tokens(self, node: Node) -> Iterator[str]:
        if node.kind == "relation":
            yield from self.relation_tokens(node)
        elif has(node, "plusminus") and node.kind not in ("list", "set"):
            yield self.collected(members(node))
        elif node.kind in _COLLECTIONS:
            yield from self.collection_tokens(node)
        elif node.kind == "aliases":
            yield from (token for each in node.args for token in self.tokens(each))
        elif node.kind == "opaque" and node.text == "cap":
            yield from self.region_tokens(node)
        elif node.kind in ("word", "clock", "congruence"):
            stated = stated_value(node, Node("list"))
            if stated is not None:
                yield from self.tokens(stated)
            yield f"{node.kind}:{clock(node) if node.kind == 'clock' else node.text}"
        else:
            yield from self.value_tokens(node)

    def value_tokens(self, node: Node) -> Iterator[str]:
        """Yield loose keys made from the value of a tree, with each variable set to a fixed
        integer.

        Further keys ignore a percent or degree sign, a unit or a base.
        """
        if node.kind in ("percent", "degree", "quantity"):
            yield from self._tokens(node.args[0])
        if node.kind == "quantity" and (unit := measure(node.text)):
            scaled = Node("mul", (*node.args, number(unit[1])))
            for token in self.tokens(scaled):
                yield "unit:" + token
        if node.kind == "based" and node.text.isdigit():
            yield f"value:{int(node.text):x}/1"
        if node.kind == "cases":
            yield node.kind
        if node.kind == "ratio":
            yield self.collected(node.args)
            yield f"clock:{clock(node)}"
        value = quotient(*node.args) if node.kind == "ratio" and len(node.args) == 2 else node
        yield "value:" + written(self.value(value))
        constants = arbitrary(variables(value))
        others = variables(value) - constants
        # A key from the difference of the values at two points, with 1 for each arbitrary constant.
        # So x^2 + C and x^2 + K + 3 have the same key.
        if constants and others:
            prober = Prober(self.limits)
            known = {name: number(1) for name in constants}
            ends = (
                substituted(
                    value, known | {name: number(at) for name, at in _at(others, index).items()}
                )
                for index in (0, 1)
            )
            yield "constants:" + written(prober.value(minus(*ends)))

    def near(self, node: Node) -> set[str]:
        """Return lookup keys for a value, rounded to five digits.

        A decimal and an exact value that rounds to it share a key, except for the final "<" of
        decimals or ">" of exact values. A decimal also gets the keys of its two neighbours with
        five digits.
        """
        value = named(node).value
        if value.kind in _COLLECTIONS and value.args:
            return self.nearly_all(_entries(value))
        size = self.rounded(value)
        if size is None:
            return set()
        if not is_decimal(value):
            return {f"near:{_digits(size, 5)}>"}
        unit = mpmath.mpf(10) ** (int(mpmath.floor(mpmath.log10(abs(size)))) - 4)
        return {f"near:{_digits(size + step * unit, 5)}<" for step in (-1, 0, 1)}

    def rounded(self, node: Node) -> Any | None:
        """Return the value of a decimal, or of a number such as 1/3 that has no finite decimal
        expansion. The result is None for any other node.
        """
        with suppress(Undecided, Undefined, OutOfTime):
            value = None if variables(node) else self.value(node)
            has_end = isinstance(value, Fraction) and terminates(value)
            if value and is_real(value) and (is_decimal(node) or not has_end):
                return mpmath.re(Prober(self.limits).approximate(value).value)
        return None

    def nearly_all(self, nodes: list[Node]) -> set[str]:
        """Return a set with one lookup key for a collection, in which numbers are rounded to three
        digits.

        The set is empty if no entry is a decimal or a number without a finite decimal expansion.
        """
        sizes = [(node, self.rounded(node)) for node in nodes[:_MANY]]
        if all(size is None for _, size in sizes):
            return set()
        shown = sorted(
            self.least(node) if size is None else _digits(size, 3) for node, size in sizes
        )
        has_decimals = any(size is not None and is_decimal(node) for node, size in sizes)
        return {f"near:{';'.join(shown)}{'<' if has_decimals else '>'}"}

    def relation_tokens(self, node: Node) -> Iterator[str]:
        """Yield the loose keys of a relation.

        They include the keys of a value that the relation states, such as 5 for x = 5. Another key
        is the same for all equations that differ only by a factor.
        """
        value = named(node).value
        if value.kind != "relation":
            yield from self.tokens(value)
        stated = stated_value(node, Node("list"))
        if stated is not None:
            yield from self.tokens(stated)
        yield from self.region_tokens(node)
        # Key of an equation: (left side - right side) at one point, divided by the same difference
        # at another point. A constant factor does not change this quotient.
        if len(node.args) == 2:
            sides = minus(*node.args)
            prober = Prober(self.limits)
            first, second = (prober.value(sides, _at(variables(sides), index)) for index in (0, 1))
            yield "equation:" + written(prober.divide(first, second))
        elif value.kind == "relation":
            yield self.collected(node.args)

    def region_tokens(self, node: Node) -> Iterator[str]:
        """Yield a key made of the ends of the intervals, if the node denotes a set of real
        numbers.
        """
        region = Line(Prober(self.limits)).region(node)
        if region:
            yield self.collected(end.value for end in region)

    def collection_tokens(self, node: Node) -> Iterator[str]:
        """Yield the keys of a collection. One key stands for all members together.

        In some cases, the keys of single members or of a set of real numbers follow.
        """
        inside = members(node) if node.kind in ("list", "set") else _entries(node)
        yield self.collected(inside)
        labels = labelled(node)
        if labels:
            yield self.collected(labels.values())
        if len(inside) == 1 or node.text == "or":
            yield from (token for each in inside for token in self.tokens(each))
        if speaks_of_reals(node):
            yield from self.region_tokens(node)

    def collected(self, nodes: Iterable[Node]) -> str:
        """Return one key for members in any order, made of the alphabetically first key of each
        member.
        """
        return "all:" + ";".join(sorted(set(map(self.least, nodes))))

    def least(self, node: Node) -> str:
        """Return the alphabetically first key of a node; "?" if no key can be computed."""
        return min(self.tokens(named(node).value), default="?")


_MANY = 40  # only this number of entries of a list or set is checked for rounded values


def _digits(value: Any, count: int) -> str:
    return str(mpmath.nstr(value, count, strip_zeros=False, min_fixed=0, max_fixed=0))


def _entries(node: Node) -> list[Node]:
    if node.kind in _COLLECTIONS:
        return [entry for arg in node.args for entry in _entries(arg)]
    return [node]


def _at(names: frozenset[str], index: int) -> Point:
    """Return a fixed integer for each variable, which depends only on the variable's name and on
    `index`.

    Most functions are defined at these integers.
    """
    return generic(dict.fromkeys(names, "natural"), index)
