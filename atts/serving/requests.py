"""Requests of the endpoint, parsed from JSON bodies whose fields are all checked.

The model name in a request selects one of the named policies defined at the beginning of this
module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, cast

from atts.api import Setup
from atts.core import Role
from atts.errors import OptionError
from atts.ledger import Caps

EarlyStop = Literal["none", "certain", "likely"]


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A named set of settings that clients select by a model name or a reasoning effort."""

    name: str
    method: str
    samples: int
    rate: float
    early_stop: EarlyStop
    # values of OpenAI's field `reasoning_effort` that choose this policy
    efforts: tuple[str, ...] = ()
    # whether one model writes a single rollout, whose whole text is the reply
    is_plain: bool = False

    def applied(self, setup: Setup) -> Setup:
        """Return a copy of the setup with this policy's settings."""
        policy = replace(setup.policy, samples=self.samples, early_stop=self.early_stop)
        return replace(setup, method=self.method, rate=self.rate, policy=policy)


def _by_name(*rows: NamedPolicy) -> Mapping[str, NamedPolicy]:
    return MappingProxyType({row.name: row for row in rows})


POLICIES = _by_name(
    NamedPolicy("fast", "atts", 2, 0.1, "likely", ("none", "minimal", "low")),
    NamedPolicy("balanced", "atts", 4, 0.2, "likely", ("medium",)),
    NamedPolicy("careful", "atts", 8, 0.3, "certain", ("high", "xhigh")),
    NamedPolicy("exact", "exact", 1, 0.0, "none"),
)
"""The policies that requests can select on a server with a draft and a target."""
VOTES = _by_name(
    NamedPolicy("fast", "draft-only", 2, 0.0, "likely", ("none", "minimal", "low")),
    NamedPolicy("balanced", "draft-only", 4, 0.0, "likely", ("medium",)),
    NamedPolicy("careful", "draft-only", 8, 0.0, "certain", ("high", "xhigh")),
)
"""The policies that requests can select on a server with only one model. The model's rollouts vote,
and no chunk is escalated.
"""
DEFAULT = "balanced"
METHODS = ("atts", "cascade", "coin", "draft-only", "target-only", "exact")
"""The methods that requests can select on a server with a draft and a target. All other methods
would need a calibration run before the first request.
"""
PLAIN: Mapping[str, NamedPolicy] = MappingProxyType(
    {
        "draft": NamedPolicy("draft", "draft-only", 1, 0.0, "none", is_plain=True),
        "target": NamedPolicy("target", "target-only", 1, 0.0, "none", is_plain=True),
    }
)
HOUSEKEEPING = replace(PLAIN["draft"], name="housekeeping")
"""The policy for requests that a chat program sends by itself, for example to create a title for
the chat.
"""


@dataclass(frozen=True, slots=True)
class Offer:
    """The model names that a server accepts, and the policy that each name selects."""

    name: str
    policies: Mapping[str, NamedPolicy] = field(default_factory=lambda: POLICIES)
    # Policies with a single rollout of the draft or the target alone, keyed by the model name that
    # chooses them.
    plain: Mapping[str, NamedPolicy] = field(default_factory=dict[str, NamedPolicy])
    methods: Sequence[str] = METHODS

    @property
    def names(self) -> list[str]:
        """Return all model names. The first one selects the default policy."""
        return [self.name, *(f"{self.name}:{policy}" for policy in self.policies), *self.plain]

    @property
    def efforts(self) -> dict[str, NamedPolicy]:
        """Return the policies, keyed by the reasoning effort that selects them."""
        return {effort: row for row in self.policies.values() for effort in row.efforts}

    def policy_of(self, model: str) -> NamedPolicy | None:
        """Return the policy that a model name selects. Return None for the name that leaves the
        choice to the request's reasoning effort.

        :raises KeyError: the server does not serve this name.
        """
        if model == self.name:
            return None
        if model in self.plain:
            return self.plain[model]
        name, _, policy = model.rpartition(":")
        if name != self.name:
            raise KeyError(model)
        return self.policies[policy]


def offer_of(name: str, models: Mapping[Role, str]) -> Offer:
    """Return the model names and policies for a server with a pair of models or with one model.

    >>> offer_of("atts/p", {"draft": "small", "target": "large"}).names[-4:]
    ['draft', 'target', 'small', 'large']
    >>> offer_of("atts/m", {"draft": "small"}).names
    ['atts/m', 'atts/m:fast', 'atts/m:balanced', 'atts/m:careful', 'small']
    """
    if len(models) == 1:
        ((role, model),) = models.items()
        rows = {key: replace(row, method=f"{role}-only") for key, row in VOTES.items()}
        return Offer(name, rows, {model: PLAIN[role]}, (f"{role}-only",))
    plain = dict(PLAIN)
    if len(set(models.values())) == len(models):
        plain |= {model: PLAIN[role] for role, model in models.items()}
    return Offer(name, POLICIES, plain)


