"""The local engine, which runs models on this machine; all requests share the model's steps and one
prefix cache.
"""

from atts.local.engine import Accelerator, LocalEngine, RunDemand
from atts.local.messages import LoopStats
from atts.local.model_config import Family
from atts.local.options import EngineShare, EngineSize, LocalOptions, share_cards
from atts.local.seams import Ask, Proposer, TokenProposal

__all__ = [
    "Accelerator",
    "Ask",
    "EngineShare",
    "EngineSize",
    "Family",
    "LocalEngine",
    "LocalOptions",
    "LoopStats",
    "Proposer",
    "RunDemand",
    "TokenProposal",
    "share_cards",
]
