"""Certify policies and abstention thresholds by Learn-then-Test, with one p-value per policy or
threshold.
"""

# All tests use one loss per problem, because the samples of one problem are correlated. All
# guarantees assume that later problems come from the same distribution as the calibration problems
# (Angelopoulos et al., "Learn then Test", 2021). Each policy has a p-value for the null hypothesis
# "the true mean loss is above epsilon". Fixed-sequence testing keeps the probability of any false
# certificate below delta.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atts.calibration.conformal import check_fraction
from atts.calibration.guarantees import TEXTS, with_spaced_percent
from atts.errors import CalibrationInputError
from atts.sampling import beta_quantile, beta_upper_quantile, binomial_cdf, normal_quantile

Losses = NDArray[np.float64]

PValue = Callable[[Sequence[float]], float]
"""A function from losses to the p-value of the hypothesis "the true mean loss is too large"."""

# Probability that the confidence interval below does not contain the true value. The interval is
# for the share of problems on which two runs differ.
_INTERVAL_MISS = 0.001
# Confidence thresholds are tested from a start value downwards, in steps of 1/20. There are two
# start values, 20/20 and 12/20, and each sequence of tests gets half of delta. The sequence from 1
# finds high thresholds. The sequence from 0.6 is for data in which a few wrong answers with high
# confidence stop the first sequence.
_STARTS = (20, 12)


def checked_losses(losses: ArrayLike, low: float = 0.0) -> Losses:
    """Return one loss in [low, 1] per problem, as an array.

    :raises CalibrationInputError: if there is no loss, or a loss is outside [low, 1].
    """
    array = np.asarray(losses, float)
    if array.ndim != 1 or not len(array):
        raise CalibrationInputError(
            "losses", array.shape, "at least one problem, and exactly one loss for each problem"
        )
    # Comparisons with NaN are False, so NaN is "outside" too.
    outside = ~((array >= low) & (array <= 1))
    if outside.any():
        raise CalibrationInputError("loss", float(array[outside][0]), f"a number in [{low:g}, 1]")
    return array


def lost_answers(target_right: ArrayLike, policy_right: ArrayLike) -> Losses:
    """Return each problem's loss: how often the target alone is correct and the policy is wrong.

    Each array has one row per problem, or one value per problem. If a row has a column for each
    paired sample, the loss is the fraction of lost samples.

    >>> lost_answers([[1, 1], [0, 1]], [[1, 0], [0, 1]]).tolist()
    [0.5, 0.0]
    """
    target, policy = _answers(target_right, policy_right)
    return _by_problem((target & ~policy).astype(float))


