"""The table of BENCHMARKS.md: each question, the headline of a study that answers it, the command, the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.studies.harness import Row, Table


@dataclass(frozen=True, slots=True)
class Claim:
    """A question a reader has, the study and the beginnings of the tables that answer it, the command, the limits."""

    question: str
    study: str
    titles: tuple[str, ...]
    command: str
    limits: str


def summary(studies: Mapping[str, Sequence[Table]], held: str = "") -> Table:
    """The headlines of what was run; a claim whose study was not keeps the row that the table held, or says so."""
    kept = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in held.splitlines() if "](" in line}
    rows: list[Row] = []
    for claim in CLAIMS:
        question = f"[{claim.question}](docs/benchmarks/{claim.study}.md)"
        tables = [one for one in studies.get(claim.study, ()) if one.headline and one.title.startswith(claim.titles)]
        found = {next(title for title in claim.titles if one.title.startswith(title)): one for one in reversed(tables)}
        answer = "; ".join(found[title].headline for title in claim.titles) if len(found) == len(claim.titles) else ""
        rows.append((question, answer or kept.get(question, "not measured"), f"`{claim.command}`", claim.limits))
    return Table.of("In five minutes", "question | measured | command | limits", rows)


CLAIMS = tuple(
    Claim(question, study, (titles,) if isinstance(titles, str) else titles, command, limits)
    for question, study, titles, command, limits in (
        ("How much faster than target-only?", "pipelines", ("Time, throughput", "Time, latency"),
         "./scripts/bench pipelines-time",
         "embedded models on two shared cores; reading is cheap beside writing on a GPU, not here (next but one)"),
        ("At which accuracy?", "pipelines", "The claim: ", "./scripts/bench pipelines --full",
         "embedded models, graded arithmetic"),
        ("And where each engine has GPUs of its own?", "scale", "What is gained", "./scripts/scale",
         "virtual time with published costs; all methods write equally much; accuracy is not simulated"),
        ("How exact is the rate, beside the published rule?", "calibration",
         "Every mode on the real stream at rate 0.4", "./scripts/bench calibration",
         "recorded scores of one pair on 100 questions; what other decisions would have led to is not replayed"),
        ("And in a live run?", "against", "Methods side by side: embedded pair", "./scripts/bench against",
         "by question: each has few decisions: coins at the nominal rate would err as well, by less"),
        ("Would another default be better?", "ablations", "Which defaults would change", "./scripts/bench ablations",
         "the embedded pair; narrow wins are not looked for on so few problems"),
        ("What does the scheduler cost?", "graph", "CPU microseconds per rollout of 12 nodes",
         "./scripts/bench graph", "asyncio, this machine"),
        ("What does one client send to a server?", "remote", "Throughput", "./scripts/bench remote",
         "server and client share the machine's cores"),
        ("How fast is the local engine?", "local", "Decoding", "./scripts/bench local --full",
         "this machine, float32, one thread on each side"),
        ("Where does it saturate at cluster scale?", "scale", ("Replicas of both engines", "Work that grows"),
         "./scripts/scale",
         "virtual time; a fixed evaluation is bounded by its longest rollout; no networks, no load balancers"),
        ("How far off is the simulation?", "scale", "Predicted and measured", "./scripts/bench scale",
         "validated on this machine's embedded pair only; GPU costs are published fits"),
        ("Are the paper's 56.7x and 4.14x reachable?", "scale", "The published headline figures", "./scripts/scale",
         "the paper does not state its baselines; ours are named"),
        ("How right are verdicts on answers?", "grading", "model answers", "./scripts/bench grading",
         "pairs judged by one reader; every checker with its own defaults"),
        ("Does a killed run lose anything?", "crash", "Runs killed", "./scripts/bench crash --full",
         "scripted engines, a frozen gate"),
        ("Does it run for ever?", "soak", "Soak: what the process holds", "./scripts/bench soak --full",
         "an hour, not a month"),
    )
)  # fmt: skip
