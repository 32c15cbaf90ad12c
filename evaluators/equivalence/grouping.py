"""Verdicts on answer texts: of two by their spelling, then by their trees; of many by keys of their
values first.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from typing import Any, get_args

import mpmath

from atts.core import AnswerKind, Grading
from atts.errors import OptionError
from atts.evaluators.equivalence import views
from atts.evaluators.equivalence.approx import NotRational
from atts.evaluators.equivalence.compare import Comparer
from atts.evaluators.equivalence.numeric import Value, exact
from atts.evaluators.equivalence.probing import Point, Prober, generic, is_real, written
from atts.evaluators.equivalence.sets import Line, speaks_of_reals
from atts.evaluators.equivalence.views import (
    clock,
    held_to,
    is_decimal,
    labelled,
    members,
    named,
    terminates,
)
from atts.evaluators.syntax.reading import Reading, read, spaceless
from atts.evaluators.syntax.tree import Node, has, minus, number, quotient, variables
from atts.evaluators.syntax.vocabulary import measure, squashed
from atts.evaluators.verdict import (
    LIMITS,
    STRICT,
    Limits,
    Malformed,
    Prose,
    TooLarge,
    Undecided,
    Undefined,
    Verdict,
)

_PHRASE = 4  # words


def equivalent(
    gold: str,
    answer: str,
    kind: AnswerKind = "math",
    *,
    limits: Limits = LIMITS,
    grading: Grading = STRICT,
) -> Verdict:
    """Whether `answer` is the reference answer `gold`; symmetric, thread-safe, bounded in time and
    memory.

    `grading` says which numbers may be off and whether units may be missing. No text is evaluated
    as code. What cannot be decided is "unscored". Raises OptionError for an unknown kind.

    >>> equivalent(r"\\frac{1}{2}", "0.5").status
    'equal'
    >>> equivalent("12", "21").status
    'different'
    """
    if kind not in get_args(AnswerKind):
        raise OptionError(f"kind {kind}", "is not a kind of answer", get_args(AnswerKind))
    if not gold.strip():
        return Verdict("unscored", "no reference")
    if not answer.strip():
        return Verdict("different", "no answer")
    if kind == "text":
        return _verdict(squashed(gold) == squashed(answer) != "", "text")
    if spaceless(gold) == spaceless(answer):
        return Verdict("equal", "same text")
    one = read(gold, limits)
    two = read(answer, limits)
    return _by_text(one, two, kind) or _by_trees(one, two, limits, grading)


def _verdict(same: bool, rule: str) -> Verdict:
    return Verdict("equal" if same else "different", rule)


def _unscored(error: Undecided | Undefined) -> Verdict:
    detail = f"no value: {error}" if isinstance(error, Undefined) else str(error)
    return Verdict("unscored", "limits" if isinstance(error, TooLarge) else "undecided", detail)


def _by_text(one: Reading, two: Reading, kind: AnswerKind) -> Verdict | None:
    """What the texts alone decide: the same spelling, and choices."""
    if not one.text or not two.text:
        return (
            Verdict("unscored", "no reference")
            if not one.text
            else Verdict("different", "no answer")
        )
    if spaceless(one.text) == spaceless(two.text):
        return Verdict("equal", "same text")
    if one.choice and two.choice and (one.is_letter or two.is_letter or kind == "choice"):
        return _verdict(one.choice == two.choice, "choice")
    if kind == "choice" and (one.choice or two.choice):
        first, second = (
            reading.choice or reading.text.strip("(). ").upper() for reading in (one, two)
        )
        return _verdict(first == second, "choice")
    return None


def _by_trees(one: Reading, two: Reading, limits: Limits, grading: Grading) -> Verdict:
    """Equal when any pair of readings is, else what the first pair says."""
    first: Verdict | None = None
    for gold, answer in product(one.trees, two.trees):
        if has(gold, "call") or has(answer, "call"):
            names = variables(gold) | variables(answer)
            gold, answer = (views.unapplied(node, names) for node in (gold, answer))
        comparison = Comparer(
            limits, held_to(grading, gold), brackets="free" if first is None else "strict"
        )
        try:
            found = _verdict(comparison.same(gold, answer), comparison.rule)
        except (Undecided, Undefined) as error:
            found = _unscored(error)
        except RecursionError:  # little of the stack was left to us
            found = _unscored(TooLarge("too deep for the stack at hand"))
        if found.is_equal:
            return found
        first = first or found
    return first or _unread(one, two)


def _unread(one: Reading, two: Reading) -> Verdict:
    """The verdict when a side is no expression: the same phrase, or an answer that cannot be the
    reference.
    """
    if (
        one.squashed
        and one.squashed == two.squashed
        and not isinstance(one.problem or two.problem, Malformed)
    ):
        return Verdict("equal", "text")
    readable, problem = (two, one.problem) if one.problem else (one, two.problem)
    assert problem is not None
    if isinstance(problem, Malformed):
        return Verdict("different", "malformed", str(problem))
    if type(problem) is Prose and readable.trees:
        return Verdict("different", "prose", str(problem))
    # names and dates, no sentences
    are_short = all(len(reading.squashed.split()) <= _PHRASE for reading in (one, two))
    if isinstance(one.problem, Prose) and isinstance(two.problem, Prose) and are_short:
        return Verdict("different", "text")
    return _unscored(problem)


_CROWD = 48  # answers under one loose key past which each is compared with the first few only


def group(
    answers: Sequence[str | None], kind: AnswerKind = "math", *, limits: Limits = LIMITS
) -> list[int]:
    """The class of each answer, numbered by first appearance; -1 for None and for empty answers,
    which abstain.

    Two answers in one class are equal under `equivalent`; equal ones share a class unless that
    would join answers that differ (10 and 0.1 stay apart when 10% comes too). The partition does
    not depend on the order. Time grows nearly linearly: answers are keyed by their values, and only
    those whose keys meet are compared.

    >>> group(["1/2", "0.5", "2", None, r"\\frac{2}{4}"])
    [0, 0, 1, -1, 0]
    """
    texts = sorted({answer for answer in answers if answer is not None and answer.strip()})
    classes = _Classes(kind, limits).of(texts)
    numbers: dict[int, int] = {}
    return [
        numbers.setdefault(classes[answer], len(numbers))
        if answer is not None and answer.strip()
        else -1
        for answer in answers
    ]


class _Classes:
    """One grouping: strong keys first, then comparisons in an order fixed by the texts alone."""

    def __init__(self, kind: AnswerKind, limits: Limits) -> None:
        self.kind: AnswerKind = kind
        self.limits = limits
        self.keys = Keys(limits)
        self.verdicts: dict[tuple[int, int], str] = {}
        self.texts: list[str] = []  # one representative of each strong key, its least text

    def of(self, texts: Sequence[str]) -> dict[str, int]:
        """A class number for each of the sorted, distinct texts."""
        strong: dict[str, int] = {}
        owner: dict[str, int] = {}
        loose: dict[str, list[int]] = defaultdict(list)
        for text in texts:
            reading = read(text, self.limits)
            key = squashed(reading.text) if self.kind == "text" else self.keys.strong(reading)
            if key not in strong:
                strong[key] = len(self.texts)
                for token in () if self.kind == "text" else sorted(self.keys.loose(reading)):
                    loose[token].append(strong[key])
                self.texts.append(text)
            owner[text] = strong[key]
        merged = self.merge(loose)
        return {text: merged[index] for text, index in owner.items()}

    def merge(self, loose: dict[str, list[int]]) -> list[int]:
        """Join representatives whose loose keys meet and that are equal, keeping apart whatever
        differs.
        """
        parent = list(range(len(self.texts)))
        inside: dict[int, list[int]] = {index: [index] for index in parent}
        for left, right in sorted(_pairs(loose)):
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
        pair = (min(left, right), max(left, right))
        if pair not in self.verdicts:
            one = self.texts[pair[0]]
            two = self.texts[pair[1]]
            self.verdicts[pair] = equivalent(one, two, self.kind, limits=self.limits).status
        return self.verdicts[pair]


def _pairs(loose: dict[str, list[int]]) -> set[tuple[int, int]]:
    """Answers to compare: those of one key; decimals with what they may round."""
    found: set[tuple[int, int]] = set()
    for token, indices in loose.items():
        if token.endswith(">"):
            continue
        others = loose.get(f"{token[:-1]}>", []) if token.endswith("<") else indices
        hubs = indices if len(indices) * len(others) <= _CROWD**2 else indices[:4]
        found |= {(min(a, b), max(a, b)) for a in hubs for b in others if a != b}
    return found


_COLLECTIONS = ("list", "set", "tuple", "union", "matrix", "setminus", "builder")
_NOT_VALUES = (*_COLLECTIONS, "word", "relation", "plusminus", "opaque", "huge", "ratio", "based", "quantity",
               "clock", "congruence", "cases", "aliases")  # fmt: skip


class Keys:
    """Computes the keys of parsed answers."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.values: dict[int, tuple[Node, Value]] = {}

    def value(self, node: Node) -> Value:
        """The value at a whole point, computed once for each of the last few trees."""
        if id(node) not in self.values:
            if len(self.values) > 60:
                self.values.clear()
            self.values[id(node)] = node, Prober(self.limits).value(node, _at(variables(node), 0))
        return self.values[id(node)][1]

    def strong(self, reading: Reading) -> str:
        """Answers with the same strong key are equal under the policy."""
        if not reading.trees:
            return "text:" + "".join(reading.text.split())
        node = reading.trees[0]
        if not has(node, *_NOT_VALUES, "percent", "degree") and not is_decimal(node):
            with suppress(NotRational, Undecided, Undefined):
                return "v:" + written(exact(node, self.limits))
        return repr(node)

    def loose(self, reading: Reading) -> frozenset[str]:
        """Answers that are equal under the policy share a loose key, or are both texts.

        A key with "<" at its end belongs to a decimal that may be the rounding of what has the same
        key with ">".
        """
        found = {"text:" + reading.squashed} if reading.squashed else set[str]()
        if reading.choice:
            found.add("letter:" + reading.choice)
        for tree in reading.trees:
            found |= self.tokens(tree) | self.near(tree)
        return frozenset(found)

    def tokens(self, node: Node) -> set[str]:
        """The loose keys of one tree that can be worked out, save those of roundings."""
        found = set[str]()
        with suppress(Undecided, Undefined):
            found.update(self._tokens(node))
        return found

    def _tokens(self, node: Node) -> Iterator[str]:
        if node.kind == "relation":
            yield from self.relation_tokens(node)
        elif has(node, "plusminus") and node.kind not in ("list", "set"):
            yield self.collected(members(node))
        elif node.kind in _COLLECTIONS:
            yield from self.collection_tokens(node)
        elif node.kind == "aliases":
            yield from (token for each in node.args for token in self.tokens(each))
        elif node.kind in ("word", "clock", "congruence"):
            yield f"{node.kind}:{clock(node) if node.kind == 'clock' else node.text}"
        else:
            yield from self.value_tokens(node)

    def value_tokens(self, node: Node) -> Iterator[str]:
        """The value at a whole point, and those a sign, unit or base beside it may be passed over
        for.
        """
        if node.kind in ("percent", "degree", "quantity"):
            yield from self._tokens(node.args[0])
        if node.kind == "quantity" and (unit := measure(node.text)):
            yield from (
                "unit:" + token for token in self.tokens(Node("mul", (*node.args, number(unit[1]))))
            )
        if node.kind == "based" and node.text.isdigit():
            yield f"value:{int(node.text):x}/1"
        if node.kind == "cases":
            yield node.kind
        if node.kind == "ratio":
            yield from (self.collected(node.args), f"clock:{clock(node)}")
        value = quotient(*node.args) if node.kind == "ratio" and len(node.args) == 2 else node
        yield "value:" + written(self.value(value))

    def near(self, node: Node) -> set[str]:
        """Five digits of a decimal and of its neighbours, or of a value that decimals may round."""
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
        """A decimal, or a value that one may round, to full precision; None for what is neither."""
        with suppress(Undecided, Undefined):
            value = None if variables(node) else self.value(node)
            has_end = isinstance(value, Fraction) and terminates(value)
            if value and is_real(value) and (is_decimal(node) or not has_end):
                return mpmath.re(Prober(self.limits).approximate(value).value)
        return None

    def nearly_all(self, nodes: list[Node]) -> set[str]:
        """Three digits of each entry, where some entry may be a rounding or have one."""
        found = [(node, self.rounded(node)) for node in nodes[:_MANY]]
        if all(size is None for _, size in found):
            return set()
        shown = sorted(
            self.least(node) if size is None else _digits(size, 3) for node, size in found
        )
        has_decimals = any(size is not None and is_decimal(node) for node, size in found)
        return {f"near:{';'.join(shown)}{'<' if has_decimals else '>'}"}

    def relation_tokens(self, node: Node) -> Iterator[str]:
        """What a relation names, the set of reals it describes, and an equation up to a factor."""
        value = named(node).value
        if value.kind != "relation":
            yield from self.tokens(value)
        yield from self.region_tokens(node)
        if len(node.args) == 2:  # the ratio of the difference of its sides at two points
            sides = minus(*node.args)
            prober = Prober(self.limits)
            first, second = (prober.value(sides, _at(variables(sides), index)) for index in (0, 1))
            yield "equation:" + written(prober.divide(first, second))
        elif value.kind == "relation":
            yield self.collected(node.args)

    def region_tokens(self, node: Node) -> Iterator[str]:
        """The ends of the set of reals that an answer describes."""
        if region := Line(Prober(self.limits)).region(node):
            yield self.collected(end.value for end in region)

    def collection_tokens(self, node: Node) -> Iterator[str]:
        inside = members(node) if node.kind in ("list", "set") else _entries(node)
        yield self.collected(inside)
        if labels := labelled(node):
            yield self.collected(labels.values())
        if len(inside) == 1 or node.text == "or":
            yield from (token for each in inside for token in self.tokens(each))
        if speaks_of_reals(node):
            yield from self.region_tokens(node)

    def collected(self, nodes: Iterable[Node]) -> str:
        """One token for members in any order: the least token of each."""
        return "all:" + ";".join(sorted(set(map(self.least, nodes))))

    def least(self, node: Node) -> str:
        return min(self.tokens(named(node).value), default="?")


_MANY = 40  # entries of a collection that are looked at for roundings


def _digits(value: Any, count: int) -> str:
    return str(mpmath.nstr(value, count, strip_zeros=False, min_fixed=0, max_fixed=0))


def _entries(node: Node) -> list[Node]:
    if node.kind in _COLLECTIONS:
        return [entry for arg in node.args for entry in _entries(arg)]
    return [node]


def _at(names: frozenset[str], index: int) -> Point:
    """A point fixed by the names alone, whole, so that most functions have a value there."""
    return generic(dict.fromkeys(names, "natural"), index)
