"""The local engine: models in this process or a child of it, continuous batching, a shared prefix cache."""

from atts.local.engine import LocalEngine
from atts.local.messages import LoopStats
from atts.local.options import LocalOptions

__all__ = ["LocalEngine", "LocalOptions", "LoopStats"]
