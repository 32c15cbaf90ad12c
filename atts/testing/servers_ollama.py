"""Ollama dialect server: conversations in, text out, and a context that may be cut in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atts.core import Message, Sampling
from atts.testing.servers import (
    Refusal,
    Routes,
    ServerCall,
    finish_word,
    request_of,
    shown,
    split_reasoning,
    without_marks,
)

_SMALL = 64  # places, unless more are asked for
_DEFAULT = Sampling(0.8, 40, 0.9)


def tags(call: ServerCall) -> dict[str, Any]:
    """Answer GET /api/tags; a name without a tag gets "latest"."""
    return {
        "models": [
            {"name": f"{call.state.model}:latest", "model": f"{call.state.model}:latest", "size": 1}
        ]
    }


def show(call: ServerCall) -> dict[str, Any]:
    """Answer POST /api/show."""
    _check_model(call)
    return {
        "model_info": {"toy.context_length": call.state.context_length},
        "capabilities": ["completion"],
    }


async def chat(call: ServerCall) -> Any:
    """Answer POST /api/chat, not streamed, with sampling defaults of its own.

    A last assistant message is continued.
    """
    body = call.body
    _check_model(call)
    if body.get("stream", True):
        raise Refusal(400, "these tests do not stream")
    options: Mapping[str, Any] = body.get("options") or {}
    ids = call.state.engine.tokenizer.render(
        [Message(row["role"], without_marks(row["content"])) for row in body["messages"]]
    )
    room = min(int(options.get("num_ctx", _SMALL)), call.state.context_length)
    if len(ids) >= room:
        if body.get("truncate") is False:
            raise Refusal(400, "the input length exceeds the context length")
        ids = ids[-room + 1 :]
    request = request_of(
        ids, min(int(options.get("num_predict", 128)), room - len(ids)), options, _DEFAULT
    )
    done = await call.sample(request, spoil=False)
    text = None if call.fault == "nan" else shown(done, request.stop)
    message = {"role": "assistant", "content": text}
    if call.state.quirks.reasoning != "off" and text is not None:
        last = body["messages"][-1]
        so_far = last["content"] if last["role"] == "assistant" else ""
        message["thinking"], message["content"] = split_reasoning(so_far, text)
    reason = "load" if call.fault == "wrong_ids" else finish_word(done)
    counts = {"prompt_eval_count": len(ids), "eval_count": len(done.ids), "total_duration": 1}
    return {
        "model": body["model"],
        "message": message,
        "done": True,
        "done_reason": reason,
        **counts,
    }


def _check_model(call: ServerCall) -> None:
    if call.body.get("model") not in (call.state.model, f"{call.state.model}:latest"):
        raise Refusal(404, f"model {call.body.get('model')!r} not found")


ROUTES = Routes(
    {
        "/api/version": lambda call: {"version": call.state.quirks.version or "0.12.11"},
        "/api/tags": tags,
        "/api/show": show,
    },
    {"/api/chat": chat},
)
