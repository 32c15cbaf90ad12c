"""Read an answer: convert it to one plain LaTeX spelling, then parse it in each possible way."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from atts.evaluators.answers import boxes, last_group
from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.parser import Parser, tokens
from atts.evaluators.syntax.tree import Node, number, symbol
from atts.evaluators.syntax.vocabulary import Tables, spelled, table, unit_at
from atts.evaluators.verdict import Limits, Malformed, TooLarge, Undecided, UnknownWords

_SIGNS = spelled(table("signs", dict[str, str]))
_GREEK = spelled(table("greek", dict[str, str]))
_REWRITES = Tables("rewrites.toml")
FORMS = _REWRITES.patterns("forms")
_BASIS = FORMS["basis"]
_CHOICE = FORMS["choice"]
_MACRO = FORMS["macro"]
_TABLE = str.maketrans(_SIGNS | {letter: f"\\{name} " for letter, name in _GREEK.items()})
_PAIRS = {"(": ")", "{": "}"}


# ---- cleaning the text of an answer


def cleaned(text: str, limits: Limits) -> str:
    """Return the answer in one spelling, without dollar signs and without commands for size and
    spacing.

    Unicode characters are replaced by ASCII if possible. Thousands separators are kept. Raises
    TooLarge if the cleaned answer is longer than the limits allow.
    """
    if len(text) > limits.raw_characters:
        raise TooLarge(f"{len(text)} characters")
    text = _rewritten(text, _LINES)
    if text.count(r"\$") % 2:
        text = re.sub(r"\\\$(?=\s*\S)", r"\\usd ", text)
    if text.count("$") % 2:
        text = re.sub(r"(?<!\\)\$(?=\s*\d)", r"\\usd ", text, count=1)
    if not text.isascii():
        text = "".join(_plain(_rewritten(text, _SIGNED).translate(_TABLE)))
    text = FORMS["control"].sub(" ", text)
    text = _rewritten(unwrapped(_rewritten(text, _STEPS)), _LAST)
    if len(text) > limits.characters:
        raise TooLarge(f"{len(text)} characters")
    return text


def spaceless(text: str) -> str:
    """Return the text without spaces, except spaces that separate words or numbers."""
    return FORMS["idle_blank"].sub("", text.strip())


def unwrapped(text: str) -> str:
    """Return the text without superfluous brackets around it, so that ((1,2)) becomes (1,2).

    A single pair is kept, because it may have a meaning, as in (C) or {1,2}.
    """
    text = text.strip()
    depth = 0
    while (
        depth < len(text) // 2 and text[depth] in _PAIRS and text[-1 - depth] == _PAIRS[text[depth]]
    ):
        depth += 1
    if depth < 2:  # a single pair of brackets may have a meaning, as in (C) or {1,2}
        return text
    inside = text[depth : len(text) - depth]
    levels = list(accumulate(((char in "({") - (char in ")}") for char in inside), initial=0))
    # Keep the outer brackets that close inside the text, as in (1)(2). Of the others keep one pair,
    # because it may have a meaning.
    drop = depth + min(levels) - 1 if levels[-1] == 0 else 0
    return text[drop : len(text) - drop] if drop > 0 else text


def unboxed(text: str) -> str:
    """Return the contents of the boxes in an answer, joined by commas.

    A text without boxes is returned unchanged. Raises Malformed if a box is cut off.
    """
    if "box" not in text:
        return text
    text = text.replace("\\beginboxed", "\\boxed")
    complete, open_at = boxes(text)
    contents = last_group(complete, text)
    if contents:
        return ", ".join(contents)
    if open_at is not None:
        raise Malformed("an incomplete box")
    return FORMS["empty_box"].sub("", text)


def _flat(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).replace("−", "-")


def _plain(text: str) -> Iterator[str]:
    """Yield the visible characters of a text, as ASCII where possible."""
    for char in text:
        if " " <= char < "\x7f":
            yield char
            continue
        category = unicodedata.category(char)
        # Skip invisible characters (category Cf) and combining accents (category Mn).
        if category in ("Cf", "Mn"):
            continue
        if category[0] in "ZC":
            yield " "
        elif category == "Nd":
            yield str(unicodedata.digit(char))
        else:
            folded = unicodedata.normalize("NFKC", char)
            is_plain = folded.isascii() and folded.isalnum() and category not in ("No", "Nl")
            yield folded if is_plain else char


# ---- rewriting the text by the replacements in rewrites.toml


class Step(NamedTuple):
    """A replacement of a pattern in a text.

    It is tried only if the text contains one of the strings `marks`. If `is_without` is true, it is
    tried only if the text contains none of them.
    """

    marks: list[str]
    is_without: bool
    pattern: re.Pattern[str]
    put: str | Callable[[re.Match[str]], str]


class Stage(NamedTuple):
    """One stage of rewriting: its replacements in order, and for each mark the indices of the
    replacements to try in a text that contains this mark.
    """

    steps: list[Step]
    marks: tuple[str, ...]
    steps_of: dict[str, list[int]]
    always: list[int]  # indices of the steps whose pattern is searched in every text


def _rewritten(text: str, stage: Stage) -> str:
    """Apply the replacements of a stage to a text.

    First the marks of all replacements are searched, because most replacements do not apply to a
    short answer. After the text has changed, each later replacement searches for its own marks.
    """
    tried = set(stage.always)
    for mark in [mark for mark in stage.marks if mark in text]:
        tried.update(stage.steps_of[mark])
    for at in sorted(tried):
        marks, is_without, pattern, put = stage.steps[at]
        if is_without and any(mark in text for mark in marks):
            continue
        changed = pattern.sub(put, text)
        if changed != text:
            return _rewritten_from(changed, stage.steps[at + 1 :])
    return text


def _rewritten_from(text: str, steps: list[Step]) -> str:
    for marks, is_without, pattern, put in steps:
        is_tried = is_without or not marks
        for mark in marks:  # this loop is much faster than `any` with a generator expression
            if mark in text:
                is_tried = not is_without
                break
        if is_tried:
            text = pattern.sub(put, text)
    return text


def _parts(match: re.Match[str]) -> str:
    """Write labelled parts, such as "(a) 3 (b) 5", as a=3, b=5.

    The text stays unchanged if the letters do not label parts.
    """
    _, *pieces = FORMS["part"].split(match[0])
    marks = " ".join(pieces[::2])
    values = [piece.strip(" ,;.\n") for piece in pieces[1::2]]
    rows = ("a b c d e", "i ii iii iv", "1 2 3 4 5")
    if " " not in marks or not any(row.startswith(marks) for row in rows):
        return match[0]
    if not all(value and value[-1] not in "+-*/^=(" for value in values):
        return match[0]
    return ", ".join(f"{name}={value}" for name, value in zip("abcde", values, strict=False))


def _unit_vectors(match: re.Match[str]) -> str:
    """Mark the bold or hatted letters i, j and k as unit vectors, if the text has at least two of
    them.
    """
    if len({*_BASIS.findall(match[0])}) > 1:
        return _BASIS.sub(r"\\vec{\1}", match[0])
    return match[0]


def _vector(match: re.Match[str]) -> str:
    """Write a sum of unit vectors as a tuple of coefficients. A vector without k has two
    coefficients.
    """
    sizes = {name: f"{size}(1)" for size, name in FORMS["component"].findall(match[0])}
    names = "ijk" if "k" in sizes else "ij"
    return rf"\langle {','.join(sizes.get(name, '0') for name in names)}\rangle"


def _classes(match: re.Match[str]) -> str:
    """Write "x = 1, 3 modulo 5" as one congruence for each value."""
    residues = re.findall(r"-?\d+", match[2])
    return ", ".join(rf"{match[1]} \equiv {residue} {match[3]}" for residue in residues)


def _chemistry(match: re.Match[str]) -> str:
    """Write a chemical formula in \\ce{...}, such as H2SO4, in plain LaTeX.

    Digits after a letter become subscripts.
    """
    formula = re.sub(r"<?->|<=>", r"\\to ", match[1])
    formula = re.sub(r"(?<=[A-Za-z)\]])(\d(?!\d))", r"_\1", formula)
    formula = re.sub(r"(?<=[A-Za-z)\]])(\d+)", r"_{\1}", formula)
    return re.sub(r"(?<=[A-Za-z0-9)\]}])([+-])(?=\s*(?:[+\\]|\Z))", r"^{\1}", formula)


_UPRIGHT_MACRO = re.compile(r"\\(?:mathrm|text|rm)\s*\{((?:[^{}]|\{[^{}]*\}){0,60})\}")


def _molecule(match: re.Match[str]) -> str:
    """Remove LaTeX's commands for an upright font from a chemical formula."""
    formula = _UPRIGHT_MACRO.sub(r"\1", match[0]).replace(" ", "")
    return match[0] if "\\" in formula else re.sub(r"\^([+-])", r"^{\1}", formula)


