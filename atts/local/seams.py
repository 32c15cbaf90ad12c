"""The four seams between the engine and what accelerates it, each with what plain decoding does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from atts.core import Sampling, TokenIds

# A proposer says which tokens a step tries beyond the newest one, lengths say how many, a model
# takes rows through its layers, and a slot store says where keys and values go. The code behind a
# seam, only time depends on it: the loop draws the model's own token at every place, and a proposed
# token is accepted where it equals that draw.

if TYPE_CHECKING:
    from torch import Tensor

    from atts.local.batch import StepBatch, StepPlan
    from atts.local.cache import SlotIds
    from atts.local.logit_sampling import SampledTokens, SamplingBatch


@dataclass(frozen=True, slots=True)
class Ask:
    """All that a proposer receives of one sequence, of which the next tokens are wanted."""

    key: int  # names the sequence as long as it runs
    ids: Sequence[int]  # the prompt and what is written so far; never to be changed
    written: int  # how many of the last ids are not of the prompt
    room: int  # most tokens to propose now, at least 1
    uniforms: NDArray[np.float64]  # with which the next tokens are drawn: [room] or more
    sampling: Sampling
    rollout: str = ""  # "PROBLEM/SAMPLE" where the request says so
    hint: TokenIds = ()  # text that came with the request

    @property
    def group(self) -> str:
        """Return the problem, which siblings have in common."""
        return self.rollout.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class TokenProposal:
    """Tokens that may follow, and how likely the first of them is thought to be accepted."""

    tokens: TokenIds = ()
    confidence: float = 0.0


NOTHING = TokenProposal()


@dataclass(slots=True)
class OverlapStats:
    """Counts of guesses that were continued during the step whose outcome they guessed."""

    hits: int = 0  # outcomes that had been guessed
    misses: int = 0
    late: int = 0  # sequences that stepped without a proposal because the drafter was not done
    wasted: int = 0  # continued guesses that did not come true
    passes: int = 0  # passes of the draft model over a continued guess, one or more tokens each
    drafted: int = 0  # tokens of these

    @property
    def silence(self) -> str:
        """Say why no guess came true; return an empty text if one did, or none was made."""
        if self.hits:
            return ""
        if self.misses:
            return f"none of {self.misses:,} outcomes had been guessed"
        return "no draft was done when the target's step ended" if self.late else ""


class Proposer(Protocol):
    """Guesses what comes next; by default nothing.

    A wrong guess costs time, never the text: the target draws every token itself.
    """

    def propose(self, asks: Sequence[Ask]) -> Sequence[TokenProposal]:
        """Return one proposal an ask, of at most `room` tokens each; none is fine."""
        return [NOTHING] * len(asks)

    def settled(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Hear how many tokens of this sequence's last proposal were accepted; the others are gone."""
        return

    def ended(self, key: int) -> None:
        """Forget a sequence that is finished, or was cancelled."""
        return

    def overlap(self) -> OverlapStats | None:
        """Return the statistics of guesses of a proposer that drafts while the target computes."""
        return None

    def silence(self) -> str:
        """Return why its answers to all requests were empty."""
        return "what proposes knew no next token of any text"


class NoProposer(Proposer):
    """Plain decoding: nothing is guessed."""


class Forecast(NamedTuple):
    """Expectation of a step."""

    tokens: float
    seconds: float
    is_trial: bool = False  # whether its lengths were tried, not chosen
    plain: float = 0.0  # seconds without proposals; 0 where others are fed in the same step
    steps: int = 1  # that it stands for: those since the last one of which something was expected


@dataclass(frozen=True, slots=True)
class SpeculationRound:
    """One proposal and what came of it."""

    request_id: int
    proposed: int
    accepted: int
    # tokens there were at first, those included after which there is nothing to write
    guessed: int


