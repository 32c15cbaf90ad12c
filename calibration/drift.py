"""Test whether the scores of a run have the same distribution as the stored scores.

The last part examines stored scores: it computes thresholds for a rate, and warns about faults.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from atts.calibration.conformal import (
    ClusterSummary,
    Rate,
    by_cluster,
    check_fraction,
    exact_rate,
    long_run,
    split_threshold,
    summarise,
)
from atts.calibration.pools import Ranks
from atts.calibration.scores import Measure, Scale, StoredScores
from atts.calibration.state import DefaultTable, Persisted
from atts.errors import CalibrationInputError, OptionError, counted
from atts.sampling import binomial_quantile, binomial_tail, normal_quantile

# Up to this share of repeated scores, from 0 to 1, there is no warning.
FEW = 0.02
# If the model is certain of a chunk, its score is close to the best possible score. Within this
# distance of the best score, equal scores are not called copies.
_CERTAIN = 1e-6
# Scores with at most this number of decimals are taken for ratings.
_RATING_DECIMALS = 3
# Scores are also taken for ratings if they have at most this number of different values, and each
# value occurs at least twice on average. Such scores come from counting a few votes.
_RATING_VALUES = 20
# Scores with more decimals than this number are taken for unrounded scores.
_MOST_DECIMALS = 6
# A rounded score is compared with others only if no other value is within this number of steps of
# its last decimal.
_NEAR = 10


def _equality_tells(stored: StoredScores) -> NDArray[np.bool_]:
    """Return one boolean per score: True if an equal score is unlikely to occur by chance.

    Recorded scores are usually rounded to a few decimals. Where such scores lie close together,
    different chunks often have equal scores. So a rounded score counts only if no other value lies
    within `_NEAR` steps of its last decimal. Infinite scores, ratings, and scores of chunks of
    which the model is certain never count.
    """
    raw = np.asarray(stored.scores, float)
    num_values = len(np.unique(raw))
    if num_values <= _RATING_VALUES and len(raw) >= 2 * num_values:
        return np.zeros(len(raw), bool)
    is_certain = np.abs(np.asarray(stored.nonconformity, float)) <= _CERTAIN
    tells: NDArray[np.bool_] = np.isfinite(raw) & ~is_certain
    finite = raw[tells]
    decimals = next(
        (
            digits
            for digits in range(_MOST_DECIMALS + 1)
            if len(finite) and float(np.mean(finite == np.round(finite, digits))) > 0.5
        ),
        None,
    )
    if decimals is None:
        return tells
    if decimals <= _RATING_DECIMALS:
        return np.zeros(len(raw), bool)
    values = np.unique(finite)
    is_near = np.diff(values) < (_NEAR + 0.5) * 10.0**-decimals
    alone = np.ones(len(values), bool)
    alone[:-1] &= ~is_near
    alone[1:] &= ~is_near
    tells[tells] = alone[np.searchsorted(values, finite)]
    return tells


@dataclass(frozen=True, slots=True)
class DuplicateScores:
    """The shares of stored scores that are repeated, from 0 to 1. Scores that are often equal by
    chance do not count: ratings, and rounded scores that lie close together.

    Rollouts of a question may write the same chunk, so repeats within a question can be normal.
    Chunks of different questions differ, so a score that occurs in two questions is a fault.
    """

    # The share of scores that repeat an earlier score of the same question. If questions are not
    # known, an earlier score of any question counts.
    within: float
    across: float  # share of scores that also occur in another question
    # The share of questions in which no score occurs twice, among questions with two or more scores
    # that count. It is 0 if there are fewer than `_FEWEST` such questions.
    distinct: float
    clustered: bool

    @classmethod
    def of(cls, stored: StoredScores) -> DuplicateScores:
        """Compute the shares of repeated scores among stored scores.

        Scores that may be equal by chance are left out. Ratings out of ten are often equal by
        chance, so no score counts as repeated if most scores are round numbers.
        """
        questions = stored.questions if stored.clustered else ("",) * len(stored)
        tells = _equality_tells(stored)
        counts = Counter(
            (question, score)
            for question, score, is_telling in zip(
                questions, stored.nonconformity, tells, strict=True
            )
            if is_telling
        )
        total = counts.total()
        if not total:
            return cls(0.0, 0.0, 1.0, stored.clustered)
        within = 1 - len(counts) / total
        if not stored.clustered:
            return cls(within, 0.0, 1.0, False)
        num_questions_with = Counter(score for _, score in counts)
        across = sum(count for (_, score), count in counts.items() if num_questions_with[score] > 1)
        # A single shared value among few scores may be chance, but copied questions share many.
        if sum(number > 1 for number in num_questions_with.values()) < 2:
            across = 0
        # A question shows whether it repeats scores only if at least two of its scores count.
        num_scores = Counter[str]()
        for (question, _), count in counts.items():
            num_scores[question] += count
        showing = {question for question, number in num_scores.items() if number > 1}
        repeating = {question for (question, _), count in counts.items() if count > 1}
        # In very few questions, repeats do not show how often rollouts write the same chunk.
        if len(showing) < _FEWEST:
            return cls(within, across / total, 0.0, True)
        return cls(within, across / total, 1 - len(repeating) / len(showing), True)

    @property
    def fault(self) -> str:
        """Describe repeated scores that are probably copies; return "" if there are none.

        If scores repeat in most questions, the model may just write the same chunk often. Only a
        comparison with live questions can show this (`copied_p_value`), so this function returns
        "".
        """
        within = f"{100 * self.within:.0f} % of the stored scores"
        if self.across > FEW:
            return (
                f"{100 * self.across:.0f} % of the stored scores also occur in another "
                "question, although different chunks should have different scores; these "
                "scores were probably copied"
            )
        if self.within > FEW and not self.clustered:
            return (
                f"{within} are the same as another stored score; without recorded questions, atts "
                "cannot tell whether some of these scores are copies"
            )
        if self.within > FEW and self.distinct >= 0.5:
            few = f"{100 * (1 - self.distinct):.0f} % of the questions"
            return (
                f"{within} are the same as another score of the same question, but only in "
                f"{few}, so these scores were probably copied"
            )
        return ""

    @property
    def doubt(self) -> str:
        """Describe repeated scores that may be copies, or may come from rollouts with the same
        chunk.

        Return "" if few scores are repeated, or if `fault` describes them.
        """
        if self.fault or self.within <= FEW:
            return ""
        return (
            f"{100 * self.within:.0f} % of the scores are the same as another score of the same "
            "question: either rollouts wrote the same chunk, which is not a fault, or scores "
            "were copied"
        )


def copied_p_value(stored: QuestionSample, live: Sequence[Sequence[float]]) -> float:
    """Return the p-value of the hypothesis that scores repeat in live questions as often as in
    stored questions.

    A question is distinct if its first scores are all different. The p-value is the binomial
    probability of at least the observed number of distinct live questions. For smoothing, one
    distinct question is added to the stored questions. The p-value is 1 if there are too few live
    rollouts.
    """
    depth = stored.depth(live)
    theirs = _are_distinct(stored.questions, depth)
    ours = _are_distinct(live, depth)
    share = (sum(theirs) + 1) / (len(theirs) + 1)
    return binomial_tail(sum(ours) - 1, len(ours), share)


def _are_distinct(questions: Sequence[Sequence[float]], depth: int) -> list[bool]:
    """Return one boolean per question: True if its first `depth` scores are all different.

    Questions with fewer scores are left out.
    """
    return [len(set(scores[:depth])) == depth for scores in questions if len(scores) >= depth]


Floats = NDArray[np.float64]
# If at least this number of scores per question is compared, the standard deviations of the scores
# are compared too. With fewer scores, only the means are compared.
_SPREAD_FROM = 3


@dataclass(frozen=True, slots=True)
class QuestionSample:
    """The stored scores of one turn, grouped by question."""

    questions: tuple[tuple[float, ...], ...]
    size: int  # median number of scores per question
    icc: float

    @classmethod
    def of(cls, stored: StoredScores, turn: int) -> QuestionSample:
        """Group the stored scores of one turn by question.

        A score without a question forms a separate group, and infinite scores are left out.
        """
        questions = dict[str, list[float]]()
        rows = zip(stored.questions, stored.turns, stored.nonconformity, strict=True)
        for position, (question, row_turn, nonconformity) in enumerate(rows):
            if row_turn == turn and math.isfinite(nonconformity):
                name = question or f"chunk {position}"
                questions.setdefault(name, []).append(nonconformity)
        if not questions:
            return cls((), 1, 0.0)
        icc = summarise({name: np.array(scores) for name, scores in questions.items()}).icc
        size = int(np.median([len(scores) for scores in questions.values()]))
        # If the correlation cannot be estimated, assume the worst case, 1. A negative estimate
        # counts as 0.
        icc = 1.0 if math.isnan(icc) else max(0.0, icc)
        return cls(tuple(tuple(scores) for scores in questions.values()), size, icc)

    @property
    def half(self) -> int:
        """Return how many of a question's first scores are averaged in `early`: half of the usual
        number of scores per question, rounded up.
        """
        return max(1, math.ceil(self.size / 2))

    @property
    def early(self) -> list[float]:
        """Return, for each stored question, the mean of its first `half` scores."""
        half = self.half
        return [math.fsum(scores[:half]) / half for scores in self.questions if len(scores) >= half]

    def depth(self, live: Sequence[Sequence[float]]) -> int:
        """Return how many of each question's first scores to compare.

        Questions with fewer scores are left out, so a larger depth compares fewer questions. The
        result is the depth at which the difference of the means has the smallest variance.
        """
        counts = np.array([len(scores) for scores in live])
        stored = np.array([len(scores) for scores in self.questions])
        best_depth = 1
        least = math.inf
        for depth in sorted({int(count) for count in counts if count <= stored.max()}):
            ours = int((counts >= depth).sum())
            theirs = int((stored >= depth).sum())
            variance = (1 / ours + 1 / theirs) * (self.icc + (1 - self.icc) / depth)
            # `<=` prefers the largest of several equally good depths. A larger depth may allow a
            # comparison of standard deviations too.
            if variance <= least:
                best_depth = depth
                least = variance
        return best_depth


def question_features(questions: Sequence[Sequence[float]], depth: int) -> Floats:
    """Return the mean and the log standard deviation of each question's first `depth` scores:
    [questions, 2].

    Questions with fewer than `depth` scores are left out. If `depth` is too small for standard
    deviations, the array has only the column of means.
    """
    heads = [scores[:depth] for scores in questions if len(scores) >= depth]
    rows = np.array(heads, float).reshape(-1, depth)  # shape [questions, depth]
    columns = [rows.mean(axis=1)]
    if depth >= _SPREAD_FROM:
        columns.append(np.log(rows.std(axis=1, ddof=1) + 1e-6))
    return np.column_stack(columns)


def normal_scores(values: Floats, reference: Floats) -> Floats:
    """Replace each value by the normal quantile of its rank in the same column of the reference.

    With ranks, no single outlier can decide the test.
    """
    ordered = np.sort(reference, axis=0)
    # Twice the average rank of a value. The factor 2 makes the ranks of tied values integers.
    ranks = list[NDArray[np.int64]]()
    for column in range(values.shape[1]):
        below = np.searchsorted(ordered[:, column], values[:, column], "left")
        up_to = np.searchsorted(ordered[:, column], values[:, column], "right")
        ranks.append(below + up_to)
    size = len(reference) + 1
    share = (np.column_stack(ranks) + 1) / (2 * size)
    # The normal quantiles of 0 and 1 are infinite, so stay half a rank away from both.
    inside = np.clip(share, 0.5 / size, 1 - 0.5 / size)
    return np.asarray(np.vectorize(normal_quantile, otypes=[float])(inside), float)


# at most this number of live questions and this number of stored questions are compared
_MOST = 256
_DRAWS = 4_999  # number of simulated runs without drift, for one p-value
# To save time, a first p-value uses only this number of simulated runs. If it is at most `_DOUBT`,
# it is computed again with `_DRAWS` runs.
_GLANCE = 499
_DOUBT = 0.1
# Distances between questions use normal scores z, and also z**2 with this weight. The squares
# detect sooner that a distribution became wider or narrower.
_BEND = 0.5
# Statistics that agree to this number of decimals are equal; sums of floats have rounding errors.
_DIGITS = 9

# The likelihood ratio compares the stored scores' normal distribution with a mixture of others.
# This is the number of normal distributions in the mixture.
_COMPONENTS = 128
# In the mixture, the mean score and the spread of scores shift together, with this correlation.
# Another model often has scores that are both higher and more variable.
_TOGETHER = 0.9
# The distributions in the mixture are wider or narrower than that of the stored scores. This is the
# standard deviation of the logarithm of their relative width.
_STRETCH = 0.3
# A question has a mean and a spread of scores, which are correlated. Half of the distributions in
# the mixture have the correlation of the stored questions. The others have tanh(x), and this is the
# standard deviation of x.
_TIES = 0.5
_AT_ONCE = 1024  # simulated runs that are processed in one block, to limit memory
_FLAT = 0.1  # standard deviations below this value are raised to it, to avoid a division by 0


@dataclass(frozen=True, slots=True)
class TwoSampleTest:
    """The two p-values of a test that compares live and stored questions.

    `drawn` tests the hypothesis that the live questions are a random sample of the stored
    questions. `exchangeable` tests the hypothesis that live and stored questions are samples of one
    distribution. `exchangeable` is usually larger than `drawn`, because it treats the stored
    questions as a sample too. Both p-values are valid for any scores, because they are ranks among
    statistics of simulated runs without drift. `exchangeable` is computed only if `drawn` is at
    most `significance`.
    """

    drawn: float
    exchangeable: float
    questions: int


def two_sample_test(
    stored: QuestionSample, live: Sequence[Sequence[float]], significance: float, seed: int
) -> TwoSampleTest:
    """Compare means and spreads of the latest live questions with those of the stored questions.

    The two distributions are compared by two statistics. An energy distance (Székely and Rizzo,
    2004) detects any difference. A likelihood ratio against a mixture of shifted and stretched
    distributions needs fewer questions to detect a change of the model.
    """
    latest = live[-_MOST:]
    depth = stored.depth(latest)
    stride = -(-len(stored.questions) // _MOST)
    theirs = question_features(stored.questions[::stride], depth)
    ours = question_features(latest, depth)
    # The seed depends on the run's scores, so a replay of the run draws the same numbers. With a
    # fixed seed, an unlucky draw would affect all runs in the same way.
    draw = np.random.default_rng([seed, zlib.crc32(np.sort(ours, axis=None).tobytes())])
    drawn = _drawn_p_value(ours, theirs, _GLANCE, draw)
    if drawn <= max(_DOUBT, significance):
        drawn = _drawn_p_value(ours, theirs, _DRAWS, draw)
    exchangeable = 1.0
    if drawn <= significance:
        exchangeable = _permutation_p_value(ours, theirs, draw)
    return TwoSampleTest(drawn, exchangeable, len(ours))


def _drawn_p_value(ours: Floats, theirs: Floats, draws: int, draw: np.random.Generator) -> float:
    """Return the bootstrap p-value: the rank of the real run among runs simulated from the stored
    questions.

    A simulated run is drawn from the stored questions with replacement. The p-value is valid for
    any scores if live questions are independent draws from the stored questions.
    """
    n = len(ours)
    k = len(theirs)
    # If run r draws question q, store the number r * k + q. One call of `bincount` can then count
    # the draws of all runs.
    drawn = draw.integers(k, size=(draws, n)) + k * np.arange(draws)[:, None]
    # Row r contains the weights of run r: n weights for the live questions (`ours`), then k weights
    # for the stored questions (`theirs`).
    weights = np.zeros((draws + 1, n + k))
    weights[0, :n] = 1 / n  # row 0 is the real run; the other rows are simulated runs
    weights[1:, n:] = np.bincount(drawn.ravel(), minlength=draws * k).reshape(draws, k) / n
    live = normal_scores(ours, theirs)
    stored = normal_scores(theirs, theirs)
    both = np.concatenate([live, stored])
    distances = _distances(both)
    # The energy distance of samples X and Y is 2 E|X - Y| - E|X - X'| - E|Y - Y'|. Y are the stored
    # questions, so the last term is the same for all runs and is left out.
    to_stored = 2 * weights @ distances[:, n:].mean(axis=1)
    within = np.einsum("ij,ij->i", weights @ distances, weights)
    return _joint_rank(to_stored - within, mixture_ratios(both, stored, weights, n))


def _permutation_p_value(ours: Floats, theirs: Floats, draw: np.random.Generator) -> float:
    """Return the permutation p-value: the rank of the live questions among random choices from all
    live and stored questions.

    The test is exact if both samples are drawn from one distribution (Dwass, 1957).
    """
    n = len(ours)
    k = len(theirs)
    both = np.concatenate([ours, theirs])
    both = normal_scores(both, both)
    distances = _distances(both)
    # Array of shape [1 + draws, n + k]. Each row marks n of the n + k questions, which play the
    # role of the live questions.
    chosen = np.zeros((_DRAWS + 1, n + k))
    chosen[0, :n] = 1  # row 0 is the real run; the other rows are random choices
    positions = np.argpartition(draw.random((_DRAWS, n + k)), n - 1, axis=1)[:, :n]
    np.put_along_axis(chosen[1:], positions, 1.0, axis=1)
    # Sums of distances between pairs of questions: both chosen (`inside`), the first chosen
    # (`reach`), and all pairs (`whole`).
    inside = np.einsum("ij,ij->i", chosen @ distances, chosen)
    reach = chosen @ distances.sum(axis=1)
    whole = float(distances.sum())
    energy = 2 * (reach - inside) / (n * k) - inside / n**2 - (whole - 2 * reach + inside) / k**2
    return _joint_rank(energy, mixture_ratios(both, both, chosen / n, n))


def _joint_rank(*statistics: Floats) -> float:
    """Return the p-value of the first run from several statistics: the share of runs that are at
    least as extreme.

    In each statistic, a run's rank among all runs gives a p-value. Runs are compared by the product
    of their p-values (Fisher's combination). This product is ranked too, so the statistics need not
    be independent.
    """
    surprise = np.zeros(len(statistics[0]))
    for each in statistics:
        values = np.round(each, _DIGITS)
        surprise -= np.log(1 - np.searchsorted(np.sort(values), values, "left") / len(values))
    return float(np.mean(surprise >= surprise[0] - 1e-9))


def _distances(scores: Floats) -> Floats:
    """Return the distance between each pair of rows of normal scores: [points, points].

    The scaled squares of the scores are added as columns. They make an energy distance sensitive to
    scale as well as to location.
    """
    points = np.concatenate([scores, _BEND * (scores**2 - 1) / np.sqrt(2)], axis=1)
    return np.asarray(np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2)), float)


def mixture_ratios(scores: Floats, reference: Floats, weights: Floats, questions: int) -> Floats:
    """Return the log likelihood ratio of each of several runs, which all have `questions`
    questions.

    Each row of `weights` describes one run. Entry i of the row is the fraction of the run's
    questions whose scores are row i of `scores`. The ratio compares a fixed mixture of normal
    distributions with one normal distribution fitted to `reference`. The distributions in the
    mixture have other means, widths and correlations. If scores are not normal, the test detects
    less drift. It raises no more false alarms than with normal scores, because ratios are compared
    only with those of simulated runs.
    """
    centre = reference.mean(axis=0)
    width = np.maximum(reference.std(axis=0), _FLAT)
    size = reference.shape[1]
    known = (reference - centre) / width
    tie = float(np.clip(np.mean(known[:, 0] * known[:, -1]), -0.95, 0.95))
    means, spreads = _components(size, tie)
    same = _terms(np.zeros((1, size)), _spread(np.ones((1, size)), np.array(tie)))
    gain = questions * (_terms(means, spreads) - same)
    moments = weights @ _moments((scores - centre) / width)
    # The array of shape [rows of weights, components] is large, so process it in blocks of rows.
    parts = [
        _log_mean_exp(moments[start : start + _AT_ONCE] @ gain.T)
        for start in range(0, len(moments), _AT_ONCE)
    ]
    return np.concatenate(parts)


def _components(size: int, tie: float) -> tuple[Floats, Floats]:
    """Return means [components, size] and covariances [components, size, size] of the mixture.

    The components are variations of a standard normal distribution with correlation `tie`. They are
    the same in every call.
    """
    draw = np.random.default_rng(0)
    common = draw.standard_normal((_COMPONENTS, 1))
    separate = draw.standard_normal((_COMPONENTS, size))
    widths = draw.standard_normal((_COMPONENTS, size))
    means = np.sqrt(_TOGETHER) * common + np.sqrt(1 - _TOGETHER) * separate
    other_ties = np.tanh(_TIES * draw.standard_normal(_COMPONENTS))
    ties = np.where(np.arange(_COMPONENTS) % 2, other_ties, tie)
    return means, _spread(np.exp(_STRETCH * widths), ties)


def _spread(widths: Floats, ties: Floats) -> Floats:
    """Return covariances [components, size, size] with these widths and correlations."""
    spread = widths[:, :, None] * widths[:, None, :]
    off = ~np.eye(widths.shape[1], dtype=bool)
    spread[:, off] *= np.reshape(ties, (-1, 1))
    return spread


def _terms(means: Floats, spreads: Floats) -> Floats:
    """Return coefficients of each normal distribution: their product with `_moments` is the log
    density. A constant common to all distributions is left out.
    """
    precise = np.linalg.inv(spreads)
    pull = np.einsum("lij,lj->li", precise, means)
    constant = -0.5 * (np.linalg.slogdet(spreads)[1] + np.einsum("li,li->l", means, pull))
    terms = [constant[:, None], pull, -0.5 * precise.reshape(len(means), -1)]
    return np.asarray(np.concatenate(terms, axis=1), float)


def _moments(plain: Floats) -> Floats:
    """Return for each row the number 1, its values, and all products of two values: [rows, 1 + size
    + size * size].
    """
    products = plain[:, :, None] * plain[:, None, :]
    parts = [np.ones((len(plain), 1)), plain, products.reshape(len(plain), -1)]
    return np.concatenate(parts, axis=1)


def _log_mean_exp(logs: Floats) -> Floats:
    most = logs.max(axis=1)
    return np.asarray(most + np.log(np.exp(logs - most[:, None]).mean(axis=1)), float)


# A question that is like the stored questions gets a false "out of domain" warning with at most
# this probability.
LEVEL = 0.05
# Questions with fewer scores than this number are not checked, because their mean is too uncertain.
_LEAST = 3
# Larger scores are replaced by this quantile of the stored scores. Without this limit, one extreme
# chunk could make its whole question look out of domain.
_CAP = 0.98


@dataclass(frozen=True, slots=True)
class DomainCheck:
    """A check whether the scores of a question are unusually bad for the domain of the stored
    questions.

    The question's mean score is ranked among the means of the stored questions; before that, each
    score is limited to a cap. If the question is exchangeable with the stored questions, its
    p-value is at most `LEVEL` with probability at most `LEVEL`. The check does not detect a
    question of another domain if its scores are similar.
    """

    means: tuple[float, ...]
    cap: float
    scale: Scale

    @classmethod
    def of(cls, stored: StoredScores) -> DomainCheck | None:
        """Return the check, or None if questions are not known or too few for a p-value of `LEVEL`."""
        questions = dict[str, list[float]]()
        for question, value in zip(stored.questions, stored.nonconformity, strict=True):
            questions.setdefault(question, []).append(value)
        if not stored.clustered or 1 / (len(questions) + 1) > LEVEL:
            return None
        ordered = sorted(stored.nonconformity)
        cap = ordered[int(_CAP * (len(ordered) - 1))]
        return cls(tuple(_mean(values, cap) for values in questions.values()), cap, stored.scale)

    @staticmethod
    def false_warnings(questions: int) -> int:
        """Return how many false warnings are normal: with probability 95 %, questions like the
        stored ones do not get more.

        >>> DomainCheck.false_warnings(1), DomainCheck.false_warnings(100)
        (0, 9)
        """
        return int(binomial_quantile(1 - LEVEL, questions, LEVEL))

    def p_value(self, scores: Sequence[float]) -> float:
        """Return the p-value of the scores' mean among the means of the stored questions; worse
        scores give a smaller p-value.
        """
        mean = _mean([self.scale.nonconformity(score) for score in scores], self.cap)
        return (1 + sum(other >= mean for other in self.means)) / (len(self.means) + 1)

    def warning(self, scores: Sequence[float]) -> str:
        """Return a warning if a question with these scores looks out of domain, otherwise ""."""
        if len(scores) < _LEAST:
            return ""
        p = self.p_value(scores)
        if p > LEVEL:
            return ""
        return (
            f"out of domain: on average, the {len(scores)} chunks of this problem score worse than "
            f"the chunks of {100 * (1 - p):.1f} % of the {len(self.means)} problems in the stored scores; "
            "the gate and the models may be unsuitable for this problem"
        )


def _mean(values: Sequence[float], cap: float) -> float:
    return sum(min(value, cap) for value in values) / len(values)


DriftPolicy = Literal["recalibrate", "widen", "escalate", "report"]
DRIFT_POLICIES: tuple[DriftPolicy, ...] = get_args(DriftPolicy)
Kind = Literal["duplicates", "shift", "martingale"]

# The times at which live and stored questions are compared. Each pair is a number of live scores,
# and the share of the false-alarm probability for the test at that time. Only scores of the stored
# turn count. The test at 300 scores gets about three quarters, because it matters most. All shares,
# with those of the martingale and of the tests for copies, sum to at most 1.
_MAIN = 300
_LOOKS = (
    (64, 0.03),
    (100, 0.03),
    (160, 0.03),
    (_MAIN, 0.767),
    (600, 0.03),
    (1500, 0.03),
    (4800, 0.03),
)
# If the first 300 live scores include scores of other turns, there is an additional test. It is
# made at 300 scores of all turns. Its share is taken from the share of the test at `_MAIN`.
_EARLY = 0.2
# Each test also checks whether stored scores are copies. This is the share of the false-alarm
# probability for this check.
_COPIED = 0.003
_MARTINGALE = 0.029
# An alarm needs two small p-values. The second treats the stored questions as a random sample. It
# may be at most this factor times the significance of the test.
_SLACK = 3.5
_FEWEST = 4  # a test needs at least this number of live questions, and of stored questions
_KEPT = 512  # at most this number of live questions is remembered
_BETS = (-1.0, -0.5, 0.0, 0.5, 1.0)
# At each step, each bet gives this share of its capital to a common pot, which is divided equally.
_JUMP = 0.01


class SimpleJumper(Persisted):
    """The simple jumper martingale: five bets that exchange a little capital at each step (Vovk et
    al., "Retrain or not retrain", 2021).

    If the p-values are independent and uniform, the capital ever reaches 1 / a with probability at
    most a (Ville). Smoothed online conformal p-values of exchangeable values are independent and
    uniform. The capital is stored as a logarithm, so it cannot overflow.

    >>> martingale = SimpleJumper()
    >>> for _ in range(20): martingale.update(0.99)
    >>> martingale.log_value > 4
    True
    """

    __slots__ = ("_log_total", "_shares", "log_peak")
    saved = ("_shares", "_log_total", "log_peak")

    def __init__(self) -> None:
        self._shares = [1 / len(_BETS)] * len(_BETS)
        self._log_total = 0.0
        self.log_peak = 0.0

    def update(self, p: float) -> None:
        """Bet on one p-value.

        :raises CalibrationInputError: if the p-value is outside [0, 1].
        """
        if not 0 <= p <= 1:
            raise CalibrationInputError("p-value", p, "a number in [0, 1]")
        common = _JUMP / len(_BETS)
        grown = [
            ((1 - _JUMP) * share + common) * (1 + bet * (p - 0.5))
            for share, bet in zip(self._shares, _BETS, strict=True)
        ]
        total = math.fsum(grown)
        self._shares = [share / total for share in grown]
        self._log_total += math.log(total)
        self.log_peak = max(self.log_peak, self._log_total)

    @property
    def log_value(self) -> float:
        """Return the logarithm of the capital."""
        return self._log_total

    def alarm(self, significance: float) -> bool:
        """Return True if the capital has ever reached 1 / significance."""
        return self.log_peak >= -math.log(significance)


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """A drift alarm, with the action that followed."""

    kind: Kind
    scores: int  # number of live scores at the time of the alarm
    questions: int
    p: float
    action: DriftPolicy
    message: str


class DriftMonitor(Persisted):
    """A monitor that compares the questions of a run with the stored questions during the run.

    The tests compare questions, not single scores, because scores of one question are correlated.
    The monitor tests the latest questions after 64, 100, 160, 300, 600, 1,500 and 4,800 scores of
    the stored turn. An additional test comes after 300 scores of all turns. Each test compares the
    means and standard deviations of the live questions with those of the stored questions. Between
    the tests, a martingale bets on the smoothed rank of each question among all earlier questions.
    Each test and the martingale spend a share of `significance`; the test at 300 scores spends
    three quarters. So `significance` bounds the probability of a false alarm in a whole run whose
    questions are draws from the stored questions. If the run's questions and the stored questions
    are draws from one distribution, the bound is 3.5 times `significance`.

    Repeated scores that sampling cannot explain raise an alarm at once. Repeated scores that
    rollouts with the same chunk could explain raise an alarm only if live scores are not repeated.
    """

    saved = ("_live", "_scores", "_seen", "_looks", "_ranked", "_martingale")

    def __init__(
        self, stored: StoredScores, significance: float = 0.007, policy: DriftPolicy = "recalibrate"
    ) -> None:
        """Create a monitor; raise an alarm at once if stored scores are probably copies.

        :raises OptionError: for an unknown policy.

        :raises CalibrationInputError: for a significance outside (0, 1).
        """
        if policy not in DRIFT_POLICIES:
            raise OptionError(str(policy), "is not a drift policy", DRIFT_POLICIES)
        check_fraction("significance", significance)
        self.policy: DriftPolicy = policy
        self.significance = significance
        self.events: list[DriftEvent] = []
        self._turn = min(stored.turns, default=0)
        self._reference = QuestionSample.of(stored, self._turn)
        self._live = DefaultTable(str, list[float])
        self._scores = 0  # number of live scores so far, of any turn
        self._seen = 0  # number of live scores so far, of the turn of the stored scores
        self._looks = 0  # number of scheduled tests that were made
        self._ranked = Ranks(self._reference.early)
        self._martingale = SimpleJumper()
        self._repeats = DuplicateScores.of(stored)
        # True while the monitor still tests. It stops after an alarm, and needs enough stored
        # questions.
        self.watching = len(self._reference.questions) >= _FEWEST
        if self._repeats.fault:
            self._alarm("duplicates", 0.0, self._repeats.fault)

    def observe(
        self, nonconformity: float, question: str, turn: int, theta: float = 0.5
    ) -> DriftEvent | None:
        """Add one score of the run, and return the alarm if there is one.

        `theta` is this chunk's uniform random number, which breaks ties among questions.
        """
        self._scores += 1
        if not self.watching:
            return None
        if turn == self._turn and math.isfinite(nonconformity):
            self._take(nonconformity, question, theta)
        if not self.events and len(self._live) >= _FEWEST:
            self._look_if_due()
        return self.events[-1] if self.events else None

    def _take(self, nonconformity: float, question: str, theta: float) -> None:
        self._seen += 1
        # A chunk without a question's name counts as a question with one chunk.
        key = question or f"chunk {self._scores}"
        scores = self._live[key]
        if len(scores) < self._reference.size:
            scores.append(nonconformity)
            if len(scores) == self._reference.half:
                self._bet(math.fsum(scores) / len(scores), theta)
        if len(self._live) > _KEPT:
            del self._live[next(iter(self._live))]

    def _look_if_due(self) -> None:
        due_at = math.inf
        share = 0.0
        if self._looks < len(_LOOKS):
            due_at, share = _LOOKS[self._looks]
        is_due = self._seen >= due_at
        if not is_due:
            share = 0.0
        elif due_at == _MAIN < self._scores:
            # The first 300 scores included other turns, so the additional test below was already
            # made. Its share is taken from this test.
            share -= _EARLY
        if self._scores == _MAIN:
            share = max(share, _EARLY)
        if share:
            self._look(self.significance * share)
        if is_due:
            self._looks += 1

    def judge_alone(self) -> None:
        """Raise an alarm if stored scores may be copies. Call this method if there are no live
        scores to compare.
        """
        if self.watching and self._repeats.doubt:
            self._alarm(
                "duplicates",
                1.0,
                f"{self._repeats.doubt}; use --live to compare the stored scores with the scores "
                "of a run",
            )

    def _bet(self, mean: float, theta: float) -> None:
        # The martingale needs independent uniform values. Rank the question's mean among the means
        # of all earlier questions. If questions are exchangeable, such smoothed ranks are
        # independent and uniform.
        below, equal = self._ranked.counts(mean)
        self._martingale.update((below + theta * (1 + equal)) / (len(self._ranked) + 1))
        self._ranked.add(mean)
        if self._martingale.alarm(self.significance * _MARTINGALE):
            p = math.exp(-self._martingale.log_peak)
            self._alarm("martingale", p, "later questions have different scores from earlier ones")

    def _look(self, significance: float) -> None:
        live = list(self._live.values())
        p = copied_p_value(self._reference, live) if self._repeats.doubt else 1.0
        if p <= self.significance * _COPIED:
            message = (
                f"{100 * self._repeats.within:.0f} % of the stored scores are the same as another "
                "score of the same question, but the run's scores repeat less often, so stored "
                "scores were copied"
            )
            self._alarm("duplicates", p, message)
            return
        test = two_sample_test(self._reference, live, significance, self._looks)
        if test.drawn <= significance and test.exchangeable <= _SLACK * significance:
            message = (
                f"the scores of {counted(test.questions, 'question')} do not have the same "
                "distribution as the stored scores"
            )
            self._alarm("shift", test.drawn, message)

    def _alarm(self, kind: Kind, p: float, message: str) -> None:
        self.watching = False
        self.events.append(DriftEvent(kind, self._scores, len(self._live), p, self.policy, message))

    def state(self) -> Any:
        """Return the state of the monitor, as JSON, without the stored scores."""
        return {**super().state(), "events": [asdict(event) for event in self.events]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that a monitor with the same stored scores returned."""
        self._ranked = Ranks()
        self.merge(state)
        self.events = [DriftEvent(**event) for event in state["events"]]
        self.watching = not self.events and len(self._reference.questions) >= _FEWEST


_HALVES = 400  # number of random splits of the questions into two halves


@dataclass(frozen=True, slots=True)
class TurnHealth:
    """A summary of the stored scores of one turn; the threshold is a score, not a nonconformity."""

    turn: int
    scores: int
    median: float
    threshold: float


@dataclass(frozen=True, slots=True)
class Health:
    """Statistics of stored scores: their number, clustering, repeats and thresholds at one rate."""

    rate: float
    scores: int
    clusters: ClusterSummary
    infinite: int
    repeats: DuplicateScores
    threshold: float  # the split-conformal threshold; worse scores are escalated
    # 90 % interval of the rate in a long run at this threshold, assuming independent scores
    long_run: tuple[float, float]
    # The same interval for the smaller effective sample size, because the scores of one question
    # are correlated.
    long_run_clustered: tuple[float, float]
    # The threshold is computed from one half of the questions and applied to the other half. This
    # is the standard deviation of the rate over random halves.
    half_split: float
    turns: tuple[TurnHealth, ...]
    # "log": scores are compared by their logarithms; "linear": by their values
    measure: Measure
    # the kind of score, such as "prm"; None if the fingerprint does not name it
    score_kind: str | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about the stored scores, with faults first."""
        warnings = list[str]()
        if self.repeats.fault:
            warnings.append(self.repeats.fault)
        if self.repeats.doubt:
            warnings.append(
                f"{self.repeats.doubt}; to compare the stored scores with the scores of a run, use "
                "`atts calibration check --live RUN`"
            )
        if not self.repeats.clustered:
            warnings.append(
                "the questions of the scores are not recorded, so atts treats all scores as "
                "independent, although scores of the same question rarely are"
            )
        if self.infinite:
            warnings.append(f"infinite scores: {self.infinite}")
        if math.isinf(self.threshold) and self.rate:
            warnings.append(
                f"rate {self.rate:g} needs more than {counted(self.scores, 'score')}, because with "
                "so few scores no chunk would ever be escalated; add scores"
            )
        if self.clusters.effective < 0.5 * self.scores:
            warnings.append(
                f"{self.clusters}: the threshold is far less certain than with "
                f"{counted(self.scores, 'independent score')}"
            )
        if len(self.turns) == 1 and self.scores:
            warnings.append(
                f"all scores come from turn {self.turns[0].turn}, but chunks of other turns "
                "have different scores; use rate scope question-turn"
            )
        return tuple(warnings)


def examine(stored: StoredScores, rate: Rate, seed: int = 0) -> Health:
    """Return the statistics of stored scores at a rate. `seed` determines which random halves of
    the questions are compared.

    :raises CalibrationInputError: if there are no scores.
    """
    if not len(stored):
        raise CalibrationInputError("number of stored scores", 0, "at least one")
    nonconformity = np.asarray(stored.nonconformity, float)
    labels = [question or f"chunk {place}" for place, question in enumerate(stored.questions)]
    clusters = by_cluster(stored.nonconformity, labels)
    summary = summarise(clusters)
    return Health(
        rate=float(exact_rate(rate)),
        scores=len(stored),
        clusters=summary,
        infinite=int(np.isinf(nonconformity).sum()),
        repeats=DuplicateScores.of(stored),
        threshold=_as_score(stored, split_threshold(nonconformity, rate)),
        long_run=long_run(len(stored), rate),
        long_run_clustered=long_run(max(1, int(summary.effective)), rate),
        half_split=_half_split_spread(list(clusters.values()), rate, seed),
        turns=_turn_health(stored, nonconformity, rate),
        measure=stored.scale.measure,
        score_kind=_kind_of(stored),
    )


def first_alarm(stored: StoredScores, live: StoredScores | None = None) -> DriftMonitor:
    """Create a drift monitor of the stored scores, let it observe the live scores in order, and
    return it.

    If there are no live scores, the monitor raises an alarm if stored scores may be copies.
    """
    monitor = DriftMonitor(stored, policy="report")
    if live is None:
        monitor.judge_alone()
        return monitor
    rows = zip(live.nonconformity, live.questions, live.turns, strict=True)
    for nonconformity, question, turn in rows:
        if not monitor.watching:
            break
        monitor.observe(nonconformity, question, turn)
    return monitor


def _half_split_spread(clusters: list[NDArray[np.float64]], rate: Rate, seed: int) -> float:
    """Return the standard deviation of the escalation rate in one half of the questions, at the
    threshold computed from the other half. The halves are random.

    This estimates the uncertainty of the threshold without a model of how scores cluster. The
    estimate is slightly too large, because each half has only half of the questions.
    """
    if len(clusters) < 4:
        return math.nan
    draw = np.random.default_rng(seed)
    half = len(clusters) // 2
    rates = list[float]()
    for _ in range(_HALVES):
        order = draw.permutation(len(clusters))
        first = np.concatenate([clusters[place] for place in order[:half]])
        second = np.concatenate([clusters[place] for place in order[half:]])
        rates.append(float(np.mean(second > split_threshold(first, rate))))
    return float(np.std(rates))


def _turn_health(
    stored: StoredScores, nonconformity: NDArray[np.float64], rate: Rate
) -> tuple[TurnHealth, ...]:
    turns = np.asarray(stored.turns)
    rows = list[TurnHealth]()
    for turn in sorted(set(stored.turns)):
        scores = nonconformity[turns == turn]
        median = _as_score(stored, float(np.median(scores)))
        threshold = _as_score(stored, split_threshold(scores, rate))
        rows.append(TurnHealth(turn, len(scores), median, threshold))
    return tuple(rows)


def _kind_of(stored: StoredScores) -> str | None:
    kind = stored.fingerprint.get("score.kind")
    return kind if isinstance(kind, str) else None


def _as_score(stored: StoredScores, nonconformity: float) -> float:
    """Return the score of a nonconformity; this inverts `Scale.nonconformity`."""
    value = nonconformity if stored.scale.worse == "higher" else -nonconformity
    if stored.scale.measure != "log":
        return value
    # math.exp overflows from 710. The threshold is infinite if there are too few scores.
    return math.exp(value) if value < 700 else math.inf
