"""vLLM dialect: ids in and out, scores by prompt log-probs, or from the cached prefix where that
route is open.
"""

from __future__ import annotations

import base64
import struct
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct

from atts.core import SampleRequest, ScoreRequest, Scores, TokenIds
from atts.errors import EngineTimeout
from atts.servers.client import Call, Client
from atts.servers.dialect import (
    Identity,
    RawCompletion,
    Scorer,
    in_queue,
    json_at,
    metric,
    sampling_fields,
    seed_of,
    served,
    short,
    tokens_of,
)
from atts.servers.options import RemoteOptions
from atts.servers.replies import TokenCounts, Tokens, Version, decode, finish_of, logprob_of

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
_SPECULATED = "vllm:spec_decode"
_NPY = b"\x93NUMPY\x01\x00"
_FLOATS = {"<f2": "e", "<f4": "f", "<f8": "d"}


class _LogProb(Struct):
    logprob: float


class _LogProbs(Struct):
    token_logprobs: tuple[float, ...]


class _Choice(Struct):
    finish_reason: str | None = None
    token_ids: Tokens | None = None
    logprobs: _LogProbs | None = None
    prompt_logprobs: tuple[dict[str, _LogProb] | None, ...] | None = None


class _Completion(Struct):
    choices: tuple[_Choice, ...] = ()
    usage: TokenCounts | None = None
    prompt_token_id_logprobs: str | None = None

    @property
    def cached(self) -> int:
        return self.usage.cached if self.usage else 0


class VllmDialect(Scorer):
    """vLLM from 0.10 on; scoring reads the cached prefix when the server runs with
    --enable-scale-out (0.33).
    """

    name = "vllm"
    spare = 1  # a scoring request must generate a token
    cuts_logprobs = True

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._scale_out = False
        # of which version, and whether it gives them
        self._cached_scores: tuple[str, bool] | None = None

    async def identify(self, client: Client, model: str) -> Identity:
        """See `Dialect`."""
        version: str = (await json_at(client, "/version", Version)).version
        row = await served(client, model)
        self._model = row.id
        closed = (await client.look(GENERATE, {})).status in (401, 403, 404, 405)
        self._scale_out = not closed
        if self._scale_out and (self._cached_scores is None or self._cached_scores[0] != version):
            self._cached_scores = version, await self._gives_cached_scores(client)
        routes = (
            frozenset[str]()
            if closed
            else frozenset({"abort", *(["generate"] * self._reads_cache)})
        )
        root = row.root or self._model
        return Identity(
            f"vllm {short(version)}", version, self._model, row.max_model_len or 0, root, routes
        )

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
        return Call("/v1/completions", body | self._priority(request), self._named(rid))

    def sampled(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """See `Dialect`."""
        found: _Completion = decode(reply, _Completion)
        (choice,) = found.choices
        if choice.token_ids is None:
            raise ValueError("it returns no token ids; vLLM does from 0.10.2 on")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else ()
        return RawCompletion(
            choice.token_ids, logprobs, finish_of(choice.finish_reason), found.cached
        )

    def scoring(self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]) -> Call:
        """See `Scorer`."""
        ids = request.prefix + request.suffix
        if not self._reads_cache:
            body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            head: dict[str, Any] = {"model": self._model}
            return Call("/v1/completions", head | body | self._priority(request))
        return Call(GENERATE, self._cached_scoring(request, rid, cache) | self._priority(request))

    def scored(self, reply: bytes, request: ScoreRequest) -> Scores | None:
        """See `Scorer`; a scored chunk that is cached past its start comes back without scores."""
        found: _Completion = decode(reply, _Completion)
        if not self._reads_cache:
            return _prompt_logprobs(found, request)
        packed = found.prompt_token_id_logprobs
        return (
            None if packed is None else Scores(_unpack(packed, len(request.suffix)), found.cached)
        )

    def abort(self, rid: str) -> Call | None:
        """See `Dialect`; without --enable-scale-out the closed connection must do."""
        if not self._scale_out:
            return None
        return Call(ABORT, {"request_ids": [f"cmpl-{rid}-0", f"generate-tokens-{rid}"]})

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """See `Dialect`."""
        return await tokens_of(
            client, {"model": self._model, "prompt": text, "add_special_tokens": False}
        )

    async def running(self, client: Client) -> int | None:
        """See `Dialect`."""
        return await in_queue(client, "vllm:num_requests_running", "vllm:num_requests_waiting")

    async def speculation(self, client: Client) -> str | None:
        """See `Dialect`; by the counters that a server without speculation does not have."""
        text = (await client.look("/metrics")).body.decode(errors="replace")
        if "vllm:" not in text:
            return None
        if _SPECULATED not in text:
            return ""
        proposed, accepted = (
            metric(text, f"{_SPECULATED}_num_{what}_tokens_total") for what in ("draft", "accepted")
        )
        share = (
            f", {(accepted or 0) / proposed:.0%} of {proposed:,} proposed tokens accepted so far"
            if proposed
            else ""
        )
        return f"it speculates{share}"

    @property
    def _reads_cache(self) -> bool:
        """Whether scores come from the cached prefix."""
        return self._scale_out and (self._cached_scores is None or self._cached_scores[1])

    async def _gives_cached_scores(self, client: Client) -> bool:
        """Whether the open route takes what scoring needs: vLLM's older model runner, on
        processors, refuses it.
        """
        trial = self._cached_scoring(ScoreRequest((0,), (0,)), "atts-trial", "skip")
        with suppress(EngineTimeout):  # busy: no refusal
            return (await client.look(GENERATE, trial)).status != 400
        return True

    def _cached_scoring(
        self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]
    ) -> dict[str, Any]:
        sampling = {
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprob_start": len(request.prefix) - 1,
            "prompt_logprob_token_ids": [[token] for token in request.suffix],
            "skip_reading_prefix_cache": cache == "skip",
        }
        ids = request.prefix + request.suffix
        return {
            "request_id": rid,
            "model": self._model,
            "token_ids": ids,
            "sampling_params": sampling,
        }

    def _named(self, rid: str) -> dict[str, str]:
        """The header that names a request, where it can be aborted by its name; it outlives
        gateways.
        """
        return {"X-Request-Id": rid} if self._scale_out else {}


def _prompt_logprobs(found: _Completion, request: ScoreRequest) -> Scores:
    (choice,) = found.choices
    rows = choice.prompt_logprobs or ()
    length = len(request.prefix) + len(request.suffix)
    if len(rows) != length:
        raise ValueError(f"{len(rows)} prompt log-probs for {length} ids")
    pairs = zip(rows[len(request.prefix) :], request.suffix, strict=True)
    scored = [row.get(str(token)) if row else None for row, token in pairs]
    values = [logprob_of(each.logprob) for each in scored if each]
    if len(values) < len(scored):
        raise ValueError("the log-probs are of other ids than those asked about")
    return Scores(tuple(values), found.cached)


def _unpack(packed: str, count: int) -> tuple[float, ...]:
    """The column of numbers in an .npy file: its header must be this one, word for word."""
    data = base64.b64decode(packed, validate=True)
    end = 10 + int.from_bytes(data[8:10], "little")
    header = data[10:end].decode("latin-1").strip()
    for kind, code in _FLOATS.items():
        known = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({count}, 1), }}"
        form = struct.Struct(f"<{count}{code}")
        if data[:8] == _NPY and header == known and len(data) - end == form.size:
            return tuple(logprob_of(value) for value in form.unpack(data[end:]))
    raise ValueError(f"the packed scores are not {count} numbers ({header[:80]!r})")
