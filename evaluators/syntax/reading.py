"""Readings of an answer text: cleaned to one plain LaTeX spelling in linear time, and the trees it
may be parsed as.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from atts.evaluators.answers.extraction import boxes, last_group
from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.atoms import Parser
from atts.evaluators.syntax.lexer import tokens
from atts.evaluators.syntax.tree import Kind, Node, number
from atts.evaluators.syntax.vocabulary import Tables, spelled, table, unit_at
from atts.evaluators.verdict import Limits, Malformed, TooLarge, Undecided, UnknownWords

_SIGNS = spelled(table("signs", dict[str, str]))
_GREEK = spelled(table("greek", dict[str, str]))
_REWRITES = Tables("rewrites.toml")
FORMS = _REWRITES.patterns("forms")
_BASIS, _CONTROL, _IDLE_BLANK = (FORMS[name] for name in ("basis", "control", "idle_blank"))
_TABLE = str.maketrans(_SIGNS | {letter: f"\\{name} " for letter, name in _GREEK.items()})


def _flat(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).replace("−", "-")


def _plain(text: str) -> Iterator[str]:
    """Characters of Unicode as plain ones: foreign digits as ours, invisible ones left out."""
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
            yield (
                folded
                if folded.isascii() and folded.isalnum() and category != "No" and category != "Nl"
                else char
            )


def cleaned(text: str, limits: Limits) -> str:
    """One spelling of the answer: ASCII where possible, no sizes, dollars or spacing macros,
    thousands untouched.

    Raises TooLarge when more is left than the limits allow.
    """
    if len(text) > limits.raw_characters:
        raise TooLarge(f"{len(text)} characters")
    text = _rewritten(text, _LINES)
    if text.count(r"\$") % 2:
        text = re.sub(r"\\\$(?=\s*\S)", r"\\usd ", text)
    if text.count("$") % 2:
        text = re.sub(r"(?<!\\)\$(?=\s*\d)", r"\\usd ", text, count=1)
    plain = text if text.isascii() else "".join(_plain(_rewritten(text, _SIGNED).translate(_TABLE)))
    text = _rewritten(unwrapped(_rewritten(_CONTROL.sub(" ", plain), _STEPS)), _LAST)
    if len(text) > limits.characters:
        raise TooLarge(f"{len(text)} characters")
    return text


Step = tuple[list[str], bool, re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _rewritten(text: str, steps: Sequence[Step]) -> str:
    for marks, is_without, pattern, put in steps:
        if not marks or (True in map(text.__contains__, marks)) != is_without:
            text = pattern.sub(put, text)
    return text


def _parts(found: re.Match[str]) -> str:
    """(a) 3 (b) 5 as a=3, b=5; the text itself where what is marked are no parts of an answer."""
    _, *pieces = FORMS["part"].split(found[0])
    marks = " ".join(pieces[::2])
    said = [piece.strip(" ,;.\n") for piece in pieces[1::2]]
    is_row = " " in marks and any(
        row.startswith(marks) for row in ("a b c d e", "i ii iii iv", "1 2 3 4 5")
    )
    is_row = is_row and all(value and value[-1] not in "+-*/^=(" for value in said)
    return ", ".join(map("{}={}".format, "abcde", said)) if is_row else found[0]


def _vector(found: re.Match[str]) -> str:
    """A sum of unit vectors as its coefficients, in two dimensions where there is no third."""
    sizes = {name: f"{size}(1)" for size, name in FORMS["component"].findall(found[0])}
    return (
        rf"\langle {','.join(sizes.get(name, '0') for name in 'ijk'[: 2 + ('k' in sizes)])}\rangle"
    )


def _repeating(found: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction it denotes."""
    whole = found[1]
    fixed = found[2]
    cycle = found[3] or found[4]
    scale = 10 ** len(fixed)
    nines = 10 ** len(cycle) - 1
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
    "classes": lambda found: ", ".join(
        rf"{found[1]} \equiv {each} {found[3]}" for each in re.findall(r"-?\d+", found[2])
    ),
    "parts": _parts,
    "vector": _vector,
    "repeating": _repeating,
    # 0.1666...: a cycle shows when it is there twice, one digit three times
    "going_on": lambda found: _repeating(found) if len(found[3] + found[4]) > 2 else found[0],
    # ]2,5]
    "inward": lambda found: (
        {"]": "(", "[": "["}[found[2]] + found[3] + {"[": ")", "]": "]"}[found[4]]
    ),
    "without_spaces": lambda found: found[0].replace(" ", ""),
    "without_thin_spaces": lambda found: found[0].replace(r"\,", ""),
}


