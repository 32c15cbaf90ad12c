"""Rates of graded samples, such as pass@k and maj@k, and a run's scorecard.

The last part measures how well a score finds the chunks of wrong rollouts within each question.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike

from atts.errors import OptionError
from atts.evaluators.metrics.intervals import (
    Estimate,
    Floats,
    Ints,
    check_level,
    mean_estimate,
    reach,
    undefined_estimate,
)
from atts.sampling import binomial_pmf, hypergeometric_tail


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of samples `n` and the number of correct samples `c` of each problem."""

    n: Ints
    c: Ints


def count(correct: Sequence[Sequence[bool | None]]) -> Counts:
    """Count the samples and the correct samples per problem; None marks an unknown verdict.

    Only the samples in `correct` are counted, even if the run was configured for more.
    """
    n = np.array([len(row) for row in correct], dtype=np.int64)
    c = np.array([sum(bool(one) for one in row) for row in correct], dtype=np.int64)
    return Counts(n, c)


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """Return an unbiased estimate, per problem, of the probability that any of k samples is
    correct.

    It is NaN if n < k.

    Samples are drawn without replacement.

    >>> pass_at_k([4, 4, 1], [0, 2, 1], 2).round(4).tolist()
    [0.0, 0.8333, nan]
    """
    return 1 - pass_hat_k(n, np.subtract(n, c), k)


def pass_hat_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """Return pass^k, the probability that all of k samples are correct, per problem; NaN if n < k."""
    return g_pass_at_k(n, c, k, 1.0)


def g_pass_at_k(n: ArrayLike, c: ArrayLike, k: int, tau: float) -> Floats:
    """Return G-pass@k, the probability that a share tau of k samples, and at least one, is correct.

    For tau near 0 it is pass@k, for tau = 1 it is pass^k, and it is NaN if n < k. Raises
    OptionError for a tau outside [0, 1], a k below 1 and impossible counts.
    """
    if not 0 <= tau <= 1:
        raise OptionError("tau", f"{tau!r} is not between 0 and 1")
    if k < 1:
        raise OptionError("k", f"{k} is not at least 1")
    counts = np.atleast_1d(n)
    right = np.atleast_1d(c)
    if (right > counts).any() or (right < 0).any():
        raise OptionError(
            "c", "the number of correct samples is negative or larger than the number of samples"
        )
    # exact fractions, because in floats 0.28 * 25 is 7.000000000000001, whose ceiling is 8
    least = max(1, math.ceil(Fraction(str(tau)) * k))
    return hypergeometric_tail(least, counts, right, k)


def avg_at_n(counts: Counts) -> Floats:
    """Return the share of correct samples of each problem (pass@1); NaN if a problem has no
    samples.
    """
    return np.where(counts.n > 0, counts.c / np.maximum(counts.n, 1), np.nan)


