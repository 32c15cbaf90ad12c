"""Engines for models that run in a Ray cluster, or on one or several HTTP servers."""

from atts.servers.addresses import DIALECTS, SCHEMES, ServerAddress, read_server
from atts.servers.dialect import DraftCounts
from atts.servers.engine import ProbeReport, RemoteEngine, probe, server_engine
from atts.servers.options import ApiKey, Prefill, RemoteOptions
from atts.servers.pool import Replica, ReplicaLoad, ReplicaPool
from atts.servers.probing import Finding
from atts.servers.ray import RayEngine, RayOptions
from atts.servers.rewards import RemoteRewardModel, RewardedTarget, RewardModel
from atts.servers.vllm import compatibility_table, lacking, read_version, start_flags

__all__ = [
    "RemoteRewardModel",
    "RewardModel",
    "RewardedTarget",
    "DIALECTS",
    "SCHEMES",
    "ApiKey",
    "DraftCounts",
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
    "ServerAddress",
    "compatibility_table",
    "lacking",
    "probe",
    "read_server",
    "read_version",
    "server_engine",
    "start_flags",
]
