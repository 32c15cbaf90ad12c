"""The commands that run evaluations: `atts eval`, `atts sweep` and `atts pilot`."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli import options
from atts.cli.terminal import json_line, print_result, say, tell
from atts.errors import EngineError, OptionError, counted
from atts.interrupts import interrupts_ignored, run_async

if TYPE_CHECKING:
    from atts.analysis import PilotReport, PilotRow, ScalingPoint
    from atts.api import Configuration, DryRun, PilotEnd, Sweep, SweepEnd, SweepPoint, Tokens
    from atts.core import Role
    from atts.evaluators import Estimate
    from atts.run import Listener, RunResult, Shard


@options.with_keys(
    f"dataset {options.SETUP} limit file column references grader seed concurrency out "
    "report log shard abstain labelled max_cost max_total_tokens max_seconds compare_to "
    "stop_when on_unscored give_up_after config pairs dry_run as_json"
)
def evaluate(
    context: typer.Context,
    shard: Annotated[
        str | None,
        typer.Option(
            help="Run only a part of the problems: 2/3 runs every third problem, starting with "
            "the second. `atts merge` joins the parts.",
            metavar="I/N",
        ),
    ] = None,
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan of the run and its expected number of tokens, without running "
            "anything.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per problem, then a summary.")
    ] = False,
) -> None:
    """Evaluate a method on a dataset (the main command).

    All results are kept in a run directory; the same command continues an interrupted run. Without
    options, the embedded models solve generated arithmetic problems.

    Example: atts eval

    Example: atts eval math500 --pair r1-1.5b/r1-70b --dry-run

    Example: atts eval math500 --draft hf:Qwen/Qwen3-1.7B --target
    vllm:http://localhost:8000/Qwen/Qwen3-32B --dry-run
    """
    from atts.api import dry_run as estimated
    from atts.run import Shard

    configuration = options.configured(context, config, pairs)
    part = None if shard is None else Shard.parse(shard)
    if not dry_run:
        raise typer.Exit(run_and_print(configuration, part, as_json))
    estimate = estimated(configuration, part)
    print_result(
        estimate.as_json() if as_json else estimate,
        as_json,
        lambda _: dry_run_lines(estimate, configuration),
    )


def run_and_print(configuration: Configuration, shard: Shard | None, as_json: bool) -> int:
    """Run the evaluation, write its report, print the results, and return the exit code."""
    directory = configuration.directory_of(shard)
    return _run_and_print(configuration, lambda: run(configuration, shard), directory, as_json)


def _run_and_print(
    configuration: Configuration, run_it: Callable[[], RunResult], directory: Path, as_json: bool
) -> int:
    """Call `run_it`, write the report of its result, print the result, and return the exit code."""
    from atts.api import report
    from atts.journal import JOURNAL

    kind = configuration.job.report
    try:
        result = run_it()
        page = None if kind == "none" else report(result, format=kind)
        lines = result_objects if as_json else result_table
        say("\n".join(lines(result, configuration, page)))
    # Ctrl-C was pressed before the run could handle it, or after the run had ended.
    except KeyboardInterrupt:
        return _unfinished("interrupted; finished work is kept", 130)
    except EngineError as error:
        # If there is no journal, the run has not begun. So do not print how to continue it.
        if not (directory / JOURNAL).exists():
            raise
        return _unfinished(str(error), error.exit_code)
    if result.status in ("finished", "decided"):
        return result.exit_code
    return _unfinished(f"{result.status}: {result.why}", result.exit_code)


def _unfinished(why: str, code: int) -> int:
    with interrupts_ignored():
        tell(f"atts: {why}; the same command continues the run")
    return code


def run(configuration: Configuration, shard: Shard | None = None) -> RunResult:
    """Run an evaluation, or one shard of an evaluation, until its end or an interrupt."""
    from atts.api import check_resumes
    from atts.api import evaluate as evaluation
    from atts.cli.progress import progress_display
    from atts.journal import JOURNAL, is_run_over
    from atts.run import Progress, RunOptions

    directory = configuration.directory_of(shard)
    job = configuration.job
    setup = configuration.setup()
    problems = job.load().problems
    progress = Progress(loading=[str(configuration[role]) for role in setup.roles])
    for text in setup.warnings:
        tell(f"atts: {text}")
    check_resumes(directory, problems, setup, shard)
    if (directory / JOURNAL).exists():
        if is_run_over(directory):
            tell(f"atts: the run in {directory} is finished; its results are printed again")
        else:
            tell(f"atts: continuing the run in {directory}; saved work is reused")
    listening = RunOptions(listeners=(progress,), caps=job.caps, prices=job.price_list)

    async def main() -> RunResult:
        async with progress_display(progress):
            return await evaluation(
                problems,
                setup,
                directory=directory,
                options=listening,
                shard=shard,
                log=job.log,
                **job.comparison,
            )

    return run_async(main)


def dry_run_lines(estimate: DryRun, configuration: Configuration) -> list[str]:
    """Return the lines that a dry run prints without --json."""
    output = "new"
    if estimate.done:
        problems = counted(estimate.problems, "problem")
        output = f"this directory already has the results of {estimate.done} of {problems}"
    lines = [
        f"{estimate.dataset}: {counted(estimate.problems, 'problem')} x "
        f"{counted(configuration['samples'], 'rollout')}, method {configuration['method']}, rate {configuration['rate']:g}",
        *(f"  {role:<9} {configuration[role]}" for role in estimate.roles),
    ]
    if "target" in estimate.roles:
        speculate = configuration["speculate"]
        lines.append(
            f"  proposed  source of proposed tokens: {estimate.proposes} (speculate={speculate})"
        )
    lines.append(f"  output    {estimate.directory} ({output})")
    for key, (role, words) in _BUDGET.items():
        if role is None or role in estimate.roles:
            lines.append(_budget_line(configuration, key, words))
    if estimate.lengths_advice:
        lines.append(f"            {estimate.lengths_advice}")
    if estimate.expected is not None:
        lines.append(f"  about     {_tokens(estimate.expected)}")
    lines.append(f"            {estimate.basis}")
    lines.append(f"  at most   {_tokens(estimate.at_most)}")
    lines += [
        f"  {'power' if place == 0 else '':<9} {text}" for place, text in enumerate(estimate.power)
    ]
    lines += [
        f"  {'departs' if place == 0 else '':<9} {text}"
        for place, text in enumerate(estimate.departures)
    ]
    lines += [f"  warning   {text}" for text in estimate.warnings]
    return [*lines, "Nothing was run."]


# For each key with a token or turn limit: the model that it limits (None: both models), and the
# unit that a dry run prints after the number.
_BUDGET: dict[str, tuple[Role | None, str]] = {
    "max_tokens": (None, "tokens per rollout"),
    "turns": (None, "turns per rollout"),
    "chunking.draft_tokens": ("draft", "tokens per chunk (draft)"),
    "chunking.target_tokens": ("target", "tokens per chunk (target)"),
    "chunking.stop": (None, "strings that end a chunk"),
}


def _budget_line(configuration: Configuration, key: str, words: str) -> str:
    """Return the line of a dry run for one token or turn limit, with the origin of its value."""
    setting = configuration.settings[key]
    value = f"{setting.value:,}" if isinstance(setting.value, int) else json_line(setting.value)
    return (
        f"  {'budget' if key == 'max_tokens' else '':<9} {value:>7} {words:<28} by {setting.origin}"
    )


def _tokens(sums: Tokens) -> str:
    return (
        f"{sums.draft:,.0f} tokens written by the draft, {sums.scored:,.0f} scored and "
        f"{sums.target:,.0f} written by the target"
    )


def result_objects(result: RunResult, configuration: Configuration, page: Path | None) -> list[str]:
    """Return one JSON object per problem, then the summary; `atts compare` reads them."""
    summary = {
        "type": "summary",
        "status": result.status,
        "method": configuration["method"],
        "nominal_rate": configuration["rate"],
        "directory": str(result.directory),
        "report": None if page is None else str(page),
        "unscored_decisions": result.unscored,
        **result.as_json(),
    }
    problems = ({"type": "problem", **problem.as_json()} for problem in result.problems)
    return [json_line(each) for each in (*problems, summary)]


# With at least this many rollouts per problem, avg@N and cons@N are printed too.
_MANY_ROLLOUTS = 16
# With fewer problems, the realised rate of a gate that judges whole problems is often far off.
_ENOUGH_PROBLEMS = 40
# at most this many names of problems are printed in one line
_MOST_NAMES = 5
# If fewer tokens than this share of the target's tokens were proposed, the summary does not mention
# chosen speculation. If the draft wrote fewer, the summary says that drafts were hardly used.
_FEW_PROPOSED = 0.05


def result_table(result: RunResult, configuration: Configuration, page: Path | None) -> list[str]:
    """Return a run's summary as text lines, followed by the paths of the run and its report."""
    summary = result.summary
    usage = summary.usage
    problems = counted(summary.problems, "problem")
    if result.status != "finished" and result.manifest.problems:
        problems = f"{summary.problems:,} of {counted(result.manifest.problems, 'problem')}"
    rows = [
        ("without a score", result.unscored_words),
        *_accuracies(result),
        *_by_benchmark_names(result),
        (f"escalated {result.manifest.judged_unit}", _escalated(result, configuration)),
        ("rollouts", _rollouts_by_model(result, configuration)),
        (
            "tokens written",
            f"{usage.draft_tokens:,} by the draft, {usage.target_tokens:,} by the target "
            f"({100 * summary.target_share:.1f} %); {usage.wasted_tokens:,} of them discarded",
        ),
        ("tokens scored", f"{usage.scored_tokens:,} by the target"),
        ("cost", "" if result.cost is None else f"${result.cost:,.4f}"),
        ("drafts", _unused_drafts(result)),
        ("speculation", _speculation(result, configuration)),
        ("combined", "" if result.combined is None else str(result.combined)),
        *_abstained(result),
        ("compared", "" if result.comparison is None else str(result.comparison)),
        ("saved", result.saved_words),
        ("cut", summary.truncation.warning),
        ("chunks", result.coarse_chunks),
        ("out of domain", _doubts(result)),
        (
            "not complete",
            f"{counted(summary.failed, 'problem')} with failed rollouts" if summary.failed else "",
        ),
        (
            "without an answer",
            counted(summary.unanswered, "problem") if summary.unanswered else "",
        ),
    ]
    return [
        f"{_what(result, configuration)}: "
        f"{problems}, {counted(summary.samples, 'rollout')}, {summary.seconds:.1f} s",
        "",
        *(f"{name:<20}{words}" for name, words in rows if words),
        "Brackets are 95 % intervals over problems.",
        "",
        f"{'run':<20}{result.directory}",
        *([f"{'report':<20}{page}"] if page is not None else []),
    ]


