"""What the ordinal classifier learns from real rollouts, and how often its sets hold the true level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from atts.calibration.ordinal import LEVELS, Row, fit_ordinal
from atts.calibration.ordinal_gate import level_of
from atts.calibration.ordinal_sets import LevelSets
from scripts.studies.calibration_data import Records, right_answers, samples, traces
from scripts.studies.harness import Cell, Options, Table

FEATURES = ("first log perplexity", "length", "turns", "share of siblings with its answer")
SETS: dict[str, tuple[int, ...]] = {
    "perplexity alone": (0,),
    "all but agreement": (0, 1, 2),
    "agreement alone": (3,),
    "all": (0, 1, 2, 3),
}


def study(options: Options) -> list[Table]:
    """Discrimination within questions and coverage of sets; nothing where the traces are absent."""
    folder = traces()
    if folder is None:
        return []
    known = right_answers(folder)
    judged = {question for question, _ in known}
    records = [record for record in samples(folder, "ct0") if record["question_id"] in judged]
    rows, labels = _table(records, known)
    questions = [int(record["question_id"]) for record in records]
    result = list[tuple[Cell, ...]]()
    for name, columns in SETS.items():
        table = [[row[column] for column in columns] for row in rows]
        result.append((name, *_evaluate(table, labels, questions, [FEATURES[column] for column in columns])))
    return [
        Table(
            "Ordinal classifier on real rollouts: fitted on two thirds of the even questions, tested on the odd",
            ("features", "AUROC right/wrong in a question", "coverage of sets (alpha 0.1)", "mean size", "chunks"),
            tuple(result),
            ("Labels from judged answers: kept and right accept; escalated and right verify; wrong escalate.",
             "Length and turns tell who was helped more than who was right, which costs order within questions.",
             "Sets calibrated on the other third of the even questions; questions move together, so coverage varies."),
        )
    ]  # fmt: skip


def _table(records: Records, known: set[tuple[int, str]]) -> tuple[list[list[float | None]], list[str]]:
    answers = dict[int, list[str]]()
    for record in records:
        if record["answer_direct"].strip() not in ("", "invalid"):
            answers.setdefault(record["question_id"], []).append(record["answer_direct"])
    rows, labels = list[list[float | None]](), list[str]()
    for record in records:
        group, own = answers.get(record["question_id"], []), record["answer_direct"]
        share = (group.count(own) - 1) / (len(group) - 1) if own in group and len(group) > 1 else 0.0
        first = record["turns"][0]
        length = math.log1p(sum(turn["draft_chars"] for turn in record["turns"]))
        rows.append([math.log(first["ppl"]) if first["ppl"] else None, length, math.log(len(record["turns"])), share])
        helped = any(turn["escalated"] for turn in record["turns"])
        labels.append(level_of((record["question_id"], own) in known, helped))
    return rows, labels


def _evaluate(
    rows: Sequence[Row], labels: Sequence[str], questions: Sequence[int], names: Sequence[str]
) -> tuple[float, float, float, int]:
    fit = [at for at, q in enumerate(questions) if q % 2 == 0 and q % 6]
    calibrate = [at for at, q in enumerate(questions) if q % 6 == 0]
    test = [at for at, q in enumerate(questions) if q % 2]
    model = fit_ordinal([rows[at] for at in fit], [labels[at] for at in fit], names)
    sets = LevelSets(0.1)
    for at in calibrate:
        sets.learn(model.probabilities(rows[at]), LEVELS.index(labels[at]), str(questions[at]))
    windows = [sets.levels(model.probabilities(rows[at])) for at in test]
    hits = fmean(LEVELS.index(labels[at]) in window for at, window in zip(test, windows, strict=True))
    leans = [(questions[at], model.lean(rows[at]), labels[at] == "escalate") for at in test]
    return _auroc(leans), hits, fmean(map(len, windows)), len(test)


def _auroc(leans: Sequence[tuple[int, float, bool]]) -> float:
    """P(a wrong rollout leans more to the target than a right one) over all pairs of one question, ties half."""
    wins = pairs = 0.0
    for question in {q for q, _, _ in leans}:
        wrong = [lean for q, lean, bad in leans if q == question and bad]
        right = [lean for q, lean, bad in leans if q == question and not bad]
        wins += sum((a > b) + 0.5 * (a == b) for a in wrong for b in right)
        pairs += len(wrong) * len(right)
    return wins / pairs if pairs else math.nan
