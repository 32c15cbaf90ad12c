"""Tests of memory plans for GPUs that this machine lacks: the plan is computed before anything is
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from atts.api import CARDS, Pair, build_engines, known_pairs, local_placement
from atts.api.pairs import run_tokens
from atts.core import Role
from atts.errors import OptionError, OutOfMemory
from atts.local import EngineSize, LocalOptions, RunDemand
from atts.local.builder import build_loop
from atts.local.devices import (
    SPARE_SLOTS,
    allocate_cache,
    check_room,
    default_tokens,
    device_of,
    on_device,
)
from atts.local.engine import PlainDecoding, _prepare  # pyright: ignore[reportPrivateUsage]
from atts.local.loader import Weights, load_weights
from atts.local.messages import WorkerConfig
from atts.local.model import TorchModel
from atts.local.model_config import check_model
from atts.local.options import WORKSPACE, Room, cards_for

Make = Callable[..., Path]
CPU = torch.device("cpu")


class FakeGpus:
    """Simulated GPUs with the given numbers of bytes. Weights and caches reduce their free memory,
    but are stored in the processor's memory.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *totals: int) -> None:
        self.totals = totals
        self.used = [0] * len(totals)
        self.events = list[str]()
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("torch.cuda.device_count", lambda: len(totals))
        patch.setattr("atts.local.devices.free_room", self.free)
        patch.setattr("atts.local.devices.total_room", lambda device: totals[device.index or 0])
        patch.setattr("atts.local.builder.load_weights", self._load)
        patch.setattr("atts.local.devices._zeros", self._zeros)

    def free(self, device: torch.device) -> int:
        """Return the free memory of a card, in bytes."""
        at = device.index or 0
        return self.totals[at] - self.used[at]

    def _load(
        self, folder: Path, config: Any, dtype: Any, device: torch.device, name: str, **_: Any
    ) -> Any:
        self.events.append(f"weights of {name} to {device}")
        size = EngineSize.of(config, str(dtype).removeprefix("torch."), 1)
        self._take(device, size.weights)
        return load_weights(folder, config, dtype, CPU, name, pairs=device.type == "cuda")

    def _zeros(self, size: tuple[int, ...], dtype: Any, device: torch.device) -> Any:
        found = torch.zeros(size, dtype=dtype)
        self.events.append(f"cache on {device}")
        self._take(device, found.numel() * found.element_size())
        # Graphs and activations take memory only when the engine works.
        self.used[device.index or 0] += WORKSPACE
        return found

    def _take(self, device: torch.device, count: int) -> None:
        if count > self.free(device):
            raise torch.OutOfMemoryError("the card is full")
        self.used[device.index or 0] += count


def prepared(folder: Path, name: str, demand: RunDemand | None, **options: Any) -> WorkerConfig:
    """Prepare an engine as far as possible without loading anything."""
    made = LocalOptions(**options)
    return _prepare(str(folder), name, made, PlainDecoding(), is_chat=False, demand=demand)[0]


def opened(config: WorkerConfig) -> int:
    """Open an engine's loop as its worker does, and return the number of tokens that fit into its
    cache.
    """

    def model(config: WorkerConfig, weights: Weights, cache: torch.Tensor) -> TorchModel:
        return TorchModel(config.model, weights, cache)

    return build_loop(config, lambda report: None, model)[1].kv_tokens


def _sizes(folder: Path, dtype: str = "float32") -> EngineSize:
    return EngineSize.of(check_model(folder, "m")[0], dtype, 64)


