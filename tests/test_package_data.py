"""Tests that data files are found through the installed package."""

from importlib import resources
from pathlib import Path

import pytest

pytestmark = pytest.mark.both
FILES = [
    ("atts", "py.typed"),
    ("atts.api", "pairs.toml"),
    ("atts.calibration", "guarantees.toml"),
    ("atts.evaluators.datasets", "benchmarks.toml"),
    ("atts.evaluators", "answers.toml"),
    ("atts.evaluators.syntax", "rewrites.toml"),
    ("atts.evaluators.syntax", "words.toml"),
    ("atts.evaluators.syntax", "units.toml"),
    ("atts.local.cpu", "kernels/step.c"),
    ("atts.models", "draft/heads/streams.safetensors"),
    ("atts.models", "target/heads/exit.safetensors"),
    ("atts.pipelines", "select_prompt.txt"),
    ("atts.pipelines", "synthesis_prompt.txt"),
    ("atts.testing", "language.toml"),
    *(
        ("atts.analysis.reports", f"templates/{name}")
        for name in (
            "macros.html",
            "report.css",
            "report.html",
            "report.js",
            "report.md",
            "timeline.html",
        )
    ),
    *(
        ("atts.models", f"{model}/{name}")
        for model in ("draft", "target")
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ),
]


@pytest.mark.parametrize(("package", "name"), FILES)
def test_a_data_file_is_in_the_package(package: str, name: str) -> None:
    """A data file is read through the package, in a checkout and in the wheel alike."""
    found = Path(str(resources.files(package))) / name
    assert found.is_file()
    assert name == "py.typed" or found.stat().st_size > 0
