"""Normalisation of unicode, spacing and wrappers to one plain LaTeX spelling, in linear time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from atts.evaluators.syntax.words import spelled, table
from atts.evaluators.verdict import Limits, TooLarge

_SIGNS = spelled(table("signs", dict[str, str]))
_GREEK = spelled(table("greek", dict[str, str]))
_TABLE = str.maketrans(_SIGNS | {letter: f"\\{name} " for letter, name in _GREEK.items()})
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₓₐ]+")
_VULGAR = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒]")
_RADICAL_BAR = re.compile(r"√\s*\(")


def ascii_maths(text: str) -> str:
    """The text with mathematical unicode spelled as LaTeX, foreign digits as ours, invisible characters gone."""
    if text.isascii():
        return _CONTROL.sub(" ", text)
    text = _RADICAL_BAR.sub(r"\\sqrt (", text)
    text = _RAISED.sub(lambda found: f"^{{{_flat(found[0])}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{_flat(found[0])}}}", text)
    text = _VULGAR.sub(lambda found: r" \frac{{{}}}{{{}}} ".format(*_flat(found[0]).split("⁄")), text)
    return "".join(_plain(text.translate(_TABLE)))


def _flat(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).replace("−", "-")


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


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


_NEWLINE_JOIN = re.compile(r"\\\s*\n\s*\n\s*(?=[a-z])")
_LINE_OF_NUMBERS = re.compile(r"(?<=\d)\s*\n\s*\n\s*(?=-?\d)")
_SIZES = re.compile(
    r"\\(?:left|right|middle|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr)(?![a-zA-Z])\s*\.?"
)
_SPACES = re.compile(
    r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|thinspace|medspace|thickspace|enspace|displaystyle|textstyle|scriptstyle"
    r"|limits|nolimits|hfill|noindent|centering|par|newline|nonumber|normalsize|Large|large|small)(?![a-zA-Z])"
    r"|\\(?:hspace|vspace|hskip|phantom|hphantom|vphantom|label|tag)\*?\s*\{[^{}]*\}"
)
_NEGATIVE_SPACE = re.compile(r"(?<!\\)\\!\s*|\\negthinspace\s*")
_BLANKS = re.compile(r"\s+")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?:\s*\\!)?\s*(?=\d{3}(?!\d))")
_TIGHT_COMMA = re.compile(r"(?<=\d),\s*(?:\\!\s*)+(?=\d{3}(?!\d))")
_THIN_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:\\,\d{3})+(?!\d)")
_SPACE_THOUSANDS = re.compile(r"(?<![\d.,/] )(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/]| \d)(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d)")
_PAIR = re.compile(r"(?<=[(\[])\s*-?[1-9]\d{0,2},\d{3}\s*(?=[)\]])")
_REPEATING = re.compile(
    r"(?<![\d.])(\d{0,40})\.(\d{0,40})(?:\\(?:overline|bar|dot)\s*\{?\s*(\d{1,40})\s*\}?|\((\d{1,40})\))"
)
_TWO_DOTS = re.compile(r"\\dot\s*\{?\s*(\d)\s*\}?(\d{0,40})\\dot\s*\{?\s*(\d)\s*\}?")
_GOING_ON = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{0,40}?)(\d{1,20}?)(\3+)\s*(?:\.\.\.|\\[lc]?dots(?![a-z]))")
_FRACTION_CALL = re.compile(r"\b(?:Fraction|Rational)\s*\(\s*(-?\d+)\s*,\s*(\d+)\s*\)")
_PRICE = re.compile(r"(?<!\\)\$(?=\s*\d)")
_TEMPERATURE = re.compile(
    r"(?:(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\bdegrees?)\s*(?:\\(?:text|mathrm|rm)\s*\{\s*([CF])\s*\}|([CF])(?![a-zA-Z])"
    r"|(Celsius|Fahrenheit)\b))",
    re.IGNORECASE,
)
_ARC = re.compile(r"(\d+)\s*\^\s*\{?\s*\\circ\s*\}?\s*(\d\d?)\s*'(?!')(?:\s*(\d\d?)\s*'')?")
_BASIS = re.compile(
    r"\\(?:hat|vec|mathbf|boldsymbol|bm)\s*\{\s*(?:\\(?:mathbf|boldsymbol|bm)\s*\{)?\s*\\?([ijk])(?:math)?\s*\}\}?"
)
_NUMERAL = re.compile(r"\\(?:text|mathrm)\s*\{([0-9A-Fa-f]+)\}(?=\s*_)")
_STOPPED_LINE = re.compile(r"[.;,]\s*(?=\\end\{)")
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z(){}\[\]])")
_MERIDIEM = re.compile(r"\b([aApP])\.\s?[mM]\b\.?")
_EMPHASIS = re.compile(r"\*\*(.*?)\*\*", re.DOTALL)
_DOLLARS = re.compile(r"\\?\$|\\[()]|\\(?=\s*$)|`")
_TRAILING = re.compile(r"(?:[\s,;:]|(?<!\.)\.)+$")


def cleaned(text: str, limits: Limits) -> str:
    """One spelling of the answer: ASCII where possible, no sizes, dollars or spacing macros, thousands untouched.

    Raises TooLarge when more is left than the limits allow.
    """
    if len(text) > limits.raw_characters:
        raise TooLarge(f"{len(text)} characters")
    if "\n" in text:
        text = _NEWLINE_JOIN.sub(r"\\", text)
        text = _LINE_OF_NUMBERS.sub(", ", text.strip())
    if r"\$" in text:
        text = re.sub(r"\\\$(?=\s*\S)", r"\\usd ", text) if text.count(r"\$") % 2 else text
    if "$" in text and text.count("$") % 2:
        text = _PRICE.sub(r"\\usd ", text, count=1)
    text = ascii_maths(text)
    if "circ" in text or "egree" in text:
        text = _TEMPERATURE.sub(lambda found: f" deg{(found[1] or found[2] or found[3])[0].upper()} ", text)
    if "{i" in text or "{\\i" in text or "\\mathbf" in text:
        text = _BASIS.sub(r"\\vec{\1}", text) if len({*_BASIS.findall(text)}) > 1 else text
    text = _ARC.sub(_degrees, text) if "'" in text else text
    if "." in text:
        text = _GOING_ON.sub(_going_on, _REPEATING.sub(_repeated, _TWO_DOTS.sub(r"\\dot{\1\2\3}", text)))
    text = _FRACTION_CALL.sub(r"(\1/\2)", text) if "ational(" in text or "raction(" in text else text
    text = _MERIDIEM.sub(r" \1m ", text) if "m." in text.lower() else text
    if "{,}" in text:
        text = _BRACED_COMMA.sub("", text).replace("{,}", ",")
    if "\\" in text:
        text = _latex(text)
    text = _OUTWARD.sub(_inward, text) if "[" in text or "]" in text else text
    text = _EMPHASIS.sub(r"\1", text) if "**" in text else text
    text = _DOLLARS.sub(" ", text) if "$" in text or "\\" in text or "`" in text else text
    text = _SPACE_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), _BLANKS.sub(" ", text).strip())
    text = _TRAILING.sub("", text)
    text = unwrapped(text)
    if len(text) > limits.characters:
        raise TooLarge(f"{len(text)} characters")
    return text


def _latex(text: str) -> str:
    text = _STOPPED_LINE.sub(" ", text)
    if r"\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = text.replace(r"\[", " ").replace(r"\]", " ") if r"\[" in text and r"\\[" not in text else text
    text = _SIZES.sub("", text)
    if r"\," in text or r"\!" in text or r"\neg" in text:
        text = _TIGHT_COMMA.sub("", text)
        text = _THIN_THOUSANDS.sub(lambda found: found[0].replace(r"\,", ""), text)
        text = _NEGATIVE_SPACE.sub("", text)
    return _SPACES.sub(" ", _NUMERAL.sub(r"\1", text) if "_" in text else text)


def _degrees(found: re.Match[str]) -> str:
    """5 degrees, 30 minutes and 36 seconds of arc as 5.51 degrees."""
    degrees, minutes, seconds = (int(part or 0) for part in found.groups())
    return rf"(({degrees * 3600 + minutes * 60 + seconds})/3600)^\circ "


def _repeated(found: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction it denotes."""
    whole, fixed, cycle = found[1], found[2], found[3] or found[4]
    scale, nines = 10 ** len(fixed), 10 ** len(cycle) - 1
    top = int(whole + fixed or "0") * nines + int(cycle)
    return f"({top}/{scale * nines})"


