"""The dialect of vLLM servers, and a table of the vLLM features that atts uses, by version."""

from __future__ import annotations

import base64
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from atts.core import SampleRequest, ScoreRequest, Scores, TokenIds
from atts.errors import EngineTimeout, OptionError, UnsupportedByEngine, counted
from atts.servers.client import (
    Call,
    Client,
    TokenCounts,
    Tokens,
    Version,
    decode,
    finish_of,
    logprob_of,
)
from atts.servers.dialect import (
    DraftCounts,
    Identity,
    RawCompletion,
    TopScorer,
    in_queue,
    json_at,
    metric,
    metrics_by_place,
    sampling_fields,
    seed_of,
    served_model,
    short_version,
    tokens_of,
)
from atts.servers.options import RemoteOptions

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


class VllmDialect(TopScorer):
    """The dialect of vLLM servers.

    Scoring takes the prefix from the server's cache if the server's version can do so and the
    server was started with --enable-scale-out. `FEATURES` lists the vLLM version that each feature
    needs.
    """

    name = "vllm"
    schemes = ("vllm",)
    found_at = "/version"
    # vLLM cannot score without generating, so a scoring request needs room for one more token.
    spare = 1
    cuts_logprobs = True
    takes_thinking_budget = True

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        # True if the server was started with --enable-scale-out, which adds HTTP routes.
        self._scale_out = False
        # The server's version when scoring from the cache was tested, and whether the test
        # succeeded. Another version is tested again.
        self._cached_scores: tuple[str, bool] | None = None
        # version of the server when it accepted a thinking budget; "" before the test
        self._has_thinking_budget = ""

    async def identify(self, client: Client, model: str) -> Identity:
        """Identify the server; see `Dialect.identify`."""
        version: str = (await json_at(client, "/version", Version)).version
        row = await served_model(client, model)
        self._model = row.id
        status = (await client.look(GENERATE, {})).status
        self._scale_out = status not in (401, 403, 404, 405)
        if self.closes_thinking and self._has_thinking_budget != version:
            await self._check_thinking_budget(client, version)
            self._has_thinking_budget = version
        routes = set[str]()
        if self._scale_out:
            routes.add("abort")
            if self._cached_scores is None or self._cached_scores[0] != version:
                self._cached_scores = version, await self._gives_cached_scores(client)
            if self._reads_cache:
                routes.add("generate")
        return Identity(
            f"vllm {short_version(version)}",
            version,
            self._model,
            row.max_model_len or 0,
            row.root or self._model,
            frozenset(routes),
        )

    def sample_call(self, request: SampleRequest, rid: str) -> Call:
        """Return the HTTP call for a completion; see `Dialect.sample_call`. Every sampling field is
        set, because vLLM takes its defaults from the model.
        """
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
        if request.thinking_budget:
            # This budget is for the whole think block, because vLLM also counts the block's tokens
            # in the prompt.
            body["thinking_token_budget"] = request.thinking_budget
        return Call("/v1/completions", body | self._priority(request), self._named(rid))

    def read_sample(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """Read the completion in a reply; see `Dialect.read_sample`."""
        completion: _Completion = decode(reply, _Completion)
        (choice,) = completion.choices
        if choice.token_ids is None:
            raise ValueError(f"the server returns no token ids; use vLLM {dotted(LEAST)} or newer")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else ()
        return RawCompletion(
            choice.token_ids, logprobs, finish_of(choice.finish_reason), completion.cached
        )

    def score_call(self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]) -> Call:
        """Return the HTTP call for scores; see `Scorer.score_call`."""
        ids = request.prefix + request.suffix
        if not self._reads_cache:
            body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            head: dict[str, Any] = {"model": self._model}
            return Call("/v1/completions", head | body | self._priority(request))
        return Call(GENERATE, self._cached_scoring(request, rid, cache) | self._priority(request))

    def read_scores(self, reply: bytes, request: ScoreRequest) -> Scores | None:
        """Read the scores in a reply; see `Scorer.read_scores`. The server returns no scores if it
        took a part of the suffix from its cache.
        """
        completion: _Completion = decode(reply, _Completion)
        if not self._reads_cache:
            return _prompt_logprobs(completion, request)
        packed = completion.prompt_token_id_logprobs
        if packed is None:
            return None
        return Scores(_unpack(packed, len(request.suffix)), completion.cached)

    def top_call(self, ids: TokenIds, top: int) -> Call:
        """Return the HTTP call that lists the most likely tokens; see `TopScorer.top_call`. A
        server lists at most --max-logprobs tokens per position, by default 20.
        """
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
        return Call("/v1/completions", {"model": self._model, **body})

    def read_top(self, reply: bytes, ids: TokenIds) -> list[dict[int, float]]:
        """Read the most likely tokens in a reply; see `TopScorer.read_top`."""
        completion: _Completion = decode(reply, _Completion)
        (choice,) = completion.choices
        rows = choice.prompt_logprobs or ()
        return [
            {int(token): logprob_of(scored.logprob) for token, scored in (row or {}).items()}
            for row in rows[1:]
        ]

    def abort(self, rid: str) -> Call | None:
        """Return the HTTP call that aborts a request; see `Dialect.abort`. Without
        --enable-scale-out, a request can be aborted only by closing its connection.
        """
        if not self._scale_out:
            return None
        return Call(ABORT, {"request_ids": [f"cmpl-{rid}-0", f"generate-tokens-{rid}"]})

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """Request a text's token ids from the server; see `Dialect.tokenize`."""
        return await tokens_of(
            client, {"model": self._model, "prompt": text, "add_special_tokens": False}
        )

    async def running(self, client: Client) -> int | None:
        """Return how many requests the server is processing; see `Dialect.running`."""
        return await in_queue(client, "vllm:num_requests_running", "vllm:num_requests_waiting")

    async def speculation(self, client: Client) -> str | None:
        """Describe the server's speculative decoding; see `Dialect.speculation`. The server
        speculates if its metrics include counters of speculative decoding.
        """
        text = (await client.look("/metrics")).body.decode(errors="replace")
        if "vllm:" not in text:
            return None
        if _SPECULATED not in text:
            return ""
        proposed = metric(text, f"{_SPECULATED}_num_draft_tokens_total")
        accepted = metric(text, f"{_SPECULATED}_num_accepted_tokens_total") or 0
        if not proposed:
            return "the server speculates"
        share = accepted / proposed
        return (
            f"the server speculates; so far the target accepted {100 * share:.0f} % of "
            f"{proposed:,} proposed tokens"
        )

    async def drafted(self, client: Client) -> DraftCounts | None:
        """Return the server's counts of draft tokens; see `Dialect.drafted`."""
        text = (await client.look("/metrics")).body.decode(errors="replace")
        rounds = metric(text, f"{_SPECULATED}_num_drafts_total")
        proposed = metric(text, f"{_SPECULATED}_num_draft_tokens_total")
        if rounds is None or proposed is None:
            return None
        accepted = metrics_by_place(text, f"{_SPECULATED}_num_accepted_tokens_per_pos_total")
        return DraftCounts(rounds, proposed, accepted)

    @property
    def _reads_cache(self) -> bool:
        """Return whether scoring takes the prefix from the server's cache."""
        return self._scale_out and (self._cached_scores is None or self._cached_scores[1])

    async def _gives_cached_scores(self, client: Client) -> bool:
        """Test with one request whether the server accepts the fields for scoring from its cache.

        vLLM's older model runner, which is used on CPUs, rejects these fields.
        """
        trial = self._cached_scoring(ScoreRequest((0,), (0,)), "atts-trial", "skip")
        # After a time-out, assume that the server has the route, because it is probably only busy.
        with suppress(EngineTimeout):
            return (await client.look(GENERATE, trial)).status != 400
        return True

    async def _check_thinking_budget(self, client: Client, version: str) -> None:
        """Check with a request of one token that the server accepts a thinking budget.

        :raises UnsupportedByEngine: the server's version ignores the budget, or the server refuses
            it.
        """
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) < _THINKING_BUDGET:
            problem = f"vLLM {version} ignores thinking_token_budget"
            advice = f"Use vLLM {dotted(_THINKING_BUDGET)} or newer, or leave out thinking=send"
            raise UnsupportedByEngine(client.name, problem, advice)
        body = {"model": self._model, "prompt": [0], "max_tokens": 1, "thinking_token_budget": 1}
        reply = await client.look("/v1/completions", body)
        if reply.status == 400:
            words = reply.body.decode(errors="replace")[:200]
            problem = f"the server refuses thinking_token_budget ({words})"
            advice = "Start vLLM with --reasoning-parser, or leave out thinking=send"
            raise UnsupportedByEngine(client.name, problem, advice)

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
        """Return a header that sets a request's id, or no header if the server cannot abort
        requests by id.

        A header is used because some gateways change the bodies of requests.
        """
        return {"X-Request-Id": rid} if self._scale_out else {}


