"""Learn-then-Test: certified policies, certified abstention, and their p-values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atts.calibration.guarantees import TEXTS
from atts.calibration.rates import check_fraction
from atts.errors import CalibrationInputError, OptionError
from atts.sampling import beta_quantile, beta_upper_quantile, binomial_cdf, normal_quantile

RiskTest = Literal["binomial", "hoeffding-bentkus", "betting"]
Losses = NDArray[np.float64]


def checked_losses(losses: ArrayLike, low: float = 0.0) -> Losses:
    """One loss in [low, 1] per problem, as an array.

    :raises CalibrationInputError: if there is none, or one is outside [low, 1].
    """
    array = np.asarray(losses, float)
    if array.ndim != 1 or not len(array):
        raise CalibrationInputError(
            "losses", array.shape, "one number per problem, at least one problem"
        )
    outside = ~((array >= low) & (array <= 1))
    if outside.any():
        raise CalibrationInputError("loss", float(array[outside][0]), f"a number in [{low:g}, 1]")
    return array


def lost_answers(target_right: ArrayLike, policy_right: ArrayLike) -> Losses:
    """The loss of each problem: how often the target alone is right and the policy wrong.

    One row per problem; with a column per paired sample the loss is the fraction of samples, so a
    problem stays one unit however many samples it has.

    >>> lost_answers([[1, 1], [0, 1]], [[1, 0], [0, 1]]).tolist()
    [0.5, 0.0]
    """
    target, policy = _answers(target_right, policy_right)
    return _by_problem((target & ~policy).astype(float))


def net_losses(target_right: ArrayLike, policy_right: ArrayLike) -> Losses:
    """The net loss of each problem, in [-1, 1]: how much more often the target alone is right than
    the policy.

    Two runs of the same models differ in single answers by sampling alone; what one wins and loses
    so cancels here.

    >>> net_losses([[1, 1], [0, 1]], [[1, 0], [1, 1]]).tolist()
    [0.5, -0.5]
    """
    target, policy = _answers(target_right, policy_right)
    return _by_problem(target.astype(float) - policy.astype(float))


def _answers(
    target_right: ArrayLike, policy_right: ArrayLike
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    target = np.asarray(target_right, bool)
    policy = np.asarray(policy_right, bool)
    if target.shape != policy.shape or target.ndim not in (1, 2):
        raise CalibrationInputError(
            "answers", (target.shape, policy.shape), "two equal shapes, a row per problem"
        )
    return target, policy


def _by_problem(values: Losses) -> Losses:
    return values if values.ndim == 1 else np.asarray(values.mean(axis=1), float)


def binomial_p_value(losses: ArrayLike, epsilon: float) -> float:
    """P(Bin(n, epsilon) <= number of losses): exact for 0/1 losses of independent problems with
    mean >= epsilon.

    :raises CalibrationInputError: if a loss is neither 0 nor 1.
    """
    array = checked_losses(losses)
    if not ((array == 0) | (array == 1)).all():
        raise CalibrationInputError("loss", "a fraction", "0 or 1 for the exact binomial test")
    return float(binomial_cdf(array.sum(), len(array), epsilon))


def hoeffding_bentkus_p_value(losses: ArrayLike, epsilon: float) -> float:
    """min(exp(-n h(min(R, epsilon), epsilon)), e P(Bin(n, epsilon) <= ceil(n R))) for losses in [0,
    1] with mean R.
    """
    array = checked_losses(losses)
    n = len(array)
    risk = float(array.mean())
    kept = min(risk, epsilon)
    entropy = sum(
        p * math.log(p / q) for p, q in ((kept, epsilon), (1 - kept, 1 - epsilon)) if p > 0
    )
    hoeffding = math.exp(-n * entropy)
    bentkus = math.e * float(binomial_cdf(math.ceil(n * risk - 1e-9), n, epsilon))
    return min(1.0, hoeffding, bentkus)


def betting_p_value(losses: ArrayLike, epsilon: float) -> float:
    """A p-value from betting against "the mean loss is at least epsilon", problem by problem in the
    given order.

    The capital prod(1 + b_i (epsilon - loss_i)), each b_i fixed before its loss is seen, is a
    supermartingale under that hypothesis, so 1 / its maximum is a p-value (Ville). It gains on
    Hoeffding-Bentkus when losses are fractions of small variance, and the order of problems must
    not depend on their losses.
    """
    array = checked_losses(losses)
    seen = np.arange(1, len(array) + 1)
    mean = (epsilon + _before(array)) / seen
    variance = (epsilon * (1 - epsilon) + _before((array - mean) ** 2)) / seen
    gain = epsilon - mean
    bets = np.clip(gain / np.maximum(variance + gain * gain, 1e-9), 0.0, 0.75 / (1 - epsilon))
    bets = np.maximum(bets, 0.1)  # never idle: an early unlucky loss must not end the betting
    capital = np.cumsum(np.log1p(bets * (epsilon - array)))
    return math.exp(-max(0.0, float(capital.max())))


def _before(values: Losses) -> Losses:
    """The sum of all before each."""
    return np.cumsum(values) - values


def net_p_value(losses: ArrayLike, epsilon: float) -> float:
    """The p-value of "the mean net loss is at least epsilon", from one net loss in [-1, 1] per
    problem.

    Where all are -1, 0 or 1 it is exact: the chance of so few problems lost more than won, at the
    worst share of problems that differ within its 99.9 % interval, and .001 for that interval
    (Berger and Boos). Else it is that of betting on the losses moved into [0, 1]; the order of
    problems must then not depend on them.
    """
    array = checked_losses(losses, -1.0)
    if not np.isin(array, (-1.0, 0.0, 1.0)).all():
        return betting_p_value((array + 1) / 2, (epsilon + 1) / 2)
    n = len(array)
    differing = int(np.count_nonzero(array))
    net = round(float(array.sum()))
    low = float(beta_quantile(_APART / 2, differing, n - differing + 1)) if differing else 0.0
    high = beta_upper_quantile(_APART / 2, differing + 1, n - differing) if differing < n else 1.0
    shares = np.linspace(max(low, epsilon), max(high, epsilon), 65)
    return min(
        1.0, _APART + max(_chance_of_at_most(net, n, float(share), epsilon) for share in shares)
    )


_APART = 0.001


def _chance_of_at_most(net: int, n: int, differing: float, epsilon: float) -> float:
    """P(lost - won <= net) of n problems of which a share differs, and epsilon more of them are
    lost than won.
    """
    size = 2 * n + 1
    turn = np.exp(-2j * np.pi * np.arange(n + 1) / size)
    lost = (differing + epsilon) / 2
    won = (differing - epsilon) / 2
    # places count modulo `size`
    law = np.fft.irfft((1 - differing + lost * turn + won * turn.conj()) ** n, size)
    return float(np.clip(np.roll(law, n)[: net + n + 1].sum(), 0.0, 1.0))


_TESTS = {
    "binomial": binomial_p_value,
    "hoeffding-bentkus": hoeffding_bentkus_p_value,
    "betting": betting_p_value,
}


def risk_p_value(losses: ArrayLike, epsilon: float, test: RiskTest | None = None) -> float:
    """The p-value of "the true mean loss exceeds epsilon"; without a test named, the sharpest one
    for the kind of loss.

    That is the exact binomial for 0/1 losses, betting for fractions.

    :raises OptionError: for an unknown test.
    """
    check_fraction("epsilon", epsilon)
    array = checked_losses(losses)
    if test is None:
        test = "binomial" if ((array == 0) | (array == 1)).all() else "betting"
    if test not in _TESTS:
        raise OptionError(str(test), "is not a test of risk", sorted(_TESTS))
    return _TESTS[test](array, epsilon)


def rejected(p_values: Sequence[float], delta: float) -> list[int]:
    """Which hypotheses fixed-sequence testing rejects with family-wise error at most delta, as
    indices.

    It goes down the list, whose order must not depend on the data, and stops at the first p above
    delta.

    >>> rejected([0.001, 0.04, 0.2, 0.01], 0.1)
    [0, 1]
    """
    return list(takewhile(lambda place: p_values[place] <= delta, range(len(p_values))))


def fewest_problems(epsilon: float, delta: float) -> int:
    """How many problems without a single loss certify epsilon at delta.

    >>> fewest_problems(0.05, 0.1)
    45
    """
    return math.ceil(math.log(delta) / math.log1p(-epsilon))


def problems_needed(risk: float, epsilon: float, delta: float, limit: int = 10**7) -> int | None:
    """About how many problems certify epsilon at delta if the observed loss stays `risk`; None
    beyond the limit.
    """
    if risk >= epsilon:
        return None

    def enough(n: int) -> bool:
        return float(binomial_cdf(math.ceil(n * risk - 1e-9), n, epsilon)) <= delta

    high = fewest_problems(epsilon, delta)
    while not enough(high):
        high *= 2
        if high > limit:
            return None
    low = high // 2
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


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


# of the walks down, in twentieths; each has an equal part of what the test may be wrong
_STARTS = (
    20,
    12,
)


@dataclass(frozen=True, slots=True)
class Abstention:
    """What labelled problems say of answering only where confidence is at least `threshold`.

    `threshold` is None where none can be promised; then `needed` is about how many problems it
    would take, None where no number would do. `answered` and `wrong` are of the labelled problems
    at the threshold, or at the one that came nearest.
    """

    risk: float
    kept: float
    problems: int
    threshold: float | None
    answered: int
    wrong: int
    needed: int | None = None

    @property
    def guarantee(self) -> str:
        """What is promised, in words."""
        outcome = (
            "certified"
            if self.threshold is not None
            else "needs more"
            if self.needed
            else "hopeless"
        )
        outcome = outcome if self.answered else "unsure"
        return TEXTS["abstention"][outcome].format(abstention=self)

    @property
    def voided_by(self) -> str:
        """What makes that empty, in words."""
        return TEXTS["abstention"]["voided_by"]


def certify_abstention(
    confidence: Sequence[float], wrong: Sequence[bool], risk: float, kept: float = 0.9
) -> Abstention:
    """The lowest threshold at which answered problems are wrong at most `risk` of the time, with
    probability `kept`.

    One confidence in [0, 1] and one label per problem; a problem without any answer has confidence
    nan. Given how many are answered, the wrong ones of a threshold are binomial, so its p-value is
    exact. Thresholds are twentieths, tried from 1 down and from .6 down until one fails; so their
    order does not depend on the data.

    :raises CalibrationInputError: without problems, for a confidence that is none, `risk` or `kept`
        outside (0, 1).
    """
    check_fraction("risk", risk)
    check_fraction("kept", kept)
    held = np.asarray(confidence, float)
    bad = np.asarray(wrong, bool)
    if not held.size or held.shape != bad.shape or held.ndim != 1:
        raise CalibrationInputError(
            "labelled problems", held.size, "a confidence and a label for each, at least one"
        )
    if ((held < 0) | (held > 1)).any():
        raise CalibrationInputError(
            "confidence", float(held[(held < 0) | (held > 1)][0]), "a number from 0 to 1, or nan"
        )
    share = (1 - kept) / len(_STARTS)
    walks = [list(_thresholds(held, bad, start)) for start in _STARTS]
    passed = [walk[place] for walk in walks for place in rejected(_p_values(walk, risk), share)]
    if passed:
        threshold, answered, mistaken = min(passed)
        return Abstention(risk, kept, held.size, threshold, answered, mistaken)
    found = [(_needed(held.size, n, k, risk, share), n, k) for (_, n, k), *_ in walks]
    needed, answered, mistaken = min(found, key=lambda row: (row[0] or math.inf, row[1]))
    return Abstention(risk, kept, held.size, None, answered, wrong=mistaken, needed=needed)


def _thresholds(
    held: NDArray[np.float64], bad: NDArray[np.bool_], start: int
) -> Iterator[tuple[float, int, int]]:
    """Each threshold with how many problems it answers, and how many of these are wrong."""
    for step in range(start, -1, -1):
        answered = held >= step / 20 - 1e-9
        yield step / 20, int(answered.sum()), int((answered & bad).sum())


def _p_values(walk: Sequence[tuple[float, int, int]], risk: float) -> list[float]:
    _, answered, wrong = np.array(walk).T
    return list(map(float, binomial_cdf(wrong, answered, risk)))


def _needed(problems: int, answered: int, wrong: int, risk: float, share: float) -> int | None:
    """About how many problems would do, if as many of them were answered and wrong."""
    enough = problems_needed(wrong / answered, risk, share) if answered else None
    return None if enough is None else max(problems + 1, math.ceil(enough * problems / answered))
