"""Tests of the map of speed-ups: its tables for known times, its chart, and its weakened draft."""

from __future__ import annotations

import xml.etree.ElementTree as tree
from pathlib import Path
from typing import Any

import pytest

from atts.models import path

pipelines = pytest.importorskip("scripts.studies.pipelines", reason="needs a checkout")
harness = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")
results = pytest.importorskip("scripts.studies.result_pages", reason="needs a checkout")

AGREEMENT = {"as it is": 0.98, "weakened": 0.75}
TEXT = "{http://www.w3.org/2000/svg}text"


def measured(
    target: str, samples: int, atts: float, exact: float, clock: str = "wall", how: str = "latency"
) -> Any:
    """Make a measured cell of the map in which the target alone takes 10 s, and each method the
    given seconds.
    """
    seconds = {"target-only|": 10.0}
    for draft in AGREEMENT:
        own = {
            "target-only, speculating": 8.0,
            "exact": exact,
            "atts": atts,
            "draft-only": 1.0,
        }
        seconds |= {f"{method}|{draft}": value for method, value in own.items()}
    figures = {name: pipelines.Figures(value, 1, 1, 100, 50, 40) for name, value in seconds.items()}
    cell = pipelines.MapCell(target, samples, how)
    return pipelines.Measured(cell, figures, dict.fromkeys(AGREEMENT, (2.0, 100)), 0.5, clock)


def test_the_map_compares_with_the_best_of_the_others() -> None:
    """The table compares atts with the fastest other method by median and range over repeats; the
    GPU's column says that nothing was measured.
    """
    found = [measured("20M", 1, atts, 5.0) for atts in (2.0, 2.5, 4.0)] + [
        measured("20M", 4, 10.0, 5.0)
    ]
    table = pipelines.tables(found, AGREEMENT)[0]
    own = {row[1:3]: row[3:] for row in table.rows if row[0].endswith("as it is")}
    assert own["20M target, padded", 1] == (2.0, "exact", "2 [1.25, 2.5] n=3")
    assert own["20M target, padded", 4][:2] == (0.5, "exact")
    assert [row for row in own.values() if row == (None, "not yet measured", "-")] == [
        own["4M target", "GPU"]
    ] * 16
    svg = tree.fromstring(results.draw(table))
    texts = [element.text for element in svg.iter(TEXT)]
    assert texts.count("2x") == texts.count("0.5x") == len(AGREEMENT)
    assert texts.count("not yet") == 16 * len(AGREEMENT)
    colours = {
        rect.get("fill")
        for rect in svg.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("fill")
    }
    green, red = sorted(colours, key=lambda colour: int(str(colour)[1:3], 16))
    assert int(str(green)[3:5], 16) > int(str(green)[1:3], 16)
    assert int(str(red)[3:5], 16) < int(str(red)[1:3], 16)


def test_wall_times_stand_alone_where_there_are_any() -> None:
    """If a cell has wall times, they are not mixed with processor times, which are measured on a
    busy machine.
    """
    busy = measured("4M", 1, 1.0, 5.0, "processor")
    assert "processor time" in pipelines.tables([busy], AGREEMENT)[0].notes[0]
    table = pipelines.tables([busy, measured("4M", 1, 20.0, 5.0)], AGREEMENT)[0]
    assert "processor time" not in table.notes[0]
    assert table.rows[0][3] == 0.25
    assert table.rows[1][3] is None


def test_what_to_take_is_what_was_fastest() -> None:
    """The study names the fastest method for each number of rollouts.

    Times within 5 % count as equal, and a method that is never the fastest is listed as such.
    """
    found = [
        measured("200M", samples, atts, 5.0)
        for samples, atts in ((1, 9.0), (2, 5.1), (4, 2.0), (8, 2.5))
    ]
    advice = pipelines.tables(found, AGREEMENT)[1].rows[0]
    assert (
        advice[2] == "exact at 1 rollout (2.0 times as fast as the target alone), "
        "exact or atts at 2 (2.0 times), atts at 4 to 8 (5.0 to 4.0 times)"
    )
    never = pipelines.tables([measured("4M", 1, 9.0, 5.0), measured("4M", 2, 9.0, 5.0)], AGREEMENT)[
        1
    ].rows[0][2]
    assert never == "exact up to 2 rollouts (2.0 times as fast as the target alone); atts nowhere"


def test_the_bound_counts_every_models_tokens_at_its_own_rate() -> None:
    """The time bound counts each kind of token at its model's own rate: 1 s of drafting, 1 s of
    scoring, and 10 s of the target's writing.
    """
    one = measured("4M", 1, 24.0, 5.0)
    assert one.bound("atts", "weakened") == pytest.approx(100 * 0.01 + 50 * 0.02 + 40 * 0.25)
    assert pipelines.tables([one], AGREEMENT)[2].rows[0][3:] == ("atts", "2 [2, 2] n=1")
    assert pipelines.Measured.read(harness.asdict(one)) == one


@pytest.mark.anyio
async def test_the_weakened_draft_is_the_same_model_every_time(tmp_path: Path) -> None:
    """The weakened draft has other weights than the draft but the same shape, and noise 0 changes
    nothing.
    """
    from safetensors.torch import load_file

    def weights(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = load_file(folder / "model.safetensors")
        return found

    for name, noise in (("a", 0.3), ("b", 0.3), ("none", 0.0)):
        assert await pipelines.weakened(tmp_path / name, noise) == noise
    original, first, second, same = map(
        weights, (path("draft"), tmp_path / "a", tmp_path / "b", tmp_path / "none")
    )
    assert {key: value.shape for key, value in first.items()} == {
        key: value.shape for key, value in original.items()
    }
    for key, value in original.items():
        assert bool((first[key] == second[key]).all())
        assert bool((same[key] == value).all())
        assert bool((first[key] != value).any()) == (value.ndim == 2)


@pytest.mark.slow
def test_a_cell_that_was_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run of the quick map with one target reads the stored cells."""
    monkeypatch.setattr(pipelines, "TARGETS", {"4M": ""})
    options = harness.Options("quick", 0, tmp_path)
    first = pipelines.study_speed(options)
    assert len(first[0].rows) == 2 * 2 * 3 * (5 + 1)
    assert sum(row[3] is not None for row in first[0].rows) == 2 * 2 * 2
    monkeypatch.setattr(pipelines, "_measure", None)
    assert [table.rows for table in pipelines.study_speed(options)] == [
        table.rows for table in first
    ]
