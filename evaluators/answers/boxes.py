"""Scanner for \\boxed and \\fbox: balanced braces, cut boxes told apart."""

import re
from dataclasses import dataclass

from atts.evaluators.syntax.vocabulary import Tables

_DATA = Tables("answers.toml")
PATTERNS = _DATA.patterns()
"""Regular expressions that answers are found by."""
OPENING, _BRACE = re.compile(r"\s*\{"), re.compile(r"\\.|[{}]", re.DOTALL)
_PLACEHOLDERS = {"", *_DATA.table("placeholders", list[str])}


@dataclass(frozen=True, slots=True)
class Box:
    """A complete box: what it holds and where its text begins and ends."""

    content: str
    start: int
    end: int


def closing(text: str, at: int) -> int | None:
    """Where the brace that is open at this place has been closed; None when it never is."""
    depth = 1
    while depth:
        mark = _BRACE.search(text, at)
        if mark is None:
            return None
        at = mark.end()
        depth += (mark[0] == "{") - (mark[0] == "}")
    return at


def boxes(text: str) -> tuple[list[Box], int | None]:
    """The boxes of a text, and where one begins that is never closed; a box that contains boxes counts once."""
    found: list[Box] = []
    at = 0
    while (start := PATTERNS["box"].search(text, at)) is not None:
        at = start.end()
        if not start[0].startswith("\\") and start.start() > 0 and text[start.start() - 1].isalpha():  # "unboxed"
            continue
        brace = OPENING.match(text, at)
        if brace is None:
            if bare := PATTERNS["bare"].match(text, at):
                found.append(Box(bare[1], start.start(), bare.end()))
                at = bare.end()
            continue
        end = closing(text, brace.end())
        if end is None:
            return found, start.start()
        at = end
        found.append(Box(text[brace.end() : at - 1], start.start(), at))
    return found, None


def inner(content: str) -> str:
    """The content of a box without further boxes around all of it."""
    for _ in range(8):
        stripped = content.strip()
        found, open_at = boxes(stripped)
        if open_at is not None or [(box.start, box.end) for box in found] != [(0, len(stripped))]:
            break
        content = found[0].content
    return PATTERNS["box_in_box"].sub("", content).strip()


def joins(gap: str) -> bool:
    """Whether the text between two boxes says that both belong to one answer, as a comma or "and" does."""
    plain = " ".join(PATTERNS["gap_noise"].sub(" ", gap[:81]).split())
    return len(gap) <= 80 and bool(PATTERNS["gap"].fullmatch(plain))


def last_group(found: list[Box], text: str) -> list[str]:
    """The contents of the last box that says something, or of the last few that the text joins, repeats left out."""
    group: list[str] = []
    begins = 0
    for box in reversed(found):
        content = inner(box.content) if "box" in box.content else box.content.strip()
        if content.lower() in _PLACEHOLDERS:
            continue
        if group and not joins(text[box.end : begins]):
            break
        group.insert(0, content)
        begins = box.start
    return list(dict.fromkeys(group))
