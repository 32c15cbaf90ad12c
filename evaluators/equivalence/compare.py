"""Compare two parsed answers part by part under the grading policy."""

from collections import Counter
from contextlib import suppress
from fractions import Fraction
from itertools import permutations
from typing import Literal

from atts.core import Grading
from atts.evaluators.equivalence import algebra, views
from atts.evaluators.equivalence.probing import Prober
from atts.evaluators.equivalence.regions import (
    Line,
    Region,
    reparametrised,
    same_classes,
    speaks_of_reals,
)
from atts.evaluators.equivalence.views import (
    FLIPPED,
    Family,
    Named,
    bound_alike,
    labelled,
    matrix,
    named,
)
from atts.evaluators.syntax.parser import stated_property
from atts.evaluators.syntax.tree import (
    Node,
    has,
    minus,
    number,
    quotient,
    substituted,
    symbol,
    variables,
)
from atts.evaluators.syntax.vocabulary import is_generic, measure
from atts.evaluators.verdict import STRICT, Limits, TooLarge, Undecided, Undefined

# Comparing all pairs of members of two sets is slow. Sets with more members than this are compared
# only by their exact values.
_PAIRWISE = 64
Labels = dict[Node, Node]
COLLECTIONS = ("list", "set", "tuple", "matrix", "union")


# Kinds of nodes that may stand for infinitely many values, such as "k pi, k in Z".
_OF_FAMILIES = ("list", "builder")
# Expressions with these functions of numbers are not sent to sympy, because sympy would compute
# every digit of a huge value.
_HUGE = ("factorial", "double_factorial", "binom")
# relations between lines: exchanging the two sides does not change the meaning
_OF_LINES = ("parallel", "perp")
_SYMBOLIC = ("sum", "opaque", "matrix")  # kinds of nodes for which no numeric value is computed


def _is_for_algebra(gold: Node, answer: Node, undecided: Undecided) -> bool:
    """Return True if sympy should be asked about a pair that evaluation could not decide."""
    if has(gold, "word", "huge", "quantity", "ratio") or has(answer, "word", "huge", "quantity"):
        return False
    inside = gold.walk() + answer.walk()
    if isinstance(undecided, TooLarge) and sum(node.kind == "sum" for node in inside) > 1:
        # if nested sums are too large for numeric evaluation, they are too large for sympy too
        return False
    if has(gold, *_SYMBOLIC) or has(answer, *_SYMBOLIC):
        return True
    if isinstance(undecided, TooLarge):
        return False
    if any(node.text in _HUGE and not variables(node) for node in inside):
        return False
    return has(gold, "func", "root", "cases") or has(answer, "func", "root", "cases")


def _turned(node: Node) -> Node | None:
    """Return a relation with its two sides swapped: a < b becomes b > a. None for any other
    node.
    """
    if node.kind != "relation" or len(node.args) != 2 or node.text not in FLIPPED:
        return None
    return Node("relation", node.args[::-1], FLIPPED[node.text])


