"""Answers changed in one place so that their meaning changes, to test that the grader calls them
different.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

BUILT_IN = tuple(
    r"""
7;12;-4;35;2025;0.25;3.75;\frac{3}{4};-\frac{5}{12};\frac{\sqrt{3}}{2};2\sqrt{5};3+2\sqrt{2};\frac{1+\sqrt{5}}{2};12\pi
\frac{\pi}{6};2^{10};x^2+3x-4;\frac{x+1}{x-2};2x+3y=7;y=3x-5;x<4;x\ge -2;-3<x\le 5;(2,5);[0,3);(-\infty,4];(3,-1,2)
3,5,9;x=2,x=7;\{1,4,6\};5\text{ cm};12\text{ km/h};\$40;30\%;7\text{ apples};\begin{pmatrix}1&2\\3&4\end{pmatrix};3:5
x\equiv 5\pmod{12};\text{even};\text{Yes};\text{all real numbers};6!+1;f(3)=8;3\text{ or }8;101_2;e^{3}-1;\ln 5;2+3i
""".strip()
    .replace("\n", ";")
    .split(";")
)
FRAMES: dict[str, list[tuple[str, list[str]]]] = {
    kind: [
        (gold, others.split(" ;; "))
        for gold, _, others in (line.partition(" => ") for line in lines.split("\n") if line)
    ]
    for kind, lines in tomllib.loads(
        Path(__file__).with_name("frames.toml").read_text(encoding="utf-8")
    ).items()
}
_PLACE = re.compile(r"(?<!angle )(?<!angle A)(?<!angle AB)(?<!angle AC)[ABC]")
_NUMBER = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?:\.\d+)?")
_BINARY = re.compile(r"(?<=[\w})\]])\s*([+-])\s*(?=[\w\\({])")
_INTERVAL = re.compile(r"([(\[])\s*(-?[\w.\\{}]+)\s*,\s*(-?[\w.\\{}]+)\s*([)\]])")
_ENTRIES = re.compile(r"\((-?\d+(?:\s*,\s*-?\d+)+)\)")
_MEMBERS = re.compile(r"-?\d+(?:\s*,\s*-?\d+)+")
_CASE = re.compile(r"(\\begin\{cases\})(.*?)&(.*?)\\\\(.*?)&(.*?)(\\end\{cases\})", re.DOTALL)
_UNIT = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{\s*(cm|mm|m|km|kg|g|s|hours?|minutes?|seconds?|days?|miles?|feet|inches|km/h)\s*\}"
)
_OTHER: dict[str, str] = dict(
    zip(
        "cm mm m km kg g s hours hour minutes minute seconds second days day miles mile feet "
        "inches km/h".split(),
        "mm cm km m g kg m minutes minute hours hour minutes minute weeks week km km inches feet "
        "m/s".split(),
        strict=True,
    )
)
_QUALIFIERS = (
    "at most {};at least {};less than {};more than {};minus {};twice {};not {};{} squared;anything "
    "but {};half of {};"
    "{} dozen;a multiple of {};the square root of {};{} is wrong;{} less than the answer;up to "
    "{};{} or more;double {};"
    "{} thousand;the reciprocal of {};either {} or none;no more than {};{} to one;{}th "
    "root;between 0 and {}"
).split(";")
_WORDS: dict[str, str] = dict(
    zip(
        "even odd all real positive increasing Yes True maximum integers convex".split(),
        "odd even some rational negative decreasing No False minimum reals concave".split(),
        strict=True,
    )
)
_FOLDED = re.compile(
    r"\\(?:binom|dbinom|tbinom|max|min|gcd|lcm|lfloor|lceil|pm|mp|cos|sin|tan|arg|operatorname)|\||_|\\equiv|!|\bmod"
)
"""Patterns that exclude an answer from being changed: its value may stay the same if one of its
numbers changes, or it contains a name with a number.
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """An original answer, a changed copy with another meaning, and the kind of the change."""

    kind: str
    gold: str
    answer: str


