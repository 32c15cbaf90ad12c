"""The verbs that turn runs into calibration scores and fitted calibrators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atts.api.evaluation import evaluate, sync
from atts.api.recorded import directory_of
from atts.api.setup import Setup
from atts.calibration import (
    PERPLEXITY,
    REAL,
    AdvantageJudge,
    Calibrator,
    Mode,
    Scale,
    StoredScores,
    fit_judge,
    is_state,
    labels_of,
    parse_lines,
    read_scores,
)
from atts.core import Decision, Problem
from atts.errors import CalibrationInputError
from atts.files import from_json, read_ordinary
from atts.journal import (
    Decided,
    Entry,
    Manifest,
    Observed,
    RecordedRun,
    SessionOpened,
    check_exists,
    open_run,
)
from atts.pipelines import ConformalGate, ThresholdGate
from atts.run import RunResult, conditions_of, replay_event

if TYPE_CHECKING:
    from atts.analysis import CalibrationReport

RATE_OF_FILES = 0.4
"""The default rate for reports on scores in a file."""


async def calibrate(
    dataset: str | Path | Sequence[Problem] = "arithmetic",
    setup: Setup | None = None,
    *,
    limit: int | None = None,
    directory: str | Path | None = None,
) -> StoredScores:
    """Let the draft solve these problems alone, score every chunk, and return the scores.

    The result is meant for `Setup(stored=...)` of later runs, so use problems that are similar to
    those of the later run but not the same. With a `directory` the run has a journal, and the same
    call continues it.

    :raises OptionError: the setup names something unknown.
    :raises DatasetError: it cannot be read, or holds nothing.
    :raises EngineError: an engine cannot be opened or is lost.

    >>> import anyio
    >>> from atts.testing import toy_problems
    >>> scores = anyio.run(calibrate, toy_problems(3), Setup(draft="scripted", target="scripted"))
    >>> len(set(scores.questions)), scores.scale.name
    (3, 'perplexity')
    """
    setup = setup or Setup()
    policy = replace(setup.policy, early_stop="none")
    watching = replace(
        setup,
        method="atts",
        rate_scope="marginal",
        by_length=False,
        gate=ThresholdGate(math.inf),
        policy=policy,
        stored=(),
        warmup=0,
    )
    return scores_of(await evaluate(dataset, watching, limit=limit, directory=directory))


calibrate_sync = sync(calibrate)


def scores_of(run: str | Path | RunResult) -> StoredScores:
    """Return every score that a run decided on, in order, with the conditions of the scores.

    :raises JournalError: there is no run, or it cannot be read.
    :raises CalibrationInputError: its gate saw no score.
    """
    if isinstance(run, RunResult) and run.directory is None:
        manifest = run.manifest
        with_lengths = list(_kept(run))
    else:
        recorded = open_run(directory_of(run))
        manifest = recorded.manifest
        scored = (event for event in recorded.decisions() if event.decision.score is not None)
        with_lengths = [(event.decision, event.features.get("tokens", 0.0)) for event in scored]
    if not with_lengths:
        raise CalibrationInputError(
            "the run's scores",
            0,
            "at least one score, from a gate that requests scores of the target",
        )
    decisions = [decision for decision, _ in with_lengths]
    lengths = tuple(length for _, length in with_lengths)
    scores = [decision.score for decision in decisions if decision.score is not None]
    return StoredScores(
        tuple(scores),
        tuple(decision.question for decision in decisions),
        tuple(decision.turn for decision in decisions),
        PERPLEXITY if min(scores) >= 1 else REAL,
        conditions_of(manifest),
        lengths if all(lengths) else (),
    )


def judge_of(run: str | Path, rate: float = 0.2, seed: int = 0) -> AdvantageJudge:
    """Fit a learned judge on a run of method trial, whose coins chose the escalated chunks.

    :raises JournalError: there is no run, or it cannot be read.
    :raises UsageError: it is a run of another method, or nothing in it was graded.
    :raises CalibrationInputError: it has too few problems.
    """
    # loaded where it is used: reading journals whole is slow to import
    from atts.analysis import takeover_examples

    recorded = open_run(directory_of(run))
    conditions = {
        name: value
        for name, value in conditions_of(recorded.manifest).items()
        if not name.startswith("score.")
    }
    return fit_judge(takeover_examples(recorded), rate, seed, conditions)


def stored_scores(
    path: Path,
    per_question: int | None = None,
    scale: Scale = PERPLEXITY,
    conditions: Mapping[str, object] | None = None,
) -> StoredScores:
    """Read calibration scores from a file, or from the directory of an earlier run.

    :raises JournalError: there is nothing, or the directory holds no run, or one that cannot be
        read.
    :raises CalibrationInputError: the file cannot be read as scores, or the run's gate saw none.
    """
    check_exists(path)
    if path.is_dir():
        scores = scores_of(path)
        return replace(scores, fingerprint={**scores.fingerprint, **(conditions or {})})
    # `read_scores` accepts only files, and the operating system's message about a directory is not
    # clear.
    try:
        return read_scores(path, per_question, scale, conditions)
    except OSError as error:
        raise CalibrationInputError(
            "scores", str(path), f"a file that can be read ({error.strerror})"
        ) from error


def calibration_report(
    source: str | Path | RunResult,
    *,
    rate: float | None = None,
    rate_scope: Mode | None = None,
    per_question: int | None = None,
    scale: Scale = PERPLEXITY,
    seed: int = 0,
) -> CalibrationReport:
    """Report on a run's calibration and guarantee, or on the possible guarantee of stored scores.

    A run is reported as it was made. With another `rate` or `rate_scope` its scores are decided
    again, like those of a file. The defaults of a file are rate 0.4 and rate scope "aci", or those
    of the calibrator that it contains.

    :raises JournalError: there is nothing, or the directory holds no run, or one that cannot be
        read.
    :raises CalibrationInputError: no scores, or something that is none; or a rate scope that needs
        questions without them.
    :raises OptionError: an unknown rate scope.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "scores.json").write_text('{"q1": [1.2, 1.4, 1.9], "q2": [1.1, 1.3, 9.0]}')
    ...     found = calibration_report(Path(folder, "scores.json"), rate=0.5)
    >>> found.kind, found.health.scores, found.control.decisions
    ('scores', 6, 6)
    """
    from atts.analysis import calibration_of_run, calibration_of_scores

    path = directory_of(source)
    scores = stored_scores(path, per_question, scale)
    name = str(path)
    calibrator: Calibrator | None = None
    labels: Sequence[bool | None] = ()
    default_rate = RATE_OF_FILES
    default_mode: Mode = "aci"
    if path.is_dir():
        recorded = calibration_of_run(path, scores)
        if rate in (None, recorded.rate) and rate_scope in (None, recorded.mode):
            return recorded
        name = f"{path}, decided again"
        default_rate = recorded.rate
    else:
        calibrator, labels = _in_file(path)
        if calibrator is not None:
            default_rate = float(calibrator.rate)
            default_mode = calibrator.mode
    if rate not in (None, default_rate) or rate_scope not in (None, default_mode):
        calibrator = None  # the calibrator was made for another rate or rate scope
    return calibration_of_scores(
        name,
        scores,
        default_rate if rate is None else rate,
        rate_scope or default_mode,
        seed=seed,
        labels=labels,
        calibrator=calibrator,
    )


def _in_file(path: Path) -> tuple[Calibrator | None, Sequence[bool | None]]:
    """Return the calibrator that a file holds, or else the labels of its records."""
    if path.suffix == ".npy":
        return None, ()
    text = read_ordinary(path).decode()
    if is_state(text) and from_json(text).get("kind") == "atts calibrator":
        return Calibrator.load(path), ()
    if path.suffix == ".json" or is_state(text):
        return None, ()
    return None, labels_of(parse_lines(text.splitlines(), str(path)))


def calibrator_of(run: str | Path | RunResult) -> Calibrator:
    """Rebuild the calibrator of a run as it was at its end; for a merged run, merge those of its
    parts.

    :raises JournalError: there is no run, or it cannot be read.
    :raises CalibrationInputError: its method has no calibrator, or the calibrators cannot be put
        together.
    """
    recorded = open_run(directory_of(run))
    whole: Calibrator | None = None
    for entries in _parts(recorded):
        calibrator = _rebuilt(recorded.manifest, entries)
        if whole is None:
            whole = calibrator
        else:
            whole.merge(calibrator.state())
    assert whole is not None, "a run has at least one part"
    return whole


def _parts(run: RecordedRun) -> Iterator[list[Entry]]:
    """Yield the gate's calls of each run that was merged, or of the only run."""
    part = list[Entry]()
    for entry in run.entries((Decided, Observed)):
        if isinstance(entry.event, SessionOpened) and entry.session in run.part_starts:
            yield part
            part = []
        part.append(entry)
    yield part


def _rebuilt(manifest: Manifest, entries: Sequence[Entry]) -> Calibrator:
    gate, calibrator = Setup.recorded(manifest).decider()
    if not isinstance(gate, ConformalGate) or gate.calibrator is not calibrator:
        method = manifest.configuration.get("method")
        raise CalibrationInputError(
            "the method", method and method.value, "one with a calibrator, such as atts"
        )
    for entry in entries:
        if isinstance(entry.event, Decided | Observed):
            replay_event(gate, entry.event)
    calibrator.settle()
    return calibrator


def _kept(run: RunResult) -> Iterator[tuple[Decision, float]]:
    """Yield the scored decisions of a run kept in memory with their chunks' tokens, by turn."""
    turns = [
        turn for outcome in run.outcomes() for rollout in outcome.rollouts for turn in rollout.turns
    ]
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.decision is not None and turn.decision.score is not None:
            yield turn.decision, float(turn.drafted.tokens if turn.drafted else 0)
