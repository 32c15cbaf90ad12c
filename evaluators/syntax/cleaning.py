"""Normalisation of unicode, spacing and wrappers to one plain LaTeX spelling, in linear time."""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from atts.evaluators.syntax.vocabulary import Tables, spelled, table
from atts.evaluators.verdict import Limits, TooLarge

_SIGNS = spelled(table("signs", dict[str, str]))
_GREEK = spelled(table("greek", dict[str, str]))
_REWRITES = Tables("rewrites.toml")
FORMS = _REWRITES.patterns("forms")
_BASIS, _CONTROL, _IDLE_BLANK = (FORMS[name] for name in ("basis", "control", "idle_blank"))
_TABLE = str.maketrans(_SIGNS | {letter: f"\\{name} " for letter, name in _GREEK.items()})


def ascii_maths(text: str) -> str:
    """The text with mathematical unicode spelled as LaTeX, foreign digits as ours, invisible characters gone."""
    if text.isascii():
        return _CONTROL.sub(" ", text)
    return "".join(_plain(_rewritten(text, _SIGNED).translate(_TABLE)))


def _flat(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).replace("−", "-")


def _plain(text: str) -> Iterator[str]:
    for char in text:
        if " " <= char < "\x7f":
            yield char
            continue
        category = unicodedata.category(char)
        if category in ("Cf", "Mn"):  # zero width, marks, direction
            continue
        if category[0] in "ZC":
            yield " "
        elif category == "Nd":
            yield str(unicodedata.digit(char))
        else:
            folded = unicodedata.normalize("NFKC", char)
            yield folded if folded.isascii() and folded.isalnum() and category != "No" and category != "Nl" else char


def cleaned(text: str, limits: Limits) -> str:
    """One spelling of the answer: ASCII where possible, no sizes, dollars or spacing macros, thousands untouched.

    Raises TooLarge when more is left than the limits allow.
    """
    if len(text) > limits.raw_characters:
        raise TooLarge(f"{len(text)} characters")
    text = _rewritten(text, _LINES)
    if text.count(r"\$") % 2:
        text = re.sub(r"\\\$(?=\s*\S)", r"\\usd ", text)
    if text.count("$") % 2:
        text = re.sub(r"(?<!\\)\$(?=\s*\d)", r"\\usd ", text, count=1)
    text = _rewritten(unwrapped(_rewritten(ascii_maths(text), _STEPS)), _LAST)
    if len(text) > limits.characters:
        raise TooLarge(f"{len(text)} characters")
    return text


Step = tuple[list[str], bool, re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _rewritten(text: str, steps: Sequence[Step]) -> str:
    for marks, is_without, pattern, put in steps:
        if not marks or any(mark in text for mark in marks) != is_without:
            text = pattern.sub(put, text)
    return text


def _arc(found: re.Match[str]) -> str:
    """5 degrees, 30 minutes and 36 seconds of arc as a fraction of seconds."""
    degrees, minutes, seconds = (int(part or 0) for part in found.groups())
    return rf"(({degrees * 3600 + minutes * 60 + seconds})/3600)^\circ "


def _repeating(found: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction it denotes."""
    whole, fixed, cycle = found[1], found[2], found[3] or found[4]
    scale, nines = 10 ** len(fixed), 10 ** len(cycle) - 1
    return f"({int(whole + fixed or '0') * nines + int(cycle)}/{scale * nines})"


_COMPUTED: dict[str, Callable[[re.Match[str]], str]] = {
    "raised": lambda found: f"^{{{_flat(found[0])}}}",
    "lowered": lambda found: f"_{{{_flat(found[0])}}}",
    "vulgar": lambda found: r" \frac{{{}}}{{{}}} ".format(*_flat(found[0]).split("⁄")),
    "temperature": lambda found: f" deg{(found[1] or found[2] or found[3])[0].upper()} ",
    # every i, j and k in bold or under a hat, where there are two of them
    "unit_vectors": lambda found: (
        _BASIS.sub(r"\\vec{\1}", found[0]) if len({*_BASIS.findall(found[0])}) > 1 else found[0]
    ),
    "arc": _arc,
    "repeating": _repeating,
    # 0.1666...: a cycle shows when it is there twice, one digit three times
    "going_on": lambda found: _repeating(found) if len(found[3] + found[4]) > 2 else found[0],
    "inward": lambda found: {"]": "(", "[": "["}[found[2]] + found[3] + {"[": ")", "]": "]"}[found[4]],  # ]2,5]
    "without_spaces": lambda found: found[0].replace(" ", ""),
    "without_thin_spaces": lambda found: found[0].replace(r"\,", ""),
}


def _steps(name: str) -> list[Step]:
    """The steps of a stage: marks, whether they must be missing, what is found and what is put instead."""
    rows = _REWRITES.table(name, list[tuple[str, str, str]])
    puts = [_COMPUTED[put[1:]] if put[:1] == "=" else put for _, _, put in rows]
    marks = [[when] if when == "\n" else when.removeprefix("!").split() for when, _, _ in rows]
    found = zip(marks, rows, puts, strict=True)
    return [(mark, row[0][:1] == "!", re.compile(row[1]), put) for mark, row, put in found]


_LINES, _SIGNED, _STEPS, _LAST = map(_steps, ("lines", "signs", "steps", "last"))


def joined_thousands(text: str) -> str:
    """The text with 1,234,567 read as one number, (1,234) as two."""
    apart = FORMS["pair"].sub(lambda found: found[0].replace(",", ", "), text)
    return FORMS["thousands"].sub(lambda found: found[0].replace(",", ""), apart)


def spaceless(text: str) -> str:
    """The text without spaces, save those that keep words and numbers apart."""
    return _IDLE_BLANK.sub("", text.strip())


_PAIRS = {"(": ")", "{": "}"}


def unwrapped(text: str) -> str:
    """The text without redundant outer brackets, however many, each pair dropped only when it encloses everything."""
    text = text.strip()
    depth = 0
    while depth < len(text) // 2 and text[depth] in _PAIRS and text[-1 - depth] == _PAIRS[text[depth]]:
        depth += 1
    if depth < 2:  # one pair can mean something: (C), {1,2}
        return text
    inside = text[depth : len(text) - depth]
    levels = list(accumulate(((char in "({") - (char in ")}") for char in inside), initial=0))
    # kept: brackets that the inside closes before it opens its own, and one pair that may carry meaning
    drop = depth + min(levels) - 1 if levels[-1] == 0 else 0
    return text[drop : len(text) - drop] if drop > 0 else text
