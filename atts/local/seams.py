"""The four interfaces between the engine and its accelerators, each with the class of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from atts.core import Sampling, TokenIds

# There are four seams. A proposer guesses tokens after the newest one, and `Lengths` decide how
# many. A model takes rows through its layers, and a slot store assigns slots for keys and values.
# The code behind a seam changes the time, but never the text. The loop draws the model's own token
# at every position, and accepts a proposed token only if it equals that draw.

if TYPE_CHECKING:
    from torch import Tensor

    from atts.local.batch import StepBatch, StepPlan
    from atts.local.cache import SlotIds
    from atts.local.logit_sampling import SampledTokens, SamplingBatch


@dataclass(frozen=True, slots=True)
class Ask:
    """The view of one sequence that a proposer receives when it is asked for the next tokens."""

    key: int  # request id, which identifies the sequence while it runs
    ids: Sequence[int]  # the prompt and the tokens written so far; must not be changed
    written: int  # number of ids after the prompt
    room: int  # most tokens to propose now; at least 1
    # uniform numbers with which the next tokens will be drawn: [room] or more
    uniforms: NDArray[np.float64]
    sampling: Sampling
    rollout: str = ""  # "PROBLEM/SAMPLE" if the request names its rollout
    hint: TokenIds = ()  # text that came with the request

    @property
    def group(self) -> str:
        """Return the problem, which sibling rollouts share."""
        return self.rollout.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class TokenProposal:
    """Proposed tokens, and the estimated probability that the first of them is accepted."""

    tokens: TokenIds = ()
    confidence: float = 0.0


NOTHING = TokenProposal()


@dataclass(slots=True)
class OverlapStats:
    """Counts of a drafter that works while the target computes. It guesses the outcome of the step,
    and drafts the tokens that follow.
    """

    hits: int = 0  # number of outcomes that had been guessed
    misses: int = 0
    # number of sequences that stepped without a proposal because the drafter was not done
    late: int = 0
    wasted: int = 0  # number of guesses that were drafted for but did not come true
    # number of passes of the draft model over the guesses that it drafted for
    passes: int = 0
    drafted: int = 0  # number of tokens drafted in these passes

    @property
    def silence(self) -> str:
        """Describe why no guess came true; return an empty text if one did, or if none was made."""
        if self.hits:
            return ""
        if self.misses:
            return f"the draft guessed none of {self.misses:,} outcomes"
        return "no draft was done when the target's step ended" if self.late else ""


class Proposer(Protocol):
    """A source of guesses of the next tokens; by default it guesses none.

    A wrong guess costs time but never changes the text, because the target draws every token
    itself.
    """

    def propose(self, asks: Sequence[Ask]) -> Sequence[TokenProposal]:
        """Return one proposal per ask, with at most `room` tokens each; a proposal may be empty."""
        return [NOTHING] * len(asks)

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Receive how many tokens of a sequence's last proposal were accepted; the others were
        dropped.
        """
        return

    def ended(self, key: int) -> None:
        """Forget a sequence that is finished or was cancelled."""
        return

    def overlap(self) -> OverlapStats | None:
        """Return the counts of a proposer that drafts while the target computes; None for other
        proposers.
        """
        return None

    def silence(self) -> str:
        """Return why all proposals so far were empty."""
        return "the drafter knew no next token of any text"


class NoProposer(Proposer):
    """The proposer of plain decoding, which guesses nothing."""


class Forecast(NamedTuple):
    """The expected results of a step."""

    tokens: float
    seconds: float
    # whether the lengths were tried in order to learn, instead of chosen as the best
    is_trial: bool = False
    # seconds of the step without proposals; 0 if the step also feeds other tokens
    plain: float = 0.0
    # number of steps that the forecast stands for: all steps since the last forecast
    steps: int = 1


@dataclass(frozen=True, slots=True)
class SpeculationRound:
    """One proposal and its result."""

    request_id: int
    proposed: int
    accepted: int
    # number of proposed tokens before the check, which drops the tokens after an end
    guessed: int