def _prompt_logprobs(completion: _Completion, request: ScoreRequest) -> Scores:
    (choice,) = completion.choices
    rows = choice.prompt_logprobs or ()
    length = len(request.prefix) + len(request.suffix)
    if len(rows) != length:
        found = counted(len(rows), "prompt log-probability", "prompt log-probabilities")
        raise ValueError(f"the reply has {found} for {counted(length, 'token id')}")
    values: list[float] = []
    for row, token in zip(rows[len(request.prefix) :], request.suffix, strict=True):
        scored = row.get(str(token)) if row else None
        if scored is None:
            raise ValueError("the log-probabilities do not match the requested token ids")
        values.append(logprob_of(scored.logprob))
    return Scores(tuple(values), completion.cached)


def _unpack(packed: str, count: int) -> tuple[float, ...]:
    """Return the `count` numbers of a base64-encoded .npy file.

    Only the exact header that vLLM writes is accepted.
    """
    data = base64.b64decode(packed, validate=True)
    # The layout of an .npy file: magic number and version (8 bytes), length of the header (2
    # bytes), header, and numbers.
    end = 10 + int.from_bytes(data[8:10], "little")
    header = data[10:end].decode("latin-1").strip()
    for kind, code in _FLOATS.items():
        expected = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({count}, 1), }}"
        layout = struct.Struct(f"<{count}{code}")
        if data[:8] == _NPY and header == expected and len(data) - end == layout.size:
            return tuple(logprob_of(value) for value in layout.unpack(data[end:]))
    raise ValueError(f"the packed scores are not an array of {count} numbers ({header[:80]!r})")


