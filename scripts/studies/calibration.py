"""Measure the calibration: realised against nominal rates per mode, drift alarms on recorded
scores, coverage of intervals, and small runs.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import anyio
import numpy as np
from scipy import stats

from atts.analysis.comparison import ratio_interval
from atts.api import replay
from atts.calibration import (
    MODES,
    Calibrator,
    Candidate,
    StoredScores,
    Tuning,
    certify,
    certify_net,
    replay_scores,
)
from atts.calibration.conformal import exact_rate
from atts.calibration.drift import DuplicateScores, QuestionSample, question_features
from atts.calibration.online import Floats, rate_metrics, sorted_decisions
from atts.calibration.scores import read_scores
from atts.core import Decision, Features, Outcome, Problem
from atts.evaluators import (
    LabelledChunk,
    compare_runs,
    gain_over_coin,
    within_question_auroc,
)
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.evaluators.metrics.intervals import mean_estimate
from atts.evaluators.metrics.paired import difference_estimate
from atts.evaluators.metrics.rates import Votes, maj_at_k, pass_at_k
from atts.pipelines import CalibratorProtocol, CoinGate, ConformalGate
from atts.run import RunLengthEstimate, RunOptions, evaluate
from scripts.studies.arms import Arm, Pair, arm, run_block
from scripts.studies.harness import Options, Parts, Row, Table, interval, say, traces
from scripts.studies.modelled import recorded_rollouts
from tests.calibration.live_scores import noticed_after

Records = list[dict[str, Any]]
ORDERS = ("sim", "lock")
ARRAY = "ec846181"
"""Name of the score array that calibrated the recorded run."""


def study_calibration(options: Options) -> list[Table]:
    """Measure realised rates of each mode, and drift alarms, on recorded scores.

    Return no tables if the recorded traces are absent.
    """
    folder = traces()
    if folder is None:
        return []
    found = arrays(folder)
    own = next(name for name in found if ARRAY in name)
    streams = {order: arrivals(folder, order) for order in ORDERS}
    tables = [
        modes(streams, found[own], rate)
        for rate in options.pick((0.4,), (0.4, 0.2, 0.1), (0.4, 0.2, 0.1))
    ]
    tables.append(alarms(found, own, options))
    if options.effort != "quick":
        tables.append(power(found, own, options))
    return tables


def arrivals(folder: Path, order: str) -> Records:
    """Return the scores of a recorded run in the named arrival order."""
    return [
        json.loads(line)
        for line in (folder / f"arrivals_ct0_{order}.jsonl").read_text().splitlines()
    ]


def arrays(folder: Path) -> dict[str, StoredScores]:
    """Return every published array of scores, keyed by a short name.

    Each array has sixteen scores per question; only the array of the smoke test has four.
    """
    found = dict[str, StoredScores]()
    for path in sorted((folder / "calibration").glob("*.npy")):
        name = path.stem.removeprefix("ppls_").replace("_s16_t500_temp0.8", "")
        found[name] = read_scores(path, 4 if "test_s4" in name else 16)
    return found


def modes(streams: Mapping[str, Records], stored: StoredScores, rate: float) -> Table:
    """Compare every mode at one rate with three baselines: the published rule, sorting after all
    sibling rollouts have scores, and a coin.
    """
    rows = list[Row]()
    for order, records in streams.items():
        questions, turns = ([record[key] for record in records] for key in ("question", "turn"))
        scores = [math.log(record["score"]) for record in records]
        for name, taken in _others(questions, turns, np.array(scores), stored, rate).items():
            rows.append(
                (order, name, *rate_metrics(questions, turns, scores, taken, rate).values())
            )
        for mode in MODES:
            done = replay_scores(
                records, rate=rate, mode=mode, stored=stored if mode == "split" else ()
            )
            rows.append((order, f"mode {mode}", *done.metrics.values()))
    errors = {
        str(row[1]): [f"{error:.2g}" for error in row[3:5]] for row in rows if row[0] == ORDERS[0]
    }
    (by_turn, by_question), (our_turn, our_question) = (
        errors[name] for name in ("published", "mode question-turn")
    )
    return Table.of(
        f"Every mode on the real stream at rate {rate:g}",
        "order | rule | overall error | RMS error by turn | RMS error by question | "
        "largest error in 500 decisions | AUROC in (question, turn) | agreement with "
        "the sort",
        rows,
        headline=f"error by turn: published rule {by_turn}, atts **{our_turn}**; "
        f"by question: published rule {by_question}, atts **{our_question}** "
        f"(root mean squares, nominal rate {rate:g})",
    )


def _others(
    questions: Sequence[Any],
    turns: Sequence[int],
    scores: Floats,
    stored: StoredScores,
    rate: float,
) -> dict[str, list[bool]]:
    """Return which chunks each of three baselines escalates: the published rule, sorting after all
    sibling rollouts have scores, and a coin.
    """
    pool = np.sort(np.asarray(stored.nonconformity))
    coins = np.random.default_rng(0).random(len(scores))
    least = math.ceil((1 - exact_rate(rate)) * len(pool))
    return {
        "published": (np.searchsorted(pool, scores) >= least).tolist(),
        "sort": sorted_decisions(np.array(questions), np.array(turns), scores, rate)
        .astype(bool)
        .tolist(),
        "coin": (coins < rate).tolist(),
    }


def alarms(found: dict[str, StoredScores], own: str, options: Options) -> Table:
    """Count false alarms on unchanged arrays of scores, and missed alarms on corrupted arrays."""
    clean = options.pick(100, 1000, 1000)
    broken = options.pick(20, 100, 200)
    others = () if options.effort == "quick" else ("self_opt", "1b8761b8", "amc_s1.1")
    chosen = {
        name: array
        for name, array in found.items()
        if name == own or any(part in name for part in others)
    }
    rows = list[Row]()
    for name, stored in {**chosen, **(_synthetic() if others else {})}.items():
        runs = clean if name == own or options.effort == "full" else clean // 4
        kinds = {
            "clean": [stored] * runs,
            "clean, loaded scores drawn too": [_sampled(stored, n) for n in range(runs // 4)],
        }
        kinds |= {kind: [array] * broken for kind, array in _broken(stored).items()}
        for kind, loaded in kinds.items():
            seen = [noticed_after(array, stored, seed) for seed, array in enumerate(loaded)]
            hits = [after for after in seen if after is not None]
            when = (
                (median(hits), max(hits)) if hits and not kind.startswith("clean") else (None, None)
            )
            rows.append((name, kind, len(loaded), len(hits), *when))
    return Table.of(
        "Alarms within 300 scores of whole questions drawn from the array",
        "array | loaded calibration | runs | alarms | median score of the alarm | latest",
        rows,
        "Clean runs draw questions with replacement from the loaded array, so their alarms are "
        "false. In the runs *clean, loaded scores drawn too*, the loaded scores are also drawn "
        "with replacement, separately for each run. Simulated arrays have 60 questions of 16 "
        "scores. The levels of their questions are skewed, have heavy tails, or come from two "
        "groups.",
    )


def power(found: dict[str, StoredScores], own: str, options: Options) -> Table:
    """Measure how often an alarm is raised if the stored scores and the scores of the run come from
    different models.
    """
    runs = options.pick(10, 60, 200)
    rows = list[Row]()
    for name, stored in found.items():
        sides = ((stored, found[own]), (found[own], stored))
        shares = (
            sum(noticed_after(*side, seed) is not None for seed in range(runs)) / runs
            for side in sides
        )
        effect = _effect(*sides[0])
        best = _oracle(*sides[0])
        rows.append(
            (
                name,
                len(stored),
                f"{100 * DuplicateScores.of(stored).within:.0f} %",
                effect,
                *shares,
                best,
            )
        )
    return Table.of(
        f"Share of {runs} runs of {own} that notice another array within 300 scores",
        "loaded scores | number | repeats | difference of question levels (SD) | "
        "noticed | noticed if swapped | best possible",
        rows,
        "The two MATH arrays of the same models, and the array published under another name, have the "
        "same distribution, so there is no difference to notice. Swapped: runs of the other array "
        "against this one. Best possible: the likelihood-ratio test of question levels and spreads at "
        "19 questions and a false-alarm rate of 0.5 %. This test knows both distributions (normal, "
        "with the same moments), but a monitor knows only a sample of one.",
    )


def _by_question(values: Sequence[float], stored: StoredScores) -> Floats:
    return np.array(values).reshape(len(set(stored.questions)), -1)


def _broken(stored: StoredScores) -> dict[str, StoredScores]:
    scores = np.array(stored.scores)
    places = np.arange(len(stored))
    kinds: dict[str, Floats] = {
        "shifted by +0.5 in log": scores * math.exp(0.5),
        "shifted by -0.5 in log": np.maximum(1.0, scores * math.exp(-0.5)),
        "half of the draws duplicated": scores[places - places % 2],
        "one draw in ten duplicated": scores[places - (places % 10 == 9)],
    }
    return {kind: StoredScores.of(values.tolist(), 16) for kind, values in kinds.items()}


def _synthetic() -> dict[str, StoredScores]:
    draw = np.random.default_rng(2)
    levels = {
        "made-up, skewed": draw.gamma(2.0, 0.25, 60),
        "made-up, heavy tails": 1 + 0.1 * draw.standard_t(3, 60),
        "made-up, two kinds": np.where(draw.random(60) < 0.3, 1.2, 0.4)
        + 0.05 * draw.standard_normal(60),
    }
    made = dict[str, StoredScores]()
    for name, level in levels.items():
        scores = level[:, None] + 0.2 * np.sqrt(np.abs(level))[:, None] * draw.standard_normal(
            (60, 16)
        )
        made[name] = StoredScores.of(np.exp(np.abs(scores)).ravel().tolist(), 16)
    return made


def _sampled(stored: StoredScores, seed: int) -> StoredScores:
    """Sample whole questions of an array with replacement, as many as the array has.

    A tiny random shift of each question keeps repeated questions distinct.
    """
    questions = _by_question(stored.scores, stored)
    draw = np.random.default_rng([seed, 1])
    chosen = questions[draw.integers(len(questions), size=len(questions))]
    moved = np.maximum(1.0, chosen * np.exp(draw.normal(0, 1e-6, chosen.shape)))
    return StoredScores.of(moved.ravel().tolist(), questions.shape[1])


def _effect(stored: StoredScores, other: StoredScores) -> float:
    levels = [_by_question(each.nonconformity, each).mean(axis=1) for each in (stored, other)]
    return float(
        (levels[0].mean() - levels[1].mean()) / math.sqrt((levels[0].var() + levels[1].var()) / 2)
    )


def _oracle(
    stored: StoredScores, other: StoredScores, questions: int = 19, level: float = 0.005
) -> float:
    """Return the power of the likelihood-ratio test for two populations of questions. In each
    population, a question's mean score and the log of its spread are normally distributed.
    """
    samples = [QuestionSample.of(each, 0) for each in (stored, other)]
    columns = [question_features(sample.questions, sample.size) for sample in samples]
    laws = [stats.multivariate_normal(column.mean(axis=0), np.cov(column.T)) for column in columns]
    draw = np.random.default_rng(0)
    runs = [law.rvs((20_000, questions), random_state=draw) for law in laws]
    clean, live = ((laws[1].logpdf(run) - laws[0].logpdf(run)).sum(axis=1) for run in runs)
    return float(np.mean(live > np.quantile(clean, 1 - level)))


T = TypeVar("T")
Draw = np.random.Generator
Ends = tuple[float, float]
Turns = Sequence[tuple[float, int]]
"""A recorded rollout: for each chunk its score and its number of characters."""

EPSILON = 0.02
SAMPLES = 16
TRUTHS = (0.02, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
# number of simulated problems; the mean over these problems counts as the true value
_MANY = 20_000


def study_statistics(options: Options) -> list[Table]:
    """Simulate the coverage of intervals; if recorded traces are available, also measure realised
    rates in a replay of recorded scores.
    """
    tables = [
        coverage(problems, options)
        for problems in options.pick((30,), (30, 40, 500), (30, 40, 500))
    ]
    tables += [paired_averages(options), rankings(options)]
    tables += [certificates(options), lengths(options)]
    folder = traces()
    return tables if folder is None else [*tables, small_runs(folder, options)]


def coverage(problems: int, options: Options) -> Table:
    """Measure how often nominal 95 % intervals contain the true value, for the intervals of atts
    and for other formulas.
    """
    rows = list[Row]()
    many = options.pick(100, 400, 4000)
    runs = options.pick(50, 300, 2000)
    for truth in TRUTHS:
        rows += _rates(
            np.random.default_rng([options.seed, problems, round(1000 * truth)]),
            truth,
            problems,
            many,
        )
    draw = np.random.default_rng([options.seed, problems, 1])
    rows += [_differences(draw, shift, problems, runs) for shift in (0.0, 0.02, 0.1)]
    for law, (costs, known) in RATIOS.items():
        coverage = fmean(_holds(ratio_interval(*costs(draw, problems)), known) for _ in range(runs))
        rows.append((f"ratio of costs, {law}", known, coverage, None, None))
    return Table.of(
        f"Coverage of nominal 95 % intervals with {problems} problems of {SAMPLES} samples",
        " | ".join(["quantity", "true value", *FORMULAS]),
        rows,
        f"Each row has {many:,} simulated benchmarks; rows of differences and ratios have "
        f"{runs:,}, and rows of maj@5 have {many // 4:,}. The difficulty of the problems follows "
        "a Beta distribution. In the rows of maj@5, an incorrect answer has one of three values. "
        "inspect_ai has no formula for differences and ratios; lm_eval treats two runs as "
        "independent.",
    )


ACCURACIES: Mapping[str, Callable[[Draw, int | tuple[int, int]], Floats]] = {
    "even": lambda draw, size: draw.beta(1, 1, size),
    "easy": lambda draw, size: draw.beta(9, 1, size),
    "one in ten undecided": lambda draw, size: np.where(draw.random(size) < 0.1, 0.5, 0.98),
}
"""Beta distributions of a problem's accuracy in simulated benchmarks."""
GAINS = (0.0, 0.06)


