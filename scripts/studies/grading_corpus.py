"""Answers to measure checkers on, and hostile changes to them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = (
    r"\frac{3}{4}", "0.75", "12", "-7", "1,234", r"2\sqrt{3}", r"\sqrt{12}", r"\frac{\pi}{3}", r"60^\circ", r"28\%",
    r"x^2+2x+1", "(x+1)^2", r"y = 2x + 3", r"(-\infty,-8)\cup (8,\infty)", r"\left[2,5\right)", r"\{1,2,3\}",
    r"1 \pm \sqrt{19}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\text{Evelyn}", r"\text{(B)}", "3:4",
    r"5.4 \text{ cents}", r"15\mbox{ cm}^2", r"2516_8", r"6 - 5i", r"e^{i\pi}", r"\log_2 8", r"\binom{10}{3}",
    r"x \in [-2,7]", r"f(2) < f(1) < f(4)", r"\lfloor \frac{n}{2} \rfloor + 1", r"11\frac{1}{2}", r"1.5\times10^3",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """A reference, an answer, and whether a careful reader calls them equal."""

    gold: str
    answer: str
    expected: bool


def shared() -> Path | None:
    """The folder of shared data, None where there is none."""
    named = os.environ.get("ATTS_SHARED_DATA")
    path = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    return path if path.is_dir() else None


def cases() -> list[Pair]:
    """Pairs of checkers' own tests, the undisputed ones."""
    rows = _rows("equivalence/cases.jsonl")
    return [Pair(r["gold"], r["pred"], r["expected"]) for r in rows if r["tag"] == "core" and r["kind"] == "answer"]


def answers() -> list[Pair]:
    """Distinct answers of real models, judged by a reader."""
    return [Pair(r["gold"], r["pred"], r["judged_equal"]) for r in _rows("traces/answer_pairs.jsonl")]


def hostile() -> list[Pair]:
    """Answers made to hang, crash or fool a checker; `expected` is False where none is known."""
    rows = _rows("equivalence/adversarial.jsonl")
    return [Pair(r["gold"], r["pred"], r["expected"] is not False) for r in rows]


def corpus() -> list[str]:
    """Reference answers of every benchmark at hand, short hostile ones, and our own."""
    found = set(OWN)
    base = shared()
    for path in sorted((base / "benchmarks").glob("*.jsonl")) if base else []:
        found |= {str(json.loads(line)["answer"]) for line in path.read_text(encoding="utf-8").splitlines()}
    found |= {pair.answer for pair in hostile() if len(pair.answer) < 300}
    found |= {pair.answer for pair in cases() if len(pair.answer) < 300}
    return sorted(answer for answer in found if answer.strip())


def _rows(name: str) -> Iterator[dict[str, Any]]:
    base = shared()
    if base is None or not (base / name).is_file():
        return
    for line in (base / name).read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


_PIECES = (
    "\\", "{", "}", "^", "_", "$", "(", ")", "[", "]", "|", ",", ";", "&", "%", "!", "'", "=", "<", "\\frac", "\\sqrt",
    "\\left", "\\right", "\\text{", "\\boxed{", "\\begin{matrix}", "\\\\", "\\pm", "\\infty", "\\sum_{k=1}^{9}", "^{9}",
    "9^", "e^", "10^{10}", "\\cdot", "\\circ", "and", "or", "not", " ", "\n\n", "\0", "\ud800", "½", "π", "√", "−",
    "\u200b", "999999999999", "0", ".", "e5", "x", "i", "__import__('os')", "\\int_0^1", "\\lim_{x\\to 0}", "cm",
    "!" * 9,
)  # fmt: skip


def _insert(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(_PIECES) + text[at:]


def _delete(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + text[at + draw.randrange(1, 6) :]


def _swap(text: str, draw: random.Random) -> str:
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(3))
    return text[: cuts[0]] + text[cuts[1] : cuts[2]] + text[cuts[0] : cuts[1]] + text[cuts[2] :]


def _repeat(text: str, draw: random.Random) -> str:
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(2))
    return text[: cuts[1]] + text[cuts[0] : cuts[1]] * draw.choice((1, 2, 5, 40)) + text[cuts[1] :]


_BRACKETS = (("(", ")"), ("{", "}"), (r"\sqrt{", "}"), (r"\frac{1}{", "}"), ("|", "|"), ("2^{", "}"))


def _nest(text: str, draw: random.Random) -> str:
    before, after = draw.choice(
        (("(", ")"), ("{", "}"), (r"\sqrt{", "}"), (r"\frac{1}{", "}"), ("|", "|"), ("2^{", "}"))
    )
    times = draw.choice((1, 2, 3, 30))
    return before * times + text + after * times


def _digit(text: str, draw: random.Random) -> str:
    places = [index for index, char in enumerate(text) if char.isdigit()]
    if not places:
        return _insert(text, draw)
    at = draw.choice(places)
    return text[:at] + draw.choice("0123456789") * draw.choice((1, 1, 1, 12)) + text[at + 1 :]


_CHANGES: tuple[Callable[[str, random.Random], str], ...] = (_insert, _delete, _swap, _repeat, _nest, _digit)


def mutated(text: str, others: list[str], draw: random.Random) -> str:
    """The text after one to five changes, sometimes spliced with another answer; at most 5,000 characters."""
    for _ in range(draw.randrange(1, 6)):
        text = draw.choice(_CHANGES)(text, draw)
        if draw.random() < 0.1:
            other = draw.choice(others)
            text = text[: draw.randrange(len(text) + 1)] + other[draw.randrange(len(other)) :]
        text = text[:5_000]
    return text