def _plain_formula(match: re.Match[str]) -> str:
    """Write the digits of a chemical formula as subscripts: CO2 becomes CO_2.

    A formula of only one element stays unchanged.
    """
    if len(re.findall("[A-Z]", match[1])) < 2:
        return match[0]
    return re.sub(r"(\d+)", r"_{\1}", match[1])


def _parity(match: re.Match[str]) -> str:
    """Write "all odd integers" or "n is odd" as a residue class of n."""
    return rf"{match[1] or 'n'} \equiv {1 if match[2] else 0} \pmod{{2}}"


def _power(match: re.Match[str]) -> str:
    """Write "all powers of 2" as 2^k."""
    return f"{ {'two': '2', 'three': '3'}.get(match[1].lower(), match[1]) }^k"


def _formula(match: re.Match[str]) -> str:
    """Remove LaTeX's commands for an upright font from a chemical formula with subscripts or a
    charge.
    """
    return match[1] if re.search("[_^]", match[1]) else match[0]


def _repeating(match: re.Match[str]) -> str:
    """Write a repeating decimal such as 0.1\\overline{6} as a fraction."""
    whole = match[1]
    fixed = match[2]
    cycle = match[3] or match[4]
    scale = 10 ** len(fixed)
    nines = 10 ** len(cycle) - 1
    return f"({int(whole + fixed or '0') * nines + int(cycle)}/{scale * nines})"