def _accuracies(result: RunResult) -> list[tuple[str, str]]:
    """Return the rows of a run's accuracies. If no problem has a reference answer, return the first
    answers instead.
    """
    lines = result.problems
    if lines and all(line.verdict is None for line in lines):
        shown = [(line.problem, line.answer or "none") for line in lines[:_MOST_NAMES]]
        more = len(lines) - len(shown)
        if more:
            shown.append(("", f"and {more:,} more; --json prints all answers"))
        return [
            ("accuracy", "not measured, because the problems have no reference answers"),
            *(
                ("answer", f"{problem}: {answer}" if problem else answer)
                for problem, answer in shown
            ),
        ]
    summary = result.summary
    return [
        ("accuracy", f"{_share(summary.answers)}   {_answered_by(result)}"),
        ("pass@1", f"{_share(summary.samples_right)}   mean of single rollouts{_leaning(result)}"),
    ]


def _what(result: RunResult, configuration: Configuration) -> str:
    """Return the method and the dataset of a run. For a run made by `atts combine`, return those of
    the original run.
    """
    settings = result.manifest.settings
    names = [
        settings[name].value if name in settings else configuration[name]
        for name in ("method", "dataset")
    ]
    return " on ".join(map(str, names))


def _escalated(result: RunResult, configuration: Configuration) -> str:
    """Return the realised rate with the nominal rate, or "" if no chunk was judged."""
    rate = result.summary.rate
    if not rate.n_samples:
        return ""
    from atts.methods import preset

    if not preset(configuration["method"]).has_rate:
        return f"{rate.counted()}   this method has no nominal rate"
    nominal = float(configuration["rate"])
    few = ""
    if result.manifest.judged_unit == "problems" and rate.n_samples < _ENOUGH_PROBLEMS:
        few = f"; with fewer than {_ENOUGH_PROBLEMS} problems, the rate may be far from it"
    if result.status not in ("finished", "decided"):
        few += "; finished problems only"
    return f"{rate.counted()}   nominal rate {nominal:g}{few}"