def net_losses(target_right: ArrayLike, policy_right: ArrayLike) -> Losses:
    """Return the net loss of each problem, in [-1, 1].

    The net loss is the accuracy of the target alone on this problem, minus the accuracy of the
    policy. Even two runs of the same models differ in single answers because of sampling. Such
    random wins and losses cancel in the net loss.

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
            "answers",
            (target.shape, policy.shape),
            "two arrays of the same shape, with one row per problem",
        )
    return target, policy


def _by_problem(values: Losses) -> Losses:
    if values.ndim == 1:
        return values
    return np.asarray(values.mean(axis=1), float)


def binomial_p_value(losses: ArrayLike, epsilon: float) -> float:
    """Return P(Bin(n, epsilon) <= number of losses), where n is the number of problems.

    This is an exact p-value of "the mean loss is at least epsilon", for losses of 0 or 1 on
    independent problems.

    :raises CalibrationInputError: if a loss is neither 0 nor 1.
    """
    array = checked_losses(losses)
    if not ((array == 0) | (array == 1)).all():
        raise CalibrationInputError("loss", "a fraction", "0 or 1 for the exact binomial test")
    return float(binomial_cdf(array.sum(), len(array), epsilon))


def betting_p_value(losses: ArrayLike, epsilon: float) -> float:
    """Return a p-value from betting against "the mean loss is at least epsilon".

    The capital is prod(1 + b_i (epsilon - loss_i)), where each bet b_i is fixed before its loss is
    seen. Under the hypothesis the capital is a supermartingale, so 1 / (its maximum) is a p-value
    (Ville; Waudby-Smith and Ramdas, 2024). This p-value is smaller than that of Hoeffding-Bentkus
    if losses are fractions of small variance. The order of problems must not depend on their
    losses.
    """
    array = checked_losses(losses)
    seen = np.arange(1, len(array) + 1)
    # For each loss, compute the mean and the variance of all losses before it. The first loss has
    # none before it, so put an artificial loss in front. Its mean is epsilon, and its variance is
    # epsilon * (1 - epsilon).
    mean = (epsilon + _sums_before(array)) / seen
    variance = (epsilon * (1 - epsilon) + _sums_before((array - mean) ** 2)) / seen
    gain = epsilon - mean
    # These bets are close to those that make the capital grow fastest. The capital stays positive
    # because each bet is below 1 / (1 - epsilon).
    bets = np.clip(gain / np.maximum(variance + gain * gain, 1e-9), 0.0, 0.75 / (1 - epsilon))
    # With a bet of 0 the capital cannot grow, so bet at least 0.1.
    bets = np.maximum(bets, 0.1)
    capital = np.cumsum(np.log1p(bets * (epsilon - array)))
    return math.exp(-max(0.0, float(capital.max())))


def _sums_before(values: Losses) -> Losses:
    """Return, for each value of the array, the sum of all values before it."""
    return np.cumsum(values) - values


def risk_p_value(losses: ArrayLike, epsilon: float) -> float:
    """Return the p-value of "the true mean loss exceeds epsilon".

    The exact binomial test is used if all losses are 0 or 1, and the betting test if some are
    fractions.

    :raises CalibrationInputError: for losses outside [0, 1] or an epsilon outside (0, 1).
    """
    check_fraction("epsilon", epsilon)
    array = checked_losses(losses)
    if ((array == 0) | (array == 1)).all():
        return binomial_p_value(array, epsilon)
    return betting_p_value(array, epsilon)


def net_p_value(losses: ArrayLike, epsilon: float) -> float:
    """Return the p-value of "the mean net loss is at least epsilon", from one net loss in [-1, 1]
    per problem.

    If all net losses are -1, 0 or 1, the test is exact. The probability of a mean this low depends
    on the unknown share of problems on which the runs differ. The test takes the largest
    probability over a 99.9 % interval of this share. It adds 0.001, the probability that the
    interval misses the share (Berger and Boos, 1994).

    Other net losses are scaled to [0, 1] for the betting test; then the order of problems must not
    depend on the losses.
    """
    array = checked_losses(losses, -1.0)
    if not np.isin(array, (-1.0, 0.0, 1.0)).all():
        return betting_p_value((array + 1) / 2, (epsilon + 1) / 2)
    n = len(array)
    differing = int(np.count_nonzero(array))
    net = round(float(array.sum()))
    # [low, high] is the Clopper-Pearson interval of the share of problems on which the runs differ.
    low = 0.0
    high = 1.0
    if differing:
        low = float(beta_quantile(_INTERVAL_MISS / 2, differing, n - differing + 1))
    if differing < n:
        high = beta_upper_quantile(_INTERVAL_MISS / 2, differing + 1, n - differing)
    # The mean net loss can be epsilon only if the share of problems with different results is at
    # least epsilon. So smaller shares need not be tried.
    shares = np.linspace(max(low, epsilon), max(high, epsilon), 65)
    worst = max(_chance_of_at_most(net, n, float(share), epsilon) for share in shares)
    return min(1.0, _INTERVAL_MISS + worst)


def _chance_of_at_most(net: int, n: int, differing: float, epsilon: float) -> float:
    """Return the probability that at most `net` more problems are lost than won, of n problems.

    The two runs differ on a share `differing` of the problems. The expected share of lost problems
    exceeds the expected share of won problems by epsilon. Each problem adds -1, 0 or 1 to the sum.
    The distribution of the sum is the inverse Fourier transform of the n-th power of one value's
    characteristic function.
    """
    size = 2 * n + 1
    turn = np.exp(-2j * np.pi * np.arange(n + 1) / size)
    lost = (differing + epsilon) / 2
    won = (differing - epsilon) / 2
    characteristic = (1 - differing + lost * turn + won * turn.conj()) ** n
    # Entry k of the inverse FFT is the probability that the sum is k modulo `size`. Negative sums
    # are therefore at the end, and `roll` moves them to the front.
    probabilities = np.roll(np.fft.irfft(characteristic, size), n)
    return float(np.clip(probabilities[: net + n + 1].sum(), 0.0, 1.0))


def rejected(p_values: Sequence[float], delta: float) -> list[int]:
    """Return the indices of the hypotheses that fixed-sequence testing rejects.

    The test goes down the list, whose order must not depend on the data, and stops at the first
    p-value above delta. A true hypothesis is rejected with probability at most delta, because the
    first true hypothesis of the list must then be rejected too.

    >>> rejected([0.001, 0.04, 0.2, 0.01], 0.1)
    [0, 1]
    """
    return list(takewhile(lambda index: p_values[index] <= delta, range(len(p_values))))


def fewest_problems(epsilon: float, delta: float) -> int:
    """Return the smallest number of problems that can certify epsilon at delta, if no problem has a
    loss.

    This is the smallest n with (1 - epsilon)^n <= delta.

    >>> fewest_problems(0.05, 0.1)
    45
    """
    return math.ceil(math.log(delta) / math.log1p(-epsilon))


def problems_needed(risk: float, epsilon: float, delta: float, limit: int = 10**7) -> int | None:
    """Estimate how many problems are needed to certify epsilon at delta if the observed loss stays
    `risk`.

    The number is None if it is above `limit`, or if `risk` is not below epsilon.
    """
    if risk >= epsilon:
        return None

    def is_enough(n: int) -> bool:
        losses = math.ceil(n * risk - 1e-9)
        return float(binomial_cdf(losses, n, epsilon)) <= delta

    high = fewest_problems(epsilon, delta)
    while not is_enough(high):
        high *= 2
        if high > limit:
            return None
    low = high // 2
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy of a labelled calibration run.

    The losses of all candidates belong to the same problems in the same order; see `lost_answers`.
    The cost may have any unit, such as target tokens per problem.
    """

    gate: str
    rate: float
    losses: Sequence[float]
    cost: float


