"""Tests of the option that puts a drafter on its own device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atts.accel import SpeculationOptions
from atts.core import Sampling
from atts.errors import ModelLoadError, OptionError
from atts.local.devices import allocate_cache
from atts.local.loader import load_weights
from tests.local.speculating import Make, counts, requests, run, same

HOT = (Sampling(0.0), Sampling(0.8), Sampling(1.0, top_p=0.9))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("way", "beside"), [("draft", "inline"), ("pearl", "inline"), ("ssd", "process")]
)
def test_a_drafter_on_the_processor_changes_no_token(
    way: str, beside: str, make_model: Make, near: Path
) -> None:
    """Placing the drafter on the processor explicitly changes no token, because the processor is
    the default on this machine.
    """
    folder = make_model("llama")
    orders = requests(3, 24, HOT)
    done = run(folder, [orders], None, 4, near, speculate=way, beside=beside, drafter_device="cpu")
    assert same(run(folder, [orders]), done)
    assert counts(done).trouble == ""


@pytest.mark.parametrize(
    ("way", "beside"), [("draft", "inline"), ("pearl", "inline"), ("pearl", "process")]
)
def test_a_device_that_is_not_there_is_an_error_before_anything_is_loaded(
    way: str, beside: str, make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a drafter's device does not exist, the error names this device and a valid choice before
    anything is loaded.
    """
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("atts.accel.build.load_weights", None)
    with pytest.raises(ModelLoadError, match="no usable CUDA device cuda:2") as raised:
        run(
            make_model("llama"),
            [requests(1)],
            None,
            4,
            near,
            speculate=way,
            beside=beside,
            drafter_device="cuda:2",
        )
    assert "?drafter_device=cpu" in str(raised.value)


@pytest.mark.parametrize("words", ["gpu", "cuda:", "cuda:-1", "auto", "cuda:1 "])
def test_an_unknown_device_is_refused(words: str) -> None:
    """An unknown device is refused, and so is a device for a drafter if no drafter is named."""
    with pytest.raises(OptionError, match="is not a valid value for drafter_device"):
        SpeculationOptions(drafter="embedded:draft", drafter_device=words).check()
    with pytest.raises(OptionError, match="needs a draft model"):
        SpeculationOptions(drafter_device="cpu").check()


@pytest.mark.parametrize("way", ["draft", "pearl"])
def test_the_option_reaches_the_drafters_model(
    way: str, make_model: Make, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option puts the drafter's weights and cache on the device, and leaves the target where it
    is.
    """
    asked = list[torch.device]()

    def weights(
        folder: Path, config: Any, dtype: Any, device: torch.device, name: str, **_: Any
    ) -> Any:
        asked.append(device)
        return load_weights(folder, config, dtype, CPU, name)

    def cache(config: Any, dtype: Any, device: torch.device, **least: int) -> Any:
        asked.append(device)
        return allocate_cache(config, dtype, CPU, **least)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for builder in ("atts.local.builder", "atts.accel.build"):
        monkeypatch.setattr(f"{builder}.load_weights", weights)
        monkeypatch.setattr(f"{builder}.allocate_cache", cache)
    done = run(
        make_model("llama"),
        [requests(2, 24, HOT[:2])],
        None,
        4,
        near,
        speculate=way,
        drafter_device="cuda:1",
    )
    assert [device.type for device in asked] == ["cpu", "cuda", "cpu", "cuda"], (
        "expected one model of the target and then one of its drafter"
    )
    assert asked[1] == asked[3] == torch.device("cuda:1")
    assert counts(done).proposed > 0
