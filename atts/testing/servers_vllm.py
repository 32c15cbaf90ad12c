"""vLLM dialect server, as its 0.33 sources have it."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import replace
from typing import Any
from uuid import uuid4

from atts.core import Completion, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.testing.servers import (
    Refusal,
    Routes,
    ServerCall,
    ServerState,
    finish_word,
    request_of,
    shown,
)

_DEFAULT = Sampling(0.6, 20, 0.95)  # defaults of a model's generation_config.json
_CLAMP = -9999.0
_THINK = "<think>"
_THINK_END = "</think>"


async def completions(call: ServerCall) -> Any:
    """Answer POST /v1/completions: one prompt of ids is sampled, and scored where that is asked."""
    body = call.body
    state = call.state
    call.check_model()
    rid = f"cmpl-{call.headers.get('X-Request-Id') or uuid4().hex}-0"
    ids = tuple(body["prompt"])
    limit = int(body.get("max_tokens", 16))
    call.check_room(ids, limit)
    wants_scores = body.get("prompt_logprobs") is not None
    choice: dict[str, Any] = {"index": 0, "prompt_logprobs": None}
    is_scored = wants_scores and state.quirks.scoring == "honest"
    if is_scored:
        rows: list[Any] = await _prompt_rows(call, ids, rid)
        choice["prompt_logprobs"] = rows
        for place in range(1, len(ids)) if body["prompt_logprobs"] else ():
            rows[place] |= await _likeliest(call, ids[:place], int(body["prompt_logprobs"]))
    request = request_of(ids, limit, body, _DEFAULT)
    done = await _thought(call, request, rid, spoil=not is_scored)  # a reply is spoilt once
    text = done.text if body.get("include_stop_str_in_output") else shown(done, request.stop)
    choice |= {
        "text": text,
        "finish_reason": finish_word(done),
        "stop_reason": _stop_reason(done, request),
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = done.ids
    if body.get("logprobs") is not None:
        values = sent_logprobs(state, done, request)
        choice["logprobs"] = {
            "token_logprobs": values,
            "tokens": [f"token_id:{token}" for token in done.ids],
        }
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(done.ids)}
    details = {
        "prompt_tokens_details": {"cached_tokens": 0 if wants_scores else done.cached_tokens}
    }
    names = {"model": body["model"], "system_fingerprint": f"vllm-{state.quirks.version}"}
    return {
        "id": rid,
        "object": "text_completion",
        **names,
        "choices": [choice],
        "usage": usage | details,
    }


async def _thought(
    call: ServerCall, request: SampleRequest, rid: str, *, spoil: bool
) -> Completion:
    """Continue a text; a think block that is open in the prompt is closed at the budget."""
    budget = call.body.get("thinking_token_budget")
    quirks = call.state.quirks
    if budget is not None and quirks.thinking == "refused":
        raise Refusal(400, "thinking_token_budget is set but reasoning_config is not configured.")
    tokenizer = call.state.engine.tokenizer
    _, opened, thoughts = tokenizer.decode(request.ids).rpartition(_THINK)
    if budget is None or quirks.thinking == "ignored" or not opened or _THINK_END in thoughts:
        return await call.sample(request, rid, spoil=spoil)
    left = min(request.max_tokens, max(0, budget - len(tokenizer.encode(thoughts))))
    begun = Completion((), "", "length", ())
    if left:
        begun = await call.sample(replace(request, max_tokens=left), rid, spoil=spoil)
        if begun.ended != "length" or _THINK_END in begun.text or left == request.max_tokens:
            return begun
    end = tokenizer.encode(_THINK_END)[: request.max_tokens - left]
    ids = begun.ids + end
    logprobs = (*begun.logprobs, *[0.0] * len(end))
    if len(ids) == request.max_tokens:
        return Completion(ids, tokenizer.decode(ids), "length", logprobs, begun.cached_tokens)
    rest = await call.sample(
        replace(request, ids=request.ids + ids, max_tokens=request.max_tokens - len(ids)), rid
    )
    text = tokenizer.decode(ids) + rest.text
    return Completion(ids + rest.ids, text, rest.ended, logprobs + rest.logprobs)


async def generate(call: ServerCall) -> Any:
    """Answer POST /inference/v1/generate: scores of given tokens from a cached prefix.

    They are null when the cache goes past them.
    """
    body = call.body
    state = call.state
    _check_open(call)
    if "token_ids" not in body:
        raise Refusal(400, "token_ids: field required")
    call.check_model()
    ids = tuple(body["token_ids"])
    settings = body["sampling_params"]
    start = int(settings["prompt_logprob_start"])
    wanted = settings["prompt_logprob_token_ids"]
    if state.quirks.cached_scores == "refused":
        raise Refusal(
            400,
            "prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1).",
        )
    rid = f"generate-tokens-{body['request_id']}"
    call.check_room(ids, int(settings["max_tokens"]))
    if len(wanted) != len(ids) - 1 - start:
        raise Refusal(
            400, f"prompt_logprob_token_ids has {len(wanted)} rows, expected {len(ids) - 1 - start}"
        )
    hit = 0 if settings.get("skip_reading_prefix_cache") else state.cache.hit(ids)
    packed = None
    if hit <= start and state.quirks.scoring == "honest":
        ids_scored, scores = await call.score(ids, start + 1, rid)
        ids_lost = call.fault == "wrong_ids"  # ids do not travel: one is lost
        packed = (
            _packed(scores.logprobs[:-1] if ids_lost else scores.logprobs) if ids_scored else None
        )
    state.cache.keep(ids)
    usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": hit}}
    return {
        "request_id": body["request_id"],
        "choices": [],
        "prompt_token_id_logprobs": packed,
        "usage": usage,
    }


def abort(call: ServerCall) -> str:
    """Answer POST /inference/v1/abort_requests: exact ids are aborted, unknown ones ignored."""
    _check_open(call)
    for rid in call.body["request_ids"]:
        call.state.abort(rid)
    return ""


def _check_open(call: ServerCall) -> None:
    if call.state.quirks.cached_scores == "off":
        raise Refusal(403, "This endpoint is disabled; start with --enable-scale-out")


def sent_logprobs(state: ServerState, done: Completion, request: SampleRequest) -> list[float]:
    """Return sampled log-probs as sent.

    Dividing by the temperature stands in for "after it", halving for "cut".
    """
    heat = request.sampling.temperature
    is_cut = request.sampling != Sampling(request.sampling.temperature)
    divide = heat * (1 + is_cut) if state.quirks.logprobs == "processed" and heat > 0 else 1.0
    return [
        max(_CLAMP, value / divide) if not math.isnan(value) else value for value in done.logprobs
    ]


async def _prompt_rows(
    call: ServerCall, ids: TokenIds, rid: str
) -> list[dict[str, dict[str, Any]] | None]:
    ids_scored, scores = await call.score(ids, 1, rid)
    pairs = zip(ids_scored, scores.logprobs, strict=True)
    rows = [
        {str(token): {"logprob": max(_CLAMP, v) if v == v else v, "rank": 1}} for token, v in pairs
    ]
    return [None, *rows]


async def _likeliest(call: ServerCall, ids: TokenIds, top: int) -> dict[str, dict[str, Any]]:
    """Return the likeliest tokens after these ids, which the engine is asked about one by one."""
    found: list[tuple[float, int]] = []
    for token in range(call.state.engine.spec.vocabulary):
        scores = await call.state.engine.score(ScoreRequest(ids, (token,)))
        found.append((scores.logprobs[0], token))
    found.sort(reverse=True)
    return {
        str(token): {"logprob": max(_CLAMP, value), "rank": rank}
        for rank, (value, token) in enumerate(found[:top], start=1)
    }


def _packed(values: tuple[float, ...]) -> str:
    import numpy as np

    file = io.BytesIO()
    np.save(
        file,
        np.array(
            [max(_CLAMP, value) if value == value else value for value in values], "f4"
        ).reshape(-1, 1),
    )
    return base64.b64encode(file.getvalue()).decode()


def _stop_reason(done: Completion, request: SampleRequest) -> str | int | None:
    """Return the stop that ended it; null for the model's own end."""
    if done.ended != "delimiter":
        return done.ids[-1] if done.ids[-1] in request.stop_ids else None
    return next((stop for stop in request.stop if stop in done.text), done.ids[-1])


