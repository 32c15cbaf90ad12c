"""Whether the device computes what a CPU does: the kernel beside gathered slots, texts and scores beside float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from atts.core import SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.evaluators.datasets.arithmetic import problems
from atts.local import LocalOptions
from atts.local.attention import GatheredAttention
from atts.local.build import MakeModel, build_loop
from atts.local.cuda_model import disagreement, paged_attention
from atts.local.messages import FailureReply, LoopReport, SampleReply, ScoreReply, WorkerConfig
from atts.local.model_config import read_model_config
from atts.local.padding_shape import padding_shape, read_size
from atts.local.torch_model import TorchModel
from atts.models import path
from atts.pipelines import Policy, prompt_of
from atts.seeds import Seed
from atts.tokenizing import ModelTokenizer
from scripts.studies.gpu_lab import Lab
from scripts.studies.gpu_loops import Script

LAWS = (Sampling(0.0), Sampling(0.7), Sampling(1.0, top_p=0.9), Sampling(0.9, top_k=20, min_p=0.02))
_ARMS: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "float32, without graphs": {"graphs": "off"},
    "float32, gathered slots": {"graphs": "off", "kernel": "torch"},
    "float32, speculating": {"speculate": "draft", "k": 4},
    "bfloat16": {"dtype": "bfloat16"},
}


def kernel(lab: Lab) -> list[dict[str, Any]]:
    """Of every shape and type: how far the kernel is from gathered float32 attention, or why it is not used."""
    found: list[dict[str, Any]] = []
    base = read_model_config(path("target"), "target")
    shapes = {"embedded target": base, **{s: padding_shape(base, read_size(s)) for s in lab.sizes.shapes}}
    for name, config in shapes.items():
        is_own = config is base  # a kernel is compiled for each type, width and window: large models need but one type
        for dtype in (torch.float32, torch.bfloat16) if is_own else (torch.bfloat16,):
            cache = torch.zeros(1, 2, 4, config.num_kv_heads, config.head_dim, dtype=dtype, device=lab.device)
            words, off = "used", float("nan")
            try:
                attention, _ = paged_attention(config, cache) if lab.is_cuda else (GatheredAttention, 0)
                off = max(disagreement(config, attention, cache, window) for window in ((0, 100) if is_own else (0,)))
            except Exception as error:  # noqa: BLE001  what is missing here is what the table is to say
                words = f"{type(error).__name__}: {str(error)[:160]}"
            found.append({"shape": name, "type": str(dtype).removeprefix("torch."), "off": off, "words": words})
    return found


@dataclass(frozen=True, slots=True)
class Texts:
    """What a model wrote, and how it scored texts."""

    ids: list[TokenIds]
    logprobs: list[tuple[float, ...]]
    scores: list[tuple[float, ...]]


def orders(lab: Lab) -> list[SampleRequest]:
    """Questions of the embedded pair under four laws."""
    tokenizer = ModelTokenizer(path("target"), "target")
    asked = [tokenizer.render(prompt_of(problem, Policy())) for problem in problems("test", lab.sizes.requests)]
    tokens = lab.sizes.tokens
    return [SampleRequest(ids, tokens, LAWS[n % 4], Seed(1, sample=n)) for n, ids in enumerate(asked)]


def run(lab: Lab, device: str, scored: list[TokenIds] | None = None, **changes: Any) -> Texts:
    """The embedded target on that device: its texts, and its scores of those that are given, else of its own."""
    gathered = changes.pop("kernel", "") == "torch" and device != "cpu"
    config = _config(device, **changes)
    make: MakeModel | None = (lambda own, weights, cache: TorchModel(own.model, weights, cache)) if gathered else None
    replies: dict[int, SampleReply | ScoreReply] = {}

    def tell(report: LoopReport) -> None:
        for reply in report.replies:
            if isinstance(reply, FailureReply):
                raise reply.error("the model")
            replies[reply.request_id] = reply

    asked = orders(lab)
    build_loop(config, tell, make)[0].run(Script(asked, 1))
    written = [replies[n + 1] for n in range(len(asked))]
    ids = [one.ids for one in written if isinstance(one, SampleReply)]
    chunks = [ScoreRequest(own.ids, text) for own, text in zip(asked, scored or ids, strict=True)]
    build_loop(config, tell, make)[0].run(Script(chunks, 1000))
    scores = [replies[n + 1000].logprobs for n in range(len(asked))]
    return Texts(ids, [one.logprobs for one in written], scores)


def _config(device: str, **changes: Any) -> WorkerConfig:
    folder, small = path("target"), path("draft")
    tokenizer = ModelTokenizer(folder, "target")
    options = LocalOptions(device=device, kernel="torch", kv_tokens=20_000, worker="thread")  # type: ignore[arg-type]
    config = WorkerConfig("target", folder, read_model_config(folder, "target"), tokenizer.pieces, options)
    if changes.get("speculate"):
        own = replace(config, name="drafter", folder=small, model=read_model_config(small, "drafter"))
        config, changes = replace(config, drafter=own), {**changes, "drafter": str(small)}
    return replace(config, options=replace(options, **changes))


def compare(lab: Lab, arm: str, reference: Texts) -> dict[str, Any]:
    """One way to compute on the device beside float32 on a CPU."""
    found = run(lab, lab.device.type, reference.ids, **_ARMS[arm])
    same = [_shared(a, b) for a, b in zip(found.ids, reference.ids, strict=True)]
    offs = [
        abs(a - b)
        for ours, theirs in zip(found.scores, reference.scores, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return {
        "texts": len(found.ids),
        "equal": sum(a == b for a, b in zip(found.ids, reference.ids, strict=True)),
        "tokens": sum(same),  # up to the first difference of each text
        "of": sum(map(len, reference.ids)),
        "off_mean": sum(offs) / len(offs),
        "off_most": max(offs),
    }


def _shared(one: TokenIds, other: TokenIds) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def exactness(lab: Lab) -> dict[str, dict[str, Any]]:
    """Every way to compute, in turn."""
    found: dict[str, dict[str, Any]] = {}
    reference: Texts | None = None
    for arm in _ARMS:
        name = f"exactness | {arm}"
        if name not in lab.parts:
            reference = reference or run(lab, "cpu")
            lab.cell(name, partial(compare, lab, arm, reference), 5.0 * lab.is_cuda)
        found[arm] = lab.parts[name]
    return found
