"""llama.cpp's dialect: drafts with log-probs that leave out the stop word's, and takes scoring requests for granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atts.core import Completion, SampleRequest, Sampling, TokenIds
from atts.seeds import Seed
from atts.testing.server_settings import ServerFault
from atts.testing.servers import Bad, Floor, Routes


async def props(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /props."""
    settings = {"n_ctx": floor.engine.spec.context_length}
    path = f"/models/{floor.model}"
    build = floor.quirks.version or "b9200-00dc805"
    return {
        "default_generation_settings": settings,
        "model_path": path,
        "model_alias": floor.model,
        "build_info": build,
    }


async def metrics(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /metrics, with --metrics."""
    return f"llamacpp:requests_processing {len(floor.jobs)}\n"


async def tokenize(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /tokenize."""
    return {"tokens": floor.engine.tokenizer.encode(body["content"])}


async def completion(
    floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None
) -> Any:
    """POST /completion: its own sampling defaults, and a token forced by `logit_bias` for its log-probability."""
    ids, limit = tuple(body["prompt"]), int(body.get("n_predict", -1))
    most = floor.engine.spec.context_length
    if len(ids) >= most:
        raise Bad(400, f"the request exceeds the available context size ({most} tokens)")
    if body.get("logit_bias"):
        return await _forced(floor, ids, int(body["logit_bias"][0][0]), fault)
    law = Sampling(
        float(body.get("temperature", 0.8)),
        int(body.get("top_k", 40)),
        float(body.get("top_p", 0.95)),
        float(body.get("min_p", 0.05)),
    )
    limit = most - len(ids) if limit < 0 else min(limit, most - len(ids))
    stop = tuple(body.get("stop") or ())
    request = SampleRequest(ids, limit, law, Seed(run=int(body.get("seed") or 0)), stop)
    done = await floor.sample(request, f"slot {id(request)}", fault)
    if done is None:
        raise Bad(499, "aborted")
    word = next((word for word in stop if word in done.text), "") if done.ended == "delimiter" else ""
    return _reply(floor, done, word)


async def ignoring(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """POST /v1/completions: takes `echo` and `logprobs` for the prompt, and gives generated tokens' only."""
    prompt = body["prompt"]
    ids = floor.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    request = SampleRequest(ids, max(1, int(body.get("max_tokens", 16))), Sampling(0.0))
    done = await floor.sample(request, f"slot {id(request)}", fault)
    if done is None:
        raise Bad(499, "aborted")
    rows = [{"id": token, "logprob": value} for token, value in zip(done.ids, done.logprobs, strict=True)]
    return {"choices": [{"index": 0, "text": done.text, "finish_reason": "length", "logprobs": {"content": rows}}]}


def _reply(floor: Floor, done: Completion, word: str) -> Any:
    pairs = list(zip(done.ids, done.logprobs, strict=True))
    if word:  # as many entries less as the stop word has tokens by itself, wherever they were in the text
        pairs = pairs[: max(0, len(pairs) - len(floor.engine.tokenizer.encode(word)))]
    kinds = {"length": "limit", "end": "eos", "delimiter": "word"}
    return {
        "content": done.text[: done.text.find(word)] if word else done.text,
        "tokens": done.ids,
        "stop": True,
        "stop_type": kinds[done.ended],
        "stopping_word": word,
        "completion_probabilities": [{"id": token, "logprob": value, "top_logprobs": []} for token, value in pairs],
        "truncated": False,
        "timings": {"cache_n": done.cached_tokens},
    }


async def _forced(floor: Floor, ids: TokenIds, token: int, fault: ServerFault | None) -> Any:
    said, scores = await floor.score((*ids, token), len(ids), f"slot {id(ids)}", fault)
    done = Completion(said, floor.engine.tokenizer.decode((token,)), "length", scores.logprobs)
    return _reply(floor, replace(done, cached_tokens=floor.cache.hit(ids)), "")


ROUTES = Routes(
    {"/props": props, "/metrics": metrics, "/tokenize": tokenize},
    {"/completion": completion, "/v1/completions": ignoring},
)
