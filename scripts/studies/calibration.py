"""How well every calibration mode holds its rate on recorded scores, and how soon a broken array is
noticed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy import stats

from atts.calibration import MODES, StoredScores, replay
from atts.calibration.drift import DuplicateScores, QuestionSample, features
from atts.calibration.rates import exact_rate
from atts.calibration.score_replay import Floats, rate_metrics, sorted_decisions
from atts.calibration.scores import read_scores
from scripts.studies.harness import Options, Row, Table, say, shared_data
from tests.calibration.live_scores import noticed_after

Records = list[dict[str, Any]]
ORDERS = ("sim", "lock")
ARRAY = "ec846181"
"""The array that the recorded run was calibrated with."""


def study_calibration(options: Options) -> list[Table]:
    """Rates by mode, alarms, and what arrays are told apart; nothing where the traces are absent."""
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


def traces() -> Path | None:
    """The folder of recorded traces, or None with the reason said."""
    root = shared_data()
    if root is not None and (root / "traces").is_dir():
        return root / "traces"
    say(
        "no traces at hand: studies of real streams are left out (set ATTS_SHARED_DATA to their "
        "folder)"
    )
    return None


def arrivals(folder: Path, order: str) -> Records:
    """The scores of a real run in one of its arrival orders."""
    return [
        json.loads(line)
        for line in (folder / f"arrivals_ct0_{order}.jsonl").read_text().splitlines()
    ]


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
        questions, turns = ([record[key] for record in records] for key in ("question", "turn"))
        scores = [math.log(record["score"]) for record in records]
        for name, taken in _others(questions, turns, np.array(scores), stored, rate).items():
            rows.append(
                (order, name, *rate_metrics(questions, turns, scores, taken, rate).values())
            )
        for mode in MODES:
            done = replay(records, rate=rate, mode=mode, stored=stored if mode == "split" else ())
            rows.append((order, f"mode {mode}", *done.metrics.values()))
    errors = {
        str(row[1]): [f"{error:.2g}" for error in row[3:5]] for row in rows if row[0] == ORDERS[0]
    }
    (by_turn, by_question), (our_turn, our_question) = (
        errors[name] for name in ("published", "mode question-turn")
    )
    return Table.of(
        f"Every mode on the real stream at rate {rate:g}",
        "order | rule | overall error | turn RMS | question RMS | worst rolling 500 | AUROC in "
        "(question, turn) | "
        "like the sort",
        rows,
        headline=f"by turn the published rule is off by {by_turn}, by question by {by_question}; "
        f"ours by "
        f"**{our_turn}** and **{our_question}** (root mean squares, nominal {rate:g})",
    )


def _others(
    questions: Sequence[Any],
    turns: Sequence[int],
    scores: Floats,
    stored: StoredScores,
    rate: float,
) -> dict[str, list[bool]]:
    """The decisions of the published rule, of the sort that waits for all siblings, and of a coin."""
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
    """False alarms on clean streams and misses on broken arrays, per array."""
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
            "clean, and itself a sample": [_sampled(stored, n) for n in range(runs // 4)],
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
        "Clean runs draw questions with replacement from the array they are compared with: alarms "
        "there are false. "
        "In the second kind what was loaded is as many questions drawn in the same way, for each "
        "run anew. "
        "Made-up arrays: 60 questions of 16 scores whose levels are skewed, have heavy tails, or "
        "are of two kinds.",
    )


def power(found: dict[str, StoredScores], own: str, options: Options) -> Table:
    """Runs of one model against the arrays of all others."""
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
            (name, len(stored), f"{DuplicateScores.of(stored).within:.0%}", effect, *shares, best)
        )
    return Table.of(
        f"Share of {runs} runs of {own} that notice another array within 300 scores",
        "loaded calibration | scores | repeats | difference of question levels (SD) | noticed | "
        "the other way | "
        "best possible",
        rows,
        "The two MATH arrays of the same models, and the one published under another name, are the "
        "same law: nothing "
        "to notice. The other way: runs of that array against this one. Best possible: the "
        "likelihood-ratio test of "
        "question levels and spreads at 19 questions and a false-alarm rate of 0.5 %, for a test "
        "that knows both laws "
        "(normal ones of the same moments); a monitor knows only one of them, and that from a "
        "sample.",
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
    """As many whole questions, drawn with replacement and moved by less than shows, so that none
    repeats another.
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
    """The power of the best test between two known normal laws of the questions' levels and log
    spreads.
    """
    samples = [QuestionSample.of(each, 0) for each in (stored, other)]
    columns = [features(sample.questions, sample.size) for sample in samples]
    laws = [stats.multivariate_normal(column.mean(axis=0), np.cov(column.T)) for column in columns]
    draw = np.random.default_rng(0)
    runs = [law.rvs((20_000, questions), random_state=draw) for law in laws]
    clean, live = ((laws[1].logpdf(run) - laws[0].logpdf(run)).sum(axis=1) for run in runs)
    return float(np.mean(live > np.quantile(clean, 1 - level)))
