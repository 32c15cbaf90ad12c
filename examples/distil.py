"""Train the draft on what the target thought of its tokens: on-policy distillation from an export.

`atts export RUN --as opd` writes the same records. The target's log-probabilities were recorded when
it scored the draft's chunks, so training asks it nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from atts import Policy, Setup, evaluate_sync
from atts.analysis import ExportOptions, export_run
from atts.evaluators import load_dataset
from atts.journal import open_run
from atts.models import path as embedded

Record = dict[str, Any]


def logits_of(model: Any, record: Record) -> torch.Tensor:
    """Return the model's log-probabilities of every token at each place of the rollout."""
    prompt, ids = record["prompt_ids"], record["ids"]
    logits: torch.Tensor = model(torch.tensor([prompt + ids])).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def train(model: Any, records: Sequence[Record], rate: float = 5e-5) -> None:
    """Bring the draft's log-probabilities of its own tokens to the target's, a step per record."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for record in records:
        mask = torch.tensor(record["mask"])
        # what is not known is null, and masked
        teacher = torch.tensor([value or 0.0 for value in record["teacher_logprobs"]])
        now = logits_of(model, record).gather(1, torch.tensor(record["ids"])[:, None])[:, 0]
        # the gradient is that of KL(draft || target), at the tokens that the draft drew
        loss = ((now - teacher.clamp(min=-10)) ** 2 * mask).sum() / mask.sum() / 2
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def divergence(draft: Any, target: Any, records: Sequence[Record]) -> float:
    """Return the mean KL(draft || target) per token, over all tokens that could come next."""
    total = 0.0
    tokens = 0
    with torch.inference_mode():
        for record in records:
            ours, theirs = logits_of(draft, record), logits_of(target, record)
            total += float((ours.exp() * (ours - theirs)).sum())
            tokens += len(record["ids"])
    return total / tokens


def main() -> None:
    """Evaluate the embedded pair, export the run, train on half of the problems, test on the others."""
    with TemporaryDirectory() as folder:
        setup = Setup(draft="embedded", target="embedded", rate=0.1, policy=Policy(samples=4))
        evaluate_sync(load_dataset("arithmetic[:16]").problems, setup, directory=f"{folder}/run")
        file = Path(folder) / "opd.jsonl"
        made = export_run(open_run(Path(folder) / "run"), file, ExportOptions("opd"))
        records = [json.loads(line) for line in file.read_text().splitlines()]
    half = sorted({record["problem"] for record in records})[::2]
    fresh = [record for record in records if record["problem"] not in half]
    draft, target = (
        AutoModelForCausalLM.from_pretrained(embedded(name), dtype=torch.float32)
        for name in ("draft", "target")
    )
    before = divergence(draft, target, fresh)
    train(draft, [record for record in records if record["problem"] in half])
    after = divergence(draft, target, fresh)
    print(f"{made.records} records of {made.problems} problems")
    print(f"KL(draft || target) on the problems left out: {before:.4f} -> {after:.4f} nats a token")


if __name__ == "__main__":
    main()
