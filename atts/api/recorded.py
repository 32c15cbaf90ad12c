"""The verbs for recorded runs: report, trace, compare, plan, replay and merge.

>>> import tempfile
>>> from atts.api import Setup, evaluate_sync
>>> from atts.testing import toy_problems
>>> def run(method: str = "atts", shard: str | None = None) -> RunResult:
...     setup = Setup(draft="scripted", target="scripted", method=method, rate=0.3)
...     return evaluate_sync(toy_problems(5), setup, directory=tempfile.mkdtemp(dir=folder.name), shard=shard)
>>> folder = tempfile.TemporaryDirectory()
>>> first, target = run(), run("target-only")
>>> report(first).name, report(first, format="markdown", compare_to=[target]).name, trace(first).name
('report.html', 'report.md', 'trace.json')
>>> compare(target, first).problems, certify(target, [first], epsilon=0.02).problems
(5, 5)
>>> plan(first, tokens=10_000).best is not None
True
>>> replay(first).changed, replay(first, method="draft-only").replayed.rate.value
(0, 0.0)
>>> merge([run(shard="1/2"), run(shard="2/2")], f"{folder.name}/all").problems
5
>>> folder.cleanup()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atts.api.setup import CalibrationMode, Setup
from atts.errors import OptionError, UsageError
from atts.files import write_atomic, write_out
from atts.graph import write_trace
from atts.journal import RecordedRun, open_run
from atts.methods import preset
from atts.pipelines import Gate, Policy, RoundGate, VoteKind
from atts.run import Merged, RunResult
from atts.run import merge as merge_runs

if TYPE_CHECKING:
    from atts.analysis import Advice, Compared, Format, Replay
    from atts.calibration import Certificate
    from atts.methods import GradedPolicy

Run = str | Path | RunResult
"""A run directory, or the result of a run that was kept in one."""


def report(
    run: Run,
    *,
    format: Format = "html",
    compare_to: Sequence[Run] = (),
    out: str | Path | None = None,
) -> Path:
    """Write the report of a run, finished or not, and return its path.

    The default is `report.html` in the run's directory.

    `format` is "html" (one file, no network), "markdown" or "json", from the same numbers;
    `compare_to` are runs to compare with, problem by problem.

    :raises OptionError: for an unknown format.
    :raises UsageError: for a result that was kept in memory only.
    :raises JournalError: a directory holds no run, or one that cannot be read.
    """
    from atts.analysis import FORMATS, as_format, build_report, save_report

    known = as_format(format, FORMATS)
    built = build_report(directory_of(run), [directory_of(other) for other in compare_to])
    return save_report(built, known, None if out is None else Path(out))


def trace(run: Run, out: str | Path | None = None) -> Path:
    """Write the run's task graph as Chrome trace JSON for ui.perfetto.dev, and return its path.

    The default is `trace.json` in the run's directory.

    :raises UsageError: for a result that was kept in memory only.
    :raises JournalError: there is no run, or it cannot be read.
    :raises StorageError: the disk refuses.
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
    """Compare the second run with the first, problem by problem.

    A run is a directory, a JSONL file of results, or a result. The field `sequential` says after
    how many problems, in an order drawn by `seed`, a test after every problem decides the
    comparison. With `points` above 0, it may also decide that the difference is within that many
    points.

    :raises JournalError: a directory holds no run, or one that cannot be read.
    :raises DatasetError: a file holds no results, or the two have no graded problem in common.
    :raises UsageError: for a result that was kept in memory only.
    """
    from atts.analysis import compare, read_results

    if points is not None and not 0 <= points <= 100:
        raise OptionError("points", f"{points:g} is outside [0, 100]")
    return compare(
        *(read_results(directory_of(one)) for one in (first, second)), points=points, seed=seed
    )


def certify(
    target: Run, runs: Sequence[Run], *, epsilon: float, delta: float = 0.1, net: bool = True
) -> Certificate:
    """Certify the cheapest run that is correct at most `epsilon` less often than the target alone.

    The certificate is wrong with probability at most `delta`.

    All runs must have the same labelled problems. With `net` false the bound is on lost answers,
    including those lost by sampling, instead of the net loss. Runs of the same method and rate
    scope are tested from the highest rate down.

    :raises JournalError: a directory holds no run, or one that cannot be read.
    :raises CalibrationInputError: runs of other problems, without references, or an epsilon or
        delta outside (0, 1).
    :raises UsageError: for a result that was kept in memory only.
    """
    from atts.methods import certify_graded

    alone, *policies = (_graded(directory_of(one)) for one in (target, *runs))
    return certify_graded(alone, policies, epsilon, delta, net=net)


def _graded(directory: Path) -> GradedPolicy:
    """Return a run's policy with every graded problem's vote, and its target tokens per problem."""
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

    :raises JournalError: a directory holds no run, or one that cannot be read.
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
    """Decide on every recorded score again and vote again; other settings stay as recorded.

    Without another method, rate, rate scope, seed or gate the recorded decisions stay, and fewer
    samples or turns only cut the record.

    `budget` is the most takeovers by the target per problem, in the order in which decisions were
    taken. `gate` must be new, because it learns from this replay.

    :raises OptionError: an unknown rate scope or vote, a method that is unknown or would have written
        other chunks, more samples or turns than were recorded, a negative budget, or decisions on
        chunks that have no score.
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
    # fewer samples, turns or takeovers need no new decisions, so no decision may change
    decides_again = gate is not None or bool(given)
    return replay_run(recorded, change, fresh_gate if decides_again else None)


# A method may differ in these settings and still have the recorded rollouts, because it only waits
# for fewer of them or starts more.
_SAME_ROLLOUTS = ("barrier", "early_stop", "first_wave", "repeats")


def _check_same_rollouts(run: RecordedRun, recorded: str, method: str) -> None:
    """Check that the recorded chunks would have been written and judged in the same way under a
    method.

    :raises OptionError: the method is unknown, or changes more than the choice of chunks.
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
                f"{method} changes more than which chunks escalate: its {name} differs from that "
                "of the run, so its text is not in the record. Run it instead",
            )


def merge(runs: Sequence[Run], out: str | Path) -> Merged:
    """Merge the shards of an evaluation into a run in a new directory.

    With a gate that learns nothing, every decision is the same as in a single process. A gate that
    learns has learnt from its shard only, and each shard meets its rate.

    :raises UsageError: they are not the shards of one evaluation, all over; or a result was kept in
        memory only.
    :raises FingerprintError: they ran under different settings.
    :raises JournalError: one cannot be read, or `out` not be written.
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
            "this run was kept in memory only; give `evaluate` a directory to get a report on it"
        )
    return run.directory
