"""Draws accuracy against target tokens, arithmetic and time, for a grid of policies replayed from recorded runs."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import anyio

from atts.analysis import Replayed, replay_policy
from atts.api import Setup, answers_for, evaluate
from atts.calibration import Calibrator, Mode
from atts.core import Outcome
from atts.errors import DatasetError, UsageError
from atts.evaluators import Estimate, judge, mean_estimate
from atts.journal import RecordedRun, open_run
from atts.models import EMBEDDED, info
from atts.pipelines import ConformalGate, Gate, Policy, RandomGate, RoundGate, ScoreRule, TopGate
from atts.pipelines.votes import VoteKind
from scripts.studies.arms import CONTEXT
from scripts.studies.charts import Chart, draw
from scripts.studies.harness import Options, Row, Table, interval, say

AXES = {"target tokens": "target-tokens", "GFLOPs": "flops", "seconds": "seconds"}
_NOTES = (
    "Per problem, 95 % intervals over problems. Fewer samples, other votes and fewer turns are on the policy of the "
    "run. Another rate or gate leaves the record at the first decision that differs: `off-policy` is the share of "
    "rollouts that did, whose answers are those of the recorded path and whose tokens are estimated from the mean "
    "escalation. Points of less than 5 % are worth reading, the others want --live.",
    "Seconds: measured for a run as it was; for replays the run's seconds, scaled by the work at the run's own mean "
    "time per token of each kind.",
)


@dataclass(frozen=True, slots=True)
class Grid:
    """Which policies are replayed."""

    rates: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """One policy: how right its votes are and what they cost, per problem."""

    run: str
    policy: str
    kind: str
    right: Estimate
    target_tokens: float
    gflops: float | None
    seconds: float
    off_policy: float


class Record:
    """A recorded run whose problems have references, and what replays of it cost at its own prices."""

    def __init__(self, directory: Path, flops: tuple[float, float] | None = None) -> None:
        """`flops`: operations a token of the draft and of the target; those of the embedded pair are known.

        :raises JournalError: the directory does not hold a readable run.
        :raises DatasetError: no problem of the run has a reference answer.
        """
        self.run: RecordedRun = open_run(directory)
        self.outcomes = tuple(outcome for outcome in self.run.outcomes() if outcome.problem.answer is not None)
        if not self.outcomes:
            raise DatasetError(str(directory), "no finished problem has a reference answer")
        held, self.seconds = self.run.policy, self.run.state().seconds
        self._calls: defaultdict[str, float] = defaultdict(float)
        score = ScoreRule(**held["score"])
        self.policy = Policy(samples=held["samples"], turns=held["turns"], vote=held["vote"], score=score)
        for node in self.run.nodes():
            self._calls[node.stage] += node.ended - node.started
        models = {role: str(spec.get("model", "")) for role, spec in self.run.manifest.engines.items()}
        if flops is None and all(models.get(name, "").startswith(f"{name}@") for name in EMBEDDED):
            flops = info("draft").flops_per_token(CONTEXT), info("target").flops_per_token(CONTEXT)
        self._flops, self._right = flops, dict[tuple[str, str], bool]()

    def points(self, grid: Grid) -> list[Point]:
        """Every replay the record allows: itself first."""
        return [self._point(*case) for case in self._cases(grid)]

    def _cases(self, grid: Grid) -> Iterator[tuple[str, str, Policy, Gate | RoundGate | None]]:
        policy = self.policy
        yield "as it was", "run", policy, None
        for m in (m for m in grid.samples if m <= policy.samples):
            for vote in get_args(VoteKind):
                yield f"vote of {m}", f"{vote} vote", replace(policy, samples=m, vote=vote), None
        for turns in (turns for turns in grid.turns if turns < policy.bounds().turns):
            yield f"{turns} turns", "turns", replace(policy, turns=turns), None
        every = (turn for outcome in self.outcomes for line in outcome.rollouts for turn in line.turns)
        if any(turn.score is not None for turn in every):  # without scores no gate has anything to decide on
            for rate in grid.rates:
                for name, gate in self._gates(rate):
                    yield f"rate {rate:g}", name, policy, gate

    def _gates(self, rate: float) -> Iterable[tuple[str, Gate | RoundGate]]:
        held: Any = self.run.setting("mode")
        mode: Mode = held if held in get_args(Mode) and held != "split" else "question-turn"
        seed = self.run.manifest.seed
        yield f"conformal ({mode})", ConformalGate(Calibrator(rate, mode, seed=seed))
        yield "top-B", TopGate.of(rate)
        yield "random", RandomGate(rate, seed)

    def _replayed(self, policy: Policy, gate: Gate | RoundGate | None) -> Replayed:
        decided = {event.decision.turn_key: event for event in self.run.decisions()}
        group = answers_for(self.outcomes[0].problem.kind).group
        return replay_policy(self.outcomes, gate, policy, group, decided=decided)

    def _point(self, name: str, kind: str, policy: Policy, gate: Gate | RoundGate | None) -> Point:
        """One policy replayed and billed."""
        found = self._replayed(policy, gate)
        answers = {one.problem: one.answer for one in found.problems}
        if kind == "run":  # as it was: its vote may have ended early, in another order than that of the samples
            answers = {outcome.problem.id: outcome.answer for outcome in self.outcomes}
        right = [float(self._is_right(outcome, answers[outcome.problem.id])) for outcome in self.outcomes]
        (draft, scored, target), n = self._tokens(found), len(right)
        gflops = None
        if self._flops is not None:
            gflops = (draft * self._flops[0] + (scored + target) * self._flops[1]) / n / 1e9
        part = self._call_seconds((draft, scored, target)) / self._whole if self._whole else 0.0
        seconds = self.seconds * part / n
        return Point(
            run=self.run.directory.name,
            policy=name,
            kind=kind,
            right=mean_estimate(right, n),
            target_tokens=target / n,
            gflops=gflops,
            seconds=seconds,
            off_policy=found.off_policy,
        )

    def _is_right(self, outcome: Outcome, answer: str | None) -> bool:
        key = (outcome.problem.id, answer or "")
        if answer is not None and key not in self._right:
            self._right[key] = judge(outcome.problem, answer).is_equal
        return answer is not None and self._right[key]

    def _tokens(self, found: Replayed) -> tuple[float, float, float]:
        """Draft, scored and target tokens; an escalation the record lacks costs the mean of those it has."""
        lines = [line for problem in found.problems for line in problem.rollouts]
        again = {(one.question, one.sample, one.turn) for one in found.decisions}
        taken, recorded = list[int](), 0
        for line in (line for outcome in self.outcomes for line in outcome.rollouts):
            for turn in (turn for turn in line.turns if turn.decision is not None and turn.decision.escalate):
                taken.append(sum(len(chunk.logprobs) for chunk in turn.chunks if chunk.author == "target"))
                recorded += (line.problem, line.sample, turn.index) in again
        extra = sum(decision.escalate for decision in found.decisions) - recorded
        mean = sum(taken) / len(taken) if taken else 0.0
        target = max(0.0, sum(line.target_tokens for line in lines) + extra * mean)
        return sum(line.draft_tokens for line in lines), sum(line.scored_tokens for line in lines), target

    @cached_property
    def _whole(self) -> float:
        return self._call_seconds(self._tokens(self._replayed(self.policy, None)))

    def _call_seconds(self, tokens: tuple[float, float, float]) -> float:
        """Call seconds of that many tokens at this run's prices."""
        usages = [outcome.usage for outcome in self.outcomes]
        made = [sum(getattr(u, name) for u in usages) for name in ("draft_tokens", "scored_tokens", "target_tokens")]
        stages = ("draft", "score", "target")
        prices = [self._calls[stage] / n if n else 0.0 for stage, n in zip(stages, made, strict=True)]
        return sum(price * count for price, count in zip(prices, tokens, strict=True))


