"""The one-minute table of BENCHMARKS.md: each claim, the number a study gave it, and what the number does not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scripts.studies.harness import Cell, Table

Studies = Mapping[str, Sequence[Table]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A question a reader has, how its answer is found among the tables, the command, the limits."""

    question: str
    answer: Callable[[Studies], str]
    command: str
    limits: str


def summary(studies: Studies) -> Table:
    """Every claim; one whose study was not run says so."""
    rows: list[tuple[Cell, ...]] = []
    for claim in CLAIMS:
        try:
            answer = claim.answer(studies)
        except LookupError as missing:
            answer = f"not measured: {missing.args[0]}"
        rows.append((claim.question, answer, f"`{claim.command}`", claim.limits))
    return Table("In one minute", ("question", "measured", "command", "limits"), tuple(rows))


def table(studies: Studies, study: str, title: str) -> Table:
    """The table of a study whose title begins so.

    :raises LookupError: there is none.
    """
    found = next((one for one in studies.get(study, ()) if one.title.startswith(title)), None)
    if found is None:
        raise LookupError(f"no {title!r} from {study}")
    return found


def rows(found: Table, **wanted: Cell) -> list[Mapping[str, Cell]]:
    """The rows with these values, by column; an underscore in a name is a space in the column.

    :raises LookupError: there is none.
    """
    named: list[Mapping[str, Cell]] = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
    kept = [row for row in named if all(row[name.replace("_", " ")] == value for name, value in wanted.items())]
    if not kept:
        raise LookupError(f"no row {wanted} in {found.title!r}")
    return kept


def _claim(studies: Studies) -> str:
    claim = table(studies, "pipelines", "The claim: ")
    ours, alone = (rows(claim, method=method)[0] for method in ("atts", "target-only"))
    speed = str(ours["speed-up"]).split()[0]
    arithmetic = _f(ours["GFLOPs"]) / _f(alone["GFLOPs"])
    return (
        f"**{speed}x** the target's speed where both models share two cores: the target writes "
        f"{ours['of target-only']} of the tokens it would write alone, but reads every chunk, {arithmetic:.2f}x the "
        f"arithmetic in all; votes {ours['minus target-only, points']} points "
        f"({claim.title.removeprefix('The claim: ')})"
    )


def _rates(studies: Studies) -> str:
    found = table(studies, "calibration", "Every mode on the real stream at rate 0.4")
    published, ours = (rows(found, order="sim", rule=rule)[0] for rule in ("published", "mode question-turn"))
    return (
        f"by question the published rule is off by {_n(published['question RMS'])}, ours by "
        f"**{_n(ours['question RMS'])}**; by turn {_n(published['turn RMS'])} and **{_n(ours['turn RMS'])}** "
        "(root mean squares, nominal 0.4)"
    )


def _live_rates(studies: Studies) -> str:
    found = table(studies, "against", "Methods side by side: embedded pair")
    names = (
        "published: static scores, question by question",
        "the paper's policy, our gate by question and turn",
        "atts (ours), as it comes",
    )
    rates, errors = zip(*[_rate_and_error(rows(found, method=name)[0]) for name in names], strict=True)
    return (
        f"asked for 0.2, the published rule takes over {rates[0]}, ours under the same policy **{rates[1]}** "
        f"(errors by question {errors[0]} and **{errors[1]}**). Our default spends where it helps and promises less: "
        f"{rates[2]}, {errors[2]}"
    )


def _rate_and_error(row: Mapping[str, Cell]) -> tuple[str, str]:
    return _n(row["realised rate"]), _n(row["question RMS"])


def _machine(studies: Studies) -> str:
    graph = rows(table(studies, "graph", "CPU microseconds per rollout of 12 nodes"), back_end="asyncio")
    free, queued = (str(row["graph, recording"]).split()[0] for row in (graph[0], graph[-1]))
    parts = [f"the scheduler costs {free} us of processor per rollout of 12 calls, {queued} where calls wait for slots"]
    for words in (_served, _decoded):
        try:
            parts.append(words(studies))
        except LookupError as missing:
            parts.append(f"not measured: {missing.args[0]}")
    return "; ".join(parts)


def _served(studies: Studies) -> str:
    row = rows(table(studies, "remote", "Throughput"), client="atts")[-1]
    rate, share = (float(str(row[name]).split()[0].replace(",", "")) for name in ("requests/s", "of aiohttp"))
    return (
        f"a server is sent {_n(rate)} requests/s at {row['in flight']} in flight, {share:.0%} of a bare aiohttp loop's"
    )


def _decoded(studies: Studies) -> str:
    found = rows(table(studies, "local", "Decoding"))
    row = next((row for row in found if str(row["model"]).startswith("target") and row["batch"] == 16), found[0])
    ratio = str(row["prompt and decoding, ratio"]).split()[0]
    return (
        f"the embedded {row['model']} writes {_n(row['decoded tokens/s'])} tokens/s on one core "
        f"at batch {row['batch']}, {ratio}x `transformers.generate`"
    )


