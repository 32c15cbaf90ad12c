"""Ways to spend tokens on one problem, against the engine protocol."""

from atts.pipelines.calibrated import LabelledRun, certified_gate, certify_runs, frozen_gate, warming_gate
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
)
from atts.pipelines.needs import check_engines
from atts.pipelines.policy import Chunking, ConfidenceStop, Policy
from atts.pipelines.presets import PRESETS, Material, Preset, preset
from atts.pipelines.scores import ScoreRule
from atts.pipelines.skipping import SkippingGate
from atts.pipelines.solve import solve
from atts.pipelines.votes import Ballot, Tally, cannot_change, settled_probability, tally
from atts.pipelines.wrappers import (
    CappedGate,
    CertifiedGate,
    Certifying,
    ExploringGate,
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
    "LabelledRun",
    "Learning",
    "Listener",
    "Material",
    "PRESETS",
    "Policy",
    "Preset",
    "Promising",
    "RandomGate",
    "RoundGate",
    "ScoreRule",
    "Silent",
    "SkippingGate",
    "StaticRankGate",
    "Tally",
    "ThresholdGate",
    "TopGate",
    "WarmScore",
    "WarmingGate",
    "cannot_change",
    "certified_gate",
    "certify_runs",
    "check_engines",
    "frozen_gate",
    "preset",
    "settled_probability",
    "solve",
    "tally",
    "warming_gate",
]
