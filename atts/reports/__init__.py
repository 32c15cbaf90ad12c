"""Reports of a run, HTML, Markdown and JSON, from one set of numbers.

collected = collect(Path("runs/first"), against=[Path("runs/target-only")])
collected.report.calibration.rate        # every number is a frozen value
render(collected, "html")                # one file, no network; also "markdown" and "json"
write_report(Path("runs/first"))         # into runs/first/report.html
"""

from atts.reports.collect import PAGE_BYTES, Collected, collect
from atts.reports.nodes import read_nodes
from atts.reports.numbers import (
    Alarm,
    Baseline,
    Calibration,
    Caveat,
    Drift,
    Group,
    Lanes,
    Moment,
    Point,
    ProblemRow,
    Promise,
    Rate,
    Report,
    RunFacts,
    Spend,
    Stage,
    Standing,
    Timing,
    Uniformity,
    Verdict,
)
from atts.reports.strict import dumps, strict
from atts.reports.write import FORMATS, NAMES, Format, render, write_report

__all__ = [
    "FORMATS",
    "NAMES",
    "PAGE_BYTES",
    "Alarm",
    "Baseline",
    "Calibration",
    "Caveat",
    "Collected",
    "Drift",
    "Format",
    "Group",
    "Lanes",
    "Moment",
    "Point",
    "ProblemRow",
    "Promise",
    "Rate",
    "Report",
    "RunFacts",
    "Spend",
    "Stage",
    "Standing",
    "Timing",
    "Uniformity",
    "Verdict",
    "collect",
    "dumps",
    "read_nodes",
    "render",
    "strict",
    "write_report",
]
