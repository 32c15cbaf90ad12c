"""Tests of experiment trackers: they get a run's numbers problem by problem, and cannot harm the
run.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.api import Setup
from atts.api import evaluate_sync as evaluate
from atts.core import Usage
from atts.errors import MissingExtra, OptionError
from atts.journal import FinishedProblem, OutcomeReached
from atts.ledger import Price
from atts.run import RunOptions, RunResult, Stop, open_logs, trackers
from atts.run.trackers import Point, RunDescription, TrackedRun
from atts.testing import toy_problems

SCRIPTED = Setup(draft="scripted", target="scripted")


class Notebook:
    """A tracker that records all calls."""

    def __init__(self) -> None:
        self.begun: list[RunDescription] = []
        self.points: list[Point] = []
        self.ends: list[tuple[Point, str]] = []
        self.threads: set[int] = set()

    def begin(self, run: RunDescription) -> None:
        """Record the description, and return an id for later sessions."""
        self.begun.append(run)
        run.keep(run.continued() or "first")
        self.threads.add(threading.get_ident())

    def log(self, points: Sequence[Point]) -> None:
        """Record the points."""
        self.points.extend(points)
        self.threads.add(threading.get_ident())

    def end(self, final: Point, status: str) -> None:
        """Record the end."""
        self.ends.append((final, status))
        self.threads.add(threading.get_ident())


class Broken(Notebook):
    """A tracker that fails at one of its calls."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at
        self.calls: list[str] = []

    def _fail_at(self, name: str) -> None:
        self.calls.append(name)
        if name == self._at:
            raise SystemExit("no key")

    def begin(self, run: RunDescription) -> None:
        """Raise an error if the tracker was made to fail here."""
        self._fail_at("begin")

    def log(self, points: Sequence[Point]) -> None:
        """Raise an error if the tracker was made to fail here."""
        self._fail_at("log")

    def end(self, final: Point, status: str) -> None:
        """Raise an error if the tracker was made to fail here."""
        self._fail_at("end")


def tracked(world: Any, tracker: Any, problems: int = 5, **changes: Any) -> RunResult:
    """Run in the world's directory with one tracker."""
    listener = TrackedRun("notebook", tracker)
    result: RunResult = world.run(
        world.plan(), world.session(listeners=[listener], **changes), problems
    )
    listener.close()
    return result


def expected(result: RunResult) -> dict[str, float]:
    """Return the last point's sums, computed from the result."""
    lines: Sequence[FinishedProblem] = result.problems
    shares: list[float] = []
    for line in lines:
        verdicts = [one.verdict for one in line.complete_samples]
        shares.append(verdicts.count("correct") / len(verdicts))
    return {
        "problems": len(lines),
        "accuracy": sum(line.is_correct for line in lines) / len(lines),
        "pass_at_1": sum(shares) / len(shares),
        "realised_rate": sum(one.escalated for one in lines) / sum(one.judged for one in lines),
        "draft_tokens": result.usage.draft_tokens,
        "target_tokens": result.usage.target_tokens,
        "scored_tokens": result.usage.scored_tokens,
    }


def test_points_add_up_to_the_result(world: Any) -> None:
    """A tracker gets one point per problem, and the last sums and final numbers equal the
    result.
    """
    book = Notebook()
    prices = {"draft": Price(1.0, 2.0), "target": Price(3.0, 5.0)}
    result = tracked(world, book, prices=prices)
    assert [step for step, _ in book.points] == [1, 2, 3, 4, 5]
    last = book.points[-1][1]
    for name, value in expected(result).items():
        assert math.isclose(last[name], value), name
    assert result.cost is not None
    assert math.isclose(last["dollars"], result.cost)
    tokens = [values["problem/tokens"] for _, values in book.points]
    assert sum(tokens) == last["draft_tokens"] + last["target_tokens"]
    own = [values["problem/correct"] for _, values in book.points]
    assert sum(own) == 5 * last["accuracy"]
    [((step, final), status)] = book.ends
    assert (step, status) == (5, "finished")
    assert final["final/accuracy"] == result.accuracy.value
    assert final["final/accuracy_low"] == result.accuracy.low
    assert final["final/realised_rate"] == result.rate.value
    assert final["final/dollars"] == result.cost
    [run] = book.begun
    assert run.name == "run"
    assert run.settings["seed"] == 0
    assert run.settings["draft.model"]
    assert book.threads.isdisjoint({threading.get_ident()})


