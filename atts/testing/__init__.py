"""What it takes to test without models: a scripted engine, virtual time, faults, and a suite for any engine."""

from atts.testing.canned import CannedEngine
from atts.testing.clock import Backend, run_virtual, virtual_options
from atts.testing.conformance import CHECKS, CheckOptions, Finding, Report, check_engine
from atts.testing.faults import FaultKind, Faults, FaultyEngine
from atts.testing.interrupts import Interrupted, Interrupter, Interruption, interruptions
from atts.testing.language import DRAFT, TARGET, Skill, ToyModel
from atts.testing.questions import toy_answer, toy_groups, toy_problems
from atts.testing.scripted import Drift, Latency, ScriptedEngine
from atts.testing.server_settings import ServerDialect, ServerFault, ServerFaults, ServerQuirks
from atts.testing.servers import DialectServer
from atts.testing.tokenizer import ToyTokenizer

__all__ = [
    "CHECKS",
    "DRAFT",
    "TARGET",
    "Backend",
    "CannedEngine",
    "CheckOptions",
    "DialectServer",
    "Drift",
    "FaultKind",
    "Faults",
    "FaultyEngine",
    "Finding",
    "Interrupted",
    "Interrupter",
    "Interruption",
    "Latency",
    "Report",
    "ScriptedEngine",
    "ServerDialect",
    "ServerFault",
    "ServerFaults",
    "ServerQuirks",
    "Skill",
    "ToyModel",
    "ToyTokenizer",
    "check_engine",
    "interruptions",
    "run_virtual",
    "toy_answer",
    "toy_groups",
    "toy_problems",
    "virtual_options",
]
