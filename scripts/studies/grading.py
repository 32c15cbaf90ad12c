"""Compare answer checkers on the same pairs of answers, and write the page of disputed pairs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import multiprocessing
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from atts.core import AnswerKind
from atts.evaluators import equivalent, extract, group, reference
from atts.evaluators.equivalence import evaluation, regions, views
from atts.evaluators.equivalence.algebra import WORKER, without_asking
from atts.evaluators.verdict import Undecided
from scripts.studies.harness import Options, Row, Table, rows_of, say
from tests.evaluators.mutants import BUILT_IN, mutants

# limit of wall time for one pair, in seconds; a limit of CPU time would need a timer that makes
# `process_time` less precise
_PATIENCE = 10.0
_BLIND = Path(__file__).resolve().parents[2] / "tests" / "evaluators" / "blind_pairs.jsonl"
T = TypeVar("T")
Check = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Pair:
    """A reference, an answer, and whether a careful reader considers the two equal."""

    gold: str
    answer: str
    expected: bool


def study(options: Options) -> list[Table]:
    """Return the tables of the study.

    Other checkers are included if they are installed, and sets of pairs if their files exist.
    """
    core = [
        row
        for row in rows_of("equivalence/cases.jsonl")
        if row["tag"] == "core" and row["kind"] == "answer"
    ]
    judged = rows_of("traces/answer_pairs.jsonl")
    answers = [
        row["answer"].strip("$")
        for row in rows_of("benchmarks/math500.jsonl")
        if len(row["answer"]) < 200
    ]
    changed = mutants([*BUILT_IN, *answers], options.pick(20, 60, 10_000))
    sets = {
        "cases": [Pair(row["gold"], row["pred"], row["expected"]) for row in core],
        "model answers": [Pair(row["gold"], row["pred"], row["judged_equal"]) for row in judged],
        "changed answers": [Pair(one.gold, one.answer, False) for one in changed],
    }
    lines = _BLIND.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    sets["blind sets"] = [Pair(row["gold"], row["answer"], row["equal"]) for row in rows]
    tables = [
        beside(name, _some(pairs, options.pick(40, 250, 10_000)))
        for name, pairs in sets.items()
        if pairs
    ]
    tables.append(sympy_questions({name: pairs for name, pairs in sets.items() if pairs}))
    everything = [pair for pairs in sets.values() for pair in pairs]
    tables.append(rules_off(_some(everything, options.pick(60, 10_000, 10_000))))
    # answers that may make a checker hang, crash, or give a false verdict
    hostile = rows_of("equivalence/adversarial.jsonl")
    attacks = [Pair(row["gold"], row["pred"], row["expected"] is not False) for row in hostile]
    tables.append(hostile_answers(_some(attacks, options.pick(60, 460, 460))))
    return [*tables, grouping(options.pick(2_000, 100_000, 100_000))]


def _some(pairs: list[Pair], count: int) -> list[Pair]:
    return random.Random(1).sample(pairs, count) if len(pairs) > count else pairs


def _math_verify() -> Check:
    math_verify: Any = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def check(gold: str, answer: str) -> bool:
        one, two = (math_verify.parse(f"${text}$") for text in (gold, answer))
        return bool(one and two and math_verify.verify(one, two))

    return check


def _simplified(parse: Callable[[str], Any]) -> Check:
    """Return a check that lets sympy simplify the difference of both expressions, and expects 0."""
    sympy: Any = importlib.import_module("sympy")
    return lambda gold, answer: bool(sympy.simplify(parse(gold) - parse(answer)) == 0)


def _latex2sympy() -> Check:
    return _simplified(importlib.import_module("latex2sympy2_extended").latex2sympy)


def _sympy() -> Check:
    # sympy needs this parser, but reports a missing parser only when the function is called.
    importlib.import_module("lark")
    latex = importlib.import_module("sympy.parsing.latex")
    return _simplified(partial(latex.parse_latex, backend="lark"))


def _minerva() -> Check:
    """Return the check of lm-eval's Minerva task. It normalises both answers, then simplifies their
    difference.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("datasets")
    # lm-eval uses `datasets` only in type annotations here, so an empty stand-in is enough.
    sys.modules.setdefault("datasets", SimpleNamespace(Dataset=None))  # type: ignore[arg-type]
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None:
        raise ImportError("lm_eval")
    # Load this file alone, because importing the package also imports every metric of its tasks.
    path = Path(package.origin).parent / "tasks" / "minerva_math" / "utils.py"
    spec = importlib.util.spec_from_file_location("minerva_rules", path)
    assert spec is not None
    assert spec.loader is not None
    rules: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    logging.getLogger("minerva_rules").setLevel(logging.CRITICAL)
    normalized = rules.normalize_final_answer
    return lambda gold, answer: bool(rules.is_equiv(normalized(gold), normalized(answer)))


