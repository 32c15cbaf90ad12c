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

from atts.errors import OptionError, counted
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
    """For each problem, the number of samples `n` and the number of correct samples `c`."""

    n: Ints
    c: Ints


def count(correct: Sequence[Sequence[bool | None]]) -> Counts:
    """Count the samples and the correct samples of each problem. A verdict of None counts as not
    correct.

    Only existing samples are counted, even if the run was configured for more.
    """
    n = np.array([len(row) for row in correct], dtype=np.int64)
    c = np.array([sum(bool(one) for one in row) for row in correct], dtype=np.int64)
    return Counts(n, c)


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """Return pass@k for each problem, the probability that at least one of k samples is correct.

    The estimate is unbiased: k of the n samples are drawn without replacement. It is NaN if n < k.

    >>> pass_at_k([4, 4, 1], [0, 2, 1], 2).round(4).tolist()
    [0.0, 0.8333, nan]
    """
    return 1 - pass_hat_k(n, np.subtract(n, c), k)


def pass_hat_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """Return pass^k for each problem: the probability that all of k samples are correct; NaN if n <
    k.
    """
    return g_pass_at_k(n, c, k, 1.0)


def g_pass_at_k(n: ArrayLike, c: ArrayLike, k: int, tau: float) -> Floats:
    """Return G-pass@k for each problem: the probability that at least one of k samples is correct,
    and at least the fraction `tau` of them.

    It is equal to pass@k for `tau` near 0, equal to pass^k for `tau` = 1, and NaN if n < k. Raises
    OptionError for a `tau` outside [0, 1], a k below 1 and impossible counts.
    """
    if not 0 <= tau <= 1:
        raise OptionError("tau", f"{tau!r} is not between 0 and 1")
    if k < 1:
        raise OptionError("k", f"{k} is below 1; give at least 1")
    counts = np.atleast_1d(n)
    right = np.atleast_1d(c)
    if (right > counts).any() or (right < 0).any():
        raise OptionError(
            "c",
            "the number of correct samples must be at least 0 and at most the number of samples",
        )
    # Use exact fractions, because 0.28 * 25 in floats is 7.000000000000001, and its ceiling is 8
    # instead of 7.
    least = max(1, math.ceil(Fraction(str(tau)) * k))
    return hypergeometric_tail(least, counts, right, k)


def avg_at_n(counts: Counts) -> Floats:
    """Return the share of correct samples of each problem, which estimates pass@1.

    The share is NaN if a problem has no samples.
    """
    return np.where(counts.n > 0, counts.c / np.maximum(counts.n, 1), np.nan)