def _going_on(match: re.Match[str]) -> str:
    """Write a decimal such as 0.1666... as a fraction.

    The repeated part must be written twice, or three times if it is one digit.
    """
    return _repeating(match) if len(match[3] + match[4]) > 2 else match[0]


def _inward(match: re.Match[str]) -> str:
    """Write an interval such as ]2,5] as (2,5]."""
    opening = "(" if match[2] == "]" else "["
    closing = ")" if match[4] == "[" else "]"
    return opening + match[3] + closing


_COMPUTED: dict[str, Callable[[re.Match[str]], str]] = {
    "raised": lambda match: f"^{{{_flat(match[0])}}}",
    "lowered": lambda match: f"_{{{_flat(match[0])}}}",
    "vulgar": lambda match: r" \frac{{{}}}{{{}}} ".format(*_flat(match[0]).split("⁄")),
    "temperature": lambda match: f" deg{(match[1] or match[2] or match[3])[0].upper()} ",
    "unit_vectors": _unit_vectors,
    "classes": _classes,
    "chemistry": _chemistry,
    "formula": _formula,
    "parity": _parity,
    "power": _power,
    "molecule": _molecule,
    "plain_formula": _plain_formula,
    "parts": _parts,
    "vector": _vector,
    "repeating": _repeating,
    "going_on": _going_on,
    "inward": _inward,
    "without_spaces": lambda match: match[0].replace(" ", ""),
    "without_thin_spaces": lambda match: match[0].replace(r"\,", ""),
}


