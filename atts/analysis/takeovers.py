"""Examples for a learned judge: what takeovers changed in a run whose coins chose them."""

from __future__ import annotations

import math

from atts.analysis.training_data import finished_cases, scored_chunks
from atts.calibration import Examples
from atts.errors import UsageError
from atts.journal import RecordedRun
from atts.pipelines import JUDGE_FEATURES, judge_features

TRIAL = "trial"
"""The method that scores every chunk and lets coins choose."""


def takeover_examples(run: RecordedRun) -> Examples:
    """Return a run's chunks with their features and an unbiased estimate of each takeover's gain.

    A coin of known probability e escalated each chunk or not (W). With y = 1 for a correct rollout
    and m the share of correct ones among its siblings, (W - e) / (e (1 - e)) (y - m) has the gain
    of a takeover at that chunk as its expectation, whatever m is: m does not depend on W.

    :raises UsageError: coins did not choose, the rate is 0 or 1, or nothing was graded.
    :raises JournalError: no problem is finished, or the journal cannot be read.
    """
    setting = run.manifest.configuration.get("method")
    method = "" if setting is None else str(setting.value)
    if method != TRIAL:
        raise UsageError(
            f"method {method or '(none)'} chose its chunks by their scores, so escalated chunks "
            f"differ in more than the takeover; make a run with --method {TRIAL}"
        )
    agreements: dict[tuple[str, int, int], float | None] = {}
    for event in run.decisions():
        share = event.features.get("agreement", 0.0) if event.features.get("answered") else None
        agreements[event.decision.turn_key] = share
    features: list[tuple[float, ...]] = []
    gains: list[float] = []
    problems: list[str] = []
    for case in finished_cases(run, needs_scores=True):
        correct: dict[int, float] = {}
        for sample, verdict in case.verdicts.items():
            if verdict not in ("spared", "lost", "unscored", None):
                correct[sample] = float(verdict == "correct")
        teacher = scored_chunks(case)
        for rollout in case.outcome.rollouts:
            others = [share for sample, share in correct.items() if sample != rollout.sample]
            if rollout.sample not in correct or not others:
                continue
            surprise = correct[rollout.sample] - sum(others) / len(others)
            for turn in rollout.turns:
                drafted = turn.drafted
                decision = turn.decision
                if drafted is None or decision is None or decision.origin == "forced":
                    continue
                rate = decision.rate
                if not 0 < rate < 1:
                    raise UsageError(f"at rate {rate:g} no coin chooses; give one between 0 and 1")
                row = judge_features(
                    teacher.get((rollout.sample, turn.index), ()),
                    drafted.logprobs,
                    turn.index,
                    agreements.get(decision.turn_key),
                )
                if any(map(math.isnan, row)):
                    continue
                weight = (float(decision.escalate) - rate) / (rate * (1 - rate))
                features.append(row)
                gains.append(weight * surprise)
                problems.append(rollout.problem)
    if not gains:
        raise UsageError(
            "the run has no chunk with the log-probabilities of both models in a graded rollout; "
            "problems need reference answers, and the models one tokenizer"
        )
    return Examples(JUDGE_FEATURES, features, gains, problems)
