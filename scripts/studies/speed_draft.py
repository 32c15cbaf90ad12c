"""The embedded draft made worse: noise on its weights until it agrees with the target on about .75
of tokens.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine, LocalOptions
from atts.models import path as model_path
from scripts.studies.arms import arm, run_block
from scripts.studies.harness import say

AGREEMENT = 0.75
"""Tokens on which drafts and targets that people use agree, about; the embedded pair agrees on .98.
"""
_CLOSE = 0.02
_TRIES = 8


async def weakened(folder: Path, noise: float | None = None) -> float:
    """Write the draft with this much noise, or with as much as is needed; the noise."""
    if noise is not None:
        noisy(folder, noise)
        return noise
    low = 0.0
    high = 1.0
    for _ in range(_TRIES):
        noise = (low + high) / 2
        noisy(folder, noise)
        found = await agreement(folder)
        say(f"speed: noise of {noise:.3f} leaves agreement on {found:.3f} of tokens")
        if abs(found - AGREEMENT) < _CLOSE:
            break
        low, high = (noise, high) if found > AGREEMENT else (low, noise)
    assert noise is not None, "something was tried"
    return noise


def noisy(folder: Path, noise: float) -> Path:
    """The draft's folder, copied, with noise in units of each matrix's own deviation, always the
    same.
    """
    shutil.copytree(model_path("draft"), folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, weight in sorted(weights.items()):
        scale = noise * weight.float().std() if weight.ndim == 2 else 0.0
        weights[name] = (
            weight.float() + scale * torch.randn(weight.shape, generator=generator)
        ).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


async def agreement(folder: Path, count: int = 6) -> float:
    """The share of the target's tokens that this draft would have drawn with the same random
    numbers.
    """
    options = LocalOptions(worker="thread", threads=1, drafter=str(folder), speculate="draft", k=1)
    async with LocalEngine(model_path("target"), name="target", options=options) as target:
        one = arm("target-only", samples=1)
        await run_block(arithmetic("calibration", count), one.setup.plan(target, target))
        counted = target.loop_stats().speculation
    assert counted is not None, "it speculates"
    return counted.accepted / max(1, counted.proposed)
