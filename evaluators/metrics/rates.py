"""Rates of graded samples, exact per problem: pass@k and its kin, votes by class, and a run's
scorecard of them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike

from atts.errors import OptionError
from atts.evaluators.metrics.intervals import Estimate, Floats, Ints, mean_estimate
from atts.sampling import binomial_pmf, hypergeometric_tail


@dataclass(frozen=True, slots=True)
class Counts:
    """Per problem: `n` samples, `c` of them right."""

    n: Ints
    c: Ints


def count(correct: Sequence[Sequence[bool | None]]) -> Counts:
    """Samples and right ones per problem, ragged or not (None: not known); what is there, never
    what was configured.
    """
    n = np.fromiter(map(len, correct), np.int64, len(correct))
    return Counts(
        n, np.fromiter((sum(bool(one) for one in row) for row in correct), np.int64, len(correct))
    )


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """P(some of k samples drawn without replacement is right) per problem: unbiased; NaN where n <
    k.

    >>> pass_at_k([4, 4, 1], [0, 2, 1], 2).round(4).tolist()
    [0.0, 0.8333, nan]
    """
    return 1 - pass_hat_k(n, np.subtract(n, c), k)


def pass_hat_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """pass^k: P(all of k samples drawn without replacement are right); NaN where n < k."""
    return g_pass_at_k(n, c, k, 1.0)


def g_pass_at_k(n: ArrayLike, c: ArrayLike, k: int, tau: float) -> Floats:
    """G-pass@k: P(at least the share tau of k samples is right, one at the least); NaN where n < k.

    tau near 0 is pass@k, tau = 1 is pass^k. Raises OptionError for a tau outside [0, 1], and for
    numbers that are none.
    """
    if not 0 <= tau <= 1:
        raise OptionError("tau", f"{tau!r} is not between 0 and 1")
    if k < 1:
        raise OptionError("k", f"{k} is not at least 1")
    counts = np.atleast_1d(n)
    right = np.atleast_1d(c)
    if (right > counts).any() or (right < 0).any():
        raise OptionError("c", "there are more right samples than samples, or fewer than none")
    # exact: 0.28 * 25 is 7.000000000000001 in floats
    least = max(1, math.ceil(Fraction(str(tau)) * k))
    return hypergeometric_tail(least, counts, right, k)


def avg_at_n(counts: Counts) -> Floats:
    """The share of right samples per problem (pass@1); NaN where there is no sample."""
    return np.where(counts.n > 0, counts.c / np.maximum(counts.n, 1), np.nan)


def rate(values: ArrayLike, n: ArrayLike, *, level: float = 0.95) -> Estimate:
    """The mean of per-problem values with its interval; `n` are the samples per problem.

    Problems whose value is NaN (too few samples) make it undefined.
    """
    array = np.asarray(values, dtype=np.float64)
    counts = np.asarray(n, dtype=np.int64)
    missing = int(np.isnan(array).sum())
    estimate = mean_estimate(array, int(counts.sum()), level=level)
    return (
        replace(estimate, note=f"too few samples in {missing} of {array.size} problems")
        if missing
        else estimate
    )


@dataclass(frozen=True, slots=True)
class Votes:
    """One problem's samples as a vote sees them: sizes of the classes, how right each is, and the
    silent ones.
    """

    sizes: tuple[int, ...]
    values: tuple[float, ...]
    blanks: int = 0

    @property
    def samples(self) -> int:
        """Samples, silent ones included."""
        return sum(self.sizes) + self.blanks


def votes(labels: Sequence[Hashable | None], correct: Sequence[bool | float | None]) -> Votes:
    """Classes with their value: the share of their members judged right (None counts as wrong); no
    label, no vote.
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
    """P(the majority of k samples drawn without replacement is right) per problem; NaN where there
    are fewer than k.

    A tie goes to each of the tied with equal chance; a draw without any answer is wrong. The order
    in which samples finished does not matter.
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
    """k = n: the vote itself."""
    most = max(problem.sizes, default=0)
    winners = [
        value for size, value in zip(problem.sizes, problem.values, strict=True) if size == most
    ]
    return sum(winners) / len(winners) if winners else 0.0


def _expected(group: Sequence[Votes], n: int, k: int) -> Floats:
    """Sum over classes of value times P(win share), for problems that all have n > k samples."""
    rows = [
        (at, own)
        for at, problem in enumerate(group)
        for own, value in enumerate(problem.values)
        if value > 0
    ]
    of = [group[at] for at, _ in rows]
    sizes = np.array([group[at].sizes[own] for at, own in rows], dtype=np.int64)
    # how many rival classes have each size
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
        shares * np.array([group[at].values[own] for at, own in rows]),
    )
    return np.clip(total, 0.0, 1.0)


def _win_shares(own: Ints, rivals: Floats, silent: Ints, n: int, k: int) -> Floats:
    """Per row, E[1/(1 + rivals tied) if none has more] over k of n samples, the row's class having
    `own` of them.

    Exact, and no subset is enumerated: for the row's class drawn j times, the rivals' generating
    function is taken at roots of unity; 1/(ties + 1) is the integral of w^ties over [0, 1], which
    Gauss-Legendre nodes give exactly. Draws are binomial with chance k/n per sample, conditioned on
    k in all: the same law, and no number overflows.
    """
    chance = k / n
    # a real polynomial of degree <= n is known from half of the n + 1 roots; the rest are
    # conjugates
    roots = np.exp(-2j * np.pi * np.arange((n + 1) // 2 + 1) / (n + 1))
    sizes = np.flatnonzero(rivals.any(axis=0))
    # per rival size, of fewer than j draws
    below = np.zeros((sizes.size, roots.size), dtype=np.complex128)
    quiet = silent[:, None] * np.log(1 - chance + chance * roots)[None, :]
    result = np.zeros(own.size)
    for j in range(1, min(k, int(own.max(initial=0))) + 1):
        below += binomial_pmf(j - 1, sizes, chance)[:, None] * roots ** (j - 1)
        exactly = binomial_pmf(j, sizes, chance)[:, None] * roots**j
        rows = np.flatnonzero(own >= j)
        nodes, weights = np.polynomial.legendre.leggauss((k - j) // j // 2 + 1)
        spectrum = np.zeros((rows.size, roots.size), dtype=np.complex128)
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            factors = below + node * exactly
            # where a factor is 0 its product must be 0, but 0 of such factors must be 1: so not
            # minus infinity
            logs = np.log(np.where(np.abs(factors) < 1e-200, 1e-200, factors))
            spectrum += weight * np.exp(rivals[np.ix_(rows, sizes)] @ logs + quiet[rows])
        result[rows] += (
            binomial_pmf(j, own[rows], chance) * np.fft.irfft(spectrum, n + 1, axis=1)[:, k - j]
        )
    return result / float(binomial_pmf(k, n, chance))


SampleStatus = Literal["graded", "cut", "no answer", "unscored", "timeout"]
"""What became of a sample: graded; cut at a limit; ended with no answer; the grader cannot tell, or
took too long.
"""


def status_of(
    answer: str | None, finish: str | None, verdict: str | None, rule: str
) -> SampleStatus:
    """What became of a sample that ended by `finish`; `rule` is what the grader went by."""
    if answer is None:
        return "cut" if finish in ("turns", "tokens") else "no answer"
    if verdict == "unscored":
        return "timeout" if "timeout" in rule else "unscored"
    return "graded"


@dataclass(frozen=True, slots=True)
class Samples:
    """One problem's samples, in any order: right or not (None: unknown), the class each votes for,
    what became of it.

    `labels` come from grouping by equivalence, None where there is no answer; without them there is
    no vote. Raises OptionError when the lengths differ.
    """

    problem: str
    correct: tuple[bool | None, ...]
    labels: tuple[Hashable | None, ...] = ()
    statuses: tuple[SampleStatus, ...] = ()

    def __post_init__(self) -> None:
        for name in ("labels", "statuses"):
            held: tuple[object, ...] = getattr(self, name)
            if held and len(held) != len(self.correct):
                raise OptionError(
                    name, f"{self.problem} has {len(held)} {name} for {len(self.correct)} samples"
                )
        if unknown := [status for status in self.statuses if status not in get_args(SampleStatus)]:
            raise OptionError("status", f"{unknown[0]!r} is not a status", get_args(SampleStatus))


class GradedSample(Protocol):
    """A sample that ran to its end, as `samples_of` takes it.

    Its answer (None without one), why it ended, its verdict ("correct", "wrong" or "unscored";
    None: it was not graded) and the rule the grader went by.
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
"""Gives each of some texts the class of its equals."""


