"""Tests of EasySpec's drafter, which computes groups of attentions at once: groups of one are
exact, and no text changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atts.accel import SpeculationOptions
from atts.accel.speculate.drafter import GroupedDrafter, GroupedModel, ModelDrafter
from atts.core import ScoreRequest
from atts.errors import OptionError
from atts.local import devices, loader
from atts.local.batch import PrefillChunk, StepPlan, new_sequence, step_batch
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import NativeModel
from atts.local.loader import load_weights
from atts.local.model import TorchModel
from atts.local.model_config import read_model_config
from tests.local.speculating import LAWS, Driven, Make, counts, ids_of, requests, run, same, texts

DEEP = {"num_hidden_layers": 8, "initializer_range": 0.12}


class OneByOne(TorchModel):
    """A reference that computes the attentions of a group one after another. Each gets the input of
    the group's first attention, as in the grouped computation.
    """

    def _mixed(self, x: Any, step: Any, own: Any, attends: Any, turns: Any) -> torch.Tensor:
        mixed = [
            super(OneByOne, self)._mixed(x, step, self._exact[at], attends, turns)
            for at in own[0].layers
        ]
        return torch.cat(mixed, 1)


def hidden(
    folder: Path, group: int, kernel: type[GroupedModel] = NativeModel, threads: int = 1
) -> torch.Tensor:
    """Return the final states of a text if attentions are computed in groups of `group`.

    One step reads all tokens but the last, and the next step reads the last.
    """
    config = read_model_config(folder, "tiny")
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"), "tiny")
    cache = torch.zeros(config.num_layers, 2, 40, config.num_kv_heads, config.head_dim)
    model: GroupedModel
    if kernel is NativeModel:
        library = native_library("tiny", config)[0]
        model = NativeModel(library, config, weights, cache, threads, group=group)
    else:
        model = (OneByOne if kernel is OneByOne else TorchModel)(
            config, weights, cache, group=group
        )
    model.is_grouped = True
    ids = ids_of(1, 20)
    sequence = new_sequence(1, ScoreRequest(ids[:1], ids[1:]), 0.0)
    sequence.row = 0
    table = torch.arange(1, 21, dtype=torch.int32)[None].numpy()
    parts = [PrefillChunk(sequence, *part) for part in ((0, 17, 0), (17, 18, 17), (18, 20, 18))]
    return torch.cat(
        [model.forward(step_batch(StepPlan([], [part], [], []), table), table) for part in parts]
    )


WINDOWS = ["sliding_attention"] * 4 + ["full_attention"] * 4
GEMMA = {
    "query_pre_attn_scalar": 24,
    "pad_token_id": None,
    "sliding_window": 7,
    "layer_types": WINDOWS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 4},
    "olmo2": {"pad_token_id": None},
    "gemma3_text": GEMMA,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_computes_the_same_as_single_attentions(make_model: Make, family: str) -> None:
    """Grouped attentions give the same states as the reference that computes them one after
    another, for each listed architecture.

    Exact steps are bit-identical.
    """
    folder = make_model(family, **DEEP, **FAMILIES[family])
    kernels = [TorchModel, NativeModel] if family in ("llama", "qwen2", "qwen3") else [TorchModel]
    for group in (2, 3, 6):
        known = hidden(folder, group, OneByOne)
        assert (known - hidden(folder, 1, TorchModel)).abs().max() > 1e-3
        for kernel in kernels:
            assert torch.allclose(hidden(folder, group, kernel), known, atol=2e-5)
    if NativeModel in kernels:
        assert torch.equal(hidden(folder, 4, NativeModel, 2), hidden(folder, 4, NativeModel))


def test_the_error_grows_with_the_group(make_model: Make) -> None:
    """Larger groups of attentions give larger errors.

    Groups of one layer are exact, and the first and last layers are never grouped.
    """
    folder = make_model("llama", **DEEP)
    exact = hidden(folder, 1)
    errors = [float((hidden(folder, group) - exact).abs().mean()) for group in (1, 2, 4)]
    assert errors[0] == 0
    assert 0 < errors[1] < errors[2] < float(exact.abs().mean())
    assert torch.equal(hidden(folder, 6), hidden(folder, 60)), "six layers can be grouped"
    shallow = make_model("llama", num_hidden_layers=3)
    assert torch.equal(hidden(shallow, 1), hidden(shallow, 4)), "a single layer must not be grouped"


def drafted(
    folder: Path, group: int, patch: pytest.MonkeyPatch, calibration: str = "exact"
) -> Driven:
    """Run a model that is its own drafter, with grouped attentions."""

    patch.setattr(GroupedDrafter, "calibration", calibration)
    return run(folder, [requests(4, 60)], None, 6, folder, fuzzy=group)


def test_calibrated_groups_are_accepted_more_often(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target accepts more proposals if each draft begins with an exact pass, and more with
    smaller groups. The text does not change.
    """
    folder = make_model("llama", **DEEP)
    plain = run(folder, [requests(4, 60)])
    shares = dict[tuple[int, str], float]()
    for group, calibration in ((2, "exact"), (2, "none"), (4, "exact")):
        done = drafted(folder, group, monkeypatch, calibration)
        assert same(plain, done)
        tested = counts(done).tested_at
        accepted = counts(done).accepted_at
        shares[group, calibration] = sum(accepted) / sum(tested)
        if calibration == "exact":
            assert accepted[0] >= tested[0] - 2, (
                "the first token of a round must come from the exact pass"
            )
    assert shares[2, "exact"] > shares[4, "exact"]
    assert shares[2, "exact"] > shares[2, "none"]