def metrics(call: ServerCall) -> str:
    """Answer GET /metrics, with counters of speculation only where there is any."""
    text = call.gauges("vllm:num_requests_running", "vllm:num_requests_waiting")
    if call.state.quirks.speculation == "off":
        return text
    drafts = call.state.drafts
    # As after a long time at work: a client must look at differences.
    counts = {
        "drafts": 400_000 + drafts.rounds,
        "draft_tokens": 1_200_000 + drafts.proposed,
        "accepted_tokens": 900_000 + sum(drafts.accepted),
    }
    lines = [
        f'vllm:spec_decode_num_{name}_total{{engine="0"}} {float(count)}\n'
        for name, count in counts.items()
    ]
    for place, count in enumerate(drafts.accepted):
        labels = f'engine="0",position="{place}"'
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f"{name}{{{labels}}} {float(300_000 + count)}\n")
    return text + "".join(lines)


ROUTES = Routes(
    {
        "/version": lambda call: {"version": call.state.quirks.version or "0.33.0"},
        "/v1/models": lambda call: {"object": "list", "data": [call.model_row("vllm")]},
        "/metrics": metrics,
        "/tokenize": lambda call: (
            call.tokens("prompt") | {"max_model_len": call.state.context_length}
        ),
        "/inference/v1/abort_requests": abort,
    },
    {"/v1/completions": completions, "/inference/v1/generate": generate},
)
