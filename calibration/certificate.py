"""Learn-then-Test certificates: the cheapest policy of bounded accuracy loss, or how much more data
it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np

from atts.calibration.exact_rate import check_fraction
from atts.calibration.guarantees import TEXTS
from atts.calibration.risk import (
    RiskTest,
    checked_losses,
    fewest_problems,
    net_p_value,
    problems_needed,
    rejected,
    risk_p_value,
)
from atts.errors import CalibrationInputError
from atts.sampling import normal_quantile

PValue = Callable[[Sequence[float]], float]
"""Of "the true mean loss is too large"."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy of a labelled calibration run: its gate and rate, a loss per problem, what it
    costs on average.

    Losses are of the same problems in the same order for every candidate; see `lost_answers`. Cost
    is in any unit, such as target tokens per problem.
    """

    gate: str
    rate: float
    losses: Sequence[float]
    cost: float


@dataclass(frozen=True, slots=True)
class Tested:
    """What the run says about one candidate."""

    gate: str
    rate: float
    cost: float
    loss: float
    p: float | None  # None: not reached by the fixed sequence
    certified: bool


@dataclass(frozen=True, slots=True)
class Certificate:
    """The outcome: `chosen` is the cheapest certified policy, None when none is.

    Of net losses also `superior`: the cheapest policy that is right more often than the target
    alone, None when none was found to be; that is a statement of its own, with the same
    probability.
    """

    epsilon: float
    delta: float
    problems: int
    chosen: Tested | None
    tested: tuple[Tested, ...]
    # about how many problems would certify the safest candidate; None if no number would
    needed: int | None
    superior: Tested | None = None
    kind: Literal["certificate", "net-certificate"] = "certificate"

    @property
    def guarantee(self) -> str:
        """What is promised, in words."""
        outcome = (
            "certified" if self.chosen else "needs more" if self.needed is not None else "hopeless"
        )
        superior = TEXTS["net-certificate"]["superior"] if self.superior else ""
        return (TEXTS[self.kind][outcome] + superior).format(certificate=self, kept=1 - self.delta)

    @property
    def voided_by(self) -> str:
        """What makes the promise empty, in words."""
        return TEXTS[self.kind]["voided_by"]


def certify(
    candidates: Sequence[Candidate],
    epsilon: float,
    delta: float = 0.1,
    test: RiskTest | None = None,
) -> Certificate:
    """Learn-then-Test over policies: the cheapest whose true loss is at most epsilon, with
    probability 1 - delta.

    Each gate's policies are tested from the highest rate down and the walk stops at the first that
    fails; `delta` is shared equally among the gates. The order depends on rates only, never on the
    losses, as validity demands.

    :raises CalibrationInputError: without candidates, with losses of different lengths or outside
        [0, 1], or an epsilon or delta outside (0, 1).
    """
    chains, share = _chains(candidates, epsilon, delta)
    tested = _tested(chains, share, lambda losses: risk_p_value(losses, epsilon, test))
    safest = min(float(checked_losses(chain[0].losses).mean()) for chain in chains)
    needed = problems_needed(safest, epsilon, share)
    return _certificate(
        Certificate(epsilon, delta, len(chains[0][0].losses), None, tested, needed), share
    )


def certify_net(candidates: Sequence[Candidate], epsilon: float, delta: float = 0.1) -> Certificate:
    """The same of net losses (`net_losses`): the cheapest policy right at most epsilon less often
    than the target.

    Sampling noise is in both runs and cancels, so that a policy as good as the target can be
    certified. Whether one is better is tested by a walk of its own.

    :raises CalibrationInputError: as `certify`, with net losses in [-1, 1].
    """
    chains, share = _chains(candidates, epsilon, delta)
    tested = _tested(chains, share, lambda losses: net_p_value(losses, epsilon))
    superior = _cheapest(_tested(chains, share, lambda losses: net_p_value(losses, 0.0)))
    enough = [_net_problems(chain[0].losses, epsilon, share) for chain in chains]
    needed = min((count for count in enough if count is not None), default=None)
    problems = len(chains[0][0].losses)
    found = Certificate(
        epsilon, delta, problems, None, tested, needed, superior=superior, kind="net-certificate"
    )
    return _certificate(found, share)


def _certificate(found: Certificate, share: float) -> Certificate:
    """With its cheapest policy; where there is none, more problems are needed than there are."""
    chosen = _cheapest(found.tested)
    needed = found.needed
    if needed is not None and chosen is None:
        needed = max(needed, found.problems + 1, fewest_problems(found.epsilon, share))
    return replace(found, chosen=chosen, needed=needed)


def _net_problems(losses: Sequence[float], epsilon: float, share: float) -> int | None:
    """About how many problems like these would certify epsilon, by the normal law; None if no
    number would.
    """
    array = np.asarray(losses, float)
    gap = epsilon - float(array.mean())
    reach = -normal_quantile(share)
    return max(1, math.ceil(float(array.var()) * (reach / gap) ** 2)) if gap > 0 else None


def _chains(
    candidates: Sequence[Candidate], epsilon: float, delta: float
) -> tuple[list[list[Candidate]], float]:
    """The candidates of each gate from the highest rate down, and each gate's share of delta."""
    _check(candidates, epsilon, delta)
    ordered = sorted(candidates, key=lambda candidate: (candidate.gate, -candidate.rate))
    chains = [list(chain) for _, chain in groupby(ordered, key=lambda candidate: candidate.gate)]
    return chains, delta / len(chains)


def _cheapest(tested: Sequence[Tested]) -> Tested | None:
    return min(
        (row for row in tested if row.certified), key=lambda row: (row.cost, row.loss), default=None
    )


def _tested(chains: list[list[Candidate]], share: float, p_value: PValue) -> tuple[Tested, ...]:
    return tuple(row for chain in chains for row in _walk(chain, share, p_value))


def _walk(chain: list[Candidate], share: float, p_value: PValue) -> list[Tested]:
    p_values = list[float]()
    for candidate in chain:
        p_values.append(p_value(candidate.losses))
        if p_values[-1] > share:
            break
    passed = len(rejected(p_values, share))
    reached = [*p_values, *[None] * (len(chain) - len(p_values))]
    return [
        Tested(each.gate, each.rate, each.cost, float(np.mean(each.losses)), p, place < passed)
        for place, (each, p) in enumerate(zip(chain, reached, strict=True))
    ]


def _check(candidates: Sequence[Candidate], epsilon: float, delta: float) -> None:
    if not candidates:
        raise CalibrationInputError("candidates", [], "at least one policy")
    if len({len(candidate.losses) for candidate in candidates}) > 1:
        raise CalibrationInputError(
            "candidates", "losses of different lengths", "one loss for each of the same problems"
        )
    check_fraction("epsilon", epsilon)
    check_fraction("delta", delta)
    if any(not math.isfinite(candidate.cost) for candidate in candidates):
        raise CalibrationInputError("cost", math.nan, "a finite number")
