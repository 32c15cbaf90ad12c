"""llama.cpp dialect: it drafts from ids, and cannot score a prompt."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from atts.core import SampleRequest, TokenIds
from atts.servers.client import Call, Client
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
from atts.servers.replies import Count, ModelRow, Token, Tokens, decode

_FORCE = 1e9  # a bias that leaves no other token a chance; log-probs are taken before it
_TOLD = {"cache_prompt": True, "n_probs": 1, "post_sampling_probs": False, "return_tokens": True}


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
    """llama.cpp's own server. It leaves out the log-probs of stop words and of cut characters: they
    are asked for.
    """

    name = "llamacpp"

    async def identify(self, client: Client, model: str) -> Identity:
        """See `Dialect`; one server has one model, so a name is only compared with the file's."""
        props: _Props = await json_at(client, "/props", _Props)
        path = props.model_path or props.model_alias or "unknown"
        alias = props.model_alias or path.rsplit("/", 1)[-1]
        if model and model not in (path, alias):
            choose_model(client, [ModelRow(alias)], model)
        build = props.build_info or "unknown"
        return Identity(
            f"llamacpp {build.split('-')[0]}", build, alias, props.default_generation_settings.n_ctx
        )

    def sampling(self, request: SampleRequest, rid: str) -> Call:
        """See `Dialect`; the defaults are another distribution, and cut before they heat: both are
        set right.
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
        return Call("/completion", body | _TOLD)

    def sampled(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """See `Dialect`; a log-prob is None from where the server began to leave them out."""
        found: _Completion = decode(reply, _Completion)
        if found.truncated:
            raise ValueError("it cut the prompt")
        logprobs = _matched(found.tokens, found.completion_probabilities)
        finish: Literal["stop", "length"] = "length" if found.stop_type == "limit" else "stop"
        return RawCompletion(
            found.tokens, logprobs, finish, (found.timings and found.timings.cache_n) or 0
        )

    def forcing(self, ids: TokenIds, token: int) -> Call:
        """See `Forcer`: one token, with all weight on the one asked for."""
        body = {"prompt": ids, "n_predict": 1, "temperature": 1.0, "samplers": ["temperature"]}
        return Call("/completion", body | {"logit_bias": [[token, _FORCE]]} | _TOLD)

    def forced(self, reply: bytes, token: int) -> float:
        """See `Forcer`."""
        found: _Completion = decode(reply, _Completion)
        (row,) = found.completion_probabilities
        if row.id != token or found.tokens != (token,):
            raise ValueError(f"it was made to write {token}, and wrote {row.id}")
        return row.logprob

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """See `Dialect`."""
        return await tokens_of(
            client, {"content": text, "add_special": False, "parse_special": False}
        )

    async def running(self, client: Client) -> int | None:
        """See `Dialect`; needs a server started with --metrics."""
        return await in_queue(client, "llamacpp:requests_processing")


def _matched(ids: TokenIds, rows: tuple[_Row, ...]) -> tuple[float | None, ...]:
    """A log-prob per id up to the first that was left out; beyond it there is no telling whose is
    whose.
    """
    whole = 0
    while whole < min(len(ids), len(rows)) and rows[whole].id == ids[whole]:
        whole += 1
    if len(rows) > len(ids) or (len(rows) == len(ids) and whole < len(ids)):
        raise ValueError("the log-probs are not of the ids that came with them")
    return tuple(rows[place].logprob if place < whole else None for place in range(len(ids)))
