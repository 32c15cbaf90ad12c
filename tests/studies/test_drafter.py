"""The deep drafter: what training makes of a target's texts; what the shipped one is worth, in
groups and without.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from atts.core import Message, SampleRequest, Sampling
from atts.evaluators.datasets.arithmetic import problems
from atts.local.messages import Submit
from atts.local.model_config import read_model_config
from atts.models import path
from atts.models.tokenizers import ModelTokenizer
from atts.sampling import Seed
from scripts.studies import train_proposers
from scripts.studies.harness import Options
from scripts.studies.overlap import groups
from scripts.studies.train_proposers import DrafterRecipe
from tests.local.speculating import Driven, counts, run, same

pytestmark = pytest.mark.checkout


def asked(count: int) -> list[Submit]:
    """Problems for the target, nothing filtered."""
    tokenizer = ModelTokenizer(path("target"), "target")
    ids = [
        tokenizer.render([Message("user", each.text)]) for each in problems("test", count, seed=5)
    ]
    return [
        Submit(n + 1, SampleRequest(own, 120, Sampling(0.7), Seed(0, sample=n)))
        for n, own in enumerate(ids)
    ]


def stood(done: Driven) -> float:
    """The share of drafted tokens that did."""
    return sum(counts(done).stood_at) / sum(counts(done).tested_at)


def test_training_makes_a_folder_that_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few steps on a few texts: eight narrow layers with the draft's tokenizer propose, and
    change nothing.
    """
    out = tmp_path / "deep"
    train_proposers.train_deep_drafter(
        DrafterRecipe(path("target"), path("draft"), out, texts=6, steps=6)
    )
    told = capsys.readouterr().out
    assert "deep: likeliest token agrees" in told
    config = read_model_config(out, "deep")
    assert (config.num_layers, config.head_dim, config.hidden_size) == (8, 32, 64)
    both = run(path("target"), [asked(1)]), run(path("target"), [asked(1)], None, 4, out, fuzzy=4)
    assert same(*both)


def test_the_shipped_one_is_small_and_mostly_right() -> None:
    """Groups of four attentions, calibrated, lose little; six, which is all between first and last
    layer, lose more.
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
    """A row for each size of a group; the exact one needs no calibration."""
    rows = groups(Options("quick")).rows
    assert [row[0] for row in rows] == [1, 2, 3, 4, 6]
    assert rows[0][2] is None
    shares = [(float(str(row[1])), float(str(row[2]))) for row in rows[1:]]
    assert all(0.5 < without <= calibrated <= 1 for calibrated, without in shares)
