"""How well every mode holds its rate, notices broken scores, certifies accuracy, and at what cost."""

from __future__ import annotations

from scripts.studies import calibration_drift, calibration_ordinal, calibration_speed, calibration_streams, certificate
from scripts.studies.harness import Options, Table


def study(options: Options) -> list[Table]:
    """Streams, drift, ordered levels, certificates and speed, in this order."""
    parts = (calibration_streams, calibration_drift, calibration_ordinal, certificate, calibration_speed)
    return [table for part in parts for table in part.study(options)]
