"""Vocabulary of answers: number words, separators, neutral words, and phrases that have one meaning."""

import re
from fractions import Fraction
from string import ascii_lowercase

from atts.evaluators.syntax.words import spelled, table, words

SEPARATORS, PERCENT, DEGREES = words("separators"), words("percent"), words("degrees")
NEGATIONS = words("negations")
"""Words after which what precedes them is no longer simply the answer."""

LARGE, BASES = table("large", dict[str, int]), table("bases", dict[str, int])
_SMALL = {word: value for value, word in enumerate(table("small", str).split())}
_VALUES = _SMALL | {word: 20 + 10 * index for index, word in enumerate(table("tens", str).split())}
SHARES = {share: int(count) for share, count in spelled(table("shares", dict[str, str])).items()}
"""Parts of a whole by name: a third is one in three."""
NEUTRAL, LABELS, APPROXIMATE = words("neutral"), words("labels"), words("approximate")
ATTACHED = words("attached")
"""Letters that, right after a number and last in an answer, are its unit and not a product of variables."""
MEANINGS = {fixed: re.compile(form) for fixed, form in table("meanings", dict[str, str]).items()}


def number_in_words(text: str) -> Fraction | None:
    """The number a phrase such as "twenty-seven", "minus four" or "two thirds" spells, else None.

    >>> number_in_words("two thousand and twenty-five")
    Fraction(2025, 1)
    """
    whole, _, rest = text.rpartition(" and ")
    if whole and (rest.startswith(("a ", "an ")) or " " in rest.strip()):  # one and a half
        one, two = number_in_words(whole), number_in_words(rest)
        return one + two if one and two and two < 1 else None
    found = [word for word in re.findall(r"[a-z]+", text.lower()) if word != "and"]
    sign = -1 if found[:1] in (["minus"], ["negative"]) else 1
    found = found[sign < 0 :]
    share = SHARES.get(found[-1].removesuffix("s") if found[-1:] != ["halves"] else "half", 0) if found else 0
    if share:
        found = found[:-1] if found[:-1] not in ([], ["a"], ["an"]) else ["one"]
    if not found or len(found) > 12 or not all(word in _VALUES or word in LARGE for word in found):
        return None
    total = current = 0
    for word in found:
        if word in _VALUES:
            current += _VALUES[word]
        elif word in ("hundred", "dozen"):
            current = max(current, 1) * LARGE[word]
        else:
            total, current = total + max(current, 1) * LARGE[word], 0
    return Fraction(sign * (total + current), share or 1)


def meaning(phrase: str) -> str:
    """What a phrase such as "there are no solutions" says in one fixed form, or the phrase itself."""
    return next((fixed for fixed, form in MEANINGS.items() if form.fullmatch(phrase)), phrase)


_MONTHS = {form: index for index, name in enumerate(table("months", str).split(), 1) for form in (name, name[:3])}
_DATE = re.compile(
    rf"(?:(?P<y>\d{{4}})-(?P<m>\d\d)-(?P<d>\d\d))|(?:(?P<d1>\d\d?)(?:st|nd|rd|th)?\s+(?:of\s+)?)?"
    rf"(?P<name>{'|'.join(_MONTHS)})\b\.?(?:\s+(?P<d2>\d\d?)(?:st|nd|rd|th)?(?!\d))?(?:,?\s+(?P<y1>\d{{4}}))?"
)


def date_in_words(phrase: str) -> str:
    """A date in one fixed form, its year left out where it is not said; empty for what is none.

    >>> date_in_words("March 5, 2024") == date_in_words("5th of march 2024") == date_in_words("2024-03-05")
    True
    """
    found = _DATE.fullmatch(phrase.strip().lower())
    if found is None or not (day := found["d"] or found["d1"] or found["d2"]) or (found["d1"] and found["d2"]):
        return ""
    month = int(found["m"]) if found["m"] else _MONTHS[found["name"]]
    return f"date {found['y'] or found['y1'] or ''} {month} {int(day)}"


_WORDS_OF_THREE = words("words_of_three")


def is_word(letters: str) -> bool:
    """Whether a run of letters in maths is more likely a word than a product of variables."""
    lower = letters.lower()
    if len(letters) <= 2:
        return False
    if lower in ascii_lowercase:
        return letters.isupper()
    if len(letters) == 3:
        return lower in _WORDS_OF_THREE or not (letters.islower() or letters.isupper() or letters[1:].isupper())
    return True


_PIECE = re.compile(r"[^\W_]+|(?<=\d)['\"]+|[-+*/^=<>!?%|\\]")
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])")


def squashed(text: str) -> str:
    """A phrase as it is compared: lower case, punctuation and a leading article dropped, operators kept.

    >>> squashed("An  Ellipse.")
    'ellipse'
    """
    pieces = _PIECE.findall(_HYPHEN.sub(" ", text.lower()))
    if len(pieces) > 1 and pieces[0] in ("a", "an", "the") and pieces[1].isalnum():
        pieces = pieces[1:]
    return " ".join(pieces)
