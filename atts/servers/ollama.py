"""The dialect of Ollama servers, which continue a conversation but can neither score tokens nor
read token ids.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct

from atts.core import SampleRequest
from atts.servers.chat import TextDialect, left_open
from atts.servers.client import Call, Client, Count, ModelRow, Version, decode, finish_of
from atts.servers.dialect import (
    Identity,
    RawCompletion,
    choose_model,
    json_at,
    sampling_fields,
    seed_of,
    short_version,
)
from atts.servers.options import RemoteOptions

# Default context length in tokens. It is small, because Ollama allocates memory for every position
# of the context. The setting `context` requests a larger one.
CONTEXT = 8192


class _Tag(Struct):
    model: str
    name: str


class _Tags(Struct):
    models: tuple[_Tag, ...]


class _Shown(Struct):
    model_info: dict[str, Raw]


class _Message(Struct):
    content: str
    thinking: Any = None


class _Answer(Struct):
    done: bool
    done_reason: str
    message: _Message
    prompt_eval_count: Count | None = None
    eval_count: Count | None = None


class OllamaDialect(TextDialect):
    """The dialect of Ollama's own API, which continues the last message if it is from the
    assistant.

    Every call sets the context length, because the default is small, and Ollama silently drops the
    beginning of longer prompts. Stop strings are not sent, because replies do not show whether the
    model or a stop string ended the text. Instead, atts searches the reply for stop strings.
    """

    name = "ollama"
    schemes = ("ollama",)
    found_at = "/api/version"

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._context = 0

    async def identify(self, client: Client, model: str) -> Identity:
        """Identify the server; see `Dialect.identify`. The model name "llama3" means
        "llama3:latest".
        """
        version: str = (await json_at(client, "/api/version", Version)).version
        tags: _Tags = await json_at(client, "/api/tags", _Tags)
        rows = [ModelRow(row.model, row.name) for row in tags.models]
        if model and ":" not in model:
            model = f"{model}:latest"
        self._model = choose_model(client, rows, model).id
        shown: _Shown = await json_at(client, "/api/show", _Shown, {"model": self._model})
        # the model's family is a part of this field's name, such as "llama.context_length"
        lengths: list[int] = [
            decode(bytes(value), Count)
            for name, value in shown.model_info.items()
            if name.endswith(".context_length")
        ]
        most = max(lengths, default=CONTEXT)
        self._context = min(self._options.context or CONTEXT, most)
        return Identity(f"ollama {short_version(version)}", version, self._model, self._context)

    def sample_call(self, request: SampleRequest, rid: str) -> Call:
        """Return the HTTP call for a completion; see `Dialect.sample_call`. Every sampling field is
        set, because Ollama's defaults differ from those of atts.
        """
        options = {
            "num_predict": request.max_tokens,
            "num_ctx": self._context,
            "seed": seed_of(request, 31),
            **sampling_fields(request.sampling),
            "repeat_penalty": 1.0,
        }
        messages, _ = left_open(self._text.messages(request.ids), "trailing")
        body = {
            "model": self._model,
            "messages": messages,
            "options": options,
            "stream": False,
            "truncate": False,
            "shift": False,
        }
        return Call("/api/chat", body)

    def read_sample(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """Read the completion in a reply; see `Dialect.read_sample`.

        :raises ValueError: the prompt fills the whole context, so the server has cut the prompt's
            beginning.
        """
        answer: _Answer = decode(reply, _Answer)
        if not answer.done:
            raise ValueError("the reply is incomplete")
        if (answer.prompt_eval_count or 0) >= self._context:
            raise ValueError("the server truncated the prompt to fit in its context")
        message = answer.message
        return self._written(
            request,
            message.thinking,
            message.content,
            finish_of(answer.done_reason),
            answer.eval_count or 0,
        )
