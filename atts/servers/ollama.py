"""Ollama dialect: it drafts from a conversation, and can neither score nor take ids."""

from __future__ import annotations

from msgspec import Raw, Struct

from atts.core import SampleRequest
from atts.servers.chat import TextDialect, opened, written
from atts.servers.client import Call, Client
from atts.servers.dialect import (
    Identity,
    RawCompletion,
    choose_model,
    json_at,
    sampling_fields,
    seed_of,
    short,
)
from atts.servers.options import RemoteOptions
from atts.servers.replies import Count, ModelRow, Version, decode, finish_of

CONTEXT = 8192  # places are memory there; more by the setting `context`


class _Tag(Struct):
    model: str
    name: str


class _Tags(Struct):
    models: tuple[_Tag, ...]


class _Shown(Struct):
    model_info: dict[str, Raw]


class _Message(Struct):
    content: str


class _Answer(Struct):
    done: bool
    done_reason: str
    message: _Message
    prompt_eval_count: Count | None = None
    eval_count: Count | None = None


class OllamaDialect(TextDialect):
    """Ollama's own API; a last assistant message is gone on with.

    The context is set with every call, for the default is small and cut from the left in silence.
    Stop strings are not sent: the server does not tell a stop from the model's own end. They are
    looked for here.
    """

    name = "ollama"

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._context = 0

    async def identify(self, client: Client, model: str) -> Identity:
        """See `Dialect`; "llama3" is "llama3:latest"."""
        version: str = (await json_at(client, "/api/version", Version)).version
        rows = [
            ModelRow(row.model, row.name)
            for row in (await json_at(client, "/api/tags", _Tags)).models
        ]
        named = model if not model or ":" in model else f"{model}:latest"
        self._model = choose_model(client, rows, named).id
        info: dict[str, Raw] = (
            await json_at(client, "/api/show", _Shown, {"model": self._model})
        ).model_info
        lengths: list[int] = [
            decode(bytes(info[name]), Count) for name in info if name.endswith(".context_length")
        ]
        most = max(lengths, default=CONTEXT)
        self._context = min(self._options.context or CONTEXT, most)
        return Identity(f"ollama {short(version)}", version, self._model, self._context)

    def sampling(self, request: SampleRequest, rid: str) -> Call:
        """See `Dialect`; the defaults are another distribution."""
        options = {
            "num_predict": request.max_tokens,
            "num_ctx": self._context,
            "seed": seed_of(request, 31),
            **sampling_fields(request.sampling),
            "repeat_penalty": 1.0,
        }
        messages, _ = opened(self._text.messages(request.ids), "trailing")
        flags = {"stream": False, "truncate": False, "shift": False}
        return Call(
            "/api/chat", {"model": self._model, "messages": messages, "options": options, **flags}
        )

    def sampled(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """See `Dialect`.

        :raises ValueError: the prompt filled the whole context: its beginning is gone.
        """
        found: _Answer = decode(reply, _Answer)
        if not found.done:
            raise ValueError("the reply breaks off")
        if (found.prompt_eval_count or 0) >= self._context:
            raise ValueError("it cut the prompt to its context")
        finish = finish_of(found.done_reason)
        return written(self._text, found.message.content, finish, request, found.eval_count or 0)
