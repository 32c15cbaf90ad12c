"""EasySpec's drafter: exact with groups of one, calibrated by an exact pass, and never a change of the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atts.core import ScoreRequest
from atts.errors import OptionError
from atts.local import LocalOptions
from atts.local.batch import PrefillChunk, StepPlan, step_batch
from atts.local.drafting import FuzzyDrafter
from atts.local.loader import load_weights
from atts.local.model_config import read_model_config
from atts.local.sequence import new_sequence
from atts.local.torch_model import TorchModel
from tests.local.speculating import Driven, Make, counts, ids_of, requests, run, same

DEEP = {"num_hidden_layers": 8, "initializer_range": 0.12}


def hidden(folder: Path, group: int) -> torch.Tensor:
    """The final states of a text, fed at once."""
    config = read_model_config(folder, "tiny")
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"), "tiny")
    size = (config.num_layers, 2, 40, config.num_kv_heads, config.head_dim)
    model, ids = TorchModel(config, weights, torch.zeros(size)), ids_of(1, 20)
    model.group = group
    sequence = new_sequence(1, ScoreRequest(ids[:1], ids[1:]), 0.0)
    sequence.row = 0
    table = torch.arange(1, 21, dtype=torch.int32)[None].numpy()
    return model.forward(step_batch(StepPlan([], [PrefillChunk(sequence, 0, 20, 0)], [], []), table), table)


def test_groups_of_one_are_exact_and_larger_ones_are_near(make_model: Make) -> None:
    """To the bit where a group is one layer; further off the more layers read one input; first and last stay apart."""
    folder = make_model("llama", **DEEP)
    exact = hidden(folder, 1)
    errors = [float((hidden(folder, group) - exact).abs().mean()) for group in (1, 2, 4)]
    assert errors[0] == 0
    assert 0 < errors[1] < errors[2] < float(exact.abs().mean())
    assert torch.equal(hidden(folder, 6), hidden(folder, 60)), "there are six layers between"
    shallow = make_model("llama", num_hidden_layers=3)
    assert torch.equal(hidden(shallow, 1), hidden(shallow, 4)), "one layer between is no group"


def drafted(folder: Path, group: int, patch: pytest.MonkeyPatch, calibration: str = "exact") -> Driven:
    """A model that drafts for itself in groups."""

    def make(*args: Any, **changes: Any) -> FuzzyDrafter:
        return FuzzyDrafter(*args, **{**changes, "calibration": calibration})

    patch.setattr("atts.local.build.FuzzyDrafter", make)
    return run(folder, [requests(4, 60)], None, 6, folder, fuzzy=group)


def test_grouped_drafts_change_no_token_and_calibration_keeps_them_near(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is drafted more stands where each round begins with an exact pass than where errors pile up."""
    folder = make_model("llama", **DEEP)
    plain = run(folder, [requests(4, 60)])
    shares = dict[tuple[int, str], float]()
    for group, calibration in ((2, "exact"), (2, "none"), (4, "exact")):
        done = drafted(folder, group, monkeypatch, calibration)
        assert same(plain, done)
        tested, stood = counts(done).tested_at, counts(done).stood_at
        shares[group, calibration] = sum(stood) / sum(tested)
        if calibration == "exact":
            assert stood[0] >= tested[0] - 2, "the first token of a round comes from the exact pass"
    assert shares[2, "exact"] > shares[4, "exact"]
    assert shares[2, "exact"] > shares[2, "none"]


def test_groups_need_a_drafter_that_computes_in_torch() -> None:
    """What cannot be is refused."""
    good = LocalOptions(drafter="embedded:draft", fuzzy=2)
    good.check()
    for wrong in ({"fuzzy": 0}, {"drafter": ""}, {"speculate": "pearl"}, {"drafter_pad": "20M"}):
        with pytest.raises(OptionError, match="fuzzy"):
            replace(good, **wrong).check()
