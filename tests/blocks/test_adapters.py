"""Tests of adapters in peft's layout: a zoo serves the adapted base and exports the adapter
unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from atts.accel import Zoo, accelerated, options_of
from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.errors import ATTSError, ModelLoadError, OptionError
from atts.sampling import Seed
from tests.local.test_stages import StageHere
from tests.local.test_stages import here as here

from .conftest import Tune, contents

Make = Callable[..., Path]
Kernel = Literal["auto", "torch"]
IDS = tuple((7 * index * index + index) % 290 + 3 for index in range(90))


SETTINGS: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none",
    "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "init_lora_weights": True, "inference_mode": True, "layers_to_transform": None,
}  # fmt: skip


def save_adapter(folder: Path, base: Path, *modules: str, seed: int = 0, **changes: Any) -> Path:
    """Write an adapter of random numbers as peft's save_pretrained does, for matrices whose names
    contain these words.
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = dict[str, torch.Tensor]()
    for name, weight in load_file(base / "model.safetensors").items():
        if any(module in name for module in modules):
            rank = changes.get("rank_pattern", {}).get(name.split(".")[-2], 4)
            inner = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{inner}.lora_A.weight"] = 0.2 * torch.randn(
                rank, weight.shape[1], generator=generator
            )
            tensors[f"{inner}.lora_B.weight"] = 0.2 * torch.randn(
                weight.shape[0], rank, generator=generator
            )
    said = (
        SETTINGS | {"base_model_name_or_path": str(base), "target_modules": list(modules)} | changes
    )
    (folder / "adapter_config.json").write_text(json.dumps(said, indent=2))
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def merged(folder: Path, base: Path, adapter: Path, tune: Tune) -> Path:
    """Merge the adapter by hand as peft's merge_and_unload does: W + scale * B A."""
    said = json.loads((adapter / "adapter_config.json").read_text())
    made = tune(folder.name, source=base)
    weights = load_file(made / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in parts if "lora_A" in name]:
        down = parts[name]
        up = parts[name.replace("lora_A", "lora_B")]
        key = name.removeprefix("base_model.model.").replace(".lora_A", "")
        alpha = said["alpha_pattern"].get(key.split(".")[-2], said["lora_alpha"])
        scale = alpha / (len(down) ** 0.5 if said["use_rslora"] else len(down))
        weights[key] += scale * (up @ down)
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


