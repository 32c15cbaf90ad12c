"""Tests of folders with only a part of a model: a base completes each part, and the part can draft
on the base's layers.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atts.accel import Zoo, accelerated
from atts.accel.engine import PlannedLoop
from atts.accel.zoo import shared_worker
from atts.accel.zoo.zoo import bytes_of
from atts.api import Setup, build_engines, evaluate
from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.errors import ATTSError, ModelLoadError, OptionError, ZooError
from atts.local import LocalEngine
from atts.models import path
from atts.pipelines import Policy
from atts.sampling import Seed

from .conftest import Tune, contents
from .test_adapters import asked, save_adapter
from .test_chains import SHARED

FAMILY = path("target").parent / "family"


def part_of(folder: Path, whole: Path, *words: str, **config: Any) -> Path:
    """Make a folder with a model's configuration and the tensors whose names contain one of these
    words.
    """
    folder.mkdir()
    said = json.loads((whole / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    tensors = load_file(whole / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if any(word in name for word in words)}
    save_file(own, folder / "own.safetensors", metadata={"format": "pt"})
    return folder


def test_a_part_is_completed_from_its_base(base: Path, tune: Tune, tmp_path: Path) -> None:
    """After completion from its base, the part has the same blocks and exports the same tensors as
    the whole model. Only its source and name differ.
    """
    zoo = Zoo(tmp_path / "zoo")
    whole = tune("whole", "layers.2.mlp", "lm_head")
    zoo.add("base", base)
    model = zoo.add("part", part_of(tmp_path / "part", whole, "layers.2.mlp", "lm_head"), "base")
    assert model.source == str(tmp_path / "part")
    assert model.digests == zoo.add("whole", whole).digests
    zoo.export("part", tmp_path / "out")
    out, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", whole))
    assert out.keys() == wanted.keys()
    assert all(torch.equal(out[name], wanted[name]) for name in wanted)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        base / "tokenizer.json"
    ).read_bytes()


@pytest.mark.anyio
async def test_a_shallow_part_can_open_before_its_base(
    base: Path, tune: Tune, tmp_path: Path
) -> None:
    """The cache of a zoo fits its deepest model whichever model opens first, and each model gives
    its own replies.
    """
    zoo = Zoo(tmp_path / "zoo")
    other = tune("other", "lm_head")
    zoo.add("deep", base)
    zoo.add(
        "shallow",
        part_of(tmp_path / "part", other, "lm_head", num_hidden_layers=2, layer_types=None),
        "deep",
    )
    alone = {name: await asked(zoo.folder(name), kernel="native") for name in ("deep", "shallow")}
    request = SampleRequest(
        tuple(range(5, 30)), 30, Sampling(0.8), seed=Seed(1, "p", 0, 0, "target", 0)
    )
    found = dict[str, list[object]]()
    for names in (["shallow", "deep"], ["deep"], ["shallow"]):
        engines = [
            await accelerated(zoo.folder(name), options=SHARED).__aenter__() for name in names
        ]
        assert len(shared_worker._HOSTS) == 1
        builders = [host._config.builder for host in shared_worker._HOSTS.values()]
        assert [each.plan.depth for each in builders if isinstance(each, PlannedLoop)] == [3]
        for name, engine in zip(names, engines, strict=True):
            done = await engine.sample(request)
            scores = await engine.score(ScoreRequest((5, 6), tuple(range(7, 60))))
            found.setdefault(name, []).append((done.ids, done.logprobs, scores.logprobs))
        for engine in engines:
            await engine.__aexit__(None, None, None)
    assert all(first == again for first, again in found.values())
    assert alone["deep"] != alone["shallow"]


Change = Callable[[dict[str, torch.Tensor]], Any]
UP = "model.layers.2.mlp.up_proj.weight"
BAD: dict[str, tuple[Change, dict[str, Any], str, str, type[ATTSError]]] = {
    "other shape": (
        lambda t: t.update({UP: t[UP][:-1].clone()}),
        {},
        "base",
        "has shape",
        ModelLoadError,
    ),
    "more layers": (
        dict,
        {"num_hidden_layers": 4},
        "base",
        "lacks the weight 'layers.3",
        ModelLoadError,
    ),
    "no layers": (dict, {"num_hidden_layers": "x"}, "base", "num_hidden_layers", ModelLoadError),
    "other width": (dict, {"hidden_size": 32}, "base", "has shape", ModelLoadError),
    "other tokenizer": (
        dict,
        {"vocab_size": 250},
        "base",
        "the tokenizer has ids up to",
        ModelLoadError,
    ),
    "no such base": (dict, {}, "else", "the zoo has no model 'else'", ZooError),
    "an adapter's model": (dict, {}, "narrow", "such as 'base'", OptionError),
    "no base": (dict, {}, "", "tokenizer|lacks the weight", ModelLoadError),
}


@pytest.mark.parametrize("case", BAD)
def test_a_part_that_no_base_completes_is_refused(case: str, base: Path, tmp_path: Path) -> None:
    """A part of a model that no base completes is refused with a message, without a traceback, and
    the zoo is unchanged.
    """
    change, config, name, says, kind = BAD[case]
    folder = part_of(tmp_path / "part", base, "layers.2.mlp", **config)
    zoo = Zoo(tmp_path / "zoo")
    own = load_file(folder / "own.safetensors")
    change(own)
    save_file(own, folder / "own.safetensors")
    zoo.add("base", base)
    zoo.add("narrow", save_adapter(tmp_path / "narrow", base, "q_proj"))
    before = contents(zoo.directory)
    with pytest.raises(kind, match=says):
        zoo.add("part", folder, name)
    assert contents(zoo.directory) == before


@pytest.mark.parametrize("size", [0, 5, 300, 5000])
def test_a_torn_part_is_refused(size: int, base: Path, tmp_path: Path) -> None:
    """A part that was cut at any byte is refused, and the next change of the zoo removes files that
    a killed process left incomplete.
    """
    folder = part_of(tmp_path / "part", base, "layers.2.mlp")
    zoo = Zoo(tmp_path / "zoo")
    data = (folder / "own.safetensors").read_bytes()
    zoo.add("base", base)
    before = contents(zoo.directory)
    (folder / "own.safetensors").write_bytes(data[:size])
    with pytest.raises(ModelLoadError, match="damaged"):
        zoo.add("part", folder, "base")
    assert contents(zoo.directory) == before
    (folder / "own.safetensors").write_bytes(data)
    left = zoo.directory / ".completed"
    left.mkdir()
    (left / "model.safetensors").write_bytes(data)
    zoo.add("part", folder, "base")
    assert not left.exists()


def shipped(folder: Path) -> Zoo:
    """Make a zoo of the embedded target and of the draft made of its first layers."""
    zoo = Zoo(folder / "zoo")
    zoo.add("base", path("target"))
    zoo.add("draft", FAMILY / "draft", "base")
    return zoo


HERE = "worker=thread&threads=1"
PAIR = Setup(
    policy=Policy(samples=2, early_stop="none"), concurrency=1, rate=0.5, rate_scope="marginal"
)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_run_of_a_target_and_its_shallow_draft_shares_one_loop(tmp_path: Path) -> None:
    """If target and shallow draft share one loop, prompts are prefilled once through the shared
    layers, and the text is that of two separate models.
    """
    zoo = shipped(tmp_path)
    written = list[Any]()
    spoken = list[Any]()
    for name in zoo.names():
        zoo.export(name, tmp_path / name)
    for draft, target in (
        (f"zoo:{zoo.directory}/draft?{HERE}", f"zoo:{zoo.directory}/base?{HERE}"),
        (f"hf:{tmp_path}/draft?{HERE}", f"hf:{tmp_path}/base?{HERE}&speculate=off"),
    ):
        result = await evaluate(
            "arithmetic[:1]",
            replace(PAIR, draft=draft, target=target),
            directory=tmp_path / draft[:3],
        )
        assert result.speculated is None
        lines = [line for outcome in result.outcomes() for line in outcome.rollouts]
        # the shared loop divides prompts into steps differently, so log-probabilities may differ in
        # the last digit
        words = [
            [[(c.author, c.text, c.draft_ids) for c in turn.chunks] for turn in line.turns]
            for line in lines
        ]
        ends = [(line.problem, line.sample, line.turns, line.finish, line.answer) for line in lines]
        written.append(ends)
        spoken.append(words)
    assert spoken[0] == spoken[1]
    assert [end[3:] for end in written[0]] == [end[3:] for end in written[1]]
    assert any(
        chunk.author == "target" for line in written[0] for turn in line[2] for chunk in turn.chunks
    )


@pytest.mark.anyio
async def test_a_shallow_draft_adds_only_its_own_bytes(tmp_path: Path) -> None:
    """A shallow draft adds only its own blocks to the target on disk, and the first layers of a
    prompt are computed once.
    """
    zoo = shipped(tmp_path)
    own = FAMILY / "draft" / "own.safetensors"
    whole = path("target") / "model.safetensors"
    assert bytes_of((zoo.directory / "blocks").iterdir()) < bytes_of([own, whole]) + 20_000
    ids = tuple(range(3, 60))
    draft, target = build_engines(
        f"zoo:{zoo.directory}/draft?{HERE}", f"zoo:{zoo.directory}/base?{HERE}"
    )
    async with draft, target:
        assert isinstance(draft, LocalEngine)
        assert isinstance(target, LocalEngine)
        assert draft.kernel == target.kernel
        assert len(shared_worker._HOSTS) == 1
        await draft.sample(SampleRequest(ids, 2))
        scores = await target.score(ScoreRequest(ids, (5, 6, 7, 8)))
    async with target:
        assert (await target.score(ScoreRequest(ids, (5, 6, 7, 8)))).logprobs == scores.logprobs


@pytest.mark.anyio
async def test_a_target_can_speculate_with_its_own_first_layers(tmp_path: Path) -> None:
    """If a target speculates with its own first layers, the text does not change, because the
    target verifies each proposed token.
    """
    zoo = shipped(tmp_path)
    prompt = tuple(range(40, 70))
    laws = {1: Sampling(0.0), 2: Sampling(1.0)}
    requests = [
        SampleRequest(prompt, 60, law, seed=Seed(n, "p", 0, 0, "target", 0))
        for n, law in laws.items()
    ]
    words = f"zoo:{zoo.directory}/base?{HERE}"
    found = list[object]()
    for settings in ("", f"&drafter=zoo:{zoo.directory}/draft&speculate=draft&k=4"):
        _, engine = build_engines("scripted", words + settings, "off")
        assert isinstance(engine, LocalEngine)
        async with engine:
            found.append(
                [
                    (done.ids, done.logprobs)
                    for done in [await engine.sample(request) for request in requests]
                ]
            )
            told = engine.loop_stats().speculation
            assert (told is not None and told.proposed > 0) == bool(settings)
    assert found[0] == found[1]
