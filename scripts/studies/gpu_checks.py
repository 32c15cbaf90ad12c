"""Whether the device computes what a CPU does: the kernel beside gathered slots, texts and scores
beside float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

import torch

from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.evaluators.datasets.arithmetic import problems
from atts.local import LocalOptions
from atts.local.attention import GatheredAttention
from atts.local.build import MakeModel, build_loop
from atts.local.cuda_model import disagreement, paged_attention
from atts.local.messages import FailureReply, LoopReport, WorkerConfig
from atts.local.model_config import read_model_config
from atts.local.torch_model import TorchModel
from atts.models import path
from atts.models.tokenizers import ModelTokenizer
from atts.pipelines import Policy, prompt_of
from atts.sampling import Seed
from scripts.studies.gpu_lab import Lab
from scripts.studies.gpu_loops import Script
from scripts.studies.padded import read_size, shape_of_size

LAWS = (Sampling(0.0), Sampling(0.7), Sampling(1.0, top_p=0.9), Sampling(0.9, top_k=20, min_p=0.02))
_ARMS: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "float32, without graphs": {"graphs": "off"},
    "float32, gathered slots": {"graphs": "off", "kernel": "torch"},
    "float32, speculating": {"speculate": "draft", "k": 4},
    "bfloat16": {"dtype": "bfloat16"},
}


def kernel(lab: Lab) -> list[dict[str, Any]]:
    """Of every shape and type: how far the kernel is from gathered float32 attention, or why it is
    not used.
    """
    found: list[dict[str, Any]] = []
    base = read_model_config(path("target"), "target")
    shapes = {
        "embedded target": base,
        **{s: shape_of_size(base, read_size(s)) for s in lab.sizes.shapes},
    }
    for name, config in shapes.items():
        # a kernel is compiled for each type, width and window: large models need but one type
        is_own = config is base
        for dtype in (torch.float32, torch.bfloat16) if is_own else (torch.bfloat16,):
            cache = torch.zeros(
                1, 2, 4, config.num_kv_heads, config.head_dim, dtype=dtype, device=lab.device
            )
            words = "used"
            off = float("nan")
            try:
                attention, _ = (
                    paged_attention(config, cache) if lab.is_cuda else (GatheredAttention, 0)
                )
                off = max(
                    disagreement(config, attention, cache, window)
                    for window in ((0, 100) if is_own else (0,))
                )
            except Exception as error:  # noqa: BLE001  what is missing here is what the table is to say
                words = f"{type(error).__name__}: {str(error)[:160]}"
            found.append(
                {
                    "shape": name,
                    "type": str(dtype).removeprefix("torch."),
                    "off": off,
                    "words": words,
                }
            )
    return found


class Texts(NamedTuple):
    """What a model wrote, and how it scored texts."""

    ids: list[TokenIds]
    scores: list[tuple[float, ...]]


def orders(lab: Lab) -> list[SampleRequest]:
    """Questions of the embedded pair under four laws."""
    tokenizer = ModelTokenizer(path("target"), "target")
    asked = [
        tokenizer.render(prompt_of(problem, Policy()))
        for problem in problems("test", lab.sizes.requests)
    ]
    return [
        SampleRequest(ids, lab.sizes.tokens, LAWS[n % 4], Seed(1, sample=n))
        for n, ids in enumerate(asked)
    ]


def run(lab: Lab, device: str, scored: list[TokenIds] | None = None, **changes: Any) -> Texts:
    """The embedded target on that device: its texts, and its scores of those that are given, else
    of its own.
    """
    gathered = changes.pop("kernel", "") == "torch" and device != "cpu"
    config = _config(device, **changes)
    asked = orders(lab)
    make: MakeModel | None = (
        (lambda own, weights, cache: TorchModel(own.model, weights, cache)) if gathered else None
    )

    def served(requests: Sequence[SampleRequest | ScoreRequest]) -> list[Any]:
        replies = dict[int, Any]()

        def tell(report: LoopReport) -> None:
            for reply in report.replies:
                if isinstance(reply, FailureReply):
                    raise reply.error("the model")
                replies[reply.request_id] = reply

        build_loop(config, tell, make)[0].run(Script(requests, 0))
        return [replies[number] for number in range(len(requests))]

    ids = [reply.ids for reply in served(asked)]
    chunks = [ScoreRequest(own.ids, text) for own, text in zip(asked, scored or ids, strict=True)]
    return Texts(ids, [reply.logprobs for reply in served(chunks)])


def _config(device: str, **changes: Any) -> WorkerConfig:
    folder = path("target")
    small = path("draft")
    tokenizer = ModelTokenizer(folder, "target")
    options = LocalOptions(device=device, kernel="torch", kv_tokens=20_000, worker="thread")  # type: ignore[arg-type]
    config = WorkerConfig(
        "target", folder, read_model_config(folder, "target"), tokenizer.pieces, options
    )
    if changes.get("speculate"):
        own = replace(
            config, name="drafter", folder=small, model=read_model_config(small, "drafter")
        )
        config = replace(config, drafter=own)
        changes = {**changes, "drafter": str(small)}
    return replace(config, options=replace(options, **changes))


def compare(lab: Lab, arm: str, reference: Texts) -> dict[str, Any]:
    """One way to compute on the device beside float32 on a CPU."""
    found = run(lab, lab.device.type, reference.ids, **_ARMS[arm])
    pairs = list(zip(found.ids, reference.ids, strict=True))
    ours, theirs = (chain.from_iterable(texts.scores) for texts in (found, reference))
    offs = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "texts": len(pairs),
        "equal": sum(one == other for one, other in pairs),
        # up to the first difference of each text
        "tokens": sum(_shared(one, other) for one, other in pairs),
        "of": sum(map(len, reference.ids)),
        "off_mean": fmean(offs),
        "off_most": max(offs),
    }


def _shared(one: TokenIds, other: TokenIds) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def exactness(lab: Lab) -> None:
    """Every way to compute, in turn."""
    names = {f"exactness | {arm}": arm for arm in _ARMS}
    if lab.missing(names, 5.0):
        reference = run(lab, "cpu")
        for name, arm in names.items():
            lab.cell(name, partial(compare, lab, arm, reference), 5.0)