def _rollouts_by_model(result: RunResult, configuration: Configuration) -> str:
    """Return which model wrote how many rollouts, if the gate escalates whole problems; otherwise
    return "".
    """
    if result.manifest.judged_unit != "problems":
        return ""
    policy = configuration.setup().policy
    first = policy.waves[0].stop
    samples = [sample.sample for problem in result.problems for sample in problem.samples]
    drafted = sum(sample < first for sample in samples)
    return (
        f"{drafted:,} by the draft ({first} per problem), {len(samples) - drafted:,} by the target "
        f"({policy.samples - first} per escalated problem)"
    )


def _answered_by(result: RunResult) -> str:
    """Describe how the answers were chosen from the rollouts."""
    if result.combined is None:
        return "majority vote of each problem's rollouts"
    return "vote of each problem's rollouts; the target decided split votes"


def _leaning(result: RunResult) -> str:
    """Return a warning that pass@1 is biased, because it leaves out the rollouts that were
    cancelled after the vote was settled. Return "" if no rollout was cancelled.
    """
    spared = sum(
        sample.verdict == "spared" for problem in result.problems for sample in problem.samples
    )
    if not spared:
        return ""
    return (
        f", without {counted(spared, 'rollout')} cancelled after the vote was settled; slow rollouts "
        "are cancelled more often, so this mean favours fast ones (--early-stop none runs all)"
    )


