"""The chat dialect, the text API that most hosted models share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from atts.core import Message, SampleRequest, TokenIds
from atts.errors import OptionError, UnsupportedByEngine
from atts.servers.client import (
    Call,
    Client,
    ModelRow,
    ModelRows,
    TokenCounts,
    decode,
    finish_of,
    is_score,
)
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

Speaker = Literal["system", "user", "assistant"]
END, SYSTEM, USER, ASSISTANT = range(4)
_ROLES: dict[Speaker, int] = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
_NAMES: dict[int, Speaker] = {number: name for name, number in _ROLES.items()}
# The most bytes that an id may stand for.
_LONGEST = 64
# A pattern of pieces that are about as long as the tokens of common models.
_WORD = re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}|\n+| +|.", re.DOTALL)

# The context length that is assumed if the server does not report one; an overflow at the server is
# an error too.
CONTEXT = 131_072
# The most alternatives that servers give for a token.
ALTERNATIVES = 20
THINK = "<think>\n"
THINK_END = "\n</think>\n\n"
_CONTINUE = (
    "\n\nHere is the beginning of the answer:\n\n{text}\n\n"
    "Continue it from exactly where it stops. Write nothing but the continuation, and repeat "
    "nothing."
)


class TextTokenizer:
    """A tokenizer with pieces of about a token each; only the server knows the exact tokens.

    Every piece has an id and all bytes are a text, so a server's text is kept exactly. An id is the
    number that the piece's bytes form. A conversation keeps its roles: `messages` splits it again,
    for servers that render it themselves.

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
        """Return the ids of `text`."""
        return tuple(map(_id_of, _pieces(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without ends and roles."""
        return b"".join(map(_bytes_of, ids)).decode("utf-8", "replace")

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return the ids of a conversation, ready for the assistant to continue.

        A last assistant message stays open.
        """
        ids: list[int] = []
        for message in messages:
            ids += [_ROLES[message.role], *self.encode(message.content)]
        if not messages or messages[-1].role != "assistant":
            ids.append(ASSISTANT)
        return tuple(ids)

    def messages(self, ids: TokenIds) -> list[Message]:
        """Return the conversation from its ids.

        The last message is the assistant's beginning, which may be empty.
        """
        # Compare before the look-up, because hashing a piece's large number takes longer.
        starts = [
            position for position, token in enumerate(ids) if token <= ASSISTANT and token in _NAMES
        ]
        if not starts or starts[0] != 0:
            # A text without roles is a question.
            return self.messages((USER, *ids))
        messages = [
            Message(_NAMES[ids[start]], self.decode(ids[start + 1 : end]))
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
        ]
        if messages[-1].role != "assistant":
            messages.append(Message("assistant", ""))
        return messages

    def pieces(self, text: str, count: int) -> TokenIds:
        """Return the ids of a text to which the server counted `count` tokens.

        There are that many ids, if the length of the text allows.

        :raises ValueError: if the text is too long for that many ids.
        """
        data = text.encode()
        sizes = [len(piece) for piece in _pieces(text)]
        if len(sizes) > count:
            sizes = _joined(sizes, count)
        elif len(sizes) < count:
            sizes = _halved(sizes, min(count, len(data)))
        if max(sizes, default=0) > _LONGEST:
            raise ValueError(f"{len(text)} characters in {count} tokens")
        ids: list[int] = []
        start = 0
        for size in sizes:
            ids.append(_id_of(data[start : start + size]))
            start += size
        return tuple(ids)


def _joined(sizes: list[int], count: int) -> list[int]:
    """Join pieces until `count` remain, always the two neighbours with the shortest result."""
    sizes = list(sizes)
    following = list(range(1, len(sizes) + 1))
    preceding = list(range(-1, len(sizes) - 1))
    heap = [(sizes[first] + sizes[first + 1], first) for first in range(len(sizes) - 1)]
    heapify(heap)
    num_pieces = len(sizes)
    count = max(1, count)
    while num_pieces > count:
        size, first = heappop(heap)
        second = following[first]
        # The entry is stale: sizes have changed, or the piece was joined to the one before it.
        if not sizes[first] or second == len(sizes) or sizes[first] + sizes[second] != size:
            continue
        sizes[first] = size
        sizes[second] = 0
        following[first] = after = following[second]
        if after < len(sizes):
            preceding[after] = first
            heappush(heap, (size + sizes[after], first))
        before = preceding[first]
        if before >= 0:
            heappush(heap, (sizes[before] + size, before))
        num_pieces -= 1
    return [size for size in sizes if size]


def _halved(sizes: list[int], count: int) -> list[int]:
    """Halve pieces until there are `count`, always the longest one."""
    heap: list[tuple[int, int, int]] = []
    start = 0
    for size in sizes:
        heap.append((-size, start, size))
        start += size
    heapify(heap)
    while len(heap) < count:
        _, start, size = heappop(heap)
        half = size // 2
        heappush(heap, (-half, start, half))
        heappush(heap, (half - size, start + half, size - half))
    return [size for _, _, size in sorted(heap, key=lambda piece: piece[1])]


def _pieces(text: str) -> list[bytes]:
    """Return the bytes of the pieces of a text, none longer than an id can stand for."""
    words = [word.encode() for word in _WORD.findall(text)]
    if max(map(len, words), default=0) <= _LONGEST:
        return words
    # Long runs of spaces or line breaks are too long for one id.
    return [
        word[start : start + _LONGEST] for word in words for start in range(0, len(word), _LONGEST)
    ]


# A cache, because a language has about ten thousand pieces, which occur again in every turn.
@lru_cache(1 << 16)
def _id_of(piece: bytes) -> int:
    # The leading byte keeps zeros, and keeps every id above those of ends and roles.
    return int.from_bytes(b"\x01" + piece)


@lru_cache(1 << 16)
def _bytes_of(token: int) -> bytes:
    # Ends and roles have no text; every other id has the leading byte of `_id_of`.
    if token < 256:
        return b""
    return token.to_bytes((token.bit_length() + 7) // 8)[1:]


class TextDialect(Dialect):
    """A dialect that takes messages and returns text, without ids, log-probs or aborts."""

    speaks: Literal["ids", "text"] = "text"
    spare = 0
    logprobs: LogProbs = "none"

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._text = TextTokenizer()
        # Whether a reply has separated its reasoning from its content.
        self._separates = False

    def _written(
        self,
        request: SampleRequest,
        reasoning: object,
        content: str,
        finish: Literal["stop", "length"],
        tokens: int,
        cached: int = 0,
    ) -> RawCompletion:
        """Return a reply as a completion: as many ids as the server counted tokens.

        An end is added if the model ended. Reasoning from a separate field is put before the
        content as "<think>\\n…\\n</think>\\n\\n", in the form in which other models write it; what
        continues such a text continues its reasoning. A reply without any text, whose model
        reasoned unseen up to its limit, has no ids.
        """
        thought = reasoning if isinstance(reasoning, str) else ""
        if thought:
            self._separates = True
        text = content
        if self._separates:
            so_far = self._text.messages(request.ids)[-1].content
            text = with_reasoning(so_far, thought, content)
        if not text and finish == "length":
            return RawCompletion((), (), finish, cached)
        if finish == "length":
            ids = self._text.pieces(text, request.max_tokens)
            return RawCompletion(ids, (), finish, cached)
        # One of the counted tokens is the end.
        most = max(1, request.max_tokens - 1)
        count = min(tokens, most) or min(len(self._text.encode(text)), most)
        ids = (*self._text.pieces(text, count), END)
        return RawCompletion(ids[: request.max_tokens], (), finish, cached)


def with_reasoning(so_far: str, reasoning: str, content: str) -> str:
    """Return a reply with separate reasoning and content as one text.

    >>> with_reasoning("", "2 and 2", "4")
    '<think>\\n2 and 2\\n</think>\\n\\n4'
    >>> with_reasoning("<think>\\n2 and", " 2", "")
    ' 2'
    """
    is_open = so_far.rfind(THINK.strip()) > so_far.rfind(THINK_END.strip())
    text = ""
    if reasoning:
        text = reasoning if is_open else THINK + reasoning
        is_open = True
    if content:
        text += THINK_END + content if is_open else content
    return text


class _Message(Struct):
    content: str | None = None
    # Names of the field with the reasoning: `reasoning` is used by vLLM, OpenRouter and Ollama, and
    # `reasoning_content` is DeepSeek's older name. The fields are untyped, so that a reply with
    # another type there still counts.
    reasoning: Any = None
    reasoning_content: Any = None


class _Alternative(Struct):
    token: str
    logprob: float


class _Position(Struct):
    top_logprobs: tuple[_Alternative, ...]


class _LogProbs(Struct):
    content: tuple[_Position, ...]


class _Choice(Struct):
    message: _Message
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None


class _Completion(Struct):
    choices: tuple[_Choice, ...]
    usage: TokenCounts | None = None


class ChatDialect(TextDialect, Rater):
    """Any server with /chat/completions; its URL ends where that path begins.

    Stop strings are not sent, because these servers do not distinguish a stop from the model's own
    end. They are searched here instead.
    """

    name = "chat"
    schemes = ("openai", "chat")
    takes_thinking_budget = True

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._is_openai = False
        self._is_openrouter = False

    async def identify(self, client: Client, model: str) -> Identity:
        """See `Dialect`; a server that lists no models is assumed to have the named model."""
        reply = await client.look("/models")
        host = urlsplit(client.url).hostname or ""
        self._is_openai = host == "openai.com" or host.endswith(".openai.com")
        self._is_openrouter = host == "openrouter.ai"
        if self._is_openai and self.closes_thinking:
            raise OptionError("thinking", "OpenAI takes no thinking budget; leave thinking out")
        row = ModelRow(model)
        if reply.status not in (404, 405) or not model:
            row = choose_model(client, json_of(client, reply, ModelRows).data, model)
        self._model = row.id
        context = row.max_model_len or row.context_length or row.context_window or CONTEXT
        return Identity(f"chat {host}", "", self._model, self._options.context or context)

    def sample_call(self, request: SampleRequest, rid: str) -> Call:
        """See `Dialect`.

        :raises UnsupportedByEngine: a sampling field that this API lacks, and `extras` does not
            allow more.
        """
        sampling = request.sampling
        body = self._head(request.ids)
        body[self._limit] = request.max_tokens
        body["seed"] = seed_of(request, 31)
        # Without these fields, other servers sample as the model's authors advise, and OpenAI at
        # temperature 1; its reasoning models refuse these fields.
        if sampling.temperature != 1.0 or not self._is_openai:
            body["temperature"] = sampling.temperature
        if sampling.top_p != 1.0 or not self._is_openai:
            body["top_p"] = sampling.top_p
        if sampling.top_k or sampling.min_p:
            if self._options.extras != "send":
                advice = "Leave both out, or write extras=send if the server accepts them"
                raise UnsupportedByEngine(
                    self._model, "the chat API has neither top_k nor min_p", advice
                )
            body["top_k"] = sampling.top_k or -1
            body["min_p"] = sampling.min_p
        if self._is_openai and request.rollout:
            # The requests of one rollout share the longest beginning, so they should use the same
            # cache.
            name = request.rollout.encode("utf-8", "surrogatepass")
            body["prompt_cache_key"] = blake2b(name, digest_size=16).hexdigest()
        if request.thinking_budget and self._is_openrouter:
            body["reasoning"] = {"max_tokens": request.thinking_budget}
        elif request.thinking_budget:
            body["thinking_token_budget"] = request.thinking_budget
        return Call("/chat/completions", body | self._priority(request))

    def read_sample(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """See `Dialect`."""
        completion: _Completion = decode(reply, _Completion)
        (choice,) = completion.choices
        message = choice.message
        usage = completion.usage or TokenCounts()
        reasoning = message.reasoning or message.reasoning_content
        finish = finish_of(choice.finish_reason)
        is_silent = message.content is None and not reasoning and not usage.reasoning
        if is_silent and finish == "length":
            raise ValueError("the reply has neither text nor reasoning")
        return self._written(
            request,
            reasoning,
            message.content or "",
            finish,
            usage.completion_tokens or 0,
            usage.cached,
        )

    def rating_call(self, ids: TokenIds, rid: str) -> Call:
        """See `Rater`."""
        body = self._head(ids) | {
            self._limit: 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
        }
        return Call("/chat/completions", body)

    def read_ratings(self, reply: bytes) -> dict[str, float]:
        """See `Rater`; a word with and without a leading space counts as one word."""
        completion: _Completion = decode(reply, _Completion)
        (choice,) = completion.choices
        positions = choice.logprobs.content if choice.logprobs else ()
        if not positions:
            return {}
        masses: dict[str, float] = {}
        for row in positions[0].top_logprobs:
            if not is_score(row.logprob):
                raise ValueError(f"a log-probability of {row.logprob}")
            word = row.token.strip()
            masses[word] = masses.get(word, 0.0) + math.exp(row.logprob)
        return {
            word: min(0.0, math.log(mass)) if mass > 0 else -math.inf
            for word, mass in masses.items()
        }

    @property
    def _limit(self) -> str:
        # OpenAI's newer models refuse the older name of this field, but other servers know only
        # that name.
        return "max_completion_tokens" if self._is_openai else "max_tokens"

    def _head(self, ids: TokenIds) -> dict[str, Any]:
        messages, fields = left_open(self._text.messages(ids), self._options.prefill)
        return {"model": self._model, "messages": messages, **fields}


def left_open(
    messages: list[Message], prefill: Prefill
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a conversation whose last message is to be continued, in the server's form.

    The result has the messages and flags for the whole request.
    """
    begun = messages[-1].content
    rows: list[dict[str, Any]] = [
        {"role": row.role, "content": row.content} for row in messages[:-1]
    ]
    if not begun:
        return rows, {}
    if prefill == "ask":
        question = ""
        if rows and rows[-1]["role"] == "user":
            question = rows.pop()["content"]
        return [*rows, {"role": "user", "content": question + _CONTINUE.format(text=begun)}], {}
    last: dict[str, Any] = {"role": "assistant", "content": begun}
    if prefill == "prefix":
        return [*rows, {**last, "prefix": True}], {}
    flags: dict[str, Any] = {}
    if prefill == "continue":
        flags = {"continue_final_message": True, "add_generation_prompt": False}
    return [*rows, last], flags
