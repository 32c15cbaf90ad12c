"""Tokenizer for servers that speak text only: lossless ids, each the number of the bytes it stands
for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Literal

import numpy as np

from atts.core import Message, TokenIds

Speaker = Literal["system", "user", "assistant"]
END, SYSTEM, USER, ASSISTANT = range(4)
_ROLES: dict[Speaker, int] = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
_NAMES: dict[int, Speaker] = {number: name for name, number in _ROLES.items()}
_LONGEST = 64  # bytes an id may stand for
# about as long as the tokens of common models
_WORD = re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}|\n+| +|.", re.DOTALL)


class TextTokenizer:
    """Text in pieces of about a token each; the exact tokens are the server's secret.

    Any piece is an id and any bytes are a text, so what a server wrote is kept as it was. A
    conversation keeps its roles: `messages` takes it apart again, which servers want that render it
    themselves.

    >>> tokenizer = TextTokenizer()
    >>> tokenizer.decode(tokenizer.encode("So x = 12345.\\n\\nça va"))
    'So x = 12345.\\n\\nça va'
    >>> [message.role for message in tokenizer.messages(tokenizer.render([Message("user", "2+2?")]))]
    ['user', 'assistant']
    """

    vocabulary = 1 << (8 * _LONGEST + 1)
    end_ids: TokenIds = (END,)
    digest = blake2b(_WORD.pattern.encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> TokenIds:
        """The ids of `text`."""
        return tuple(map(_number, _cut(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, ends and roles left out."""
        return b"".join(_bytes(index) for index in ids if index >= 256).decode("utf-8", "replace")

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """The ids of a conversation, ready for the assistant to go on; a last assistant message
        stays open.
        """
        ids: list[int] = []
        for message in messages:
            ids += [_ROLES[message.role], *self.encode(message.content)]
        return tuple(ids) if messages and messages[-1].role == "assistant" else (*ids, ASSISTANT)

    def messages(self, ids: TokenIds) -> list[Message]:
        """The conversation again; the last message is the assistant's so far, and may be empty."""
        starts = [place for place, index in enumerate(ids) if index in _NAMES]
        if not starts or starts[0]:
            return self.messages((USER, *ids))  # a text without roles is a question
        found = [
            Message(_NAMES[ids[start]], self.decode(ids[start + 1 : end]))
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
        ]
        return found if found[-1].role == "assistant" else [*found, Message("assistant", "")]

    def pieces(self, text: str, count: int) -> TokenIds:
        """The ids of a text that is said to have `count` tokens: that many, as far as its length
        allows.

        :raises ValueError: it is longer than that many ids can be.
        """
        whole = text.encode()
        ends = np.cumsum([0, *map(len, _cut(text))])
        while len(ends) > count + 1:  # the two that make the shortest one are joined
            ends = np.delete(ends, 1 + (ends[2:] - ends[:-2]).argmin())
        while len(ends) <= min(count, len(whole)):  # the longest is halved
            sizes = np.diff(ends)
            place = sizes.argmax()
            ends = np.insert(ends, place + 1, ends[place] + sizes[place] // 2)
        if np.diff(ends).max(initial=0) > _LONGEST:
            raise ValueError(f"{len(text)} characters in {count} tokens")
        return tuple(_number(whole[start:end]) for start, end in pairwise(ends.tolist()))


def _cut(text: str) -> Iterator[bytes]:
    """The bytes of the pieces of a text, none longer than an id can stand for."""
    for piece in _WORD.findall(text):
        data: bytes = piece.encode()
        yield from (data[at : at + _LONGEST] for at in range(0, len(data), _LONGEST))


def _number(piece: bytes) -> int:
    return int.from_bytes(b"\x01" + piece)


def _bytes(index: int) -> bytes:
    """What an id stands for; the leading byte only keeps zeros."""
    return index.to_bytes((index.bit_length() + 7) // 8)[1:]