def _unused_drafts(result: RunResult) -> str:
    """Say why the target wrote nearly everything in a run of method `exact`; "" otherwise."""
    setting = result.manifest.configuration.get("policy")
    policy = setting.value if setting is not None else None
    usage = result.summary.usage
    if not isinstance(policy, dict) or not policy.get("exact") or not usage.target_tokens:
        return ""
    if usage.draft_tokens > _FEW_PROPOSED * usage.target_tokens:
        return ""
    return "hardly used; exact drafts only while this is measured to save time"


def _speculation(result: RunResult, configuration: Configuration) -> str:
    """Return a summary of speculative decoding. Return "" if it was hardly used, or if the user did
    not choose it; then only the report describes it.
    """
    counters = result.speculated
    if counters is None or configuration["speculate"] == "auto":
        return ""
    if 0 < counters.proposed < _FEW_PROPOSED * result.summary.usage.target_tokens:
        return ""
    return str(counters)


def _by_benchmark_names(result: RunResult) -> list[tuple[str, str]]:
    """Return table rows with the accuracy of the vote as cons@N, and of single rollouts as avg@N.

    avg@N is the mean over all N rollouts, so it is left out if the run cancelled some. Runs with
    few rollouts get no rows.
    """
    numbers = {len(problem.samples) for problem in result.problems}
    many = max(numbers, default=0)
    if len(numbers) != 1 or many < _MANY_ROLLOUTS:
        return []
    summary = result.summary
    rows = [(f"cons@{many}", f"{_share(summary.answers)}   the vote of {many} rollouts")]
    if not _leaning(result):
        rows.insert(
            0, (f"avg@{many}", f"{_share(summary.samples_right)}   mean of {many} rollouts")
        )
    return rows