class Comparer:
    """A comparison of two answers. `rule` is the name of the rule that made the latest decision.

    With strict brackets, (1,2,3) differs from [1,2,3]. The intervals (1,2) and [1,2] always differ.
    """

    def __init__(
        self,
        limits: Limits,
        grading: Grading = STRICT,
        brackets: Literal["free", "strict"] = "free",
    ) -> None:
        self.limits = limits
        self.grading = grading
        self.brackets = brackets
        self.prober = Prober(limits)
        self.rule = "structure"

    def ruled(self, rule: str, verdict: bool) -> bool:
        """Record which rule gave a verdict, and return the verdict."""
        self.rule = rule
        return verdict

    def agree(self, gold: Node, answer: Node) -> bool:
        """Return the verdict of `same`, with False instead of Undecided."""
        try:
            return self.same(gold, answer)
        except Undecided:
            return False

    def same(self, gold: Node, answer: Node) -> bool:
        """Return True if two answers are equal under the grading policy.

        Raises Undecided if no rule can decide.
        """
        if gold == answer:
            return self.ruled("structure", True)
        if gold.kind == "aliases":
            return all(self.same(form, answer) for form in gold.args)
        if answer.kind == "aliases":
            return all(self.same(form, gold) for form in answer.args)
        if gold.kind in _OF_FAMILIES or answer.kind in _OF_FAMILIES:
            families = views.family(gold), views.family(answer)
            if any(families):
                verdict = self.by_family(*families, gold, answer)
                if verdict is not None:
                    return verdict
                gold, answer = views.free(gold, answer), views.free(answer, gold)
        gold, answer = views.concluded(gold, answer), views.concluded(answer, gold)
        if gold.kind == answer.kind == "relation":
            gold, answer = views.shortened(gold, answer), views.shortened(answer, gold)
        gold = bound_alike(views.grouped(gold))
        answer = bound_alike(views.grouped(answer))
        if _turned(answer) == gold:
            return self.ruled("relation", True)
        left = named(gold)
        right = named(answer)
        one = labelled(gold)
        two = labelled(answer)
        if one is not None or two is not None:
            verdict = self.by_label(one, two, left.value, right.value)
            if verdict is not None:
                return verdict
        are_named = left.name is not None and right.name is not None
        if are_named and (gold.text == "in") == (answer.text == "in"):
            return self.both_named(left, right, gold, answer)
        if speaks_of_reals(left.value) or speaks_of_reals(right.value):
            verdict = self.as_regions(gold, answer)
            if verdict is not None:
                return verdict
        stated = self.as_stated(gold, answer, left.value, right.value)
        if stated is not None:
            return stated
        if left.value.kind == "relation" or right.value.kind == "relation":
            return self.relations(gold, answer)
        return self.values(left.value, right.value)

    def by_family(
        self, one: Family | None, two: Family | None, gold: Node, answer: Node
    ) -> bool | None:
        """Compare two families of values, such as "k pi, k in Z".

        They are equal if they have the same residue classes, or if a change of the parameter turns
        one into the other. The result is None if the caller should instead compare the answers
        without statements such as "k in Z".
        """
        stated = one or two
        assert stated is not None
        left = one or views.implied(gold, stated)
        right = two or views.implied(answer, stated)
        if left is None or right is None:
            return None
        if left.home != right.home:
            return self.ruled("set", False)
        if left.home == "mathbb:Z":
            verdict = same_classes(self.prober, left, right)
            if verdict is not None:
                return self.ruled("set", verdict)
        if one is None or two is None:
            return None
        if len(one.names) == len(two.names) == 1:
            value = reparametrised(self.prober, one, two)
            return self.ruled("set", value is not None and self.same(one.value, value))
        if len(one.names) != len(two.names) or len(one.names) > 3:
            return self.ruled("set", False)
        for order in permutations(one.names):
            letters = {name: symbol(new) for name, new in zip(two.names, order, strict=True)}
            if self.agree(one.value, substituted(two.value, letters)):
                return self.ruled("set", True)
        return self.ruled("set", False)

    def as_stated(self, gold: Node, answer: Node, left: Node, right: Node) -> bool | None:
        """Compare a value with an equation that states a value, such as m+n = 46; return None for
        any other pair.
        """
        is_stated = [node.kind in ("relation", "congruence") for node in (left, right)]
        if is_stated[0] == is_stated[1]:
            return None
        equation, other, value = (gold, answer, right) if is_stated[0] else (answer, gold, left)
        if value.kind in ("list", "builder", "add") and views.progression(value):
            return None  # the value is itself a residue class, such as 2 + 5k
        stated = views.stated_value(equation, other)
        if stated is None:
            return None
        return self.same(stated, value) and self.ruled("equation", True)

    # ---- comparing named values, such as "x = 5"

    def by_label(
        self, one: Labels | None, two: Labels | None, gold: Node, answer: Node
    ) -> bool | None:
        """Compare two answers that name several values, such as x=4, y=6, name by name.

        If only one answer has names, the values are compared in order. The result is None if the
        names do not settle the comparison.
        """
        if one is not None and two is not None:
            if one.keys() == two.keys():
                verdict = all(self.same(value, two[name]) for name, value in one.items())
                return verdict and self.ruled("name", True)
            if one.keys() & two.keys() or len(one) != len(two):
                return self.ruled("name", False)
            return None
        labels, other = (one, answer) if one is not None else (two, gold)
        assert labels is not None
        if other.kind not in ("list", "tuple") or not 1 < len(labels) == len(other.args):
            return None
        if any(named(arg).name is not None for arg in other.args):
            return None
        if {name.text for name in labels} <= {"x", "y", "z"}:
            labels = dict(sorted(labels.items(), key=lambda item: item[0].text))
        return self.each(tuple(labels.values()), other.args, "tuple")

    def both_named(self, left: Named, right: Named, gold: Node, answer: Node) -> bool:
        """Compare two named values. The names must be the same, or be able to denote the same
        thing.
        """
        one = left.name
        two = right.name
        value = left.value
        assert one is not None
        assert two is not None
        if one.kind == two.kind == "symbol":
            if one.text.removeprefix("vec ") != two.text.removeprefix("vec "):
                return self.relations(gold, answer)
        if one.kind == two.kind == "call":
            pairs = zip(one.args, two.args, strict=False)
            value = substituted(value, {arg.text: other for arg, other in pairs})
        if {value.kind, right.value.kind} == {"congruence", "number"}:
            # "x = 5" is not the same answer as "x = 5 modulo 9"
            return self.ruled("congruence", False)
        is_one_thing = one == two or views.may_name_one(one, two)
        return self.ruled("name", is_one_thing) and self.same(value, right.value)

    # ---- comparing equations and inequalities

    def relations(self, gold: Node, answer: Node) -> bool:
        """Compare two relations.

        Equations may differ by a constant factor, and inequalities by a positive one. The sides of
        a chain such as 0 < x <= 1 are compared one by one.
        """
        if gold.kind != "relation" or answer.kind != "relation":
            return self.ruled("relation", False)
        # Replace ratios by quotients: a:b = 2:3 means a/b = 2/3.
        if has(gold, "ratio") or has(answer, "ratio"):
            gold = views.with_quotients(gold)
            answer = views.with_quotients(answer)
        one = gold.text.split()
        two = answer.text.split()
        if one == two and gold.text in _OF_LINES:
            return self.unordered(gold.args, answer.args, "relation")
        has_class = has(gold, "congruence") or has(answer, "congruence")
        if len(one) == len(two) == 1 and {*one, *two} <= FLIPPED.keys() and not has_class:
            sign = self.prober.proportional(minus(*gold.args), minus(*answer.args))
            expected = one[0] if sign > 0 else FLIPPED[one[0]]
            return self.ruled("relation", sign != 0 and two == [expected])
        sides = answer.args
        if one != two:
            two = [FLIPPED.get(sign, "?") for sign in reversed(two)]
            sides = sides[::-1]
        verdict = one == two and all(self.same(a, b) for a, b in zip(gold.args, sides, strict=True))
        return self.ruled("relation", verdict)

    def as_regions(self, gold: Node, answer: Node) -> bool | None:
        """Compare the answers as sets of real numbers; return None if either is not such a set."""
        names = {views.variable_of(gold), views.variable_of(answer)} - {""}
        line = Line(self.prober)
        regions = list[Region | None]()
        too_large: TooLarge | None = None
        for node in (gold, answer):
            try:
                regions.append(line.region(node))
            except TooLarge as error:
                too_large = error
        if None in regions:
            return None
        if too_large:
            raise too_large
        left, right = (region or () for region in regions)
        if len(names) > 1:
            return self.ruled("interval", False)
        verdict = [end.after for end in left] == [end.after for end in right]
        verdict = verdict and all(
            self.same(a.value, b.value) for a, b in zip(left, right, strict=True)
        )
        return self.ruled("interval", verdict)

    # ---- comparing all other values

    def values(self, gold: Node, answer: Node) -> bool:
        """Compare two answers that are not relations, by a rule that depends on the kinds of their
        root nodes.
        """
        if has(gold, "plusminus") or has(answer, "plusminus"):
            return self.unordered(views.members(gold), views.members(answer), "set")
        try:
            gold = matrix(gold) or gold
            answer = matrix(answer) or answer
        except Undecided:
            return self.numbers(gold, answer)
        kinds: set[str] = {gold.kind, answer.kind}
        if "builder" in kinds and kinds & {"set", "list"}:
            line = Line(self.prober)
            gold = line.whole(gold) if gold.kind == "builder" else gold
            answer = line.whole(answer) if answer.kind == "builder" else answer
            kinds = {gold.kind, answer.kind}
        if kinds == {"congruence", "func"}:
            gold = views.residue(gold)
            answer = views.residue(answer)
            kinds = {gold.kind, answer.kind}
        if ("congruence" in kinds and len(kinds) > 1) or kinds == {"builder"}:
            gold = views.progression(gold) or gold
            answer = views.progression(answer) or answer
            kinds = {gold.kind, answer.kind}
        # For example, one answer is "odd" and the other is "n is odd".
        if kinds == {"word", "congruence"}:
            gold = stated_property(gold.text) if gold.kind == "word" else gold
            answer = stated_property(answer.text) if answer.kind == "word" else answer
            kinds = {gold.kind, answer.kind}
        if kinds & {"congruence", "clock", "cases", "builder"}:
            return self.special(gold, answer, kinds)
        if kinds == {"union"}:
            return self.unordered(gold.args, answer.args, "set")
        if kinds & {"list", "set"}:
            gold = views.with_terms(gold, self.limits.items)
            answer = views.with_terms(answer, self.limits.items)
            return self.lists(gold, answer)
        if kinds & {"tuple", "matrix", "union", "setminus"}:
            return self.ordered(gold, answer)
        if "word" in kinds:
            return self.ruled("text", views.says_alike(gold, answer))
        if (
            kinds == {"symbol", "mul"}
            and len(views.letters(gold)) == len(views.letters(answer)) > 1
        ):
            # One answer is a name of several letters, such as AB. The other is a product of
            # letters, as in \overline{AB}. Compare only the letters.
            return self.ruled("text", views.letters(gold) == views.letters(answer))
        return self.plain(gold, answer)

    def special(self, gold: Node, answer: Node, kinds: set[str]) -> bool:
        """Compare residue classes, times of day, piecewise values, or sets defined by a
        condition.
        """
        if "cases" in kinds:
            return self.by_cases(gold, answer)
        if "clock" in kinds:
            time = views.clock(gold)
            return self.ruled("time", time is not None and time == views.clock(answer))
        if len(kinds) > 1:
            return self.ruled(min(kinds & {"congruence", "builder"}), False)
        if kinds == {"builder"}:
            return self.each(gold.args, answer.args, "set")
        if not self.same(gold.args[1], answer.args[1]):
            return self.ruled("congruence", False)
        apart = minus(gold.args[0], answer.args[0])
        turns = None if variables(apart) else self.prober.value(quotient(apart, gold.args[1]))
        if not isinstance(turns, Fraction):
            return self.same(gold.args[0], answer.args[0])
        return self.ruled("congruence", turns.denominator == 1)

    def by_cases(self, gold: Node, answer: Node) -> bool:
        """Compare two piecewise values.

        They are compared as functions if their conditions can be evaluated, or else case by case.
        """
        if not has(gold, "word", *COLLECTIONS) and not has(answer, "word", *COLLECTIONS):
            return self.numbers(gold, answer)
        with suppress(Undecided):
            return self.numbers(gold, answer)
        if gold.kind != "cases" or answer.kind != "cases":
            return self.ruled("cases", False)
        one = list(zip(gold.args[::2], gold.args[1::2], strict=True))
        two = list(zip(answer.args[::2], answer.args[1::2], strict=True))
        if len(one) != len(two):
            return self.ruled("cases", False)
        verdict = all(any(all(map(self.agree, case, other)) for other in two) for case in one)
        return self.ruled("cases", verdict)

    def lists(self, gold: Node, answer: Node) -> bool:
        """Compare lists and sets. The order matters only if one answer is a tuple or labels its
        members, as in x = 1, y = 2.
        """
        if gold.kind == "tuple" or answer.kind == "tuple":
            pair, other = (gold, answer) if gold.kind == "tuple" else (answer, gold)
            if len(other.args) == 1 and other.args[0].kind == "tuple":
                return self.same(pair, other.args[0])
            is_interval = pair.text not in ("()", "[]", "")
            if pair.text == "[]" and len(pair.args) == 2:
                is_interval = True
            if other.kind == "set" or is_interval or other.text == "or":
                return self.ruled("set", False)
            return self.each(pair.args, other.args, "tuple")
        nesting = {any(arg.kind == "set" for arg in node.args) for node in (gold, answer)}
        are_lists = gold.kind == answer.kind == "list"
        is_linked_otherwise = are_lists and len({gold.text, answer.text, ""}) == 3
        if len(nesting) == 2 or (
            is_linked_otherwise and not views.are_of_one_function(gold, answer)
        ):
            return self.ruled("logic", False)
        one = views.members(gold)
        two = views.members(answer)
        # {x} with a single letter may be the fractional part of x instead of a set
        fractional_parts = [
            node
            for node in (gold, answer)
            if node.kind == "set" and [arg.kind for arg in node.args] == ["symbol"]
        ]
        if len(fractional_parts) == 1 and len(one) == len(two):
            return self.ruled("set", False)
        # One answer has one value. The other joins values by "or", so each of them must be this
        # value.
        if (len(one) == 1 and answer.text == "or") or (len(two) == 1 and gold.text == "or"):
            return all(self.same(a, b) for a in one for b in two)
        if len(one) == len(two) and views.counts_apart(one) != views.counts_apart(two):
            return self.each(one, two, "tuple")
        if not self.unordered(one, two, "set"):
            return False
        is_counted = "set" not in (gold.kind, answer.kind) and "or" not in (gold.text, answer.text)
        if any(has(node, "relation", "word", *COLLECTIONS) for node in one + two):
            is_counted = False
        return self.ruled("set", not is_counted or self.as_often(one, two))

    def as_often(self, one: tuple[Node, ...], two: tuple[Node, ...]) -> bool:
        """Return True if each value occurs the same number of times in both collections."""
        if len(one) != len(two):
            return False
        if len(one) == len({*one}) == len({*two}):
            return True
        if len(one) > _PAIRWISE:
            return Counter(map(self.prober.value, one)) == Counter(map(self.prober.value, two))
        for node in {*one}:
            if sum(self.agree(node, each) for each in one) != sum(
                self.agree(node, each) for each in two
            ):
                return False
        return True

    def unordered(self, one: tuple[Node, ...], two: tuple[Node, ...], rule: str) -> bool:
        """Return True if two collections have the same members, ignoring order and repetitions.

        Large collections are compared only if all members are exact numbers.
        """
        common = set(one) & set(two)
        left = tuple(node for node in dict.fromkeys(one) if node not in common)
        right = tuple(node for node in dict.fromkeys(two) if node not in common)
        if not left and not right:
            return self.ruled(rule, True)
        if len(left) > _PAIRWISE or len(right) > _PAIRWISE:
            values = [{self.prober.value(node) for node in side} for side in (left, right)]
            if not all(isinstance(value, Fraction) for side in values for value in side):
                raise TooLarge("too many members to compare")
            return self.ruled(rule, values[0] == values[1])
        is_matched = (len(one) == 1) == (len(two) == 1)
        is_matched = is_matched and all(self.is_among(node, two) for node in left)
        return self.ruled(rule, is_matched and all(self.is_among(node, one) for node in right))

    def is_among(self, node: Node, others: tuple[Node, ...]) -> bool:
        """Return True if `node` is equal to one of the other nodes.

        Raises Undecided if it equals none of them and a comparison was undecided.
        """
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

    def ordered(self, gold: Node, answer: Node) -> bool:
        """Compare tuples, vectors, matrices and intervals entry by entry."""
        if gold.kind == "matrix" and answer.kind == "matrix":
            return self.each(gold.args, answer.args, "matrix")
        if "matrix" in (gold.kind, answer.kind):
            grid, other = (gold, answer) if gold.kind == "matrix" else (answer, gold)
            entries = tuple(cell for row in grid.args for cell in row.args)
            if other.kind != "tuple" or 1 not in (len(grid.args), len(grid.args[0].args)):
                return self.ruled("matrix", False)
            return self.each(entries, other.args, "matrix")
        if gold.kind != "tuple" or answer.kind != "tuple":
            return self.ruled("tuple", False)
        are_shown = gold.text and answer.text and (len(gold.args) == 2 or self.brackets == "strict")
        if are_shown and gold.text != answer.text:
            return self.ruled("interval", False)
        return self.each(gold.args, answer.args, "tuple")

    def each(self, one: tuple[Node, ...], two: tuple[Node, ...], rule: str) -> bool:
        """Return True if both tuples have the same length and equal entries at every position."""
        verdict = len(one) == len(two) and all(
            self.same(a, b) for a, b in zip(one, two, strict=True)
        )
        return self.ruled(rule, verdict)

    # ---- comparing two single values

    def plain(self, gold: Node, answer: Node) -> bool:
        """Compare two single values, which may have units, signs such as %, or bases, or be
        ratios.
        """
        kinds = (gold.kind, answer.kind)
        signs = [views.mark(gold), views.mark(answer)]
        if all(signs) and signs[0] != signs[1]:
            if {*signs} != {"degree", "rad"}:
                return self.ruled("unit", False)
            values = [node.args[0] if node.kind == "quantity" else node for node in (gold, answer)]
            return self.ruled("unit", self.numbers(*values))
        if "quantity" in kinds:
            return self.quantities(gold, answer)
        if "ratio" in kinds:
            return self.ratios(gold, answer)
        if "based" in kinds:
            return self.ruled("base", views.same_numeral(gold, answer))
        # Only one value has a degree sign. The sign may be missing in the other, or 30° may mean
        # pi/6. Accept both.
        if "degree" in kinds and kinds[0] != kinds[1]:
            bare = [node.args[0] if node.kind == "degree" else node for node in (gold, answer)]
            return self.same(*bare) or self.ruled("degrees", self.numbers(gold, answer))
        letters = [node.text.upper() for node in (gold, answer) if node.kind == "symbol"]
        # single letters from A to J are letters of choices, not variables
        if len(letters) == 2 and {*letters} <= {*"ABCDEFGHIJ"}:
            return self.ruled("text", letters[0] == letters[1])
        infinite = [views.infinity(node) for node in (gold, answer)]
        if any(infinite) and not has(gold, *_SYMBOLIC) and not has(answer, *_SYMBOLIC):
            return self.ruled("infinity", infinite[0] == infinite[1])
        if "percent" in kinds and kinds[0] != kinds[1]:  # 10 % equals 0.1, but not the number 10
            return self.ruled("percent", self.numbers(gold, answer))
        return self.numbers(gold, answer)

    def quantities(self, gold: Node, answer: Node) -> bool:
        """Compare amounts with units, and convert between units of the same dimension.

        A missing or unknown unit is ignored, unless the grading policy requires units.
        """
        left = gold.args[0] if gold.kind == "quantity" else gold
        right = answer.args[0] if answer.kind == "quantity" else answer
        one = measure(gold.text) if gold.kind == "quantity" else None
        two = measure(answer.text) if answer.kind == "quantity" else None
        is_sterling = {gold.text, answer.text} == {"gbp", "pounds"}
        if one and two and one[0] and two[0] and not is_sterling:
            if not views.is_unnamed(one[0], two[0]):
                if one[0] != two[0] and not views.is_part(one[0], two[0]):
                    return self.ruled("unit", False)
                scaled = Node("mul", (right, number(two[1] / one[1])))
                return self.ruled("unit", self.same(left, scaled))
        if self.grading.units == "required" and gold.kind != answer.kind:
            if any(unit and unit[0] and not is_generic(unit[0]) for unit in (one, two)):
                return self.ruled("unit", False)
        # If a quantity has the value 1, the lexer was not sure of its unit; see `_Lexer.unit`.
        if any(node.kind == "quantity" and node.value is not None for node in (gold, answer)):
            return self.ruled("unit", False)
        return self.same(left, right)

    def ratios(self, gold: Node, answer: Node) -> bool:
        """Compare ratios by proportion, so that 2:4 equals 1:2. Times of day such as 3:45 must have
        the same digits.
        """
        if gold.kind == answer.kind == "ratio":
            if self.each(gold.args, answer.args, "ratio"):
                return True
            if len(gold.args) == 2 and views.clock(gold) and views.clock(answer):
                return False
            one = tuple(quotient(part, gold.args[0]) for part in gold.args)
            two = tuple(quotient(part, answer.args[0]) for part in answer.args)
            return self.each(one, two, "ratio")
        ratio, other = (gold, answer) if gold.kind == "ratio" else (answer, gold)
        is_number = len(ratio.args) == 2 and not views.clock(ratio)
        return self.ruled("ratio", is_number and self.numbers(quotient(*ratio.args), other))

    def numbers(self, gold: Node, answer: Node) -> bool:
        """Compare expressions by their values.

        If they differ, compare them again on the assumption that variables for sizes, such as
        lengths, are positive.
        """
        undecided: Undecided | None = None
        try:
            if self.settled(gold, answer, frozenset()):
                return True
        except Undecided as error:
            undecided = error
        rule = self.rule
        positive = views.sizes(self.grading, gold, answer)
        if positive:
            with suppress(Undecided):
                if self.settled(gold, answer, positive):
                    return self.ruled("sizes", True)
        if undecided:
            raise undecided
        return self.ruled(rule, False)

    def settled(self, gold: Node, answer: Node, positive: frozenset[str]) -> bool:
        """Compare expressions by their values, and ask sympy if the values do not decide."""
        self.prober.positive = positive
        try:
            return self.evaluated(gold, answer)
        except Undecided as undecided:
            if not _is_for_algebra(gold, answer, undecided):
                raise
            try:
                verdict = algebra.are_equal(gold, answer, positive)
            except Undecided:
                raise undecided from None
            return self.ruled("algebra", verdict)
        finally:
            self.prober.positive = frozenset()

    def evaluated(self, gold: Node, answer: Node) -> bool:
        """Compare the values of two expressions. Different values still count as equal within the
        tolerance, or if one is a long decimal to which the other rounds.
        """
        if "huge" in (gold.kind, answer.kind):
            return self.ruled("exact", False)
        if has(gold, *COLLECTIONS) or has(answer, *COLLECTIONS):
            raise Undecided("a collection inside an expression")
        if ("…" in variables(gold)) != ("…" in variables(answer)):
            raise Undecided("only one of the two answers contains an ellipsis")
        try:
            if self.prober.equal(gold, answer):
                return self.ruled("value", True)
        except Undefined as error:
            if self.prober.is_defined(gold, {}) != self.prober.is_defined(answer, {}):
                return self.ruled("undefined", False)
            raise Undecided(f"no value: {error}") from error
        if views.is_near(self.prober, gold, answer, self.grading):
            return self.ruled("tolerance", True)
        is_rounded = self.grading.rounding == "decimals" and views.rounds(self.prober, gold, answer)
        return self.ruled("rounding" if is_rounded else "value", is_rounded)