VllmVersion = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VllmFeature:
    """A vLLM feature that atts uses, with the version that introduced it."""

    since: VllmVersion
    flag: str  # the server flag that enables the feature; "" if no flag is needed
    does: str
    without: str  # what happens in a run if the server's vLLM is too old for the feature


_THINKING_BUDGET: VllmVersion = (0, 19)

FEATURES = (
    VllmFeature((0, 10, 2), "", "replies contain token ids", "the server cannot be used"),
    VllmFeature(
        (0, 10, 2),
        "--generation-config vllm",
        "the model's own sampling defaults are disabled",
        "the server cannot be used",
    ),
    VllmFeature(
        (0, 10, 2),
        "--enable-prefix-caching",
        "a chunk is scored without computing its cached prefix again",
        "the server cannot be used",
    ),
    VllmFeature(
        (0, 10, 2),
        "--enable-prompt-tokens-details",
        "replies report the number of cached tokens, so atts sees whether the cache works",
        "the server cannot be used",
    ),
    VllmFeature(
        (0, 11),
        "",
        "a server can speculate with a draft model (`draft_model`)",
        "a server can speculate only with other methods",
    ),
    VllmFeature(
        (0, 14),
        "",
        "speculation also works if a request asks for log-probs, as every request of atts does",
        "vLLM does not speculate for requests from atts, and gives no warning",
    ),
    VllmFeature(
        (0, 16),
        "",
        "a server can combine speculation with pipeline parallelism",
        "a server can use speculation or pipeline parallelism, but not both",
    ),
    VllmFeature(
        _THINKING_BUDGET,
        "",
        "the server ends thinking when a token budget is used up (needs `--reasoning-parser`, and "
        "`?thinking=send` in the address)",
        "atts ends the think block itself, with one more request",
    ),
    VllmFeature(
        (0, 30),
        "--enable-scale-out",
        "atts can abort a request by its id",
        "atts aborts a request by closing the connection",
    ),
    VllmFeature(
        (0, 33),
        "--enable-scale-out",
        "the target scores a chunk from the cached prefix",
        "the target reads the whole prefix again for every chunk",
    ),
)
"""All vLLM features that atts uses, oldest first."""
LEAST = FEATURES[0].since
"""The oldest vLLM version that atts supports."""
NEWEST = FEATURES[-1].since
"""The version that introduced the newest feature in `FEATURES`. This dialect was written against
the source code of that version.
"""


def read_version(text: str) -> VllmVersion:
    """Parse a version such as 0.29, v0.30.1 or 0.33.0rc1+cu128 into a tuple of integers.

    >>> read_version("v0.30.1rc2+cu128")
    (0, 30, 1)

    :raises OptionError: the text is not a version, or atts cannot use this version.
    """
    form = re.match(r"v?(\d+(?:\.\d+)+)", text.strip())
    if form is None:
        raise OptionError("--server-version", f"{text!r} is not a version such as 0.33")
    version = tuple(int(part) for part in form[1].split("."))
    # Compare only the parts that the user gave. So 0.10 is accepted, because it may mean the
    # required version 0.10.2.
    if version < LEAST[: len(version)]:
        problem = f"vLLM {text} returns no token ids, so atts cannot use it"
        raise OptionError("--server-version", f"{problem}; use {dotted(LEAST)} or newer")
    return version


def dotted(version: VllmVersion) -> str:
    """Return a version as a string such as "0.30.1"."""
    return ".".join(str(part) for part in version)


def start_flags(version: VllmVersion = NEWEST) -> list[str]:
    """Return the start flags that atts recommends for a vLLM server of this version.

    >>> start_flags((0, 29))[-1], start_flags((0, 30))[-1]
    ('--enable-prompt-tokens-details', '--enable-scale-out')
    """
    flags = [each.flag for each in FEATURES if each.flag and _has(version, each)]
    return list(dict.fromkeys(flags))


def lacking(version: VllmVersion) -> list[str]:
    """Describe each feature that a vLLM server of this version lacks, and the effect on a run, in
    one line per feature.
    """
    lines = list[str]()
    for feature in FEATURES:
        if not _has(version, feature):
            lines.append(
                f"since vLLM {dotted(feature.since)}, {feature.does}; with your version, "
                f"{feature.without}"
            )
    return lines


def compatibility_table() -> list[str]:
    """Return a Markdown table of all features, oldest first, as a list of lines."""
    lines = ["| since vLLM | flag | feature | older versions |", "|---|---|---|---|"]
    for feature in FEATURES:
        flag = f"`{feature.flag}`" if feature.flag else ""
        lines.append(f"| {dotted(feature.since)} | {flag} | {feature.does} | {feature.without} |")
    return lines


def _has(version: VllmVersion, feature: VllmFeature) -> bool:
    return version >= feature.since[: len(version)]
