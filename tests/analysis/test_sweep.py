"""Tests of sweeps: each point equals a separate run with its settings, whatever the sweep shared or
however often it was interrupted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.analysis import SweepReport, load_run_set, read_sweep, render_sweep, sweep_lines
from atts.analysis.sweeps import headline, sweep_charts
from atts.api import Setup, SweepPoint, evaluate_sync, plan_sweep, run_sweep, sweep_sync
from atts.errors import JournalCorrupt, JournalError, JournalLocked, OptionError
from atts.evaluators import Estimate, compare_runs, holm
from atts.journal import LOCK, REPLIES, SharedReplies, locked, open_run
from atts.pipelines import Policy
from atts.run import Listener, Progress

WORDS: dict[str, object] = {
    "draft": "scripted",
    "target": "scripted",
    "dataset": "arithmetic[:3]",
    "early_stop": "none",
}
OVER: dict[str, list[object]] = {"rate": [0.2, 0.5], "samples": [2, 4]}


def answers(directory: Path) -> dict[str, Any]:
    """Return each outcome with its texts and costs, but without cache hits, which change after a
    kill.
    """
    return {
        outcome.problem.id: (
            outcome.answer,
            outcome.usage.draft_tokens,
            outcome.usage.target_tokens,
            outcome.usage.calls,
            [rollout.text for rollout in outcome.rollouts],
        )
        for outcome in open_run(directory).outcomes()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SweepReport:
    """Run a sweep over two rates and two numbers of samples."""
    folder = tmp_path_factory.mktemp("sweep")
    words = {name: value for name, value in WORDS.items() if name != "dataset"}
    return sweep_sync(OVER, "arithmetic[:3]", directory=folder / "set", settings=words)


def test_every_setting_is_a_run_and_two_baselines_are_added(made: SweepReport) -> None:
    """Each finished run of a sweep has its folder, its accuracy with an interval, and its
    difference from the target alone.

    Two baselines are added to the requested settings.
    """
    names = [point.name for point in made.points]
    assert names[:2] == ["target-only", "draft-only"]
    assert names[2:4] == ["coin,rate=0.2", "coin,rate=0.5"]
    assert names[4:] == [
        f"rate={rate},samples={samples}" for rate in (0.2, 0.5) for samples in (2, 4)
    ]
    assert {point.standing for point in made.points} == {"finished"}
    assert all(
        point.accuracy.low <= point.accuracy.value <= point.oracle.value for point in made.points
    )
    assert [point.difference is None for point in made.points] == [True, *[False] * 7]
    assert [point.gain is None for point in made.points] == [*[True] * 4, *[False] * 4]
    assert (made.along, list(made.curves)) == ("samples", ["rate 0.2", "rate 0.5"])


@pytest.mark.parametrize("name", ["target-only", "draft-only"])
def test_a_point_equals_a_separate_run(made: SweepReport, tmp_path: Path, name: str) -> None:
    """Texts, answers and tokens of a sweep's run equal those of a separate run, although runs of
    the sweep share some replies.
    """
    setup = Setup(
        draft="scripted",
        target="scripted",
        method=name,
        policy=Policy(samples=4, early_stop="none"),
    )
    evaluate_sync("arithmetic[:3]", setup, directory=tmp_path / "alone")
    assert answers(tmp_path / "alone") == answers(Path(made.directory) / name)


def test_the_gain_over_a_coin_is_paired_with_the_same_policy(made: SweepReport) -> None:
    """Each run of the sweep is compared with a coin of the same policy and rate, problem by
    problem, by the share of correct rollouts.
    """
    coins = {point.values["rate"]: point for point in made.references if "rate" in point.values}
    tests = [
        compare_runs(
            [coins[point.values["rate"]].shares[name] for name in point.shares],
            list(point.shares.values()),
        )
        for point in made.grid
    ]
    corrected = holm([one.p_value for one in tests])
    for point, alone, p_value in zip(made.grid, tests, corrected, strict=True):
        assert point.gain is not None
        assert point.gain.estimate == alone.difference
        assert point.gain.p_value == p_value >= alone.p_value


def test_a_sweep_without_a_gate_has_no_coin(tmp_path: Path) -> None:
    """A sweep over the target alone has no gate, so it has no coin to compare with."""
    words = {**WORDS, "method": "target-only", "out": str(tmp_path / "set")}
    planned = plan_sweep({"samples": [2]}, words)
    assert [point.name for point in planned.points] == ["draft-only", "samples=2"]


def test_there_is_one_coin_per_takeover_and_rate(tmp_path: Path) -> None:
    """A coin reads no scores, so runs that differ only in scoring share one coin."""
    over: dict[str, list[object]] = {
        "takeover": ["replace", "continue"],
        "rate": [0.2],
        "rate_scope": ["aci", "question"],
    }
    planned = plan_sweep(over, {**WORDS, "out": str(tmp_path / "set")})
    coins = [one.name for one in planned.points if one.name.startswith("coin")]
    assert coins == ["coin,takeover=replace,rate=0.2", "coin,takeover=continue,rate=0.2"]


def test_equal_requests_are_sent_once(made: SweepReport) -> None:
    """All runs of a sweep share the replies to first turns, and a run with fewer samples uses the
    first samples of a larger run.
    """
    shared = {point.name: point.shared for point in made.points}
    assert shared["target-only"] == 0
    assert all(shared[point.name] > 0 for point in made.grid[1:])
    # the draft-only run is the first to send its requests, so it gets no shared reply
    assert shared["draft-only"] == 0
    assert all(shared[point.name] > 0 for point in made.references if "rate" in point.values)
    with SharedReplies(Path(made.directory) / REPLIES) as replies:
        asked = sum(point.calls - point.shared for point in made.points)
        # the engine may have answered a call before a settled vote cancelled it
        assert asked <= len(vars(replies)["_index"])


def test_a_run_with_fewer_samples_makes_no_new_call(tmp_path: Path) -> None:
    """After a run of four samples, a run of two makes no call if the gate does not learn from
    sibling rollouts.
    """
    words = {**WORDS, "method": "target-only"}
    planned = plan_sweep(
        {"samples": [4, 2]}, {**words, "out": str(tmp_path / "set")}, references=()
    )
    points = anyio.run(run_sweep, planned).report.points
    assert [(point.name, point.calls == point.shared) for point in points] == [
        ("samples=4", False),
        ("samples=2", True),
    ]
    assert 0 < points[1].seconds < points[0].seconds


class _Killed(BaseException):
    """An exception that ends all work of a process at once, as a kill does."""


def interrupted(after: int) -> Callable[..., Any]:
    """Make a listener that raises `_Killed` after a number of events."""
    left = after

    class Counting(Progress):
        def notify(self, event: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise _Killed

    @asynccontextmanager
    async def watch(point: SweepPoint, number: int) -> AsyncGenerator[Sequence[Listener]]:
        yield (Counting(),)

    return watch


RANDOM = {**WORDS, "method": "coin"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the outcomes of every run of a sweep that is not interrupted."""
    whole = plan_sweep(
        {"samples": [2, 3]}, {**RANDOM, "out": str(tmp_path_factory.mktemp("whole") / "set")}
    )
    anyio.run(run_sweep, whole)
    return [answers(point.directory) for point in whole.points]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the same sweep, interrupted three times."""
    out = tmp_path_factory.mktemp("killed") / "set"
    planned = plan_sweep({"samples": [2, 3]}, {**RANDOM, "out": str(out)})
    for after in (5, 60, 130):
        with pytest.raises(BaseException) as ended:  # noqa: PT011 - the task group may hold it
            anyio.run(run_sweep, planned, interrupted(after))
        assert ended.value.__class__ is _Killed or ended.group_contains(_Killed)
    return out


@pytest.mark.parametrize("damage", ["none", "torn", "changed", "gone"])
def test_an_interrupted_sweep_resumes_by_the_same_call(
    tmp_path: Path, killed: Path, undisturbed: list[dict[str, Any]], damage: str
) -> None:
    """The sweep resumes even if the shared replies are torn, damaged or missing, because they only
    save work.
    """
    shutil.copytree(killed, tmp_path / "set")
    path = tmp_path / "set" / REPLIES
    data = path.read_bytes()
    if damage == "torn":
        path.write_bytes(data[:-7])
    elif damage == "changed":
        path.write_bytes(data[: len(data) // 3] + b"\xff" + data[len(data) // 3 + 1 :])
    elif damage == "gone":
        path.unlink()
    planned = plan_sweep({"samples": [2, 3]}, {**RANDOM, "out": str(tmp_path / "set")})
    assert anyio.run(run_sweep, planned).exit_code == 0
    assert [answers(point.directory) for point in planned.points] == undisturbed


def test_new_values_are_added_to_finished_runs(tmp_path: Path) -> None:
    """New values of a key add runs to a sweep and repeat no finished run; changed settings and a
    second process are refused.
    """
    words = {**WORDS, "out": str(tmp_path / "set"), "samples": 2, "method": "coin"}
    anyio.run(run_sweep, plan_sweep({"rate": ["0.2"]}, words))
    before = (tmp_path / "set/rate=0.2/journal.jsonl").read_bytes()
    report = anyio.run(run_sweep, plan_sweep({"rate": [".2", 0.4]}, words)).report
    assert [point.name for point in report.grid] == ["rate=0.2", "rate=0.4"]
    assert (tmp_path / "set/rate=0.2/journal.jsonl").read_bytes() == before
    with pytest.raises(
        JournalError, match="belongs to another sweep: the sweep in this directory uses samples=2"
    ):
        anyio.run(run_sweep, plan_sweep({"rate": [0.2]}, {**words, "samples": 3}))
    with pytest.raises(JournalError, match="sweep in this directory varies rate"):
        anyio.run(run_sweep, plan_sweep({"seed": [1]}, {**words, "rate": 0.2}))
    with locked(tmp_path / "set" / LOCK, tmp_path), pytest.raises(JournalLocked):
        anyio.run(run_sweep, plan_sweep({"rate": [0.2]}, words))


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({}, "no key varies"),
        ({"raet": [1]}, "'rate'"),
        ({"dataset": ["a", "b"]}, "dataset cannot vary"),
        ({"concurrency": [1]}, "concurrency cannot vary"),
        ({"limits.draft.requests": [1]}, "cannot vary"),
        ({"rate": []}, "no values are given for rate"),
        ({"rate": [2]}, "[0, 1]"),
        ({"samples": ["many"]}, "whole number"),
        ({"chunking.stop": [["a"]]}, "list"),
        ({"seed": [1, 2]}, "another flag also sets it"),
    ],
)
def test_a_key_that_cannot_vary_is_refused_first(
    tmp_path: Path, over: dict[str, Any], says: str
) -> None:
    """A key that cannot vary is refused with an error that names it, before anything is written."""
    with pytest.raises(OptionError) as refused:
        plan_sweep(over, {**WORDS, "seed": 0, "out": str(tmp_path / "set")})
    assert says in str(refused.value)
    assert not (tmp_path / "set").exists()


def test_the_sweep_page_is_self_contained(made: SweepReport) -> None:
    """The sweep page has three charts with all points, bands and baselines, and contains no network
    address.
    """
    page = render_sweep(read_sweep(Path(made.directory)))
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        assert picture.count('class="dot run"') == 4
        assert picture.count('class="band"') == picture.count('class="line main"') == 2
        assert picture.count('class="line nominal"') == 4
        assert 'class="line oracle"' in picture
    assert "http" not in page.replace("http-equiv", "")


def test_labels_of_the_sweep_page_do_not_overlap(made: SweepReport) -> None:
    """If all runs are equally accurate, the names of baselines are on separate lines."""
    report = read_sweep(Path(made.directory))
    accuracy = report.references[0].accuracy
    same = tuple(replace(point, accuracy=accuracy) for point in report.references)
    picture = next(sweep_charts(replace(report, points=(*report.grid, *same)))).picture
    labels = re.findall(r'class="label" x="[^"]*" y="([^"]*)" text-anchor="end"', picture)
    heights = sorted(map(float, labels))
    assert len(heights) == len(same) == 4
    assert all(upper + 10 < lower for upper, lower in pairwise(heights))


def test_values_on_a_curve_are_labelled_whatever_the_order_of_costs(made: SweepReport) -> None:
    """A value whose run was cheaper than the previous run has a label, and overlapping labels are
    left out.
    """
    report = read_sweep(Path(made.directory))
    for costs, shown in (((9.0, 5.0), 2), ((9.0, 9.1), 1)):
        curve = [p for p in report.grid if p.samples == 2]
        moved = [replace(p, target_tokens=cost) for p, cost in zip(curve, costs, strict=True)]
        alone = replace(report, points=tuple(moved), over={"rate": (0.2, 0.5)})
        picture = next(sweep_charts(alone)).picture
        assert len(re.findall(r'class="label"[^>]*text-anchor="middle"', picture)) == shown


def test_no_run_without_a_correct_answer_is_the_best(made: SweepReport) -> None:
    """If no setting solved a problem, the headline says so instead of naming the best run."""
    report = read_sweep(Path(made.directory))
    zero = Estimate(0.0, 0.0, 0.5, 3, 3, "wilson")
    wrong = tuple(replace(point, accuracy=zero) for point in report.grid)
    said = headline(replace(report, points=(*report.references, *wrong)))
    assert said.startswith("No combination of settings solved a problem; the target alone")


def test_the_terminal_shows_a_table_and_a_chart(made: SweepReport) -> None:
    """The terminal shows a table with a row per run, and a chart in which letters mark the curves
    and dashed lines mark the baselines.
    """
    text = "\n".join(sweep_lines(made))
    assert all(
        re.search(rf"^\w {re.escape(point.name)} +3/3 ", text, re.MULTILINE)
        for point in made.points
    )
    assert "- - -" in text
    assert "samples varies along each curve; a: rate 0.2; b: rate 0.5" in text
    assert "corrected by Holm's method for 7 differences and for 4 gains" in text
    assert "reused the result of another run" in text


@pytest.mark.parametrize(
    "text", ["", "{", '{"over": 3}', '{"over": {}, "settings": {}, "points": [], "schema": 2}']
)
def test_a_damaged_sweep_is_refused(tmp_path: Path, text: str) -> None:
    """A damaged sweep is refused with an error that names the path.

    A run folder that points outside the sweep is refused too.
    """
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(JournalCorrupt, match=r"sweep\.json"):
        load_run_set(tmp_path)


def test_a_sweep_names_no_run_outside_its_folder(tmp_path: Path) -> None:
    """Runs of a sweep are named by plain folder names, so no path leads outside."""
    point = '{"name": "x", "kind": "point", "values": {}, "folder": "../x"}'
    (tmp_path / "sweep.json").write_text(
        f'{{"over": {{}}, "settings": {{}}, "points": [{point}], "schema": 1}}'
    )
    with pytest.raises(JournalCorrupt, match="is outside the directory"):
        load_run_set(tmp_path)