def paired_averages(options: Options) -> Table:
    """Measure coverage and power of the interval of a paired difference of averages.

    Interval and p-value use the same statistic, so power is also the share of p-values below 0.05.
    """
    runs = options.pick(60, 1_500, 4_000)
    rows: list[Row] = []
    for (law, accuracies), gain in product(ACCURACIES.items(), GAINS):
        draw = np.random.default_rng([options.seed, len(law), round(100 * gain)])
        many = accuracies(draw, 400_000)
        known = float((np.minimum(1.0, many + gain) - many).mean())
        for problems, samples in product((15, 30, 100), (1, 4, 16, 64)):
            first = accuracies(draw, (runs, problems))
            second = np.minimum(1.0, first + gain)
            deltas = (draw.binomial(samples, second) - draw.binomial(samples, first)) / samples
            reach = float(stats.t.ppf(0.975, problems - 1))
            found = {
                "ours": [(one.low, one.high) for one in map(difference_estimate, deltas)],
                "t": [_around(delta, reach) for delta in deltas],
                "bootstrap": [_bootstrap(delta, draw) for delta in deltas],
            }
            cells = [
                fmean(share)
                for ends in found.values()
                for share in (
                    [_holds(each, known) for each in ends],
                    [not _holds(each, 0.0) for each in ends],
                )
            ]
            rows.append((law, gain, problems, samples, *cells))
    return Table.of(
        "Paired differences of averages: coverage and power",
        "accuracies | gain | problems | samples | coverage | power | coverage of plain t | "
        "power of plain t | coverage of the bootstrap | power of the bootstrap",
        rows,
        f"Each row has {runs:,} simulated pairs of runs. *Power* is the share of pairs whose "
        "interval excludes 0 (p below 0.05); at gain 0, it is the share of false positives. "
        "The column *accuracies* names the distribution of the accuracy of single problems: "
        "Beta(1, 1) (*even*) or Beta(9, 1) (*easy*). In *one in ten undecided*, one problem of "
        "ten has accuracy 0.5, and the other problems have 0.98. The gain is added to these "
        f"accuracies, up to 1. The bootstrap uses percentiles of {_RESAMPLES} resamples of "
        "problems.",
    )


