"""Draft and target at the same time: what the schemes come to on virtual devices, and live on this machine."""

from __future__ import annotations

import anyio

from scripts.studies.harness import Options, Table
from scripts.studies.overlap_groups import groups
from scripts.studies.overlap_live import live
from scripts.studies.overlap_timelines import drawn, schemes
from scripts.studies.overlap_virtual import closed_forms, published, record, recorded


def study(options: Options) -> list[Table]:
    """This machine's tables."""
    return [*live(options), groups(options)]


def part(name: str, options: Options) -> list[Table]:
    """Those in virtual time, which no machine's load changes."""
    assert name == "virtual", "there is one part"
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out.parent / "acceleration.svg").write_text(drawn(schemes()))
    texts = anyio.run(record, options.pick(6, 16, 200), options.seed)
    return [closed_forms(options), published(options), *recorded(options, texts)]