def mutants(answers: Sequence[str], count: int, seed: int = 0) -> list[Mutant]:
    """Make `count` different mutants, about equally many of each kind. If there are too few
    answers, make fewer.
    """
    random = Random(f"mutants:{seed}")
    found = dict[tuple[str, str], Mutant]()
    made_of = Counter[str]()
    idle = Counter[str]()
    numbers = sorted(
        {
            int(each)
            for text in answers
            for each in re.findall(r"(?<![\d.,])\d{1,4}(?![\d.,])", text)
        }
        - {0, 1}
    )
    fitting = {
        kind: [text for text in answers if rule(text, random)] for kind, rule in _RULES.items()
    }
    kinds = sorted(
        {kind for kind, texts in fitting.items() if texts}
        | (FRAMES.keys() if len(numbers) > 1 else set())
    )
    while kinds and len(found) < count:
        kind = min(kinds, key=lambda each: made_of[each])
        mutant = _mutant(kind, fitting.get(kind, []), numbers, random)
        if (
            mutant is None
            or (mutant.gold, mutant.answer) in found
            or _is_same(mutant.gold, mutant.answer)
        ):
            idle[kind] += 1
            # drop a kind of change that has given no new mutant for a long time
            if idle[kind] > 2_000:
                kinds.remove(kind)
            continue
        found[mutant.gold, mutant.answer] = mutant
        made_of[kind] += 1
        idle[kind] = 0
    return list(found.values())


def _mutant(
    kind: str, texts: Sequence[str], numbers: Sequence[int], random: Random
) -> Mutant | None:
    made: str | None
    if kind in FRAMES and len(numbers) > 1 and (not texts or random.random() < 0.5):
        gold, made = _framed(kind, numbers, random)
    else:
        gold = random.choice(texts)
        made = _RULES[kind](gold, random)
    return Mutant(kind, gold, made) if made and made != gold else None


def _framed(kind: str, numbers: Sequence[int], random: Random) -> tuple[str, str]:
    """Fill an answer template of this kind with two of the numbers. Return the answer and a changed
    answer with another meaning.
    """
    one, two = sorted(random.sample(numbers, 2))
    filled = {"A": str(one), "B": str(two), "C": str(two + 1)}
    gold, others = random.choice(FRAMES[kind])
    gold, made = (
        _PLACE.sub(lambda found: filled[found[0]], text) for text in (gold, random.choice(others))
    )
    return gold, made


def _is_same(gold: str, made: str) -> bool:
    """Compute both values without the grader, and return whether they are equal. Strings that
    cannot be computed count as different.
    """
    one = _value(gold)
    two = _value(made)
    return one is not None and two is not None and abs(one - two) < 1e-12 * max(1.0, abs(one))


_PLAIN = re.compile(r"[\d\s.+*/()-]|\*\*")


def _value(text: str) -> float | None:
    plain = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"((\1)/(\2))", text.replace(",", "")).replace(
        "\\$", ""
    )
    plain = re.sub(r"\^\{?(\d{1,3})\}?", r"**\1", plain).strip()
    if not plain or _PLAIN.sub("", plain) or re.search(r"[\d)]\s*\(|\)\s*\d", plain):
        return None
    try:
        # safe to evaluate, because the text has only digits and operators
        return float(eval(plain, {"__builtins__": {}}))
    except (ArithmeticError, SyntaxError, TypeError, ValueError):
        return None


def _picked(pattern: re.Pattern[str], text: str, random: Random) -> re.Match[str] | None:
    found = list(pattern.finditer(text))
    return random.choice(found) if found else None


def _put(text: str, found: re.Match[str], new: str, group: int = 0) -> str:
    return text[: found.start(group)] + new + text[found.end(group) :]


def _is_single(text: str) -> bool:
    """Return whether the text is one value: not a list, relation, set or words."""
    return not _SEVERAL.search(text.replace("sqrt", "").replace("frac", ""))


_SEVERAL = re.compile(
    r"[,=<>;:|\[]|\\(?:le|ge|in|cup|text|pm|mp|begin|equiv|infty|[lg]eq|ne|mathrm|mbox|approx)|[A-Za-z]{4}"
)


def _sign(text: str, random: Random) -> str | None:
    if not _is_single(text) or not re.search(r"[1-9a-z]", text):
        return None
    return (
        text[1:]
        if re.fullmatch(r"-[\w.]+", text)
        else f"-{text}"
        if re.fullmatch(r"[\w.]+", text)
        else f"-({text})"
    )


def _bumped(text: str, random: Random) -> str | None:
    found = _picked(_NUMBER, text, random)
    if (
        found is None
        or _FOLDED.search(text)
        or re.search(r"(?:=|<|>|\\[lg]eq?)\s*0\b|0\s*(?:=|<|>)", text)
    ):
        return None
    whole, point, rest = found[0].replace(",", "").partition(".")
    digits = str(int(whole + rest) + random.choice((1, 2, 10, random.randint(3, 999)))).rjust(
        len(whole + rest), "0"
    )
    return _put(
        text,
        found,
        digits[: len(digits) - len(rest)] + point + digits[len(digits) - len(rest) :]
        if point
        else digits,
    )