class Lengths(Protocol):
    """Decides how many tokens are proposed for each decoding sequence in a step; by default none.

    It may see all but the tokens.
    """

    def rests(self, plan: StepPlan) -> bool:
        """Return whether the step is one without proposals, of which nothing is observed either."""
        return False

    def choose(self, plan: StepPlan) -> Sequence[int]:
        """Return the most tokens to propose for each of `plan.decoding`; 0: none."""
        return [0] * len(plan.decoding)

    def observed(
        self, plan: StepPlan, rounds: Sequence[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Learn what came of the step: each round, and how long it took to propose and to compute.

        The answer is what was expected of it, where anything was.
        """
        return None


class NoLengths(Lengths):
    """Plain decoding: no step has proposals."""

    def rests(self, plan: StepPlan) -> bool:
        """Return whether the step is plain: always."""
        return True


@dataclass(frozen=True, slots=True)
class FixedLength(Lengths):
    """The same number of tokens for every sequence and step."""

    tokens: int

    def choose(self, plan: StepPlan) -> list[int]:
        """Return that many each."""
        return [self.tokens] * len(plan.decoding)


@dataclass(slots=True)
class SpeculationStats:
    """Counts of proposed and accepted tokens, in all and by position."""

    rounds: int = 0  # proposals verified: one sequence in one step
    proposed: int = 0
    accepted: int = 0
    # rounds in which all tokens before this place were accepted
    tested_at: list[int] = field(default_factory=list[int])
    # number of them in which the token at this place was accepted as well
    accepted_at: list[int] = field(default_factory=list[int])
    seconds: float = 0.0  # spent on proposing
    trouble: str = ""  # why nothing is proposed any more
    silence: str = ""  # why nothing was ever proposed; empty once something was
    choices: int = 0  # times that each length was chosen: sequences summed over steps
    chosen: int = 0  # summed lengths: divided by choices, the mean k
    # expected tokens of steps with a forecast, and the real ones
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    came_tokens: int = 0
    came_seconds: float = 0.0
    saved_seconds: float = 0.0  # in these and the like ones between, to steps without proposals
    # counts of guesses continued while the target computed, if there are any
    overlap: OverlapStats | None = None

    def compare(self, forecast: Forecast, came: tuple[int, float], sequences: int) -> None:
        """Add the tokens and seconds of one more step of so many sequences, as expected and as they
        came.
        """
        self.expected_tokens += forecast.tokens
        self.expected_seconds += forecast.seconds
        self.came_tokens += came[0]
        self.came_seconds += came[1]
        if forecast.plain:
            self.saved_seconds += forecast.steps * (forecast.plain * came[0] / sequences - came[1])

    def add(self, proposed: int, accepted: int) -> None:
        """Count one more round."""
        self.rounds += 1
        self.proposed += proposed
        self.accepted += accepted
        missing = max(0, proposed - len(self.tested_at))
        self.tested_at += [0] * missing
        self.accepted_at += [0] * missing
        for place in range(min(accepted + 1, proposed)):
            self.tested_at[place] += 1
            self.accepted_at[place] += place < accepted


class LayerHook(NamedTuple):
    """A listener inside a step: it receives the states of `logit_rows` after so many layers, before
    the last norm.
    """

    layers: int
    receive: Callable[[Tensor], None]


class Model(Protocol):
    """A decoder whose key-value cache is addressed through a table of slots."""

    @property
    def device_name(self) -> str:
        """Describe where the model computes."""
        ...

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        ...

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """Return the final, normed hidden states of the batch's `logit_rows`: [logits,
        hidden_size].
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return their logits: [logits, vocabulary] float32."""
        ...

    def sample(
        self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]
    ) -> SampledTokens:
        """Draw one token a row, as `atts.local.logit_sampling.sample` does."""
        ...

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Score each row's token under the raw distribution, as
        `atts.local.logit_sampling.raw_logprobs` does.
        """
        ...

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """Score tokens from hidden states, never all logits at once; return also the logits of
        `kept_rows`, in rising order.
        """
        ...


class HookedModel(Model, Protocol):
    """A model whose rows can be heard of on their way."""

    def forward(self, batch: StepBatch, table: SlotIds, tap: LayerHook | None = None) -> Tensor:
        """Return the same states; what is computed does not depend on who hears."""
        ...


class SlotStore(Protocol):
    """Says which slots of the key-value cache are free, and hands them out."""

    num_slots: int
    num_free: int

    @property
    def num_used(self) -> int:
        """Return the number of slots that are taken."""
        ...

    @property
    def peak_used(self) -> int:
        """Return the most slots that were taken at once."""
        ...

    def new_table(self, rows: int, width: int) -> SlotIds:
        """Return a table of slots, all 0, for so many sequences of so many tokens."""
        ...

    def allocate(self, count: int) -> SlotIds:
        """Hand out slots; the caller has made sure there are as many."""
        ...

    def free(self, runs: Sequence[SlotIds]) -> None:
        """Take slots back that no sequence reads any more."""
        ...
