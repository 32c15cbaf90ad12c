"""Tests that simulated devices agree with closed forms, and the picture of schemes with the
devices.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.studies.speculation import (
    AcceptanceTrace,
    Costs,
    ahead,
    best_serial,
    expected_tokens,
    fuzzy_devices,
    grouped_drafting,
    hit_rate,
    mirror,
    mirror_seconds,
    needed,
    overlapped_tokens,
    pearl_speedup,
    serial,
    serial_speedup,
)

pytestmark = pytest.mark.checkout

PLACES = 6_000
CELLS = ((0.6, 3, 2), (0.8, 5, 4), (0.9, 10, 7))
"""Cases of the test: acceptance, draft steps per target step, and number of proposed tokens."""


def trace(accepted: float, seed: int = 1) -> AcceptanceTrace:
    """Draw a trace in which half of the tokens that the draft misses are its second choice, and a
    fifth are its third choice.

    The first three choices of the early exit contain 90 % of the tokens.
    """
    return AcceptanceTrace.drawn(
        (accepted, (1 - accepted) / 2, (1 - accepted) / 5), PLACES, seed, (0.6, 0.2, 0.1)
    )


def even(ratio: float, message: float = 0.0) -> Costs:
    """Make costs in which a draft step takes as long for many branches as for one."""
    return Costs(lambda branches: 1 / ratio, message=message)


def waiting_speedup(
    accepted: float, hit: float, proposed: int, ratio: float, branching: float
) -> float:
    """Return the speed-up of drafting for guessed outcomes, if the target waits for a new draft
    after a wrong guess.

    `branching` is the time to draft all branches.
    """
    return expected_tokens(accepted, proposed) / (
        max(1.0, branching) + (1 - hit) * proposed / ratio
    )


def close(value: float) -> object:
    """Return a value that equals every number within 1 % of this one."""
    return pytest.approx(value, rel=0.01)


@pytest.mark.parametrize(("accepted", "ratio", "proposed"), CELLS)
def test_devices_come_to_the_closed_forms(accepted: float, ratio: int, proposed: int) -> None:
    """Simulated devices agree with the closed forms of serial drafting, of PEARL, and of drafting
    for guessed outcomes with and without waiting.
    """
    places = trace(accepted)
    costs = even(ratio)
    ranked = (1 - accepted) * 0.7
    assert serial(places, costs, proposed).rate == close(serial_speedup(accepted, proposed, ratio))
    assert ahead(places, costs, ratio - 1).rate == close(pearl_speedup(accepted, ratio, ratio))
    fan = ahead(places, costs, ratio - 1, 2)
    assert fan.rate == close(overlapped_tokens(accepted, ranked, ratio - 1))
    hit = hit_rate(accepted, ranked, proposed)
    waiting = ahead(places, costs, proposed, 2, waits=True)
    assert waiting.hits / waiting.guessed == close(hit)
    expected = waiting_speedup(accepted, hit, proposed, ratio, (proposed + 1) / ratio)
    assert waiting.rate == close(expected)


@pytest.mark.parametrize(("depth", "message"), [(0.5, 0.02), (0.25, 0.0), (0.75, 0.1)])
def test_mirror_takes_what_its_equation_says(depth: float, message: float) -> None:
    """In the simulation, a step of Mirror takes the time of the paper's equation (10).

    If the early exit missed the token, the time of a new draft is added. The share of correct
    guesses equals the probability of the exit's first choices, and more choices are correct more
    often.
    """
    line = mirror(trace(0.8), even(5, message), 4, 3, depth)
    tokens = line.tokens / line.steps
    assert tokens == close(expected_tokens(0.8, 4))
    assert line.hits / line.guessed == close(0.9)
    missed = (1 - line.hits / line.guessed) * 4 / 5
    first = 4 / 5 + message  # seconds of the first draft, which comes before the first verification
    assert (line.seconds - first) / line.steps == pytest.approx(
        mirror_seconds(depth, message, 4 / 5) + missed
    )
    assert (
        mirror(trace(0.8), even(5), 4, 1).hits < mirror(trace(0.8), even(5), 4, 2).hits < line.hits
    )


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("layers", [8, 32])
def test_grouped_attentions_take_the_time_of_the_formula(layers: int, group: int) -> None:
    """Each round drafts one token with ordinary attention and the others with grouped attentions;
    the number of verified tokens does not change.
    """
    attention = 0.5 / 5 / layers
    mlp = 0.5 / 5 / layers  # five exact draft steps take as long as one target step
    places = AcceptanceTrace.drawn((0.8,), 300, 1)
    line = serial(places, even(5), 4, fuzzy_devices(layers, group, attention, mlp))
    drafting = grouped_drafting(layers, 1, attention, mlp) + 3 * grouped_drafting(
        layers, group, attention, mlp
    )
    assert line.seconds / line.steps == pytest.approx(1 + drafting)
    assert len(line.devices) == group + 1
    plain = serial(places, even(5), 4)
    assert (line.tokens, line.steps) == (plain.tokens, plain.steps)
    if group == 1:
        assert line.rate == pytest.approx(plain.rate)


def test_a_schedule_changes_no_token() -> None:
    """Every drafting scheme verifies each position of the same text once, in order, so steps end at
    the same tokens.
    """
    places = trace(0.7)
    costs = even(4)
    for line in (
        serial(places, costs, 3),
        ahead(places, costs, 3),
        ahead(places, costs, 3, 2),
        mirror(places, costs, 3, 2),
    ):
        assert PLACES - 10 <= line.tokens <= PLACES
        for device in line.devices:
            ends = [(work.begin, work.end) for work in device.work]
            assert all(
                end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False)
            ), "a device must do one piece of work at a time"


def test_hits_always_and_never_bracket_every_scheme() -> None:
    """If every outcome is guessed, a step takes only the target's time; if no outcome is guessed,
    the guesses save no time.
    """
    right = AcceptanceTrace.drawn((1.0,), 3000, 0)
    costs = even(5)
    assert ahead(right, costs, 4).rate == close(5.0)
    wrong = AcceptanceTrace.drawn((0.0,), 3000, 0)
    for more in (0, 2):
        line = ahead(wrong, costs, 4, more)
        assert (line.hits, line.rate) == (0, 1.0)


def test_closed_forms_come_to_published_cells() -> None:
    """The closed forms reproduce the published speed-ups for independent tokens.

    PEARL is slower than tuned serial speculation at acceptance 0.7 and ten draft steps per target
    step.
    """
    found = [best_serial(accepted, ratio) for accepted, ratio in ((0.6, 3), (0.8, 10), (0.95, 10))]
    assert [(round(gain, 2), tokens) for gain, tokens in found] == [(1.2, 1), (2.47, 6), (4.48, 15)]
    assert [round(pearl_speedup(a, c, c), 2) for a, c in ((0.6, 3), (0.8, 5), (0.9, 10), (0.95, 10))] == [
        1.42, 2.28, 4.2, 5.94,
    ]  # fmt: skip
    assert [round(waiting_speedup(0.8, h, 10, 10, 1.0), 2) for h in (0.5, 0.8, 0.95)] == [
        3.05,
        3.81,
        4.35,
    ]
    assert pearl_speedup(0.7, 10, 10) < best_serial(0.7, 10)[0]
    gains = [32 * (r + 1) / grouped_drafting(32, 4, r, 1.0) for r in (1.0, 2.0, 0.5)]
    assert [round(gain, 2) for gain in gains] == [1.52, 1.85, 1.3]


def test_what_a_goal_needs() -> None:
    """`needed` returns the lowest acceptance rate that reaches a speed-up, or None if no rate
    reaches it.
    """
    found = needed(lambda accepted: pearl_speedup(accepted, 5, 5), 2.2832)
    assert found == pytest.approx(0.8, abs=1e-3)
    assert needed(lambda accepted: pearl_speedup(accepted, 5, 5), 5.1) is None


overlap = pytest.importorskip("scripts.studies.speculation", reason="needs a checkout")
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "acceleration.svg"


@pytest.mark.checkout
def test_the_picture_of_the_page_is_that_of_the_devices() -> None:
    """The picture shows every scheme, its numbers equal the first steps of the simulated devices,
    and the file is current.
    """
    lines = overlap.schemes()
    assert PICTURE.read_text() == overlap.drawn(lines), (
        "the picture is not current: run scripts/bench overlap-virtual --out docs/benchmarks"
    )
    for title, line in lines.items():
        alone = overlap.drawn({title: line})
        numbers = [int(found) for found in re.findall(r'style="fill:#fff">(\d+)<', alone)]
        assert len(numbers) > 2
        assert numbers == line.written[: len(numbers)]


@pytest.mark.checkout
def test_virtual_time_needs_no_folder_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture is written next to the folder of the tables, whether that folder exists or not."""
    for name in ("record", "closed_forms", "published"):
        monkeypatch.setattr(overlap, name, lambda *args: None)
    monkeypatch.setattr(overlap, "recorded", lambda *args: [])
    monkeypatch.setattr(overlap.anyio, "run", lambda *args: None)
    overlap.study_virtual(overlap.Options("quick", 0, tmp_path / "runs" / "overlap"))
    assert (tmp_path / "runs" / "acceleration.svg").is_file()