def study(options: Options) -> list[Table]:
    """Live runs of the embedded pair: which of rate and number of samples gives most for the arithmetic it takes."""
    rates = options.pick((0.2,), (0.05, 0.1, 0.2, 0.4), (0.05, 0.1, 0.2, 0.4))
    samples = options.pick((2, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16))
    count = options.pick(8, 40, 500)
    with tempfile.TemporaryDirectory() as folder:
        place = options.file(f"frontier-{options.effort}") or Path(folder)
        directories = live(count, place, rates, samples, options.seed)
        found = [Record(directory).points(Grid())[0] for directory in directories]
    rows: list[Row] = []
    for one in sorted(found, key=lambda one: one.gflops or 0.0):
        vote = (round(one.right.value, 4), interval(one.right).partition(" ")[2])
        costs = (round(one.target_tokens, 1), one.gflops, "yes" if _is_unbeaten(one, found) else "")
        rows.append((one.run, one.run.rpartition("-")[0], *vote, *costs))
    table = Table.of(
        f"The frontier: votes against arithmetic, {count} problems, live",
        "run | method | vote right | 95 % | target tokens | GFLOPs | on the frontier",
        rows,
        chart=Chart("GFLOPs", "vote right", "method", "log"),
    )
    return [table]


def _is_unbeaten(one: Point, found: Sequence[Point]) -> bool:
    """No other is at least as right and as cheap, and better in one of them."""
    mine = (one.right.value, -(one.gflops or 0.0))
    others = [(other.right.value, -(other.gflops or 0.0)) for other in found]
    return not any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read or make the runs, print the table, write the pictures."""
    parser = argparse.ArgumentParser(prog="frontier", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories with a journal")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4], metavar="RATE")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2, 4, 8], metavar="M")
    parser.add_argument("--turns", type=int, nargs="*", default=[2, 4, 6, 8], metavar="TURNS")
    parser.add_argument("--live", type=int, metavar="N", help="run the grid on N problems with the embedded pair")
    parser.add_argument("--draft-flops", type=float, help="per token; known for the embedded pair")
    parser.add_argument("--target-flops", type=float, help="per token; known for the embedded pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="where pictures and tables go")
    asked = parser.parse_args(arguments)
    directories = [Path(name) for name in asked.runs]
    if asked.live:
        directories += live(asked.live, asked.out, asked.rates, asked.samples, asked.seed)
    if not directories:
        raise SystemExit("frontier: name a run directory, or give --live N for runs of N problems")
    flops: tuple[float, float] | None = (asked.draft_flops, asked.target_flops)
    flops = None if None in (asked.draft_flops, asked.target_flops) else flops
    grid, found = Grid(tuple(asked.rates), tuple(asked.samples), tuple(asked.turns)), list[Point]()
    for directory in directories:
        say(f"frontier: {directory}")
        found += Record(directory, flops).points(grid)
    print(write(found, asked.out))


def live(count: int, out: Path, rates: Sequence[float], samples: Sequence[int], seed: int) -> list[Path]:
    """One journalled run per method, rate and number of samples on the embedded pair; finished ones are not repeated.

    :raises UsageError: a run ended without all of its problems.
    """
    cases = [(method, 0.0, m) for method in ("draft-only", "target-only") for m in samples]
    cases += [("atts", rate, m) for rate in rates for m in samples]
    directories: list[Path] = []
    for method, rate, m in cases:
        name, base = f"{method}-{rate:g}-{m}" if rate else f"{method}-{m}", Setup()
        policy = replace(base.policy, samples=m)
        setup = replace(base, method=method, rate=rate or base.rate, seed=seed, policy=policy)
        directories.append(out / "runs" / name)
        say(f"frontier: live: {name}")
        status = anyio.run(_run, setup, count, directories[-1])
        if status != "finished":
            raise UsageError(f"the run {name} ended {status}; the same command goes on from there")
    return directories


async def _run(setup: Setup, count: int, directory: Path) -> str:
    return (await evaluate("arithmetic", setup, limit=count, directory=directory)).status


def write(found: Sequence[Point], out: Path) -> str:
    """The table as Markdown; frontier.json, frontier.md and one picture per axis lie in `out` afterwards."""
    rows: list[Row] = []
    for one in found:
        vote = [round(value, 4) for value in (one.right.value, one.right.low, one.right.high)]
        gflops = None if one.gflops is None else round(one.gflops, 4)
        costs = (round(one.target_tokens, 1), gflops, round(one.seconds, 5), round(one.off_policy, 3))
        rows.append((one.run, one.policy, one.kind, *vote, *costs))
    header = "run | policy | kind | vote right | low | high | target tokens | GFLOPs | seconds | off-policy"
    table = Table.of("Accuracy and what it costs", header, rows, *_NOTES)
    out.mkdir(parents=True, exist_ok=True)
    text, several = table.markdown() + "\n", len({one.run for one in found}) > 1
    drawn: list[Row] = []
    for one, row in zip(found, rows, strict=True):  # what is mostly off-policy is drawn as a kind of its own
        label = f"{one.kind}{' (off-policy)' if one.off_policy >= 0.05 else ''}"
        drawn.append((*row[:2], f"{one.run}: {label}" if several else label, *row[3:]))
    for axis, name in AXES.items():
        if any(row[table.columns.index(axis)] for row in rows):
            chart = Chart(axis, "vote right", "kind", x_scaling="log")
            picture = draw(f"Accuracy against {axis}", chart, table.columns, drawn)
            (out / f"frontier-{name}.svg").write_text(picture)
            text += f"![accuracy against {axis}](frontier-{name}.svg)\n"
    (out / "frontier.md").write_text(text)
    record = [{**asdict(one), "right": one.right.as_json()} for one in found]
    (out / "frontier.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return text


if __name__ == "__main__":
    main()
