"""Other rates than the recorded one: what they would cost, and between which bounds their accuracy lies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from atts.analysis.plan.record import Case, Record
from atts.analysis.replay import ReplayedProblem, replay_policy
from atts.calibration import Calibrator, Mode, Tuning
from atts.pipelines import ConformalGate, Policy

RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6)


@dataclass(frozen=True, slots=True)
class RateGuess:
    """A rate nobody ran: the gate decides again on the recorded scores.

    Rollouts in which it decides as recorded are known; what the others would have answered nobody knows. `low` is the
    vote's accuracy if each of them were wrong in the same way, `high` if each were right. The target's tokens assume
    that it writes as much per takeover as it did.
    """

    rate: float
    realised: float
    off_policy: float  # the share of rollouts nobody knows the end of
    low: float
    high: float
    target_tokens: float  # per problem


def guesses(record: Record, rates: Sequence[float] = RATES) -> tuple[RateGuess, ...]:
    """A guess per rate; none where the run's gate was not the conformal one."""
    if record.setting("gate") != "ConformalGate" or record.method != "atts":
        return ()
    taken = [turn for one in record.outcomes for line in one.rollouts for turn in line.turns if turn.decision]
    escalated = sum(turn.decision is not None and turn.decision.escalate for turn in taken)
    if not escalated:
        return ()
    each = record.written[1] / escalated
    return tuple(_guess(record, rate, each, len(taken)) for rate in rates if not math.isclose(rate, record.rate))


def _guess(record: Record, rate: float, each: float, decisions: int) -> RateGuess:
    mode: Mode = record.setting("mode") or "question-turn"
    stored = record.setting("stored") or ()
    samples = max((len(one.rollouts) for one in record.outcomes), default=1)
    tuning = Tuning.for_rollouts(record.policy("samples") or samples)
    gate = ConformalGate(Calibrator(rate, mode, seed=record.manifest.seed, stored=stored, tuning=tuning))
    policy = Policy(samples=samples, turns=max(1, record.policy("turns") or 1))
    done = replay_policy(record.outcomes, gate, policy, _apart, order=record.order, told=record.told)
    cases = {case.problem: case for case in record.cases}
    bounds = [_bounds(one, cases[one.problem]) for one in done.problems if one.problem in cases]
    return RateGuess(
        rate,
        done.rate,
        done.off_policy,
        math.fsum(low for low, _ in bounds) / len(bounds),
        math.fsum(high for _, high in bounds) / len(bounds),
        done.rate * decisions * each / len(record.outcomes),
    )


def _bounds(replayed: ReplayedProblem, case: Case) -> tuple[float, float]:
    """The vote if all that is unknown were wrong alike, and if it were right; a vote nothing strayed from stands."""
    strayed = {line.sample for line in replayed.rollouts if line.off_policy_from is not None}
    if not strayed:
        return case.vote, case.vote
    known = [line for line in case.lines if line.sample not in strayed]
    unknown = len(replayed.rollouts) - len(known)
    right = _largest(line.label for line in known if line.right)
    wrong = _largest(line.label for line in known if not line.right and line.label is not None)
    return _share(right, wrong + unknown), _share(right + unknown, wrong)


def _largest(labels: Iterable[Hashable]) -> int:
    return max(Counter(labels).values(), default=0)


def _share(right: int, wrong: int) -> float:
    """A tie goes to either."""
    return 0.5 if right == wrong and right else float(right > wrong)


def _apart(answers: Sequence[str]) -> list[int]:
    """No two answers alike: the replay's own vote is not used."""
    return list(range(len(answers)))
