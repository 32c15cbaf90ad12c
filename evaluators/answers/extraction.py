"""Extraction of the final answer from a reasoning text: boxed, after a mark, in a last sentence, or
the last number.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from atts.core import AnswerKind
from atts.errors import OptionError
from atts.evaluators.syntax.vocabulary import Tables

_DATA = Tables("answers.toml")
PATTERNS = _DATA.patterns()  # regular expressions that answers are found by
OPENING = re.compile(r"\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_PLACEHOLDERS = {"", *_DATA.table("placeholders", list[str])}


class Box(NamedTuple):
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
    """The boxes of a text, and where one begins that is never closed; a box that contains boxes
    counts once.
    """
    found: list[Box] = []
    at = 0
    while (start := PATTERNS["box"].search(text, at)) is not None:
        at = start.end()
        # "unboxed"
        if (
            not start[0].startswith("\\")
            and start.start() > 0
            and text[start.start() - 1].isalpha()
        ):
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


def last_group(found: list[Box], text: str) -> list[str]:
    """The contents of the last box that says something, or of the last few that the text joins,
    repeats left out.
    """
    group: list[str] = []
    begins = 0
    for box in reversed(found):
        content = inner(box.content) if "box" in box.content else box.content.strip()
        before = text[max(0, box.start - 24) : box.start]
        if content.lower() in _PLACEHOLDERS or PATTERNS["denied_box"].search(before):
            continue
        gap = text[box.end : begins]  # a comma or "and" joins two boxes
        plain = " ".join(PATTERNS["gap_noise"].sub(" ", gap[:81]).split())
        if group and (len(gap) > 80 or not PATTERNS["gap"].fullmatch(plain)):
            break
        group.insert(0, content)
        begins = box.start
    return list(dict.fromkeys(group))


Fallback = Literal["none", "statement", "number"]
Rule = Literal["given", "box", "marker", "statement", "number", "cut", "none"]
_TAIL = 4_000  # characters at the end that are looked at for a statement
_NUMBER, _MATHS, _RUN, _STATES, _CORRECTION, _FOREIGN, _LETTER = (
    PATTERNS[name]
    for name in ("number", "span", "run", "states", "correction", "foreign", "letter")
)
_CLOSINGS = {'"': r'(?<!\\)"', "'": "'", "[": r"\]"}


@dataclass(frozen=True, slots=True)
class Extraction:
    """An answer and what it was found by; None with the rule "cut" when a box was begun and never
    closed.
    """

    answer: str | None
    rule: Rule


def extract(
    text: str, kind: AnswerKind = "math", *, fallback: Fallback = "statement"
) -> str | None:
    """The final answer of a reasoning text, None when it gives none.

    The last box that is not empty counts, or the last few when the text joins them ("\\boxed{3} and
    \\boxed{5}"). Without a box an explicit mark counts ("Answer: 5", "#### 5"), then with the
    default fallback a last sentence that states a value, and with fallback="number" the last number
    anywhere. A cut box is no answer.

    >>> extract(r"So $x = \\boxed{\\frac{1}{2}}$.")
    '\\\\frac{1}{2}'
    """
    return extraction(text, kind, fallback=fallback).answer


def extraction(
    text: str, kind: AnswerKind = "math", *, fallback: Fallback = "statement"
) -> Extraction:
    """As extract, with the rule that found the answer: boxes first, then marks, then what
    `fallback` allows.
    """
    for name, asked, known in (("kind", kind, AnswerKind), ("fallback", fallback, Fallback)):
        if asked not in get_args(known):
            raise OptionError(f"{name} {asked}", f"is not a {name}", get_args(known))
    speakers = (each.start() for each in PATTERNS["turn"].finditer(text))
    text = text[
        : next((start for start in speakers if not PATTERNS["opening"].match(text[:start])), None)
    ]
    firsts = [mark.end() for name in ("marks", "box") if (mark := PATTERNS[name].search(text))]
    # a question that is asked after an answer
    again = PATTERNS["again"].search(text, min(firsts)) if firsts else None
    text = text[: again.start()] if again else text
    found, open_at = boxes(text) if firsts else ([], None)
    if group := last_group(found, text):
        after = text[found[-1].end :]  # which may name another value as the final answer
        final = marked(after, kind) if PATTERNS["final"].search(after) else None
        return Extraction(", ".join(group), "box") if final is None else Extraction(final, "marker")
    whole = PATTERNS["cut_box"].sub("", text) if open_at is None else text[:open_at]
    if firsts and (said := marked(whole, kind)) is not None:
        return Extraction(said, "marker")
    if len(whole) < len(text):
        return Extraction(None, "cut")
    if fallback != "none" and (said := stated(text, kind)) is not None:
        return Extraction(said, "statement")
    if fallback == "number" and (said := _last_number(text[-_TAIL:])) is not None:
        return Extraction(said, "number")
    return Extraction(None, "none")


def unmarked(text: str) -> int:
    """How much of a text holds no answer however it goes on: whole lines, 400 characters before a
    turn, mark or box.
    """
    found = [at.start() for name in ("turn", "marks", "box") if (at := PATTERNS[name].search(text))]
    return text.rfind("\n", 0, max(0, min(found, default=len(text)) - 400)) + 1


def marked(text: str, kind: AnswerKind) -> str | None:
    """What follows the last explicit mark such as "Answer:", "####" or a tag that has something
    after it.
    """
    for mark in [*PATTERNS["marks"].finditer(text)][:-21:-1]:
        said = mark[0].rstrip()
        following = PATTERNS["closed"].split(text[mark.end() : mark.end() + _TAIL], maxsplit=1)[0]
        if closing := _CLOSINGS.get(said[-1:]):
            following = re.split(closing, following, maxsplit=1)[0].replace(
                "\\\\", "\\" if said[-1] == '"' else "\\\\"
            )
        elif said[:1] in ("'", '"'):
            following = re.split(r"[,}\n]", following, maxsplit=1)[0]
        if found := _value(following.lstrip(), kind):
            return found
    return None


def _value(following: str, kind: AnswerKind) -> str | None:
    """The value at the start of what follows a mark, or in its first sentence."""
    if kind == "choice":
        return _choice(following[:200], first=True)
    following = PATTERNS["leading"].sub("", following.lstrip("*: \n"))
    if run := _RUN.match(following):
        return _listed(run[0])
    if maths := _MATHS.match(following):
        return _inside(maths)
    sentence = _CORRECTION.sub(
        "", PATTERNS["sentence_end"].split(following, maxsplit=1)[0].strip().strip("*").strip()
    )
    if not sentence:
        return None
    if kind == "text":
        return sentence
    if not _has_words(sentence):
        return _trimmed(sentence)
    return _stated_in(sentence) or (
        _trimmed(sentence) if len(sentence.split()) <= 4 and len(sentence) < 60 else None
    )


def _listed(run: str) -> str:
    """Several values, each out of its dollar signs, as one answer."""
    items = [_MATHS.sub(_inside, found[0]) for found in PATTERNS["item"].finditer(run)]
    return (" or " if re.search(r"\bor\b", run) else ", ").join(items)


def _inside(found: re.Match[str]) -> str:
    """What stands between the signs that set off maths."""
    return (
        found[0][2:-2].strip() if found[0][:2] in ("$$", "\\(", "\\[") else found[0][1:-1].strip()
    )


def _has_words(sentence: str) -> bool:
    return len(PATTERNS["wordy"].findall(sentence)) > 1 or bool(_FOREIGN.search(sentence))


def _trimmed(sentence: str) -> str:
    sentence = sentence.strip().rstrip(".,;`").strip().lstrip("`")
    return (
        sentence.lstrip("$ ")
        if sentence.count("$") == 1 and not sentence.endswith("$")
        else sentence
    )


def _stated_in(sentence: str) -> str | None:
    """The value or values a sentence states: what comes after its last "is" or "=", else its last
    ones.
    """
    if _NUMBER.search(corrected := _CORRECTION.sub("", sentence)):
        sentence = corrected
    states = list(_STATES.finditer(sentence))
    *_, maths = [None, *_MATHS.finditer(sentence)]
    *_, run = [None, *_RUN.finditer(sentence)]
    if run and not _NUMBER.search(sentence[run.end() :]) and not _MATHS.search(sentence, run.end()):
        return _listed(run[0])
    if maths:
        rest = sentence[maths.end() :]
        if _inside(maths)[-1:] == "=":
            return _last_number(rest)
        later = states and states[-1].start() >= maths.end() and _NUMBER.search(rest)
        return _inside(maths) if not later else _last_number(rest)
    *_, bold = ["", *re.findall(r"\*\*([^*]+)\*\*", sentence)]
    return _last_number(bold if _NUMBER.search(bold) else sentence)


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return _trimmed(found[-1]).lstrip("\\$").rstrip(",") if found else None


def stated(text: str, kind: AnswerKind) -> str | None:
    """The value the last sentence states, or a last line that is nothing but one; None otherwise."""
    text = text[-_TAIL:].rstrip("` \n")
    if kind == "choice":
        return _choice(text)
    for sentence in [
        each.strip() for each in PATTERNS["sentence_end"].split(text) if each.strip(" .\n*")
    ][:-4:-1]:
        if PATTERNS["aside"].match(sentence):
            continue
        if not _has_words(sentence) and _NUMBER.search(sentence) and len(sentence) < 200:
            return _bare(sentence.splitlines()[-1])
        return (
            _stated_in(sentence) if _STATES.search(sentence) or _FOREIGN.search(sentence) else None
        )
    return None


def _bare(line: str) -> str | None:
    """A line without words: its maths, its values, what its last = gives, or its last number."""
    if run := _RUN.search(line):
        return _listed(run[0])
    if maths := _MATHS.search(line):
        return _inside(maths)
    value = line.rpartition("=")[2]
    return (
        _trimmed(value)
        if value.isascii() and not re.search(r"\*\*|\]", value)
        else _last_number(value)
    )


def _choice(text: str, first: bool = False) -> str | None:
    """The letter a text settles on, letters that it rules out left aside; the one at its start
    where `first`.
    """
    plain = " ".join(PATTERNS["typesetting"].sub(" ", text).split())
    if len(only := plain.strip("().: ")) == 1:
        return only.upper() if only.upper() in "ABCDEFGHIJ" else None
    if first and (leading := PATTERNS["first_letter"].match(plain)):
        return leading[1]
    rest = PATTERNS["denied"].sub(" ", plain)
    found = [*PATTERNS["settled"].finditer(rest)] or [*PATTERNS["leading_letter"].finditer(text)][
        :1
    ]
    found = found or [*_LETTER.finditer(rest)]
    is_clear = found and (len(plain.split()) < 13 or found[0].re is not _LETTER)
    return next(filter(None, found[-1].groups())).upper() if is_clear else None
