"""Ways to spend tokens on one problem, against the engine protocol."""

from atts.pipelines.context import Answers, Context, Listener, Silent
from atts.pipelines.gates import (
    Calibrating,
    ConformalGate,
    CueGate,
    Features,
    FixedGate,
    Gate,
    Learning,
    RandomGate,
    RoundGate,
    StaticRankGate,
    ThresholdGate,
    TopGate,
    level_of,
)
from atts.pipelines.needs import check_engines
from atts.pipelines.policy import Chunking, ConfidenceStop, Policy
from atts.pipelines.scores import ScoreRule, evidence
from atts.pipelines.solve import solve
from atts.pipelines.votes import Ballot, Grouper, Tally, VoteKind, ballot, cannot_change, settled_probability, tally
from atts.pipelines.wrappers import (
    CappedGate,
    CertifiedGate,
    Certifying,
    ExploringGate,
    Meanwhile,
    Promising,
    WarmingGate,
    WarmScore,
)

__all__ = [
    "Answers",
    "Ballot",
    "Calibrating",
    "CappedGate",
    "CertifiedGate",
    "Certifying",
    "Chunking",
    "ConfidenceStop",
    "ConformalGate",
    "Context",
    "CueGate",
    "ExploringGate",
    "Features",
    "FixedGate",
    "Gate",
    "Grouper",
    "Learning",
    "Listener",
    "Meanwhile",
    "Policy",
    "Promising",
    "RandomGate",
    "RoundGate",
    "ScoreRule",
    "Silent",
    "StaticRankGate",
    "Tally",
    "ThresholdGate",
    "TopGate",
    "VoteKind",
    "WarmScore",
    "WarmingGate",
    "ballot",
    "cannot_change",
    "check_engines",
    "evidence",
    "level_of",
    "settled_probability",
    "solve",
    "tally",
]