def _barrier(studies: Studies) -> str:
    found = table(studies, "scale", "What is gained")
    parts: list[str] = []
    for row in rows(found, rate=0.2, samples=16):
        draft = str(row["pair"]).split("/")[0]
        parts.append(
            f"{draft} draft: **{_x(row['over target-only'])}** the target alone ({_x(row['votes settle'])} where "
            f"decided votes stop), {_x(row['over top-b rounds'])} sorted rounds, "
            f"{_x(row['over question by question'])} question by question"
        )
    return "with a 70B target, 16 samples, rate 0.2: " + "; ".join(parts)


def _saturation(studies: Studies) -> str:
    fixed = rows(table(studies, "scale", "Replicas of both engines"), method="atts")
    half = [row for row in fixed if _f(row["efficiency"]) >= 0.5]
    last = fixed[-1]
    words = (
        f"a fixed evaluation uses up to {half[-1]['replicas']} replicas well (efficiency above one half) and gets "
        f"{_x(last['speed-up over 1'])} from {last['replicas']}"
    )
    growing = rows(table(studies, "scale", "Work that grows with the replicas"), method="atts")[-1]
    return (
        f"{words}; with as much work per replica, {growing['replicas']} replicas write **{_n(growing['tokens/s'])} "
        f"tokens/s** at efficiency {_n(growing['efficiency'])}"
    )


def _validation(studies: Studies) -> str:
    return table(studies, "scale", "Predicted and measured").notes[0]


def _headlines(studies: Studies) -> str:
    found = rows(table(studies, "scale", "The published headline figures"))
    best: dict[str, float] = {}
    for row in found:
        name = str(row["baseline"])
        best[name] = max(best.get(name, 0.0), _f(row["ratio"]))
    return (
        f"4.14x in throughput: {_reached(best, 'throughput, ', 4.14)}. 56.7x in time: "
        f"{_reached(best, 'target-only, ', 56.7)}"
    )


def _reached(best: Mapping[str, float], kind: str, figure: float) -> str:
    """The baselines of a kind in two groups: those against which the figure is reached, and the others."""
    mine = {name.removeprefix("throughput, "): ratio for name, ratio in best.items() if name.startswith(kind)}
    groups = [
        ("reached against", [f"{name} ({_x(ratio)})" for name, ratio in mine.items() if ratio >= figure]),
        ("not against", [f"{name} ({_x(ratio)} at most)" for name, ratio in mine.items() if ratio < figure]),
    ]
    return "; ".join(f"{words} {', '.join(names)}" for words, names in groups if names)


def _soak(studies: Studies) -> str:
    found = table(studies, "soak", "Soak: what the process holds")
    by: dict[str, list[str]] = {}
    for row in rows(found):
        by.setdefault(str(row["verdict"]), []).append(str(row["between runs"]))
    words = "; ".join(f"**{verdict}**: {', '.join(names)}" for verdict, names in by.items())
    return f"{words}. {' '.join(found.notes[:2])}"


def _x(value: Cell) -> str:
    """A factor, to two digits: nobody reads more of one."""
    number = _f(value)
    return f"{number:.0f}x" if number >= 9.95 else f"{number:.1f}x"


def _n(value: Cell) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2g}"


def _f(value: Cell) -> float:
    assert isinstance(value, int | float), "a number stands in this column"
    return float(value)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "How much faster than target-only, at equal accuracy?",
        _claim,
        "./scripts/bench pipelines --full",
        "embedded models, graded arithmetic; reading is cheap beside writing on a GPU, not here (next line)",
    ),
    Claim(
        "And where each engine has GPUs of its own?",
        _barrier,
        "./scripts/scale",
        "virtual time with published costs; all methods write equally much; accuracy is not simulated",
    ),
    Claim(
        "How exact is the rate, beside the published rule?",
        _rates,
        "./scripts/bench calibration",
        "recorded scores of one pair on 100 questions; what other decisions would have led to is not replayed",
    ),
    Claim(
        "And in a live run?",
        _live_rates,
        "./scripts/bench against",
        "by question: each has few decisions, so coins at the nominal rate would err too",
    ),
    Claim(
        "What does one machine sustain?",
        _machine,
        "./scripts/bench graph remote local",
        "this machine; the overhead is ours, the models' speed is their own",
    ),
    Claim(
        "Where does it saturate at cluster scale?",
        _saturation,
        "./scripts/scale",
        "virtual time; a fixed evaluation is bounded by its longest rollout; no networks, no load balancers",
    ),
    Claim(
        "How far off is the simulation?",
        _validation,
        "./scripts/bench scale",
        "validated on this machine's embedded pair only; GPU costs are published fits",
    ),
    Claim(
        "Are the paper's 56.7x and 4.14x reachable?",
        _headlines,
        "./scripts/scale",
        "the paper does not state its baselines; ours are named",
    ),
    Claim("Does it run for ever?", _soak, "./scripts/bench soak --full", "an hour, not a month"),
)