class Lengths(Protocol):
    """A rule for the number of tokens to propose per sequence and step; by default none.

    The rule may use everything except the tokens, so that it cannot change the text.
    """

    def rests(self, plan: StepPlan) -> bool:
        """Return whether to skip proposals and measurements in this step."""
        return False

    def choose(self, plan: StepPlan) -> Sequence[int]:
        """Return the most tokens to propose for each sequence of `plan.decoding`; 0 means none."""
        return [0] * len(plan.decoding)

    def observed(
        self, plan: StepPlan, rounds: Sequence[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Learn from the result of a step: from each round, and from the seconds of proposing and
        computing.

        Return the forecast for the step, or None if there was none.
        """
        return None


class NoLengths(Lengths):
    """The rule of plain decoding: no step has proposals."""

    def rests(self, plan: StepPlan) -> bool:
        """Return True, because every step is plain."""
        return True


@dataclass(frozen=True, slots=True)
class FixedLength(Lengths):
    """A rule that proposes the same number of tokens for every sequence in every step."""

    tokens: int

    def choose(self, plan: StepPlan) -> list[int]:
        """Return the fixed number for each decoding sequence."""
        return [self.tokens] * len(plan.decoding)


@dataclass(slots=True)
class SpeculationStats:
    """Counts of proposed and accepted tokens, in total and by position in the proposal."""

    rounds: int = 0  # number of proposals verified, counted per sequence and step
    proposed: int = 0
    accepted: int = 0
    # number of rounds in which all tokens before this position were accepted
    tested_at: list[int] = field(default_factory=list[int])
    # number of these rounds in which the token at this position was accepted as well
    accepted_at: list[int] = field(default_factory=list[int])
    seconds: float = 0.0  # time spent on proposing
    trouble: str = ""  # the reason why proposals stopped
    silence: str = ""  # the reason why no token was ever proposed; empty after the first proposal
    # number of times that a length was chosen: decoding sequences summed over steps
    choices: int = 0
    chosen: int = 0  # sum of the chosen lengths; divided by choices, it is the mean k
    # expected tokens of the steps with a forecast; `came_tokens` are the real ones
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    came_tokens: int = 0
    came_seconds: float = 0.0
    # time saved compared with plain steps, estimated for all steps that the forecasts stand for
    saved_seconds: float = 0.0
    # counts of a drafter that works while the target computes; None without one
    overlap: OverlapStats | None = None

    def compare(self, forecast: Forecast, came: tuple[int, float], sequences: int) -> None:
        """Add the forecast of a step, and the tokens and seconds that it really took, for this
        number of sequences.
        """
        self.expected_tokens += forecast.tokens
        self.expected_seconds += forecast.seconds
        self.came_tokens += came[0]
        self.came_seconds += came[1]
        if forecast.plain:
            self.saved_seconds += forecast.steps * (forecast.plain * came[0] / sequences - came[1])

    def add(self, proposed: int, accepted: int) -> None:
        """Count one more verified proposal."""
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
    """A listener inside a forward pass. It receives the states of `logit_rows` after some number of
    layers, before the last norm.
    """

    layers: int
    receive: Callable[[Tensor], None]


class Model(Protocol):
    """A decoder whose key-value cache is accessed through a table of slots."""

    @property
    def device_name(self) -> str:
        """Describe where the model computes."""
        ...

    @property
    def is_thread_independent(self) -> bool:
        """Return whether results have the same bits with any number of threads."""
        ...

    def use_threads(self, threads: int) -> None:
        """Compute with `threads` threads from now on."""
        ...

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """Return the final, normed hidden states of the batch's `logit_rows`: [logits,
        hidden_size].
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of these hidden states: [logits, vocabulary] float32."""
        ...

    def sample(
        self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]
    ) -> SampledTokens:
        """Draw one token per row, as `atts.local.logit_sampling.sample` does."""
        ...

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Score each row's token under the raw distribution, as
        `atts.local.logit_sampling.raw_logprobs` does.
        """
        ...

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """Score tokens from hidden states without making all logits at once. Return also the logits
        of `kept_rows`, in rising order.
        """
        ...


class HookedModel(Model, Protocol):
    """A model whose hidden states a listener can receive during the forward pass."""

    def forward(self, batch: StepBatch, table: SlotIds, tap: LayerHook | None = None) -> Tensor:
        """Return the same states as without `tap`; a listener does not change the results."""
        ...


class SlotStore(Protocol):
    """A store of the key-value cache's slots, which it hands out and takes back."""

    num_slots: int
    num_free: int

    @property
    def num_used(self) -> int:
        """Return the number of slots in use."""
        ...

    @property
    def peak_used(self) -> int:
        """Return the largest number of slots that were in use at once."""
        ...

    def new_table(self, rows: int, width: int) -> SlotIds:
        """Return a table of slots for `rows` sequences of `width` tokens; all entries are 0."""
        ...

    def allocate(self, count: int) -> SlotIds:
        """Hand out `count` slots; the caller must have checked that this many are free."""
        ...

    def free(self, runs: Sequence[SlotIds]) -> None:
        """Take back slots that no sequence reads any longer."""
        ...
