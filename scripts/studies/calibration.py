"""How well every calibration mode holds its rate on recorded scores, and how soon a broken array is noticed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy import stats

from atts.calibration import MODES, StoredScores, replay
from atts.calibration.drift import DriftMonitor
from atts.calibration.duplicate_scores import DuplicateScores
from atts.calibration.exact_rate import exact_rate
from atts.calibration.metrics import Floats, rate_metrics, sorted_decisions
from atts.calibration.stored import read_scores
from atts.calibration.two_sample import QuestionSample, features
from scripts.studies.harness import Options, Row, Table, say
from scripts.studies.machine import shared_data

Records = list[dict[str, Any]]
ORDERS = ("sim", "lock")
ARRAY = "ec846181"
"""The array that the recorded run was calibrated with."""
SCORES = 300


def study(options: Options) -> list[Table]:
    """Rates by mode, alarms, and what arrays are told apart; nothing where the traces are absent."""
    folder = traces()
    if folder is None:
        return []
    found = arrays(folder)
    own = next(name for name in found if ARRAY in name)
    streams = {order: arrivals(folder, order) for order in ORDERS}
    tables = [modes(streams, found[own], rate) for rate in options.pick((0.4,), (0.4, 0.2, 0.1), (0.4, 0.2, 0.1))]
    tables.append(alarms(found, own, options))
    if options.effort != "quick":
        tables.append(power(found, own, options))
    return tables


def traces() -> Path | None:
    """The folder of recorded traces, or None with the reason said."""
    root = shared_data()
    if root is not None and (root / "traces").is_dir():
        return root / "traces"
    say("no traces at hand: studies of real streams are left out (set ATTS_SHARED_DATA to their folder)")
    return None


def arrivals(folder: Path, order: str) -> Records:
    """The scores of a real run in one of its arrival orders."""
    return [json.loads(line) for line in (folder / f"arrivals_ct0_{order}.jsonl").read_text().splitlines()]


def arrays(folder: Path) -> dict[str, StoredScores]:
    """Every published array, by a short name; sixteen scores a question, four in the smoke test's."""
    found = dict[str, StoredScores]()
    for path in sorted((folder / "calibration").glob("*.npy")):
        name = path.stem.removeprefix("ppls_").replace("_s16_t500_temp0.8", "")
        found[name] = read_scores(path, 4 if "test_s4" in name else 16)
    return found


def modes(streams: Mapping[str, Records], stored: StoredScores, rate: float) -> Table:
    """Every mode at one rate beside the published rule, the synchronous sort and a coin."""
    rows = list[Row]()
    for order, records in streams.items():
        for name, decisions in _others(records, stored, rate).items():
            questions, turns = ([record[key] for record in records] for key in ("question", "turn"))
            scores = [math.log(record["score"]) for record in records]
            taken = [bool(decision) for decision in decisions]
            rows.append((order, name, *rate_metrics(questions, turns, scores, taken, rate).values()))
        for mode in MODES:
            done = replay(records, rate=rate, mode=mode, stored=stored if mode == "split" else ())
            rows.append((order, f"mode {mode}", *done.metrics.values()))
    errors = {str(row[1]): row[3:5] for row in rows if row[0] == ORDERS[0]}  # by turn, by question
    words = {name: [f"{error:.2g}" for error in errors[name]] for name in ("published", "mode question-turn")}
    headline = "by turn the published rule is off by {0}, by question by {1}; ours by **{2}** and **{3}** "
    headline = headline.format(*(word for each in words.values() for word in each))
    return Table.of(
        f"Every mode on the real stream at rate {rate:g}",
        "order | rule | overall error | turn RMS | question RMS | worst rolling 500 | AUROC in (question, turn) | "
        "like the sort",
        rows,
        headline=headline + f"(root mean squares, nominal {rate:g})",
    )


def _others(records: Records, stored: StoredScores, rate: float) -> dict[str, Floats]:
    pool, x = np.sort(np.asarray(stored.nonconformity)), np.array([math.log(record["score"]) for record in records])
    published = [int(below) >= (1 - exact_rate(rate)) * len(pool) for below in np.searchsorted(pool, x)]
    q, t = (np.array([record[name] for record in records]) for name in ("question", "turn"))
    coin = np.random.default_rng(0).random(len(x)) < rate
    return {
        "published": np.array(published, float),
        "sort": sorted_decisions(q, t, x, rate),
        "coin": coin.astype(float),
    }


