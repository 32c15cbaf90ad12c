"""Measure what sympy would decide if a rule of our own were switched off."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from atts.evaluators import equivalent
from atts.evaluators.equivalence import evaluation, regions, views
from atts.evaluators.equivalence.algebra import WORKER, without_asking
from atts.evaluators.verdict import Undecided
from scripts.studies.harness import Row, Table, say

if TYPE_CHECKING:
    from scripts.studies.grading import Pair

Switch = tuple[Any, str, Any]  # a module, class or table, a name in it, and what it becomes


def _undecided(*_: object) -> Any:
    raise Undecided("switched off")


def _first(node: Any, *_: object) -> Any:
    return node


def _nothing(*_: object) -> None:
    return None


def _functions(*names: str) -> list[Switch]:
    """Return switches after which these functions have no value of ours."""
    tables = (evaluation.FUNCTIONS, evaluation.EXACT)
    return [
        (table, name, _undecided_function(table))
        for name in names
        for table in tables
        if name in table
    ]


def _undecided_function(table: object) -> Callable[..., Any]:
    if table is evaluation.FUNCTIONS:
        return _undecided

    def not_rational(*_: object) -> Any:
        raise evaluation.NotRational("switched off")

    return not_rational


_RULES: MutableMapping[str, Any] = vars(evaluation)["_RULES"]
RULES: dict[str, list[Switch]] = {
    "sums and products written out": [(_RULES, "sum", _undecided)],
    "cases evaluated as functions": [(_RULES, "cases", _undecided)],
    "powers reduced by a modulus": [(evaluation, "remainder", _nothing)],
    "factorials and binomials": [
        (evaluation.EXACT, "factorial", _undecided),
        (evaluation.EXACT, "binom", _undecided),
    ],
    "gcd and lcm": [
        (evaluation.EXACT, "gcd", _undecided),
        (evaluation.EXACT, "lcm", _undecided),
    ],
    "hyperbolic functions": _functions(*"sinh cosh tanh coth sech csch".split()),
    "sec, csc and cot": _functions("sec", "csc", "cot"),
    "arcsin, arccos and arctan": _functions("arcsin", "arccos", "arctan"),
    "sets of reals": [(regions.Line, "region", _nothing)],
    "classes such as 8k+3": [(views, "progression", _nothing)],
    "dots written out": [(views, "with_terms", _first)],
}
"""Rules of our own whose work sympy might do, and what switches each off."""


@contextmanager
def switched_off(switches: Sequence[Switch]) -> Generator[None]:
    """Replace each name for a while."""
    with ExitStack() as undo:
        for owner, name, new in switches:
            if isinstance(owner, dict):
                undo.callback(owner.__setitem__, name, owner[name])
                owner[name] = new
            else:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, new)
        yield


def rules_off(pairs: Sequence[Pair]) -> Table:
    """Compare every pair with each rule switched off in turn; sympy is asked what that leaves."""
    before = [equivalent(pair.gold, pair.answer).status for pair in pairs]
    rows = list[Row]()
    for name, switches in RULES.items():
        say(f"grading: without {name}")
        with switched_off(switches):
            after = [equivalent(pair.gold, pair.answer).status for pair in pairs]
        changed = [
            (pair, old, new)
            for pair, old, new in zip(pairs, before, after, strict=True)
            if old != new
        ]
        wrong = sum(
            (old == "equal") == pair.expected != (new == "equal") for pair, old, new in changed
        )
        unscored = sum(new == "unscored" for *_, new in changed)
        false_equal = sum(new == "equal" and not pair.expected for pair, _, new in changed)
        rows.append((name, len(changed), wrong, unscored, false_equal))
    return Table.of(
        f"Own rules switched off: {len(pairs)} pairs",
        "rule | verdicts that change | now wrong | now unscored | now falsely equal",
        rows,
    )


def asked(sets: dict[str, list[Pair]]) -> Table:
    """Count the pairs that are put to sympy and measure what these cost, the worker's start apart."""
    equivalent(r"\sum_{k=1}^{n}k", r"\frac{n(n+1)}{2}")  # starts the worker
    rows = list[Row]()
    for name, pairs in sets.items():
        WORKER.answers.clear()  # what the comparisons above have asked is remembered
        seconds = list[float]()
        decided = 0
        for pair in pairs:
            with without_asking() as questions:
                equivalent(pair.gold, pair.answer)
            if not questions:
                continue
            start = time.perf_counter()
            decided += equivalent(pair.gold, pair.answer).status != "unscored"
            seconds.append(time.perf_counter() - start)
        middle = sorted(seconds)[len(seconds) // 2] * 1e3 if seconds else None
        share = len(seconds) / len(pairs)
        rows.append((name, len(pairs), len(seconds), share, decided, middle))
    return Table.of(
        "The share of sympy",
        "set | pairs | put to sympy | share | decided | median ms of these",
        rows,
        "Wall time of a question, the worker running. The medians above do not contain it: few "
        "pairs reach sympy.",
    )
