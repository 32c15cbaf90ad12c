"""The dialect of /chat/completions, the text-based API of most hosted models."""

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
# The largest number of bytes of text that one token id can represent.
_LONGEST = 64
# This pattern splits a text into pieces, which are about as long as the tokens of common models.
_WORD = re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}|\n+| +|.", re.DOTALL)

# Context length, in tokens, that atts assumes if the server does not report it. If the real context
# is shorter, the server refuses requests that are too long.
CONTEXT = 131_072
# Largest number of alternative tokens that servers list for each position of a reply.
ALTERNATIVES = 20
THINK = "<think>\n"
THINK_END = "\n</think>\n\n"
_CONTINUE = (
    "\n\nHere is the beginning of the answer:\n\n{text}\n\n"
    "Continue it from exactly where it stops. Write nothing but the continuation, and repeat "
    "nothing."
)


class TextTokenizer:
    """Tokenizer for servers that do not report token ids. It splits text into pieces of about one
    token each.

    A piece's id is an integer that encodes the bytes of the piece, so decoding the ids restores the
    exact text. The ids of a conversation also encode the roles. `messages` converts them back to
    messages, because these servers apply the chat template themselves.

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
        """Split a text into pieces, and return the id of each piece."""
        return tuple(map(_id_of, _pieces(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that the ids encode. The ids of roles and of the end of a message have no
        text.
        """
        return b"".join(map(_bytes_of, ids)).decode("utf-8", "replace")

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return the ids of a conversation, ready for the assistant to continue.

        If the last message is from the assistant, it is left open, so that the model continues this
        message.
        """
        ids: list[int] = []
        for message in messages:
            ids += [_ROLES[message.role], *self.encode(message.content)]
        if not messages or messages[-1].role != "assistant":
            ids.append(ASSISTANT)
        return tuple(ids)

    def messages(self, ids: TokenIds) -> list[Message]:
        """Convert the ids of a conversation back to messages.

        The last message is always from the assistant. It holds the start of the reply, which may be
        empty.
        """
        # Compare with ASSISTANT before the look-up in `_NAMES`. The id of a piece of text is a
        # large integer, which takes longer to hash than to compare.
        starts = [
            position for position, token in enumerate(ids) if token <= ASSISTANT and token in _NAMES
        ]
        if not starts or starts[0] != 0:
            # If the ids do not begin with the id of a role, they are read as a question from the
            # user.
            return self.messages((USER, *ids))
        messages = [
            Message(_NAMES[ids[start]], self.decode(ids[start + 1 : end]))
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
        ]
        if messages[-1].role != "assistant":
            messages.append(Message("assistant", ""))
        return messages

    def pieces(self, text: str, count: int) -> TokenIds:
        """Return the ids of a text that the server counted as `count` tokens.

        The result has exactly `count` ids, or one per byte if the text has fewer than `count`
        bytes.

        :raises ValueError: if the text is too long for `count` ids.
        """
        data = text.encode()
        sizes = [len(piece) for piece in _pieces(text)]
        if len(sizes) > count:
            sizes = _joined(sizes, count)
        elif len(sizes) < count:
            sizes = _halved(sizes, min(count, len(data)))
        if max(sizes, default=0) > _LONGEST:
            raise ValueError(
                f"the server reports only {count} tokens for a text of {len(text)} characters"
            )
        ids: list[int] = []
        start = 0
        for size in sizes:
            ids.append(_id_of(data[start : start + size]))
            start += size
        return tuple(ids)


def _joined(sizes: list[int], count: int) -> list[int]:
    """Merge neighbouring pieces until only `count` are left, and return their sizes in bytes.

    Each step merges the two neighbours with the smallest total size.
    """
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
        # This entry of the heap is outdated if one of its two pieces has been joined to another
        # piece since.
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
    """Split pieces in half until there are `count`, and return their sizes in bytes.

    Each step splits the longest piece.
    """
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
    """Split a text into pieces, and return their bytes. No piece is too long for one id."""
    words = [word.encode() for word in _WORD.findall(text)]
    if max(map(len, words), default=0) <= _LONGEST:
        return words
    # One id can represent only `_LONGEST` bytes, so split longer pieces. Such pieces are long runs
    # of spaces or line breaks.
    return [
        word[start : start + _LONGEST] for word in words for start in range(0, len(word), _LONGEST)
    ]


# The cache is worthwhile, because texts of one language have only about ten thousand different
# pieces, which occur in every turn.
@lru_cache(1 << 16)
def _id_of(piece: bytes) -> int:
    # Without the leading byte 1, zero bytes at the start of a piece would be lost. This byte also
    # makes every id larger than the ids of roles and of END.
    return int.from_bytes(b"\x01" + piece)


@lru_cache(1 << 16)
def _bytes_of(token: int) -> bytes:
    # The ids of roles and of END are below 256 and have no text. All other ids begin with the byte
    # 1 that `_id_of` adds.
    if token < 256:
        return b""
    return token.to_bytes((token.bit_length() + 7) // 8)[1:]


class TextDialect(Dialect):
    """A dialect whose requests contain messages and whose replies contain text, not token ids.

    The server returns neither token ids nor log-probs, and cannot abort a request by its id.
    """

    speaks: Literal["ids", "text"] = "text"
    spare = 0
    logprobs: LogProbs = "none"

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._text = TextTokenizer()
        # True if any reply of the server so far had its reasoning in a separate field.
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
        """Convert a reply to a completion that has as many ids as the server counted tokens.

        The end id is added if the model itself ended the text. Reasoning that arrives in a separate
        field is placed before the content as "<think>\\n…\\n</think>\\n\\n", the form in which
        other models write it. No "<think>" is added if the conversation already ends within a think
        block. If a reply was cut at the token limit and has no text, the completion has no ids.
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
        # The id END counts as a token, so one token less than the limit is left for text.
        most = max(1, request.max_tokens - 1)
        count = min(tokens, most) or min(len(self._text.encode(text)), most)
        ids = (*self._text.pieces(text, count), END)
        return RawCompletion(ids[: request.max_tokens], (), finish, cached)