async def asked(folder: Path, **changes: Any) -> tuple[list[float], tuple[int, ...]]:
    """Return the model's log-probabilities of some tokens, and the token ids that it samples."""
    settings = {"worker": "thread", "device": "cpu", "kv_tokens": 1024, "threads": 1, **changes}
    async with accelerated(folder, **options_of(**settings)._asdict()) as engine:
        scores = await engine.score(ScoreRequest(IDS[:5], IDS[5:]))
        request = SampleRequest(IDS[:20], 30, Sampling(0.8), seed=Seed(1, "p", 0, 0, "target", 0))
        return list(scores.logprobs), (await engine.sample(request)).ids


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "attention": ("llama", ("q_proj", "v_proj"), {}),
    "all": (
        "llama",
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        {"lora_alpha": 3},
    ),
    "patterns": (
        "qwen3",
        ("q_proj", "down_proj"),
        {"rank_pattern": {"down_proj": 7}, "alpha_pattern": {"q_proj": 2}, "use_rslora": True},
    ),
    "fused": ("phi3", ("qkv_proj", "gate_up_proj"), {}),
}


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        pytest.param(
            case,
            kernel,
            marks=[] if case in ("all", "fused") and kernel == "auto" else [pytest.mark.slow],
        )
        for case in CASES
        for kernel in ("auto", "torch")
    ],
)
def test_an_adapter_scores_as_merged_weights(
    case: str, kernel: Kernel, make_model: Make, tune: Tune, tmp_path: Path
) -> None:
    """The model scores as if its adapter were merged, and adds only one block to the base's blocks."""
    family, modules, changes = CASES[case]
    base = make_model(family, **({"pad_token_id": None} if family == "phi3" else {}))
    adapter = save_adapter(tmp_path / "lora", base, *modules, **changes)
    zoo = Zoo(tmp_path / "zoo")
    digests = zoo.add("base", base).digests
    model = zoo.add("tuned", adapter)
    assert len(model.digests - digests) == 1
    assert model.base == "base"
    ours, drawn = anyio.run(lambda: asked(zoo.folder("tuned"), kernel=kernel))
    theirs, wanted = anyio.run(
        lambda: asked(merged(tmp_path / "merged", base, adapter, tune), kernel=kernel)
    )
    plain, _ = anyio.run(lambda: asked(zoo.folder("base"), kernel=kernel))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 2e-4
    assert drawn == wanted
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) > 0.1
    zoo.export("tuned", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(adapter)


def test_models_of_a_zoo_run_in_stages(
    here: type[StageHere], base: Path, tune: Tune, tmp_path: Path
) -> None:
    """Two workers with half of the layers each give the same replies as one process, also with
    adapters.
    """
    zoo = Zoo(tmp_path / "zoo")
    adapter = save_adapter(tmp_path / "lora", base, "q_proj", "down_proj")
    zoo.add("base", base)
    zoo.add("tuned", tune("tuned", "layers.2"))
    zoo.add("lora", adapter)
    folders = {
        "tuned": tmp_path / "tuned",
        "lora": merged(tmp_path / "merged", base, adapter, tune),
    }
    for name, folder in folders.items():
        ours, drawn = anyio.run(partial(asked, zoo.folder(name), stages=3, stage_replicas="2,1"))
        theirs, wanted = anyio.run(partial(asked, folder))
        assert (drawn, len(here.made)) == (wanted, 3)
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < (
            2e-4 if name == "lora" else 1e-12
        )
        here.made.clear()


def test_adapters_can_be_added_and_removed_in_any_order(base: Path, tmp_path: Path) -> None:
    """Two adapters share one base, and the base's blocks stay as long as an adapter needs them."""
    zoo = Zoo(tmp_path / "zoo")
    first, second = (
        save_adapter(tmp_path / name, base, "q_proj", seed=at) for at, name in enumerate(("a", "b"))
    )
    zoo.add("base", base)
    zoo.add("a", first)
    assert zoo.add("b", second, "base").base == "base"
    before = anyio.run(lambda: asked(zoo.folder("a")))
    zoo.remove("base")
    assert anyio.run(lambda: asked(zoo.folder("a"))) == before
    zoo.remove("a")
    zoo.export("b", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(second)
    zoo.remove("b")
    assert contents(zoo.directory / "blocks") == {}


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors in an adapter's file."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


Q = "base_model.model.model.layers.1.self_attn.q_proj"
BAD: dict[str, tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], Any], str, type[ATTSError]]] = {
    "no LoRA": ({"peft_type": "IA3"}, dict, "of type 'IA3'", ModelLoadError),
    "DoRA": ({"use_dora": True}, dict, "use_dora", ModelLoadError),
    "biases": ({"bias": "all"}, dict, "biases", ModelLoadError),
    "tuned head": ({"modules_to_save": ["lm_head"]}, dict, "modules_to_save", ModelLoadError),
    "half of it": ({}, lambda t: t.pop(f"{Q}.lora_B.weight"), "lacks lora_B of layers.1.self_attn.q", ModelLoadError),
    "other shape": (
        {}, lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 63)}), "for layers.1.self_attn.q", ModelLoadError
    ),
    "no numbers": ({}, lambda t: t[f"{Q}.lora_A.weight"].fill_(torch.nan), "infinite or NaN", ModelLoadError),
    "another layer": (
        {}, lambda t: t.update({Q.replace("1", "9") + ".lora_A.weight": torch.zeros(4, 64)}), "layers.9", ModelLoadError
    ),
    "embedding": (
        {}, lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 64)}),
        "embed_tokens", ModelLoadError
    ),
    "base that is not there": ({"base_model_name_or_path": "meta/else"}, dict, "in the zoo: base", OptionError),
    "alpha": ({"lora_alpha": "x"}, dict, "lora_alpha", ModelLoadError),
    "alphas": ({"alpha_pattern": [8]}, dict, "alpha_pattern .*not an object", ModelLoadError),
    "pattern": ({"alpha_pattern": {"[": 1}}, dict, "'\\[' in alpha_pattern", ModelLoadError),
    "alpha of a pattern": ({"alpha_pattern": {"q_proj": "x"}}, dict, "'x' in alpha_pattern", ModelLoadError),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_adapter_that_does_not_fit_its_base_is_refused(
    case: str, base: Path, tmp_path: Path
) -> None:
    """An adapter that does not fit its base is refused with a message and without a traceback, and
    the zoo is unchanged.
    """
    settings, change, says, kind = BAD[case]
    adapter = save_adapter(tmp_path / "lora", base, "q_proj", "v_proj", **settings)
    changed(adapter, change)
    zoo = Zoo(tmp_path / "zoo")
    zoo.add("base", base)
    before = contents(zoo.directory)
    with pytest.raises(kind, match=says):
        zoo.add("tuned", adapter)
    assert contents(zoo.directory) == before


def test_an_adapter_alone_needs_its_base(base: Path, tmp_path: Path) -> None:
    """If a zoo lacks an adapter's base, the error names the base to add first; an adapter cannot be
    a base.
    """
    zoo = Zoo(tmp_path / "zoo")
    adapter = save_adapter(tmp_path / "lora", base, "q_proj")
    with pytest.raises(OptionError, match="add the base model first"):
        zoo.add("tuned", adapter)
    zoo.add("base", base)
    zoo.add("tuned", adapter)
    with pytest.raises(OptionError, match="such as 'base'"):
        zoo.add("more", adapter, "tuned")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_folder_written_by_peft_scores_as_peft_merges_it(base: Path, tmp_path: Path) -> None:
    """The folder of peft's save_pretrained gives the scores of peft's merge_and_unload."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    settings = peft.LoraConfig(
        r=5,
        lora_alpha=7,
        target_modules=["q_proj", "o_proj", "up_proj"],
        alpha_pattern={"layers.1.mlp.up_proj": 3},
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path / "lora")
    zoo = Zoo(tmp_path / "zoo")
    zoo.add("base", base)
    assert (
        zoo.add("tuned", tmp_path / "lora").base == "base"
    )  # the adapter's configuration names the folder of this base
    whole = model.merge_and_unload().eval()
    with torch.inference_mode():
        wanted = whole(torch.tensor([IDS])).logits[0].log_softmax(-1)
    scores, _ = anyio.run(lambda: asked(zoo.folder("tuned")))
    assert (
        max(abs(ours - float(wanted[at + 4, IDS[at + 5]])) for at, ours in enumerate(scores)) < 2e-4
    )
