"""Answer checkers beside each other on the same pairs: right verdicts, time, hostile answers, grouping."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.studies.grading_corpus import Pair, answers, cases, hostile
from scripts.studies.harness import Cell, Options, Table, say

Check = Callable[[str, str], bool]


def study(options: Options) -> list[Table]:
    """The tables; other checkers are included where they are installed."""
    share = options.pick(40, 250, 10_000)
    sets = {"cases": _some(cases(), share), "model answers": _some(answers(), share)}
    tables = [beside(name, pairs) for name, pairs in sets.items() if pairs]
    tables.append(hostile_answers(_some(hostile(), options.pick(60, 460, 460))))
    tables.append(grouping(options.pick(5_000, 20_000, 100_000)))
    return tables


def checkers() -> dict[str, Check]:
    """Every checker at hand as a function of two texts; each is left with its own defaults."""
    from atts.evaluators import equivalent

    found: dict[str, Check] = {"atts": lambda gold, answer: equivalent(gold, answer).is_equal}
    for name, make in _OTHERS:
        with contextlib.suppress(ImportError):
            found[name] = make()
    return found


def _string() -> Check:
    return lambda gold, answer: "".join(gold.split()) == "".join(answer.split())


def _math_verify() -> Check:
    math_verify: Any = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def check(gold: str, answer: str) -> bool:
        one, two = (math_verify.parse(f"${text}$") for text in (gold, answer))
        return bool(one and two and math_verify.verify(one, two))

    return check


def _sympy() -> Check:
    importlib.import_module("lark")  # the parser sympy needs for this
    sympy: Any = importlib.import_module("sympy")
    parse_latex = importlib.import_module("sympy.parsing.latex").parse_latex

    def check(gold: str, answer: str) -> bool:
        one, two = (parse_latex(text, backend="lark") for text in (gold, answer))
        return bool(sympy.simplify(one - two) == 0)

    return check


def _latex2sympy() -> Check:
    sympy: Any = importlib.import_module("sympy")
    parse = importlib.import_module("latex2sympy2_extended").latex2sympy
    return lambda gold, answer: bool(sympy.simplify(parse(gold) - parse(answer)) == 0)


_OTHERS: tuple[tuple[str, Callable[[], Check]], ...] = (
    ("math-verify", _math_verify),
    ("latex2sympy2 + simplify", _latex2sympy),
    ("sympy (lark) + simplify", _sympy),
    ("string", _string),
)


@dataclass(slots=True)
class Score:
    """What one checker did on one set."""

    seconds: list[float]
    right: int = 0
    false_equal: int = 0
    failed: int = 0


def beside(name: str, pairs: Sequence[Pair]) -> Table:
    """Every checker on every pair, turn by turn, so that a busy machine is busy for all."""
    scores = {checker: Score([]) for checker in checkers()}
    known = checkers()
    for index, pair in enumerate(pairs):
        if index % 200 == 0:
            say(f"grading: {name} {index} of {len(pairs)}")
        for checker, check in known.items():
            _judge(scores[checker], check, pair)
    rows = [_row(checker, score, len(pairs)) for checker, score in scores.items()]
    note = "Milliseconds of processor time in one process; a parse kept from the pair before counts, as it does in use."
    columns = ("checker", "right", "false equal", "raised", "median ms", "p99 ms", "× atts' median")
    base = statistics.median(scores["atts"].seconds)
    return Table(f"{name}: {len(pairs)} pairs", columns, tuple((*row, _ratio(scores[str(row[0])], base)) for row in rows), (note,))  # fmt: skip  # noqa: E501


def _judge(score: Score, check: Check, pair: Pair) -> None:
    start = time.process_time()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            verdict = check(pair.gold, pair.answer)
    except Exception:  # noqa: BLE001  # other checkers raise; that is part of the result
        score.failed += 1
        verdict = False
    score.seconds.append(time.process_time() - start)
    score.right += verdict == pair.expected
    score.false_equal += verdict and not pair.expected


def _row(checker: str, score: Score, pairs: int) -> tuple[Cell, ...]:
    ordered = sorted(score.seconds)
    return (
        checker,
        score.right / pairs,
        score.false_equal,
        score.failed,
        statistics.median(ordered) * 1e3,
        ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3,
    )


def _ratio(score: Score, base: float) -> float:
    return statistics.median(score.seconds) / base


def hostile_answers(pairs: Sequence[Pair]) -> Table:
    """Our own paths only: the slowest pair, what was wrongly called equal, memory at the end."""
    from atts.evaluators import SlowPath, equivalent

    rows: list[tuple[Cell, ...]] = []
    with SlowPath() as pool:
        pool.warm()
        for name, slow in (("fast path", None), ("with the slow path", pool)):
            seconds, busy, false_equal = [0.0], [0.0], 0
            counts = {"equal": 0, "different": 0, "unscored": 0}
            for pair in pairs:
                start, spent = time.perf_counter(), time.thread_time()
                verdict = equivalent(pair.gold, pair.answer, slow=slow)
                seconds.append(time.perf_counter() - start)
                busy.append(time.thread_time() - spent)
                counts[verdict.status] += 1
                false_equal += verdict.is_equal and not pair.expected
            rows.append((name, *counts.values(), false_equal, max(seconds), max(busy), _megabytes()))
    columns = ("path", "equal", "different", "unscored", "false equal", "slowest wall s", "CPU s", "resident MB")
    note = "Resident memory is this process's, the libraries of the other checkers included; a worker's is capped."
    return Table(f"Hostile answers: {len(pairs)}", columns, tuple(rows), (note,))


def _megabytes() -> float | None:
    try:
        import psutil
    except ImportError:
        return None
    return float(psutil.Process().memory_info().rss) / (1 << 20)


def grouping(count: int) -> Table:
    """Classes of many answers: many distinct values, and few."""
    from atts.evaluators import group

    rows: list[tuple[Cell, ...]] = []
    for name, values in (("all distinct", count), ("100 values", 100)):
        texts = [_spelled(index % values, index // values) for index in range(count)]
        random.Random(0).shuffle(texts)
        start, busy = time.perf_counter(), time.process_time()
        classes = group(texts)
        rows.append((name, count, max(classes) + 1, time.perf_counter() - start, time.process_time() - busy))
    return Table("Grouping", ("answers", "number", "classes", "wall s", "CPU s"), tuple(rows))


def _spelled(value: int, style: int) -> str:
    styles = (
        r"\frac{{{0}}}{{7}}",
        r"{0}\sqrt{{2}}",
        "{0}",
        "x = {0}",
        r"{0}\pi",
        "${0}$",
        r"{0}\text{{ cm}}",
        "({0}, 1)",
    )
    return styles[(value + style) % len(styles)].format(7 * value + 1)


def _some(pairs: list[Pair], count: int) -> list[Pair]:
    return random.Random(1).sample(pairs, count) if len(pairs) > count else pairs
