"""SGLang's dialect, as its 0.5.23 sources have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atts.core import Completion, SampleRequest, Sampling
from atts.seeds import Seed
from atts.testing.server_settings import ServerFault
from atts.testing.servers import Bad, Floor, Routes


async def server_info(
    floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None
) -> Any:
    """GET /server_info."""
    return {"version": floor.quirks.version or "0.5.23", "model_path": floor.model, "tokenizer_path": floor.model}


async def models(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /v1/models."""
    row = {"id": floor.model, "owned_by": "sglang", "root": floor.model, "parent": None}
    return {"object": "list", "data": [row | {"max_model_len": floor.engine.spec.context_length}]}


async def metrics(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /metrics, with --enable-metrics."""
    labels = f'{{model_name="{floor.model}"}}'
    return f"sglang:num_running_reqs{labels} {float(len(floor.jobs))}\nsglang:num_queue_reqs{labels} 0.0\n"


async def tokenize(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /tokenize."""
    tokens = floor.engine.tokenizer.encode(body["prompt"])
    return {"tokens": tokens, "count": len(tokens)}


async def abort(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /abort_request: every id that begins so; an empty one means all."""
    floor.abort(body["rid"], "prefix")
    return {}


async def generate(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /generate: with no new tokens it scores from `logprob_start_len` on, else it samples."""
    ids, settings, rid = tuple(body["input_ids"]), body["sampling_params"], str(body["rid"])
    most = floor.engine.spec.context_length
    if len(ids) >= most:
        raise Bad(400, f"The input ({len(ids)} tokens) is longer than the model's context length ({most} tokens).")
    limit = int(settings.get("max_new_tokens", 128))
    if limit == 0:
        return await _scored(floor, body, rid, fault)
    limit = min(limit, most - len(ids) - 2)  # shortened without a word
    law = Sampling(
        float(settings.get("temperature", 1.0)),
        max(0, int(settings.get("top_k", -1))),
        float(settings.get("top_p", 1.0)),
        float(settings.get("min_p", 0.0)),
    )
    seed = Seed(run=int(settings.get("sampling_seed") or 0))
    stop, stop_ids = tuple(settings.get("stop") or ()), tuple(settings.get("stop_token_ids") or ())
    request = SampleRequest(ids, limit, law, seed, stop, stop_ids)
    done = await floor.sample(request, rid, fault)
    if done is None:
        reason = {"type": "abort", "message": "Abort before prefill", "status_code": None}
        return {"text": "", "output_ids": [], "meta_info": {"id": rid, "finish_reason": reason}}
    return _completion(floor, done, request, rid)


async def _scored(floor: Floor, body: Mapping[str, Any], rid: str, fault: ServerFault | None) -> Any:
    ids, start = tuple(body["input_ids"]), int(body.get("logprob_start_len", -1))
    meta: dict[str, Any] = {"id": rid, "prompt_tokens": len(ids), "finish_reason": {"type": "length", "length": 0}}
    if body.get("return_logprob") and start >= 0 and floor.quirks.scoring == "honest":
        if start > len(ids):
            raise Bad(400, "logprob_start_len is beyond the input")
        cached = min(floor.cache.hit(ids), start)
        said, scores = await floor.score(ids, start + 1, rid, fault)
        rows = [[value, token, None] for value, token in zip(scores.logprobs, said, strict=True)]
        meta |= {"input_token_logprobs": [[None, ids[start], None], *rows], "cached_tokens": cached}
        floor.cache.keep(ids)
    return {"text": "", "output_ids": [], "meta_info": meta}


def _completion(floor: Floor, done: Completion, request: SampleRequest, rid: str) -> Any:
    heat = request.sampling.temperature
    divide = heat if floor.quirks.logprobs != "raw" and heat > 0 else 1.0  # stands in for "after temperature"
    rows = [[value / divide, token, None] for value, token in zip(done.logprobs, done.ids, strict=True)]
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
        "/v1/models": models,
        "/metrics": metrics,
        "/tokenize": tokenize,
        "/abort_request": abort,
    },
    {"/generate": generate},
)
