"""Settings of a dialect server: faults on demand, and the quirks of real ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from atts.errors import OptionError

ServerDialect = Literal["vllm", "sglang", "llamacpp", "ollama", "chat"]
ServerFault = Literal["refused", "reset", "429", "500", "truncated", "wrong_ids", "nan", "slow_loris", "hang"]
"""refused: closed unread. reset: broken off in mid-reply. truncated: half the JSON. slow_loris: a byte now and then."""


@dataclass(frozen=True, slots=True)
class ServerFaults:
    """What share of the calls that do work fails, and how; drawn anew for every call, from a seed.

    :raises OptionError: an unknown kind, or shares that sum to more than 1.
    """

    shares: Mapping[ServerFault, float] = field(default_factory=dict[ServerFault, float])
    seed: int = 0
    retry_after: str = "0"  # said with a 429

    def __post_init__(self) -> None:
        for kind in self.shares:
            if kind not in get_args(ServerFault):
                raise OptionError("faults", f"{kind!r} is unknown", get_args(ServerFault))
        if sum(self.shares.values()) > 1 + 1e-9:
            raise OptionError("faults", f"shares {dict(self.shares)} sum to more than 1")


@dataclass(frozen=True, slots=True)
class ServerQuirks:
    """Settings of a server that change what a client sees.

    `cached_scores` opens vLLM's route that scores from the cache (--enable-scale-out). `logprobs` "processed" gives
    sampled log-probs after temperature: SGLang's default, vLLM's --logprobs-mode. `disconnect` "ignore" leaves ghosts
    running when a client goes away, as some releases did. `scoring` "ignored" takes a scoring request and answers
    without scores, as llama.cpp and `transformers serve` do. `version` is what it says it is; "" its dialect's.
    `prefill` is when a chat API goes on with a last assistant message: told by vLLM's two flags, by a mark on the
    message, always, or never (it becomes a user's); "closed" and "prefix" also refuse fields that hosted models do not
    know. `ratings` "off": it tells no likely tokens.
    """

    cached_scores: Literal["on", "off"] = "on"
    logprobs: Literal["raw", "processed", ""] = ""
    disconnect: Literal["abort", "ignore"] = "abort"
    scoring: Literal["honest", "ignored"] = "honest"
    version: str = ""
    prefill: Literal["continue", "prefix", "trailing", "closed"] = "continue"
    ratings: Literal["on", "off"] = "on"


NO_SERVER_FAULTS = ServerFaults()
PLAIN_SERVER = ServerQuirks()
