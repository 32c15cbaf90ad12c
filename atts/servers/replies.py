"""Strict decoding of server replies: JSON into typed values, nothing coerced, every number within
its bounds.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

T = TypeVar("T")
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Tokens = tuple[Token, ...]
LOWEST = -1e6
CLAMPED = -9999.0  # below the one nothing is believed; the other is vLLM's minus infinity in JSON
_MINUS_INFINITY = -1e300
_WORDS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|NaN|-?Infinity', re.DOTALL)
# 1e300 is nothing that is asked for
_NUMBERS = {
    b"NaN": b"1e300",
    b"Infinity": b"1e300",
    b"-Infinity": b"-1e300",
}


def decode(text: bytes, kind: Any) -> Any:
    """The JSON text as a value of that type; Python's NaN and Infinity are read, for servers in
    Python send them.

    >>> decode(b'{"logprob": -0.5}', dict[str, float])
    {'logprob': -0.5}

    :raises ValueError: it is not whole JSON, nested too deeply, or of another type: `true` is no
        number, "1" neither.
    """
    try:
        try:
            return _decoder(kind).decode(text)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if b"NaN" not in text and b"Infinity" not in text:
                raise
        return _decoder(kind).decode(
            _WORDS.sub(lambda found: _NUMBERS.get(found[0], found[0]), text)
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def logprob_of(value: float) -> float:
    """A log-probability as sent; what stands for minus infinity in JSON is that again."""
    return float("-inf") if LOWEST < value <= CLAMPED or value == _MINUS_INFINITY else value


def is_logprob(value: float) -> bool:
    """Whether it can be the log-probability of a token that was sampled; NaN cannot."""
    return LOWEST < value <= 1e-4


def is_score(value: float) -> bool:
    """Whether it can be the log-probability of a given token, which may have had no chance at all."""
    return is_logprob(value) or value == float("-inf")


def finish_of(word: str | None) -> Any:
    """Why a server stopped: "stop" or "length".

    :raises ValueError: for another reason, such as an abort that was not ours.
    """
    if word not in ("stop", "length"):
        raise ValueError(f"it ended because of {word!r:.80}")
    return word


class ModelRow(Struct):
    """A row of /v1/models; hosted models tell their context length under other names."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Count | None = None
    context_length: Count | None = None
    context_window: Count | None = None


class ModelRows(Struct):
    """What /v1/models lists."""

    data: tuple[ModelRow, ...]


class Version(Struct):
    """What /version tells."""

    version: str


class Tokenized(Struct):
    """What /tokenize tells."""

    tokens: Tokens


class _Cached(Struct):
    cached_tokens: Count | None = None


class TokenCounts(Struct):
    """What a reply counts; prompt tokens from the cache only where the server tells them."""

    completion_tokens: Count | None = None
    prompt_tokens_details: _Cached | None = None

    @property
    def cached(self) -> int:
        """Cached prompt tokens, 0 as well where the server does not tell."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


def said(reply: bytes) -> str:
    """What an error reply says, in a line."""
    try:
        while (row := decode(reply, dict[str, Raw])) is not None:
            reply = next(
                (
                    bytes(row[name])
                    for name in ("error", "message", "detail", "object")
                    if name in row
                ),
                b'""',
            )
    except ValueError:
        pass
    try:
        text: str = decode(reply, str)
    except ValueError:
        text = reply.decode(errors="replace")
    return " ".join(text.split())[:300] or "no reason given"