@pytest.mark.parametrize("spare", [400_000, 2_000_000, 200_000_000])
def test_a_pair_is_sized_together_before_either_loads(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """Draft and target share one GPU. Their caches are planned together, have room for the same
    number of tokens, and are no larger than the rollouts need.
    """
    draft, target = make_model("llama"), make_model("qwen3")
    sizes = [_sizes(draft), _sizes(target)]
    total = sum(size.weights + WORKSPACE for size in sizes) + spare
    gpus = FakeGpus(monkeypatch, total)
    demand = RunDemand(rollouts=8, tokens=64, card=1, other=str(target))
    first = opened(prepared(draft, "draft", demand))
    second = opened(prepared(target, "target", RunDemand(rollouts=8, tokens=64)))
    assert 64 <= first <= 8 * 64
    assert first == min(8 * 64, spare // sum(size.token for size in sizes))
    assert abs(second - first) <= 2 * SPARE_SLOTS
    # each cache has a few additional slots, which the plan counts as workspace
    besides = SPARE_SLOTS * sum(size.token for size in sizes)
    assert gpus.used[0] <= total + besides


def test_the_second_of_two_gpus_is_the_drafts(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two GPUs, target and draft each get their own card unless options name devices."""
    draft, target = make_model("llama"), make_model("qwen3")
    sizes = [_sizes(draft), _sizes(target)]
    gpus = FakeGpus(monkeypatch, *(size.weights + WORKSPACE + 1_000_000 for size in sizes[::-1]))
    opened(prepared(draft, "draft", RunDemand(8, 64, card=1, other=str(target))))
    opened(prepared(target, "target", RunDemand(8, 64)))
    assert [event for event in gpus.events if "weights" in event] == [
        "weights of draft to cuda:1",
        "weights of target to cuda:0",
    ]
    assert all(gpus.used)


def test_a_named_device_wins_over_the_role(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting `device=cuda:N` has priority over the model's role, and an unknown form of the
    setting is refused.
    """
    folder = make_model("llama")
    FakeGpus(monkeypatch, 4 * WORKSPACE, 4 * WORKSPACE)
    config = prepared(folder, "draft", RunDemand(8, 64, card=1), device="cuda:0")
    assert device_of(config) == torch.device("cuda:0")
    assert device_of(prepared(folder, "m", None, device="cuda:1")) == torch.device("cuda:1")
    assert device_of(prepared(folder, "m", None)) == torch.device("cuda")
    for words in ("gpu", "cuda:", "cuda:-1", "cuda:1 "):
        with pytest.raises(OptionError, match="no such device"):
            LocalOptions(device=words).check()


def test_a_pair_that_does_not_fit_is_refused_before_anything_is_loaded(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a pair does not fit, its first engine refuses with an error that gives the needed and the
    available size and a remedy.
    """
    draft, target = make_model("llama"), make_model("qwen3")
    sizes = [_sizes(draft), _sizes(target)]
    total = sum(size.weights + WORKSPACE for size in sizes) + 1000
    gpus = FakeGpus(monkeypatch, total)
    with pytest.raises(
        OutOfMemory, match="cuda does not have enough memory for both models of the pair"
    ) as raised:
        opened(prepared(draft, "draft", RunDemand(8, 64, card=1, other=str(target))))
    assert "second GPU" in str(raised.value)
    assert gpus.events == []
    assert gpus.used == [0]


def test_a_model_larger_than_a_card_needs_a_server(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a model is larger than a card, the error has the command that serves the model on enough
    cards.
    """
    folder = make_model("llama")
    size = _sizes(folder)
    gpus = FakeGpus(monkeypatch, size.weights // 3)
    with pytest.raises(OutOfMemory) as raised:
        opened(prepared(folder, "target", RunDemand(8, 64)))
    assert f"`vllm serve {folder} --tensor-parallel-size 4 --port 8000`" in str(raised.value)
    assert "`atts pairs PAIR --card CARD`" in str(raised.value)
    assert gpus.events == []
    assert cards_for(100, 120) == 1
    assert cards_for(100, 100) == 2


def test_dtype_auto_follows_the_checkpoint_on_a_gpu_only(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dtype=auto, a GPU uses the type in config.json, and a processor uses float32. A type
    that the user names has priority.
    """
    folder = make_model("llama")
    half = tmp_path / "half"
    half.mkdir()
    for file in folder.iterdir():
        (half / file.name).write_bytes(file.read_bytes())
    told = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**told, "dtype": "bfloat16"}))

    def dtype(folder: Path, **options: Any) -> str:
        return on_device(prepared(folder, "m", None, **options)).options.dtype

    assert dtype(half, device="cpu") == "float32"
    FakeGpus(monkeypatch, 4 * WORKSPACE)
    assert [dtype(half), dtype(folder)] == ["bfloat16", "float32"]
    assert dtype(half, dtype="float32") == "float32"
    assert dtype(half, device="cpu") == "float32"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2"])
def test_weights_are_ready_before_the_cache_is_made(
    family: str, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were prepared for a GPU while loading are used without a copy, and are
    bit-identical to those that the torch model prepares itself.
    """
    folder = make_model(family)
    config = prepared(folder, "m", None, device="cpu")
    plain = load_weights(folder, config.model, torch.float32, CPU, "m", pairs=False)
    ready = load_weights(folder, config.model, torch.float32, CPU, "m", pairs=True)
    cache = allocate_cache(
        replace(config, options=replace(config.options, kv_tokens=64)), torch.float32, CPU
    )
    made = TorchModel(config.model, plain, cache)._weights  # pyright: ignore[reportPrivateUsage]
    kept = TorchModel(config.model, ready, cache)._weights  # pyright: ignore[reportPrivateUsage]
    assert kept is ready
    for ours, theirs in zip(ready.layers, made.layers, strict=True):
        for name in ("qkv", "qkv_bias", "query_norm", "key_norm"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert (one is None and other is None) or bool((one == other).all())


def test_the_cache_comes_last(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine allocates its cache after the weights, once and at the computed size."""
    folder = make_model("llama")
    size = _sizes(folder)
    gpus = FakeGpus(monkeypatch, size.weights + WORKSPACE + 100_000)
    opened(prepared(folder, "m", RunDemand(100, 64)))
    assert gpus.events == ["weights of m to cuda", "cache on cuda"]


def test_a_cache_is_halved_when_memory_was_lost_meanwhile(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If other processes took memory after the plan, the cache is halved until it fits, but keeps
    room for at least one rollout.
    """
    config = prepared(make_model("llama"), "m", None)
    FakeGpus(monkeypatch, 1_000_000)
    config = replace(config, room=Room(8, 64), options=replace(config.options, kv_tokens=4096))
    cache = allocate_cache(config, torch.float32, torch.device("cuda"))
    assert 64 <= cache.shape[2] - SPARE_SLOTS <= 2048
    config = replace(config, room=Room(8, 2000), options=replace(config.options, kv_tokens=4096))
    with pytest.raises(OutOfMemory, match="does not fit"):
        allocate_cache(config, torch.float32, torch.device("cuda"))


@pytest.mark.parametrize("card", CARDS)
def test_the_table_of_pairs_and_cards_adds_up(card: str) -> None:
    """In the table of pairs and cards, the memory of all parts is at most the card's memory, and at
    least one rollout fits.

    No cache is larger than 64 rollouts need.
    """
    opens = set[str]()
    for pair in known_pairs().values():
        placed = local_placement(pair, card, 16_000)
        if placed is None:
            continue
        opens.add(pair.name)
        for number in range(placed.count):
            on_card = [share for share in placed.shares.values() if share.card == number]
            taken = sum(share.weights + share.cache + WORKSPACE for share in on_card)
            assert 0 < taken <= 0.92 * CARDS[card] * 1e9
        assert 1 <= placed.rollouts <= 64
        assert placed.context == run_tokens(16_000)
        for role, share in placed.shares.items():
            assert share.weights == int(pair.size(role).weights * 1e9)
            assert share.cache == share.tokens * pair.size(role).cache_bytes
    if card in ("h100", "h200"):
        assert "r1-1.5b/r1-7b" in opens
        assert "r1-1.5b/r1-70b" not in opens, "141 GB of weights must need a server"


@dataclass(frozen=True)
class Shape:
    """The settings of a model that decide its memory use."""

    matrix_weights: int
    kv_floats_per_token: int
    context_length: int
    ties_embeddings: bool = True


def shaped(pair: Pair, role: Role, room: Room) -> WorkerConfig:
    """Return the configuration of an engine of a known pair before it loads anything. The model's
    files are not needed.
    """
    size = pair.size(role)
    shape = Shape(int(size.weights * 1e9) // 2, size.cache_bytes // 2, size.context)
    options = LocalOptions(dtype="bfloat16")
    return WorkerConfig(role, Path(role), cast(Any, shape), (), options, room=room)


def opened_on(gpus: FakeGpus, pair: Pair, context: int) -> dict[Role, int]:
    """Open the draft and then the target as engines do, and return how many tokens fit into each
    one's cache.
    """
    target = pair.size("target")
    other = EngineSize(int(target.weights * 1e9), target.cache_bytes, context)
    rooms: dict[Role, Room] = {
        "draft": Room(64, context, card=1, other_card=0, other=other),
        "target": Room(64, context, card=0),
    }
    tokens = dict[Role, int]()
    for role, room in rooms.items():
        config = shaped(pair, role, room)
        device = device_of(config)
        at = device.index or 0
        check_room(config, device)
        gpus.used[at] += int(pair.size(role).weights * 1e9)
        tokens[role] = default_tokens(config, torch.bfloat16, device)
        gpus.used[at] += tokens[role] * pair.size(role).cache_bytes + WORKSPACE
    return tokens


@pytest.mark.parametrize("card", CARDS)
def test_the_table_of_pairs_predicts_opening(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one and on two simulated cards, each pair opens with the cache sizes of the table, or is
    refused as the table says.
    """
    total = int(CARDS[card] * 0.92 * 1e9)
    num_opened = 0
    for pair in known_pairs().values():
        models = [pair.size(role) for role in ("draft", "target")]
        if not all(size.layers and not size.packed and not size.experts for size in models):
            continue
        for count in (1, 2):
            gpus = FakeGpus(monkeypatch, *[total] * count)
            placed = local_placement(pair, card, 16_000, counts=(count,))
            if placed is None:
                context = min(run_tokens(16_000), *(size.context for size in models))
                with pytest.raises(OutOfMemory):
                    opened_on(gpus, pair, context)
                continue
            num_opened += 1
            tokens = opened_on(gpus, pair, placed.context)
            assert tokens["draft"] == placed.shares["draft"].tokens
            assert abs(tokens["target"] - placed.shares["target"].tokens) <= 1
            assert all(used <= total for used in gpus.used)
    assert num_opened >= 3


@pytest.mark.checkout
def test_the_page_of_pairs_and_cards_has_a_row_for_each() -> None:
    """The generated page has the placement of each pair on each card."""
    pages = pytest.importorskip(
        "scripts.studies.docs", reason="scripts.studies exists only in a checkout"
    )
    rows = [line.split(" | ") for line in pages.gpu_page().splitlines() if line.startswith("| ")]
    by_pair = {(row[0].removeprefix("| "), row[2].split(",")[0]): row for row in rows[1:]}
    pairs = [pair for pair in known_pairs().values() if pair.size("target").layers]
    assert by_pair.keys() == {(pair.name, card) for pair in pairs for card in CARDS}
    for pair in pairs:
        for card in CARDS:
            placed = local_placement(pair, card, int(str(pair.settings["max_tokens"])))
            row = by_pair[pair.name, card]
            if placed is None:
                assert row[3] == "servers"
            else:
                assert row[3].startswith(f"{placed.count} GPU")
                assert row[6] == str(placed.rollouts)
                assert row[5].startswith(f"{pair.size('target').weights:.1f} + ")


def test_a_smaller_card_never_holds_more() -> None:
    """A card with more memory opens every pair that a smaller card opens, with at least as many
    rollouts.
    """
    by_memory = sorted(CARDS, key=lambda name: CARDS[name])
    for pair in known_pairs().values():
        rollouts = [0]
        for card in by_memory:
            placed = local_placement(pair, card, 16_000, counts=(1,))
            rollouts.append(0 if placed is None else placed.rollouts)
        assert rollouts == sorted(rollouts)


def test_local_engines_of_a_run_share_the_memory_plan(make_model: Make) -> None:
    """If both models of a run are local, each is planned with the memory that the other leaves.
    Engines on servers have no memory plan.
    """
    folder = make_model("llama")
    local = f"hf:{folder}?dtype=float32"
    demands = [
        getattr(engine, "_demand", None)
        for engine in build_engines("embedded", local, "off", in_flight=(5, 700))
    ]
    assert [(each.rollouts, each.tokens) for each in demands if each] == [(5, 700)] * 2
    assert demands[0] is not None
    assert demands[0].other == str(folder)
    assert demands[0].other_options.dtype == "float32"
    assert demands[1] is not None
    assert demands[1].other == ""
    alone, _ = build_engines("embedded", "vllm:http://a:1/m", "off", in_flight=(5, 700))
    assert getattr(alone, "_demand").other == ""  # noqa: B009
