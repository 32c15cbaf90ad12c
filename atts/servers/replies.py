"""Strict decoding of server replies into typed values that the dialects share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Raw, Struct

T = TypeVar("T")
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Tokens = tuple[Token, ...]
# A log-probability at or below this is treated as invalid.
LOWEST = -1e6
# Rounding may lift a log-probability a little above 0.
HIGHEST = 1e-4
# vLLM writes minus infinity as this, because JSON has no infinity.
CLAMPED = -9999.0
_MINUS_INFINITY = -1e300
_WORDS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|NaN|-?Infinity', re.DOTALL)
# Numbers that no reply can hold stand in for what JSON lacks: they are refused later by name.
_NUMBERS = {b"NaN": b"1e300", b"Infinity": b"1e300", b"-Infinity": b"-1e300"}


def decode(text: bytes, kind: Any) -> Any:
    """Read JSON as a value of that type; nothing is coerced, and every number is bounded.

    Python's NaN and Infinity are read too, because servers in Python send them.

    >>> decode(b'{"logprob": -0.5}', dict[str, float])
    {'logprob': -0.5}

    :raises ValueError: it is not whole JSON, nested too deeply, or of another type: `true` is no
        number, "1" neither.
    """
    decoder = _decoder(kind)
    try:
        try:
            return decoder.decode(text)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if b"NaN" not in text and b"Infinity" not in text:
                raise
        return decoder.decode(_WORDS.sub(lambda word: _NUMBERS.get(word[0], word[0]), text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def logprob_of(value: float) -> float:
    """Return a log-probability, with JSON's stand-ins for minus infinity converted back."""
    if LOWEST < value <= CLAMPED or value == _MINUS_INFINITY:
        return -math.inf
    return value


def is_score(value: float) -> bool:
    """Return whether it can be the log-probability of a given token, which may be impossible."""
    return LOWEST < value <= HIGHEST or value == -math.inf


def are_logprobs(values: Sequence[float | None]) -> bool:
    """Return whether all can be log-probabilities of sampled tokens; None says nothing.

    NaN, infinities and what lies far outside cannot.
    """
    known = cast("Sequence[float]", values)
    if None in values:
        known = [value for value in values if value is not None]
    if not known:
        return True
    # Extremes and a sum instead of a loop: NaN escapes comparisons, but not a sum.
    return LOWEST < min(known) and max(known) <= HIGHEST and not math.isnan(sum(known))


def are_scores(values: Sequence[float]) -> bool:
    """Return whether all can be log-probabilities of given tokens, which may be impossible ones."""
    return are_logprobs(values) or all(map(is_score, values))


def finish_of(word: str | None) -> Literal["stop", "length"]:
    """Return why a server stopped.

    :raises ValueError: for any other reason, such as an abort that atts did not request.
    """
    if word == "stop":
        return "stop"
    if word == "length":
        return "length"
    raise ValueError(f"it ended because of {word!r:.80}")


class ModelRow(Struct):
    """A row of /v1/models; hosted models give their context length under other names."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Count | None = None
    context_length: Count | None = None
    context_window: Count | None = None


class ModelRows(Struct):
    """The reply of /v1/models."""

    data: tuple[ModelRow, ...]


class Version(Struct):
    """The reply of /version."""

    version: str


class Tokenized(Struct):
    """The reply of /tokenize."""

    tokens: Tokens


class _Cached(Struct):
    cached_tokens: Count | None = None


class _Reasoning(Struct):
    reasoning_tokens: Count | None = None


class TokenCounts(Struct):
    """The counts of a reply; details only where the server counts them."""

    completion_tokens: Count | None = None
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoning | None = None

    @property
    def cached(self) -> int:
        """Return the cached prompt tokens, 0 where the server does not count them."""
        details = self.prompt_tokens_details
        if details is None or details.cached_tokens is None:
            return 0
        return details.cached_tokens

    @property
    def reasoning(self) -> int:
        """Return the tokens that were spent on reasoning, 0 where the server does not count them."""
        details = self.completion_tokens_details
        if details is None or details.reasoning_tokens is None:
            return 0
        return details.reasoning_tokens


def error_text(reply: bytes) -> str:
    """Return the message of an error reply, in one line."""
    try:
        # Servers wrap the text in up to three objects: {"error": {"message": ...}}
        while True:
            fields = decode(reply, dict[str, Raw])
            names = [name for name in ("error", "message", "detail", "object") if name in fields]
            reply = bytes(fields[names[0]]) if names else b'""'
    except ValueError:
        pass
    try:
        text: str = decode(reply, str)
    except ValueError:
        text = reply.decode(errors="replace")
    return " ".join(text.split())[:300] or "no reason given"
