"""Everything a policy can choose, in one frozen value: a baseline is a row of settings, not another loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

from atts.core import Role, Rollout, Sampling
from atts.errors import OptionError
from atts.pipelines.scores import ScoreRule
from atts.pipelines.votes import VoteKind

Takeover = Literal["continue", "replace", "repair", "resample", "retry", "fork"]
Stop = Literal["none", "certain", "likely"]
AnswerCheck = Literal["stop", "verify"]
Verification = Literal["score", "rating"]
Later = Literal["same", "target"]


@dataclass(frozen=True, slots=True)
class Chunking:
    """How long one piece may be and what ends it early; no stop strings means fixed-length pieces."""

    draft_tokens: int = 128
    target_tokens: int = 128
    stop: tuple[str, ...] = ("\n\n",)


@dataclass(frozen=True, slots=True)
class ConfidenceStop:
    """DeepConf's online rule: the first `warmup` rollouts run whole; later ones end when they are less sure.

    Sureness is the lowest mean log-probability over `window` consecutive tokens; the bar is the `1 - keep` quantile of
    the warm-up's. A percentile of a handful of rollouts, no more: it promises nothing.
    """

    warmup: int = 16
    keep: float = 0.9
    window: int = 64

    def __post_init__(self) -> None:
        if self.warmup < 1 or self.window < 1 or not 0 < self.keep <= 1:
            raise OptionError("confidence_stop", f"{self}: expected warmup, window >= 1 and keep in (0, 1]")

    def sureness(self, rollout: Rollout) -> float:
        """The lowest window mean of the rollout's own log-probabilities; inf while it is shorter than a window."""
        values = [value for turn in rollout.turns for chunk in turn.chunks for value in chunk.logprobs]
        sums = [0.0, *accumulate(values)]
        means = [(sums[i + self.window] - sums[i]) / self.window for i in range(len(values) - self.window + 1)]
        return min(means, default=math.inf)

    def is_below(self, rollout: Rollout, warmup: Sequence[Rollout]) -> bool:
        """Whether the rollout is less sure than all but `1 - keep` of the warm-up; without warm-up, never."""
        bars = sorted(self.sureness(line) for line in warmup)
        return bool(bars) and self.sureness(rollout) < bars[min(len(bars) - 1, int((1 - self.keep) * len(bars)))]


@dataclass(frozen=True, slots=True)
class Policy:
    """How tokens are spent on one problem.

    `samples` rollouts (parallel axis), each of at most `turns` rounds and `max_tokens` tokens (sequential axis).
    The default is ATTS as this project recommends it; `atts.pipelines.presets` holds the baselines.
    """

    samples: int = 8
    turns: int = 15
    max_tokens: int = 2048
    chunking: Chunking = Chunking()
    drafter: Role = "draft"  # who writes; "target" makes it target-only
    verification: Verification = "score"
    takeover: Takeover = "replace"
    attempts: int = 3  # draft attempts per turn when resampling or retrying, the first included
    answers: AnswerCheck = "verify"  # a complete answer ends the rollout after its chunk passed the gate, or at once
    waits: int = 0  # budget forcing: how often an answer is met with `wait_text` instead of an end
    wait_text: str = "Wait"
    optimistic: bool = False  # draft the next chunk while this one is scored; the law is unchanged
    sampling: Sampling = Sampling(temperature=0.7)
    target_sampling: Sampling | None = None  # None: as `sampling`
    score: ScoreRule = ScoreRule()
    vote: VoteKind = "majority"
    early_stop: Stop = "certain"
    confidence: float = 0.95  # for early_stop "likely"
    first_wave: int = 0  # rollouts asked first; more only start when these do not agree; 0: all at once
    growth: float = math.inf  # how much larger all waves together are with the next one; inf: the rest at once
    agreement: float = 1.0  # the share of all so far that makes the rest unnecessary
    later: Later = "same"  # who writes in later waves: where the first disagree, the target may be worth its price
    barrier: bool = False  # synchronous rounds: every turn waits for all siblings
    system: str = "Solve the problem step by step. Put the final answer in \\boxed{}."
    confidence_stop: ConfidenceStop | None = None
    rating_text: str = "\n\nI think the quality score is: "  # before the digit, for verification "rating"
    timeout_seconds: float = 600.0  # of one engine call, its queue at the engine included
    repeats: int = 3  # the same chunk this often in a row ends the rollout

    def __post_init__(self) -> None:
        for name, floor in (("samples", 1), ("turns", 1), ("max_tokens", 1), ("attempts", 1), ("repeats", 2)):
            if getattr(self, name) < floor:
                raise OptionError(name, f"{getattr(self, name)} is below {floor}")
        for name, floor in (("waits", 0), ("first_wave", 0)):
            if getattr(self, name) < floor:
                raise OptionError(name, f"{getattr(self, name)} is below {floor}")
        if min(self.chunking.draft_tokens, self.chunking.target_tokens) < 1:
            raise OptionError("chunk tokens", "a chunk must be allowed at least 1 token")
        for name, kinds in _CHOICES.items():
            if getattr(self, name) not in kinds:
                raise OptionError(name, f"unknown value {getattr(self, name)!r}", kinds, getattr(self, name))
        if not self.timeout_seconds > 0:
            raise OptionError("timeout_seconds", f"{self.timeout_seconds} leaves no time")
        if not self.growth > 1:
            raise OptionError("growth", f"{self.growth} would never come to the next wave; give more than 1")
        for name in ("confidence", "agreement"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(name, f"{getattr(self, name)} is outside (0, 1]")

    @property
    def waves(self) -> tuple[range, ...]:
        """The samples of each wave.

        >>> Policy(samples=16, first_wave=3, growth=2.0).waves
        (range(0, 3), range(3, 6), range(6, 12), range(12, 16))
        """
        ends = [min(self.first_wave or self.samples, self.samples)]
        while ends[-1] < self.samples:
            ends.append(
                self.samples if math.isinf(self.growth) else min(self.samples, math.ceil(ends[-1] * self.growth))
            )
        return tuple(range(begin, end) for begin, end in zip([0, *ends], ends, strict=False))

    def of(self, sample: int) -> Policy:
        """The policy of one rollout: later waves may have another writer."""
        return replace(self, drafter="target") if self.later == "target" and sample >= self.waves[0].stop else self

    def law(self, role: Role) -> Sampling:
        """How that model's tokens are drawn."""
        return self.target_sampling or self.sampling if role == "target" else self.sampling

    def limit(self, role: Role) -> int:
        """How many tokens one piece of that model may have."""
        return self.chunking.draft_tokens if role == "draft" else self.chunking.target_tokens


_CHOICES: dict[str, tuple[str, ...]] = {
    "drafter": get_args(Role),
    "verification": get_args(Verification),
    "takeover": get_args(Takeover),
    "answers": get_args(AnswerCheck),
    "vote": get_args(VoteKind),
    "early_stop": get_args(Stop),
    "later": get_args(Later),
}