def _abstained(result: RunResult) -> list[tuple[str, str]]:
    """Return table rows on abstention: the fraction of problems that were answered, the fraction of
    those answers that are wrong, and the guarantee.
    """
    answered = result.answered
    if answered is None:
        return []
    return [
        (
            "answered",
            f"{_share(answered.share)}   of the problems; unanswered problems count as wrong",
        ),
        ("wrong if answered", _share(answered.wrong)),
        ("promised", answered.guarantee),
    ]


def _doubts(result: RunResult) -> str:
    """Return which problems have scores that look unlike the stored scores. Return "" if chance
    explains that many problems.
    """
    from atts.calibration import DomainCheck

    doubted = [one.problem for one in result.problems if one.doubt]
    total = len(result.problems)
    normal = DomainCheck.false_warnings(total)
    if len(doubted) <= normal:
        return ""
    names = ", ".join(doubted[:_MOST_NAMES])
    if len(doubted) > _MOST_NAMES:
        names += f" and {len(doubted) - _MOST_NAMES:,} more"
    return (
        f"{len(doubted):,} of {counted(total, 'problem')} (normal: up to {normal:,}) with worse "
        f"scores than nearly all problems in the stored scores: {names}; the gate and the models "
        "may be unsuitable for these problems"
    )


def _share(estimate: Estimate) -> str:
    return estimate.brief("no result yet       ")


@options.with_keys(
    "directory combine target temperature top_p max_tokens seed concurrency out report max_cost "
    "max_total_tokens max_seconds give_up_after config pairs as_json"
)
def combine(
    context: typer.Context,
    directory: options.RunDirectory,
    out: Annotated[
        str,
        typer.Option(
            help="Directory of the resulting run; if the run was interrupted, the same command "
            "continues it."
        ),
    ],
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per problem, then a summary.")
    ] = False,
) -> None:
    """Let a target select or synthesize answers for problems on which a recorded run's rollouts
    disagree.

    The result is a normal run directory with the recorded rollouts. A vote counts as split if the
    leading answer's share of the votes is at most a threshold; the threshold is calibrated on the
    run. With the default, --combine auto, the votes decide until the target's choices are known to
    be better.

    Example: atts combine runs/first --target hf:Qwen/Qwen2.5-1.5B-Instruct --out runs/selected

    Example: atts combine runs/theirs --combine select --target openai:https://api.example.com/v1/large
    --out runs/selected
    """
    from atts.api import combine as combined
    from atts.cli.progress import progress_display
    from atts.run import Progress, RunOptions

    configuration = options.configured(context, config, pairs)
    job = configuration.job
    setup = configuration.setup()
    progress = Progress(loading=[str(configuration["target"])])
    listening = RunOptions(listeners=(progress,), caps=job.caps, prices=job.price_list)

    async def main() -> RunResult:
        async with progress_display(progress):
            return await combined(directory, setup, directory=out, options=listening)

    raise typer.Exit(_run_and_print(configuration, lambda: run_async(main), Path(out), as_json))


