"""Chat dialect, the API most hosted models share: text in and out, ratings from likely tokens, no
scores.
"""

from __future__ import annotations

import math
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from atts.core import Message, SampleRequest, TokenIds
from atts.errors import UnsupportedByEngine
from atts.servers.client import Call, Client
from atts.servers.dialects import (
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
from atts.servers.text_tokenizer import END, TextTokenizer

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