def test_a_resumed_run_continues_its_tracker(world: Any) -> None:
    """In a resumed run, the tracker's steps continue, its sums include the first session, and its
    id is the same.
    """
    first = Notebook()
    stop = Stop()

    listener = TrackedRun("notebook", first)
    finished = 0

    class Watch:
        def recalled(self, event: object) -> None:
            """Ignore events of earlier sessions."""

        def notify(self, event: object) -> None:
            """Ask the run to end after two problems."""
            nonlocal finished
            finished += type(event).__name__ == "OutcomeReached"
            if finished == 2:
                stop.request()

    session = world.session(listeners=[listener, Watch()], stop=stop)
    early: RunResult = world.run(replace(world.plan(), concurrency=4), session, 6)
    listener.close()
    assert early.status == "interrupted"
    assert first.ends[0][1] == "interrupted"
    done = len(early.problems)
    second = Notebook()
    listener = TrackedRun("notebook", second)
    result = world.run(replace(world.plan(), concurrency=4), world.session(listeners=[listener]), 6)
    listener.close()
    assert second.begun[0].continued() == "first"
    assert [step for step, _ in second.points] == list(range(done, 7))
    for name, value in expected(result).items():
        assert math.isclose(second.points[-1][1][name], value), name


@pytest.mark.parametrize("at", ["begin", "log", "end"])
def test_a_broken_tracker_harms_nothing(
    world: Any, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A tracker that fails causes one warning and gets no more calls; the run and other trackers
    are not affected.
    """
    broken = Broken(at)
    book = Notebook()
    listeners = [TrackedRun("broken", broken), TrackedRun("notebook", book)]
    with caplog.at_level(logging.WARNING):
        result = world.run(world.plan(), world.session(listeners=listeners))
        for listener in listeners:
            listener.close()
    assert result.status == "finished"
    assert len(book.points) == 5
    assert broken.calls[-1] == at
    assert broken.calls.count(at) == 1
    [record] = caplog.records
    assert "--log broken failed" in record.message
    assert "no key" in record.message


def test_a_hanging_tracker_is_abandoned(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """If a tracker hangs, closing waits for a limited time and reports what the tracker lost."""
    release = threading.Event()

    class Hanging(Notebook):
        def begin(self, run: RunDescription) -> None:
            release.wait()

    listener = TrackedRun("hanging", Hanging())
    result = world.run(world.plan(), world.session(listeners=[listener]))
    with caplog.at_level(logging.WARNING):
        listener.close(0.05)
    release.set()
    assert result.status == "finished"
    assert "hanging was still sending data" in caplog.text


def test_a_run_that_an_error_ends_is_closed_as_failed(world: Any) -> None:
    """If an error ends the run, the tracker records the status "failed" for it."""
    book = Notebook()
    listener = TrackedRun("notebook", book)

    class Bomb:
        def recalled(self, event: object) -> None:
            """Ignore events of earlier sessions."""

        def notify(self, event: object) -> None:
            """End the run with the first problem."""
            if isinstance(event, OutcomeReached):
                raise RuntimeError("the end")

    with pytest.raises(RuntimeError, match="the end"):
        world.run(world.plan(), world.session(listeners=[listener, Bomb()]))
    listener.close()
    [(final, status)] = book.ends
    assert status == "failed"
    assert final == (1, {})


def test_names_are_checked_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown or repeated tracker names, missing packages and missing folders are refused before
    anything runs.
    """
    with pytest.raises(OptionError, match=r"unknown tracker 'mlflw'; did you mean 'mlflow'"):
        open_logs(["mlflw"], tmp_path)
    with pytest.raises(OptionError, match="is given twice"):
        open_logs(["otel", "otel"], tmp_path)
    with pytest.raises(OptionError, match="tensorboard:FOLDER"):
        open_logs(["tensorboard"], None)

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(trackers, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'atts-llm\[mlflow\]'"):
        open_logs(["mlflow"], tmp_path)


def test_wandb_without_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker wandb is refused without a key, because it would ask for one on the terminal
    during the run.
    """
    monkeypatch.setattr(trackers, "import_module", lambda name: object())
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(OptionError, match="wandb login"):
        open_logs(["wandb"], tmp_path)
    (tmp_path / "none").write_text("machine api.wandb.ai login user password secret")
    assert len(open_logs(["wandb"], tmp_path)) == 1


# tests with the real packages, without a network


def evaluated(names: Sequence[str], folder: Path | None, limit: int = 3) -> RunResult:
    """Evaluate toy problems with these trackers."""
    options = RunOptions(signals="ignore")
    return evaluate(toy_problems(limit), SCRIPTED, directory=folder, options=options, log=names)


@pytest.mark.filterwarnings("default")
def test_mlflow_keeps_settings_points_and_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real MLflow client writes settings, points and status to a local store, and a second
    session continues the same run.
    """
    mlflow = pytest.importorskip("mlflow", reason="pip install 'atts-llm[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    result = evaluated(["mlflow:sums"], tmp_path / "run")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("sums").experiment_id
    [run] = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["method"] == "atts"
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert sorted(one.step for one in history) == [1, 2, 3]
    assert run.data.metrics["final/accuracy"] == result.accuracy.value
    evaluated(["mlflow:sums"], tmp_path / "run")
    assert len(client.search_runs([experiment])) == 1


@pytest.mark.filterwarnings("default")
def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    """TensorBoard's own reader finds each step, and two trackers work in one run."""
    pytest.importorskip("tensorboardX", reason="pip install 'atts-llm[tensorboard]'")
    loading: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = evaluated(["tensorboard", f"tensorboard:{tmp_path}/all"], tmp_path / "run")
    for folder in (tmp_path / "run" / "tensorboard", tmp_path / "all" / "run"):
        events = loading.EventAccumulator(str(folder))
        events.Reload()
        assert [one.step for one in events.Scalars("accuracy")] == [1, 2, 3]
        [final] = events.Scalars("final/accuracy")
        assert final.value == pytest.approx(result.accuracy.value)
        assert (
            b"| method | atts |"
            in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
        )


@pytest.mark.filterwarnings("default")
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb's offline file has the settings and the points, and a second session has the same
    id.
    """
    pytest.importorskip("wandb", reason="pip install 'atts-llm[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    evaluated(["wandb:sums"], tmp_path / "run")
    [file] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    kept = file.read_bytes()
    for text in (b"problem/realised_rate", b"final/accuracy_low", b"method", b"finished"):
        assert text in kept
    evaluated(["wandb:sums"], tmp_path / "run")
    files = {one.name for one in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")}
    assert files == {file.name}


@pytest.mark.filterwarnings("default")
def test_trackio_keeps_points_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The database of Trackio has the points, and standard output stays empty."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="pip install 'atts-llm[trackio]'")
    result = evaluated(["trackio:sums"], tmp_path / "run")
    evaluated(["trackio:sums"], tmp_path / "run")
    assert capsys.readouterr().out == ""
    storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    [run] = storage.get_runs("sums")
    assert run.startswith("run-")
    points = storage.get_logs("sums", run)
    assert [one["step"] for one in points if "accuracy" in one] == [1, 2, 3, 3]
    finals = [one["final/accuracy"] for one in points if "final/accuracy" in one]
    assert finals == [result.accuracy.value] * 2


def test_a_cost_is_known_again_after_an_unpriced_problem_is_solved_again() -> None:
    """If a problem's cost was unknown and a later session finishes the problem with priced models
    only, the total cost is known again.
    """
    totals = trackers.RunningTotals()
    totals.prices = {"draft": Price(1.0, 2.0)}
    totals.add(OutcomeReached("a", "answered", "1", (0,), usage=Usage(target_tokens=5)))
    assert "dollars" not in totals.numbers()
    totals.add(OutcomeReached("a", "answered", "1", (0,), usage=Usage(draft_tokens=1_000_000)))
    assert math.isclose(totals.numbers()["dollars"], 2.0)