def _going_on(found: re.Match[str]) -> str:
    """0.1666... as the fraction it denotes; a cycle shows when it is there twice, one digit three times."""
    whole, fixed, cycle, again = found.groups()
    if len(cycle + again) < 3:
        return found[0]
    scale, nines = 10 ** len(fixed), 10 ** len(cycle) - 1
    return f"({int(whole + fixed or '0') * nines + int(cycle)}/{scale * nines})"


def joined_thousands(text: str) -> str:
    """The text with 1,234,567 read as one number, (1,234) as two."""
    apart = _PAIR.sub(lambda found: found[0].replace(",", ", "), text)
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), apart)


def spaceless(text: str) -> str:
    """The text without spaces, save those that keep words and numbers apart."""
    return _IDLE_BLANK.sub("", text.strip())


_IDLE_BLANK = re.compile(r"\s++(?![A-Za-z0-9.])|(?<![A-Za-z0-9.\s])\s++")
_OUTWARD = re.compile(r"((?<=\\in)|(?<=cup)|(?<![\w)}\]]))([\[\]])(\s*[^\[\](),;]+[,;][^\[\](),;]+)([\[\]])(?![\w(])")


def _inward(found: re.Match[str]) -> str:
    """]2,5] as (2,5]."""
    return {"]": "(", "[": "["}[found[2]] + found[3] + {"[": ")", "]": "]"}[found[4]]


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
    level = lowest = 0
    for char in inside:
        level += (char in "({") - (char in ")}")
        lowest = min(lowest, level)
    if level != 0:
        return text
    keep = -lowest + 1  # brackets the inside closes before it opens its own, and one pair that may carry meaning
    drop = depth - keep
    return text[drop : len(text) - drop] if drop > 0 else text