def rate(values: ArrayLike, n: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Return the mean of one value per problem with its interval; `n` has the numbers of samples.

    If the value of a problem is NaN, because it has too few samples, the mean is undefined.
    """
    array = np.asarray(values, dtype=np.float64)
    counts = np.asarray(n, dtype=np.int64)
    estimate = mean_estimate(array, int(counts.sum()), level=level)
    missing = int(np.isnan(array).sum())
    if missing:
        note = f"too few samples in {missing} of {array.size} problems"
        return replace(estimate, note=note)
    return estimate


@dataclass(frozen=True, slots=True)
class Votes:
    """The vote of one problem: the sizes and values of the classes of equal answers, and the number
    of samples without an answer.
    """

    sizes: tuple[int, ...]
    values: tuple[float, ...]
    blanks: int = 0

    @property
    def samples(self) -> int:
        """Return the number of samples, including those without an answer."""
        return sum(self.sizes) + self.blanks


def votes(labels: Sequence[Hashable | None], correct: Sequence[bool | float | None]) -> Votes:
    """Return the classes with their values; a class's value is the share of its correct members.

    A verdict of None counts as wrong; a sample without a label does not vote.
    """
    if len(labels) != len(correct):
        raise OptionError("labels", f"there are {len(labels)} labels for {len(correct)} verdicts")
    members: defaultdict[Hashable | None, list[float]] = defaultdict(list)
    for label, one in zip(labels, correct, strict=True):
        members[label].append(float(one or 0))
    silent = len(members.pop(None, ()))
    return Votes(
        tuple(map(len, members.values())),
        tuple(sum(one) / len(one) for one in members.values()),
        silent,
    )


def maj_at_k(problems: Sequence[Votes], k: int) -> Floats:
    """Return the probability, per problem, that the majority of k samples is correct; NaN if n < k.

    The k samples are drawn without replacement. Tied classes win with equal probability; a draw in
    which no sample has an answer is wrong. The order in which samples finished does not matter.
    """
    if k < 1:
        raise OptionError("k", f"{k} is not at least 1")
    result = np.full(len(problems), np.nan)
    samples = np.array([problem.samples for problem in problems], dtype=np.int64)
    for n in np.unique(samples[samples >= k]).tolist():
        indices = np.flatnonzero(samples == n).tolist()
        group = [problems[index] for index in indices]
        result[indices] = [_whole(votes) for votes in group] if n == k else _expected(group, n, k)
    return result


def _whole(problem: Votes) -> float:
    """Return the value of the class that wins the vote of all samples; ties are averaged."""
    most = max(problem.sizes, default=0)
    winners = [
        value for size, value in zip(problem.sizes, problem.values, strict=True) if size == most
    ]
    return sum(winners) / len(winners) if winners else 0.0


def _expected(group: Sequence[Votes], n: int, k: int) -> Floats:
    """Return, for problems with n > k samples, the sum over classes of the value times the
    probability to win.
    """
    rows = [
        (at, label)
        for at, problem in enumerate(group)
        for label, value in enumerate(problem.values)
        if value > 0
    ]
    of = [group[at] for at, _ in rows]
    sizes = np.array([group[at].sizes[label] for at, label in rows], dtype=np.int64)
    # number of the other classes of each size
    rivals = np.array(
        [np.bincount(problem.sizes, minlength=n + 1) for problem in of], np.float64
    ).reshape(-1, n + 1)
    rivals[np.arange(len(rows)), sizes] -= 1
    shares = _win_shares(
        sizes, rivals, np.array([problem.blanks for problem in of], dtype=np.int64), n, k
    )
    total = np.zeros(len(group))
    np.add.at(
        total,
        [at for at, _ in rows],
        shares * np.array([group[at].values[label] for at, label in rows]),
    )
    return np.clip(total, 0.0, 1.0)


def _win_shares(sizes: Ints, rivals: Floats, silent: Ints, n: int, k: int) -> Floats:
    """Return for each row the expected share of the win that its class gets in a vote of k of n
    samples.

    The row's class has `sizes` of the n samples. The share is 1 / (1 + tied rivals), or 0 if a
    rival class has more samples among the k.

    The result is exact, but no subset is enumerated. For each number j of draws of the row's class,
    the generating function of the rivals is evaluated at roots of unity. The share 1 / (ties + 1)
    is the integral of w^ties over [0, 1], which Gauss-Legendre nodes compute exactly. Draws are
    binomial with probability k/n per sample, on the condition that there are k draws in total. This
    is the same distribution, but its numbers do not overflow.
    """
    chance = k / n
    # a real polynomial of degree <= n needs only half of the n + 1 roots; the other values are
    # conjugates
    roots = np.exp(-2j * np.pi * np.arange((n + 1) // 2 + 1) / (n + 1))
    rival_sizes = np.flatnonzero(rivals.any(axis=0))
    # for each size of a rival: the part with fewer than j draws
    below = np.zeros((rival_sizes.size, roots.size), dtype=np.complex128)
    quiet = silent[:, None] * np.log(1 - chance + chance * roots)[None, :]
    result = np.zeros(sizes.size)
    for j in range(1, min(k, int(sizes.max(initial=0))) + 1):
        below += binomial_pmf(j - 1, rival_sizes, chance)[:, None] * roots ** (j - 1)
        exactly = binomial_pmf(j, rival_sizes, chance)[:, None] * roots**j
        rows = np.flatnonzero(sizes >= j)
        nodes, weights = np.polynomial.legendre.leggauss((k - j) // j // 2 + 1)
        spectrum = np.zeros((rows.size, roots.size), dtype=np.complex128)
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            factors = below + node * exactly
            # products are computed as sums of logarithms; a factor of 0 gets a finite logarithm, so
            # that a product without factors is 1, not NaN
            logs = np.log(np.where(np.abs(factors) < 1e-200, 1e-200, factors))
            spectrum += weight * np.exp(rivals[np.ix_(rows, rival_sizes)] @ logs + quiet[rows])
        result[rows] += (
            binomial_pmf(j, sizes[rows], chance) * np.fft.irfft(spectrum, n + 1, axis=1)[:, k - j]
        )
    return result / float(binomial_pmf(k, n, chance))


SampleStatus = Literal["graded", "cut", "no answer", "unscored", "timeout"]
"""The status of a sample: graded, cut at a limit, without an answer, not scored, or timed out."""


def status_of(
    answer: str | None, finish: str | None, verdict: str | None, rule: str
) -> SampleStatus:
    """Return the status of a sample; `finish` is the reason why it ended, and `rule` the rule that
    decided its verdict.
    """
    if answer is None:
        return "cut" if finish in ("turns", "tokens") else "no answer"
    if verdict == "unscored":
        return "timeout" if "timeout" in rule else "unscored"
    return "graded"


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one problem: whether each is correct (None if unknown), its class in the vote,
    and its status.

    `labels` number the classes of equivalent answers, with None for a sample without an answer; if
    `labels` is missing, there is no vote. Raises OptionError if the lengths differ.
    """

    problem: str
    correct: tuple[bool | None, ...]
    labels: tuple[Hashable | None, ...] = ()
    statuses: tuple[SampleStatus, ...] = ()

    def __post_init__(self) -> None:
        for name in ("labels", "statuses"):
            values: tuple[object, ...] = getattr(self, name)
            if values and len(values) != len(self.correct):
                problem = f"{self.problem} has {len(values)} {name} for {len(self.correct)} samples"
                raise OptionError(name, problem)
        unknown = [status for status in self.statuses if status not in get_args(SampleStatus)]
        if unknown:
            raise OptionError("status", f"{unknown[0]!r} is not a status", get_args(SampleStatus))


class GradedSample(Protocol):
    """A finished sample, as an argument of `samples_of`.

    A sample has an answer (or None), the reason why it ended, a verdict ("correct", "wrong" or
    "unscored"; None if it was not graded) and the rule of the grader.
    """

    @property
    def answer(self) -> str | None: ...
    @property
    def finish(self) -> str: ...
    @property
    def verdict(self) -> str | None: ...
    @property
    def rule(self) -> str: ...


Grouper = Callable[[Sequence[str]], Sequence[int]]
"""A function that returns, for each text, the number of its class of equal texts."""


def samples_of(problem: str, samples: Sequence[GradedSample], group: Grouper) -> Samples | None:
    """Return the samples of one problem for `score`; None if a sample is not graded, or there is
    none.
    """
    if not samples or any(one.verdict is None for one in samples):
        return None
    return Samples(
        problem,
        tuple(None if one.verdict == "unscored" else one.verdict == "correct" for one in samples),
        answer_classes([one.answer for one in samples], group),
        tuple(status_of(one.answer, one.finish, one.verdict, one.rule) for one in samples),
    )


def answer_classes(answers: Sequence[str | None], group: Grouper) -> tuple[int | None, ...]:
    """Return the class of each answer; None if there is no answer. Of equal texts only one is
    compared.
    """
    texts = list(dict.fromkeys(answer for answer in answers if answer is not None))
    classes = dict(zip(texts, group(texts), strict=True))
    return tuple(None if answer is None else classes[answer] for answer in answers)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The number of samples of a rate, and the numbers of samples that were not graded, by reason."""

    problems: int
    samples: int
    cut: int
    no_answer: int
    unscored: int
    timed_out: int

    def __str__(self) -> str:
        samples = "sample" if self.samples == 1 else "samples"
        problems = "problem" if self.problems == 1 else "problems"
        return (
            f"{self.samples:,} {samples} of {self.problems:,} {problems}: {self.cut:,} cut, "
            f"{self.no_answer:,} without answer, {self.unscored:,} unscored, "
            f"{self.timed_out:,} timed out"
        )


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The rates of one run by name, such as "pass@1" and "maj@16", and their coverage."""

    estimates: Mapping[str, Estimate]
    coverage: Coverage


def coverage(problems: Sequence[Samples]) -> Coverage:
    """Count the samples by status; a sample without a status counts as unscored if it has no
    verdict.
    """
    seen = Counter[SampleStatus]()
    for problem in problems:
        if problem.statuses:
            seen.update(problem.statuses)
        else:
            seen.update("unscored" if one is None else "graded" for one in problem.correct)
    return Coverage(
        len(problems),
        seen.total(),
        seen["cut"],
        seen["no answer"],
        seen["unscored"],
        seen["timeout"],
    )


def score(
    problems: Sequence[Samples], *, ks: Sequence[int] | None = None, level: float = 0.95
) -> Scorecard:
    """Return pass@1, and for every k pass@k, maj@k, pass^k and G-pass@k at one half.

    All rates are unbiased, with intervals over problems. By default `ks` are the powers of two up
    to the smallest number of samples of a problem, and that number itself. Unscored samples count
    as wrong; each rate says how much it would change if they were correct.
    """
    counts = count([problem.correct for problem in problems])
    fewest = int(counts.n.min(initial=10**9)) if problems else 0
    estimates = {"pass@1": rate(avg_at_n(counts), counts.n, level=level)}
    unknown = sum(one is None for problem in problems for one in problem.correct)
    if unknown:
        best = count([[one is None or one for one in problem.correct] for problem in problems])
        estimates["pass@1"] = estimates["pass@1"].with_best_case(
            rate(avg_at_n(best), best.n, level=level), unknown
        )
    if ks is None:
        doubled = {1 << power for power in range(1, fewest.bit_length())}
        ks = sorted(doubled | {fewest} - {0})
    for k in ks:
        for name, values in _at_k(problems, counts, k).items():
            estimates[name] = rate(values, counts.n, level=level)
    return Scorecard(estimates, coverage(problems))


def _at_k(problems: Sequence[Samples], counts: Counts, k: int) -> dict[str, Floats]:
    """Return every rate at k by name, as one value per problem."""
    if k < 2:
        return {}
    named = {
        f"pass@{k}": pass_at_k(counts.n, counts.c, k),
        f"pass^{k}": pass_hat_k(counts.n, counts.c, k),
    }
    named[f"G-pass@{k}(1/2)"] = g_pass_at_k(counts.n, counts.c, k, 0.5)
    if problems and all(problem.labels for problem in problems):
        classes = [votes(problem.labels, problem.correct) for problem in problems]
        named[f"maj@{k}"] = maj_at_k(classes, k)
    return named


@dataclass(frozen=True, slots=True)
class LabelledChunk:
    """The score of a chunk (larger is worse), and whether the chunk's rollout was wrong."""

    question: Hashable
    score: float
    is_wrong: bool


def within_question_auroc(chunks: Sequence[LabelledChunk], *, level: float = 0.95) -> Estimate:
    """Return the probability that a chunk of a wrong rollout scores worse than a chunk of a correct
    rollout of the same question.

    A tie counts as one half, so random scores give 0.5. The interval is over questions, so the
    chunks of one question or rollout stay together.
    """
    wins: list[float] = []
    pairs: list[float] = []
    for wrong, right in _mixed(chunks):
        ordered = np.sort(right)
        below = np.searchsorted(ordered, wrong, "left")
        up_to = np.searchsorted(ordered, wrong, "right")
        wins.append(float((below + up_to).sum()) / 2)
        pairs.append(float(len(wrong) * len(right)))
    return _ratio(wins, pairs, len(chunks), level, centre=0.5, ends=(0.0, 1.0))


def gain_over_coin(
    chunks: Sequence[LabelledChunk], rate: float, *, level: float = 0.95
) -> Estimate:
    """Return how many more of the wrong rollouts' chunks the score escalates than a coin, as a
    share.

    In each question the share `rate` of the chunks with the worst scores is escalated; a coin of
    this rate escalates the share `rate` of the wrong rollouts' chunks. For an uninformative score
    the difference of the two shares is 0. A chunk at the boundary, and chunks with equal scores,
    count as a fraction.

    :raises OptionError: if the rate is outside [0, 1].
    """
    if not 0 <= rate <= 1:
        raise OptionError("rate", f"{rate!r} is outside [0, 1]")
    caught: list[float] = []
    total: list[float] = []
    for wrong, right in _mixed(chunks):
        taken = _share_escalated(wrong, right, rate)
        caught.append(taken - rate * len(wrong))
        total.append(float(len(wrong)))
    return _ratio(caught, total, len(chunks), level, centre=0.0, ends=(-1.0, 1.0))


def _mixed(chunks: Sequence[LabelledChunk]) -> list[tuple[Floats, Floats]]:
    """Return the scores of wrong and of correct rollouts, for questions that have both.

    NaN ranks worst, because a gate escalates a chunk without a score.
    """
    wrong: dict[Hashable, list[float]] = {}
    right: dict[Hashable, list[float]] = {}
    for chunk in chunks:
        side = wrong if chunk.is_wrong else right
        side.setdefault(chunk.question, []).append(
            math.inf if math.isnan(chunk.score) else chunk.score
        )
    return [
        (np.asarray(wrong[question], np.float64), np.asarray(right[question], np.float64))
        for question in wrong
        if question in right
    ]


def _share_escalated(wrong: Floats, right: Floats, rate: float) -> float:
    """Return how many scores of wrong rollouts are in the worst share `rate` of all scores; ties
    count as fractions.
    """
    both = np.concatenate([wrong, right])
    left = rate * len(both)
    count = 0.0
    for score in np.unique(both)[::-1]:
        tied = float((both == score).sum())
        part = min(1.0, left / tied)
        count += part * float((wrong == score).sum())
        left -= part * tied
        if left <= 0:
            break
    return count


def _ratio(
    parts: Sequence[float],
    wholes: Sequence[float],
    samples: int,
    level: float,
    *,
    centre: float,
    ends: tuple[float, float],
) -> Estimate:
    """Return a ratio of sums over questions, with a t interval over questions.

    The variance includes an additional question of average weight, whose value is `centre`, the
    value of an uninformative score. Without this question, a few questions that agree by chance
    would give an interval of width 0. A question's weight is its number of pairs, so the degrees of
    freedom come from the effective number of questions.
    """
    check_level(level)
    count = len(parts)
    if count < 2:
        note = "two questions with both wrong and correct rollouts are needed"
        return undefined_estimate(count, samples, level, note)
    numerator = np.asarray(parts, np.float64)
    weights = np.asarray(wholes, np.float64)
    total = float(weights.sum())
    value = float(numerator.sum()) / total
    usual = float((weights**2).mean())
    squares = float(((numerator - value * weights) ** 2).sum()) + usual * (value - centre) ** 2
    effective = total**2 / float((weights**2).sum())
    freedom = max(1.0, effective - 1)
    error = math.sqrt(squares * effective / freedom) / total
    half = reach(freedom, level) * error
    low = max(ends[0], value - half)
    high = min(ends[1], value + half)
    return Estimate(value, low, high, count, samples, "t over questions", level=level)
