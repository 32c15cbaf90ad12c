"""llama.cpp dialect server: no log-probs for stop words, no scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atts.core import Completion, SampleRequest, Sampling, TokenIds
from atts.testing.servers import Refusal, Routes, ServerCall, ServerState, request_of

_DEFAULT = Sampling(0.8, 40, 0.95, 0.05)


def props(call: ServerCall) -> dict[str, Any]:
    """Answer GET /props."""
    state = call.state
    return {
        "default_generation_settings": {"n_ctx": state.context_length},
        "model_path": f"/models/{state.model}",
        "model_alias": state.model,
        "build_info": state.quirks.version or "b9200-00dc805",
    }


async def completion(call: ServerCall) -> Any:
    """Answer POST /completion, with sampling defaults of its own.

    A `logit_bias` forces a token, which shows its log-probability.
    """
    body = call.body
    most = call.state.context_length
    ids = tuple(body["prompt"])
    limit = int(body.get("n_predict", -1))
    if len(ids) >= most:
        raise Refusal(400, f"the request exceeds the available context size ({most} tokens)")
    if body.get("logit_bias"):
        return await _forced(call, ids, int(body["logit_bias"][0][0]))
    limit = most - len(ids) if limit < 0 else min(limit, most - len(ids))
    request = request_of(ids, limit, body, _DEFAULT)
    done = await call.sample(request)
    word = (
        next((word for word in request.stop if word in done.text), "")
        if done.ended == "delimiter"
        else ""
    )
    return _reply(call.state, done, word)


async def ignoring(call: ServerCall) -> Any:
    """Answer POST /v1/completions, which ignores that the prompt's log-probs are asked for."""
    prompt = call.body["prompt"]
    ids = call.state.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    done = await call.sample(
        SampleRequest(ids, max(1, int(call.body.get("max_tokens", 16))), Sampling(0.0))
    )
    rows = [
        {"id": token, "logprob": value}
        for token, value in zip(done.ids, done.logprobs, strict=True)
    ]
    return {
        "choices": [
            {
                "index": 0,
                "text": done.text,
                "finish_reason": "length",
                "logprobs": {"content": rows},
            }
        ]
    }


def _reply(state: ServerState, done: Completion, word: str) -> Any:
    pairs = list(zip(done.ids, done.logprobs, strict=True))
    # as many entries less as the stop word has tokens by itself, wherever they were in the text
    if word:
        pairs = pairs[: max(0, len(pairs) - len(state.engine.tokenizer.encode(word)))]
    kinds = {"length": "limit", "end": "eos", "delimiter": "word"}
    return {
        "content": done.text[: done.text.find(word)] if word else done.text,
        "tokens": done.ids,
        "stop": True,
        "stop_type": kinds[done.ended],
        "stopping_word": word,
        "completion_probabilities": [
            {"id": token, "logprob": value, "top_logprobs": []} for token, value in pairs
        ],
        "truncated": False,
        "timings": {"cache_n": done.cached_tokens},
    }


async def _forced(call: ServerCall, ids: TokenIds, token: int) -> Any:
    state = call.state
    ids_scored, scores = await call.score((*ids, token), len(ids))
    done = Completion(
        ids_scored, state.engine.tokenizer.decode((token,)), "length", scores.logprobs
    )
    return _reply(state, replace(done, cached_tokens=state.cache.hit(ids)), "")


ROUTES = Routes(
    {
        "/props": props,
        "/metrics": lambda call: f"llamacpp:requests_processing {len(call.state.jobs)}\n",
        "/tokenize": lambda call: call.tokens("content"),
    },
    {"/completion": completion, "/v1/completions": ignoring},
)