class RequestError(Exception):
    """Error for a rejected request. Its body has the format of OpenAI's API errors."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class AttsFields:
    """The field `atts` of a request's body: settings of atts that apply to this request."""

    rate: float | None = None
    samples: int | None = None
    method: str | None = None
    early_stop: str | None = None
    combine: str = "vote"
    max_target_tokens: int | None = None
    max_total_tokens: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None
    max_cost: float | None = None
    thinking_token_budget: int | None = None
    on_limit: str = "best"
    trace: str = "none"
    seed: int | None = None


Dialect = Literal["chat", "responses"]


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """A checked request: the conversation, the policy and the caps."""

    model: str
    policy: NamedPolicy
    # role and text of each message of the conversation, without reasoning
    turns: tuple[tuple[str, str], ...]
    stream: bool = False
    stream_usage: bool = False
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    # strings that end the reply: its content is cut before the first of them
    stop: tuple[str, ...] = ()
    seed: int | None = None
    user: str = ""
    atts: AttsFields = field(default_factory=AttsFields)
    caps: Caps = field(default_factory=Caps)
    ignored: tuple[str, ...] = ()

    @property
    def settings(self) -> Hashable:
        """Return all settings that a request's plan depends on, as a cache key. Only requests
        without a seed may share a plan.
        """
        atts = self.atts
        sampling = (self.temperature, self.top_p, self.max_tokens, atts.thinking_token_budget)
        stop = self.stop if self.policy.is_plain else ()
        return self.policy, sampling, stop, atts.samples, atts.early_stop, atts.rate, atts.combine

    def setup(self, base: Setup) -> Setup:
        """Return a copy of the server's setup with this request's settings applied.

        :raises RequestError: a setting is impossible.
        """
        try:
            setup = self.policy.applied(base)
            policy = setup.policy
            sampling = policy.sampling
            if self.temperature is not None:
                sampling = replace(sampling, temperature=self.temperature)
            if self.top_p is not None:
                sampling = replace(sampling, top_p=self.top_p)
            changes: dict[str, Any] = {"sampling": sampling}
            longest = policy.bounds(setup.budget).max_tokens
            if self.max_tokens is not None:
                longest = self.max_tokens
                changes["max_tokens"] = longest
                changes["thinking_tokens"] = _within(policy.thinking_tokens, longest)
            if self.atts.thinking_token_budget is not None:
                changes["thinking_tokens"] = _within(self.atts.thinking_token_budget, longest)
            if self.atts.samples is not None:
                changes["samples"] = self.atts.samples
            if self.atts.early_stop is not None:
                changes["early_stop"] = self.atts.early_stop
            if self.atts.combine != "vote":
                changes["combine"] = self.atts.combine
            if self.policy.is_plain:
                # If one model answers alone, the client gets its text unchanged. So atts adds no
                # prompt of its own, and does not end the text when it repeats itself.
                changes |= {"system": "", "instruction": "", "repeats": 1_000_000}
                changes |= {"budget_forcing": 0, "turns": longest}
                if self.stop:
                    # Some servers accept only few stop strings. atts looks for the other stop
                    # strings itself after each chunk.
                    stop = (*self.stop, *policy.bounds(setup.budget).stop)[:_MOST_SENT_STOPS]
                    changes["chunking"] = replace(policy.chunking, stop=stop)
            setup = replace(setup, policy=replace(policy, **changes))
            if self.atts.rate is not None:
                setup = replace(setup, rate=self.atts.rate)
            if self.seed is not None:
                setup = replace(setup, seed=self.seed)
        except OptionError as error:
            raise RequestError(str(error), param=error.option) from error
        return setup


def _within(thinking_tokens: int | None, max_tokens: int) -> int | None:
    """Return the thinking budget, or None if it is not below the rollout's token limit."""
    if thinking_tokens is None or thinking_tokens >= max_tokens:
        return None
    return thinking_tokens


_Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    if isinstance(value, list):
        texts: list[Any] = value
        return all(isinstance(text, str) for text in texts)
    return isinstance(value, str)