def samples_of(problem: str, samples: Sequence[GradedSample], group: Grouper) -> Samples | None:
    """One problem's samples for `score`; None where there are none, or one of them was not graded."""
    if not samples or any(one.verdict is None for one in samples):
        return None
    return Samples(
        problem,
        tuple(None if one.verdict == "unscored" else one.verdict == "correct" for one in samples),
        answer_classes([one.answer for one in samples], group),
        tuple(status_of(one.answer, one.finish, one.verdict, one.rule) for one in samples),
    )


def answer_classes(answers: Sequence[str | None], group: Grouper) -> tuple[int | None, ...]:
    """A class per answer, None where there is none; each different text is compared once."""
    texts = list(dict.fromkeys(answer for answer in answers if answer is not None))
    classes = dict(zip(texts, group(texts), strict=True))
    return tuple(None if answer is None else classes[answer] for answer in answers)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many samples stand behind a rate, and how many of them are not a plain right or wrong."""

    problems: int
    samples: int
    cut: int
    no_answer: int
    unscored: int
    timed_out: int

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples of {self.problems:,} problems: {self.cut:,} cut, "
            f"{self.no_answer:,} without "
            f"answer, {self.unscored:,} unscored, {self.timed_out:,} timed out"
        )


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The rates of one run by name, such as "pass@1" and "maj@16", and their coverage."""

    estimates: Mapping[str, Estimate]
    coverage: Coverage