@options.with_keys(
    f"dataset over {options.SETUP} limit seed concurrency out log config pairs dry_run as_json"
)
def sweep(
    context: typer.Context,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting to vary and its values, such as rate=0.1,0.2,0.4; the values may also "
            "be a JSON list. With several --over, every combination of values is run.",
            metavar="KEY=VALUE,VALUE",
            show_default="rate=0.1,0.2,0.4",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Directory of the sweep's runs; if the sweep was interrupted, the same "
            "command continues it.",
            show_default="a new directory below runs/",
            metavar="DIRECTORY",
        ),
    ] = None,
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the planned runs, without running anything.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per run, then a summary.")
    ] = False,
) -> None:
    """Evaluate under every combination of some settings, and draw accuracy against cost.

    Cost is measured in tokens, seconds and samples. Each combination of settings is a run. For
    comparison, the sweep also runs the target alone, the draft alone, and a coin (the same policy
    and rate, but chunks are escalated at random). If two runs send a model the same prompt with the
    same seed, the model replies only once. The same command continues an interrupted sweep; with
    more values in --over, it adds runs to the sweep.

    Example: atts sweep --over rate=0.1,0.2,0.4 --over samples=2,4,8

    Example: atts sweep math500 --pair r1-1.5b/r1-70b --over max_tokens=4000,8000,16000 --dry-run
    """
    from atts.api import plan_sweep

    flags = options.flags_of(context)
    planned = plan_sweep(axes(over or ["rate=0.1,0.2,0.4"]), flags, pairs or (), file=config)
    for note in planned.notes:
        tell(f"atts: {note}")
    if dry_run:
        say("\n".join(_planned(planned, as_json)))
        return
    end = _run(planned)
    say("\n".join(_objects(end) if as_json else _lines(end)))
    if end.last is not None:
        tell(f"atts: {end.last.status}: {end.last.why}; the same command continues the run")
    raise typer.Exit(end.exit_code)


def _run(planned: Sweep) -> SweepEnd:
    """Run the planned runs of a sweep one after the other, and show the progress of each run."""
    from atts.api import run_sweep

    @asynccontextmanager
    async def watch(point: SweepPoint, number: int) -> AsyncGenerator[Sequence[Listener]]:
        from atts.cli.progress import progress_display
        from atts.run import Progress

        tell(f"atts: run {number} of {len(planned.points)}: {point.name}")
        roles = point.configuration.setup().roles
        progress = Progress(loading=[str(point.configuration[role]) for role in roles])
        async with progress_display(progress):
            yield (progress,)

    async def main() -> SweepEnd:
        return await run_sweep(planned, watch)

    return run_async(main)


def axes(given: Sequence[str]) -> dict[str, list[object]]:
    """Parse the keys and values of `--over`.

    >>> axes(["rate=0.1,0.2", 'draft=["hf:a", "hf:b"]'])
    {'rate': ['0.1', '0.2'], 'draft': ['hf:a', 'hf:b']}

    :raises OptionError: an item does not have the form KEY=VALUE,VALUE, or a key is given twice.
    """
    values_by_key = dict[str, list[object]]()
    for words in given:
        name, mark, values = (part.strip() for part in words.partition("="))
        if not (name and mark and values.strip(", ")):
            raise OptionError(
                "--over", f"{words!r} is not KEY=VALUE,VALUE, such as rate=0.1,0.2,0.4"
            )
        if name in values_by_key:
            raise OptionError(
                "--over", f"{name} is given twice; list all values of {name} in one --over"
            )
        values_by_key[name] = _listed(values, words)
    return values_by_key


def _listed(values: str, words: str) -> list[object]:
    if not values.startswith("["):
        return [value.strip() for value in values.split(",") if value.strip()]
    try:
        listed: list[object] = json.loads(values)
    except ValueError as error:
        raise OptionError("--over", f"{words!r} is not a JSON list ({error})") from error
    return listed


def _planned(planned: Sweep, as_json: bool) -> list[str]:
    if as_json:
        return [
            json_line(
                {
                    "type": "run",
                    "name": one.name,
                    "kind": one.kind,
                    "values": one.values,
                    "directory": str(one.directory),
                }
            )
            for one in planned.points
        ]
    problems = counted(len(planned.points[-1].configuration.job.load().problems), "problem")
    runs = [
        f"  {one.name:<40} {counted(one.configuration['samples'], 'rollout'):>13}  {one.directory}"
        for one in planned.points
    ]
    head = f"{counted(len(planned.points), 'run')} of {problems} each, in {planned.directory}"
    return [head, *runs, "Nothing was run."]


def _lines(end: SweepEnd) -> list[str]:
    from atts.analysis import sweep_lines

    return [
        *sweep_lines(end.report),
        "",
        f"{'sweep':<10}{end.report.directory}",
        f"{'picture':<10}{end.page}",
    ]


