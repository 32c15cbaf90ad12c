"""vLLM dialect: ids in and out, scores by prompt log-probs, or from the cached prefix where that route is open."""

from __future__ import annotations

import base64
import io
from typing import Any, Literal

from atts.core import SampleRequest, ScoreRequest, Scores, TokenIds
from atts.errors import EngineError
from atts.remote.client import Call, Client
from atts.remote.dialects import (
    Dialect,
    Identity,
    RawCompletion,
    finish_of,
    in_queue,
    json_at,
    logprob_of,
    priority_field,
    sampling_fields,
    seed_of,
    served,
    short,
    tokens_of,
)

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"


class VllmDialect(Dialect):
    """vLLM from 0.10 on; scoring reads the cached prefix when the server runs with --enable-scale-out (0.33)."""

    name = "vllm"
    spare = 1  # a scoring request must generate a token

    def __init__(self, *, priorities: bool = False) -> None:
        self._model = ""
        self._scale_out = False
        self._priorities = priorities

    async def identify(self, client: Client, model: str) -> Identity:
        """See `Dialect`."""
        version = str((await json_at(client, "/version"))["version"])
        row = await served(client, model)
        self._model = row["id"]
        closed = (await client.look(GENERATE, {})).status in (401, 403, 404, 405)
        self._scale_out = not closed
        routes = frozenset[str]() if closed else frozenset({"generate", "abort"})
        context = int(row.get("max_model_len") or 0)
        root = str(row.get("root") or self._model)
        return Identity(f"vllm {short(version)}", version, self._model, context, root, routes)

    def sampling(self, request: SampleRequest, rid: str) -> Call:
        """See `Dialect`. Every sampling field is sent: the defaults would be the model's, not ours."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.ids,
            "max_tokens": request.max_tokens,
            **sampling_fields(request.sampling),
            "repetition_penalty": 1.0,
            "seed": seed_of(request, 63),
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": request.stop_ids,
        }
        if request.stop:
            body |= {"stop": request.stop, "include_stop_str_in_output": True}
        return Call("/v1/completions", body | self._priority(request.priority), self._named(rid))

    def sampled(self, reply: Any, request: SampleRequest) -> RawCompletion:
        """See `Dialect`."""
        (choice,) = reply["choices"]
        ids = choice.get("token_ids")
        if ids is None:
            raise EngineError("vllm", "it returns no token ids", "It must be 0.10.2 or newer")
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        return RawCompletion(tuple(ids), logprobs, finish_of(choice["finish_reason"]), _cached(reply))

    def scoring(self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]) -> Call:
        """See `Scorer`."""
        ids = request.prefix + request.suffix
        if not self._scale_out:
            body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            head: dict[str, Any] = {"model": self._model}
            return Call("/v1/completions", head | body | self._priority(request.priority))
        sampling = {
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprob_start": len(request.prefix) - 1,
            "prompt_logprob_token_ids": [[token] for token in request.suffix],
            "skip_reading_prefix_cache": cache == "skip",
        }
        body = {"request_id": rid, "model": self._model, "token_ids": ids, "sampling_params": sampling}
        return Call(GENERATE, body | self._priority(request.priority))

    def scored(self, reply: Any, request: ScoreRequest) -> Scores | None:
        """See `Scorer`; a scored chunk that is cached past its start comes back without scores."""
        if not self._scale_out:
            return _prompt_logprobs(reply, request)
        packed = reply["prompt_token_id_logprobs"]
        if packed is None:
            return None
        return Scores(_unpack(packed, len(request.suffix)), _cached(reply))

    def abort(self, rid: str) -> Call | None:
        """See `Dialect`; without --enable-scale-out the closed connection must do."""
        if not self._scale_out:
            return None
        return Call(ABORT, {"request_ids": [f"cmpl-{rid}-0", f"generate-tokens-{rid}"]})

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """See `Dialect`."""
        return await tokens_of(client, {"model": self._model, "prompt": text, "add_special_tokens": False})

    async def running(self, client: Client) -> int | None:
        """See `Dialect`."""
        return await in_queue(client, "vllm:num_requests_running", "vllm:num_requests_waiting")

    def _named(self, rid: str) -> dict[str, str]:
        """The header that names a request, where it can be aborted by its name; it outlives gateways."""
        return {"X-Request-Id": rid} if self._scale_out else {}

    def _priority(self, priority: int) -> dict[str, int]:
        return priority_field(priority, self._priorities, "lower")


def _prompt_logprobs(reply: Any, request: ScoreRequest) -> Scores:
    (choice,) = reply["choices"]
    rows, length = choice["prompt_logprobs"], len(request.prefix) + len(request.suffix)
    if len(rows) != length:
        raise ValueError(f"{len(rows)} prompt log-probs for {length} ids")
    pairs = zip(rows[len(request.prefix) :], request.suffix, strict=True)
    return Scores(tuple(logprob_of(row[str(token)]["logprob"]) for row, token in pairs), _cached(reply))


def _unpack(packed: str, count: int) -> tuple[float, ...]:
    import numpy as np

    table: Any = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
    if table.shape != (count, 1):
        raise ValueError(f"scores of shape {table.shape} for {count} tokens")
    return tuple(logprob_of(value) for value in table[:, 0].tolist())


def _cached(reply: Any) -> int:
    """Cached prompt tokens; 0 as well where the server does not tell (--enable-prompt-tokens-details)."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
