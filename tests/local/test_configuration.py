"""Tests that each impossible model configuration is refused with the name of its key, without
hanging or filling memory.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.core import SampleRequest
from atts.errors import EngineError, ModelLoadError
from atts.local import LocalEngine, LocalOptions
from atts.local.loader import load_ropes
from atts.local.model_config import FAMILIES, read_model_config

Make = Callable[..., Path]
NAN = float("nan")
HUGE = 10**400
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _rope(**values: object) -> dict[str, object]:
    return {"rope_parameters": LLAMA3 | values}


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "endless heads": (
        {"head_dim": 2**64},
        r"head_dim is 18446744073709551616, expected a whole number from 1 to 16384",
    ),
    "a factor near the end of floats": (
        _rope(factor=1e308),
        r"rope_parameters\.factor is 1e\+308, expected a number",
    ),
    "layers below none": ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    "endless layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size is 0"),
    "an epsilon that is not a number": ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
    "an endless epsilon": ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
    "a size in words": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "a size as a flag": ({"hidden_size": True}, "hidden_size is True"),
    "half a layer": ({"num_hidden_layers": 2.5}, r"num_hidden_layers is 2\.5"),
    "a list of sizes": ({"hidden_size": [64]}, r"hidden_size is \[64\]"),
    "no activation": ({"hidden_act": 5}, "hidden_act is 5"),
    "a theta in words": (_rope(rope_theta="a lot"), r"rope_parameters\.rope_theta is 'a lot'"),
    "a rope that is none": ({"rope_parameters": 5}, "rope_parameters is 5"),
    "a rope of one kind of layers": (
        {"rope_parameters": {"full_attention": LLAMA3 | {"factor": -1}}},
        r"rope_parameters\.full_attention\.factor is -1",
    ),
    "a length beyond measure": (
        {"max_position_embeddings": HUGE},
        "max_position_embeddings is 1000",
    ),
    "layers of numbers": ({"layer_types": [1, 2]}, r"layer_types is \[1, 2\]"),
    "a window of nothing": ({"sliding_window": 0}, "sliding_window is 0"),
    "an unknown type": ({"model_type": "gpt2"}, "models of type 'gpt2'"),
    "a type of another type": ({"model_type": ["llama"]}, "models of type"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_impossible_value_is_refused_by_its_key(
    what: str, make_model: Make, tmp_path: Path
) -> None:
    """The error about an impossible value names its key, the value and the expected form.

    It appears before a library reads the configuration.
    """
    changes, words = REFUSED[what]
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    change(folder, changes)
    with pytest.raises(ModelLoadError, match=words):
        read_model_config(folder, "it")


def test_values_that_atts_does_not_need_are_ignored(make_model: Make, tmp_path: Path) -> None:
    """A value that atts does not need is not read, so a configuration that declares a million
    labels opens quickly.
    """
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    before = read_model_config(folder, "it")
    change(
        folder,
        {
            "num_labels": 10**12,
            "id2label": 5,
            "problem_type": [],
            "transformers_version": {},
            "a": HUGE,
        },
    )
    assert read_model_config(folder, "it") == before


VALUES: list[Any] = [
    *(
        0,
        1,
        -1,
        2,
        3,
        2**31,
        2**64,
        10**400,
        0.5,
        -0.0,
        1e308,
        1e-308,
        NAN,
        float("inf"),
        float("-inf"),
    ),
    *(
        None,
        True,
        False,
        "",
        "default",
        "yarn",
        "longrope",
        "llama3",
        "dynamic",
        "silu",
        "\ud800",
        [],
        {},
        [[]],
    ),
    *(
        [1, 0, 1],
        ["full_attention"] * 3,
        ["sliding_attention"] * 10**4,
        {"full_attention": None},
        {"a": {"b": {}}},
    ),
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 1, "beta_fast": 1e-6},
    {
        "rope_type": "longrope",
        "short_factor": [1e-6] * 8,
        "long_factor": [1e6] * 8,
        "rope_theta": 1e15,
    },
    LLAMA3 | {"low_freq_factor": 4.0},
]


def mutated(config: dict[str, Any], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield copies of the configuration, each with one to three random values replaced, some of
    them within the rope settings.
    """
    names = [
        *config,
        "sliding_window",
        "layer_types",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "num_labels",
    ]
    while True:
        made: dict[str, Any] = json.loads(json.dumps(config))
        for _ in range(rng.randint(1, 3)):
            inner = made.get("rope_parameters")
            if isinstance(inner, dict) and inner and rng.random() < 0.3:
                inner[rng.choice([*inner, *LLAMA3])] = rng.choice(VALUES)
            else:
                made[rng.choice(names)] = rng.choice(VALUES)
        yield made


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_a_mutated_configuration_is_read_or_refused(
    seed: int, make_model: Make, tmp_path: Path
) -> None:
    """For each seed and architecture, each of 300 random changes of a configuration is either read
    completely or refused with a message.
    """
    rng = random.Random(seed)
    count = {"read": 0, "refused": 0}
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    original = json.loads((folder / "config.json").read_text())
    families = rng.sample(sorted(FAMILIES), len(FAMILIES))
    for number, made in zip(range(300), mutated(original, rng), strict=False):
        if rng.random() < 0.9:
            made["model_type"] = families[number % len(families)]
        (folder / "config.json").write_text(json.dumps(made))
        said = loaded(folder)
        assert len(said) < 1500
        assert not said or said.startswith("engine it: ")
        count["refused" if said else "read"] += 1
    assert min(count.values()) > 5, count


def loaded(folder: Path) -> str:
    """Return the message that refuses a configuration, or an empty text if atts accepts the
    configuration.
    """
    try:
        config = read_model_config(folder, "it")
        ropes = load_ropes(folder, config, "it")
    except ModelLoadError as error:
        return str(error)
    assert all(rope.frequencies.isfinite().all() for rope in ropes.values())
    assert len(config.windows) == len(config.ropes) == config.num_layers <= 4096
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_an_engine_with_a_mutated_configuration_samples_or_is_refused(
    seed: int, make_model: Make, tmp_path: Path
) -> None:
    """With each of 300 randomly changed configurations per seed, an engine either opens and
    samples, or refuses with a message.
    """
    rng = random.Random(100 + seed)
    count = {"open": 0, "refused": 0}
    folder = shutil.copytree(make_model("llama"), tmp_path / "model")
    original = json.loads((folder / "config.json").read_text())
    options = LocalOptions(worker="thread", kernel="torch", threads=1)

    async def sampled() -> None:
        async with LocalEngine(folder, name="it", options=options) as engine:
            await engine.sample(SampleRequest((5, 6, 7), 2))

    for _, made in zip(range(300), mutated(original, rng), strict=False):
        (folder / "config.json").write_text(json.dumps(made))
        try:
            anyio.run(sampled)
        except EngineError:
            count["refused"] += 1
        else:
            count["open"] += 1
    assert min(count.values()) > 5, count


def change(folder: Path, values: dict[str, Any]) -> None:
    """Set these keys in the folder's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