def _scaled(text: str, random: Random) -> str | None:
    found = re.fullmatch(r"-?\d+(\.\d+)?", text)
    if found is None or not float(text):
        return None
    power = random.choice((-1, 1)) * random.randint(1, 12)
    return (
        f"{text}{'0' * power}" if power > 0 and not found[1] else f"{text} \\times 10^{{{power}}}"
    )


def _operand(text: str, random: Random) -> str | None:
    found = _picked(_BINARY, text, random)
    if (
        found is None
        or _FOLDED.search(text)
        or re.search(r"\(\s*-|\^|e", text[: found.start()][-3:])
    ):
        return None
    return _put(text, found, "-" if found[1] == "+" else "+", 1)


def _end(text: str, random: Random) -> str | None:
    found = re.fullmatch(_INTERVAL, text)
    if found is None:
        return None
    ends = [(1, 2, {"(": "[", "[": "("}), (4, 3, {")": "]", "]": ")"})]
    side, value, other = random.choice(ends)
    return None if "infty" in found[value] else _put(text, found, other[found[side]], side)


def _bound(text: str, random: Random) -> str | None:
    found = _picked(re.compile(r"\\(leq?|geq?)(?![a-z])|[<>]"), text, random)
    if found is None:
        return None
    new = {"\\le": "<", "\\leq": "<", "\\ge": ">", "\\geq": ">", "<": "\\le ", ">": "\\ge "}[
        found[0]
    ]
    return _put(text, found, new)


def _branch(text: str, random: Random) -> str | None:
    found = _CASE.search(text)
    return f"{found[1]}{found[4]}&{found[3]}\\\\{found[2]}&{found[5]}{found[6]}" if found else None


def _unit(text: str, random: Random) -> str | None:
    if found := _picked(_UNIT, text, random):
        return _put(text, found, _OTHER[found[1]], 1)
    return None


def _qualified(text: str, random: Random) -> str | None:
    if not re.fullmatch(r"\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}", text) or text in ("0", "1"):
        return None
    return random.choice(_QUALIFIERS).format(text if text[0] != "\\" else f"${text}$")


def _order(text: str, random: Random) -> str | None:
    found = _picked(_ENTRIES, text, random)
    if found is None:
        return None
    parts = re.split(r"\s*,\s*", found[1])
    one, two = random.sample(range(len(parts)), 2)
    parts[one], parts[two] = parts[two], parts[one]
    made = ",".join(parts)
    return None if made == ",".join(re.split(r"\s*,\s*", found[1])) else _put(text, found, made, 1)


def _exponent(text: str, random: Random) -> str | None:
    found = _picked(re.compile(r"\\sqrt\{(\d+)\}"), text, random)
    if found and int(found[1]) > 1:
        return _put(
            text,
            found,
            random.choice((f"\\sqrt[3]{{{found[1]}}}", found[1], f"\\sqrt{{{int(found[1]) + 1}}}")),
        )
    return text.replace("\\pi", "", 1) if re.fullmatch(r"\d+\\pi", text) else None


def _quantifier(text: str, random: Random) -> str | None:
    found = _picked(re.compile(rf"\b(?:{'|'.join(_WORDS)})\b"), text, random)
    return _put(text, found, _WORDS[found[0]]) if found else None


def _member(text: str, random: Random) -> str | None:
    found = re.fullmatch(_MEMBERS, text)
    if found is None or re.fullmatch(r"-?\d{1,3}(?:,\d{3})+", text):
        return None
    parts = re.split(r"\s*,\s*", text)
    kept = (
        parts[:-1]
        if random.random() < 0.5
        else [*parts, str(max(map(int, parts)) + random.randint(1, 9))]
    )
    return ", ".join(kept) if {*map(int, kept)} != {*map(int, parts)} else None


_BOUND = re.compile(r"\\(?:in|forall|exists)|[kn]|[a-zA-Z]\([a-z]")


def _variable(text: str, random: Random) -> str | None:
    found = _picked(re.compile(r"(?<![A-Za-z\\])([a-z])(?![A-Za-z])"), text, random)
    if found is None or found[0] in "deif" or "text" in text or _BOUND.search(text):
        return None
    return re.sub(rf"(?<![A-Za-z\\]){found[0]}(?![A-Za-z])", "w", text) if "w" not in text else None


_RULES: dict[str, Callable[[str, Random], str | None]] = {
    "sign": _sign, "number": _bumped, "magnitude": _scaled, "operand": _operand, "interval end": _end, "bound": _bound,
    "branch": _branch, "unit": _unit, "qualifier": _qualified, "order": _order, "exponent": _exponent,
    "quantifier": _quantifier, "member": _member, "variable": _variable,
}  # fmt: skip
