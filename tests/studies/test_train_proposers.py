"""Tests of training an early exit, draft heads and a deep drafter: training improves predictions,
and changes no text of the target.
"""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Literal

import anyio
import pytest
import torch

from atts.accel.overlap.mirror import EXIT_FILE, STREAM_FILE
from atts.core import Message, SampleRequest, Sampling
from atts.evaluators.datasets.arithmetic import problems
from atts.local.messages import Submit
from atts.local.model_config import read_model_config
from atts.models import path
from atts.models.tokenizers import ModelTokenizer
from atts.sampling import Seed
from scripts.studies import train
from scripts.studies.harness import Options
from scripts.studies.speculation import Recorder, groups, record
from scripts.studies.train import DrafterRecipe, HeadsRecipe
from tests.local.speculating import Driven, counts, run, same

pytestmark = pytest.mark.checkout


def copied(name: str, to: Path) -> Path:
    """Copy an embedded model's files without the exits and heads trained for it."""
    to.mkdir()
    for file in path(name).iterdir():  # type: ignore[arg-type]
        if file.is_file():
            shutil.copyfile(file, to / file.name)
    return to


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_training_makes_an_exit_and_heads_that_know_more(
    dtype: Literal["auto", "bfloat16"], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a few steps on a few texts, a trained exit and heads predict held-out texts better than
    untrained ones. A drafter can read their files.
    """
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"What is {n} + {3 * n}?\n" for n in range(11, 35)))
    target, drafter = (copied(name, tmp_path / name) for name in ("target", "draft"))
    train.train_exit_and_streams(
        HeadsRecipe(target, drafter, prompts, texts=24, steps=60, dtype=dtype)
    )
    assert (target / EXIT_FILE).is_file()
    assert (drafter / STREAM_FILE).is_file()
    untrained, trained = (
        float(line.split("top 1: ")[1].split(" ")[0])
        for line in capsys.readouterr().out.splitlines()
        if "trained top" in line
    )
    assert trained > untrained + 0.1


def test_heads_are_trained_where_and_as_the_checkpoint_is(tmp_path: Path) -> None:
    """On a GPU, heads are trained in the checkpoint's data type, and the engine writes the training
    texts in the same type. On a CPU both use float32.
    """
    half, full = (tmp_path / name for name in ("half", "full"))
    for folder, dtype in ((half, "bfloat16"), (full, "float32")):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"dtype": dtype}))
    on_gpu = HeadsRecipe(half, full, device="cuda:1")
    assert on_gpu.type_of(half) == torch.bfloat16
    assert on_gpu.type_of(full) == torch.float32
    assert (on_gpu.options.device, on_gpu.options.dtype) == ("cuda:1", "auto")
    assert HeadsRecipe(half, full).type_of(half) == torch.float32


def test_the_shipped_exit_names_what_is_written() -> None:
    """The target's token is among the first eight choices of the shipped early exit for at least 95
    % of tokens. Without the exit's adapter the share is below 90 %.
    """
    texts = anyio.run(record, 8, 0)
    shares = list[float]()
    for model in (Recorder("target", trained=True), Recorder("target", 3)):
        ranks = list(chain.from_iterable(texts.exit_ranks(model)))
        shares.append(sum(rank < 8 for rank in ranks) / len(ranks))
    assert shares[0] >= 0.95
    assert shares[1] < 0.9


def asked(count: int) -> list[Submit]:
    """Make requests to the target for solutions of problems, without sampling filters."""
    tokenizer = ModelTokenizer(path("target"), "target")
    ids = [
        tokenizer.render([Message("user", each.text)]) for each in problems("test", count, seed=5)
    ]
    return [
        Submit(n + 1, SampleRequest(own, 120, Sampling(0.7), Seed(0, sample=n)))
        for n, own in enumerate(ids)
    ]


def stood(done: Driven) -> float:
    """Return the share of drafted tokens that the target accepted."""
    return sum(counts(done).accepted_at) / sum(counts(done).tested_at)


def test_training_makes_a_folder_that_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a few training steps on a few texts, a drafter of eight narrow layers with the draft's
    tokenizer proposes tokens, and changes no text.
    """
    out = tmp_path / "deep"
    train.train_deep_drafter(DrafterRecipe(path("target"), path("draft"), out, texts=6, steps=6))
    told = capsys.readouterr().out
    assert "deep: likeliest token agrees" in told
    config = read_model_config(out, "deep")
    assert (config.num_layers, config.head_dim, config.hidden_size) == (8, 32, 64)
    both = run(path("target"), [asked(1)]), run(path("target"), [asked(1)], None, 4, out, fuzzy=4)
    assert same(*both)


def test_the_shipped_one_is_small_and_mostly_right() -> None:
    """The shipped deep drafter loses little acceptance if its attentions are grouped by four.

    Groups of six, which contain all attentions between the first and the last layer, lose more.
    """
    plain = run(path("target"), [asked(3)])
    exact, four, six = (
        run(path("target"), [asked(3)], None, 4, path("deep"), fuzzy=size) for size in (1, 4, 6)
    )
    assert all(same(plain, done) for done in (exact, four, six))
    assert stood(exact) > 0.97
    assert stood(four) > 0.93
    assert stood(six) < stood(four)
    assert sum(file.stat().st_size for file in path("deep").iterdir()) < 700_000
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (path("deep") / name).read_bytes() == (path("draft") / name).read_bytes()


def test_the_study_of_groups_says_what_stands_with_calibration_and_without() -> None:
    """The study's table has a row for each group size, with and without calibration; groups of one
    attention are exact and need none.
    """
    rows = groups(Options("quick")).rows
    assert [row[0] for row in rows] == [1, 2, 3, 4, 6]
    assert rows[0][2] is None
    shares = [(float(str(row[1])), float(str(row[2]))) for row in rows[1:]]
    assert all(0.5 < without <= calibrated <= 1 for calibrated, without in shares)
