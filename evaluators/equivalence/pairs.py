"""Compare two answer texts by their spelling, then by their trees.

Answers that differ only in the letter or the value of an arbitrary constant are equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from typing import get_args

from atts.core import AnswerKind, Grading
from atts.errors import OptionError
from atts.evaluators.equivalence import views
from atts.evaluators.equivalence.compare import Comparer
from atts.evaluators.syntax.reading import Reading, read, spaceless
from atts.evaluators.syntax.tree import (
    PI,
    TWO,
    Node,
    has,
    minus,
    number,
    quotient,
    substituted,
    symbol,
    variables,
)
from atts.evaluators.syntax.vocabulary import squashed
from atts.evaluators.verdict import (
    LIMITS,
    STRICT,
    Limits,
    Malformed,
    OutOfTime,
    Prose,
    TooLarge,
    Undecided,
    Undefined,
    Verdict,
)

_MOST = 3  # with more arbitrary constants than this, other assignments of letters are not tried
# Patterns for three kinds of letters: constants of integration, numbered constants such as c_1, and
# arbitrary constants of any kind.
_INTEGRATION = re.compile(r"[CcKk](?:_\d)?|const")
_NUMBERED = re.compile(r"[CcKk]_\d")
_ARBITRARY = re.compile(r"[A-Da-dKk](?:_\d)?|alpha|beta|const")
_PARAMETERS = frozenset("tskmnruvlj") | {"lambda", "mu"}
# Physical constants: the name, the value, and a letter in the value. If the other answer contains
# this letter, it probably uses the value instead of the name.
_DEFINED = {
    "hbar": (quotient(symbol("h"), Node("mul", (TWO, PI))), "h"),
    "k": (quotient(number(1), Node("mul", (number(4), PI, symbol("epsilon_0")))), "epsilon_0"),
    "k_e": (quotient(number(1), Node("mul", (number(4), PI, symbol("epsilon_0")))), "epsilon_0"),
}
# In the solution of an equation, "y = ..." means the function y(x). The same holds for these
# letters.
_FUNCTIONS = ("y", "u", "w")


def arbitrary(names: frozenset[str]) -> frozenset[str]:
    """Return the names that usually stand for arbitrary constants, such as C."""
    return frozenset(name for name in names if _ARBITRARY.fullmatch(name))


def restated(gold: Node, answer: Node) -> Iterator[tuple[Node, Node]]:
    """Yield variants of the two answers whose arbitrary constants have the same names or are
    removed.

    If the two trees of any variant are equal, the answers are equal up to their arbitrary
    constants. Most answers give no variant, because a letter is an arbitrary constant only in three
    places. These are the solution of an equation (y = Cx), a separate term (x^2 + C), and one of
    several numbered coefficients.
    """
    one = views.named(gold)
    two = views.named(answer)
    if one.name is not None and two.name is not None and not views.may_name_one(one.name, two.name):
        return
    is_solution = any(_names_a_function(name) for name in (one.name, two.name))
    arguments = {arg.text for side in (one, two) if side.name for arg in side.name.args}
    yield from _written_out(gold, answer)
    yield from _with_one_parameter(one.value, two.value)
    left = variables(one.value) - arguments
    right = variables(two.value) - arguments
    if not left or not right:
        return
    if left != right or len(left) > 1:
        yield from _renamed(gold, answer, left, right, is_solution)
    yield from _shifted(one.value, two.value)
    # In an antiderivative, "log" means the natural logarithm.
    if _terms(one.value) and _terms(two.value):
        natural = _natural(one.value), _natural(two.value)
        if natural != (one.value, two.value):
            yield natural
            yield from _shifted(*natural)


def _names_a_function(name: Node | None) -> bool:
    return name is not None and (name.kind == "call" or name.text in _FUNCTIONS)


def _written_out(gold: Node, answer: Node) -> Iterator[tuple[Node, Node]]:
    """Yield both answers with a physical constant replaced by its value, if only one of them names
    the constant.
    """
    left = variables(gold)
    right = variables(answer)
    for name, (meaning, needed) in _DEFINED.items():
        for here, there in ((left, right), (right, left)):
            if name in here - there and needed in there - here:
                yield substituted(gold, {name: meaning}), substituted(answer, {name: meaning})


def _with_one_parameter(gold: Node, answer: Node) -> Iterator[tuple[Node, Node]]:
    """Yield two answers such as (t, t+1) and (s, s+1) with the same letter for their parameter."""
    if gold.kind != "tuple" or answer.kind != "tuple":
        return
    one = variables(gold)
    two = variables(answer)
    if len(one) == len(two) == 1 and one != two and (one | two) <= _PARAMETERS:
        (name,) = two
        yield gold, substituted(answer, {name: symbol(*one)})


def _renamed(
    gold: Node, answer: Node, left: frozenset[str], right: frozenset[str], is_solution: bool
) -> Iterator[tuple[Node, Node]]:
    """Yield the reference and the answer, with the answer's constants renamed to those of the
    reference in every possible order.
    """
    exchanged = _ARBITRARY if is_solution else _NUMBERED
    shared = {name for name in left & right if exchanged.fullmatch(name)}
    ours = sorted((left - right) | shared)
    theirs = sorted((right - left) | shared)
    if not 1 <= len(ours) == len(theirs) <= _MOST:
        return
    for names, others, node in ((ours, theirs, gold), (theirs, ours, answer)):
        if not _are_arbitrary(names, others, views.named(node).value, is_solution):
            return
    for order in permutations(ours):
        if list(order) != theirs:
            letters = {name: symbol(new) for name, new in zip(theirs, order, strict=True)}
            yield gold, substituted(answer, letters)


def _are_arbitrary(names: list[str], others: list[str], body: Node, is_solution: bool) -> bool:
    """Return True if these letters of an answer are constants that may have any name."""
    if not all(_ARBITRARY.fullmatch(name) for name in names):
        return False
    if is_solution and all(_INTEGRATION.fullmatch(name) for name in names):
        return True
    if not _is_linear(body, frozenset(names)):
        return False
    if is_solution:
        return True
    if not variables(body) - set(names):
        return False
    # In A cos t + B sin t, A and B may be given numbers. They count as arbitrary only if one answer
    # has numbered constants, such as c_1 and c_2.
    if len(names) > 1:
        return any(all(map(_NUMBERED.fullmatch, each)) for each in (names, others))
    is_of_integration = all(_INTEGRATION.fullmatch(name) for name in (*names, *others))
    return is_of_integration and _is_term(body, names[0])


def _shifted(one: Node, two: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the difference of two antiderivatives, paired with its value at one point.

    If the difference has this value everywhere, the antiderivatives differ only by a constant.
    """
    for left in _terms(one):
        for right in _terms(two):
            if "C" not in (left, right) and not left[0] == right[0] == "C":
                continue
            whole = minus(_without(one, left), _without(two, right))
            names = sorted(variables(whole))
            # C is a constant of integration only if it is added to a function of a variable. 2 + C
            # is not an antiderivative.
            if not names or not variables(_without(one, left)) or not _is_of_functions(names):
                continue
            point = {name: number(Fraction(1, 2 + at)) for at, name in enumerate(names)}
            yield whole, substituted(whole, point)


