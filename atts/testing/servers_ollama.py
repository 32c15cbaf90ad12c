"""Ollama's dialect: conversations in, text out, and a context that is cut in silence unless that is forbidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atts.core import Message, SampleRequest, Sampling
from atts.seeds import Seed
from atts.testing.server_settings import ServerFault
from atts.testing.servers import Bad, Floor, Routes
from atts.testing.servers_chat import finish_word, shown, spoilt

_SMALL = 64  # places, unless more are asked for


async def version(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /api/version."""
    return {"version": floor.quirks.version or "0.12.11"}


async def tags(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /api/tags; a name without a tag gets "latest"."""
    return {"models": [{"name": f"{floor.model}:latest", "model": f"{floor.model}:latest", "size": 1}]}


async def show(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /api/show."""
    _check_model(floor, body)
    return {"model_info": {"toy.context_length": floor.engine.spec.context_length}, "capabilities": ["completion"]}


async def chat(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /api/chat, not streamed: a last assistant message is gone on with; its own sampling defaults."""
    _check_model(floor, body)
    if body.get("stream", True):
        raise Bad(400, "these tests do not stream")
    options: Mapping[str, Any] = body.get("options") or {}
    ids = floor.engine.tokenizer.render([Message(row["role"], row["content"]) for row in body["messages"]])
    room = min(int(options.get("num_ctx", _SMALL)), floor.engine.spec.context_length)
    if len(ids) >= room:
        if body.get("truncate") is False:
            raise Bad(400, "the input length exceeds the context length")
        ids = ids[-room + 1 :]
    law = Sampling(
        float(options.get("temperature", 0.8)),
        max(0, int(options.get("top_k", 40))),
        float(options.get("top_p", 0.9)),
        float(options.get("min_p", 0.0)),
    )
    limit, stop = min(int(options.get("num_predict", 128)), room - len(ids)), tuple(options.get("stop") or ())
    request = SampleRequest(ids, limit, law, Seed(run=int(options.get("seed") or 0)), stop)
    done = await floor.sample(request, f"slot {id(request)}", None)
    if done is None:
        raise Bad(499, "aborted")
    message = {"role": "assistant", "content": spoilt(shown(done, stop), fault)}
    reason = "load" if fault == "wrong_ids" else finish_word(done)
    counts = {"prompt_eval_count": len(ids), "eval_count": len(done.ids), "total_duration": 1}
    return {"model": body["model"], "message": message, "done": True, "done_reason": reason, **counts}


def _check_model(floor: Floor, body: Mapping[str, Any]) -> None:
    if body.get("model") not in (floor.model, f"{floor.model}:latest"):
        raise Bad(404, f"model {body.get('model')!r} not found")


ROUTES = Routes({"/api/version": version, "/api/tags": tags, "/api/show": show}, {"/api/chat": chat})
