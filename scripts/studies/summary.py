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
    ours = rows(claim, method="atts")[0]
    return (
        f"{ours['speed-up']}x in time with {ours['of target-only']} of its target tokens; votes "
        f"{ours['minus target-only, points']} points ({claim.title.removeprefix('The claim: ')})"
    )


def _rates(studies: Studies) -> str:
    found = table(studies, "calibration", "Every mode on the real stream at rate 0.4")
    parts: list[str] = []
    for rule in ("published", "question-turn"):
        row = rows(found, order="sim", rule=rule)[0]
        parts.append(f"{rule}: {_n(row['turn RMS'])} by turn, {_n(row['question RMS'])} by question")
    return "error at rate 0.4, " + "; ".join(parts)


def _live_rates(studies: Studies) -> str:
    found = table(studies, "against", "Methods side by side: embedded pair")
    parts: list[str] = []
    for method in (
        "published: static scores, question by question",
        "the paper's policy, our gate by question and turn",
    ):
        row = rows(found, method=method)[0]
        parts.append(
            f"{method.split(':')[0]}: {_n(row['realised rate'])} overall, {_n(row['question RMS'])} by question"
        )
    return "nominal 0.2, " + "; ".join(parts)


def _machine(studies: Studies) -> str:
    graph = rows(table(studies, "graph", "CPU microseconds per rollout of 12 nodes"))[0]
    parts = [f"graph: {graph['graph, recording']} us per rollout of 12 calls"]
    try:
        remote = table(studies, "remote", "Throughput")
        parts.append("servers: see the table" if not remote.rows else f"servers: {len(remote.rows)} loads measured")
        local = rows(table(studies, "local", "Decoding"), model="target", batch=16)[0]
        parts.append(f"embedded target at batch 16: {_n(local['tokens/s'])} tokens/s")
    except LookupError:
        pass  # the graph's number stands alone
    return "; ".join(parts)


def _barrier(studies: Studies) -> str:
    found = table(studies, "scale", "What is gained")
    parts: list[str] = []
    for row in rows(found, rate=0.2):
        factors = f"{_n(row['over target-only'])}x, {_n(row['over top-b rounds'])}x, "
        factors += f"{_n(row['over question by question'])}x"
        parts.append(f"{row['pair']} m={row['samples']}: {factors}")
    return "over target-only, sorted rounds, question by question: " + "; ".join(parts)


def _saturation(studies: Studies) -> str:
    found = rows(table(studies, "scale", "Replicas"), method="atts")
    half = [row for row in found if _f(row["efficiency"]) >= 0.5]
    last = found[-1]
    return (
        f"efficiency above one half up to {half[-1]['replicas']} replicas; at {last['replicas']}: "
        f"{_n(last['speed-up over 1'])}x, {_n(last['tokens/s'])} tokens/s"
    )


def _validation(studies: Studies) -> str:
    found = table(studies, "scale", "Predicted and measured")
    return found.notes[0]


def _headlines(studies: Studies) -> str:
    found = rows(table(studies, "scale", "The published headline figures"))
    speed = [row for row in found if str(row["baseline"]).startswith("target-only")]
    best = {name: max((_f(r["ratio"]) for r in speed if r["baseline"] == name), default=0.0) for name in
            dict.fromkeys(str(r["baseline"]) for r in speed)}  # fmt: skip
    throughput = max(_f(r["ratio"]) for r in found if str(r["baseline"]).startswith("throughput"))
    words = ", ".join(f"{ratio:.3g}x over {name}" for name, ratio in best.items())
    return f"at most {words}; throughput at most {throughput:.3g}x over sorted rounds"


def _soak(studies: Studies) -> str:
    found = table(studies, "soak", "Soak: what the process holds")
    by: dict[str, list[str]] = {}
    for row in rows(found):
        by.setdefault(str(row["verdict"]), []).append(str(row["between runs"]))
    words = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by.items())
    return f"{words}. {' '.join(found.notes)}"


def _n(value: Cell) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else str(value)


def _f(value: Cell) -> float:
    assert isinstance(value, int | float), "a number stands in this column"
    return float(value)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "How much faster than target-only, at equal accuracy?",
        _claim,
        "./scripts/bench pipelines --full",
        "embedded models, graded arithmetic, two cores shared by both engines; other pairs differ by their cost ratio",
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
        "What is gained where each engine has GPUs of its own?",
        _barrier,
        "./scripts/scale",
        "virtual time with published costs; all methods write equally much; accuracy is not simulated",
    ),
    Claim(
        "Where does it saturate at cluster scale?",
        _saturation,
        "./scripts/scale",
        "a fixed amount of work: the longest rollout bounds it; networks and load balancers are not modelled",
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
