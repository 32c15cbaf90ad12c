"""What it takes to test without models: a scripted engine, virtual time, faults, and a suite for any engine."""

from atts.testing.clock import Backend, run_virtual, virtual_options
from atts.testing.faults import FaultKind, Faults, FaultyEngine
from atts.testing.language import DRAFT, TARGET, Skill, ToyModel
from atts.testing.questions import toy_problems
from atts.testing.scripted import Drift, Latency, ScriptedEngine
from atts.testing.tokenizer import ToyTokenizer

__all__ = [
    "DRAFT",
    "TARGET",
    "Backend",
    "Drift",
    "FaultKind",
    "Faults",
    "FaultyEngine",
    "Latency",
    "ScriptedEngine",
    "Skill",
    "ToyModel",
    "ToyTokenizer",
    "run_virtual",
    "toy_problems",
    "virtual_options",
]
