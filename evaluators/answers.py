"""Extraction of the final answer from a reasoning text, such as a box at its end."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from atts.core import AnswerKind
from atts.errors import OptionError
from atts.evaluators.programs import find_program
from atts.evaluators.syntax.vocabulary import Tables

_DATA = Tables(Path(__file__).with_name("answers.toml"))
PATTERNS = _DATA.patterns()  # the regular expressions in the file answers.toml, by name
OPENING = re.compile(r"\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_PLACEHOLDERS = {"", *_DATA.table("placeholders", list[str])}

Fallback = Literal["none", "statement", "number"]
Rule = Literal["given", "program", "box", "marker", "statement", "number", "cut", "none"]
# If a text is longer, only this number of characters at its end is searched for an answer.
MOST_CHARACTERS = 1_000_000
_TAIL = 4_000  # only this number of last characters is searched for a sentence with a value
_NUMBER = PATTERNS["number"]
_MATHS = PATTERNS["span"]
_RUN = PATTERNS["run"]
_STATES = PATTERNS["states"]
_CORRECTION = PATTERNS["correction"]
_FOREIGN = PATTERNS["foreign"]
_LETTER = PATTERNS["letter"]
_BLANKS = dict.fromkeys(map(ord, "\r\t\f\v\x1c\x1d\x1e\x1f\x85\xa0\u2028\u2029"), " ")
_BLANK_RUN = re.compile(" {3,}")
_LINE_RUN = re.compile(r"\n(?: {0,2}\n){2,}")
_CLOSINGS = {'"': r'(?<!\\)"', "'": "'", "[": r"\]"}


# ---- LaTeX boxes, such as \boxed{5}


class Box(NamedTuple):
    """A complete LaTeX box: its content, and the string indices where the box starts and ends."""

    content: str
    start: int
    end: int


def closing(text: str, at: int) -> int | None:
    """Return the index after the brace that closes a group, or None if the group is never closed.
    `at` is the index after the group's opening brace.
    """
    depth = 1
    while depth:
        mark = _BRACE.search(text, at)
        if mark is None:
            return None
        at = mark.end()
        depth += (mark[0] == "{") - (mark[0] == "}")
    return at


def boxes(text: str) -> tuple[list[Box], int | None]:
    """Return the complete boxes of a text, and the start index of the first box that is never
    closed, or None.

    A box inside another box counts as part of the outer box's content.
    """
    complete: list[Box] = []
    at = 0
    while (start := PATTERNS["box"].search(text, at)) is not None:
        at = start.end()
        # "boxed" at the end of a longer word, such as "unboxed", does not begin a box.
        is_word_end = start.start() > 0 and text[start.start() - 1].isalpha()
        if is_word_end and not start[0].startswith("\\"):
            continue
        brace = OPENING.match(text, at)
        if brace is None and not start[0].startswith("\\"):
            continue  # "boxed" without a brace is an ordinary word, as in "the value boxed is 18"
        if brace is None:
            bare = PATTERNS["bare"].match(text, at)
            if bare:
                complete.append(Box(bare[1], start.start(), bare.end()))
                at = bare.end()
            continue
        end = closing(text, brace.end())
        if end is None:
            return complete, start.start()
        at = end
        complete.append(Box(text[brace.end() : at - 1], start.start(), at))
    return complete, None


def inner(content: str) -> str:
    """Return the content of a box without the commands of any boxes nested in it."""
    for _ in range(8):
        stripped = content.strip()
        inside, open_at = boxes(stripped)
        if open_at is not None or [(box.start, box.end) for box in inside] != [(0, len(stripped))]:
            break
        content = inside[0].content
    return PATTERNS["box_in_box"].sub("", content).strip()


def last_group(complete: list[Box], text: str) -> list[str]:
    """Return the content of the last nonempty box, and of the boxes before it that belong to the
    same answer.

    Boxes belong together if only a comma or a word such as "and" is between them. Placeholders, and
    boxes after a word such as "not", are skipped. Repeated contents are returned once.
    """
    group: list[str] = []
    begins = 0
    for box in reversed(complete):
        content = inner(box.content) if "box" in box.content else box.content.strip()
        before = text[max(0, box.start - 24) : box.start]
        if content.lower() in _PLACEHOLDERS or PATTERNS["denied_box"].search(before):
            continue
        # Boxes belong together if only a comma or "and" is between them.
        gap = text[box.end : begins]
        plain = " ".join(PATTERNS["gap_noise"].sub(" ", gap[:81]).split())
        if group and (len(gap) > 80 or not PATTERNS["gap"].fullmatch(plain)):
            break
        group.insert(0, content)
        begins = box.start
    return list(dict.fromkeys(group))


# ---- extracting the answer from a text


@dataclass(frozen=True, slots=True)
class Extraction:
    """An extracted answer, with the name of the rule that found it.

    If a box was opened but never closed, the answer is None and the rule is "cut".
    """

    answer: str | None
    rule: Rule


def extract(
    text: str, kind: AnswerKind = "math", *, fallback: Fallback = "statement"
) -> str | None:
    """Return the final answer of a reasoning text, or None if the text has no answer.

    The answer is the last box that is not empty. If the text joins the last boxes, as in
    "\\boxed{3} and \\boxed{5}", the answer consists of all joined boxes. Without a box, the answer
    is the value after an explicit mark, such as "Answer: 5" or "#### 5".

    Without a box and a mark, the default `fallback` reads the value that the last sentence states.
    With fallback="number", the last number of the text is read if no sentence states a value. A
    text with a box that is never closed has no answer.

    >>> extract(r"So $x = \\boxed{\\frac{1}{2}}$.")
    '\\\\frac{1}{2}'
    """
    return extraction(text, kind, fallback=fallback).answer


def extraction(
    text: str, kind: AnswerKind = "math", *, fallback: Fallback = "statement"
) -> Extraction:
    """Return the answer that `extract` returns, with the name of the rule that found it.

    A box is preferred to a mark such as "Answer:", and a mark to the statement or number that
    `fallback` allows. Raises OptionError for an unknown kind or fallback.
    """
    for name, asked, known in (("kind", kind, AnswerKind), ("fallback", fallback, Fallback)):
        if asked not in get_args(known):
            raise OptionError(f"{name} {asked}", f"is not a {name}", get_args(known))
    if kind == "code":
        program = find_program(text[-MOST_CHARACTERS:])
        return Extraction(program, "none" if program is None else "program")
    text = _final_part(_first_turn(_with_plain_blanks(text[-MOST_CHARACTERS:])))
    firsts = [mark.end() for name in ("marks", "box") if (mark := PATTERNS[name].search(text))]
    # After the answer, some models write a second question. Ignore the text from there on.
    again = PATTERNS["again"].search(text, min(firsts)) if firsts else None
    if again:
        text = text[: again.start()]
    complete, open_at = boxes(text) if firsts else ([], None)
    group = last_group(complete, text)
    if kind == "choice" and group and not any(map(_has_choice, group)):
        # The problem has choices, but the box does not contain a letter. Search the text for the
        # letter of the choice.
        choice = _stated_choice(text, fallback)
        if choice is not None:
            return choice
    if group:
        # After the last box, the text may still say "the final answer is ...". That value has
        # priority.
        after = text[complete[-1].end :]
        final = marked(after, kind) if PATTERNS["final"].search(after) else None
        if final is not None:
            return Extraction(final, "marker")
        return Extraction(", ".join(group), "box")
    whole = PATTERNS["cut_box"].sub("", text) if open_at is None else text[:open_at]
    answer = marked(whole, kind) if firsts else None
    if answer == "":
        return Extraction(None, "cut")
    if answer is not None:
        return Extraction(answer, "marker")
    if len(whole) < len(text) or is_cut(text):
        return Extraction(None, "cut")
    if fallback != "none":
        answer = stated(text, kind)
        if answer is not None:
            return Extraction(answer, "statement")
    if fallback == "number":
        answer = _last_number(text[-_TAIL:])
        if answer is not None:
            return Extraction(answer, "number")
    return Extraction(None, "none")


def _first_turn(text: str) -> str:
    """Return the model's own text, without the turns that it invented for the user after its
    answer.
    """
    opening = PATTERNS["opening"].match(text)
    begins = opening.end() if opening else 0
    for speaker in PATTERNS["turn"].finditer(text):
        if speaker.start() > begins:
            return text[: speaker.start()]
    return text


def _with_plain_blanks(text: str) -> str:
    """Shorten long runs of spaces and of empty lines in a text.

    Regular expressions that skip spaces would take quadratic time on long runs.
    """
    text = text.translate(_BLANKS)
    text = _BLANK_RUN.sub("  ", text)
    return _LINE_RUN.sub("\n\n", text)


def _final_part(text: str) -> str:
    """Return the text after the think block, if the block is closed and text follows it.

    The think block is skipped, because a box in it may be a guess that the model later rejected.
    """
    *_, end = [None, *PATTERNS["thought_end"].finditer(text)]
    content = text[end.end() :] if end else ""
    return content if content.strip() else text


def _has_choice(content: str) -> bool:
    plain = " ".join(PATTERNS["typesetting"].sub(" ", content).replace("\\", " ").split())
    return PATTERNS["choice_alone"].match(plain) is not None


def _stated_choice(text: str, fallback: Fallback) -> Extraction | None:
    """Return the choice letter that follows a mark such as "Answer:", or else one stated near the
    end of the text.

    Without a letter, the result is None.
    """
    answer = marked(text, "choice")
    if answer:
        return Extraction(answer, "marker")
    if fallback == "none":
        return None
    plain = " ".join(PATTERNS["typesetting"].sub(" ", text[-_TAIL:]).split())
    chosen = [*PATTERNS["chosen"].finditer(PATTERNS["denied"].sub(" ", plain))]
    return Extraction(_letter_of(chosen[-1]), "statement") if chosen else None


def _letter_of(match: re.Match[str]) -> str:
    letter: str = next(filter(None, match.groups()))
    return letter.upper()


def is_cut(text: str) -> bool:
    """Return True if a text was cut off, because it ends inside braces or inside a displayed
    formula.
    """
    tail = text[-_TAIL:].rpartition("\n\n")[2]
    braces = [mark[0] for mark in _BRACE.finditer(tail)]
    if braces.count("{") > braces.count("}"):
        return True
    return any(
        tail.rfind(opening) > tail.rfind(end) for opening, end in (("\\(", "\\)"), ("\\[", "\\]"))
    )


def unmarked(text: str) -> int:
    """Return the length of the prefix of a growing text that never needs to be searched for an
    answer again.

    The prefix ends at a line break, at least 400 characters before the end of the text and before
    the first turn, mark or box.
    """
    starts = [len(text)]
    begins = max(0, len(text) - MOST_CHARACTERS)
    for name in ("turn", "marks", "box"):
        match = PATTERNS[name].search(text, begins)
        if match:
            starts.append(match.start())
    return text.rfind("\n", 0, max(0, min(starts) - 400)) + 1


def marked(text: str, kind: AnswerKind) -> str | None:
    """Return the value after the last mark such as "Answer:" that has a value; None without one.

    The result is "" if the text breaks off inside the value.
    """
    for mark in [*PATTERNS["marks"].finditer(text)][:-21:-1]:
        sign = mark[0].rstrip()
        following = text[mark.end() : mark.end() + _TAIL]
        if len(following) < _TAIL and "\n\n" not in following.strip() and is_cut(following):
            return ""
        # If the marker is inside bold text, as in "**Answer: No**, since ...", the answer ends with
        # the bold text.
        if text[: mark.start()].endswith("**") and "**" not in sign:
            bold, ends, _ = following.partition("**")
            following = bold if ends and bold.strip() and "\n" not in bold else following
        following = PATTERNS["closed"].split(following, maxsplit=1)[0]
        if end_of_value := _CLOSINGS.get(sign[-1:]):
            following = re.split(end_of_value, following, maxsplit=1)[0]
            if sign[-1] == '"':
                following = following.replace("\\\\", "\\")
        elif sign[:1] in ("'", '"'):
            following = re.split(r"[,}\n]", following, maxsplit=1)[0]
        answer = _value(following.lstrip(), kind)
        if answer and answer.strip("$ "):
            return answer
    return None


def _value(following: str, kind: AnswerKind) -> str | None:
    """Return the value that directly follows a mark such as "Answer:", or else the value stated in
    the next sentence.
    """
    if kind == "choice":
        if several := PATTERNS["several_letters"].match(following[:200]):
            return ", ".join(re.findall("[A-J]", several[1]))
        return _choice(following[:200], first=True)
    following = PATTERNS["leading"].sub("", following.lstrip("*: \n"))
    following = _closed(following)
    lines = following.split("\n\n", 1)[0].replace("**", "")
    if PATTERNS["first_part"].match(lines):
        return _trimmed(" ".join(lines.split()))
    if run := _RUN.match(following):
        return _listed(run[0])
    if maths := _MATHS.match(following):
        return _inside(maths)
    sentence = PATTERNS["sentence_end"].split(following, maxsplit=1)[0]
    sentence = _CORRECTION.sub("", sentence.strip().strip("*").strip())
    if not sentence:
        return None
    if kind == "text":
        return sentence
    if not _has_words(sentence):
        return _trimmed(sentence)
    if polar := PATTERNS["polar"].match(sentence):
        return str(polar[1])
    if PATTERNS["quantified"].match(sentence):
        # keep the whole phrase: in "all n that are powers of 2", the answer is not 2
        return _trimmed(sentence)
    answer = _stated_in(sentence)
    if not answer and len(sentence.split()) <= 4 and len(sentence) < 60:
        return _trimmed(sentence)
    return answer or None


def _closed(following: str) -> str:
    """Remove the closing brace or "$" of a macro or formula that began before the mark.

    For example, the closing brace in "\\textbf{Answer: }" and in "\\mathbf{Answer: 13}" does not
    belong to the value.
    """
    opened = following.removeprefix("}")
    line, end, rest = opened.lstrip().partition("\n")
    depth = 0
    for mark in _BRACE.finditer(line):
        depth += (mark[0] == "{") - (mark[0] == "}")
        if depth < 0:
            line = line[: mark.start()]
            break
    if line.count("$") == 1 and line.rstrip(" .").endswith("$"):
        line = line.rstrip(" .")[:-1]
    return line + end + rest


def _listed(run: str) -> str:
    """Join the values of a list such as "$2$ or $3$" into one answer, without the dollar signs."""
    items = [_MATHS.sub(_inside, item[0]) for item in PATTERNS["item"].finditer(run)]
    return (" or " if re.search(r"\bor\b", run) else ", ").join(items)


def _inside(match: re.Match[str]) -> str:
    """Return a formula without its delimiters and without the punctuation at its end."""
    width = 2 if match[0][:2] in ("$$", "\\(", "\\[") else 1
    inside = match[0][width:-width].strip()
    return inside.rstrip(".,;").strip() if inside[-1:] in ".,;" and inside[-2:] != "\\," else inside


def _has_words(sentence: str) -> bool:
    return len(PATTERNS["wordy"].findall(sentence)) > 1 or bool(_FOREIGN.search(sentence))


def _trimmed(sentence: str) -> str:
    sentence = sentence.strip().rstrip(".,;`").strip().lstrip("`")
    if sentence.count("$") == 1 and not sentence.endswith("$"):
        return sentence.lstrip("$ ")
    return sentence


def _stated_in(sentence: str) -> str | None:
    """Return the values that a sentence states: those after its last "is" or "=", or else its last
    values.
    """
    for aside in (_CORRECTION, PATTERNS["adjunct"]):
        without = aside.sub("", sentence.rstrip(" .*"))
        if _NUMBER.search(without):
            sentence = without
    shares = PATTERNS["shares"].search(sentence)
    if shares:
        return str(shares[1])
    states = list(_STATES.finditer(sentence))
    spans = [*_MATHS.finditer(sentence)]
    *_, maths = [None, *spans]
    *_, run = [None, *(each for each in _RUN.finditer(sentence) if not _is_inside(each, spans))]
    if run and not _NUMBER.search(sentence[run.end() :]) and not _MATHS.search(sentence, run.end()):
        return _listed(run[0])
    if maths:
        rest = sentence[maths.end() :]
        if _inside(maths)[-1:] == "=":
            return _last_number(rest)
        if states and states[-1].start() >= maths.end() and _NUMBER.search(rest):
            return _last_number(rest)
        return _inside(maths)
    if not _NUMBER.search(sentence) and (told := PATTERNS["told"].search(sentence)):
        return _trimmed(told[1])
    *_, bold = ["", *re.findall(r"\*\*([^*]+)\*\*", sentence)]
    return _last_number(bold if _NUMBER.search(bold) else sentence)


def _is_inside(match: re.Match[str], spans: Sequence[re.Match[str]]) -> bool:
    """Return True if a match is inside one of these spans, as "2, 5" is inside $[2, 5)$."""
    return any(span.start() < match.start() and match.end() < span.end() for span in spans)


def _last_number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return _trimmed(numbers[-1]).lstrip("\\$").rstrip(",") if numbers else None


def stated(text: str, kind: AnswerKind) -> str | None:
    """Return the value stated by the last sentence of a text, or by a last line without words.

    Up to two closing remarks, such as "I hope this helps", are ignored. The result is None if the
    sentence states no value or the text is unfinished.
    """
    text = PATTERNS["end_of_proof"].sub("", text[-_TAIL:].rstrip("` \n")).rstrip("` \n")
    text = PATTERNS["end_in_maths"].sub(" ", text)
    # A displayed formula may span several lines. Join them, because the formula belongs to one
    # sentence.
    text = _MATHS.sub(lambda maths: " ".join(maths[0].split()), text)
    if kind == "choice":
        return _choice(text)
    if PATTERNS["unfinished"].search(text) or PATTERNS["thought"].search(text):
        return None
    sentences = [each for each in PATTERNS["sentence_end"].split(text) if each.strip(" .\n*")]
    for sentence in map(str.strip, sentences[:-4:-1]):
        if PATTERNS["aside"].match(sentence):
            continue
        nothing = PATTERNS["nothing"].search(sentence.rstrip(" .*"))
        if nothing:
            return str(next(filter(None, nothing.groups())))
        if not _has_words(sentence) and _NUMBER.search(sentence) and len(sentence) < 200:
            return _bare(sentence.splitlines()[-1])
        if _STATES.search(sentence) or _FOREIGN.search(sentence):
            return _stated_in(sentence)
        return None
    return None


def _bare(line: str) -> str | None:
    """Return the value of a line without words: its only formula, its list of values, or the part
    after "=".
    """
    *_, line = PATTERNS["arrow"].split(line)
    whole = _MATHS.match(line)
    if whole and not line[whole.end() :].strip(" .*"):
        # The line is one formula, so the formula is the value. [-2, 7] is an interval, not two
        # numbers.
        return _inside(whole)
    run = _RUN.search(line)
    if run and not _is_inside(run, [*_MATHS.finditer(line)]):
        return _listed(run[0])
    if maths := _MATHS.search(line):
        return _inside(maths)
    value = line.rpartition("=")[2]
    if value.isascii() and not re.search(r"\*\*|\]", value):
        return _trimmed(value)
    return _last_number(value)


def _choice(text: str, first: bool = False) -> str | None:
    """Return the letter of the choice that a text selects, such as B in "not A but B".

    If `first` is true, a letter at the start of the text takes precedence.
    """
    plain = " ".join(PATTERNS["typesetting"].sub(" ", text).split())
    only = plain.strip("().: ")
    if len(only) == 1:
        return only.upper() if only.upper() in "ABCDEFGHIJ" else None
    if first and (leading := PATTERNS["first_letter"].match(plain)):
        return leading[1]
    rest = PATTERNS["denied"].sub(" ", plain)
    settled = [*PATTERNS["settled"].finditer(rest)]
    if not settled:
        settled = [*PATTERNS["leading_letter"].finditer(text)][:1]
    if not settled:
        settled = [*_LETTER.finditer(rest)]
        # In a long text, a single capital letter is probably not the letter of a choice.
        if len(plain.split()) >= 13:
            return None
    if not settled:
        return None
    return _letter_of(settled[-1])