def alarms(found: dict[str, StoredScores], own: str, options: Options) -> Table:
    """False alarms on clean streams and misses on broken arrays, per array."""
    clean, broken = options.pick(100, 1000, 1000), options.pick(20, 100, 200)
    others = () if options.effort == "quick" else ("self_opt", "1b8761b8", "amc_s1.1")
    chosen = {name: array for name, array in found.items() if name == own or any(part in name for part in others)}
    rows = list[Row]()
    for name, stored in {**chosen, **(_synthetic() if others else {})}.items():
        runs = clean if name == own or options.effort == "full" else clean // 4
        false = sum(_after(stored, stored, seed) is not None for seed in range(runs))
        rows.append((name, "clean", runs, false, None, None))
        false = sum(_after(_sampled(stored, seed), stored, seed) is not None for seed in range(runs // 4))
        rows.append((name, "clean, and itself a sample", runs // 4, false, None, None))
        for kind, array in _broken(stored).items():
            seen = [_after(array, stored, seed) for seed in range(broken)]
            hits = [after for after in seen if after is not None]
            rows.append((name, kind, broken, len(hits), median(hits) if hits else None, max(hits, default=None)))
    return Table.of(
        f"Alarms within {SCORES} scores of whole questions drawn from the array",
        "array | loaded calibration | runs | alarms | median score of the alarm | latest",
        rows,
        "Clean runs draw questions with replacement from the array they are compared with: alarms there are false. "
        "In the second kind what was loaded is as many questions drawn in the same way, for each run anew. "
        "Made-up arrays: 60 questions of 16 scores whose levels are skewed, have heavy tails, or are of two kinds.",
    )


def power(found: dict[str, StoredScores], own: str, options: Options) -> Table:
    """Runs of one model against the arrays of all others."""
    runs = options.pick(10, 60, 200)
    rows = list[Row]()
    for name, stored in found.items():
        seen = [_after(stored, found[own], seed) for seed in range(runs)]
        back = [_after(found[own], stored, seed) for seed in range(runs)]
        shares = (sum(after is not None for after in each) / runs for each in (seen, back))
        effect, best = _effect(stored, found[own]), _oracle(stored, found[own])
        rows.append((name, len(stored), f"{DuplicateScores.of(stored).within:.0%}", effect, *shares, best))
    return Table.of(
        f"Share of {runs} runs of {own} that notice another array within {SCORES} scores",
        "loaded calibration | scores | repeats | difference of question levels (SD) | noticed | the other way | "
        "best possible",
        rows,
        "The two MATH arrays of the same models, and the one published under another name, are the same law: nothing "
        "to notice. The other way: runs of that array against this one. Best possible: the likelihood-ratio test of "
        "question levels and spreads at 19 questions and a false-alarm rate of 0.5 %, for a test that knows both laws "
        "(normal ones of the same moments); a monitor knows only one of them, and that from a sample.",
    )


def _broken(stored: StoredScores) -> dict[str, StoredScores]:
    scores = stored.scores
    return {
        "shifted by +0.5 in log": StoredScores.of([score * math.exp(0.5) for score in scores], 16),
        "shifted by -0.5 in log": StoredScores.of([max(1.0, score * math.exp(-0.5)) for score in scores], 16),
        "half of the draws duplicated": StoredScores.of([scores[at - at % 2] for at in range(len(scores))], 16),
        "one draw in ten duplicated": StoredScores.of([scores[at - (at % 10 == 9)] for at in range(len(scores))], 16),
    }


def _synthetic() -> dict[str, StoredScores]:
    draw = np.random.default_rng(2)
    levels = {
        "made-up, skewed": draw.gamma(2.0, 0.25, 60),
        "made-up, heavy tails": 1 + 0.1 * draw.standard_t(3, 60),
        "made-up, two kinds": np.where(draw.random(60) < 0.3, 1.2, 0.4) + 0.05 * draw.standard_normal(60),
    }
    made = dict[str, StoredScores]()
    for name, level in levels.items():
        scores = level[:, None] + 0.2 * np.sqrt(np.abs(level))[:, None] * draw.standard_normal((60, 16))
        made[name] = StoredScores.of(np.exp(np.abs(scores)).ravel().tolist(), 16)
    return made


def _sampled(stored: StoredScores, seed: int) -> StoredScores:
    """As many whole questions, drawn with replacement and moved by less than shows, so that none repeats another."""
    questions = np.array(stored.scores).reshape(len(set(stored.questions)), -1)
    draw = np.random.default_rng([seed, 1])
    chosen = questions[draw.integers(len(questions), size=len(questions))]
    moved = np.maximum(1.0, chosen * np.exp(draw.normal(0, 1e-6, chosen.shape)))
    return StoredScores.of(moved.ravel().tolist(), questions.shape[1])


def _stream(stored: StoredScores, seed: int) -> Iterator[tuple[float, str]]:
    size = len(stored) // len(set(stored.questions))
    questions = np.array(stored.nonconformity).reshape(-1, size)
    draw = np.random.default_rng(seed)
    for live in range(math.ceil(SCORES / size)):
        for nonconformity in questions[draw.integers(len(questions))][: SCORES - size * live]:
            yield float(nonconformity), f"live {live}"


def _after(stored: StoredScores, source: StoredScores, seed: int) -> int | None:
    monitor = DriftMonitor(stored)
    for nonconformity, question in _stream(source, seed):
        if monitor.events:
            break
        monitor.observe(nonconformity, question, 0)
    return monitor.events[0].scores if monitor.events else None


def _effect(stored: StoredScores, other: StoredScores) -> float:
    levels = [np.array(s.nonconformity).reshape(len(set(s.questions)), -1).mean(axis=1) for s in (stored, other)]
    return float((levels[0].mean() - levels[1].mean()) / math.sqrt((levels[0].var() + levels[1].var()) / 2))


def _oracle(stored: StoredScores, other: StoredScores, questions: int = 19, level: float = 0.005) -> float:
    """The power of the best test between two known normal laws of the questions' levels and log spreads."""
    samples = [QuestionSample.of(each, 0) for each in (stored, other)]
    columns = [features(sample.questions, sample.size) for sample in samples]
    laws = [stats.multivariate_normal(column.mean(axis=0), np.cov(column.T)) for column in columns]
    draw = np.random.default_rng(0)
    runs = [law.rvs((20_000, questions), random_state=draw) for law in laws]
    clean, live = ((laws[1].logpdf(run) - laws[0].logpdf(run)).sum(axis=1) for run in runs)
    return float(np.mean(live > np.quantile(clean, 1 - level)))
