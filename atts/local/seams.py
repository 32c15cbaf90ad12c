"""The four interfaces between the local engine and its accelerators, with the classes that plain
decoding uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from atts.core import Sampling, TokenIds
from atts.errors import counted

# Accelerators implement four interfaces, which are called seams. `Proposer` guesses the next
# tokens, and `Lengths` decides how many to guess. `Model` computes rows of tokens, and `SlotStore`
# assigns cache slots for keys and values. An implementation may change the speed, but never the
# text. The loop draws the model's own token at every position, and accepts a proposed token only if
# it equals the drawn token.

if TYPE_CHECKING:
    from torch import Tensor

    from atts.local.batch import StepBatch, StepPlan
    from atts.local.cache import SlotIds
    from atts.local.logit_sampling import SampledTokens, SamplingBatch


@dataclass(frozen=True, slots=True)
class Ask:
    """The state of one sequence, passed to a proposer that guesses the next tokens."""

    key: int  # the request id, which identifies the sequence
    # token ids of the prompt and of the text written so far; a proposer must not change this list
    ids: Sequence[int]
    written: int  # number of ids that follow the prompt
    room: int  # largest number of tokens that the proposal may have; at least 1
    # the uniform numbers with which the target will draw the next tokens
    uniforms: NDArray[np.float64]
    sampling: Sampling
    rollout: str = ""  # the rollout's name, PROBLEM/SAMPLE; empty if the request names none
    hint: TokenIds = ()  # tokens that the caller sent with the request as a guess of the answer

    @property
    def group(self) -> str:
        """Return the problem's name, which is the same for sibling rollouts."""
        return self.rollout.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class TokenProposal:
    """Proposed tokens, and the estimated probability that the first of them is accepted."""

    tokens: TokenIds = ()
    confidence: float = 0.0


NOTHING = TokenProposal()


@dataclass(slots=True)
class OverlapStats:
    """Counters of a drafter that works while the target computes a step. The drafter guesses the
    tokens that the target will sample, and drafts the tokens that follow.
    """

    hits: int = 0  # number of times that a guess for a sequence was correct, counted per step
    misses: int = 0
    # number of times that a sequence had no proposal because the drafter had not finished in time
    late: int = 0
    wasted: int = 0  # number of guesses whose drafted tokens were never used
    # number of forward passes of the draft model that drafted tokens after guesses, counted for
    # each guess
    passes: int = 0
    drafted: int = 0  # number of tokens that these forward passes drafted

    @property
    def silence(self) -> str:
        """Describe why no guess was correct. Return an empty string if a guess was correct, or if
        no guess was possible.
        """
        if self.hits:
            return ""
        if self.misses:
            return (
                f"none of the draft's {counted(self.misses, 'guess', 'guesses')} at the result of "
                "a target step was correct"
            )
        return "the draft never finished before the target's step ended" if self.late else ""


class Proposer(Protocol):
    """A proposer, which guesses the next tokens of sequences. The default methods guess nothing.

    A wrong guess costs time but never changes the text, because the target samples every token
    itself.
    """

    def propose(self, asks: Sequence[Ask]) -> Sequence[TokenProposal]:
        """Return one proposal per ask, each with at most `room` tokens. A proposal may be empty."""
        return [NOTHING] * len(asks)

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Receive the number of tokens that were accepted from a sequence's last proposal. The
        proposal's other tokens were dropped.
        """
        return

    def ended(self, key: int) -> None:
        """Forget a sequence that is finished or was cancelled."""
        return

    def overlap(self) -> OverlapStats | None:
        """Return the counters of a proposer that drafts while the target computes; return None if
        this proposer does not.
        """
        return None

    def silence(self) -> str:
        """Return the reason why all proposals so far were empty."""
        return "the drafter could not propose a token for any text"


class NoProposer(Proposer):
    """The proposer of plain decoding, which guesses nothing."""


class Forecast(NamedTuple):
    """The expected number of tokens that a step writes, and its expected duration in seconds."""

    tokens: float
    seconds: float
    # whether the step uses certain proposal lengths only to measure them, although other lengths
    # seem better
    is_trial: bool = False
    # expected seconds of the same step without proposals; 0 if the step also feeds prompts
    plain: float = 0.0
    # number of steps that this forecast represents, which are all steps since the last forecast
    steps: int = 1


@dataclass(frozen=True, slots=True)
class SpeculationRound:
    """The counts of proposed and accepted tokens in one proposal."""

    request_id: int
    proposed: int
    accepted: int
    # number of tokens in the proposal before the check dropped unusable tokens
    guessed: int


class Lengths(Protocol):
    """A rule that chooses how many tokens to propose for each sequence in each step. By default, it
    chooses 0.

    The rule may use everything about a step except its tokens. The chosen lengths never change the
    text, because the target samples every token itself.
    """

    def rests(self, plan: StepPlan) -> bool:
        """Return whether to skip proposals and measurements in this step."""
        return False

    def choose(self, plan: StepPlan) -> Sequence[int]:
        """Return the largest number of tokens to propose for each sequence of `plan.decoding`; 0
        means no proposal.
        """
        return [0] * len(plan.decoding)

    def observed(
        self, plan: StepPlan, rounds: Sequence[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Learn from a step: from the result of each proposal, and from the seconds spent on
        proposing and on computing.

        Return the forecast that was made for the step; None if there was none.
        """
        return None


