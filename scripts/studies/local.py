"""The local engine beside transformers and beside what the machine can do, measured in turn in one run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from anyio.from_thread import start_blocking_portal

from scripts.studies.harness import Options, Table
from scripts.studies.local_cache import queue, siblings
from scripts.studies.local_overlap import overlap
from scripts.studies.local_scoring import scoring, warm_prefix
from scripts.studies.local_shares import shares
from scripts.studies.local_speed import continuous, decoding, overheads
from scripts.studies.local_subjects import subjects
from scripts.studies.machine import look


def study(options: Options) -> list[Table]:
    """Decoding, continuous batching, scoring, cache, crowds, and two engines at once."""
    torch.set_num_threads(1)  # both sides: on a busy machine a second thread mostly waits
    with tempfile.TemporaryDirectory() as place, start_blocking_portal() as portal:
        machine, found = look(), subjects(options, Path(place))
        target, draft = found[:2]
        decoded, rates = decoding(found, options, portal)
        return [
            decoded,
            overheads(found, rates, machine),
            continuous([target, draft], options, portal),
            scoring(found, rates, options, portal),
            shares([target, draft], options, portal),
            warm_prefix(target, options, portal),
            siblings(target, portal),
            queue(target, options, portal),
            *overlap(target, draft, options, portal),
        ]
