"""Conformal calibration, which turns a stream of scores into decisions at a guaranteed rate."""

# All calls take plain numbers and strings:
#
#   calibrator = Calibrator(rate, mode, stored=scores)
#   calibrator.decide(score, question=, turn=, sample=, issue=)
#       decides on a chunk; then call calibrator.observe(decision)
#   replay_scores(records, rate, mode, seed)
#       decides on recorded scores, and computes metrics of the rate
#   StoredScores.of(scores, per_question), read_scores(path)
#       return the scores of a calibration run, from a list or from a file
#   examine(stored, rate)
#       checks stored scores, and estimates how uncertain their threshold is
#   DriftMonitor(stored, policy=).observe(nonconformity, question, turn)
#       detects drift; a Calibrator already contains a monitor
#   certify([Candidate(gate, rate, losses, cost)], epsilon)
#       finds the cheapest policy whose loss of accuracy is at most epsilon
#   certify_abstention(confidence, wrong, risk)
#       finds the lowest confidence at which an answer may be given

from atts.calibration.certificates import (
    Abstention,
    Candidate,
    Certificate,
    certify,
    certify_abstention,
    certify_net,
    lost_answers,
    net_losses,
)
from atts.calibration.conformal import (
    ClusterSummary,
    RateCheck,
    by_cluster,
    check_rate,
    coin_band,
    summarise,
)
from atts.calibration.controllers import DEFAULTS, MODES, Mode, Tuning
from atts.calibration.drift import (
    DomainCheck,
    DriftEvent,
    DriftMonitor,
    Health,
    SimpleJumper,
    examine,
    first_alarm,
)
from atts.calibration.judge import AdvantageJudge, Examples, cross_validated, fit_judge
from atts.calibration.online import (
    HOLD,
    Calibrator,
    ReplayResult,
    pooled_auroc,
    rate_metrics,
    replay_scores,
    short_replay_note,
)
from atts.calibration.scores import (
    LOG_PROB,
    PERPLEXITY,
    REAL,
    Scale,
    StoredScores,
    check_fingerprint,
    is_state,
    labels_of,
    parse_lines,
    read_scores,
    scale_named,
)
from atts.calibration.state import read_state, state_text, write_state

__all__ = [
    "Abstention", "AdvantageJudge",
    "Calibrator", "Candidate", "Certificate", "ClusterSummary", "DEFAULTS", "DomainCheck", "DriftEvent",
    "DriftMonitor", "HOLD", "Health", "LOG_PROB", "MODES", "Mode", "PERPLEXITY", "REAL",
    "RateCheck", "ReplayResult", "Scale", "SimpleJumper", "StoredScores", "Tuning", "by_cluster", "certify",
    "certify_abstention", "certify_net", "check_fingerprint", "check_rate", "coin_band", "cross_validated",
    "Examples", "examine",
    "first_alarm", "fit_judge", "is_state", "labels_of", "lost_answers", "net_losses", "parse_lines", "pooled_auroc",
    "rate_metrics", "read_scores", "read_state", "replay_scores", "scale_named", "short_replay_note",
    "state_text", "summarise", "write_state",
]  # fmt: skip
