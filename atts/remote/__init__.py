"""Engines on servers: vLLM, SGLang, llama.cpp, one or several at once."""

from atts.remote.engine import RemoteEngine
from atts.remote.options import DIALECTS, DialectName, Key, RemoteOptions
from atts.remote.pool import Replica, ReplicaLoad, ReplicaPool
from atts.remote.probing import Finding
from atts.remote.report import ProbeReport, probe
from atts.remote.words import SCHEMES, server_engine

__all__ = [
    "DIALECTS",
    "SCHEMES",
    "DialectName",
    "Finding",
    "Key",
    "ProbeReport",
    "RemoteEngine",
    "RemoteOptions",
    "Replica",
    "ReplicaLoad",
    "ReplicaPool",
    "probe",
    "server_engine",
]