def _ours() -> Check:
    return lambda gold, answer: equivalent(gold, answer).is_equal


def _same_text() -> Check:
    return lambda gold, answer: "".join(gold.split()) == "".join(answer.split())


_CHECKERS: dict[str, Callable[[], Check]] = {
    "atts": _ours,
    "math-verify": _math_verify,
    "lm-eval minerva": _minerva,
    "latex2sympy2 + simplify": _latex2sympy,
    "sympy (lark) + simplify": _sympy,
    "string": _same_text,
}


@dataclass(slots=True)
class Score:
    """The results of one checker with its default settings on one set of answer pairs."""

    check: Check
    seconds: list[float] = field(default_factory=list[float])
    right: int = 0
    false_equal: int = 0
    failed: int = 0

    def judge(self, pair: Pair) -> None:
        """Check one more pair, and add the verdict to the score."""
        start = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                verdict = self.check(pair.gold, pair.answer)
        except Exception:  # noqa: BLE001  the result counts exceptions of checkers
            self.failed += 1
            verdict = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.seconds.append(time.process_time() - start)
        self.right += verdict == pair.expected
        self.false_equal += verdict and not pair.expected


def _give_up(number: int, frame: object) -> None:
    """Stop a check that takes too long: some checkers simplify large binomials for hours."""
    raise TimeoutError(f"more than {_PATIENCE} s")


def beside(name: str, pairs: Sequence[Pair]) -> Table:
    """Run every installed checker on one pair of answers after another, so that background load
    slows all checkers equally.
    """
    scores = dict[str, Score]()
    for checker, make in _CHECKERS.items():
        with contextlib.suppress(ImportError):
            scores[checker] = Score(make())
    signal.signal(signal.SIGALRM, _give_up)
    for index, pair in enumerate(pairs):
        if index % 200 == 0:
            say(f"grading: {name} {index} of {len(pairs)}")
        for score in scores.values():
            score.judge(pair)
    rows = list[Row]()
    base = statistics.median(scores["atts"].seconds)
    for checker, score in scores.items():
        middle = statistics.median(score.seconds)
        slow = sorted(score.seconds)[int(0.99 * len(pairs))]
        times = (middle * 1e3, slow * 1e3, middle / base)
        rows.append((checker, score.right / len(pairs), score.false_equal, score.failed, *times))
    shares = ", ".join(
        f"{checker} {100 * score.right / len(pairs):.1f} %" for checker, score in scores.items()
    )
    return Table.of(
        f"{name}: {len(pairs)} pairs",
        "checker | correct verdicts | false equal | exceptions | median ms | p99 ms | × "
        "atts' median",
        rows,
        headline=f"correct verdicts on {len(pairs)} pairs: {shares}",
    )


