"""Ready-made methods: presets of a policy and a gate, and gates built from calibrations."""

from atts.methods.calibrated import (
    GradedPolicy,
    LabelledRun,
    certified_gate,
    certify_graded,
    certify_net_runs,
    certify_runs,
    frozen_gate,
    warming_gate,
)
from atts.methods.presets import (
    PAPER_DEPARTURES,
    PRESETS,
    GateInputs,
    Preset,
    asked_roles,
    preset,
    reads_chunks,
)

__all__ = [
    "GateInputs",
    "GradedPolicy",
    "LabelledRun",
    "PAPER_DEPARTURES",
    "PRESETS",
    "Preset",
    "asked_roles",
    "certified_gate",
    "certify_graded",
    "certify_net_runs",
    "certify_runs",
    "frozen_gate",
    "preset",
    "reads_chunks",
    "warming_gate",
]