def _stage(name: str) -> Stage:
    """Build a stage of rewriting from its replacements in `rewrites.toml`, in their order."""
    steps = list[Step]()
    steps_of = dict[str, list[int]]()
    always = list[int]()
    for when, pattern, put in _REWRITES.table(name, list[tuple[str, str, str]]):
        marks = [when] if when == "\n" else when.removeprefix("!").split()
        is_without = when[:1] == "!"
        if is_without or not marks:
            always.append(len(steps))
        else:
            for mark in marks:
                steps_of.setdefault(mark, []).append(len(steps))
        replacement = _COMPUTED[put[1:]] if put[:1] == "=" else put
        steps.append(Step(marks, is_without, re.compile(pattern), replacement))
    return Stage(steps, tuple(steps_of), steps_of, always)


_LINES = _stage("lines")
_SIGNED = _stage("signs")
_STEPS = _stage("steps")
_LAST = _stage("last")


# ---- parsing the cleaned text


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer after cleaning and parsing. If it could not be parsed, `trees` is empty and
    `problem` says why.
    """

    text: str
    trees: tuple[Node, ...]
    problem: Undecided | None = None
    # The letter of a choice, such as "C" in "(C) 46"; "" if the answer has no such letter.
    choice: str = ""
    is_letter: bool = False  # True if the answer is only a letter, such as "(C)"
    # True if the letter is followed by a value, as in "(C) 46"; `trees` has the value
    lettered: bool = False

    @property
    def squashed(self) -> str:
        """Return the letters and digits of the answer in lower case, for comparison as a phrase."""
        return vocabulary.squashed(_MACRO.sub(" ", self.text))


def read(text: str, limits: Limits) -> Reading:
    """Parse an answer. The results for short texts are cached."""
    return _read(text, limits) if len(text) <= 400 else _read.__wrapped__(text, limits)


@lru_cache(maxsize=4096)
def _read(text: str, limits: Limits) -> Reading:
    if FORMS["number"].fullmatch(text):
        return Reading(text, (number(Fraction(text), text),))
    plain = text
    try:
        plain = cleaned(unboxed(text), limits)
        bare = _MACRO.sub("", plain)
        choice = _CHOICE.match(bare.replace("{", "").replace("}", ""))
        letter = choice[1] if choice else ""
        is_letter = bool(letter) and not re.search(r"[^A-J\s(){}\[\].:]", bare)
        value = _value_of_choice(bare) if letter and not is_letter else ""
        trees = _trees_of_either(plain, value, limits)
        return Reading(plain, trees, None, letter, is_letter, bool(value))
    except Undecided as problem:
        choice = _CHOICE.match(_MACRO.sub("", plain)) if len(plain) < 400 else None
        return Reading(plain, (), problem, choice[1] if choice else "")
    except RecursionError:  # the calling program left too little of Python's stack
        return Reading(plain, (), TooLarge("nested too deeply for the remaining stack"))


def _value_of_choice(bare: str) -> str:
    """Return the text after the letter of a choice, such as "46" in "(C) 46".

    The result is "" for other answers.
    """
    match = FORMS["lettered"].fullmatch(bare)
    text = (match[2] or match[4]).strip() if match else ""
    # Number of closing braces in the text whose opening braces are before the text.
    excess = text.count("}") - text.count("{")
    while excess > 0 and text.endswith("}"):
        text = text[:-1]
        excess -= 1
    return text


def _trees_of_either(plain: str, value: str, limits: Limits) -> tuple[Node, ...]:
    """Return the trees of an answer. For a choice such as "(C) 46", the trees of 46 come first."""
    if not value:
        return tuple(_trees(plain, limits))
    trees = list[Node]()
    problem: Undecided | None = None
    for text in (value, plain):
        try:
            trees += _trees(text, limits)
        except Undecided as error:
            problem = problem or error
    if not trees and problem:
        raise problem
    return tuple(trees)


def _trees(plain: str, limits: Limits) -> list[Node]:
    """Parse a cleaned text in each possible way, and return the trees.

    The text without thousands separators is parsed before the text as it is written.
    """
    meaning = _in_words(plain, limits) if len(plain) < 240 else None
    if meaning is not None:
        return [meaning]
    # In "(1,234)" the comma separates two numbers. Put a space after it, so that it is not removed
    # as a separator of thousands.
    joined = FORMS["pair"].sub(lambda match: match[0].replace(",", ", "), plain)
    joined = FORMS["thousands"].sub(lambda match: match[0].replace(",", ""), joined)
    spellings = [joined] if joined == plain or FORMS["zeros"].search(plain) else [joined, plain]
    below = FORMS["below_slash"].sub(r"/(\1)", joined)
    # In physics t/RC means t/(RC), but in programs it means (t/R)C. Try both.
    if below != joined:
        spellings.append(below)
    counted = FORMS["counted"].sub(_as_binomial, joined)
    if counted != joined:
        spellings.insert(0, counted)
    trees: list[Node] = []
    problem: Undecided | None = None
    for spelling in spellings:
        try:
            trees.extend(Parser(each, limits).answer() for each in tokens(spelling, limits))
        except Undecided as error:
            problem = problem or error
    if not trees:
        assert problem is not None
        raise problem
    return trees


def _as_binomial(match: re.Match[str]) -> str:
    """Write C(6,2) and _6C_2 as a binomial coefficient, and P(6,2) as a quotient of factorials."""
    parts = [part for part in match.groups() if part]
    kind = next(part for part in parts if part in "ACP")
    n, k = (part for part in parts if part != kind)
    return rf"\binom{{{n}}}{{{k}}}" if kind == "C" else rf"(({n})!/({n}-({k}))!)"


def _in_words(plain: str, limits: Limits) -> Node | None:
    """Return the tree of an answer in words; None for other answers.

    The answer may be a number, a set, a date, or a quotient with its remainder.
    """
    if FORMS["date"].fullmatch(plain):
        raise UnknownWords("a date with an unclear order of day and month")
    phrase = FORMS["braces"].sub(" ", _MACRO.sub(" ", plain))
    if FORMS["capitals"].fullmatch(phrase.strip()):
        name = phrase.replace(" ", "")
        if len(name) > 1 and _fixed(vocabulary.squashed(name)) not in vocabulary.MEANINGS:
            return symbol(name)
    divided = FORMS["division"].fullmatch(phrase) or FORMS["remainder"].fullmatch(plain)
    if divided:
        parts = (_trees(part, limits)[0] for part in divided.groups() if part)
        return Node("tuple", tuple(parts), "R")
    date = vocabulary.date_in_words(phrase)
    if date:
        return Node("word", text=date)
    if left_out := FORMS["except"].fullmatch(phrase):
        points = ",".join(FORMS["rational"].findall(left_out[1]))
        return _trees(rf"\mathbb{{R}}\setminus\{{{points}\}}", limits)[0]
    if "\\" in phrase or not FORMS["word"].search(phrase):
        return None
    told = FORMS["told"].fullmatch(phrase)
    if told:
        phrase = told[1]
    fixed = _fixed(vocabulary.squashed(phrase))
    if fixed in vocabulary.SETS:
        return _trees(vocabulary.SETS[fixed], limits)[0]
    if fixed in vocabulary.MEANINGS:
        return Node("word", text=fixed)
    if FORMS["numeric"].search(phrase):
        return None
    value = vocabulary.number_in_words(phrase) if phrase.strip(" -")[:1].isalpha() else None
    if value is not None:
        return number(value, str(value))
    return _amount_in_words(phrase) or (Node("word", text=fixed) if told else None)


def _fixed(words: str) -> str:
    """Return the standard form of a phrase, which all known phrases with the same meaning share."""
    for fixed, form in vocabulary.MEANINGS.items():
        if form.fullmatch(words):
            return fixed
    return words


def _amount_in_words(phrase: str) -> Node | None:
    """Return the tree of an amount in words, such as "twenty percent" or "five square feet"."""
    pieces = phrase.split()
    for at in range(min(len(pieces), 12) - 1, 0, -1):
        value = vocabulary.number_in_words(" ".join(pieces[:at]))
        if value is None:
            continue
        amount = number(value, str(value))
        unit = " ".join(pieces[at:])
        if unit == "percent":
            return Node("percent", (amount,))
        known = unit_at(unit, 0)
        if known and known[1] == len(unit):
            return Node("quantity", (amount,), unit)
    return None