def _steps(name: str) -> list[Step]:
    """The steps of a stage: marks, whether they must be missing, what is found and what is put
    instead.
    """
    rows = _REWRITES.table(name, list[tuple[str, str, str]])
    puts = [_COMPUTED[put[1:]] if put[:1] == "=" else put for _, _, put in rows]
    marks = [[when] if when == "\n" else when.removeprefix("!").split() for when, _, _ in rows]
    found = zip(marks, rows, puts, strict=True)
    return [(mark, row[0][:1] == "!", re.compile(row[1]), put) for mark, row, put in found]


_LINES, _SIGNED, _STEPS, _LAST = map(_steps, ("lines", "signs", "steps", "last"))


def spaceless(text: str) -> str:
    """The text without spaces, save those that keep words and numbers apart."""
    return _IDLE_BLANK.sub("", text.strip())


_PAIRS = {"(": ")", "{": "}"}


def unwrapped(text: str) -> str:
    """The text without redundant outer brackets, however many, each pair dropped only when it
    encloses everything.
    """
    text = text.strip()
    depth = 0
    while (
        depth < len(text) // 2 and text[depth] in _PAIRS and text[-1 - depth] == _PAIRS[text[depth]]
    ):
        depth += 1
    if depth < 2:  # one pair can mean something: (C), {1,2}
        return text
    inside = text[depth : len(text) - depth]
    levels = list(accumulate(((char in "({") - (char in ")}") for char in inside), initial=0))
    # kept: brackets that the inside closes before it opens its own, and one pair that may carry
    # meaning
    drop = depth + min(levels) - 1 if levels[-1] == 0 else 0
    return text[drop : len(text) - drop] if drop > 0 else text