@dataclass(frozen=True, slots=True)
class Tested:
    """A candidate policy with the result of its test."""

    gate: str
    rate: float
    cost: float
    loss: float
    # p-value of the test; None if the candidate was not tested, because an earlier candidate failed
    p: float | None
    certified: bool


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of a certification: `chosen` is the cheapest certified policy, or None.

    A net certificate also has `superior`: the cheapest policy that was shown to be correct more
    often than the target alone, or None. The statement about `chosen` and the statement about
    `superior` are each true with probability 1 - delta.
    """

    epsilon: float
    delta: float
    problems: int
    chosen: Tested | None
    tested: tuple[Tested, ...]
    # Estimated number of calibration problems that would be enough to certify the safest candidate.
    # None if no number would be enough.
    needed: int | None
    superior: Tested | None = None
    kind: Literal["certificate", "net-certificate"] = "certificate"

    @property
    def guarantee(self) -> str:
        """Return the text of the guarantee."""
        if self.chosen:
            outcome = "certified"
        elif self.needed is not None:
            outcome = "needs more"
        else:
            outcome = "hopeless"
        text = TEXTS[self.kind][outcome]
        if self.superior:
            text += TEXTS["net-certificate"]["superior"]
        return with_spaced_percent(text.format(certificate=self, kept=1 - self.delta))

    @property
    def voided_by(self) -> str:
        """Return the conditions that void the guarantee."""
        return TEXTS[self.kind]["voided_by"]


def certify(candidates: Sequence[Candidate], epsilon: float, delta: float = 0.1) -> Certificate:
    """Certify the cheapest policy whose true loss is at most epsilon, with probability 1 - delta.

    Each gate's policies are tested from the highest rate down, until a policy fails the test;
    `delta` is shared equally among the gates (Bonferroni). The test is valid because this order
    depends on the rates only, never on the losses.

    :raises CalibrationInputError: if there are no candidates, if losses differ in length or are
    outside [0, 1], or if epsilon or delta is outside (0, 1).
    """
    chains, share = _chains(candidates, epsilon, delta)
    tested = _test_chains(chains, share, lambda losses: risk_p_value(losses, epsilon))
    safest = min(float(checked_losses(chain[0].losses).mean()) for chain in chains)
    needed = problems_needed(safest, epsilon, share)
    outcome = Certificate(epsilon, delta, len(chains[0][0].losses), None, tested, needed)
    return _with_choice(outcome, share)


def certify_net(candidates: Sequence[Candidate], epsilon: float, delta: float = 0.1) -> Certificate:
    """Certify the cheapest policy that is correct at most epsilon less often than the target.

    The losses are net losses (`net_losses`): the sampling noise of both runs cancels, so that a
    policy as good as the target can be certified. A second sequence of tests finds out whether a
    policy is better than the target.

    :raises CalibrationInputError: as in `certify`, except that net losses may be in [-1, 1].
    """
    chains, share = _chains(candidates, epsilon, delta)
    tested = _test_chains(chains, share, lambda losses: net_p_value(losses, epsilon))
    superior = _cheapest(_test_chains(chains, share, lambda losses: net_p_value(losses, 0.0)))
    counts = [_net_problems_needed(chain[0].losses, epsilon, share) for chain in chains]
    outcome = Certificate(
        epsilon,
        delta,
        len(chains[0][0].losses),
        None,
        tested,
        needed=min((count for count in counts if count is not None), default=None),
        superior=superior,
        kind="net-certificate",
    )
    return _with_choice(outcome, share)


def _with_choice(outcome: Certificate, share: float) -> Certificate:
    """Return the outcome with the cheapest certified policy in `chosen`.

    If no policy is certified and `needed` is known, `needed` is raised to at least one more than
    the number of tested problems.
    """
    chosen = _cheapest(outcome.tested)
    needed = outcome.needed
    if needed is not None and chosen is None:
        needed = max(needed, outcome.problems + 1, fewest_problems(outcome.epsilon, share))
    return replace(outcome, chosen=chosen, needed=needed)


def _net_problems_needed(losses: Sequence[float], epsilon: float, share: float) -> int | None:
    """Estimate how many problems with losses like these are needed to certify epsilon; None if the
    mean net loss is not below epsilon.

    The estimate uses the normal approximation of the mean net loss.
    """
    array = np.asarray(losses, float)
    gap = epsilon - float(array.mean())
    if gap <= 0:
        return None
    quantile = -normal_quantile(share)
    return max(1, math.ceil(float(array.var()) * (quantile / gap) ** 2))


def _chains(
    candidates: Sequence[Candidate], epsilon: float, delta: float
) -> tuple[list[list[Candidate]], float]:
    """Check the candidates; return one list per gate, sorted from the highest rate down. Also
    return the share of delta that each gate gets.
    """
    if not candidates:
        raise CalibrationInputError("candidates", [], "at least one policy")
    if len({len(candidate.losses) for candidate in candidates}) > 1:
        raise CalibrationInputError(
            "candidates",
            "losses that differ in length",
            "the losses of all candidates on the same problems",
        )
    check_fraction("epsilon", epsilon)
    check_fraction("delta", delta)
    if any(not math.isfinite(candidate.cost) for candidate in candidates):
        raise CalibrationInputError("cost", math.nan, "a finite number")
    ordered = sorted(candidates, key=lambda candidate: (candidate.gate, -candidate.rate))
    chains = [list(chain) for _, chain in groupby(ordered, key=lambda candidate: candidate.gate)]
    return chains, delta / len(chains)


def _cheapest(tested: Sequence[Tested]) -> Tested | None:
    certified = [row for row in tested if row.certified]
    return min(certified, key=lambda row: (row.cost, row.loss), default=None)


def _test_chains(
    chains: list[list[Candidate]], share: float, p_value: PValue
) -> tuple[Tested, ...]:
    tested = list[Tested]()
    for chain in chains:
        tested.extend(_test_chain(chain, share, p_value))
    return tuple(tested)


def _test_chain(chain: list[Candidate], share: float, p_value: PValue) -> list[Tested]:
    p_values = list[float]()
    for candidate in chain:
        p_values.append(p_value(candidate.losses))
        # Testing stops at the first candidate that fails, so later candidates need no p-value.
        if p_values[-1] > share:
            break
    num_rejected = len(rejected(p_values, share))
    rows = list[Tested]()
    for index, candidate in enumerate(chain):
        rows.append(
            Tested(
                candidate.gate,
                candidate.rate,
                candidate.cost,
                loss=float(np.mean(candidate.losses)),
                p=p_values[index] if index < len(p_values) else None,
                certified=index < num_rejected,
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Abstention:
    """The result of certifying a confidence threshold; answers with a lower confidence are
    withheld.

    `threshold` is None if no threshold can be certified. In this case `needed` is the estimated
    number of problems for a certificate, or None if no number suffices. `answered` and `wrong`
    count labelled problems at the certified threshold. If no threshold is certified, they belong to
    the threshold that needs the fewest additional problems.
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
        """Return the text of the guarantee."""
        if not self.answered:
            outcome = "unsure"
        elif self.threshold is not None:
            outcome = "certified"
        elif self.needed:
            outcome = "needs more"
        else:
            outcome = "hopeless"
        return with_spaced_percent(TEXTS["abstention"][outcome].format(abstention=self))

    @property
    def voided_by(self) -> str:
        """Return the conditions that void the guarantee."""
        return TEXTS["abstention"]["voided_by"]


