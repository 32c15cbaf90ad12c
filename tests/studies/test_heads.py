"""Exit adapter and streaming heads: what training makes of a pair's texts, and what the shipped
ones are worth.
"""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

import anyio
import pytest

from atts.accel.overlap.mirror import EXIT_FILE, STREAM_FILE
from atts.models import path
from scripts.studies import train_proposers
from scripts.studies.overlap_virtual import Recorder, record
from scripts.studies.train_proposers import HeadsRecipe

pytestmark = pytest.mark.checkout


def copied(name: str, to: Path) -> Path:
    """An embedded model's files without what was trained for it."""
    to.mkdir()
    for file in path(name).iterdir():  # type: ignore[arg-type]
        if file.is_file():
            shutil.copyfile(file, to / file.name)
    return to


def test_training_makes_an_exit_and_heads_that_know_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a few steps on a few texts, on texts kept apart; the files can be read by who drafts."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"What is {n} + {3 * n}?\n" for n in range(11, 35)))
    target, drafter = (copied(name, tmp_path / name) for name in ("target", "draft"))
    train_proposers.train_exit_and_streams(
        HeadsRecipe(target, drafter, prompts, texts=24, steps=60)
    )
    assert (target / EXIT_FILE).is_file()
    assert (drafter / STREAM_FILE).is_file()
    untrained, trained = (
        float(line.split("top 1: ")[1].split(" ")[0])
        for line in capsys.readouterr().out.splitlines()
        if "trained top" in line
    )
    assert trained > untrained + 0.1


def test_the_shipped_exit_names_what_is_written() -> None:
    """The target's token is among its first eight at least .95 of the time, which it is not without
    an adapter.
    """
    texts = anyio.run(record, 8, 0)
    shares = list[float]()
    for model in (Recorder("target", trained=True), Recorder("target", 3)):
        ranks = list(chain.from_iterable(texts.exit_ranks(model)))
        shares.append(sum(rank < 8 for rank in ranks) / len(ranks))
    assert shares[0] >= 0.95
    assert shares[1] < 0.9