def rate(values: ArrayLike, n: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Return the mean of one value per problem, with its interval. `n` has each problem's number of
    samples.

    If a problem has the value NaN, because it has too few samples, the mean is undefined.
    """
    array = np.asarray(values, dtype=np.float64)
    counts = np.asarray(n, dtype=np.int64)
    estimate = mean_estimate(array, int(counts.sum()), level=level)
    missing = int(np.isnan(array).sum())
    if missing:
        note = f"too few samples in {missing} of {counted(array.size, 'problem')}"
        return replace(estimate, note=note)
    return estimate


@dataclass(frozen=True, slots=True)
class Votes:
    """The vote on one problem. A class consists of the samples with equal answers.

    `sizes` has the number of samples of each class, and `values` the share of correct samples in
    it. `blanks` is the number of samples without an answer.
    """

    sizes: tuple[int, ...]
    values: tuple[float, ...]
    blanks: int = 0

    @property
    def samples(self) -> int:
        """Return the number of samples, including those without an answer."""
        return sum(self.sizes) + self.blanks


def votes(labels: Sequence[Hashable | None], correct: Sequence[bool | float | None]) -> Votes:
    """Group the samples of one problem by their labels, which name the classes of equal answers.

    The value of a class is the share of its samples that are correct. A verdict of None counts as
    wrong. A sample without a label does not vote.
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
    """Return maj@k for each problem, the probability that a vote of k samples is correct; NaN if n
    < k.

    The k samples are drawn without replacement, so their original order does not matter. Tied
    classes win with equal probability. A vote in which no sample has an answer is wrong.
    """
    if k < 1:
        raise OptionError("k", f"{k} is below 1; give at least 1")
    result = np.full(len(problems), np.nan)
    samples = np.array([problem.samples for problem in problems], dtype=np.int64)
    for n in np.unique(samples[samples >= k]).tolist():
        indices = np.flatnonzero(samples == n).tolist()
        group = [problems[index] for index in indices]
        result[indices] = [_whole(votes) for votes in group] if n == k else _expected(group, n, k)
    return result


def _whole(problem: Votes) -> float:
    """Return the accuracy of a vote of all samples: the share of correct samples in the winning
    class. For tied classes, the shares are averaged.
    """
    most = max(problem.sizes, default=0)
    winners = [
        value for size, value in zip(problem.sizes, problem.values, strict=True) if size == most
    ]
    return sum(winners) / len(winners) if winners else 0.0


def _expected(group: Sequence[Votes], n: int, k: int) -> Floats:
    """Return, for each problem, the expected share of correct samples in the class that wins a vote
    of k samples. Each problem has n > k samples.
    """
    rows = [
        (at, label)
        for at, problem in enumerate(group)
        for label, value in enumerate(problem.values)
        if value > 0
    ]
    of = [group[at] for at, _ in rows]
    sizes = np.array([group[at].sizes[label] for at, label in rows], dtype=np.int64)
    # rivals[row, s] is the number of rival classes that have s samples.
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
    """Return the probability that a class wins a vote of k of n samples, for each class size in
    `sizes`. A tie counts as a fraction of a win.

    The class has `sizes` of the n samples; the other classes are its rivals. In one vote, the class
    gets 1 / (1 + number of tied rivals), or 0 if a rival has more of the k samples.

    The result is exact, although the subsets of k samples are not enumerated. For each number j of
    samples drawn from the class, the generating function of the rivals is evaluated at roots of
    unity. The fraction 1 / (ties + 1) is the integral of w^ties over [0, 1], which Gauss-Legendre
    nodes compute exactly.

    Each sample is drawn with probability k/n, on the condition that k samples are drawn in total.
    This gives the same distribution as drawing without replacement, but its numbers do not
    overflow.
    """
    chance = k / n
    # The polynomial is real, so its values at conjugate roots of unity are conjugates. Half of the
    # n + 1 roots are therefore enough.
    roots = np.exp(-2j * np.pi * np.arange((n + 1) // 2 + 1) / (n + 1))
    rival_sizes = np.flatnonzero(rivals.any(axis=0))
    # below[r] is the sum of the terms in which fewer than j samples of a rival with size r are
    # drawn.
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
            # Products are computed as sums of logarithms. Factors near 0 are replaced by 1e-200,
            # because 0 * log(0) would be NaN.
            logs = np.log(np.where(np.abs(factors) < 1e-200, 1e-200, factors))
            spectrum += weight * np.exp(rivals[np.ix_(rows, rival_sizes)] @ logs + quiet[rows])
        result[rows] += (
            binomial_pmf(j, sizes[rows], chance) * np.fft.irfft(spectrum, n + 1, axis=1)[:, k - j]
        )
    return result / float(binomial_pmf(k, n, chance))


SampleStatus = Literal["graded", "cut", "no answer", "unscored", "timeout"]
"""The status of a sample. "cut": generation reached a limit, such as the token limit. "no answer":
the sample contains no answer. "unscored": its answer could not be compared. "timeout": the
comparison took too long.
"""


def status_of(
    answer: str | None, finish: str | None, verdict: str | None, rule: str
) -> SampleStatus:
    """Return the status of a sample.

    `finish` is the reason why the sample ended. `rule` is the rule that decided its verdict.
    """
    if answer is None:
        return "cut" if finish in ("turns", "tokens") else "no answer"
    if verdict == "unscored":
        return "timeout" if rule == "time" else "unscored"
    return "graded"


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one problem, with the verdict, the class in the vote and the status of each
    sample.

    A verdict is None if it is unknown. `labels` name the classes of equal answers; a sample without
    an answer has the label None. Without `labels`, there is no vote. Raises OptionError if the
    lengths differ.
    """

    problem: str
    correct: tuple[bool | None, ...]
    labels: tuple[Hashable | None, ...] = ()
    statuses: tuple[SampleStatus, ...] = ()

    def __post_init__(self) -> None:
        for name in ("labels", "statuses"):
            values: tuple[object, ...] = getattr(self, name)
            if values and len(values) != len(self.correct):
                samples = counted(len(self.correct), "sample")
                problem = f"{self.problem} has {len(values)} {name} for {samples}"
                raise OptionError(name, problem)
        unknown = [status for status in self.statuses if status not in get_args(SampleStatus)]
        if unknown:
            raise OptionError("status", f"{unknown[0]!r} is not a status", get_args(SampleStatus))


class GradedSample(Protocol):
    """A finished sample, as an argument of `samples_of`.

    `finish` is the reason why the sample ended. `verdict` is "correct", "wrong" or "unscored", and
    None if the sample was not graded. `rule` is the rule with which the grader decided.
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
"""A function that groups equal answers: it returns a class number for each answer, and equal
answers have the same number.
"""


def samples_of(problem: str, samples: Sequence[GradedSample], group: Grouper) -> Samples | None:
    """Return the samples of one problem in the form that `score` needs.

    The result is None if there are no samples, or if a sample is not graded.
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
    """Return the class of each answer, or None for a missing answer. Each distinct text is compared
    only once.
    """
    texts = list(dict.fromkeys(answer for answer in answers if answer is not None))
    classes = dict(zip(texts, group(texts), strict=True))
    return tuple(None if answer is None else classes[answer] for answer in answers)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of the problems and samples behind a rate, and of the samples without a verdict, by
    reason.
    """

    problems: int
    samples: int
    cut: int
    no_answer: int
    unscored: int
    timed_out: int

    def __str__(self) -> str:
        return (
            f"{counted(self.samples, 'sample')} of {counted(self.problems, 'problem')}: "
            f"{self.cut:,} cut, {self.no_answer:,} without answer, {self.unscored:,} unscored, "
            f"{self.timed_out:,} timed out"
        )


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The rates of one run, keyed by names such as "maj@16", and the counts of the samples behind
    them.
    """

    estimates: Mapping[str, Estimate]
    coverage: Coverage


def coverage(problems: Sequence[Samples]) -> Coverage:
    """Count the samples by status. Without a status, a sample without a verdict is unscored."""
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
    """Return pass@1, and for every k in `ks` also pass@k, maj@k, pass^k and G-pass@k with tau =
    1/2.

    All rates are unbiased and have intervals over problems. The default of `ks` is the powers of
    two up to the smallest number of samples of a problem, and that number itself. Unscored samples
    count as wrong; pass@1 also says how much it would change if they were correct.
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
    """Return the values of every rate at k, one value per problem, keyed by the rate's name."""
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
    """Return the probability that a chunk of a wrong rollout has a worse score than a chunk of a
    correct rollout.

    Only chunks of the same question are compared. A tie counts as one half, so random scores give
    0.5. The interval is over questions, because the chunks of one question are not independent.
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
    """Return how much better the score selects chunks of wrong rollouts than a random choice does.

    In each question, the share `rate` of the chunks with the worst scores is escalated. The result
    is the share of the wrong rollouts' chunks that are escalated, minus `rate`, which a random
    choice would escalate.

    For a score without information, the result is 0. If several chunks have the score at the limit,
    a fraction of each is counted.

    :raises OptionError: if the rate is outside [0, 1].
    """
    if not 0 <= rate <= 1:
        raise OptionError("rate", f"{rate!r} is outside [0, 1]")
    caught: list[float] = []
    total: list[float] = []
    for wrong, right in _mixed(chunks):
        taken = _count_escalated(wrong, right, rate)
        caught.append(taken - rate * len(wrong))
        total.append(float(len(wrong)))
    return _ratio(caught, total, len(chunks), level, centre=0.0, ends=(-1.0, 1.0))


def _mixed(chunks: Sequence[LabelledChunk]) -> list[tuple[Floats, Floats]]:
    """Return two arrays for each question that has both wrong and correct rollouts: the scores of
    the wrong rollouts' chunks and of the correct rollouts' chunks.

    A missing score (NaN) is the worst, because a gate escalates a chunk without a score.
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


def _count_escalated(wrong: Floats, right: Floats, rate: float) -> float:
    """Return how many chunks of wrong rollouts are among the escalated chunks, if the share `rate`
    of all chunks is escalated, worst scores first.

    If several chunks have the score at the limit, a fraction of each is counted.
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

    For the variance, a question of average weight is added. Its value is `centre`, the value of a
    score without information. Without this question, the interval would have width 0 if a few
    questions agree by chance.

    The questions have different weights, so the degrees of freedom are computed from the effective
    number of questions.
    """
    check_level(level)
    count = len(parts)
    if count < 2:
        note = "too few questions: at least two must have both correct and wrong rollouts"
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