_CHOICE = FORMS["choice"]
_MACRO = FORMS["macro"]


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer cleaned and parsed; no trees means it could not be read, and `problem` says why."""

    text: str
    trees: tuple[Node, ...]
    problem: Undecided | None = None
    choice: str = ""  # the letter, when the answer is one choice, perhaps with its text
    is_letter: bool = False  # nothing but the letter

    @property
    def squashed(self) -> str:
        """The answer as a phrase: lower case, letters and digits."""
        return vocabulary.squashed(_MACRO.sub(" ", self.text))


def read(text: str, limits: Limits) -> Reading:
    """The answer as trees; long texts are not kept."""
    return _read(text, limits) if len(text) <= 400 else _read.__wrapped__(text, limits)


@lru_cache(maxsize=4096)
def _read(text: str, limits: Limits) -> Reading:
    if FORMS["number"].fullmatch(text):
        return Reading(text, (number(Fraction(text), text),))
    plain = text
    try:
        plain = cleaned(unboxed(text), limits)
        choice = _CHOICE.match(_MACRO.sub("", plain).replace("{", "").replace("}", ""))
        letter = choice[1] if choice else ""
        only = bool(letter) and not re.search(r"[^A-J\s(){}\[\].:]", _MACRO.sub("", plain))
        return Reading(plain, tuple(_trees(plain, limits)), None, letter, only)
    except Undecided as problem:
        choice = _CHOICE.match(_MACRO.sub("", plain)) if len(plain) < 400 else None
        return Reading(plain, (), problem, choice[1] if choice else "")
    except RecursionError:  # little of the stack was left to us
        return Reading(plain, (), TooLarge("too deep for the stack at hand"))


def _trees(plain: str, limits: Limits) -> list[Node]:
    """The readings of a cleaned text: thousands joined, and, where that changes it, as written."""
    said = _in_words(plain, limits) if len(plain) < 240 else None
    if said is not None:
        return [said]
    joined = FORMS["pair"].sub(lambda found: found[0].replace(",", ", "), plain)  # (1,234) are two
    joined = FORMS["thousands"].sub(lambda found: found[0].replace(",", ""), joined)
    found: list[Node] = []
    problem: Undecided | None = None
    counted = FORMS["counted"].sub(_as_binomial, joined)
    spellings = [joined] if joined == plain or FORMS["zeros"].search(plain) else [joined, plain]
    for spelling in spellings if counted == joined else [counted, *spellings]:
        try:
            found.extend(Parser(each, limits).answer() for each in tokens(spelling, limits))
        except Undecided as error:
            problem = problem or error
    if not found:
        assert problem is not None
        raise problem
    return found


def _as_binomial(found: re.Match[str]) -> str:
    """C(6,2) and _6C_2 as they are written elsewhere; permutations of so many as a quotient of
    factorials.
    """
    n, k = (part for part in found.groups() if part and part.isdigit())
    kind = next(part for part in found.groups() if part and part.isalpha())
    return rf"\binom{{{n}}}{{{k}}}" if kind == "C" else rf"(({n})!/({n}-{k})!)"


def _in_words(plain: str, limits: Limits) -> Node | None:
    """An answer in words that has a meaning of its own: a number, a set, a date, a quotient with
    its remainder.
    """
    if FORMS["date"].fullmatch(plain):
        raise UnknownWords("a date whose day and month are not told apart")
    phrase = FORMS["braces"].sub(" ", _MACRO.sub(" ", plain))
    if divided := FORMS["division"].fullmatch(phrase) or FORMS["remainder"].fullmatch(plain):
        return Node(
            "tuple", tuple(_trees(part, limits)[0] for part in divided.groups() if part), "R"
        )
    if date := vocabulary.date_in_words(phrase):
        return Node("word", text=date)
    if left_out := FORMS["except"].fullmatch(phrase):
        return _trees(
            rf"\mathbb{{R}}\setminus\{{{','.join(FORMS['rational'].findall(left_out[1]))}\}}",
            limits,
        )[0]
    if "\\" in phrase or not FORMS["word"].search(phrase):
        return None
    words = vocabulary.squashed(phrase)
    fixed = next(
        (fixed for fixed, form in vocabulary.MEANINGS.items() if form.fullmatch(words)), words
    )
    if fixed in vocabulary.SETS:
        return _trees(vocabulary.SETS[fixed], limits)[0]
    if fixed in vocabulary.MEANINGS:
        return Node("word", text=fixed)
    value = vocabulary.number_in_words(phrase) if phrase.strip(" -")[:1].isalpha() else None
    if value is not None and not FORMS["numeric"].search(phrase):
        return number(value, str(value))
    pieces = phrase.split()
    for at in range(min(len(pieces), 12) - 1, 0, -1):
        unit = " ".join(pieces[at:])
        value = (
            vocabulary.number_in_words(" ".join(pieces[:at]))
            if not FORMS["numeric"].search(phrase)
            else None
        )
        counted = (unit, len(unit)) if unit == "percent" else unit_at(unit, 0)
        if value is not None and counted and counted[1] == len(unit):
            kind: Kind = "percent" if unit == "percent" else "quantity"
            return Node(kind, (number(value, str(value)),), unit if kind == "quantity" else "")
    return None


def unboxed(text: str) -> str:
    """The contents of the boxes in an answer, several joined by commas; the text itself when it has
    none.

    Raises Malformed when its box was cut off.
    """
    if "box" not in text:
        return text
    text = text.replace("\\beginboxed", "\\boxed")
    found, open_at = boxes(text)
    contents = last_group(found, text)
    if not contents and open_at is not None:
        raise Malformed("a box that was cut off")
    return ", ".join(contents) if contents else FORMS["empty_box"].sub("", text)