def _in_new_process(work: Callable[..., T], *given: object) -> T:
    """Run a call in a new process, which has not imported the other checkers."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *given).result()


def hostile_answers(pairs: Sequence[Pair]) -> Table:
    """Run the checker of atts on hostile answers; report its slowest pair, the pairs that it
    wrongly calls equal, and its peak memory.
    """
    names = "equal | different | unscored | false equal | slowest wall s | CPU s | peak MB"
    return Table.of(f"Hostile answers: {len(pairs)}", names, [_in_new_process(_attacked, pairs)])


def _attacked(pairs: Sequence[Pair]) -> Row:
    """Return the verdicts, times and memory of the checker on hostile pairs."""
    seconds = [0.0]
    busy = [0.0]
    false_equal = 0
    counts = Counter({"equal": 0, "different": 0, "unscored": 0})
    for pair in pairs:
        start = time.perf_counter()
        spent = time.thread_time()
        verdict = equivalent(pair.gold, pair.answer)
        seconds.append(time.perf_counter() - start)
        busy.append(time.thread_time() - spent)
        counts[verdict.status] += 1
        false_equal += verdict.is_equal and not pair.expected
    return (*counts.values(), false_equal, max(seconds), max(busy), _peak_memory_mb())


def grouping(count: int) -> Table:
    """Group many answers, each set in a new process.

    Some sets have only distinct answers; other sets have few values, each in many spellings.
    """
    rows: list[Row] = []
    for name in (*_DISTINCT, "mixed", "100 values"):
        say(f"grouping: {name}")
        rows.append((name, count, *_in_new_process(_grouped, name, count)))
    return Table.of("Grouping", "answers | number | classes | wall s | CPU s | peak MB", rows)


_DISTINCT = {
    "radicals": r"\sqrt{{{0}}}+2",
    "fractions": r"\frac{{{0}}}{{7}}",
    "decimals": "{0}.00007",
    "tuples": r"(\frac{{{0}}}{{7}}, \sqrt{{{0}}})",
}
_SPELLINGS = (
    r"\frac{{{0}}}{{7}}", r"{0}\sqrt{{2}}", "{0}", "x = {0}", r"{0}\pi", "${0}$", r"{0}\text{{ cm}}", "({0}, 1)"
)  # fmt: skip


def _grouped(name: str, count: int) -> Row:
    """Return the number of classes, the times and the peak memory of grouping one set."""
    values = 100 if name == "100 values" else count
    styles = (_DISTINCT[name],) if name in _DISTINCT else _SPELLINGS
    numbers = [divmod(index, values)[::-1] for index in range(count)]
    texts = [
        styles[(value + style) % len(styles)].format(7 * value + 1) for value, style in numbers
    ]
    random.Random(0).shuffle(texts)
    start = time.perf_counter()
    busy = time.process_time()
    classes = max(group(texts)) + 1
    spent = time.perf_counter() - start, time.process_time() - busy
    return (classes, *spent, _peak_memory_mb())


def _peak_memory_mb() -> float | None:
    """Return the peak memory of the current process in MB.

    `getrusage` is not used, because its peak includes the parent's memory before this process
    started.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else None


TARGET = Path(__file__).resolve().parents[2] / "docs" / "grading_policies.md"
_MARK = "a test generates the tables again if the pairs are available.\n"
"""Last line of the page's text that is written by hand; the rest is generated."""


def document() -> str | None:
    """Return the text of the page of disputed pairs, or None if the pairs are not available."""
    rows = [row for row in rows_of("equivalence/cases.jsonl") if row["tag"] != "core"]
    if not rows:
        return None
    rows.sort(key=lambda row: (row["tag"], row["id"]))
    parts = ["".join(TARGET.read_text(encoding="utf-8").partition(_MARK)[:2])]
    for tag, tagged in groupby(rows, key=lambda row: str(row["tag"])):
        found = [_row(row) for row in tagged]
        agreed = sum(row[-1] for row in found)
        pairs = "pair" if len(found) == 1 else "pairs"
        parts.append(f"## {tag.removeprefix('policy:')}\n")
        parts.append(
            "`equivalent` gives the same verdict as a careful reader (column *reader*) "
            f"on {agreed} of {len(found)} {pairs} of answers.\n"
        )
        parts.append("| | reference | answer | reader | ours | rule |\n|---|---|---|---|---|---|")
        parts += ["| " + " | ".join(row[:-1]) + " |" for row in found]
        parts.append("")
    return "\n".join(parts)