class NoLengths(Lengths):
    """The rule of plain decoding, which skips proposals in every step."""

    def rests(self, plan: StepPlan) -> bool:
        """Return True, because plain decoding never proposes tokens."""
        return True


@dataclass(frozen=True, slots=True)
class FixedLength(Lengths):
    """A rule that always chooses the same proposal length."""

    tokens: int

    def choose(self, plan: StepPlan) -> list[int]:
        """Return the same fixed proposal length for each decoding sequence."""
        return [self.tokens] * len(plan.decoding)


@dataclass(slots=True)
class SpeculationStats:
    """Counters of proposals, including the accepted tokens at each position in a proposal."""

    rounds: int = 0  # number of proposals that were verified; a sequence has at most one per step
    proposed: int = 0
    accepted: int = 0
    # for each position in a proposal: number of proposals that have a token there, and whose
    # earlier tokens were all accepted
    tested_at: list[int] = field(default_factory=list[int])
    # for each position in a proposal: number of proposals whose token at this position was accepted
    accepted_at: list[int] = field(default_factory=list[int])
    seconds: float = 0.0  # seconds spent on asking for proposals
    trouble: str = ""  # the reason why speculation was switched off; empty while it is on
    silence: str = ""  # the reason why no token was ever proposed; empty after the first proposal
    # number of chosen proposal lengths: one per decoding sequence and step
    choices: int = 0
    # sum of the chosen proposal lengths; divided by `choices`, it is the mean length
    chosen: int = 0
    # The next four fields are totals over steps with a forecast: the expected tokens and seconds,
    # then the actual tokens and seconds.
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    came_tokens: int = 0
    came_seconds: float = 0.0
    # estimated seconds that proposals saved, over all steps that the forecasts represent
    saved_seconds: float = 0.0
    # counts of guesses, if the drafter works while the target computes; None for other drafters
    overlap: OverlapStats | None = None

    def compare(self, forecast: Forecast, came: tuple[int, float], sequences: int) -> None:
        """Add a step's forecast and its actual result to the totals. `came` is the number of tokens
        written and the seconds taken; `sequences` is the step's number of sequences.
        """
        self.expected_tokens += forecast.tokens
        self.expected_seconds += forecast.seconds
        self.came_tokens += came[0]
        self.came_seconds += came[1]
        if forecast.plain:
            self.saved_seconds += forecast.steps * (forecast.plain * came[0] / sequences - came[1])

    def add(self, proposed: int, accepted: int) -> None:
        """Count one more verified proposal, with its number of proposed and of accepted tokens."""
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
    """A callback for a forward pass, which receives the hidden states of `logit_rows` after the
    first `layers` layers.
    """

    layers: int
    receive: Callable[[Tensor], None]


class Model(Protocol):
    """The interface of a decoder model that finds its keys and values through a slot table."""

    @property
    def device_name(self) -> str:
        """Describe the device and the kernels that compute the model."""
        ...

    @property
    def is_thread_independent(self) -> bool:
        """Return whether results have the same bits for any thread count."""
        ...

    def use_threads(self, threads: int) -> None:
        """Use this number of threads from now on."""
        ...

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """Run a step and return the final, normed hidden states of the batch's `logit_rows`:
        [logits, hidden_size].
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits for these hidden states: [rows, vocabulary] float32."""
        ...

    def sample(
        self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]
    ) -> SampledTokens:
        """Sample one token per row, as `atts.local.logit_sampling.sample` does."""
        ...

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Return the log-probability of each row's token, as
        `atts.local.logit_sampling.raw_logprobs` does.
        """
        ...

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """Return the log-probability of one token per row, without computing the logits of all rows
        at once. Also return the logits of `kept_rows`, which must be in ascending order.
        """
        ...


class HookedModel(Model, Protocol):
    """A model that can pass hidden states to a callback during the forward pass."""

    def forward(self, batch: StepBatch, table: SlotIds, tap: LayerHook | None = None) -> Tensor:
        """Return the final hidden states as `Model.forward` does. The callback `tap` receives
        hidden states but does not change them.
        """
        ...


class SlotStore(Protocol):
    """An allocator of slots in the KV cache."""

    num_slots: int
    num_free: int

    @property
    def num_used(self) -> int:
        """Return the number of slots in use."""
        ...

    @property
    def peak_used(self) -> int:
        """Return the largest number of slots that were in use at the same time."""
        ...

    def new_table(self, rows: int, width: int) -> SlotIds:
        """Return a slot table for `rows` sequences of up to `width` tokens, filled with 0."""
        ...

    def allocate(self, count: int) -> SlotIds:
        """Allocate `count` slots. The caller must have checked that enough slots are free."""
        ...

    def free(self, runs: Sequence[SlotIds]) -> None:
        """Mark slots as free; no sequence may read them any longer."""
        ...