@dataclass(frozen=True, slots=True)
class _Step:
    """A confidence threshold with its counts of answered problems and of wrong answers."""

    threshold: float
    answered: int
    wrong: int


def certify_abstention(
    confidence: Sequence[float], wrong: Sequence[bool], risk: float, kept: float = 0.9
) -> Abstention:
    """Certify the lowest confidence threshold at which the share of wrong answers among the given
    answers is at most `risk`.

    The guarantee holds with probability `kept` over the random choice of the labelled problems.
    Each problem has one confidence in [0, 1] and one label; a problem without an answer has
    confidence nan. Given the number of answered problems, the number of wrong answers is binomial,
    so the p-value of each threshold is exact.

    The thresholds are multiples of 1/20. One sequence of tests goes down from 1 and another from
    0.6, each until a test fails. The order of the tests therefore does not depend on the data.

    :raises CalibrationInputError: if there are no problems, a confidence is outside [0, 1], or
        `risk` or `kept` is outside (0, 1).
    """
    check_fraction("risk", risk)
    check_fraction("kept", kept)
    confidences = np.asarray(confidence, float)
    is_wrong = np.asarray(wrong, bool)
    problems = confidences.size
    if not problems or confidences.shape != is_wrong.shape or confidences.ndim != 1:
        raise CalibrationInputError(
            "labelled problems",
            problems,
            "at least one problem, and exactly one confidence and one label for each problem",
        )
    outside = (confidences < 0) | (confidences > 1)
    if outside.any():
        first = float(confidences[outside][0])
        raise CalibrationInputError("confidence", first, "a number from 0 to 1, or NaN")
    share = (1 - kept) / len(_STARTS)
    walks = [list(_steps_down(confidences, is_wrong, start)) for start in _STARTS]
    certified = list[_Step]()
    for walk in walks:
        answered = np.array([step.answered for step in walk])
        mistaken = np.array([step.wrong for step in walk])
        p_values = [float(p) for p in binomial_cdf(mistaken, answered, risk)]
        certified.extend(walk[index] for index in rejected(p_values, share))
    if certified:
        best = min(certified, key=lambda step: (step.threshold, step.answered, step.wrong))
        return Abstention(risk, kept, problems, best.threshold, best.answered, best.wrong)
    # No threshold was certified. Each sequence of tests begins with its highest threshold. Of these
    # two thresholds, report the one that would need fewer additional problems.
    firsts = [walk[0] for walk in walks]
    needed = [_abstention_problems_needed(problems, step, risk, share) for step in firsts]
    nearest = min(
        range(len(firsts)),
        key=lambda index: (needed[index] or math.inf, firsts[index].answered),
    )
    step = firsts[nearest]
    return Abstention(risk, kept, problems, None, step.answered, step.wrong, needed=needed[nearest])


def _steps_down(
    confidences: NDArray[np.float64], is_wrong: NDArray[np.bool_], start: int
) -> Iterator[_Step]:
    """Yield the counts of answered problems and of wrong answers at each threshold, from `start` /
    20 down to 0 in steps of 1/20.
    """
    for twentieths in range(start, -1, -1):
        # The comparison is False for NaN, so a problem with confidence NaN counts as not answered.
        is_answered = confidences >= twentieths / 20 - 1e-9
        num_wrong = int((is_answered & is_wrong).sum())
        yield _Step(twentieths / 20, int(is_answered.sum()), num_wrong)


def _abstention_problems_needed(
    problems: int, step: _Step, risk: float, share: float
) -> int | None:
    """Estimate how many problems certify this threshold; None if no number suffices."""
    if not step.answered:
        return None
    answers = problems_needed(step.wrong / step.answered, risk, share)
    if answers is None:
        return None
    return max(problems + 1, math.ceil(answers * problems / step.answered))
