"""Extraction of answers that are stated, not boxed: after a mark, in a last sentence, or as a last number."""

import re
from collections.abc import Iterator

from atts.core import AnswerKind
from atts.evaluators.syntax.vocabulary import Tables

_DATA = Tables("answers.toml")
_TAIL = 4_000  # characters at the end that are looked at for a statement
_LETTER = (
    r"(?<![A-Za-z0-9'’])(?!I\s+[a-z])(?!A\s+(?!is|was|because|since|as|and|or|but|seems|can|must|fails|over)[a-z])"
    r"([A-J])(?![A-Za-z0-9'’])"
)
_LETTERS = rf"\(?{_LETTER}\)?(?:\s*(?:,|/|and|or|nor|,\s*and|,\s*or)\s*\(?{_LETTER}\)?)*"


def _pattern(name: str, flags: int = 0, letter: str = "") -> re.Pattern[str]:
    return re.compile("|".join(line.replace("X", letter or "X") for line in _DATA.lines(name)), flags)


TURN = re.compile(rf"(?:{_pattern('turns').pattern})(?!\s*(?:<[^<>\s]*>\s*)?assistant)", re.IGNORECASE)
_OPENING = re.compile(r"\A(?:\s|<\|[^|>]*\|>|<｜[^｜>]*｜>|<s>|assistant\b)*\Z")
_MARKS = _pattern("marks", re.IGNORECASE | re.MULTILINE)
_STATES = _pattern("states", re.IGNORECASE)
_DENIED, _SETTLED = _pattern("denied", letter=_LETTERS), _pattern("settled", letter=rf"\(?{_LETTER}\)?")
_LINK = "|".join(word + r"\b" * (len(word) > 1 and word.isascii()) for word in sorted(_DATA.words("links")))
_LINKS = rf"(?:\s*(?:{_LINK})\s*){{1,2}}"
_SPAN = r"\$\$.+?\$\$|(?<!\\)\$(?:[^$\n\\]|\\.)+?\$|\\\(.+?\\\)|\\\[.+?\\\]"
_MATHS = re.compile(_SPAN, re.DOTALL)
_SENTENCE_END = re.compile(r"[.!](?=\s|$)|[。．！।]|\n\s*\n|\n(?=\s*[A-Z*#-])")
_AMOUNT = (
    r"-?\\frac\{-?\d+\}\{\d+\}|(?<![A-Za-z0-9_.])[-−]?\\?\$?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%|i\b)?"
    r"|(?<![A-Za-z0-9_.])-?\.\d+"
)
_NUMBER = re.compile(_AMOUNT)
_NAME = r"(?:(?<![A-Za-z\\])[A-Za-z](?:_\w)?\s*=\s*)?"
_ITEM = rf"{_NAME}(?:{_SPAN}|{_AMOUNT}|\([^()]*\d[^()]*\))"
_RUN = re.compile(rf"{_ITEM}(?:{_LINKS}{_ITEM})+", re.DOTALL)
_WORDY = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z{(])")
_FOREIGN = re.compile("[\u0400-\u06ff\u0900-\u0dff\u3040-\ud7af]")
_FINAL = re.compile(r"final\s+answers?\**\s*(?:is|are|:)", re.IGNORECASE)
_ASIDE = re.compile(r"I hope|Let me know|Note|Thank|If you")
_CORRECTION = re.compile(r",?\s+(?:and\s+)?(?:not|rather than|instead of)\s.*|,\s*(?:since|because)\s.*", re.DOTALL)
_CLOSED = re.compile(r"[<\[]/[a-z]", re.IGNORECASE)
_CLOSINGS = {'"': r'(?<!\\)"', "'": "'", "[": r"\]"}
_TYPESETTING = re.compile(r"\\[a-z]+(?=\{)|[${}*\"“”`「」]")


def turn_end(text: str) -> int:
    """Where the next speaker's turn begins, the end of the text where none does."""
    found = (each.start() for each in TURN.finditer(text) if not _OPENING.match(text[: each.start()]))
    return next(found, len(text))


def overruled(text: str, kind: AnswerKind) -> str | None:
    """The value a text after its last box calls the final answer; None when it names none."""
    return marked(text, kind) if _FINAL.search(text) else None


def marked(text: str, kind: AnswerKind) -> str | None:
    """What follows the last explicit mark such as "Answer:", "####" or a tag that has something after it."""
    for mark in [*_MARKS.finditer(text)][:-21:-1]:
        following, said = _CLOSED.split(text[mark.end() : mark.end() + _TAIL], maxsplit=1)[0], mark[0].rstrip()
        if closing := _CLOSINGS.get(said[-1:]):
            following = re.split(closing, following, maxsplit=1)[0].replace("\\\\", "\\" if said[-1] == '"' else "\\\\")
        elif said[:1] in ("'", '"'):
            following = re.split(r"[,}\n]", following, maxsplit=1)[0]
        if found := _value(following.lstrip(), kind):
            return found
    return None


