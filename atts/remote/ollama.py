"""Ollama dialect: it drafts from a conversation, and can neither score nor take ids."""

from __future__ import annotations

from typing import Any

from atts.core import SampleRequest
from atts.remote.chat import TextDialect, opened, written
from atts.remote.client import Call, Client
from atts.remote.dialects import (
    Identity,
    RawCompletion,
    choose_model,
    finish_of,
    json_at,
    sampling_fields,
    seed_of,
    short,
)
from atts.remote.options import RemoteOptions

CONTEXT = 8192  # places are memory there; more by the setting `context`


class OllamaDialect(TextDialect):
    """Ollama's own API; a last assistant message is gone on with.

    The context is set with every call, for the default is small and cut from the left in silence. Stop strings are not
    sent: the server does not tell a stop from the model's own end. They are looked for here.
    """

    name = "ollama"

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._context = 0

    async def identify(self, client: Client, model: str) -> Identity:
        """See `Dialect`; "llama3" is "llama3:latest"."""
        version = str((await json_at(client, "/api/version"))["version"])
        rows = [{"id": row["model"], "root": row["name"]} for row in (await json_at(client, "/api/tags"))["models"]]
        named = model if not model or ":" in model else f"{model}:latest"
        self._model = str(choose_model(client, rows, named)["id"])
        info: dict[str, Any] = (await json_at(client, "/api/show", {"model": self._model}))["model_info"]
        most = max((int(value) for name, value in info.items() if name.endswith(".context_length")), default=CONTEXT)
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
        return Call("/api/chat", {"model": self._model, "messages": messages, "options": options, **flags})

    def sampled(self, reply: Any, request: SampleRequest) -> RawCompletion:
        """See `Dialect`.

        :raises ValueError: the prompt filled the whole context: its beginning is gone.
        """
        if not reply["done"]:
            raise ValueError("the reply breaks off")
        if int(reply.get("prompt_eval_count") or 0) >= self._context:
            raise ValueError("it cut the prompt to its context")
        finish = finish_of(reply["done_reason"])
        return written(self._text, reply["message"]["content"], finish, request, int(reply.get("eval_count") or 0))