def _objects(end: SweepEnd) -> list[str]:
    report = end.report
    runs = [json_line({"type": "run", **_facts(point)}) for point in report.points]
    status = "finished" if end.last is None else end.last.status
    summary = {
        "type": "summary",
        "status": status,
        "directory": report.directory,
        "page": str(end.page),
    }
    return [*runs, json_line({**summary, "over": report.over, "runs": len(report.points)})]


def _facts(point: ScalingPoint) -> dict[str, Any]:
    return {
        field.name: getattr(point, field.name)
        for field in fields(point)
        if field.name not in ("right", "shares")
    }


@options.with_keys(
    "dataset rate samples turns max_tokens pair backend draft target limit file column seed "
    "concurrency out config pairs as_json"
)
def pilot(
    context: typer.Context,
    out: Annotated[
        str | None,
        typer.Option(
            help="Directory of the pilot's runs; if the pilot was interrupted, the same "
            "command continues it.",
            show_default="a new directory below runs/",
            metavar="DIRECTORY",
        ),
    ] = None,
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    as_json: options.Json = False,
) -> None:
    """Measure on some problems whether a gate helps a pair of models, and recommend a method.

    By default the pilot runs 40 problems with 4 rollouts each under several methods: each model
    alone, `exact`, a coin (chunks are escalated at random), and the gate with every score that the
    models allow. A score that is better than the coin is also run with other takeovers and rates.
    The pilot recommends a gate with its score, takeover and rate, or the method `exact`,
    `target-only` or `draft-only`, and prints the reason. If the problems are too few to decide, the
    pilot prints how many are needed. Problems need reference answers.

    Example: atts pilot math500 --pair r1-1.5b/r1-70b --limit 40
    """
    end = _run_pilot(options.flags_of(context), pairs or (), config)
    if end.report is not None:
        report = end.report
        print_result(
            _pilot_facts(report) if as_json else report,
            as_json,
            lambda _: _pilot_lines(end, report),
        )
    if end.last is not None:
        tell(f"atts: {end.last.status}: {end.last.why}; the same command continues the pilot")
    raise typer.Exit(end.exit_code)


def _run_pilot(flags: dict[str, object], pairs: Sequence[str], config: Any) -> PilotEnd:
    from atts.api import run_pilot

    @asynccontextmanager
    async def watch(point: SweepPoint, number: int) -> AsyncGenerator[Sequence[Listener]]:
        from atts.cli.progress import progress_display
        from atts.run import Progress

        tell(f"atts: {point.name}")
        progress = Progress(loading=[])
        async with progress_display(progress):
            yield (progress,)

    async def main() -> PilotEnd:
        return await run_pilot(flags, pairs, file=config, watch=watch)

    return run_async(main)


def _pilot_lines(end: PilotEnd, report: PilotReport) -> list[str]:
    from atts.analysis import pilot_lines

    return [*pilot_lines(report), "", f"pilot     {end.directory}"]


def _pilot_facts(report: PilotReport) -> dict[str, Any]:
    """Return the pilot's report as data for JSON, without the data of single rollouts."""
    return {
        "take": report.take,
        "flags": dict(report.flags),
        "reason": report.reason,
        "undecided": None if report.undecided is None else _pilot_row(report.undecided),
        "headroom": report.headroom.as_json(),
        "arms": [_pilot_row(row) for row in report.rows],
        "unavailable": {arm.name: arm.unavailable for arm in report.unavailable},
        "power": None if report.power is None else str(report.power),
    }


def _pilot_row(row: PilotRow) -> dict[str, Any]:
    numbers = {
        "p_value": row.p_value,
        "rate": row.arm.rate,
        "cost": row.cost,
        "cost_per_point": row.cost_per_point,
    }
    return {
        "name": row.arm.name,
        "flags": dict(row.arm.flags),
        "problems_needed": row.problems_needed,
        "accuracy": row.accuracy.as_json(),
        "gain": None if row.gain is None else row.gain.as_json(),
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
    }