_RESAMPLES = 400


def _bootstrap(delta: Floats, draw: Draw) -> Ends:
    """Return the percentile interval of the mean over resampled problems."""
    chosen = draw.integers(delta.size, size=(_RESAMPLES, delta.size))
    low, high = np.quantile(delta[chosen].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def rankings(options: Options) -> Table:
    """Measure the coverage of two intervals: of the gain over a coin, and of the AUROC within
    questions.
    """
    runs = options.pick(30, 400, 2_000)
    rows: list[Row] = []
    for skill in (0.0, 0.7):
        truth = _ranked(np.random.default_rng([options.seed, round(10 * skill)]), 3_000, skill)
        known = (within_question_auroc(truth).value, gain_over_coin(truth, RATES[1]).value)
        for questions in (10, 20, 40, 100):
            draw = np.random.default_rng([options.seed, questions, round(10 * skill)])
            simulated = [_ranked(draw, questions, skill) for _ in range(runs)]
            auroc = [within_question_auroc(chunks) for chunks in simulated]
            gain = [gain_over_coin(chunks, RATES[1]) for chunks in simulated]
            covered = [
                fmean(_holds((one.low, one.high), value) for one in estimates)
                for estimates, value in zip((auroc, gain), known, strict=True)
            ]
            rows.append((skill, questions, known[0], covered[0], known[1], covered[1]))
    return Table.of(
        "Within questions: AUROC and gain over a coin",
        "skill of the score | questions | AUROC | coverage | gain at rate 0.2 | coverage",
        rows,
        f"Each row has {runs:,} simulated runs, with 8 rollouts per question and 2 to 6 chunks "
        "per rollout. Each score is a sum of three random parts: one for the question, one for "
        "the rollout, and one for the chunk. The *skill* is added to the scores of all "
        "chunks of wrong rollouts, in standard deviations.",
    )


def _ranked(draw: Draw, questions: int, skill: float) -> list[LabelledChunk]:
    """Return the labelled chunks of a simulated run."""
    chunks: list[LabelledChunk] = []
    for question in range(questions):
        accuracy = draw.random()
        level = draw.normal()
        for _ in range(8):
            is_wrong = bool(draw.random() > accuracy)
            rollout = level + draw.normal() / 2 + skill * is_wrong
            turns = int(draw.integers(2, 7))
            scores = rollout + draw.normal(size=turns)
            chunks += [LabelledChunk(question, float(score), is_wrong) for score in scores]
    return chunks


def _ours(values: Floats) -> Ends:
    """Return the interval that atts prints for these chunks."""
    found = mean_estimate(values, values.size * SAMPLES)
    return found.low, found.high


def _around(values: Floats, reach: float) -> Ends:
    half = reach * float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()) - half, float(values.mean()) + half


