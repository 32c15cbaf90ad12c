"""Engines on servers: vLLM, SGLang, llama.cpp, one or several at once."""

from atts.remote.engine import RemoteEngine
from atts.remote.options import DIALECTS, DialectName, Key, RemoteOptions
from atts.remote.probe import Finding

__all__ = ["DIALECTS", "DialectName", "Finding", "Key", "RemoteEngine", "RemoteOptions"]
