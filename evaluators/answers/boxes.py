"""Scanner for \\boxed and \\fbox: balanced braces, cut boxes told apart, cost proportional to new text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_START = re.compile(r"\\{0,2}(?:boxed|fbox|framebox)(?![a-zA-Z])")
_INNER = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)(?=\s*\{)")
_BARE = re.compile(r"\s*([^\s{}$\\.,;:!?)]+|\\[a-zA-Z]+)")
_OPENING = re.compile(r"\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Box:
    """A complete box: what it holds and where its text begins and ends."""

    content: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Scan:
    """Where a scan of growing text stands: the boxes found, and the box still open, if any."""

    at: int = 0
    open_at: int | None = None  # where the unfinished box's macro begins
    inside: int = 0  # where its content begins
    depth: int = 0


def scan(text: str, state: Scan, ended: bool) -> tuple[list[Box], Scan]:
    """The boxes completed after `state`, and the state to go on from; text before it is not looked at again.

    A box that contains boxes counts once, with its outer content. `ended` lets a box without braces be taken.
    """
    found: list[Box] = []
    at, open_at, inside, depth = state.at, state.open_at, state.inside, state.depth
    while True:
        if open_at is None:
            start = _START.search(text, at)
            if start is None or (start.end() == len(text) and not ended):
                at = max(at, len(text) - 12 if start is None else start.start() - 1)
                break
            if not start[0].startswith("\\") and start.start() > 0 and text[start.start() - 1].isalpha():  # "unboxed"
                at = start.end()
                continue
            brace = _OPENING.match(text, start.end())
            if brace is None:
                bare = _BARE.match(text, start.end())
                if not ended and (bare is None or bare.end() == len(text)):
                    at = max(at, start.start() - 1)  # the letter before it must stay in sight
                    break
                if bare is not None:
                    found.append(Box(bare[1], start.start(), bare.end()))
                at = bare.end() if bare else start.end()
                continue
            open_at, inside, depth, at = start.start(), brace.end(), 1, brace.end()
        mark = _BRACE.search(text, at)
        if mark is None:
            at = max(at, len(text) - (1 if text.endswith("\\") else 0))
            break
        at = mark.end()
        depth += (mark[0] == "{") - (mark[0] == "}")
        if depth == 0:
            found.append(Box(text[inside : mark.start()], open_at, mark.end()))
            open_at = None
    return found, Scan(at, open_at, inside, depth)


def inner(content: str) -> str:
    """The content of a box without further boxes around all of it."""
    for _ in range(8):
        stripped = content.strip()
        if _START.search(stripped) is None:
            break
        found, state = scan(stripped, Scan(), ended=True)
        if len(found) == 1 and state.open_at is None and found[0].start == 0 and found[0].end == len(stripped):
            content = found[0].content
        else:
            break
    return _INNER.sub("", content).strip()


_PLACEHOLDERS = frozenset(
    ["", "...", "\\ldots", "\\dots", "\\cdots", "…", "?", "answer", "your answer", "final answer", "\\text{answer}",
     "\\text{your answer}", "\\text{final answer}", "your final answer", "x.xx"]
)  # fmt: skip
_GAP_NOISE = re.compile(r"\\(?:text|textbf|mathrm|mbox|quad|qquad)(?![a-zA-Z])|\\[()\[\],;: ]|[${}\s~]+|\*\*")
_GAP = re.compile(
    r"(?:[^\s,;]+\s+){0,4}?(?:[,;]|and|or|&)(?:\s*(?:and|or|so|also))?(?:\s*[A-Za-z]\w{0,4}\s*=)?", re.IGNORECASE
)


def is_placeholder(content: str) -> bool:
    """Whether a box only shows where the answer is to go."""
    return content.lower() in _PLACEHOLDERS


def joins(gap: str) -> bool:
    """Whether the text between two boxes says that both belong to one answer, as a comma or "and" does."""
    if len(gap) > 80:
        return False
    plain = " ".join(_GAP_NOISE.sub(" ", gap).split())
    return bool(_GAP.fullmatch(plain))


def final_boxes(text: str) -> list[str]:
    """The contents of the last box, or of the last boxes where the text joins them into one answer."""
    found, _ = scan(text, Scan(), ended=True)
    return last_group([box for box in found if not is_placeholder(box.content.strip())], text)


def last_group(boxes: list[Box], text: str) -> list[str]:
    """The contents of the last boxes that the text between them joins, repeats left out."""
    group: list[Box] = []
    for box in reversed(boxes):
        if group and not joins(text[box.end : group[0].start]):
            break
        group.insert(0, box)
    return list(dict.fromkeys(content for content in (inner(box.content) for box in group) if content))