_KINDS: Mapping[str, tuple[str, _Check]] = {
    "number": ("a number", _is_number),
    "whole": ("a whole number", _is_whole),
    "text": ("a string", lambda value: isinstance(value, str)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "texts": ("a string or a list of strings", _is_texts),
}
KINDS_OF_CHAT = {
    "model": "text",
    "messages": "list",
    "stream": "flag",
    "stream_options": "object",
    "temperature": "number",
    "top_p": "number",
    "max_tokens": "whole",
    "max_completion_tokens": "whole",
    "stop": "texts",
    "seed": "whole",
    "reasoning_effort": "text",
    "n": "whole",
    "user": "text",
    "safety_identifier": "text",
    "atts": "object",
}
_ATTS = {
    "rate": "number",
    "samples": "whole",
    "method": "text",
    "early_stop": "text",
    "combine": "text",
    "max_target_tokens": "whole",
    "max_total_tokens": "whole",
    "max_calls": "whole",
    "max_seconds": "number",
    "max_cost": "number",
    "thinking_token_budget": "whole",
    "on_limit": "text",
    "trace": "text",
    "seed": "whole",
}
_UNSUPPORTED_IN_CHAT = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "logprobs",
    "top_logprobs",
    "response_format",
    "audio",
    "modalities",
    "prediction",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
)
"""Fields of OpenAI's API that atts cannot support. Requests with one of them are rejected instead
of ignoring the field, because clients may rely on its effect.
"""
_EMPTY: tuple[object, ...] = (None, [], {}, False, 0)
_MOST_SAMPLES = 64
_MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_SENT_STOPS = 4
"""Maximum number of stop strings sent to an engine, because some servers reject more."""
_MOST_SEED = 1 << 63


def parse_chat(
    body: Any,
    headers: Mapping[str, str],
    offer: Offer,
    ceiling: Caps,
    *,
    housekeeping: bool = True,
) -> SolveRequest:
    """Convert the parsed JSON body of a chat completion request to a `SolveRequest`.

    If `housekeeping` is true, a request that a chat program sends by itself is answered by a single
    rollout of the draft.

    :raises RequestError: if the server does not support something that the body requests.
    """
    given = checked(body, KINDS_OF_CHAT, _UNSUPPORTED_IN_CHAT, needed=("model", "messages"))
    if given.get("n", 1) != 1:
        raise RequestError(
            "n must be 1; to start more than one rollout, set atts.samples", param="n"
        )
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given and given[name] < 1:
            raise RequestError(f"{name} is {given[name]}, expected at least 1", param=name)
    request = build_request(
        given,
        headers,
        offer,
        ceiling,
        turns=turns_of(given["messages"]),
        effort=given.get("reasoning_effort"),
        max_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
        ignored=given.keys() - KINDS_OF_CHAT.keys() - set(_UNSUPPORTED_IN_CHAT),
    )
    request = replace(
        request,
        stop=_stop_strings(given.get("stop", [])),
        stream_usage=bool(given.get("stream_options", {}).get("include_usage")),
    )
    role, text = request.turns[-1]
    is_task = role == "user" and _is_task(text)
    has_settings = any(getattr(request.atts, name) is not None for name in _OF_POLICIES)
    if housekeeping and is_task and not has_settings and not request.policy.is_plain:
        return replace(request, policy=replace(HOUSEKEEPING, method=_alone(offer)))
    return request


def _stop_strings(given: str | list[str]) -> tuple[str, ...]:
    """Return the stop strings of a request without duplicates.

    :raises RequestError: a stop string is empty or too long, or there are too many.
    """
    texts = tuple(dict.fromkeys([given] if isinstance(given, str) else given))
    if "" in texts:
        raise RequestError(
            "stop contains an empty string, which would end every reply immediately",
            param="stop",
        )
    if len(texts) > _MOST_STOPS:
        raise RequestError(
            f"stop has {len(texts)} strings, expected at most {_MOST_STOPS}", param="stop"
        )
    if any(len(text) > _LONGEST_STOP for text in texts):
        raise RequestError(
            f"stop has a string of more than {_LONGEST_STOP} characters", param="stop"
        )
    return texts


_TASK = "### Task:"
_CHAT_HISTORY = "<chat_history>"
_DOCUMENTS = "<context>"


