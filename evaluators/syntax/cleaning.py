"""Normalisation of unicode, spacing and wrappers to one plain LaTeX spelling, in linear time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from atts.evaluators.verdict import Limits, TooLarge

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₓₐ", "0123456789+-=()nxa", strict=True))
_FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5),
    "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8), "⅐": (1, 7),
    "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρςστυφχψωϕϵϑΓΔΘΛΞΠΣΦΨΩ",
        [
            "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
            "nu", "xi", "pi", "rho", "sigma", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "phi", "epsilon",
            "theta", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega",
        ],
        strict=True,
    )
)  # fmt: skip
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r" \times ", "✕": r" \times ", "⋅": r" \cdot ",
    "·": r" \cdot ", "∙": r" \cdot ", "•": r" \cdot ", "∗": "*", "÷": r" \div ", "∕": "/", "⁄": "/", "√": r"\sqrt ",
    "∛": r"\sqrt[3] ", "∜": r"\sqrt[4] ", "≤": r" \le ", "⩽": r" \le ", "≦": r" \le ", "≥": r" \ge ", "⩾": r" \ge ",
    "≧": r" \ge ", "≠": r" \ne ", "≈": r" \approx ", "≅": r" \approx ", "≃": r" \approx ", "≡": r" \equiv ",
    "∞": r" \infty ", "∪": r" \cup ", "∩": r" \cap ", "∈": r" \in ", "∅": r" \emptyset ", "⌀": r" \emptyset ",
    "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "′": "'", "’": "'", "‘": "'", "″": "''", "“": '"', "”": '"',
    "±": r" \pm ", "∓": r" \mp ", "∠": r" \angle ", "△": r" \triangle ", "ℝ": r"\mathbb{R} ", "ℤ": r"\mathbb{Z} ",
    "ℕ": r"\mathbb{N} ", "ℚ": r"\mathbb{Q} ", "ℂ": r"\mathbb{C} ", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ",
    "→": r" \to ", "⇒": r" \Rightarrow ", "⇔": r" \Leftrightarrow ", "…": r"\ldots ", "⋯": r"\ldots ", "∣": "|",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "，": ", ", "、": ", ", "；": "; ",
    "：": ":", "（": "(", "）": ")", "【": "[", "】": "]", "。": ". ", "！": "!", "％": r"\%", "∖": r" \setminus ",
    "€": "", "£": "", "¥": "", "₹": "", "\u2061": "", "\u2062": " ", "\u2063": ",", "ℓ": r"\ell ", "ℏ": r"\hbar ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ", "⁠": "",
}  # fmt: skip
_TABLE = str.maketrans({**_SYMBOLS, **{char: f"\\{name} " for char, name in _GREEK.items()}})
_RAISED = re.compile("[" + "".join(_SUPERSCRIPTS) + "]+")
_LOWERED = re.compile("[" + "".join(_SUBSCRIPTS) + "]+")
_VULGAR = re.compile("[" + "".join(_FRACTIONS) + "]")
_RADICAL_BAR = re.compile(r"√\s*\(")


def ascii_maths(text: str) -> str:
    """The text with mathematical unicode spelled as LaTeX, foreign digits as ours, invisible characters gone."""
    if text.isascii():
        return (
            "".join(char if char >= " " and char != "\x7f" else " " for char in text) if _CONTROL.search(text) else text
        )
    text = _RADICAL_BAR.sub(r"\\sqrt (", text)
    text = _RAISED.sub(lambda found: "^{" + "".join(_SUPERSCRIPTS[char] for char in found[0]) + "}", text)
    text = _LOWERED.sub(lambda found: "_{" + "".join(_SUBSCRIPTS[char] for char in found[0]) + "}", text)
    text = _VULGAR.sub(lambda found: r" \frac{{{}}}{{{}}} ".format(*_FRACTIONS[found[0]]), text)
    return "".join(_plain(text.translate(_TABLE)))


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
_DIGIT_JOIN = re.compile(r"(?<=\d)\n\n(?=\d)")
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
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{0,40})\\(?:overline|bar)\s*\{?\s*(\d{1,40})\s*\}?")
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
        if text.count("\n\n") == 1:
            text = _DIGIT_JOIN.sub("", text)
        elif "\\" not in text and text.count("\n\n") > 1:
            text = re.sub(r"\n\s*\n\s*", ", ", text.strip())
    text = ascii_maths(text)
    text = _MERIDIEM.sub(r" \1m ", text) if "m." in text.lower() else text
    if "{,}" in text:
        text = _BRACED_COMMA.sub("", text).replace("{,}", ",")
    if "\\" in text:
        text = _latex(text)
    text = _EMPHASIS.sub(r"\1", text) if "**" in text else text
    text = _DOLLARS.sub(" ", text) if "$" in text or "\\" in text or "`" in text else text
    text = _SPACE_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), _BLANKS.sub(" ", text).strip())
    text = _TRAILING.sub("", text)
    text = unwrapped(text)
    if len(text) > limits.characters:
        raise TooLarge(f"{len(text)} characters")
    return text


def _latex(text: str) -> str:
    if r"\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = text.replace(r"\[", " ").replace(r"\]", " ") if r"\[" in text and r"\\[" not in text else text
    text = _SIZES.sub("", text)
    text = _TIGHT_COMMA.sub("", text)
    text = _THIN_THOUSANDS.sub(lambda found: found[0].replace(r"\,", ""), text)
    text = _REPEATING.sub(_repeated, _NEGATIVE_SPACE.sub("", text))
    text = _SPACES.sub(" ", text)
    return text


def _repeated(found: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction it denotes."""
    whole, fixed, cycle = found.groups()
    scale, nines = 10 ** len(fixed), 10 ** len(cycle) - 1
    top = int(whole + fixed or "0") * nines + int(cycle)
    return f"({top}/{scale * nines})"


def joined_thousands(text: str) -> str:
    """The text with 1,234,567 read as one number."""
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)


def spaceless(text: str) -> str:
    """The text without spaces, save those that keep words and numbers apart."""
    return _IDLE_BLANK.sub("", text.strip())


_IDLE_BLANK = re.compile(r"\s+(?![A-Za-z0-9.])|(?<![A-Za-z0-9.])\s+")
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