def _row(row: dict[str, Any]) -> tuple[Any, ...]:
    gold = row["gold"]
    answer = row["pred"]
    kind: AnswerKind = "choice" if "choice" in row["tag"] else "math"
    if row["kind"] == "text" and kind == "choice":
        gold = extract(gold, kind) or gold
        answer = extract(answer, kind) or answer
    elif row["kind"] == "text":
        gold = reference(gold)
        answer = extract(answer) or ""
    verdict = equivalent(gold, answer, kind)
    reader = "equal" if row["expected"] else "different"
    mark = "" if verdict.is_equal == row["expected"] else "≠"
    shown = [_cell(row["gold"]), _cell(row["pred"])]
    return (
        row["id"].removeprefix("eq") + mark,
        *shown,
        reader,
        verdict.status,
        verdict.rule,
        not mark,
    )


def _cell(text: str) -> str:
    plain = "".join(char if char.isprintable() else "␤" for char in " ".join(text.split()))
    plain = plain if len(plain) <= 90 else plain[:44] + " … " + plain[-40:]
    return "`" + plain.replace("`", "'").replace("|", "∣") + "`"


def main() -> None:
    """Write the page of disputed pairs, or exit with a message if the shared data are missing."""
    text = document()
    if text is None:
        raise SystemExit("shared data not found: set ATTS_SHARED_DATA to their folder")
    TARGET.write_text(text, encoding="utf-8")


# one replacement: a module, class or table, the name to replace in it, and the new value
Switch = tuple[Any, str, Any]


def _undecided(*_: object) -> Any:
    raise Undecided("switched off")


def _first(node: Any, *_: object) -> Any:
    return node


def _nothing(*_: object) -> None:
    return None


def _function_switches(*names: str) -> list[Switch]:
    """Return replacements that make the checker of atts treat these functions as undecided."""
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
    "hyperbolic functions": _function_switches(*"sinh cosh tanh coth sech csch".split()),
    "sec, csc and cot": _function_switches("sec", "csc", "cot"),
    "arcsin, arccos and arctan": _function_switches("arcsin", "arccos", "arctan"),
    "sets of reals": [(regions.Line, "region", _nothing)],
    "classes such as 8k+3": [(views, "progression", _nothing)],
    "dots written out": [(views, "with_terms", _first)],
}
"""Rules of atts that sympy might replace, each with the replacements that disable it."""


@contextmanager
def switched_off(switches: Sequence[Switch]) -> Generator[None]:
    """Replace each name inside the `with` block."""
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
    """Check all pairs again with one rule of atts switched off, for each rule in turn.

    If none of the other rules decides a pair, sympy checks it.
    """
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


def sympy_questions(sets: dict[str, list[Pair]]) -> Table:
    """Count the pairs that need sympy, and measure the time for these pairs without the start of
    sympy's worker.
    """
    # this comparison starts sympy's worker, so that its start is not timed
    equivalent(r"\sum_{k=1}^{n}k", r"\frac{n(n+1)}{2}")
    rows = list[Row]()
    for name, pairs in sets.items():
        WORKER.answers.clear()  # empty the cache, which has answers of earlier comparisons
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
        "Pairs sent to sympy",
        "set | pairs | passed to sympy | share | decided | median ms in sympy",
        rows,
        "*Median ms in sympy* is the median wall time of the pairs that are passed to sympy, "
        "in a running worker process. Few pairs need sympy, so this time does not appear in "
        "the medians of the other tables.",
    )


if __name__ == "__main__":
    main()
