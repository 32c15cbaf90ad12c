"""Engines on HTTP servers of any known dialect or in the actors of a Ray cluster, alone or as a
pool of replicas.
"""

from atts.remote.engine import ProbeReport, RemoteEngine, probe
from atts.remote.options import DIALECTS, ApiKey, DialectName, Prefill, RemoteOptions
from atts.remote.pool import Replica, ReplicaLoad, ReplicaPool
from atts.remote.probing import Finding
from atts.remote.ray import RayEngine, RayOptions
from atts.remote.urls import SCHEMES, ServerWords, read_server, server_engine

__all__ = [
    "DIALECTS",
    "SCHEMES",
    "ApiKey",
    "DialectName",
    "Finding",
    "Prefill",
    "ProbeReport",
    "RayEngine",
    "RayOptions",
    "RemoteEngine",
    "RemoteOptions",
    "Replica",
    "ReplicaLoad",
    "ReplicaPool",
    "ServerWords",
    "probe",
    "read_server",
    "server_engine",
]
