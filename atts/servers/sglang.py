"""The dialect of SGLang's own route /generate, which scores a suffix without computing the cached
prefix again.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from atts.core import SampleRequest, ScoreRequest, Scores, TokenIds
from atts.errors import counted
from atts.servers.client import Call, Client, Count, Token, Tokens, decode, finish_of, logprob_of
from atts.servers.dialect import (
    Identity,
    LogProbs,
    RawCompletion,
    Scorer,
    in_queue,
    json_at,
    sampling_fields,
    seed_of,
    served_model,
    short_version,
    tokens_of,
)
from atts.servers.options import RemoteOptions


class _ServerInfo(Struct):
    version: str
    context_length: Count | None = None
    tokenizer_path: str | None = None
    model_path: str | None = None
    speculative_algorithm: str | None = None


class _Finish(Struct):
    type: str


class _Meta(Struct):
    finish_reason: _Finish | None = None
    cached_tokens: Count | None = None
    output_token_logprobs: tuple[tuple[float, Token, str | None], ...] | None = None
    input_token_logprobs: tuple[tuple[float | None, Token, str | None], ...] | None = None


class _Generated(Struct):
    meta_info: _Meta
    output_ids: Tokens = ()


class SglangDialect(Scorer):
    """The dialect of SGLang 0.5 and newer.

    Sampled tokens come with log-probs to which the temperature has been applied, unless the server
    was started with a flag for raw log-probs.
    """

    name = "sglang"
    schemes = ("sglang",)
    found_at = "/server_info"
    # If a request would fill the whole context, SGLang lowers the request's token limit and does
    # not report it. Two free tokens avoid this.
    spare = 2
    logprobs: LogProbs = "processed"
    priority_sign = -1

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._speculates = ""

    async def identify(self, client: Client, model: str) -> Identity:
        """Identify the server; see `Dialect.identify`."""
        info: _ServerInfo = await json_at(client, "/server_info", _ServerInfo)
        row = await served_model(client, model)
        if info.speculative_algorithm:
            self._speculates = f"the server speculates with {info.speculative_algorithm}"
        else:
            self._speculates = ""
        context = row.max_model_len or info.context_length or 0
        tokenizer = info.tokenizer_path or info.model_path or row.id
        name = f"sglang {short_version(info.version)}"
        return Identity(name, info.version, row.id, context, tokenizer, frozenset({"abort"}))

    def sample_call(self, request: SampleRequest, rid: str) -> Call:
        """Return the HTTP call for a completion; see `Dialect.sample_call`."""
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            **sampling_fields(request.sampling, no_top_k=-1),
            "repetition_penalty": 1.0,
            "sampling_seed": seed_of(request, 31),
            "stop_token_ids": request.stop_ids,
            "no_stop_trim": True,
        }
        if request.stop:
            sampling["stop"] = request.stop
        body = {
            "rid": rid,
            "input_ids": request.ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        return Call("/generate", body | self._priority(request))

    def read_sample(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """Read the completion in a reply; see `Dialect.read_sample`."""
        generated: _Generated = decode(reply, _Generated)
        meta = generated.meta_info
        rows = meta.output_token_logprobs or ()
        finish = finish_of(meta.finish_reason.type if meta.finish_reason else None)
        if tuple([row[1] for row in rows]) != generated.output_ids:
            raise ValueError("the log-probabilities do not match the token ids in the reply")
        logprobs = tuple([row[0] for row in rows])
        return RawCompletion(generated.output_ids, logprobs, finish, meta.cached_tokens or 0)

    def score_call(self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]) -> Call:
        """Return the HTTP call for scores; see `Scorer.score_call`.

        The request asks for log-probs only from the prefix's last token on, so that SGLang can take
        all earlier tokens from its cache.
        """
        body = {
            "rid": rid,
            "input_ids": request.prefix + request.suffix,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": len(request.prefix) - 1,
        }
        return Call("/generate", body | self._priority(request))

    def read_scores(self, reply: bytes, request: ScoreRequest) -> Scores | None:
        """Read the scores in a reply; see `Scorer.read_scores`."""
        generated: _Generated = decode(reply, _Generated)
        meta = generated.meta_info
        rows = meta.input_token_logprobs or ()
        # The first row is that of the prefix's last token. It has no log-prob, so skip it.
        values = [logprob_of(row[0]) for row in rows[1:] if row[0] is not None]
        count = len(request.suffix)
        if tuple([row[1] for row in rows]) != request.prefix[-1:] + request.suffix:
            raise ValueError(
                f"the server scored {len(values)} other token ids instead of the {count} requested "
                "ones"
            )
        if len(values) != count:
            sent = counted(len(values), "log-probability", "log-probabilities")
            raise ValueError(f"the server sent {sent} for {counted(count, 'requested token id')}")
        return Scores(tuple(values), meta.cached_tokens or 0)

    def abort(self, rid: str) -> Call | None:
        """Return the HTTP call that aborts a request; see `Dialect.abort`.

        SGLang aborts every request whose id begins with `rid`. All ids must therefore have the same
        length.
        """
        assert len(rid) == 32, (
            "a request id must have 32 characters, because a shorter id could abort other requests"
        )
        return Call("/abort_request", {"rid": rid, "abort_all": False})

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """Request a text's token ids from the server; see `Dialect.tokenize`."""
        return await tokens_of(client, {"prompt": text, "add_special_tokens": False})

    async def running(self, client: Client) -> int | None:
        """Return how many requests the server is processing; see `Dialect.running`. The server must
        have been started with --enable-metrics.
        """
        return await in_queue(client, "sglang:num_running_reqs", "sglang:num_queue_reqs")

    async def speculation(self, client: Client) -> str | None:
        """Describe the server's speculative decoding; see `Dialect.speculation`."""
        return self._speculates