def _is_task(text: str) -> bool:
    """Return whether a chat program (Open WebUI) sent this message by itself, to get a title, tags
    or follow-up questions.

    Such a message begins with a task about the chat and then quotes the chat. A user's question
    about documents also begins with a task, but quotes the documents before the chat.

    >>> _is_task("### Task:\\nWrite a title.\\n<chat_history>\\nUSER: hello\\n</chat_history>")
    True
    >>> _is_task("### Task:\\nAnswer from the context.\\n<context>\\n...\\n</context>\\nWho pays?")
    False
    """
    before, quote, _ = text.partition(_CHAT_HISTORY)
    return bool(quote) and before.lstrip().startswith(_TASK) and _DOCUMENTS not in before


def _alone(offer: Offer) -> str:
    """Return the method in which only one model answers: `draft-only` if the server has it, or else
    the server's first method.
    """
    return "draft-only" if "draft-only" in offer.methods else offer.methods[0]


def checked(
    body: Any,
    kinds: Mapping[str, str],
    unsupported: Sequence[str],
    *,
    needed: Sequence[str],
) -> dict[str, Any]:
    """Check the fields of a request's body, and return those that are not null.

    :raises RequestError: a field is missing, has a wrong type, or is not supported.
    """
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    given = cast(dict[str, Any], {name: value for name, value in body.items() if value is not None})
    for name in unsupported:
        if given.get(name) not in _EMPTY:
            raise RequestError(f"{name} is not supported; leave it out", param=name)
    _check_kinds(given, kinds, "")
    for name in needed:
        if name not in given:
            raise RequestError(f"{name} is missing", param=name)
    return given


def build_request(
    given: Mapping[str, Any],
    headers: Mapping[str, str],
    offer: Offer,
    ceiling: Caps,
    *,
    turns: tuple[tuple[str, str], ...],
    effort: str | None,
    max_tokens: int | None,
    ignored: Iterable[str],
) -> SolveRequest:
    """Build a request from the fields that chat completions and the Responses API have in common.

    :raises RequestError: if the server does not support something that the fields request.
    """
    extra = given.get("atts", {})
    for name in extra:
        if name not in _ATTS:
            near = get_close_matches(name, _ATTS, n=1)
            hint = f"; did you mean atts.{near[0]}?" if near else f"; known: {', '.join(_ATTS)}"
            raise RequestError(f"atts.{name} is unknown{hint}", param=f"atts.{name}")
    extra = {name: value for name, value in extra.items() if value is not None}
    _check_kinds(extra, _ATTS, "atts.")
    atts = _with_headers(AttsFields(**extra), headers)
    _check_ranges(given, atts)
    policy = _policy_of(given["model"], effort, offer)
    if policy.is_plain:
        _check_plain(given["model"], extra, turns)
    elif atts.method is not None:
        policy = _with_method(policy, atts.method, offer)
    left_out = {"reasoning_effort"} if policy.is_plain and effort is not None else set[str]()
    return SolveRequest(
        given["model"],
        policy,
        turns,
        stream=given.get("stream", False),
        temperature=given.get("temperature"),
        top_p=given.get("top_p"),
        max_tokens=max_tokens,
        seed=given.get("seed", atts.seed),
        user=given.get("safety_identifier", given.get("user", "")),
        atts=atts,
        caps=_caps(atts, ceiling),
        ignored=tuple(sorted({*ignored} | left_out)),
    )


def _check_kinds(given: Mapping[str, Any], kinds: Mapping[str, str], prefix: str) -> None:
    for name, value in given.items():
        words, check = _KINDS[kinds[name]] if name in kinds else ("", lambda _: True)
        if not check(value):
            raise RequestError(f"{prefix}{name} is not {words}", param=f"{prefix}{name}")


_COMBINE = ("vote", "select", "synthesize")
"""The values that `atts.combine` can have in a request. "auto" is missing because it compares the
values on many problems, and a request has only one.
"""
_TRACES = ("none", "summary", "full")


def _check_ranges(given: Mapping[str, Any], atts: AttsFields) -> None:
    if atts.on_limit not in ("best", "error"):
        raise RequestError("atts.on_limit must be best or error", param="atts.on_limit")
    if atts.combine not in _COMBINE:
        raise RequestError(
            f"atts.combine {atts.combine!r} is not supported; use vote, select or synthesize",
            param="atts.combine",
        )
    if atts.trace not in _TRACES:
        raise RequestError("atts.trace must be none, summary or full", param="atts.trace")
    if atts.samples is not None and not 1 <= atts.samples <= _MOST_SAMPLES:
        raise RequestError(
            f"atts.samples is {atts.samples}, expected 1 to {_MOST_SAMPLES}", param="atts.samples"
        )
    if atts.thinking_token_budget is not None and atts.thinking_token_budget < 1:
        raise RequestError(
            f"atts.thinking_token_budget is {atts.thinking_token_budget}, expected at least 1",
            param="atts.thinking_token_budget",
        )
    for name, seed in (("seed", given.get("seed")), ("atts.seed", atts.seed)):
        if seed is not None and not 0 <= seed < _MOST_SEED:
            raise RequestError(
                f"{name} is {seed}, expected a value from 0 to {_MOST_SEED - 1}", param=name
            )


