"""What asynchrony, drafting and scale are worth on engines with known costs: real pipelines, virtual clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from scripts.studies.charts import Chart
from scripts.studies.harness import Cell as TableCell
from scripts.studies.harness import Options, Table, say
from scripts.studies.machine import pair_name
from scripts.studies.scale_cells import Cell, Method, Results, run_cell
from scripts.studies.scale_costs import PAIRS, Cost, Pair
from scripts.studies.scale_fit import local_validation
from scripts.studies.scale_work import TraceLaw, find_library

Row = tuple[TableCell, ...]
EIGHT, SMALL = PAIRS["8B/70B"], PAIRS["1.5B/70B"]
METHODS: tuple[Method, ...] = ("atts", "atts, votes settle", "top-b", "target-only", "draft-only")
PAPER_SPEEDUP, PAPER_THROUGHPUT = 56.7, 4.14


def study(options: Options) -> list[Table]:
    """The validation on this machine, then the grids; cells that an earlier run left in the folder are not repeated."""
    law = TraceLaw(find_library(), options.seed)
    results = Results(law, options.out)
    say(f"scale: work from {law.library.origin}; {len(results)} cells are there already")
    tables = _validated(options)
    for make in MAKERS:
        say(f"scale: {make.__name__}")
        made = make(options, law, results)
        tables += [made] if isinstance(made, Table) else made
    return tables


def _validated(options: Options) -> list[Table]:
    """The fit and its validation, now or from before with this embedded pair."""
    if options.out is None:
        return local_validation(options)
    file = options.out / f"scale-validation-{options.effort}-{pair_name()}.json"
    if file.exists():
        say(f"scale: the validation is there already; delete {file} to repeat it")
        return [Table.read(fields) for fields in json.loads(file.read_text())]
    tables = local_validation(options)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([asdict(table) for table in tables], indent=1) + "\n")
    return tables


def _rollouts(options: Options) -> int:
    return options.pick(128, 256, 1600)


def _cell(options: Options, pair: Pair, method: Method, samples: int) -> Cell:
    """So many rollouts in all, whatever the number of samples."""
    problems = max(options.pick(2, 2, 16), _rollouts(options) // samples)
    return Cell(pair, method, problems, samples, seed=options.seed)


def costs_table(options: Options, law: TraceLaw, results: Results) -> Table:
    """What the simulated engines are."""

    def row(name: str, cost: Cost, room: int) -> Row:
        per_second = 1 / cost.seconds(1, 1000)
        return (
            name, 1e3 * cost.step, 1e6 * cost.sequence, 1e9 * cost.cached, 1e6 * cost.prefilled, room,
            per_second, 128 / cost.seconds(128, 128_000), cost.origin,
        )  # fmt: skip

    rows = (
        row("70B target", EIGHT.target, EIGHT.target_kv),
        row("8B draft", EIGHT.draft, EIGHT.draft_kv),
        row("1.5B draft", SMALL.draft, SMALL.draft_kv),
    )
    columns = (
        "engine", "a, ms a step", "b, us a sequence", "c, ns a KV token", "d, us a prefilled token", "KV tokens",
        "tokens/s at batch 1", "at batch 128", "origin",
    )  # fmt: skip
    notes = (
        "step = a + b x batch + c x KV tokens + d x tokens fed; one engine of each kind per replica.",
        f"Work: {law.library.origin}; prompts of 150 tokens, chunks of up to 500, all methods write equally much.",
        "Not in the formula: attention of a prefill over a long warm prefix, preemption, networks, CUDA graph sizes.",
    )
    return Table("The modelled engines", columns, rows, notes)


def samples_tables(options: Options, law: TraceLaw, results: Results) -> list[Table]:
    """Time, throughput and r against the number of samples, for each pair."""
    return [_samples(pair, options, results) for pair in options.pick((EIGHT,), (EIGHT, SMALL), (EIGHT, SMALL))]


def _samples(pair: Pair, options: Options, results: Results) -> Table:
    rows: list[Row] = []
    for samples in options.pick((4, 16), (1, 4, 16, 64, 256), (1, 2, 4, 8, 16, 32, 64, 128, 256)):
        for method in METHODS:
            cell = _cell(options, pair, method, samples)
            found = results.get(cell)
            busy = (found.draft_busy, found.target_busy)
            each = found.seconds / cell.problems
            rows.append((samples, method, each, found.throughput, found.intensity, *busy, found.realised))
    return Table(
        f"Samples per question, {pair.name}: 1 replica, 256 rollouts in flight, rate 0.2, up to 15 turns",
        ("samples", "method", "s a question", "tokens/s", "r", "draft busy", "target busy", "realised rate"),
        tuple(rows),
        ("r = Tc / (Tm + Ts), in call-seconds: scoring over decoding plus waiting for siblings.",
         "busy: share of the time in which the engine had work."),
        Chart("samples", "tokens/s", "method", "log", "log"),
    )  # fmt: skip


def intensity_table(options: Options, law: TraceLaw, results: Results) -> Table:
    """Asynchronous arithmetic intensity against the number of samples, with and without rounds."""
    rows: list[Row] = []
    for pair in options.pick((EIGHT,), (EIGHT, SMALL), (EIGHT, SMALL)):
        for samples in options.pick((4, 16), (1, 4, 16, 64, 256), (1, 2, 4, 8, 16, 32, 64, 128, 256)):
            for method in ("atts", "top-b"):
                found = results.get(_cell(options, pair, method, samples))
                waiting = found.siblings / (found.siblings + found.memory + found.arithmetic)
                rows.append((f"{method}, {pair.name}", samples, found.intensity, waiting))
    return Table(
        "Where synchronisation dominates: r = Tc / (Tm + Ts) against the number of samples",
        ("method", "samples", "r", "Ts share"),
        tuple(rows),
        ("Ts share: waiting for siblings, of all call-seconds; above one half it dominates. It is 0 for ATTS.",),
        Chart("samples", "r", "method", "log", "log"),
    )


def ratios_table(options: Options, law: TraceLaw, results: Results) -> Table:
    """Against target-only, and against the rounds of top-B at the same budget."""
    rows: list[Row] = []
    for pair in options.pick((EIGHT,), (EIGHT, SMALL), (EIGHT, SMALL)):
        for samples in options.pick((4, 16), (16, 64, 256), (16, 64, 256)):
            alone = results.get(_cell(options, pair, "target-only", samples)).seconds
            for rate in options.pick((0.2,), (0.2, 0.4), (0.05, 0.1, 0.2, 0.4, 0.6)):
                cell = replace(_cell(options, pair, "atts", samples), rate=rate)
                ours = results.get(cell).seconds
                rounds = results.get(replace(cell, method="top-b")).seconds
                queue = results.get(replace(cell, method="atts, question by question")).seconds
                settled = results.get(replace(cell, method="atts, votes settle")).seconds
                replaced = results.get(replace(cell, method="atts, chunks replaced")).seconds
                gains = (alone / ours, alone / settled, alone / replaced, rounds / ours, queue / ours)
                rows.append((pair.name, samples, rate, *gains))
    return Table(
        "What is gained: the same work and the same share of target tokens",
        ("pair", "samples", "rate", "over target-only", "votes settle", "chunks replaced", "over top-b rounds",
         "over question by question"),
        tuple(rows),
        ("Ratios of virtual time. Target-only is batched exactly as ATTS is: 256 rollouts in flight on one engine.",
         "Question by question is the released schedule: all samples of a question end before the next one starts.",
         "The paper's policy: the target goes on after a rejected chunk. Over target-only, too: votes settle, where "
         "rollouts that cannot change the vote any more are cancelled, for ATTS only; chunks replaced, our default, "
         "where rejected chunks are thrown away and the simulation credits nothing for better ones."),
    )  # fmt: skip


def turns_table(options: Options, law: TraceLaw, results: Results) -> Table:
    """How the cost of rounds grows with their number, for few and many samples."""
    rows: list[Row] = []
    for samples in options.pick((16,), (16, 64), (16, 64, 256)):
        for turns in options.pick((1, 4), (1, 2, 4, 8, 15, 30), (1, 2, 3, 4, 6, 8, 11, 15, 22, 30)):
            cell = replace(_cell(options, EIGHT, "atts", samples), turns=turns)
            rounds, alone = (replace(cell, method=m) for m in ("top-b", "target-only"))
            ours, theirs, target = results.get(cell), results.get(rounds), results.get(alone)
            share = theirs.siblings / (theirs.siblings + theirs.memory + theirs.arithmetic)
            ratios = (target.seconds / ours.seconds, theirs.seconds / ours.seconds)
            rows.append((samples, turns, *ratios, share, ours.intensity, theirs.intensity))
    return Table(
        "Turns: 8B/70B, rate 0.2",
        ("samples", "turns at most", "over target-only", "over top-b", "Ts share of top-b", "r of atts", "r of top-b"),
        tuple(rows),
        ("Ts share: call-seconds that rollouts spend waiting for siblings, of all call-seconds.",),
        Chart("turns at most", "Ts share of top-b", "samples"),
    )  # fmt: skip


def rates_table(options: Options, law: TraceLaw, results: Results) -> Table:
    """Speed against the share that is handed over."""
    rows: list[Row] = []
    for pair in options.pick((EIGHT,), (EIGHT, SMALL), (EIGHT, SMALL)):
        base = _cell(options, pair, "atts", options.pick(16, 16, 64))
        alone = results.get(replace(base, method="target-only"))
        for rate in options.pick((0.05, 0.6), (0.05, 0.1, 0.2, 0.4, 0.6), (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)):
            found = results.get(replace(base, rate=rate))
            share = found.target_tokens / (found.target_tokens + found.draft_tokens)
            busy = (found.draft_busy, found.target_busy)
            rows.append(
                (pair.name, rate, found.realised, alone.seconds / found.seconds, found.throughput, share, *busy)
            )
    return Table(
        f"The rate: {options.pick(16, 16, 64)} samples, up to 15 turns",
        ("pair", "rate", "realised rate", "over target-only", "tokens/s", "target's share of tokens", "draft busy",
         "target busy"),
        tuple(rows),
        chart=Chart("rate", "over target-only", "pair"),
    )  # fmt: skip


def replicas_table(options: Options, law: TraceLaw, results: Results) -> Table:
    """A fixed amount of work on more and more replicas: where it saturates."""
    questions = options.pick(16, 50, 500)
    rows: list[Row] = []
    for method in options.pick(METHODS[:1], ("atts", "top-b", "target-only"), METHODS):
        places = options.pick((1, 4), (1, 4, 16, 64), (1, 2, 4, 8, 16, 32, 64))
        cells = [Cell(EIGHT, method, questions, 16, replicas=replicas, seed=options.seed) for replicas in places]
        rows += _scaling(cells, results)
    return Table(
        f"Replicas of both engines: 8B/70B, {questions} questions x 16 samples, rate 0.2, 256 rollouts each in flight",
        _SCALING,
        tuple(rows),
        ("The longest rollout bounds the time from below: its chunks follow each other on any number of replicas.",),
        Chart("replicas", "tokens/s", "method", "log", "log"),
    )


def growing_table(options: Options, law: TraceLaw, results: Results) -> Table:
    """As much work for every replica: what a cluster sustains."""
    rows: list[Row] = []
    for method in options.pick(METHODS[:1], ("atts", "target-only"), ("atts", "top-b", "target-only")):
        places = options.pick((1, 4), (1, 4, 16), (1, 2, 4, 8, 16, 32, 64))
        cells = [Cell(EIGHT, method, 16 * replicas, 16, replicas=replicas, seed=options.seed) for replicas in places]
        rows += _scaling(cells, results)
    return Table(
        "Work that grows with the replicas: 8B/70B, 16 questions x 16 samples for each, rate 0.2",
        _SCALING,
        tuple(rows),
        ("One scheduler in one process drives them all; its own time is not in the virtual seconds: see One machine.",
         "Every question of the record counts equally often from 100 questions on; below, the first ones do."),
        Chart("replicas", "tokens/s", "method", "log", "log"),
    )  # fmt: skip


def _scaling(cells: Sequence[Cell], results: Results) -> list[Row]:
    """A method on more and more replicas, beside itself on the fewest."""
    rows: list[Row] = []
    first = results.get(cells[0])
    for cell in cells:
        found = results.get(cell)
        gain = found.throughput / first.throughput * cells[0].replicas
        busy = (found.draft_busy, found.target_busy)
        share = gain / cell.replicas
        rows.append((cell.method, cell.replicas, found.seconds, found.throughput, gain, share, *busy))
    return rows


_SCALING = (
    "method", "replicas", "seconds", "tokens/s", "speed-up over 1", "efficiency", "draft busy", "target busy",
)  # fmt: skip


def headlines_table(options: Options, law: TraceLaw, results: Results) -> Table:
    """Which assumptions reach the published factors, with the conditions of each."""
    rows: list[Row] = []
    for pair in options.pick((SMALL,), (EIGHT, SMALL), (EIGHT, SMALL)):
        for samples in options.pick((16,), (16, 64, 256), (16, 64, 256)):
            setting = f"{pair.name}, {samples} samples"
            for name, ratio in _speedups(_cell(options, pair, "target-only", samples), results):
                rows.append((setting, name, ratio, _reached(ratio, PAPER_SPEEDUP)))
            for name, ratio in _throughputs(replace(_cell(options, pair, "top-b", samples), rate=0.4), results):
                rows.append((setting, name, ratio, _reached(ratio, PAPER_THROUGHPUT)))
    return Table(
        "The published headline figures: which baseline reaches them",
        ("setting", "baseline", "ratio", "published figure"),
        tuple(rows),
        (
            "Speed-up rows: ATTS at rate 0.05, its cheapest; 56.7x is the figure. Throughput rows: rate 0.4; 4.14x.",
            "The paper's denominators are not published; ours are stated in the second column.",
            "One request at a time is not batched at all: its time per token was measured on 64 rollouts.",
        ),
    )


def _speedups(alone: Cell, results: Results) -> list[tuple[str, float]]:
    ours = results.get(replace(alone, method="atts", rate=0.05)).seconds
    together = results.get(alone)
    queue = results.get(replace(alone, order="question by question"))
    samples = min(alone.samples, 64)
    few = results.get(replace(alone, order="one request at a time", problems=max(1, 64 // samples), samples=samples))
    single = few.seconds / few.target_tokens * together.target_tokens
    return [
        ("target-only, all together", together.seconds / ours),
        ("target-only, question by question", queue.seconds / ours),
        ("target-only, one request at a time", single / ours),
    ]


def _throughputs(rounds: Cell, results: Results) -> list[tuple[str, float]]:
    ours = results.get(replace(rounds, method="atts")).throughput
    queue = replace(rounds, order="question by question")
    return [
        ("throughput, top-b in rounds", ours / results.get(rounds).throughput),
        ("throughput, top-b, question by question", ours / results.get(queue).throughput),
    ]


def _reached(ratio: float, figure: float) -> str:
    return f"reached ({figure:g}x)" if ratio >= figure else f"{ratio / figure:.0%} of {figure:g}x"


def memory_tables(options: Options, law: TraceLaw, results: Results) -> list[Table]:
    """KV tokens at work on the target over time, with the graph's token budget and without."""
    samples, budget = options.pick(16, 64, 64), options.pick(30_000, 60_000, 60_000)
    curves: list[Row] = []
    peaks: list[Row] = []
    for method in ("target-only", "atts"):
        for limit in (None, budget):
            cell = replace(_cell(options, EIGHT, method, samples), budget=limit, room="without end")
            found, engines = run_cell(cell, law, keep_load=True)
            name = f"{method}, {'no budget' if limit is None else 'budget'}"
            peaks.append((name, found.seconds, found.target_peak, found.target_peak * 327_680 / 2**30))
            curves += [(name, at, held) for at, held in _sampled(engines[0].load.rows, found.seconds)]
    notes = (f"Budget: {budget} KV tokens, prompt plus token limit of the calls the graph admits; 320 KiB a token.",)
    where = f"8B/70B, {samples} samples"
    return [
        Table(f"KV memory of the target: {where}", ("run", "seconds", "peak KV tokens", "GiB"), tuple(peaks), notes),
        Table(
            f"KV tokens at work on the target over time: {where}, token budget on and off",
            ("run", "seconds", "KV tokens"),
            tuple(curves),
            ("The highest value in each twentieth of the run.",),
            Chart("seconds", "KV tokens", "run"),
            "chart only",
        ),
    ]


def _sampled(
    rows: Sequence[tuple[float, int, float, float]], seconds: float, parts: int = 20
) -> list[tuple[float, float]]:
    """The highest load within each part of the run."""
    highest = [0.0] * parts
    for at, _, held, _ in rows:
        part = min(parts - 1, math.floor(parts * at / seconds))
        highest[part] = max(highest[part], held)
    return [(seconds * (part + 0.5) / parts, held) for part, held in enumerate(highest)]


MAKERS: tuple[Callable[[Options, TraceLaw, Results], Table | list[Table]], ...] = (
    costs_table,
    ratios_table,
    samples_tables,
    intensity_table,
    turns_table,
    rates_table,
    replicas_table,
    growing_table,
    headlines_table,
    memory_tables,
)
