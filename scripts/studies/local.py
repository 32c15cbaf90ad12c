"""The local engine beside transformers and beside what the machine can do, measured in turn in one run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from anyio.from_thread import start_blocking_portal

from scripts.studies import local_rounded
from scripts.studies.harness import Options, Table
from scripts.studies.local_overlap import overlap
from scripts.studies.local_scoring import scoring, warm_prefix
from scripts.studies.local_speed import continuous, decoding, overheads
from scripts.studies.local_subjects import Lab, subjects
from scripts.studies.machine import look


def study(options: Options) -> list[Table]:
    """Decoding, continuous batching, scoring, and two engines at once."""
    torch.set_num_threads(1)  # both sides: on a busy machine a second thread mostly waits
    with tempfile.TemporaryDirectory() as place, start_blocking_portal() as portal:
        lab, machine, found = Lab(options, portal), look(), subjects(options, Path(place))
        target, draft = found[:2]
        decoded, rates = decoding(lab, found)
        return [
            decoded,
            overheads(found, rates, machine),
            continuous(lab, [target, draft]),
            scoring(lab, found, rates),
            warm_prefix(lab, target),
            *overlap(lab, target, draft),
        ]


def part(name: str, options: Options) -> list[Table]:
    """The study of rounded scores."""
    return {"scores": local_rounded.study}[name](options)