def with_reasoning(so_far: str, reasoning: str, content: str) -> str:
    """Combine the reasoning and the content of a reply into one text with <think> tags.

    `so_far` is the text that the reply continues. If it has an open <think>, no second one is
    added.

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
    # vLLM, OpenRouter and Ollama send reasoning in the field `reasoning`, and DeepSeek in
    # `reasoning_content`. The type is Any, because a reply is still useful if its reasoning is not
    # a text.
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
    """The dialect of any server with /chat/completions. The server's URL is given without that
    path.

    Stop strings are not sent, because such servers do not report whether the model or a stop string
    ended the text. Instead, atts searches the reply for stop strings.
    """

    name = "chat"
    schemes = ("openai", "chat")
    takes_thinking_budget = True

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._is_openai = False
        self._is_openrouter = False

    async def identify(self, client: Client, model: str) -> Identity:
        """Identify the server; see `Dialect.identify`. If the server does not list its models, it
        is assumed to have the named model.
        """
        reply = await client.look("/models")
        host = urlsplit(client.url).hostname or ""
        self._is_openai = host == "openai.com" or host.endswith(".openai.com")
        self._is_openrouter = host == "openrouter.ai"
        if self._is_openai and self.closes_thinking:
            raise OptionError(
                "thinking", "OpenAI does not accept a thinking budget; leave thinking out"
            )
        row = ModelRow(model)
        if reply.status not in (404, 405) or not model:
            row = choose_model(client, json_of(client, reply, ModelRows).data, model)
        self._model = row.id
        context = row.max_model_len or row.context_length or row.context_window or CONTEXT
        return Identity(f"chat {host}", "", self._model, self._options.context or context)

    def sample_call(self, request: SampleRequest, rid: str) -> Call:
        """Return the HTTP call for a completion; see `Dialect.sample_call`.

        :raises UnsupportedByEngine: top_k or min_p is set, but the setting `extras` does not allow
            sending them.
        """
        sampling = request.sampling
        body = self._head(request.ids)
        body[self._limit] = request.max_tokens
        body["seed"] = seed_of(request, 31)
        # OpenAI's reasoning models refuse temperature and top_p. OpenAI's defaults are 1, so atts
        # leaves out values of 1. Other servers always get both fields, because each model may have
        # other defaults there.
        if sampling.temperature != 1.0 or not self._is_openai:
            body["temperature"] = sampling.temperature
        if sampling.top_p != 1.0 or not self._is_openai:
            body["top_p"] = sampling.top_p
        if sampling.top_k or sampling.min_p:
            if self._options.extras != "send":
                advice = "Leave out top_k and min_p, or add extras=send if the server accepts them"
                raise UnsupportedByEngine(
                    self._model, "the chat API has neither top_k nor min_p", advice
                )
            body["top_k"] = sampling.top_k or -1
            body["min_p"] = sampling.min_p
        if self._is_openai and request.rollout:
            # OpenAI sends requests with the same key to the same cache. Requests of one rollout
            # share it, because they have a long common prefix.
            name = request.rollout.encode("utf-8", "surrogatepass")
            body["prompt_cache_key"] = blake2b(name, digest_size=16).hexdigest()
        if request.thinking_budget and self._is_openrouter:
            body["reasoning"] = {"max_tokens": request.thinking_budget}
        elif request.thinking_budget:
            body["thinking_token_budget"] = request.thinking_budget
        return Call("/chat/completions", body | self._priority(request))

    def read_sample(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """Read the completion in a reply; see `Dialect.read_sample`."""
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
        """Return the HTTP call for the most likely next tokens; see `Rater.rating_call`."""
        body = self._head(ids) | {
            self._limit: 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
        }
        return Call("/chat/completions", body)

    def read_ratings(self, reply: bytes) -> dict[str, float]:
        """Read the log-probs of the most likely next tokens in a reply; see `Rater.read_ratings`.

        The server may list a word both with and without spaces around it. The probabilities of
        these forms are added.
        """
        completion: _Completion = decode(reply, _Completion)
        (choice,) = completion.choices
        positions = choice.logprobs.content if choice.logprobs else ()
        if not positions:
            return {}
        masses: dict[str, float] = {}
        for row in positions[0].top_logprobs:
            if not is_score(row.logprob):
                raise ValueError(f"{row.logprob} is not a valid log-probability")
            word = row.token.strip()
            masses[word] = masses.get(word, 0.0) + math.exp(row.logprob)
        return {
            word: min(0.0, math.log(mass)) if mass > 0 else -math.inf
            for word, mass in masses.items()
        }

    @property
    def _limit(self) -> str:
        # OpenAI's newer models refuse the field "max_tokens", but all other servers know only
        # "max_tokens".
        return "max_completion_tokens" if self._is_openai else "max_tokens"

    def _head(self, ids: TokenIds) -> dict[str, Any]:
        messages, fields = left_open(self._text.messages(ids), self._options.prefill)
        return {"model": self._model, "messages": messages, **fields}


def left_open(
    messages: list[Message], prefill: Prefill
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and the extra body fields that make a server continue the last message of
    a conversation.

    `prefill` selects the technique, because servers differ; see `Prefill`.
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