def _natural(node: Node) -> Node:
    """Replace every log in the tree by the natural logarithm."""
    args = tuple(map(_natural, node.args))
    name = "ln" if node.kind == "func" and node.text == "log" else node.text
    return replace(node, args=args, text=name) if args else node


def _terms(body: Node) -> list[str]:
    return [
        name
        for name in sorted(variables(body))
        if _INTEGRATION.fullmatch(name) and _is_term(body, name)
    ]


def _is_of_functions(names: list[str]) -> bool:
    """Return True if one of the names is a usual variable such as x, and none usually stands for a
    constant.
    """
    return any(name in "xyztsuvr" or name in ("theta", "phi") for name in names) and not any(
        map(_ARBITRARY.fullmatch, names)
    )


def _without(body: Node, name: str) -> Node:
    return substituted(body, {name: number(0)})


def _is_term(node: Node, name: str) -> bool:
    """Return True if the letter `name` is a term of the sum, perhaps with a numeric factor, as in
    x^2 + 3C.
    """
    if node.kind == "symbol":
        return node.text == name
    if node.kind not in ("add", "mul"):
        return False
    inside = [arg for arg in node.args if name in variables(arg)]
    if len(inside) != 1 or not _is_term(inside[0], name):
        return False
    return node.kind == "add" or not any(variables(arg) for arg in node.args if arg != inside[0])


