"""What it takes to test without models: a scripted engine, virtual time, faults, and a suite for any engine."""

from atts.testing.clock import Backend, run_virtual, virtual_options

__all__ = ["Backend", "run_virtual", "virtual_options"]
