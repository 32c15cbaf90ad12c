"""Engines on HTTP servers of any known dialect or in the actors of a Ray cluster, alone or as a
pool of replicas.
"""

from atts.servers.addresses import SCHEMES, ServerWords, read_server, server_engine
from atts.servers.engine import ProbeReport, RemoteEngine, probe
from atts.servers.options import DIALECTS, ApiKey, DialectName, Prefill, RemoteOptions
from atts.servers.pool import Replica, ReplicaLoad, ReplicaPool
from atts.servers.probing import Finding
from atts.servers.ray import RayEngine, RayOptions

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