def _is_linear(node: Node, names: frozenset[str]) -> bool:
    """Return True if the letters occur only as factors of terms of a sum, at most one in each
    term.
    """
    if node.kind == "symbol" or not variables(node) & names:
        return True
    if node.kind not in ("add", "mul"):
        return False
    inside = [arg for arg in node.args if variables(arg) & names]
    if node.kind == "mul" and len(inside) > 1:
        return False
    return all(_is_linear(arg, names) for arg in inside)


_PHRASE = 4  # phrases of at most this number of words are regarded as names or dates
_BOLD = re.compile(r"\\(?:mathbf|bold|bm|pmb|bf)")
_FORMULA = re.compile(r"\\mathrm\s*\{\s*(?:[A-Z][a-z]?)+\s*\}")
_MATRIX_FACTOR = re.compile(
    r"(?:(?P<letter>[A-Z])|\((?P<letters>[A-Z ]{1,40})\))\s*(?:\^\s*\{?\s*(?P<exponent>-?[1-9])\s*\}?)?\s*"
)
_MATRICES = re.compile(
    rf"(?:{re.sub(r'[?]P<[a-z]+>', '?:', _MATRIX_FACTOR.pattern)}){{2,40}}|"
    r"\([A-Z ]{2,40}\)\s*\^\s*\{\s*-\s*1\s*\}"
)
_PERCENT = re.compile(r"\\?%|\bper\s?cent(?:age)?\b|\bpct\b")


def equivalent(
    gold: str | Sequence[str],
    answer: str,
    kind: AnswerKind = "math",
    *,
    limits: Limits = LIMITS,
    grading: Grading = STRICT,
) -> Verdict:
    """Return the verdict on `answer`, which is compared with the reference `gold`.

    If `gold` is a list of references, the answer must be equal to one of them. The verdict is
    symmetric. `grading` says how far numbers may differ and whether units may be missing. A pair
    that cannot be decided is "unscored".

    The comparison is thread-safe, and its time and memory are limited. No text is executed as code.
    Raises OptionError for an unknown kind.

    >>> equivalent(r"\\frac{1}{2}", "0.5").status
    'equal'
    >>> equivalent("12", "21").status
    'different'
    """
    if kind not in get_args(AnswerKind):
        raise OptionError(f"kind {kind}", "is not a kind of answer", get_args(AnswerKind))
    if not isinstance(gold, str):
        verdicts = [equivalent(each, answer, kind, limits=limits, grading=grading) for each in gold]
        return _best(verdicts)
    if not gold.strip():
        return Verdict("unscored", "no reference")
    if not answer.strip():
        return Verdict("different", "no answer")
    if kind == "text":
        return _verdict(squashed(gold) == squashed(answer) != "", "text")
    if gold == answer:
        return Verdict("equal", "same text")
    longest = max(len(gold), len(answer))
    if longest > limits.raw_characters:
        return Verdict("unscored", "limits", f"{longest} characters")
    if spaceless(gold) == spaceless(answer):
        return Verdict("equal", "same text")
    one = read(gold, limits)
    two = read(answer, limits)
    verdict = _by_text(one, two, kind) or _by_trees(one, two, limits, grading)
    values = f"read as {_shown(one.text)} and {_shown(two.text)}"
    return replace(verdict, detail=f"{verdict.detail}; {values}" if verdict.detail else values)


