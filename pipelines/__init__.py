"""Ways to spend tokens on one problem, against the engine protocol."""

from atts.pipelines.context import Answers, Context, Listener, Silent
from atts.pipelines.gates import (
    Calibrating,
    CappedGate,
    ConformalGate,
    CueGate,
    ExploringGate,
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
from atts.pipelines.policy import Chunking, ConfidenceStop, Policy
from atts.pipelines.presets import PRESETS, Material, Preset, preset
from atts.pipelines.replay import Replayed, ReplayedProblem, ReplayedRollout, replay
from atts.pipelines.scores import ScoreRule
from atts.pipelines.solve import solve
from atts.pipelines.votes import Ballot, Tally, cannot_change, settled_probability, tally

__all__ = [
    "Answers",
    "Ballot",
    "Calibrating",
    "CappedGate",
    "Chunking",
    "ConfidenceStop",
    "ConformalGate",
    "Context",
    "CueGate",
    "ExploringGate",
    "Features",
    "FixedGate",
    "Gate",
    "Learning",
    "Listener",
    "Material",
    "PRESETS",
    "Policy",
    "Preset",
    "RandomGate",
    "Replayed",
    "ReplayedProblem",
    "ReplayedRollout",
    "RoundGate",
    "ScoreRule",
    "Silent",
    "StaticRankGate",
    "Tally",
    "ThresholdGate",
    "TopGate",
    "cannot_change",
    "preset",
    "replay",
    "settled_probability",
    "solve",
    "tally",
]
