"""Lossless speculation: tokens proposed by one part and verified by another, as pure functions and
values.
"""

from atts.speculation.costs import Condition, StepCosts
from atts.speculation.goodput import Forecast, GoodputControl, StepShape
from atts.speculation.hints import HintProposer
from atts.speculation.outcomes import (
    Guessing,
    OutcomeCache,
    OutcomeGuess,
    PlaceLaw,
    most_worthwhile,
    ranked_outcomes,
)
from atts.speculation.proposals import (
    NOTHING,
    Ask,
    BestProposer,
    OverlapStats,
    Proposer,
    TokenProposal,
)
from atts.speculation.schemes import SchemeControl
from atts.speculation.suffix import SuffixProposer
from atts.speculation.verifying import standing

__all__ = [
    "NOTHING",
    "Ask",
    "BestProposer",
    "Condition",
    "Forecast",
    "GoodputControl",
    "Guessing",
    "HintProposer",
    "OutcomeCache",
    "OutcomeGuess",
    "OverlapStats",
    "PlaceLaw",
    "Proposer",
    "SchemeControl",
    "StepCosts",
    "StepShape",
    "SuffixProposer",
    "TokenProposal",
    "most_worthwhile",
    "ranked_outcomes",
    "standing",
]
