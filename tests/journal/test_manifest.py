"""Tests of the manifest: a run continues only under the settings with which it began."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from atts.core import Problem
from atts.errors import FingerprintError, JournalCorrupt, JournalVersion
from atts.files import plain_fields
from atts.journal import SCHEMA, Manifest, Setting, dataset_digest, load_manifest
from atts.journal.manifest import save_manifest

MANIFEST = Manifest(
    seed=7,
    dataset="abc",
    problems=3,
    configuration={
        "rate": Setting(0.4, "flag"),
        "limits": Setting({"turns": 4, "tokens": [1, 2]}, "atts.toml"),
    },
    engines={
        "draft": {"model": "tiny", "end_ids": (1,), "capabilities": ("sample",)},
        "target": {"model": "big"},
    },
    created=1e9,
)


def test_a_stored_manifest_matches_itself(tmp_path: Path) -> None:
    """A manifest is equal after being stored and loaded, origins and versions included."""
    save_manifest(tmp_path / "m", MANIFEST)
    stored = load_manifest(tmp_path / "m")
    assert stored is not None
    MANIFEST.check(stored, tmp_path)
    assert stored.configuration["limits"].origin == "atts.toml"
    assert stored.versions["python"]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 8}, ["seed"]),
        ({"dataset": "abd"}, ["dataset"]),
        (
            {"configuration": {**MANIFEST.configuration, "rate": Setting(0.5)}},
            ["configuration.rate"],
        ),
        ({"configuration": {"limits": MANIFEST.configuration["limits"]}}, ["configuration.rate"]),
        (
            {"configuration": {**MANIFEST.configuration, "mode": Setting("fork")}},
            ["configuration.mode"],
        ),
        (
            {
                "seed": 8,
                "configuration": {
                    **MANIFEST.configuration,
                    "limits": Setting({"turns": 5, "tokens": [1, 2]}),
                },
            },
            ["seed", "configuration.limits.turns"],
        ),
        (
            {"engines": {**MANIFEST.engines, "target": {"model": "bigger"}}},
            ["engines.target.model"],
        ),
    ],
)
def test_every_difference_is_named(
    tmp_path: Path, changes: dict[str, Any], names: list[str]
) -> None:
    """Different settings are refused, and the error names each difference and a remedy."""
    save_manifest(tmp_path / "m", MANIFEST)
    stored = load_manifest(tmp_path / "m")
    assert stored is not None
    with pytest.raises(FingerprintError, match="Choose another run directory") as caught:
        replace(MANIFEST, **changes).check(stored, tmp_path)
    assert [name for name, _, _ in caught.value.differences] == names
    assert caught.value.exit_code == 2


def test_other_weights_are_refused(tmp_path: Path) -> None:
    """A run resumes only if the model has the same weights. If only one of the two manifests has a
    digest of the weights, it is refused too.
    """
    marked = replace(
        MANIFEST, engines={**MANIFEST.engines, "target": {"model": "big", "weights": "ab" * 16}}
    )
    marked.check(marked, tmp_path)
    other = replace(
        MANIFEST, engines={**MANIFEST.engines, "target": {"model": "big", "weights": "c"}}
    )
    for one, stored in ((marked, MANIFEST), (MANIFEST, marked), (other, marked)):
        with pytest.raises(FingerprintError, match=r"engines\.target\.weights"):
            one.check(stored, tmp_path)


def test_origins_versions_and_dates_may_differ(tmp_path: Path) -> None:
    """Origins, versions and dates may differ in a resumed run, because they change no result."""
    save_manifest(tmp_path / "m", MANIFEST)
    stored = load_manifest(tmp_path / "m")
    assert stored is not None
    settings = {
        name: replace(setting, origin="environment")
        for name, setting in MANIFEST.configuration.items()
    }
    replace(MANIFEST, configuration=settings, versions={"python": "4"}, created=2e9).check(
        stored, tmp_path
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        f'{{"schema": {SCHEMA}}}',
        f'{{"schema": {SCHEMA}, "configuration": {{}}, "x": 1}}',
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused(tmp_path: Path, text: str) -> None:
    """A damaged or foreign file in place of a manifest is an error with advice, and is not
    changed.
    """
    (tmp_path / "m").write_text(text)
    with pytest.raises(JournalCorrupt, match="not a manifest"):
        load_manifest(tmp_path / "m")
    assert (tmp_path / "m").read_text() == text


@pytest.mark.parametrize("schema", [1, SCHEMA - 1, SCHEMA + 1])
def test_a_manifest_of_another_version_is_refused(tmp_path: Path, schema: int) -> None:
    """A manifest of another version is refused, whatever else it contains."""
    (tmp_path / "m").write_text(json.dumps({"schema": schema, "unheard": "of"}))
    with pytest.raises(
        JournalVersion,
        match=f"schema {schema}, but this version of atts can read only schema {SCHEMA}",
    ):
        load_manifest(tmp_path / "m")


def test_a_new_directory_has_no_manifest(tmp_path: Path) -> None:
    """Loading the manifest of a new directory returns None."""
    assert load_manifest(tmp_path / "m") is None


def test_the_dataset_digest_sees_every_field_and_the_order() -> None:
    """A dataset's digest depends on each field of its problems and on their order. The same
    problems in the same order give the same digest.
    """
    one = Problem("1", "a", answer="3")
    two = Problem("2", "b", choices=("x",))
    digests = [
        dataset_digest(problems)
        for problems in (
            [one, two],
            [two, one],
            [one],
            [],
            [replace(one, answer="4"), two],
            [one, replace(two, level=1)],
        )
    ]
    assert len(set(digests)) == len(digests)
    assert dataset_digest(iter([one, two])) == digests[0]


def test_numpy_values_have_the_digest_of_plain_ones() -> None:
    """A problem with numpy's strings and numbers, as from a data frame, has the same digest as with
    Python's own types.
    """
    plain = Problem("1", "a", answer="3")
    assert dataset_digest([Problem(np.str_("1"), np.str_("a"), answer=np.str_("3"))]) == (
        dataset_digest([plain])
    )
    assert plain_fields(Setting(np.float64(0.5))) == {"value": 0.5, "origin": "default"}
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        plain_fields(Setting(cast(Any, object())))


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    """A changed manifest is refused because its checksum no longer matches, even if the file is
    still valid JSON.
    """
    save_manifest(tmp_path / "m", Manifest(seed=3))
    text = (tmp_path / "m").read_text()
    assert load_manifest(tmp_path / "m") is not None
    for harmed in (
        text.replace('"seed": 3', '"seed": 4'),
        re.sub(r',\s*"checksum": "\w+"', "", text),
    ):
        assert harmed != text
        (tmp_path / "m").write_text(harmed)
        with pytest.raises(JournalCorrupt, match="checksum"):
            load_manifest(tmp_path / "m")


def test_a_model_is_recognised_by_its_log_probabilities(tmp_path: Path) -> None:
    """Small differences in log-probabilities, as from a server's numerical noise, still count as
    the same model. Impossible values from a manifest edited by hand cause no overflow.
    """
    known = Manifest(known_logprobs={"target": (-1.0, -9.0, -0.2)})
    known.check(Manifest(known_logprobs={"target": (-1.05, -9.1, -0.2)}), tmp_path)
    # log-probabilities are not compared if an older run stored none, or if the run used another
    # model
    known.check(Manifest(), tmp_path)
    known.check(Manifest(known_logprobs={"draft": (-5.0,)}), tmp_path)
    for others in ((-1.4, -8.0, -0.2), (-1.0, -9.0), (1e308, -1e308, 0.0), (math.nan, -9.0, -0.2)):
        with pytest.raises(FingerprintError, match=r"engines.target: log-probabilities"):
            known.check(Manifest(known_logprobs={"target": others}), tmp_path)


def test_stored_log_probabilities_are_in_the_manifest(tmp_path: Path) -> None:
    """Log-probabilities are stored in the manifest's file and covered by its checksum."""
    path = tmp_path / "manifest.json"
    save_manifest(path, Manifest(known_logprobs={"target": (-1.25, -30.0)}))
    stored = load_manifest(path)
    assert stored is not None
    assert [*stored.known_logprobs["target"]] == [-1.25, -30.0]
