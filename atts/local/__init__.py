"""The local engine: models in this process or a child of it, continuous batching, a shared prefix
cache.
"""

from atts.local.checking import check_adapter, check_model, check_weights
from atts.local.engine import LocalEngine
from atts.local.messages import LoopStats
from atts.local.model_config import Family
from atts.local.model_divergence import Divergence, divergence
from atts.local.options import LocalOptions

__all__ = [
    "Divergence",
    "Family",
    "LocalEngine",
    "LocalOptions",
    "LoopStats",
    "check_adapter",
    "check_model",
    "check_weights",
    "divergence",
]
