"""The engine on models of this machine: continuous batching over a shared cache of keys and values."""

from atts.local.engine import LocalEngine, LocalOptions
from atts.local.messages import LoopStats

__all__ = ["LocalEngine", "LocalOptions", "LoopStats"]