def _shown(text: str) -> str:
    """Return the beginning of an answer, for messages."""
    return text if len(text) <= 80 else text[:77] + "..."


def _best(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the best of several verdicts. "equal" is best, then "unscored", then "different"."""
    if not verdicts:
        return Verdict("unscored", "no reference")
    order = ("equal", "unscored", "different")
    return min(verdicts, key=lambda verdict: order.index(verdict.status))


def matches_reference(
    reference: str | Sequence[str],
    answer: str,
    kind: AnswerKind = "math",
    *,
    grading: Grading = STRICT,
) -> Verdict:
    """Return the verdict on an answer, with two allowances that `equivalent` does not make.

    If the grading policy allows missing units, the answer may omit the percent sign of the
    reference. So 28 is accepted for 28 %, but 28 % is not accepted for 28.

    An answer may also add the modulus of a remainder. So 6 (mod 11) is accepted for 6, but 6 is not
    accepted for 6 (mod 11).
    """
    if not isinstance(reference, str):
        return _best([matches_reference(each, answer, kind, grading=grading) for each in reference])
    verdict = equivalent(reference, answer, kind, grading=grading)
    if verdict.is_equal or kind != "math":
        return verdict
    if verdict.rule == "congruence" and _is_remainder(reference, answer):
        return Verdict("equal", "congruence")
    if grading.units == "required":
        return verdict
    trees = read(reference, LIMITS).trees
    if not trees or trees[0].kind != "percent":
        return verdict
    bare = _PERCENT.sub("", reference)
    lenient = equivalent(bare, answer, kind, grading=grading)
    return Verdict("equal", "percent") if lenient.is_equal else verdict


def _is_remainder(reference: str, answer: str) -> bool:
    """Return True if the answer is the reference number with a larger modulus, as 6 (mod 11) is for
    6.
    """
    one = read(reference, LIMITS).trees
    two = read(answer, LIMITS).trees
    if not one or not two or two[0].kind != "congruence" or one[0].value is None:
        return False
    rest, modulus = (arg.value for arg in two[0].args)
    if rest is None or modulus is None:
        return False
    return rest == one[0].value and 0 <= rest < modulus


def _verdict(same: bool, rule: str) -> Verdict:
    return Verdict("equal" if same else "different", rule)


def _unscored(error: Undecided | Undefined) -> Verdict:
    detail = f"no value: {error}" if isinstance(error, Undefined) else str(error)
    return Verdict("unscored", "limits" if isinstance(error, TooLarge) else "undecided", detail)


def _by_text(one: Reading, two: Reading, kind: AnswerKind) -> Verdict | None:
    """Return the verdict if the spelling of the texts decides it, else None.

    It does, for example, if the texts are the same, or if both answers are letters of choices.
    """
    if not one.text:
        return Verdict("unscored", "no reference")
    if not two.text:
        return Verdict("different", "no answer")
    if spaceless(one.text) == spaceless(two.text):
        return Verdict("equal", "same text")
    formulas = [_FORMULA.fullmatch(reading.text) for reading in (one, two)]
    if all(formulas) and one.text.lower() == two.text.lower():
        # In chemical formulas, upper and lower case differ: CS is a compound, but Cs is an element.
        return Verdict("different", "text")
    products = [_matrix_product(reading.text) for reading in (one, two)]
    if products[0] is not None and products[1] is not None:
        if "-" in one.text or "-" in two.text:
            return _verdict(products[0] == products[1], "matrix")
    if one.choice and two.choice and (one.is_letter or two.is_letter or kind == "choice"):
        return _verdict(one.choice == two.choice, "choice")
    if one.lettered and two.lettered and one.choice != two.choice:
        return Verdict("different", "choice")
    if kind == "choice" and (one.choice or two.choice):
        first = one.choice or one.text.strip("(). ").upper()
        second = two.choice or two.text.strip("(). ").upper()
        return _verdict(first == second, "choice")
    return None


def _matrix_product(text: str) -> list[tuple[str, int]] | None:
    """Return the factors of a product of matrices, such as A^2 B^-1, in order; None for any other
    text.

    Each factor is a letter with the exponent 1 or -1. The inverse of AB is written as B^-1 A^-1,
    and a factor next to its inverse cancels.
    """
    if not _MATRICES.fullmatch(text):
        return None
    factors: list[tuple[str, int]] = []
    for part in _MATRIX_FACTOR.finditer(text):
        letters = part["letter"] or part["letters"]
        exponent = int(part["exponent"] or 1)
        if abs(exponent) > 9:
            return None
        step = 1 if exponent > 0 else -1
        for _ in range(abs(exponent)):
            for letter in letters[::step].replace(" ", ""):
                if factors and factors[-1] == (letter, -step):
                    factors.pop()
                else:
                    factors.append((letter, step))
    return factors


def _by_trees(one: Reading, two: Reading, limits: Limits, grading: Grading) -> Verdict:
    """Compare each parse tree of one answer with each parse tree of the other.

    Return "equal" if any pair is equal, else the verdict on the first pair.
    """
    first: Verdict | None = None
    has_bold = _BOLD.search(one.text) or _BOLD.search(two.text)
    for gold, answer in product(one.trees, two.trees):
        if has_bold:
            gold, answer = views.unbold(gold, answer), views.unbold(answer, gold)
        if has(gold, "call") or has(answer, "call"):
            names = variables(gold) | variables(answer)
            gold, answer = (views.unapplied(node, names) for node in (gold, answer))
        policy = views.policy_for(grading, gold)
        comparison = Comparer(limits, policy, brackets="free" if first is None else "strict")
        try:
            verdict = _verdict(comparison.same(gold, answer), comparison.rule)
        except (Undecided, Undefined) as error:
            verdict = _unscored(error)
        except OutOfTime:
            verdict = Verdict("unscored", "time", "the comparison took too long")
        except RecursionError:  # the calling program left too little of Python's stack
            verdict = _unscored(TooLarge("nested too deeply for the remaining stack"))
        if verdict.is_equal:
            return verdict
        if variables(gold) and variables(answer) and _are_restated(gold, answer, limits, policy):
            return Verdict("equal", "constants")
        first = first or verdict
    return first or _unread(one, two)


def _are_restated(gold: Node, answer: Node, limits: Limits, policy: Grading) -> bool:
    """Return True if two answers are equal up to the choice of arbitrary constants."""
    for one, two in restated(gold, answer):
        with suppress(Undecided, Undefined, OutOfTime, RecursionError):
            if Comparer(limits, policy).same(one, two):
                return True
    return False


def _unread(one: Reading, two: Reading) -> Verdict:
    """Return the verdict on two answers of which at least one could not be parsed.

    They are equal if they are the same phrase. They are different if one of them cannot be an
    answer, or if it negates its value and the other has a value. Different short phrases, such as
    names, are different too. Any other pair is unscored.
    """
    problem = one.problem or two.problem
    assert problem is not None
    if one.squashed and one.squashed == two.squashed and not isinstance(problem, Malformed):
        return Verdict("equal", "text")
    readable = two if one.problem else one
    if isinstance(problem, Malformed):
        return Verdict("different", "malformed", str(problem))
    if type(problem) is Prose and readable.trees:
        return Verdict("different", "prose", str(problem))
    # Short phrases such as names differ if their words differ. Long sentences may have the same
    # meaning in other words, so they stay undecided.
    are_short = all(len(reading.squashed.split()) <= _PHRASE for reading in (one, two))
    if isinstance(one.problem, Prose) and isinstance(two.problem, Prose) and are_short:
        return Verdict("different", "text")
    return _unscored(problem)
