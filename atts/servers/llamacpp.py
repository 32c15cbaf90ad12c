"""The dialect of llama.cpp servers, which can continue token ids but cannot score given tokens."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from atts.core import SampleRequest, TokenIds
from atts.servers.client import Call, Client, Count, ModelRow, Token, Tokens, decode
from atts.servers.dialect import (
    Forcer,
    Identity,
    RawCompletion,
    choose_model,
    in_queue,
    json_at,
    sampling_fields,
    seed_of,
    tokens_of,
)

# The logit bias with which the server must sample one given token. The server computes log-probs
# before it adds the bias, so the bias does not change them.
_FORCE = 1e9
_REPLY_FIELDS = {
    "cache_prompt": True,
    "n_probs": 1,
    "post_sampling_probs": False,
    "return_tokens": True,
}


class _Settings(Struct):
    n_ctx: Count


class _Props(Struct):
    default_generation_settings: _Settings
    model_path: str | None = None
    model_alias: str | None = None
    build_info: str | None = None


class _Row(Struct):
    id: Token
    logprob: float


class _Timings(Struct):
    cache_n: Count | None = None


class _Completion(Struct):
    tokens: Tokens
    completion_probabilities: tuple[_Row, ...]
    stop_type: str = ""
    truncated: bool = False
    timings: _Timings | None = None


class LlamaCppDialect(Forcer):
    """The dialect of llama.cpp's own HTTP server.

    Its replies lack the log-probs of tokens in stop strings and of incomplete UTF-8 characters.
    atts requests each missing log-prob separately.
    """

    name = "llamacpp"
    schemes = ("llamacpp",)
    found_at = "/props"

    async def identify(self, client: Client, model: str) -> Identity:
        """Identify the server; see `Dialect.identify`. A llama.cpp server has only one model. If
        the address names a model, the name is only compared with that model's file name and alias.
        """
        props: _Props = await json_at(client, "/props", _Props)
        path = props.model_path or props.model_alias or "unknown"
        alias = props.model_alias or path.rsplit("/", 1)[-1]
        if model and model not in (path, alias):
            choose_model(client, [ModelRow(alias)], model)
        build = props.build_info or "unknown"
        return Identity(
            f"llamacpp {build.split('-')[0]}", build, alias, props.default_generation_settings.n_ctx
        )

    def sample_call(self, request: SampleRequest, rid: str) -> Call:
        """Return the HTTP call for a completion; see `Dialect.sample_call`.

        All sampling fields and their order are set, because by default llama.cpp uses other values,
        and filters tokens before it applies the temperature.
        """
        body = {
            "prompt": request.ids,
            "n_predict": request.max_tokens,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            **sampling_fields(request.sampling),
            "repeat_penalty": 1.0,
            "seed": seed_of(request, 31),
            "stop": request.stop,
        }
        return Call("/completion", body | _REPLY_FIELDS)

    def read_sample(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """Read the completion in a reply; see `Dialect.read_sample`. Once a log-prob is missing,
        all later ones are None too.
        """
        completion: _Completion = decode(reply, _Completion)
        if completion.truncated:
            raise ValueError("the server truncated the prompt")
        logprobs = _matched(completion.tokens, completion.completion_probabilities)
        finish: Literal["stop", "length"] = "length" if completion.stop_type == "limit" else "stop"
        cached = completion.timings.cache_n if completion.timings else None
        return RawCompletion(completion.tokens, logprobs, finish, cached or 0)

    def force_call(self, ids: TokenIds, token: int) -> Call:
        """Return the HTTP call that forces a token; see `Forcer.force_call`. The server writes one
        token, and a large logit bias forces this token.
        """
        body = {"prompt": ids, "n_predict": 1, "temperature": 1.0, "samplers": ["temperature"]}
        return Call("/completion", body | {"logit_bias": [[token, _FORCE]]} | _REPLY_FIELDS)

    def read_forced(self, reply: bytes, token: int) -> float:
        """Read a forced token's log-prob in a reply; see `Forcer.read_forced`."""
        completion: _Completion = decode(reply, _Completion)
        (row,) = completion.completion_probabilities
        if row.id != token or completion.tokens != (token,):
            raise ValueError(f"the server was forced to write token {token}, but wrote {row.id}")
        return row.logprob

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """Request a text's token ids from the server; see `Dialect.tokenize`."""
        return await tokens_of(
            client, {"content": text, "add_special": False, "parse_special": False}
        )

    async def running(self, client: Client) -> int | None:
        """Return how many requests the server is processing; see `Dialect.running`. The server must
        have been started with --metrics.
        """
        return await in_queue(client, "llamacpp:requests_processing")


def _matched(ids: TokenIds, rows: tuple[_Row, ...]) -> tuple[float | None, ...]:
    """Return one log-prob per id, or None from the first missing log-prob on.

    After a missing log-prob, it is unknown which id each later log-prob of the reply belongs to.
    """
    matching = 0
    while matching < min(len(ids), len(rows)) and rows[matching].id == ids[matching]:
        matching += 1
    if len(rows) > len(ids) or (len(rows) == len(ids) and matching < len(ids)):
        raise ValueError("the log-probabilities do not match the token ids in the reply")
    known = [row.logprob for row in rows[:matching]]
    return (*known, *[None] * (len(ids) - matching))
