"""Pipelines: ways to spend tokens on one problem, written against the engine protocol."""

from atts.core import Features
from atts.pipelines.capabilities import check_engines, needed_logprobs
from atts.pipelines.chunks import prompt_of
from atts.pipelines.context import (
    Answers,
    Context,
    NullListener,
    RolloutEngine,
    RolloutListener,
    RunLength,
)
from atts.pipelines.draft_length import DraftLength
from atts.pipelines.gates import (
    CalibratorProtocol,
    ConformalGate,
    CueGate,
    FixedGate,
    Gate,
    RandomGate,
    RoundGate,
    StaticRankGate,
    ThresholdGate,
    TopGate,
    let_go,
)
from atts.pipelines.policy import SMALL, Bounds, Budget, Chunking, ConfidenceStop, Policy
from atts.pipelines.scores import ScoreRule, evidence
from atts.pipelines.solve import solve
from atts.pipelines.votes import (
    Ballot,
    Grouper,
    Tally,
    VoteKind,
    ballot,
    cannot_change,
    settled_probability,
    tally,
)
from atts.pipelines.wrappers import (
    CappedGate,
    CertifiedGate,
    GuaranteedGate,
    Meanwhile,
    SparingGate,
    WarmingGate,
    WarmScore,
)
from atts.pipelines.writer_choice import WriterChoice

__all__ = [
    "SMALL",
    "Answers",
    "Ballot",
    "Bounds",
    "Budget",
    "CalibratorProtocol",
    "CappedGate",
    "CertifiedGate",
    "Chunking",
    "ConfidenceStop",
    "ConformalGate",
    "Context",
    "CueGate",
    "DraftLength",
    "SparingGate",
    "Features",
    "FixedGate",
    "Gate",
    "Grouper",
    "RunLength",
    "RolloutEngine",
    "RolloutListener",
    "Meanwhile",
    "Policy",
    "GuaranteedGate",
    "RandomGate",
    "RoundGate",
    "ScoreRule",
    "NullListener",
    "StaticRankGate",
    "Tally",
    "ThresholdGate",
    "TopGate",
    "VoteKind",
    "WarmScore",
    "WarmingGate",
    "WriterChoice",
    "ballot",
    "cannot_change",
    "check_engines",
    "evidence",
    "let_go",
    "needed_logprobs",
    "prompt_of",
    "settled_probability",
    "solve",
    "tally",
]
