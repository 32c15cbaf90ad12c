"""SGLang dialect server, as its 0.5.23 sources have it."""

from __future__ import annotations

from typing import Any

from atts.core import Completion, SampleRequest, Sampling
from atts.testing.servers import Aborted, Refusal, Routes, ServerCall, ServerState, request_of


def server_info(call: ServerCall) -> dict[str, str | None]:
    """Answer GET /server_info."""
    model = call.state.model
    quirks = call.state.quirks
    algorithm = None if quirks.speculation == "off" else "STANDALONE"
    names = {"model_path": model, "tokenizer_path": model, "speculative_algorithm": algorithm}
    return {"version": quirks.version or "0.5.23", **names}


def abort(call: ServerCall) -> dict[str, str]:
    """Answer POST /abort_request: every id that begins so is aborted, an empty one means all."""
    call.state.abort(call.body["rid"], "prefix")
    return {}


async def generate(call: ServerCall) -> Any:
    """Answer POST /generate: without new tokens it scores from `logprob_start_len` on."""
    body = call.body
    most = call.state.context_length
    ids = tuple(body["input_ids"])
    settings = body["sampling_params"]
    rid = str(body["rid"])
    if len(ids) >= most:
        raise Refusal(
            400,
            f"The input ({len(ids)} tokens) is longer than the model's context length ({most} "
            f"tokens).",
        )
    limit = int(settings.get("max_new_tokens", 128))
    if limit == 0:
        return await _scored(call, rid)
    limit = min(limit, most - len(ids) - 2)  # shortened without a word
    request = request_of(ids, limit, settings, Sampling(), seed="sampling_seed")
    try:
        return _completion(call.state, await call.sample(request, rid), request, rid)
    except Aborted:
        reason = {"type": "abort", "message": "Abort before prefill", "status_code": None}
        return {"text": "", "output_ids": [], "meta_info": {"id": rid, "finish_reason": reason}}


async def _scored(call: ServerCall, rid: str) -> Any:
    body = call.body
    state = call.state
    ids = tuple(body["input_ids"])
    start = int(body.get("logprob_start_len", -1))
    meta: dict[str, Any] = {
        "id": rid,
        "prompt_tokens": len(ids),
        "finish_reason": {"type": "length", "length": 0},
    }
    if body.get("return_logprob") and start >= 0 and state.quirks.scoring == "honest":
        if start > len(ids):
            raise Refusal(400, "logprob_start_len is beyond the input")
        cached = min(state.cache.hit(ids), start)
        ids_scored, scores = await call.score(ids, start + 1, rid)
        rows = [
            [value, token, None] for value, token in zip(scores.logprobs, ids_scored, strict=True)
        ]
        meta |= {"input_token_logprobs": [[None, ids[start], None], *rows], "cached_tokens": cached}
        state.cache.keep(ids)
    return {"text": "", "output_ids": [], "meta_info": meta}


def _completion(state: ServerState, done: Completion, request: SampleRequest, rid: str) -> Any:
    heat = request.sampling.temperature
    # stands in for "after temperature"
    divide = heat if state.quirks.logprobs != "raw" and heat > 0 else 1.0
    rows = [
        [value / divide, token, None] for value, token in zip(done.logprobs, done.ids, strict=True)
    ]
    reason: dict[str, Any] = {"type": "length", "length": len(done.ids)}
    if done.ended != "length":
        matched = next((stop for stop in request.stop if stop in done.text), done.ids[-1])
        reason = {"type": "stop", "matched": matched}
    meta = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": len(request.ids),
        "completion_tokens": len(done.ids),
        "cached_tokens": done.cached_tokens,
        "output_token_logprobs": rows,
    }
    return {"text": done.text, "output_ids": done.ids, "meta_info": meta}


ROUTES = Routes(
    {
        "/server_info": server_info,
        "/v1/models": lambda call: {"object": "list", "data": [call.model_row("sglang")]},
        "/metrics": lambda call: call.gauges("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        "/tokenize": lambda call: call.tokens("prompt"),
        "/abort_request": abort,
    },
    {"/generate": generate},
)
