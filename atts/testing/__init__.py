"""Test tools that need no real model: a scripted engine, virtual time, faults, fake servers, and a
conformance suite for engines.
"""

from atts.testing.clock import Backend, run_virtual, virtual_options
from atts.testing.conformance import (
    CHECKS,
    CheckOptions,
    CheckResult,
    ConformanceReport,
    check_engine,
)
from atts.testing.scripted import (
    FaultKind,
    Faults,
    FaultyEngine,
    Latency,
    ScoreDrift,
    ScriptedEngine,
)
from atts.testing.servers import (
    DialectServer,
    ServerDialect,
    ServerFault,
    ServerFaults,
    ServerQuirks,
)
from atts.testing.toy_model import (
    DRAFT,
    TARGET,
    Selector,
    Skill,
    ToyModel,
    ToyTokenizer,
    toy_answer,
    toy_groups,
    toy_problems,
)

__all__ = [
    "CHECKS",
    "DRAFT",
    "TARGET",
    "Backend",
    "CheckOptions",
    "CheckResult",
    "ConformanceReport",
    "DialectServer",
    "FaultKind",
    "Faults",
    "FaultyEngine",
    "Latency",
    "ScoreDrift",
    "ScriptedEngine",
    "Selector",
    "ServerDialect",
    "ServerFault",
    "ServerFaults",
    "ServerQuirks",
    "Skill",
    "ToyModel",
    "ToyTokenizer",
    "check_engine",
    "run_virtual",
    "toy_answer",
    "toy_groups",
    "toy_problems",
    "virtual_options",
]