def _value(following: str, kind: AnswerKind) -> str | None:
    """The value at the start of what follows a mark, or in its first sentence."""
    if kind == "choice":
        return _choice(following[:200], first=True)
    following = following.lstrip("*: \n")
    run = _RUN.match(following)
    maths = _MATHS.match(following)
    if run or maths:
        return _listed(run[0]) if run else _inside(maths)  # type: ignore[arg-type]  # one of them was found
    sentence = _CORRECTION.sub("", next(_sentences(following), "").strip().strip("*").strip())
    if not sentence:
        return None
    if kind == "text":
        return sentence
    if not _has_words(sentence):
        return _trimmed(sentence)
    return _stated_in(sentence) or (_trimmed(sentence) if len(sentence.split()) <= 4 and len(sentence) < 60 else None)


def _listed(run: str) -> str:
    """Several values, each out of its dollar signs, as one answer."""
    items = [_MATHS.sub(_inside, found[0]) for found in re.finditer(_ITEM, run, re.DOTALL)]
    return (" or " if re.search(r"\bor\b", run) and "=" in run else ", ").join(items)


def _inside(found: re.Match[str]) -> str:
    """What stands between the signs that set off maths."""
    return found[0][2:-2].strip() if found[0][:2] in ("$$", "\\(", "\\[") else found[0][1:-1].strip()


def _sentences(text: str) -> Iterator[str]:
    at = 0
    for end in _SENTENCE_END.finditer(text):
        yield text[at : end.start()]
        at = end.end()
    yield text[at:]


def _has_words(sentence: str) -> bool:
    return len(_WORDY.findall(sentence)) > 1 or bool(_FOREIGN.search(sentence))


def _trimmed(sentence: str) -> str:
    sentence = sentence.strip().rstrip(".,;`").strip().lstrip("`")
    return sentence.lstrip("$ ") if sentence.count("$") == 1 and not sentence.endswith("$") else sentence


def _stated_in(sentence: str) -> str | None:
    """The value or values a sentence states: what comes after its last "is" or "=", else its last ones."""
    if _NUMBER.search(corrected := _CORRECTION.sub("", sentence)):
        sentence = corrected
    states = list(_STATES.finditer(sentence))
    *_, maths = [None, *_MATHS.finditer(sentence)]
    *_, run = [None, *_RUN.finditer(sentence)]
    if run and not _NUMBER.search(sentence[run.end() :]) and not _MATHS.search(sentence, run.end()):
        return _listed(run[0])
    if maths:
        rest = sentence[maths.end() :]
        later = states and states[-1].start() >= maths.end() and _NUMBER.search(rest)
        return _inside(maths) if not later else _last_number(rest)
    bold = re.findall(r"\*\*([^*]+)\*\*", sentence)
    return _last_number(bold[-1] if bold and _NUMBER.search(bold[-1]) else sentence)


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return _trimmed(found[-1]).lstrip("\\$").rstrip(",") if found else None


def stated(text: str, kind: AnswerKind) -> str | None:
    """The value the last sentence states, or a last line that is nothing but one; None otherwise."""
    text = text[-_TAIL:].rstrip("` \n")
    if kind == "choice":
        return _choice(text)
    for sentence in [each.strip() for each in _sentences(text) if each.strip(" .\n*")][:-4:-1]:
        if _ASIDE.match(sentence):
            continue
        if not _has_words(sentence) and _NUMBER.search(sentence) and len(sentence) < 200:
            return _bare(sentence.splitlines()[-1])
        return _stated_in(sentence) if _STATES.search(sentence) or _FOREIGN.search(sentence) else None
    return None


def _bare(line: str) -> str | None:
    """A line without words: its maths, its values, what its last = gives, or its last number."""
    maths = _MATHS.search(line)
    if run := _RUN.search(line):
        return _listed(run[0])
    if maths:
        return _inside(maths)
    value = line.rpartition("=")[2]
    return _trimmed(value) if value.isascii() and not re.search(r"\*\*|\]", value) else _last_number(value)


def _choice(text: str, first: bool = False) -> str | None:
    """The letter a text settles on, letters that it rules out left aside; the one at its start where `first`."""
    plain = " ".join(_TYPESETTING.sub(" ", text).split())
    if len(only := plain.strip("().: ")) == 1:
        return only.upper() if only.upper() in "ABCDEFGHIJ" else None
    if first and (leading := _STARTING.match(plain)):
        return leading[1]
    rest = _DENIED.sub(" ", plain)
    found = list(_SETTLED.finditer(rest)) or list(_LEADING.finditer(text))[:1] or list(_ONE.finditer(rest))
    is_clear = found and (len(plain.split()) < 13 or found[0].re is not _ONE)
    return next(filter(None, found[-1].groups())) if is_clear else None


_ONE, _STARTING = re.compile(_LETTER), re.compile(rf"[(\s]*{_LETTER}")
_LEADING = re.compile(r"(?:^|\n)[\s*]*\(?([A-J])\)?(?:[).:*]|\s+[A-Z]|\s*$)")


def trailing_number(text: str) -> str | None:
    """The last number anywhere near the end."""
    return _last_number(text[-_TAIL:])
