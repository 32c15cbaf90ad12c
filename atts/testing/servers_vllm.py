"""vLLM's dialect, as its 0.33 sources have it."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from atts.core import Completion, SampleRequest, Sampling, TokenIds
from atts.seeds import Seed
from atts.testing.server_settings import ServerFault
from atts.testing.servers import Bad, Floor, Routes

_CLAMP = -9999.0


async def version(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /version."""
    return {"version": floor.quirks.version or "0.33.0"}


async def models(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /v1/models."""
    row = {"id": floor.model, "object": "model", "owned_by": "vllm", "root": floor.model, "parent": None}
    return {"object": "list", "data": [row | {"max_model_len": floor.engine.spec.context_length}]}


async def metrics(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /metrics."""
    labels = f'{{engine="0",model_name="{floor.model}"}}'
    return f"vllm:num_requests_running{labels} {float(len(floor.jobs))}\nvllm:num_requests_waiting{labels} 0.0\n"


async def tokenize(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /tokenize."""
    tokens = floor.engine.tokenizer.encode(body["prompt"])
    return {"count": len(tokens), "max_model_len": floor.engine.spec.context_length, "tokens": tokens}


async def completions(
    floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None
) -> Any:
    """POST /v1/completions: one prompt of ids, sampled; scored as well when prompt log-probs are asked for."""
    _check_model(floor, body)
    rid = f"cmpl-{headers.get('X-Request-Id') or uuid4().hex}-0"
    ids, limit = tuple(body["prompt"]), int(body.get("max_tokens", 16))
    _check_room(floor, ids, limit)
    choice: dict[str, Any] = {"index": 0, "prompt_logprobs": None}
    cached = 0
    if body.get("prompt_logprobs") is not None and floor.quirks.scoring == "honest":
        choice["prompt_logprobs"] = await _prompt_rows(floor, ids, rid, fault)
        fault = None  # this reply is spoilt already
    request = read_sampling(ids, limit, body)
    done = await floor.sample(request, rid, fault)
    if done is None:
        raise Bad(499, "aborted")
    if body.get("prompt_logprobs") is None:
        cached = done.cached_tokens
    choice |= {"text": _text(done, body), "finish_reason": "length" if done.ended == "length" else "stop"}
    choice["stop_reason"] = _stop_reason(done, request)
    if body.get("return_token_ids"):
        choice["token_ids"] = done.ids
    if body.get("logprobs") is not None:
        values = sent_logprobs(floor, done, request)
        choice["logprobs"] = {"token_logprobs": values, "tokens": [f"token_id:{token}" for token in done.ids]}
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(done.ids)}
    usage_details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"id": rid, "object": "text_completion", "choices": [choice], "usage": usage | usage_details}


async def generate(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /inference/v1/generate: scores of given tokens from a cached prefix; null when the cache goes past them."""
    if floor.quirks.cached_scores == "off":
        raise Bad(403, "This endpoint is disabled; start with --enable-scale-out")
    if "token_ids" not in body:
        raise Bad(400, "token_ids: field required")
    _check_model(floor, body)
    ids, settings = tuple(body["token_ids"]), body["sampling_params"]
    start, wanted = int(settings["prompt_logprob_start"]), settings["prompt_logprob_token_ids"]
    rid = f"generate-tokens-{body['request_id']}"
    _check_room(floor, ids, int(settings["max_tokens"]))
    if len(wanted) != len(ids) - 1 - start:
        raise Bad(400, f"prompt_logprob_token_ids has {len(wanted)} rows, expected {len(ids) - 1 - start}")
    hit = 0 if settings.get("skip_reading_prefix_cache") else floor.cache.hit(ids)
    packed = None
    if hit <= start and floor.quirks.scoring == "honest":
        said, scores = await floor.score(ids, start + 1, rid, fault)
        values = scores.logprobs[:-1] if fault == "wrong_ids" else scores.logprobs  # ids do not travel: one is lost
        packed = _packed(values) if said else None
    floor.cache.keep(ids)
    usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": hit}}
    return {"request_id": body["request_id"], "choices": [], "prompt_token_id_logprobs": packed, "usage": usage}


async def abort(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /inference/v1/abort_requests: exact ids, unknown ones ignored."""
    if floor.quirks.cached_scores == "off":
        raise Bad(403, "This endpoint is disabled; start with --enable-scale-out")
    for rid in body["request_ids"]:
        floor.abort(rid)
    return ""


def read_sampling(ids: TokenIds, limit: int, body: Mapping[str, Any]) -> SampleRequest:
    """The engine's request; what was not sent is the model's generation_config.json's, not neutral."""
    law = Sampling(
        float(body.get("temperature", 0.6)),
        max(0, int(body.get("top_k", 20))),
        float(body.get("top_p", 0.95)),
        float(body.get("min_p", 0.0)),
    )
    stop, stop_ids = tuple(body.get("stop") or ()), tuple(body.get("stop_token_ids") or ())
    return SampleRequest(ids, limit, law, Seed(run=int(body.get("seed") or 0)), stop, stop_ids)


def sent_logprobs(floor: Floor, done: Completion, request: SampleRequest) -> list[float]:
    """Sampled log-probs as sent; a division by the temperature stands in for "after it", which only the law knows."""
    heat = request.sampling.temperature
    divide = heat if floor.quirks.logprobs == "processed" and heat > 0 else 1.0
    return [max(_CLAMP, value / divide) if not math.isnan(value) else value for value in done.logprobs]


async def _prompt_rows(
    floor: Floor, ids: TokenIds, rid: str, fault: ServerFault | None
) -> list[dict[str, dict[str, Any]] | None]:
    said, scores = await floor.score(ids, 1, rid, fault)
    pairs = zip(said, scores.logprobs, strict=True)
    rows = [{str(token): {"logprob": max(_CLAMP, v) if v == v else v, "rank": 1}} for token, v in pairs]
    return [None, *rows]


def _packed(values: tuple[float, ...]) -> str:
    import numpy as np

    file = io.BytesIO()
    np.save(file, np.array([max(_CLAMP, value) if value == value else value for value in values], "f4").reshape(-1, 1))
    return base64.b64encode(file.getvalue()).decode()


def _text(done: Completion, body: Mapping[str, Any]) -> str:
    if body.get("include_stop_str_in_output"):
        return done.text
    places = [done.text.find(stop) for stop in body.get("stop") or () if stop in done.text]
    return done.text[: min(places)] if places else done.text


def _stop_reason(done: Completion, request: SampleRequest) -> str | int | None:
    """The stop that ended it; null for the model's own end."""
    if done.ended != "delimiter":
        return done.ids[-1] if done.ids[-1] in request.stop_ids else None
    return next((stop for stop in request.stop if stop in done.text), done.ids[-1])


def _check_model(floor: Floor, body: Mapping[str, Any]) -> None:
    if body.get("model") != floor.model:
        raise Bad(404, f"The model `{body.get('model')}` does not exist.")


def _check_room(floor: Floor, ids: TokenIds, limit: int) -> None:
    most = floor.engine.spec.context_length
    if len(ids) + limit > most:
        asked = f"you requested {len(ids) + limit} tokens"
        raise Bad(400, f"This model's maximum context length is {most} tokens. However, {asked}.")


ROUTES = Routes(
    {
        "/version": version,
        "/v1/models": models,
        "/metrics": metrics,
        "/tokenize": tokenize,
        "/inference/v1/abort_requests": abort,
    },
    {"/v1/completions": completions, "/inference/v1/generate": generate},
)
