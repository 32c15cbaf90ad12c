"""Ready-made methods: presets of a policy and a gate, and gates built from calibrations."""

from atts.methods.calibrated import LabelledRun, certified_gate, certify_runs, frozen_gate, warming_gate
from atts.methods.presets import PRESETS, GateInputs, Preset, preset
from atts.methods.skipping import SkippingGate

__all__ = [
    "GateInputs",
    "LabelledRun",
    "PRESETS",
    "Preset",
    "SkippingGate",
    "certified_gate",
    "certify_runs",
    "frozen_gate",
    "preset",
    "warming_gate",
]
