"""Chat API server, as hosted models offer it, or, by a quirk, as vLLM and SGLang extend it."""

from __future__ import annotations

from typing import Any

from atts.core import Message, Sampling, TokenIds
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

# fields that hosted servers refuse
_STRICT = (
    "top_k",
    "min_p",
    "continue_final_message",
    "add_generation_prompt",
)


def models(call: ServerCall) -> dict[str, Any]:
    """Answer GET /v1/models, which does not say how long a context is."""
    return {
        "object": "list",
        "data": [{"id": call.state.model, "object": "model", "owned_by": "host"}],
    }


async def completions(call: ServerCall) -> Any:
    """Answer POST /v1/chat/completions."""
    body = call.body
    quirks = call.state.quirks
    call.check_model()
    if quirks.prefill in ("closed", "prefix"):
        for name in _STRICT:
            if name in body:
                raise Refusal(400, f"Unrecognized request argument supplied: {name}")
    if quirks.reasoning == "hidden" and float(body.get("temperature", 1.0)) != 1.0:
        raise Refusal(
            400,
            f"Unsupported value: 'temperature' does not support {body['temperature']} with this "
            "model. Only the default (1) value is supported.",
        )
    ids = conversation(call, body["messages"])
    limit = int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)
    call.check_room(ids, limit)
    request = request_of(ids, limit, body, Sampling())
    done = await call.sample(request, spoil=False)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_word(done)}
    text = None if call.fault == "nan" else shown(done, request.stop)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    reasoning = ""
    if quirks.reasoning != "off" and text is not None:
        reasoning, content = split_reasoning(_so_far(body["messages"]), text)
        # vLLM's parsers give null for an empty content, OpenAI an empty text
        message["content"] = content if quirks.reasoning == "hidden" else content or None
        if quirks.reasoning != "hidden":
            message[quirks.reasoning] = reasoning or None
    choice["message"] = message
    if body.get("logprobs"):
        if quirks.ratings == "off":
            raise Refusal(400, "You are not allowed to request logprobs from this model.")
        row = {"token": done.text, "logprob": done.logprobs[0]}
        choice["logprobs"] = {
            "content": [row | {"top_logprobs": await _digits(call, ids)}],
            "refusal": None,
        }
    usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": len(done.ids)}
    usage |= {"prompt_tokens_details": {"cached_tokens": done.cached_tokens}}
    if quirks.reasoning == "hidden":
        spent = len(call.state.engine.tokenizer.encode(reasoning))
        usage |= {"completion_tokens_details": {"reasoning_tokens": spent}}
    choices = [] if call.fault == "wrong_ids" else [choice]
    head = {"id": "chatcmpl-1", "object": "chat.completion", "model": call.state.model}
    return head | {"choices": choices, "usage": usage}


def conversation(call: ServerCall, rows: list[dict[str, Any]]) -> TokenIds:
    """Return the ids of the messages.

    A last assistant message stays open only where this server leaves it open.
    """
    messages = [Message(row["role"], without_marks(row["content"])) for row in rows]
    if messages and messages[-1].role == "assistant":
        wanted: dict[str, bool] = {
            "continue": call.body.get("continue_final_message") is True
            and call.body.get("add_generation_prompt") is False,
            "prefix": bool(rows[-1].get("prefix")),
            "trailing": True,
            "closed": False,
        }
        if not wanted[call.state.quirks.prefill]:
            messages[-1] = Message("user", messages[-1].content)  # without a word, as SGLang does
    return call.state.engine.tokenizer.render(messages)


def _so_far(rows: list[dict[str, Any]]) -> str:
    """Return the beginning of the answer, if the last message is one."""
    return rows[-1]["content"] if rows and rows[-1]["role"] == "assistant" else ""


async def _digits(call: ServerCall, ids: TokenIds) -> list[dict[str, Any]]:
    """Return the ten digits, which stand in for the likeliest tokens."""
    rows: list[dict[str, Any]] = []
    for digit in range(10):
        (token, *_) = call.state.engine.tokenizer.encode(str(digit))
        _, scores = await call.score((*ids, token), len(ids))
        rows.append({"token": str(digit), "logprob": scores.logprobs[0], "bytes": [48 + digit]})
    return rows


ROUTES = Routes({"/v1/models": models}, {"/v1/chat/completions": completions})