_OF_POLICIES = ("rate", "samples", "method", "early_stop")


def _check_plain(model: str, extra: Mapping[str, Any], turns: tuple[tuple[str, str], ...]) -> None:
    """Check that a request to a single model has no settings that apply only to votes."""
    for name in _OF_POLICIES:
        if name in extra:
            raise RequestError(
                f"atts.{name} does not apply to {model!r}, which is a single model with one rollout",
                param=f"atts.{name}",
            )
    if extra.get("combine", "vote") != "vote":
        raise RequestError(
            f"atts.combine does not apply to {model!r}, which is a single model with one rollout",
            param="atts.combine",
        )
    if turns[-1][0] != "user":
        raise RequestError("the last message must be a user message", param="messages")


def _with_method(policy: NamedPolicy, method: str, offer: Offer) -> NamedPolicy:
    if method not in offer.methods:
        near = get_close_matches(method, offer.methods, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(offer.methods)}"
        raise RequestError(f"atts.method {method!r} is unknown; {hint}", param="atts.method")
    return replace(policy, method=method)


def _with_headers(atts: AttsFields, headers: Mapping[str, str]) -> AttsFields:
    """Add the caps in a request's headers to its `atts` fields.

    The headers exist because some clients cannot add fields to the body. If a cap is set in both,
    the field counts.
    """
    for header, name in (("x-atts-max-seconds", "max_seconds"), ("x-atts-max-cost", "max_cost")):
        text = headers.get(header)
        if text is None or getattr(atts, name) is not None:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise RequestError(f"the header {header} is not a number", param=header)
        changes: dict[str, Any] = {name: value}
        atts = replace(atts, **changes)
    return atts


def _caps(atts: AttsFields, ceiling: Caps) -> Caps:
    """Return the caps of a request. Each is at most the server's cap per request, which also
    applies if the request sets none.
    """
    given = {one.name: getattr(atts, one.name) for one in fields(Caps)}
    try:
        asked = Caps(**given)
    except OptionError as error:
        raise RequestError(f"atts.{error}", param=f"atts.{error.option}") from error
    if not ceiling:
        return asked
    lower: dict[str, Any] = {}
    for name in given:
        limits = [one for one in (getattr(asked, name), getattr(ceiling, name)) if one is not None]
        lower[name] = min(limits, default=None)
    return Caps(**lower)


def _policy_of(model: str, effort: str | None, offer: Offer) -> NamedPolicy:
    efforts = offer.efforts
    if effort is not None and effort not in efforts:
        raise RequestError(
            f"reasoning_effort {effort!r} is unknown; known: {', '.join(efforts)}",
            param="reasoning_effort",
        )
    try:
        policy = offer.policy_of(model)
    except KeyError:
        near = get_close_matches(model, offer.names, n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(offer.names)}"
        raise RequestError(
            f"the model {model!r} is not served{hint}",
            status=404,
            param="model",
            code="model_not_found",
        ) from None
    if policy is not None:
        return policy
    return offer.policies[DEFAULT] if effort is None else efforts[effort]


def turns_of(messages: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return the role and the text of each message."""
    turns: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} is not an object", param=where)
        one = cast(dict[str, Any], message)
        role = one.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise RequestError(f"{where}.role {role!r} is not supported", param=f"{where}.role")
        text = text_of(one.get("content"), f"{where}.content")
        turns.append(("system" if role == "developer" else role, text))
    if not any(role == "user" and text.strip() for role, text in turns):
        raise RequestError(
            "the messages must contain a user message that is not empty", param="messages"
        )
    return tuple(turns)


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content, which is a string or a list of text parts.

    :raises RequestError: a part of the content is not text.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            kind = cast(dict[str, Any], part).get("type") if isinstance(part, dict) else None
            text = cast(dict[str, Any], part).get("text") if isinstance(part, dict) else None
            if kind not in kinds or not isinstance(text, str):
                raise RequestError(f"{where} has a part that is not text", param=where)
            texts.append(text)
        return "".join(texts)
    raise RequestError(f"{where} is neither a string nor a list of text parts", param=where)
