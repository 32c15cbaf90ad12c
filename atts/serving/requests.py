"""Requests of the endpoint: the body of a chat completion, checked key by key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, cast

from atts.api import Setup
from atts.errors import OptionError
from atts.ledger import Caps
from atts.serving.policies import BY_EFFORT, DEFAULT, POLICIES


class RequestError(Exception):
    """A request that is refused; becomes an error body as OpenAI's API has it."""

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
    """The object `atts` of a request's body: settings of one request."""

    rate: float | None = None
    samples: int | None = None
    early_stop: str | None = None
    max_target_tokens: int | None = None
    max_total_tokens: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None
    max_cost: float | None = None
    on_limit: str = "best"
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion that was checked: what is asked, under which policy, within which caps."""

    model: str
    policy: str
    turns: tuple[tuple[str, str], ...]  # role and text, reasoning left out
    stream: bool = False
    stream_usage: bool = False
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    atts: AttsFields = field(default_factory=AttsFields)
    caps: Caps = field(default_factory=Caps)
    ignored: tuple[str, ...] = ()

    def setup(self, base: Setup) -> Setup:
        """Return the setup of this request.

        :raises RequestError: a setting is impossible.
        """
        try:
            setup = POLICIES[self.policy].applied(base)
            policy = setup.policy
            sampling = policy.sampling
            if self.temperature is not None:
                sampling = replace(sampling, temperature=self.temperature)
            if self.top_p is not None:
                sampling = replace(sampling, top_p=self.top_p)
            changes: dict[str, Any] = {"sampling": sampling}
            if self.max_tokens is not None:
                changes["max_tokens"] = self.max_tokens
            if self.atts.samples is not None:
                changes["samples"] = self.atts.samples
            if self.atts.early_stop is not None:
                changes["early_stop"] = self.atts.early_stop
            setup = replace(setup, policy=replace(policy, **changes))
            if self.atts.rate is not None:
                setup = replace(setup, rate=self.atts.rate)
            if self.seed is not None:
                setup = replace(setup, seed=self.seed)
        except OptionError as error:
            raise RequestError(str(error), param=error.option) from error
        return setup


_Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_KINDS: Mapping[str, tuple[str, _Check]] = {
    "number": ("a number", _is_number),
    "whole": ("a whole number", _is_whole),
    "text": ("a text", lambda value: isinstance(value, str)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "list": ("a list", lambda value: isinstance(value, list)),
}
_STANDARD = {
    "model": "text",
    "messages": "list",
    "stream": "flag",
    "stream_options": "object",
    "temperature": "number",
    "top_p": "number",
    "max_tokens": "whole",
    "max_completion_tokens": "whole",
    "seed": "whole",
    "reasoning_effort": "text",
    "n": "whole",
    "atts": "object",
}
_ATTS = {
    "rate": "number",
    "samples": "whole",
    "early_stop": "text",
    "max_target_tokens": "whole",
    "max_total_tokens": "whole",
    "max_calls": "whole",
    "max_seconds": "number",
    "max_cost": "number",
    "on_limit": "text",
    "seed": "whole",
}
_UNSUPPORTED = (
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
    "stop",
    "frequency_penalty",
    "presence_penalty",
)
"""Standard fields whose absence from the reply would mislead the client."""
_EMPTY: tuple[object, ...] = (None, [], {}, False, 0)
_MOST_SAMPLES = 64
_MOST_SEED = 1 << 63


def parse_chat(body: Any, headers: Mapping[str, str], pair: str, ceiling: Caps) -> ChatRequest:
    """Return the request of a parsed JSON body.

    :raises RequestError: anything in it that would not be done as asked.
    """
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    given = cast(dict[str, Any], {name: value for name, value in body.items() if value is not None})
    for name in _UNSUPPORTED:
        if given.get(name) not in _EMPTY:
            raise RequestError(f"{name} is not supported; leave it out", param=name)
    _check_kinds(given, _STANDARD, "")
    for name in ("model", "messages"):
        if name not in given:
            raise RequestError(f"{name} is missing", param=name)
    if given.get("n", 1) != 1:
        raise RequestError("n above 1 is not supported; atts.samples sets the votes", param="n")
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
    seed = given.get("seed", atts.seed)
    return ChatRequest(
        given["model"],
        _policy_of(given["model"], given.get("reasoning_effort"), pair),
        _turns(given["messages"]),
        stream=given.get("stream", False),
        stream_usage=bool(given.get("stream_options", {}).get("include_usage")),
        temperature=given.get("temperature"),
        top_p=given.get("top_p"),
        max_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
        seed=seed,
        atts=atts,
        caps=_caps(atts, ceiling),
        ignored=tuple(sorted(given.keys() - _STANDARD.keys() - set(_UNSUPPORTED))),
    )


def _check_kinds(given: Mapping[str, Any], kinds: Mapping[str, str], prefix: str) -> None:
    for name, value in given.items():
        words, check = _KINDS[kinds[name]] if name in kinds else ("", lambda _: True)
        if not check(value):
            raise RequestError(f"{prefix}{name} is not {words}", param=f"{prefix}{name}")


def _check_ranges(given: Mapping[str, Any], atts: AttsFields) -> None:
    if atts.on_limit not in ("best", "error"):
        raise RequestError("atts.on_limit is best or error", param="atts.on_limit")
    if atts.samples is not None and not 1 <= atts.samples <= _MOST_SAMPLES:
        raise RequestError(
            f"atts.samples is {atts.samples}, expected 1 to {_MOST_SAMPLES}", param="atts.samples"
        )
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given and given[name] < 1:
            raise RequestError(f"{name} is {given[name]}, expected at least 1", param=name)
    for name, seed in (("seed", given.get("seed")), ("atts.seed", atts.seed)):
        if seed is not None and not 0 <= seed < _MOST_SEED:
            raise RequestError(f"{name} is {seed}, expected 0 to {_MOST_SEED - 1}", param=name)


def _with_headers(atts: AttsFields, headers: Mapping[str, str]) -> AttsFields:
    """Return the fields with the caps of headers, for clients that cannot extend the body."""
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
    """Return the caps of a request: its own, and never above those of the server."""
    given = {one.name: getattr(atts, one.name) for one in fields(Caps)}
    try:
        asked = Caps(**given)
    except OptionError as error:
        raise RequestError(f"atts.{error}", param=f"atts.{error.option}") from error
    lower: dict[str, Any] = {}
    for name in given:
        limits = [one for one in (getattr(asked, name), getattr(ceiling, name)) if one is not None]
        lower[name] = min(limits, default=None)
    return Caps(**lower)


def _policy_of(model: str, effort: str | None, pair: str) -> str:
    if effort is not None and effort not in BY_EFFORT:
        raise RequestError(
            f"reasoning_effort {effort!r} is unknown; known: {', '.join(BY_EFFORT)}",
            param="reasoning_effort",
        )
    name, _, policy = model.rpartition(":") if model != pair else (model, "", "")
    if name == pair and policy in POLICIES:
        return policy
    if model != pair:
        known = [pair, *(f"{pair}:{row}" for row in POLICIES)]
        near = get_close_matches(model, known, n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
        raise RequestError(
            f"the model {model!r} is not served{hint}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return DEFAULT if effort is None else BY_EFFORT[effort]


def _turns(messages: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return role and text of each message; the reasoning of earlier replies is dropped."""
    turns: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} is not an object", param=where)
        one = cast(dict[str, Any], message)
        role = one.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise RequestError(f"{where}.role {role!r} is not supported", param=f"{where}.role")
        text = _text(one.get("content"), f"{where}.content")
        turns.append(("system" if role == "developer" else role, text))
    if not any(role == "user" and text.strip() for role, text in turns):
        raise RequestError("messages hold no question of the user", param="messages")
    return tuple(turns)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            kind = cast(dict[str, Any], part).get("type") if isinstance(part, dict) else None
            text = cast(dict[str, Any], part).get("text") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(text, str):
                raise RequestError(f"{where} has a part that is not text", param=where)
            texts.append(text)
        return "".join(texts)
    raise RequestError(f"{where} is not a text", param=where)
