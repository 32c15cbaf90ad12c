"""Functions for recorded runs: report, trace, compare, certify, plan, replay and merge.

The functions at the end of this module make calibration scores, judges and calibrators from runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atts.api.evaluation import evaluate, sync
from atts.api.setup import CalibrationMode, Setup
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
from atts.errors import CalibrationInputError, OptionError, UsageError
from atts.files import from_json, read_ordinary, write_atomic, write_out
from atts.graph import write_trace
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
from atts.methods import PRESETS, preset
from atts.pipelines import (
    AgreementGate,
    ConformalGate,
    Gate,
    Policy,
    RoundGate,
    ThresholdGate,
    VoteKind,
)
from atts.run import Merged, RunResult, conditions_of, replay_event
from atts.run import merge as merge_runs

if TYPE_CHECKING:
    from atts.analysis import Advice, CalibrationReport, Compared, Format, Replay
    from atts.calibration import Certificate
    from atts.methods import GradedPolicy


Run = str | Path | RunResult
"""A run directory, or the result of a run that has a directory."""


def report(
    run: Run,
    *,
    format: Format = "html",
    compare_to: Sequence[Run] = (),
    out: str | Path | None = None,
) -> Path:
    """Write the report of a run, finished or not, and return its path.

    Without `out`, the report is written into the run's directory.

    `format` is "html" (one file that needs no network), "markdown" or "json"; all formats have the
    same numbers. `compare_to` lists runs with which this run is compared, problem by problem.

    :raises OptionError: for an unknown format.
    :raises UsageError: for a result that was kept in memory only.
    :raises JournalError: a directory contains no run, or its run cannot be read.
    """
    from atts.analysis import FORMATS, as_format, build_report, save_report

    known = as_format(format, FORMATS)
    built = build_report(directory_of(run), [directory_of(other) for other in compare_to])
    return save_report(built, known, None if out is None else Path(out))


def trace(run: Run, out: str | Path | None = None) -> Path:
    """Write the run's task graph as Chrome trace JSON for ui.perfetto.dev, and return its path.

    Without `out`, the file is `trace.json` in the run's directory.

    :raises UsageError: for a result that was kept in memory only.
    :raises JournalError: there is no run, or it cannot be read.
    :raises StorageError: the file cannot be written.
    """
    directory = directory_of(run)
    text = StringIO()
    write_trace(open_run(directory).nodes(), text)
    path, write = (
        (directory / "trace.json", write_atomic) if out is None else (Path(out), write_out)
    )
    write(path, text.getvalue().encode())
    return path


def compare(first: Run, second: Run, *, points: float | None = None, seed: int = 0) -> Compared:
    """Compare the second run with the first, problem by problem. A run is a directory, a JSONL file
    of results, or a result.

    If `points` is given, a sequential test also reads the problems one by one, in a random order
    that depends on `seed`. The field `sequential` has the number of problems after which this test
    shows a difference. If `points` is above 0, the test may also show that the difference is less
    than `points`.

    :raises JournalError: a directory contains no run, or its run cannot be read.
    :raises DatasetError: a file contains no results, or the two runs have no graded problem in
        common.
    :raises UsageError: for a result that was kept in memory only.
    """
    from atts.analysis import compare, read_results

    if points is not None and not 0 <= points <= 100:
        raise OptionError(
            "points", f"{points:g} is outside [0, 100]; give a value in percentage points"
        )
    runs = [read_results(directory_of(one)) for one in (first, second)]
    methods = {run.method for run in runs}
    by_method = {name for row in PRESETS if row.name in methods for name in row.changes}
    return compare(*runs, points=points, seed=seed, by_method=by_method)


def certify(
    target: Run, runs: Sequence[Run], *, epsilon: float, delta: float = 0.1, net: bool = True
) -> Certificate:
    """Certify the cheapest run whose accuracy is at most `epsilon` below that of the target alone.

    The certificate is wrong with probability at most `delta`.

    All runs must have the same labelled problems. If `net` is true, the bound applies to the net
    loss: lost minus gained correct answers. If `net` is false, the bound applies to all lost
    answers, including answers that are lost by random sampling. Runs of the same method and rate
    scope are tested from the highest rate down.

    :raises JournalError: a directory contains no run, or its run cannot be read.
    :raises CalibrationInputError: the runs have different problems or no references, or `epsilon`
        or `delta` is outside (0, 1).
    :raises UsageError: for a result that was kept in memory only.
    """
    from atts.methods import certify_graded

    alone, *policies = (_graded(directory_of(one)) for one in (target, *runs))
    return certify_graded(alone, policies, epsilon, delta, net=net)


def _graded(directory: Path) -> GradedPolicy:
    """Return a run's method and rate, the correctness of the vote on each graded problem, and the
    mean target tokens per problem.
    """
    from atts.methods import GradedPolicy

    run = open_run(directory)
    graded = run.state().graded
    names = (run.setting("method"), run.setting("rate_scope"))
    tokens = sum(one.usage.target_tokens for one in graded.values())
    return GradedPolicy(
        "/".join(str(name) for name in names if name),
        float(run.setting("rate") or 0.0),
        {name: one.is_correct for name, one in graded.items()},
        tokens / max(1, len(graded)),
    )


def plan(
    runs: Run | Sequence[Run],
    *,
    target_tokens: float | None = None,
    tokens: float | None = None,
    seconds: float | None = None,
    dollars: float | None = None,
) -> Advice:
    """Advise on the rate, samples, turns and chunk length to use under a cap on a problem's cost.

    Give several runs to compare several rates.

    :raises JournalError: a directory contains no run, or its run cannot be read.
    :raises UsageError: a result kept in memory only, a run without a graded problem, runs of
        different problems, or a cap that is not positive.
    """
    from atts.analysis import Cap, advise

    several = [runs] if isinstance(runs, str | Path | RunResult) else runs
    cap = Cap(target_tokens, tokens, seconds, dollars)
    return advise([directory_of(run) for run in several], cap)


def replay(
    run: Run,
    *,
    method: str | None = None,
    rate: float | None = None,
    rate_scope: CalibrationMode | None = None,
    samples: int | None = None,
    turns: int | None = None,
    vote: VoteKind | None = None,
    budget: int | None = None,
    gate: Gate | RoundGate | None = None,
    seed: int | None = None,
) -> Replay:
    """Repeat the decisions on the recorded scores of a run, and vote again; settings that are not
    given stay as recorded.

    If none of method, rate, rate scope, seed and gate is given, the recorded decisions stay. Fewer
    samples or turns only remove the last rollouts or turns from the record.

    `budget` is the largest number of escalations per problem, counted in the order in which the
    decisions were made. `gate` must be new, because it learns from this replay.

    :raises OptionError: the rate scope, vote or method is unknown, or the method would have written
        other chunks. The error is also raised if more samples or turns are requested than were
        recorded, if the budget is negative, or if a chunk to decide on has no score.
    :raises JournalError: there is no run, or it cannot be read.
    """
    from atts.analysis import PolicyChange, replay_run

    recorded = open_run(directory_of(run))
    setup = Setup.recorded(recorded.manifest)
    if method is not None and gate is None:
        _check_same_rollouts(recorded, setup.method, method)
    options: dict[str, Any] = {
        "method": method,
        "rate": rate,
        "rate_scope": rate_scope,
        "seed": seed,
    }
    given = {name: value for name, value in options.items() if value is not None}

    def fresh_gate(samples: int) -> Gate | RoundGate:
        if gate is not None:
            return gate
        return replace(setup, policy=replace(setup.policy, samples=samples), **given).decider()[0]

    change = PolicyChange(samples, turns, vote, budget)
    # The recorded decisions remain valid for fewer samples, turns or escalations. Only another gate
    # or gate setting makes new decisions.
    decides_again = gate is not None or bool(given)
    return replay_run(recorded, change, fresh_gate if decides_again else None)


# If two methods differ only in these settings, their rollouts have the same texts. These settings
# decide when a rollout starts, how many run, and which rollouts wait for each other.
_SAME_ROLLOUTS = ("barrier", "early_stop", "first_wave", "repeats")


def _check_same_rollouts(run: RecordedRun, recorded: str, method: str) -> None:
    """Check that a method would have written the recorded chunks and would have scored them in the
    same way.

    :raises OptionError: the method is unknown, would have written other chunks, or would have
        scored the chunks in another way.
    """
    usual = Policy()
    changes = {**preset(recorded).changes, **preset(method).changes}
    for name in changes:
        value = preset(method).changes.get(name, getattr(usual, name))
        wanted = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        was = run.policy.get(name, wanted)
        if name not in _SAME_ROLLOUTS and was != wanted:
            raise OptionError(
                "method",
                f"{method} needs a value of {name} that differs from the recorded one, so it would "
                f"generate different texts; run {method} instead of replaying it",
            )


def merge(runs: Sequence[Run], out: str | Path) -> Merged:
    """Merge the shards of an evaluation into a run in a new directory.

    If the gate does not learn from scores, all decisions are the same as in a run by one process. A
    gate that learns has learnt only from its own shard, and each shard meets the nominal rate
    separately.

    :raises UsageError: the runs are not the finished shards of one evaluation, or a result was kept
        in memory only.
    :raises FingerprintError: the runs have different settings.
    :raises JournalError: a run cannot be read, or `out` cannot be written.
    """
    return merge_runs([directory_of(run) for run in runs], Path(out))


def directory_of(run: Run) -> Path:
    """Return the directory of a run.

    :raises UsageError: if the run was kept in memory only.
    """
    if not isinstance(run, RunResult):
        return Path(run)
    if run.directory is None:
        raise UsageError(
            "this run was kept only in memory; to analyse a run later, pass a directory to "
            "`evaluate`"
        )
    return run.directory


RATE_OF_FILES = 0.4
"""The nominal rate of a report on a file of scores, if neither user nor file gives a rate."""


async def calibrate(
    dataset: str | Path | Sequence[Problem] = "arithmetic",
    setup: Setup | None = None,
    *,
    limit: int | None = None,
    directory: str | Path | None = None,
) -> StoredScores:
    """Let the draft solve these problems alone, score every chunk, and return the scores.

    The result is meant for `Setup(stored=...)` of later runs. Use problems that are similar to
    those of the later runs, but not the same problems. With a `directory` the run has a journal,
    and the same call continues it.

    :raises OptionError: the setup contains an unknown name.
    :raises DatasetError: the dataset cannot be read, or has no problems.
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
    """Return every score that a run's gate decided on, in the order of the decisions, and the
    conditions of the run.

    :raises JournalError: there is no run, or it cannot be read.
    :raises CalibrationInputError: the run's gate saw no score.
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
            "the number of target scores in the run",
            0,
            "at least 1; the run's gate requests no target scores, so there is nothing to calibrate "
            "(`atts report` shows the run)",
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
    """Fit a learned judge on a run of the method `trial`, which selects at random the chunks that
    escalate.

    :raises JournalError: there is no run, or it cannot be read.
    :raises UsageError: the run has another method, or no graded problem.
    :raises CalibrationInputError: the run has too few problems.
    """
    # imported here, because the module that reads whole journals is slow to import
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

    :raises JournalError: the path does not exist, or the directory contains no run or an unreadable
        run.
    :raises CalibrationInputError: the file is not a valid file of scores, or the run's gate saw no
        scores.
    """
    check_exists(path)
    if path.is_dir():
        scores = scores_of(path)
        return replace(scores, fingerprint={**scores.fingerprint, **(conditions or {})})
    # For a directory, `read_scores` would raise the operating system's error, whose message is not
    # clear. Raise an error with a clear message instead.
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
    """Report on the calibration and guarantee of a run, or on the guarantee that a file of scores
    allows.

    A run is reported with the decisions that it made. If another `rate` or `rate_scope` is given,
    the decisions on its scores are made again, as for a file of scores. A file of scores is
    reported at rate 0.4 and rate scope "aci" by default. If the file contains a calibrator, the
    calibrator's rate and rate scope are the defaults.

    :raises JournalError: the path does not exist, or the directory contains no run or an unreadable
        run.
    :raises CalibrationInputError: there are no scores, a score is invalid, or the rate scope needs
        question ids that the scores lack.
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
        # The file's calibrator was made for another rate or rate scope, so it cannot be used.
        calibrator = None
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
    """Return the calibrator that a file of scores contains, or the correctness labels of its
    records, or neither.
    """
    if path.suffix == ".npy":
        return None, ()
    text = read_ordinary(path).decode()
    if is_state(text) and from_json(text).get("kind") == "atts calibrator":
        return Calibrator.load(path), ()
    if path.suffix == ".json" or is_state(text):
        return None, ()
    return None, labels_of(parse_lines(text.splitlines(), str(path)))


def calibrator_of(run: str | Path | RunResult) -> Calibrator:
    """Rebuild a run's calibrator in its state at the end of the run. For a merged run, rebuild the
    calibrator of each of its shards, and merge these calibrators.

    :raises JournalError: there is no run, or it cannot be read.
    :raises CalibrationInputError: the method of the run has no calibrator, or the calibrators
        cannot be merged.
    """
    recorded = open_run(directory_of(run))
    whole: Calibrator | None = None
    for entries in _parts(recorded):
        calibrator = _rebuilt(recorded.manifest, entries)
        if whole is None:
            whole = calibrator
        else:
            whole.merge(calibrator.state())
    assert whole is not None, "a merged run must have at least one part"
    return whole


def _parts(run: RecordedRun) -> Iterator[list[Entry]]:
    """Yield the recorded gate calls of each shard of a merged run; a run that was not merged is one
    shard.
    """
    part = list[Entry]()
    for entry in run.entries((Decided, Observed)):
        if isinstance(entry.event, SessionOpened) and entry.session in run.part_starts:
            yield part
            part = []
        part.append(entry)
    yield part


def _rebuilt(manifest: Manifest, entries: Sequence[Entry]) -> Calibrator:
    gate, calibrator = Setup.recorded(manifest).decider()
    if isinstance(gate, AgreementGate):
        gate = gate.inner  # An agreement gate has no calibrator; the gate that it wraps has one.
    if not isinstance(gate, ConformalGate) or gate.calibrator is not calibrator:
        method = manifest.configuration.get("method")
        raise CalibrationInputError(
            "the method", method and method.value, "a method with a calibrator, such as atts"
        )
    for entry in entries:
        if isinstance(entry.event, Decided | Observed):
            replay_event(gate, entry.event)
    calibrator.settle()
    return calibrator


def _kept(run: RunResult) -> Iterator[tuple[Decision, float]]:
    """Yield the scored decisions of a run in memory, turn by turn, each with the number of tokens
    of its chunk.
    """
    turns = [
        turn for outcome in run.outcomes() for rollout in outcome.rollouts for turn in rollout.turns
    ]
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.decision is not None and turn.decision.score is not None:
            yield turn.decision, float(turn.drafted.tokens if turn.drafted else 0)
