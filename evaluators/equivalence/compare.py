"""Comparer of two parsed answers, part by part, by the written policy."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from atts.evaluators.equivalence.probing import Prober, Value
from atts.evaluators.equivalence.traits import (
    ROUNDED_DIGITS,
    choice_letter,
    decimal_digits,
    difference,
    distinctly_named,
    infinity,
    is_clock,
    is_inequality,
    may_name_alike,
    members,
    same_numeral,
    sign_of,
    terminates,
    variable_of,
    vector,
)
from atts.evaluators.equivalence.views import FLIPPED, Interval, Named, intervals, matrix, named
from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.tree import Node, has, number, quotient, variables
from atts.evaluators.verdict import Limits, TooLarge, Undecided, Undefined

_PAIRWISE = 64  # unordered members compared with one another; more are first matched by structure
_COLLECTIONS = ("list", "set", "tuple", "matrix", "union")


class Comparer:
    """One comparison of two answers; `rule` names what decided last.

    With strict brackets, (1,2,3) and [1,2,3] differ as (1,2) and [1,2] always do.
    """

    def __init__(self, limits: Limits, brackets: Literal["free", "strict"] = "free") -> None:
        self.limits = limits
        self.brackets = brackets
        self.prober = Prober(limits)
        self.rule = "structure"

    def ruled(self, rule: str, verdict: bool) -> bool:
        self.rule = rule
        return verdict

    def same(self, gold: Node, answer: Node) -> bool:
        """Whether two answers are the same under the policy; raises Undecided when that cannot be told."""
        if gold == answer and not has(gold, "opaque"):
            return self.ruled("structure", True)
        left, right = named(gold), named(answer)
        if left.name is not None and right.name is not None:
            return self.both_named(left, right, gold, answer)
        if any(is_inequality(value) or has(value, "union") for value in (left.value, right.value)):
            found = self.as_intervals(gold, answer)
            if found is not None:
                return found
        if left.value.kind == "relation" or right.value.kind == "relation":
            return self.relations(gold, answer)
        return self.values(left.value, right.value)

    def both_named(self, left: Named, right: Named, gold: Node, answer: Node) -> bool:
        assert left.name is not None
        assert right.name is not None
        if left.name == right.name or "word" in (left.name.kind, right.name.kind):
            return self.same(left.value, right.value)
        if left.name.kind in ("tuple", "ratio", "list") and left.name.kind == right.name.kind:
            return False
        if left.name.kind != "symbol" or right.name.kind != "symbol":
            return self.same(left.value, right.value) and self.ruled("name", may_name_alike(left.name, right.name))
        return self.relations(gold, answer)

    # -- relations -------------------------------------------------------------------------

    def relations(self, gold: Node, answer: Node) -> bool:
        """Equations up to a factor, inequalities up to a positive one, chains side by side."""
        if gold.kind != "relation" or answer.kind != "relation":
            return self.ruled("relation", False)
        one, two = gold.text.split(), answer.text.split()
        if len(one) != len(two) or len(one) > 1:
            return self.chains(gold, answer)
        if one[0] in ("in", "->") or two[0] in ("in", "->"):
            return one == two and all(self.same(a, b) for a, b in zip(gold.args, answer.args, strict=True))
        ratio = self.prober.proportional(difference(gold), difference(answer))
        if ratio is None:
            return self.ruled("relation", False)
        sign = sign_of(ratio)
        if one[0] in ("=", "!=", "~"):
            return self.ruled("relation", sign != 0 and one == two)
        return self.ruled("relation", two[0] == (one[0] if sign > 0 else FLIPPED[one[0]]) and sign != 0)

    def chains(self, gold: Node, answer: Node) -> bool:
        one, two = gold.text.split(), answer.text.split()
        if len(one) != len(two):
            return self.ruled("relation", False)
        sides = answer.args
        if one != two:
            two, sides = [FLIPPED.get(sign, "?") for sign in reversed(two)], sides[::-1]
        verdict = one == two and all(self.same(a, b) for a, b in zip(gold.args, sides, strict=True))
        return self.ruled("relation", verdict)

    def as_intervals(self, gold: Node, answer: Node) -> bool | None:
        """Both as sets of reals, None when either is not one."""
        if is_inequality(named(gold).value) and is_inequality(named(answer).value) and gold.text == answer.text:
            if all(self.agree(a, b) for a, b in zip(gold.args, answer.args, strict=True)):
                return self.ruled("relation", True)
        left, right = intervals(gold), intervals(answer)
        if left is None or right is None or len(left) > 200 or len(right) > 200:
            return None
        names = variables(gold) | variables(answer)
        if names and variable_of(gold) != variable_of(answer) and variable_of(gold) and variable_of(answer):
            return self.ruled("interval", False)
        return self.ruled("interval", self.matched(left, right))

    def agree(self, gold: Node, answer: Node) -> bool:
        """same, with Undecided taken as no."""
        try:
            return self.same(gold, answer)
        except Undecided:
            return False

    def matched(self, left: tuple[Interval, ...], right: tuple[Interval, ...]) -> bool:
        rest = list(right)
        for interval in left:
            found = next((each for each in rest if self.same_interval(interval, each)), None)
            if found is None:
                return False
            rest.remove(found)
        return not rest

    def same_interval(self, left: Interval, right: Interval) -> bool:
        return left.brackets == right.brackets and self.same(left.low, right.low) and self.same(left.high, right.high)

    # -- collections -----------------------------------------------------------------------

    def values(self, gold: Node, answer: Node) -> bool:
        """Two answers that are no relations."""
        if has(gold, "plusminus") or has(answer, "plusminus"):
            return self.unordered(members(gold), members(answer), "set")
        gold, answer = matrix(gold) or gold, matrix(answer) or answer
        kinds = {gold.kind, answer.kind}
        if kinds & {"list", "set"}:
            return self.lists(gold, answer)
        if kinds & {"tuple", "matrix", "union", "setminus"}:
            return self.ordered(gold, answer)
        if "word" in kinds:
            return self.words(gold, answer)
        return self.plain(gold, answer)

    def lists(self, gold: Node, answer: Node) -> bool:
        """Bare lists and sets: order is free, save where one side is a tuple or names its parts."""
        if gold.kind == "tuple" or answer.kind == "tuple":
            pair, other = (gold, answer) if gold.kind == "tuple" else (answer, gold)
            if other.kind == "set":
                return self.ruled("set", False)
            return self.each(pair.args, other.args, "tuple")
        one, two = members(gold), members(answer)
        if len(one) == len(two) and distinctly_named(one) != distinctly_named(two):
            return self.each(one, two, "tuple")
        return self.unordered(one, two, "set")

    def unordered(self, one: tuple[Node, ...], two: tuple[Node, ...], rule: str) -> bool:
        """Whether each member has a counterpart on the other side."""
        common = set(one) & set(two)
        left = tuple(node for node in dict.fromkeys(one) if node not in common)
        right = tuple(node for node in dict.fromkeys(two) if node not in common)
        if not left and not right:
            return self.ruled(rule, True)
        if len(left) > _PAIRWISE or len(right) > _PAIRWISE:
            return self.ruled(rule, self.sorted_members(left, right))
        if (len(one) == 1) != (len(two) == 1):
            return self.ruled(rule, False)
        verdict = all(self.found(node, two) for node in left) and all(self.found(node, one) for node in right)
        return self.ruled(rule, verdict)

    def found(self, node: Node, others: tuple[Node, ...]) -> bool:
        """Whether an equal member is among the others; an undecided one counts only when none is equal."""
        undecided: Undecided | None = None
        for other in others:
            try:
                if self.same(node, other):
                    return True
            except Undecided as error:
                undecided = error
        if undecided:
            raise undecided
        return False

    def sorted_members(self, left: tuple[Node, ...], right: tuple[Node, ...]) -> bool:
        """Many members are compared as exact numbers only."""
        one, two = ({self.prober.constants(node) for node in side} for side in (left, right))
        if not all(isinstance(value, Fraction) for value in one | two):
            raise TooLarge("too many members to compare")
        return one == two

    def ordered(self, gold: Node, answer: Node) -> bool:
        """Tuples, vectors, matrices and intervals: entry by entry."""
        if gold.kind == "matrix" and answer.kind == "matrix":
            return self.each(gold.args, answer.args, "matrix")
        if "matrix" in (gold.kind, answer.kind):
            grid, other = (gold, answer) if gold.kind == "matrix" else (answer, gold)
            entries = vector(grid)
            if entries is None or other.kind != "tuple":
                return self.ruled("matrix", False)
            return self.each(entries, other.args, "matrix")
        if gold.kind != "tuple" or answer.kind != "tuple":
            return self.ruled("tuple", False)
        are_shown = gold.text and answer.text and (len(gold.args) == 2 or self.brackets == "strict")
        if are_shown and gold.text != answer.text:
            return self.ruled("interval", False)
        return self.each(gold.args, answer.args, "tuple")

    def each(self, one: tuple[Node, ...], two: tuple[Node, ...], rule: str) -> bool:
        verdict = len(one) == len(two) and all(self.same(a, b) for a, b in zip(one, two, strict=True))
        return self.ruled(rule, verdict)

    # -- single values ---------------------------------------------------------------------

    def words(self, gold: Node, answer: Node) -> bool:
        if gold.kind != "word" or answer.kind != "word":
            return self.ruled("text", choice_letter(gold) is not None and choice_letter(gold) == choice_letter(answer))
        return self.ruled("text", vocabulary.squashed(gold.text) == vocabulary.squashed(answer.text))

    def plain(self, gold: Node, answer: Node) -> bool:
        """Two single values, their units, percent and degree signs, bases and ratios included."""
        kinds = (gold.kind, answer.kind)
        if "quantity" in kinds:
            return self.quantities(gold, answer)
        if "ratio" in kinds:
            return self.ratios(gold, answer)
        if "based" in kinds:
            return self.ruled("base", same_numeral(gold, answer))
        if "percent" in kinds and kinds[0] != kinds[1]:
            bare = [node.args[0] if node.kind == "percent" else node for node in (gold, answer)]
            return self.same(*bare) or self.numbers(gold, answer) or self.ruled("percent", False)
        if "degree" in kinds and kinds[0] != kinds[1]:
            bare = [node.args[0] if node.kind == "degree" else node for node in (gold, answer)]
            return self.numbers(*bare) or self.ruled("degrees", self.numbers(gold, answer))
        if choice_letter(gold) and choice_letter(answer):
            return self.ruled("text", choice_letter(gold) == choice_letter(answer))
        if has(gold, "inf", "constant") or has(answer, "constant"):
            infinite = [infinity(node) for node in (gold, answer)]
            if infinite != [0, 0]:
                return self.ruled("infinity", infinite[0] == infinite[1])
        return self.numbers(gold, answer)

    def quantities(self, gold: Node, answer: Node) -> bool:
        """Units must not contradict each other; one left out, or not known to us, is passed over."""
        left, right = (node.args[0] if node.kind == "quantity" else node for node in (gold, answer))
        one, two = (vocabulary.measure(node.text) if node.kind == "quantity" else None for node in (gold, answer))
        if one is not None and two is not None and one != two:
            if one[0] != two[0]:
                return self.ruled("unit", False)
            return self.ruled("unit", self.same(left, Node("mul", (right, number(two[1] / one[1])))))
        return self.same(left, right)

    def ratios(self, gold: Node, answer: Node) -> bool:
        """Ratios by proportion, times of day by their digits."""
        if gold.kind == answer.kind == "ratio":
            one, two = gold.args, answer.args
            if len(one) != len(two):
                return self.ruled("ratio", False)
            if all(self.same(a, b) for a, b in zip(one, two, strict=True)):
                return self.ruled("ratio", True)
            if is_clock(gold) or is_clock(answer):
                return self.ruled("ratio", False)
            return self.ruled("ratio", all(self.same(quotient(a, one[0]), quotient(b, two[0])) for a, b in zip(one, two, strict=True)))  # fmt: skip  # noqa: E501
        ratio, other = (gold, answer) if gold.kind == "ratio" else (answer, gold)
        if len(ratio.args) != 2 or is_clock(ratio):
            return self.ruled("ratio", False)
        return self.ruled("ratio", self.numbers(quotient(*ratio.args), other))

    def numbers(self, gold: Node, answer: Node) -> bool:
        """Expressions by value, then a long decimal as the rounding of what it cannot be exactly."""
        if "huge" in (gold.kind, answer.kind):
            return self.ruled("exact", False)
        if has(gold, *_COLLECTIONS) or has(answer, *_COLLECTIONS):
            raise Undecided("a collection inside an expression")
        try:
            if self.prober.equal(gold, answer):
                return self.ruled("value", True)
        except Undefined as error:
            if self.has_value(gold) != self.has_value(answer):
                return self.ruled("undefined", False)
            raise Undecided(f"no value: {error}") from error
        return self.ruled("rounding" if self.rounds(gold, answer) else "value", self.rounds(gold, answer))

    def has_value(self, node: Node) -> bool:
        """Whether a constant has a value; raises Undecided when that cannot be told."""
        try:
            self.prober.constants(node)
        except Undefined:
            return False
        return True

    def rounds(self, gold: Node, answer: Node) -> bool:
        """Whether one is a decimal of enough digits and the other a value that no decimal of its kind can be."""
        decimal, other = (gold, answer) if decimal_digits(gold) else (answer, gold)
        digits = decimal_digits(decimal)
        if digits < ROUNDED_DIGITS or decimal_digits(other) or variables(other):
            return False
        try:
            value = self.prober.constants(other)
        except (Undecided, Undefined):
            return False
        if isinstance(value, Fraction) and terminates(value):
            return False
        unit = Fraction(10) ** -len(decimal.text.partition(".")[2])
        assert decimal.value is not None
        return self.within(value, decimal.value - unit, decimal.value + unit)

    def within(self, value: Value, low: Fraction, high: Fraction) -> bool:
        if isinstance(value, Fraction):
            return low < value < high
        if hasattr(value.value, "_mpc_"):
            return False
        bounds = [self.prober.approximate(each, 200).value for each in (low, high)]
        return bool(bounds[0] < value.value < bounds[1])
