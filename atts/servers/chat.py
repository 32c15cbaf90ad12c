"""Chat dialect, the API that most hosted models share: text goes in and out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
from msgspec import Struct

from atts.core import Message, SampleRequest, TokenIds
from atts.errors import UnsupportedByEngine
from atts.servers.client import Call, Client
from atts.servers.dialect import (
    Dialect,
    Identity,
    LogProbs,
    Rater,
    RawCompletion,
    choose_model,
    json_of,
    seed_of,
)
from atts.servers.options import Prefill, RemoteOptions
from atts.servers.replies import ModelRow, ModelRows, TokenCounts, decode, finish_of, is_score

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


# where the server does not say; an overflow that only the server sees is one all the same
CONTEXT = 131_072
ALTERNATIVES = 20  # the most that servers tell
_GO_ON = (
    "\n\nHere is the beginning of the answer:\n\n{text}\n\n"
    "Continue it from exactly where it stops. Write nothing but the continuation, and repeat "
    "nothing."
)


class _Message(Struct):
    content: str | None = None


class _Alternative(Struct):
    token: str
    logprob: float


class _Place(Struct):
    top_logprobs: tuple[_Alternative, ...]


class _LogProbs(Struct):
    content: tuple[_Place, ...]


class _Choice(Struct):
    message: _Message
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None


class _Completion(Struct):
    choices: tuple[_Choice, ...]
    usage: TokenCounts | None = None


class TextDialect(Dialect):
    """What the dialects that take messages and give text have in common: no ids, no log-probs,
    nothing to abort.
    """

    speaks: Literal["ids", "text"] = "text"
    spare = 0
    logprobs: LogProbs = "none"

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._text = TextTokenizer()


class ChatDialect(TextDialect, Rater):
    """Any server with /chat/completions; its URL ends where that path begins
    (https://api.openai.com/v1).

    Stop strings are not sent: these servers do not tell a stop from the model's own end. They are
    looked for here.
    """

    name = "chat"

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._limit = "max_tokens"

    async def identify(self, client: Client, model: str) -> Identity:
        """See `Dialect`; a server that lists no models is believed to have the one that is named."""
        reply = await client.look("/models")
        host = urlsplit(client.url).hostname or ""
        if host.endswith("openai.com"):
            # its newer models refuse the older word, others know no other
            self._limit = "max_completion_tokens"
        row = ModelRow(model)
        if reply.status not in (404, 405) or not model:
            row = choose_model(client, json_of(client, reply, ModelRows).data, model)
        self._model = row.id
        told = row.max_model_len or row.context_length or row.context_window or CONTEXT
        return Identity(f"chat {host}", "", self._model, self._options.context or told)

    def sampling(self, request: SampleRequest, rid: str) -> Call:
        """See `Dialect`.

        :raises UnsupportedByEngine: a sampling field that this API lacks, and `extras` does not
            allow more.
        """
        sampling = request.sampling
        body: dict[str, Any] = {
            **self._head(request.ids),
            self._limit: request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed_of(request, 31),
        }
        if sampling.top_k or sampling.min_p:
            if self._options.extras != "send":
                advice = "Leave them out, or say extras=send if this server knows them"
                raise UnsupportedByEngine(
                    self._model, "the chat API has neither top_k nor min_p", advice
                )
            body |= {"top_k": sampling.top_k or -1, "min_p": sampling.min_p}
        return Call("/chat/completions", body)

    def sampled(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """See `Dialect`."""
        found: _Completion = decode(reply, _Completion)
        (choice,) = found.choices
        usage = found.usage or TokenCounts()
        text = choice.message.content or ""
        finish = finish_of(choice.finish_reason)
        return written(
            self._text, text, finish, request, usage.completion_tokens or 0, usage.cached
        )

    def rating(self, ids: TokenIds, rid: str) -> Call:
        """See `Rater`."""
        body = {
            self._limit: 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
        }
        return Call("/chat/completions", self._head(ids) | body)

    def rated(self, reply: bytes) -> dict[str, float]:
        """See `Rater`; a word with and without a space before it is one word."""
        found: _Completion = decode(reply, _Completion)
        (choice,) = found.choices
        places = choice.logprobs.content if choice.logprobs else ()
        masses: dict[str, float] = {}
        for row in places[0].top_logprobs if places else ():
            if not is_score(row.logprob):
                raise ValueError(f"a log-probability of {row.logprob}")
            word = row.token.strip()
            masses[word] = masses.get(word, 0.0) + math.exp(row.logprob)
        return {
            word: min(0.0, math.log(mass)) if mass > 0 else -math.inf
            for word, mass in masses.items()
        }

    def _head(self, ids: TokenIds) -> dict[str, Any]:
        messages, fields = opened(self._text.messages(ids), self._options.prefill)
        return {"model": self._model, "messages": messages, **fields}


def opened(
    messages: list[Message], prefill: Prefill
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation whose last message is to be gone on with, in words or as the server wants it,
    and its flags.
    """
    begun = messages[-1].content
    rows: list[dict[str, Any]] = [
        {"role": row.role, "content": row.content} for row in messages[:-1]
    ]
    if not begun:
        return rows, {}
    if prefill == "ask":
        question = rows.pop()["content"] if rows and rows[-1]["role"] == "user" else ""
        return [*rows, {"role": "user", "content": question + _GO_ON.format(text=begun)}], {}
    last = {"role": "assistant", "content": begun}
    if prefill == "prefix":
        return [*rows, last | {"prefix": True}], {}
    flags = (
        {"continue_final_message": True, "add_generation_prompt": False}
        if prefill == "continue"
        else {}
    )
    return [*rows, last], flags


def written(
    tokenizer: TextTokenizer,
    text: str,
    finish: Literal["stop", "length"],
    request: SampleRequest,
    tokens: int,
    cached: int = 0,
) -> RawCompletion:
    """A text as a completion: as many ids as the server counted tokens, and an end where the model
    ended.

    :raises ValueError: nothing was written, though the model did not end.
    """
    if not text and finish == "length":
        raise ValueError("no text came: every token was spent on hidden reasoning, or was none")
    ends = finish == "stop"
    most = max(1, request.max_tokens - ends)
    counted = request.max_tokens if not ends else min(tokens, most) or len(tokenizer.encode(text))
    ids = tokenizer.pieces(text, min(counted, most) if ends else counted)
    return RawCompletion((*ids, END)[: request.max_tokens] if ends else ids, (), finish, cached)
