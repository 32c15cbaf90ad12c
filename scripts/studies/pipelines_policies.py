"""The arms of every comparison in one place: the recommended policy, its variants, and every baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atts.api import Setup
from atts.methods import PRESETS
from scripts.studies.pipelines_arms import Arm

RATE = Setup().rate
BASELINES = tuple(row.name for row in PRESETS)


def arm(name: str, method: str = "", *, samples: int = 8, rate: float = RATE, threads: int = 1, **changes: Any) -> Arm:
    """An arm of that method (its own name's, unless said), its policy changed."""
    base = Setup()
    mode = changes.pop("mode", base.mode)
    stored = changes.pop("stored", ())
    policy = replace(base.policy, samples=samples, **changes)
    setup = replace(base, method=method or name, rate=rate, mode=mode, policy=policy, stored=stored)
    return Arm(name, setup, threads)


def with_samples(one: Arm, samples: int) -> Arm:
    """The same arm with another number of rollouts."""
    return replace(one, setup=replace(one.setup, policy=replace(one.setup.policy, samples=samples)))


def with_policy(one: Arm, name: str, **changes: Any) -> Arm:
    """The same arm under another name, its policy changed."""
    return replace(one, name=name, setup=replace(one.setup, policy=replace(one.setup.policy, **changes)))