def test_one_kernel_call_drafts_as_single_steps_do(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without top-k and top-p, one kernel call drafts several tokens. They are the same as those of
    single steps; the first one is computed without grouping.
    """
    folder = make_model("llama", **DEEP)
    whole = [requests(4, 60, LAWS[:3])]
    at_once = run(folder, whole, None, 6, folder, fuzzy=3)
    monkeypatch.setattr(ModelDrafter, "_filters", lambda *_: True)
    in_turns = run(folder, whole, None, 6, folder, fuzzy=3)
    assert same(run(folder, whole), at_once)
    assert same(at_once, in_turns)
    both = [(counts(done).tested_at, counts(done).accepted_at) for done in (at_once, in_turns)]
    assert both[0] == both[1]
    assert sum(both[0][0]) > sum(both[0][1]), (
        "some drafts must be wrong, to test that they are overwritten"
    )


def test_grouped_drafts_are_captured_and_replayed(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If grouped and exact steps are captured and replayed as graphs, the same tokens are drafted,
    accepted and written.
    """
    folder = make_model("llama", **DEEP)
    made = list[TorchModel]()

    def launched(**settings: Any) -> None:
        def make(*parts: Any, group: int) -> TorchModel:
            made.append(TorchModel(*parts, group=group, **settings))
            return made[-1]

        monkeypatch.setattr("atts.local.builder.TorchModel", make)

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    orders = [requests(4, 60)]
    launched()
    plain = run(folder, orders, None, 6, folder, fuzzy=3, kernel="torch")
    launched(capture=captured)
    ours = run(folder, orders, None, 6, folder, fuzzy=3, kernel="torch")
    assert texts(plain) == texts(ours)
    assert counts(plain).accepted_at == counts(ours).accepted_at
    assert counts(plain).tested_at == counts(ours).tested_at
    graphs = made[-1].graphs
    assert graphs is not None
    assert graphs.trouble == ""
    assert {key.is_grouped for key in graphs.captured} == {True, False}
    assert graphs.num_replayed > 2 * len(graphs.captured)


def test_joined_attentions_are_made_before_the_cache(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the engine makes joined attentions before the cache.

    They copy the drafter's weights, and the cache takes all remaining memory.
    """
    folder = make_model("llama", **DEEP)
    events = list[str]()

    def joined(layers: Any, config: Any) -> Any:
        events.append(f"{len(layers)} joined")
        return join(layers, config)

    def allocate_cache(*parts: Any, **settings: Any) -> Any:
        events.append("cache")
        return allocate(*parts, **settings)

    def for_a_gpu(*parts: Any, **settings: Any) -> Any:
        return load_weights(*parts, **{**settings, "pairs": True})

    join = loader.joined
    allocate = devices.allocate_cache
    monkeypatch.setattr(loader, "joined", joined)
    monkeypatch.setattr("atts.accel.build.allocate_cache", allocate_cache)
    monkeypatch.setattr("atts.accel.build.load_weights", for_a_gpu)
    run(folder, [requests(1, 8)], None, 4, folder, fuzzy=3, kernel="torch")
    assert events.count("3 joined") == 2
    assert "3 joined" not in events[events.index("cache") :]


def test_impossible_settings_of_groups_are_refused() -> None:
    """Grouped attentions are refused unless there is a separate drafter that takes turns with its
    target.
    """
    good = SpeculationOptions(drafter="embedded:draft", fuzzy=2)
    good.check()
    for wrong in ({"fuzzy": 0}, {"drafter": ""}, {"speculate": "pearl"}):
        with pytest.raises(OptionError, match="fuzzy"):
            replace(good, **wrong).check()
