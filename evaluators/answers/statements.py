"""Extraction of answers that are stated, not boxed: after a mark, in a last sentence, or as a last number."""

from __future__ import annotations

import re
from collections.abc import Iterator

from atts.core import AnswerKind

_TAIL = 4_000  # characters at the end that are looked at for a statement
_MARKS = re.compile(
    r"<answer>|^[ \t]*#{3,4}(?=[ \t]*[^#\s])"
    r"|(?:final\s+)?answers?\**\s*(?:is|are|would\s+be|must\s+be|=)?\s*(?:therefore|thus|simply|for\s+sure)?\s*\**\s*[:：]\s*\**"
    r"|(?:final\s+|correct\s+|the\s+)answers?\**\s+(?:is|are|must\s+be|should\s+be|would\s+be)(?![a-z])(?:\s+for\s+sure|\s+option|\s+choice)?\s*:?"
    r"|\banswers?\s*(?=\$|\\\(|\\\[)"
    r"|\banswers?\s+is(?![a-z])|答案\s*(?:是|为)?\s*[:：]?|réponse\s*(?:est|:)|respuesta\s*(?:es|:)|antwort\s*(?:ist|:)",
    re.IGNORECASE | re.MULTILINE,
)
_CHAT = re.compile(r"<\|[^|>]{0,40}\|>.*", re.DOTALL)
_MATHS = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!](?=\s|$)|[。！।]|\n\s*\n|\n(?=\s*[A-Z*#-])")
_NUMBER = re.compile(
    r"-?\\frac\{-?\d+\}\{\d+\}|(?<![A-Za-z0-9_.])[-−]?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?|(?<![A-Za-z0-9_.])-?\.\d+"
)
_STATES = re.compile(
    r"(?:\\[lg]t|\\[lg]eq?|\\neq?|[<>≤≥≠]|\b(?:that|find|is|are|was|be|equals?|gives?|gets?|has|have|becomes?|by|about|yields?|it's|that's|located\s+between|there\s+are|remainder|est|donc|soit)\b|[=:：≈]|是|为|有)",
    re.IGNORECASE,
)  # fmt: skip
_LETTER = re.compile(r"(?<![A-Za-z0-9'])\(?([A-J])(?![A-Za-z0-9'])")


_FINAL = re.compile(r"final\s+answers?\**\s*(?:is|are|:)", re.IGNORECASE)


def overruled(text: str, kind: AnswerKind) -> str | None:
    """The value a text after its last box calls the final answer; None when it names none."""
    return marked(text, kind) if _FINAL.search(text) else None


def marked(text: str, kind: AnswerKind) -> str | None:
    """What follows the last explicit mark such as "Answer:" or "####" that has something after it."""
    text = _CHAT.sub("", text) if "<|" in text else text
    for mark in reversed([found.end() for found in _MARKS.finditer(text)][-20:]):
        following = text[mark : mark + _TAIL]
        end = following.find("</answer>")
        if end >= 0 and "<answer>" in text[:mark][-10:]:
            following = following[:end]
        found = _value(following.lstrip(), kind)
        if found:
            return found
    return None


def _value(following: str, kind: AnswerKind) -> str | None:
    """The value at the start of what follows a mark, or in its first sentence."""
    if kind == "choice":
        letter = _LETTER.search(following[:200])
        return letter[1] if letter else None
    following = following.lstrip("*: \n")
    maths = _MATHS.match(following)
    if maths:
        return _joined_maths(following, maths)
    sentence = next(_sentences(following), "").strip().strip("*").strip()
    if not sentence:
        return None
    if kind == "text":
        return sentence
    if not _has_words(sentence):
        return _trimmed(sentence)
    return _stated_in(sentence) or _short(sentence)


def _joined_maths(text: str, first: re.Match[str]) -> str:
    """$12$ and $13$ as one answer."""
    parts, at = [_inside(first)], first.end()
    while True:
        following = re.compile(r"\s*(?:,|and|or|,\s*and)\s*").match(text, at)
        after = _MATHS.match(text, following.end()) if following else None
        if after is None:
            return ", ".join(parts)
        parts.append(_inside(after))
        at = after.end()


def _inside(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group is not None).strip()


def _sentences(text: str) -> Iterator[str]:
    at = 0
    for end in _SENTENCE_END.finditer(text):
        yield text[at : end.start()]
        at = end.end()
    yield text[at:]


_WORDY = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z{(])")


def _has_words(sentence: str) -> bool:
    return len(_WORDY.findall(sentence)) > 1


def _trimmed(sentence: str) -> str:
    sentence = sentence.strip().rstrip(".,;").strip()
    return sentence.lstrip("$ ") if sentence.count("$") == 1 and not sentence.endswith("$") else sentence


def _short(sentence: str) -> str | None:
    return _trimmed(sentence) if len(sentence.split()) <= 4 and len(sentence) < 60 else None


def _stated_in(sentence: str) -> str | None:
    """The value a sentence states: the maths or number after its last "is" or "=", else its last one."""
    states = list(_STATES.finditer(sentence))
    maths = list(_MATHS.finditer(sentence))
    if maths:
        if len(maths) > 1 and re.fullmatch(r"\s*(?:,|and|or)\s*", sentence[maths[-2].end() : maths[-1].start()]):
            return f"{_inside(maths[-2])}, {_inside(maths[-1])}"
        rest = sentence[maths[-1].end() :]
        later = states and states[-1].start() >= maths[-1].end() and _NUMBER.search(rest)
        return _inside(maths[-1]) if not later else _last_number(rest)
    bold = re.findall(r"\*\*([^*]+)\*\*", sentence)
    if bold and _NUMBER.search(bold[-1]):
        return _last_number(bold[-1])
    return _last_number(sentence)


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return _trimmed(found[-1]).lstrip("$").rstrip(",") if found else None


def stated(text: str, kind: AnswerKind) -> str | None:
    """The value the last sentence states, or a last line that is nothing but one; None otherwise."""
    text = _CHAT.sub("", text)[-_TAIL:] if "<|" in text else text[-_TAIL:]
    if kind == "choice":
        return _stated_choice(text)
    sentences = [sentence.strip() for sentence in _sentences(text) if sentence.strip(" .\n*")]
    for sentence in sentences[:-4:-1]:
        if re.match(r"(?:I hope|Let me know|Note|Thank|If you)", sentence):
            continue
        if not _has_words(sentence) and _NUMBER.search(sentence) and len(sentence) < 200:
            return _bare(sentence.splitlines()[-1])
        if _STATES.search(sentence):
            found = _stated_in(sentence)
            if found is not None:
                return found
        return None
    return None


def _bare(line: str) -> str | None:
    """A line without words: its maths, what its last = gives, or its last number."""
    maths = _MATHS.search(line)
    if maths:
        return _inside(maths)
    value = line.rpartition("=")[2]
    return _trimmed(value) if value.isascii() and not re.search(r"[^\x00-\x7f]|\*\*|\]", value) else _last_number(value)


def _stated_choice(text: str) -> str | None:
    """The letter a text settles on, at its start or after "it's", "is", "choose"."""
    found = _SETTLED.findall(text)
    if found:
        return str(found[-1])
    first = _LEADING_LETTER.search(text)
    return first[1] if first else None


_SETTLED = re.compile(
    r"(?:(?<!not )(?<!n't )(?:\bis|it's|that's|choose|option|select|pick))\s+(?:for sure\s+|option\s+)?"
    r"\(?([A-J])(?![A-Za-z'])"
)
_LEADING_LETTER = re.compile(r"(?:^|\n)\s*\(?([A-J])(?:[).:]|\s+[A-Z]|\s*$)")


def trailing_number(text: str) -> str | None:
    """The last number anywhere near the end."""
    return _last_number(_CHAT.sub("", text)[-_TAIL:])