def coverage(problems: Sequence[Samples]) -> Coverage:
    """Counts of each status; a sample without one counts as unscored when it is not known whether
    it is right.
    """
    seen = Counter[SampleStatus]()
    for held in problems:
        seen.update(
            held.statuses or ("unscored" if one is None else "graded" for one in held.correct)
        )
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
    """pass@1, and for every k pass@k, maj@k, pass^k and G-pass@k at one half: unbiased, with
    intervals over problems.

    `ks` are the powers of two up to the fewest samples of a problem, and that number itself, unless
    told. Samples that could not be scored count as wrong, and the rate says what they may change.
    """
    counts = count([held.correct for held in problems])
    fewest = int(counts.n.min(initial=10**9)) if problems else 0
    estimates = {"pass@1": rate(avg_at_n(counts), counts.n, level=level)}
    if unknown := sum(one is None for held in problems for one in held.correct):
        best = count([[one is None or one for one in held.correct] for held in problems])
        estimates["pass@1"] = estimates["pass@1"].beside(
            rate(avg_at_n(best), best.n, level=level), unknown
        )
    doubled = {1 << power for power in range(1, fewest.bit_length())}
    for k in sorted(doubled | {fewest} - {0}) if ks is None else ks:
        for name, values in _at_k(problems, counts, k).items():
            estimates[name] = rate(values, counts.n, level=level)
    return Scorecard(estimates, coverage(problems))


def _at_k(problems: Sequence[Samples], counts: Counts, k: int) -> dict[str, Floats]:
    if k < 2:
        return {}
    named = {
        f"pass@{k}": pass_at_k(counts.n, counts.c, k),
        f"pass^{k}": pass_hat_k(counts.n, counts.c, k),
    }
    named[f"G-pass@{k}(1/2)"] = g_pass_at_k(counts.n, counts.c, k, 0.5)
    if problems and all(held.labels for held in problems):
        named[f"maj@{k}"] = maj_at_k([votes(held.labels, held.correct) for held in problems], k)
    return named
