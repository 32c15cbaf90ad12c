"""Texts of reports about gates, flags, verdicts, metrics and rates, read from `words.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import msgspec

from atts.analysis.report.numbers import Standing


@dataclass(frozen=True, slots=True)
class GateWords:
    """What a gate without a calibrator promises, and what empties that."""

    guarantee: str
    voided_by: str


@dataclass(frozen=True, slots=True)
class CaveatWords:
    """How much a caveat weighs, and what it says."""

    standing: Standing
    text: str


@dataclass(frozen=True, slots=True)
class ReportWords:
    """The tables of the file, by name."""

    gates: dict[str, GateWords]
    flags: dict[str, CaveatWords]
    problems: dict[str, CaveatWords]
    metrics: dict[str, str]
    rates: dict[str, str]


WORDS = msgspec.toml.decode(
    (files("atts.analysis.report") / "words.toml").read_bytes(), type=ReportWords
)