FORMULAS: Mapping[str, Callable[[Floats], Ends]] = {
    "atts": _ours,
    "inspect_ai": lambda values: _around(values, float(stats.t.ppf(0.975, values.size - 1))),
    "lm_eval": lambda values: _around(values, 1.96),
}
"""Interval formulas of atts and of other tools.

inspect_ai clusters standard errors by problem and uses Student's t; lm_eval uses 1.96 standard
errors of the mean.
"""


def _holds(ends: Ends, known: float) -> bool:
    return ends[0] <= known <= ends[1]


def _rates(draw: Draw, truth: float, problems: int, runs: int) -> Iterator[Row]:
    def row(name: str, known: float, found: list[Floats]) -> Row:
        return (
            name,
            known,
            *(fmean(_holds(formula(one), known) for one in found) for formula in FORMULAS.values()),
        )

    law = (2 * truth, 2 * (1 - truth))
    right = draw.binomial(SAMPLES, draw.beta(*law, (runs, problems))).astype(float)
    for k in (1, 4):
        known = float((1 - (1 - draw.beta(*law, 400_000)) ** k).mean())
        yield row(
            f"pass@{k}", known, [pass_at_k(np.full(problems, SAMPLES), one, k) for one in right]
        )
    many = draw.binomial(SAMPLES, draw.beta(*law, _MANY)).astype(float)
    known = float(_majorities(draw, many).mean())
    yield row("maj@5", known, [_majorities(draw, one) for one in right[: max(1, runs // 4)]])


def _majorities(draw: Draw, right: Floats) -> Floats:
    """Return the exact maj@5 of every problem: all correct samples have one answer, and wrong
    samples are spread over three answers.
    """
    wrong = draw.multinomial(SAMPLES - right.astype(int), (0.5, 0.3, 0.2))
    sizes = np.column_stack([right.astype(int), wrong]).tolist()
    return maj_at_k([Votes(tuple(each), (1.0, 0.0, 0.0, 0.0)) for each in sizes], 5)


def _differences(draw: Draw, shift: float, problems: int, runs: int) -> Row:
    """Simulate two runs of the same problems, with single answers and accuracies near 0.9 that
    differ by `shift`.
    """
    ours = list[bool]()
    theirs = list[bool]()
    for _ in range(runs):
        chance = draw.beta(9, 1, problems) * (1 - shift)
        first = (draw.random(problems) < chance).astype(float)
        second = (draw.random(problems) < np.minimum(1, chance + shift)).astype(float)
        found = difference_estimate(second - first)
        ours.append(_holds((found.low, found.high), shift))
        half = 1.96 * math.hypot(first.std(ddof=1), second.std(ddof=1)) / math.sqrt(problems)
        theirs.append(abs(float(second.mean() - first.mean()) - shift) <= half)
    return f"difference of {shift:g}", shift, fmean(ours), None, fmean(theirs)


def _correlated(draw: Draw, problems: int) -> tuple[Floats, Floats]:
    common = draw.normal(0, 0.6, problems)
    own = draw.normal(0, 0.4, (2, problems))
    return np.exp(common + own[0]), 0.2 * np.exp(common + own[1])


def _long_tails(draw: Draw, problems: int) -> tuple[Floats, Floats]:
    first, second = np.exp(draw.normal(0, 1, problems) + draw.normal(0, 0.8, (2, problems)))
    return first, second


def _mostly_nothing(draw: Draw, problems: int) -> tuple[Floats, Floats]:
    taken = (draw.random(problems) < 0.3) * draw.exponential(1, problems)
    return np.exp(draw.normal(-0.125, 0.5, problems)), taken


RATIOS: Mapping[str, tuple[Callable[[Draw, int], tuple[Floats, Floats]], float]] = {
    "correlated": (_correlated, 0.2),
    "long tails": (_long_tails, 1.0),
    "second cost mostly 0": (_mostly_nothing, 0.3),
}
"""Distributions of the cost per problem in two runs, with the true ratio of their means."""

LAWS = {
    "as good: 8.5 % of answers lost, 8.5 % gained": (0.085, 0.085),
    "the embedded default": (0.0074, 0.0062),
    "worse by 0.025": (0.11, 0.085),
}
"""Shares of problems that a policy loses and wins compared with the target alone.

The shares of the embedded default were measured on 2,000 problems.
"""


def certificates(options: Options) -> Table:
    """Measure how often each of two tests certifies a policy: the test of lost answers and the test
    of the net loss.
    """
    runs = options.pick(40, 200, 1000)
    rows = list[Row]()
    for name, (lost, won) in LAWS.items():
        for problems in (500, 2000):
            draw = np.random.default_rng([options.seed, problems])
            found = draw.choice((1.0, -1.0, 0.0), (runs, problems), p=(lost, won, 1 - lost - won))
            old = [certify([_policy(np.maximum(one, 0.0))], EPSILON) for one in found]
            net = [certify_net([_policy(one)], EPSILON) for one in found]
            rows.append(
                (
                    name,
                    problems,
                    *(fmean(c.chosen is not None for c in each) for each in (old, net)),
                )
            )
    return Table.of(
        f"Share of runs that are certified at {EPSILON}, by simulation",
        "policy | problems | answers lost (`certify`) | net loss (`certify_net`)",
        rows,
        f"Each row has {runs:,} simulated runs. A certificate may be wrong with probability 0.1. "
        "So a policy that is worse by 0.025 may be certified in one run of ten.",
    )


def _policy(losses: Floats) -> Candidate:
    return Candidate("a", 0.2, losses.tolist(), 1.0)


def lengths(options: Options) -> Table:
    """Measure the realised rate of mode "marginal" if long chunks have worse scores and end later.

    Compare two rankings of a chunk's score: among all chunks, and among chunks of the same length.
    """
    runs = options.pick(4, 40, 200)
    rows = list[Row]()
    for chunks in options.pick((400,), (320, 400, 1600), (320, 400, 1600)):
        for in_flight in (64, 256):
            streams = [
                _first_chunks(chunks, in_flight, random.Random(f"{options.seed} {at}"))
                for at in range(runs)
            ]
            rates = [
                fmean(
                    replay_scores(one, 0.2, "marginal", seed=at, by_length=by).escalated
                    for at, one in enumerate(streams)
                )
                for by in (False, True)
            ]
            rows.append((chunks, in_flight, *rates))
    return Table.of(
        "Rate of mode marginal, nominal 0.2, by chunks in flight",
        "chunks | in flight | ranks among all | ranks by length",
        rows,
        f"Each row has {runs} simulated runs in which every rollout has one chunk. A chunk's "
        "duration is proportional to its length. Log length and log perplexity have "
        "correlation 0.54, as measured on a real pair, and some chunks end at the limit "
        "of 500 tokens.",
    )


def _first_chunks(chunks: int, in_flight: int, draw: random.Random) -> list[dict[str, Any]]:
    places = [draw.gauss(0, 1) for _ in range(chunks)]
    lengths = ((min(500.0, 60 + math.exp(4 + 0.5 * place)), place) for place in reversed(places))
    found = list[dict[str, Any]]()
    for length, place in _as_they_end(
        ([(one[0] + 1e-6 * draw.random(), one)] for one in lengths), in_flight
    ):
        score = math.exp(
            abs(0.6 + 0.15 * (0.54 * place + math.sqrt(1 - 0.54**2) * draw.gauss(0, 1)))
        )
        found.append({"question": len(found), "turn": 0, "score": score, "length": length})
    return found


def _as_they_end(lines: Iterable[Iterable[tuple[float, T]]], in_flight: int) -> Iterator[T]:
    """Yield the steps of all rollouts in the order in which the steps end, if `in_flight` rollouts
    run at once.
    """
    waiting = enumerate(map(iter, lines))
    going = list[tuple[float, int, T, Iterator[tuple[float, T]]]]()
    now = 0.0

    def step(number: int, line: Iterator[tuple[float, T]]) -> None:
        for seconds, what in line:
            heapq.heappush(going, (now + seconds, number, what, line))
            return

    while True:
        while len(going) < in_flight and (new := next(waiting, None)):
            step(*new)
        if not going:
            return
        now, number, what, line = heapq.heappop(going)
        yield what
        step(number, line)


GATES = ("counted", "streaming in", "coin")
"""The compared gates: the default gate, the default gate without knowledge of the run's size, and a
coin at the same rate.
"""


def small_runs(folder: Path, options: Options) -> Table:
    """Measure the default mode on resampled recorded rollouts, once with and once without knowledge
    of the run's size.
    """
    runs = options.pick(2, 6, 20)
    sizes = ((20, 8), (30, 16), (40, 8), (100, 8))
    rows = list[Row]()
    recorded: defaultdict[int, list[Turns]] = defaultdict(list)
    for record in recorded_rollouts(folder) or ():
        if turns := [
            (turn["ppl"], turn["draft_chars"])
            for turn in record["turns"]
            if turn["ppl"] is not None
        ]:
            recorded[record["question_id"]].append(turns)
    for problems, samples in sizes[: options.pick(1, 3, 4)]:
        fit = [rollouts for rollouts in recorded.values() if len(rollouts) >= samples]
        for order in ("random", "hard first", "easy first"):
            streams = [_arrivals(fit, problems, samples, order, seed) for seed in range(runs)]
            for rate in (0.1, 0.2, 0.4):
                cells = list[float]()
                for gate in GATES:
                    errors, caught = zip(
                        *(_ended(one, rate, samples, gate, at) for at, one in enumerate(streams)),
                        strict=True,
                    )
                    cells += [math.sqrt(fmean(error**2 for error in errors)), fmean(caught)]
                rows.append((f"{problems} x {samples}", order, rate, *cells))
    return Table.of(
        "Error of the default mode's realised rate (root mean square)",
        "problems x samples | order | rate | error, size known | worst escalated, size known | "
        "error, size unknown | worst escalated, size unknown | error, coin | worst escalated, "
        "coin",
        rows,
        f"Each row has {runs} runs. The problems are a random sample of a recorded run. 64 "
        "rollouts are in flight, and the time of a chunk is proportional to its length. *Worst "
        "escalated* is the share of the worst chunks that the gate escalated. At rate 0.2, for "
        "example, the worst chunks are the 20 % of all chunks with the worst scores.",
    )


def _arrivals(
    fit: Sequence[list[Turns]], problems: int, samples: int, order: str, seed: int
) -> list[dict[str, Any]]:
    draw = random.Random(f"{seed} {problems} {samples} {order}")
    chosen = [draw.sample(draw.choice(fit), samples) for _ in range(problems)]
    if order != "random":
        hardness = [fmean(score for turns in rollouts for score, _ in turns) for rollouts in chosen]
        places = sorted(range(problems), key=hardness.__getitem__, reverse=order == "hard first")
        chosen = [chosen[place] for place in places]

    def line(
        problem: int, sample: int, turns: Turns
    ) -> Iterator[tuple[float, tuple[int, int, int, Turns]]]:
        for turn, (_, characters) in enumerate(turns):
            yield characters * draw.uniform(0.8, 1.2), (problem, sample, turn, turns)

    lines = (
        line(n, s, turns) for n, rollouts in enumerate(chosen) for s, turns in enumerate(rollouts)
    )
    found = list[dict[str, Any]]()
    left = RunLengthEstimate(problems, samples)
    for problem, sample, turn, turns in _as_they_end(lines, 64):
        place = {"question": problem, "sample": sample, "turn": turn}
        found.append({**place, "score": max(1.0, turns[turn][0]), "left": left.share})
        left.count(Decision("accept", 0.5, str(problem), turn, sample))
        if turn + 1 == len(turns):
            left.end(str(problem), sample)
    return found


def _ended(
    stream: list[dict[str, Any]], rate: float, samples: int, gate: str, seed: int
) -> tuple[float, float]:
    """Simulate one run.

    Return its realised rate minus the nominal rate, and the share of its worst chunks that
    escalated.
    """
    worst = sorted(range(len(stream)), key=lambda place: -stream[place]["score"])
    worst = worst[: max(1, round(rate * len(stream)))]
    if gate == "coin":
        coin = CoinGate(rate, seed)
        chunks = [
            Features(str(record["question"]), record["turn"], record["sample"]) for record in stream
        ]
        escalated = [coin.preview(chunk).escalate for chunk in chunks]
    else:
        is_counted = gate == "counted"
        decided = stream if is_counted else [{**record, "left": None} for record in stream]
        done = replay_scores(decided, rate=rate, mode="aci", tuning=Tuning.for_rollouts(samples))
        escalated = [decision.escalate for decision in done.decisions]
    return fmean(escalated) - rate, fmean(escalated[place] for place in worst)


SIZES = ((20, 8), (40, 8))
RUN_ORDERS = ("random", "hard first", "easy first")
RATES = (0.1, 0.2, 0.4)


class WatchedGate(ConformalGate):
    """A gate that records its decisions, and decides as a conformal gate or by a coin.

    The record includes chunks of rollouts that were cancelled after the vote was settled, which a
    run's outcomes leave out.
    """

    def __init__(self, calibrator: CalibratorProtocol, name: str, coin: CoinGate) -> None:
        super().__init__(calibrator)
        self._name = name
        self._coin = coin
        self.made: list[tuple[float, bool]] = []  # score, and whether the chunk was escalated

    def decide(self, features: Features, score: float) -> Decision:
        """Decide with the conformal gate, or with a coin if the gate's name is "coin".

        If the name is "streaming in", the conformal gate is not informed how much of the run is
        left.
        """
        if self._name == "coin":
            return self._coin.decide(features, score)
        return super().decide(
            replace(features, left=None) if self._name == "streaming in" else features, score
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Record the decision, and pass it to the conformal gate."""
        self.made.append((math.inf if decision.score is None else decision.score, escalated))
        super().observe(decision, escalated)


@dataclass(frozen=True, slots=True)
class Ended:
    """Counts of a run's decisions and escalations, the escalated share of its worst chunks, and
    whether each answer is correct.
    """

    decisions: int
    escalated: int
    caught: float
    right: dict[str, float]

    @classmethod
    def of(cls, gate: WatchedGate, outcomes: Sequence[Outcome], rate: float) -> Ended:
        """Summarise a run from the decisions of its gate and from its answers."""
        worst = sorted(gate.made, reverse=True)[: max(1, round(rate * len(gate.made)))]
        right = {one.problem.id: float(one.answer == one.problem.answer) for one in outcomes}
        return cls(
            len(gate.made),
            sum(over for _, over in gate.made),
            fmean(over for _, over in worst),
            right,
        )

    @property
    def share(self) -> float:
        """Return the realised rate."""
        return self.escalated / self.decisions


def study_small_runs(options: Options) -> list[Table]:
    """Run every combination of size, order, rate and seed with each gate in turn.

    Finished runs stay on disk and do not run again.
    """
    parts = Parts(options.file("small-runs.jsonl"))
    sizes = options.pick(SIZES[:1], SIZES[:1], SIZES)
    seeds = options.pick(1, 3, 10)
    anyio.run(_run_all, parts, sizes, seeds, options.seed)
    return [_table(parts, sizes)]


async def _run_all(parts: Parts, sizes: Sequence[tuple[int, int]], seeds: int, first: int) -> None:
    async with Pair() as pair:
        for seed, size, rate, order, gate in product(
            range(first, first + seeds), sizes, RATES, RUN_ORDERS, GATES
        ):
            problems, samples = size
            name = f"{problems}|{samples}|{order}|{rate}|{gate}|{seed}"
            if name not in parts:
                say(f"small runs: {name}")
                plan = pair.plan(arm("atts", samples=samples, rate=rate), seed * 31 + len(order))
                tuning = Tuning.for_rollouts(samples)
                watched = WatchedGate(
                    Calibrator(rate, "aci", seed=plan.seed, tuning=tuning),
                    gate,
                    CoinGate(rate, plan.seed),
                )
                chosen = _ordered(arithmetic("test", problems, 5000 + seed), order)
                outcomes, _ = await run_block(chosen, replace(plan, gate=watched))
                parts.keep(name, asdict(Ended.of(watched, outcomes, rate)))


@dataclass(frozen=True, slots=True)
class Change:
    """A setting to replay on a recorded run, and the settings of the equivalent live run."""

    words: Mapping[str, Any]
    live: Arm


REPLAYED_RATE = 0.2
CHANGES: Mapping[str, Change] = {
    "nothing": Change({}, arm("atts", rate=REPLAYED_RATE)),
    "rate 0.1": Change({"rate": 0.1}, arm("atts", rate=0.1)),
    "rate 0.4": Change({"rate": 0.4}, arm("atts", rate=0.4)),
    "coin": Change({"method": "coin"}, arm("coin", rate=REPLAYED_RATE)),
    "4 samples": Change({"samples": 4}, arm("atts", rate=REPLAYED_RATE, samples=4)),
}
"""Changed settings, each replayed on recorded runs of 8 samples at rate 0.2."""


def study_replay(options: Options) -> list[Table]:
    """Replay recorded runs of the embedded pair, and compare the replays with live runs."""
    parts = Parts(options.file("replays.jsonl"))
    runs = options.pick(1, 10, 40)
    anyio.run(_replay_all, parts, range(options.seed, options.seed + runs))
    rows = list[Row]()
    for name in CHANGES:
        found = [value for part, value in parts.items() if part.startswith(f"{name}|")]
        live = mean_estimate([right for one in found for right in one["live"]], 20 * len(found))
        inside = [one["low"] <= live.value <= one["high"] for one in found]
        rows.append(
            (
                name,
                len(found),
                fmean(one["changed"] for one in found),
                fmean(one["unknown"] for one in found),
                f"[{fmean(one['low'] for one in found):.3f}, "
                f"{fmean(one['high'] for one in found):.3f}]",
                live.brief(),
                f"{sum(inside)} of {len(inside)}",
            )
        )
    return [
        Table.of(
            "Replays compared with live runs",
            "changed setting | runs | decisions that differ | unknown votes | bounds of the "
            "accuracy | live accuracy | bounds that contain it",
            rows,
            "The recorded runs have 20 problems with 8 samples at rate 0.2, on the embedded "
            "pair. For each changed setting, the study also made live runs on the same problems, "
            "with another random seed. The bounds are means over the replayed runs. The live "
            "accuracy is the mean over the live runs.",
        )
    ]


async def _replay_all(parts: Parts, seeds: Iterable[int]) -> None:
    async with Pair() as pair:
        for seed in seeds:
            if all(f"{name}|{seed}" in parts for name in CHANGES):
                continue
            problems = list(arithmetic("test", 20, 7000 + seed))
            with tempfile.TemporaryDirectory() as folder:
                directory = Path(folder) / "run"
                await evaluate(
                    problems,
                    pair.plan(CHANGES["nothing"].live, 2 * seed),
                    RunOptions(directory, engines="are open", signals="ignore"),
                )
                for name, change in CHANGES.items():
                    say(f"replay: {name}, seed {seed}")
                    again = replay(directory, **change.words)
                    outcomes, _ = await run_block(problems, pair.plan(change.live, 2 * seed + 1))
                    facts = {
                        "changed": again.changed / max(1, again.replayed.decisions),
                        "unknown": again.undecided / len(problems),
                        "low": again.replayed.accuracy.low,
                        "high": again.replayed.accuracy.high,
                        "live": [float(one.answer == one.problem.answer) for one in outcomes],
                    }
                    parts.keep(f"{name}|{seed}", facts)


def _ordered(problems: Sequence[Problem], order: str) -> list[Problem]:
    if order == RUN_ORDERS[0]:
        return list(problems)
    return sorted(problems, key=lambda problem: problem.level or 0, reverse=order == RUN_ORDERS[1])


def _table(parts: Parts, sizes: Sequence[tuple[int, int]]) -> Table:
    # `runs` is keyed by all settings except the seed, then by the seed.
    found: defaultdict[tuple[str, ...], dict[str, Ended]] = defaultdict(dict)
    for name, value in parts.items():
        *place, seed = name.split("|")
        found[tuple(place)][seed] = Ended(**value)
    rows = list[Row]()
    for (problems, samples), order, rate in product(sizes, RUN_ORDERS, RATES):
        cell = (str(problems), str(samples), order)
        counted, streaming, coin = (found[*cell, str(rate), gate] for gate in GATES)
        both = sorted(counted.keys() & streaming.keys() & coin.keys())
        facts = [
            fact
            for runs in (counted, streaming, coin)
            for fact in _facts([runs[seed] for seed in both], rate)
        ]
        spent = [sum(runs[seed].escalated for seed in both) for runs in (counted, streaming)]
        gained = _gained([(streaming[seed].right, counted[seed].right) for seed in both])
        over_coin = _gained([(coin[seed].right, counted[seed].right) for seed in both])
        alike = list[tuple[Mapping[str, float], Mapping[str, float]]]()
        for seed, run in counted.items():
            others = [found[*cell, str(each), GATES[1]].get(seed) for each in RATES]
            if len(known := [one for one in others if one is not None]) > 1:
                alike.append((_at_share(known, run.share), run.right))
        more = spent[1] / spent[0] if both else None
        rows.append(
            (
                f"{problems} x {samples}",
                order,
                rate,
                len(both),
                *facts,
                over_coin,
                more,
                gained,
                _gained(alike),
            )
        )
    return Table.of(
        "Small runs, live: error of the realised rate, escalated worst chunks, accuracy",
        "problems x samples | order | rate | runs | error, size known | worst escalated, size "
        "known | error, size unknown | worst escalated, size unknown | error, coin | worst "
        "escalated, coin | accuracy minus the coin's | chunks escalated, size unknown / known "
        "| accuracy, size known minus unknown | accuracy, size known minus unknown, at equal "
        "numbers of escalated chunks",
        rows,
        "The embedded pair solves arithmetic problems, in random order or sorted by level, "
        "with 64 rollouts in flight. Each run is made twice, with a gate that knows the number of "
        "rollouts in advance (*size known*) and with one that does not. *Worst escalated* is the "
        "share of the worst chunks that the gate escalated. At rate 0.2, for example, the worst "
        "chunks are the 20 % of all chunks with the worst scores. For the last column, the "
        "accuracy with unknown size is interpolated linearly between the two runs of the same "
        "seed with the nearest realised rates.",
    )


def _at_share(runs: Sequence[Ended], share: float) -> dict[str, float]:
    """Return each problem's accuracy in a run whose realised rate would be `share`.

    The accuracy is interpolated linearly between the two runs whose realised rates are nearest.
    """
    nearest = sorted(runs, key=lambda run: abs(run.share - share))[:2]
    low, high = sorted(nearest, key=lambda run: run.share)
    place = (share - low.share) / (high.share - low.share)
    return {name: right + place * (high.right[name] - right) for name, right in low.right.items()}


def _gained(runs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> str:
    """Return the mean accuracy of the second runs minus that of the first runs, paired by problem,
    with its interval.
    """
    pairs = [(first[name], right) for first, second in runs for name, right in second.items()]
    return interval(compare_runs(*map(list, zip(*pairs, strict=True))).difference) if pairs else "-"


def _facts(runs: Sequence[Ended], rate: float) -> tuple[float | None, float | None]:
    """Return the root mean square error of the realised rate over runs, and the mean share of the
    worst chunks that escalated.
    """
    if not runs:
        return None, None
    return math.sqrt(fmean((run.share - rate) ** 2 for run in runs)), fmean(
        run.caught for run in runs
    )
