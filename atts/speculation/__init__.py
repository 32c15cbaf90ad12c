"""Lossless speculation: tokens proposed by one part and verified by another, as pure functions and values."""

from atts.speculation.goodput import Forecast, GoodputControl, StepShape
from atts.speculation.hints import HintProposer
from atts.speculation.proposals import NOTHING, Ask, BestProposer, Proposer, TokenProposal
from atts.speculation.ratio import ratio_walk
from atts.speculation.replay import standing, tree_path
from atts.speculation.suffix import SuffixProposer

__all__ = [
    "NOTHING",
    "Ask",
    "BestProposer",
    "Forecast",
    "GoodputControl",
    "HintProposer",
    "TokenProposal",
    "Proposer",
    "StepShape",
    "SuffixProposer",
    "ratio_walk",
    "standing",
    "tree_path",
]
