"""Engines elsewhere: on servers of any known dialect, or in the actors of a Ray cluster, one or several at once."""

from atts.remote.actor import RayOptions
from atts.remote.actors import RayEngine
from atts.remote.engine import RemoteEngine
from atts.remote.options import DIALECTS, DialectName, Key, Prefill, RemoteOptions
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
    "Prefill",
    "ProbeReport",
    "RayEngine",
    "RayOptions",
    "RemoteEngine",
    "RemoteOptions",
    "Replica",
    "ReplicaLoad",
    "ReplicaPool",
    "probe",
    "server_engine",
]
