"""Lays out the runs of a mathematics evaluation as the paper's table does, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, reduce
from itertools import chain
from operator import add
from typing import Any

from atts.api import Pair, answers_for
from atts.core import Role, Usage
from atts.evaluators import Dataset, Estimate, Samples, compare_runs, samples_of, score, share_estimate
from atts.run import RunResult
from scripts.studies.harness import Row, Spread, Table, interval, points


@dataclass(frozen=True)
class Measured:
    """The runs of one arm, a seed each, on the same problems."""

    name: str
    what: str
    runs: tuple[RunResult, ...]

    @cached_property
    def graded(self) -> list[Samples]:
        """Every problem's samples of all runs together."""
        every = zip(*(run.problems for run in self.runs), strict=True)
        together = [
            replace(lines[0], samples=tuple(chain.from_iterable(line.samples for line in lines))) for lines in every
        ]
        group = answers_for("math").group
        found = (samples_of(one.problem, one.complete_samples, group) for one in together)
        return [each for each in found if each is not None]

    @cached_property
    def scores(self) -> Mapping[str, Estimate]:
        """pass@1, the vote and any of as many samples as one run has."""
        card = score(self.graded, ks=(self.size,)) if self.graded else score([])
        return card.estimates

    @property
    def size(self) -> int:
        """Samples a problem in one run."""
        return max((len(line.samples) for run in self.runs for line in run.problems), default=1)

    def estimate(self, metric: str) -> Estimate:
        """By name: "any", "vote" or "one"; with one sample a problem all three are the same."""
        wanted = {"any": f"pass@{self.size}", "vote": f"maj@{self.size}", "one": "pass@1"}[metric]
        return self.scores.get(wanted, self.scores["pass@1"])

    def by_problem(self) -> dict[str, float]:
        """The share of right samples."""
        return {held.problem: sum(one is True for one in held.correct) / len(held.correct) for held in self.graded}

    @cached_property
    def rate(self) -> Estimate:
        """The share of judged chunks that went to the target."""
        handed, asked = Counter[str](), Counter[str]()
        for line in (line for run in self.runs for line in run.problems):
            handed[line.problem] += line.escalated
            asked[line.problem] += line.judged
        return share_estimate((handed[problem], count) for problem, count in asked.items())

    @property
    def usage(self) -> Usage:
        """Tokens of all runs."""
        return reduce(add, (run.usage for run in self.runs), Usage())

    @property
    def failed(self) -> int:
        """Problems that came to nothing; they are in no rate."""
        return sum(line.status == "failed" for run in self.runs for line in run.problems)

    def speed_up(self, alone: Measured) -> Spread:
        """The target's seconds over this arm's, run by run."""
        return Spread.of([one.seconds / mine.seconds for one, mine in zip(alone.runs, self.runs, strict=True)])


def tables(dataset: Dataset, pair: Pair, rate: float, measured: Sequence[Measured]) -> list[Table]:
    """The paper's layout where its three runs are there, and every run by itself."""
    arms = {one.name: one for one in measured}
    complete = {"target", "marginal", "conditional"} <= arms.keys()
    return [*([_paper(dataset, pair, rate, arms)] if complete else []), _runs(dataset, rate, measured)]


def _paper(dataset: Dataset, pair: Pair, rate: float, arms: Mapping[str, Measured]) -> Table:
    target, others = arms["target"], (arms["marginal"], arms["conditional"])
    words = {"any": f"right in any of {target.size}", "vote": f"vote of {target.size}", "one": "one sample"}
    rows: list[Row] = []
    for metric, word in words.items():
        costs = ("", "", "", "")
        if not rows:
            speeds = [_spread(one.speed_up(target)) for one in others]
            costs = (speeds[0], speeds[1], interval(others[0].rate), interval(others[1].rate))
        rows.append((word, *(interval(one.estimate(metric)) for one in (*others, target)), *costs))
    known, notes = pair.published.get(dataset.name.split("[")[0]), list(_notes(dataset, target))
    if known:
        speeds = [f"{known.marginal:.2f}", f"{known.conditional:.2f}"]
        rows.append(("published, any of 16", f"{known.accuracy:.3f}", "", "", *speeds, "", ""))
        notes.append(
            "The published row is the authors' own: answers judged by a model, their hardware, the first 15 problems "
            f"of AIME, another 50 for AMC. {pair.name} was not run by this project, which had no GPUs for it."
        )
    return Table.of(
        f"{dataset.name}: {pair.draft} drafts, {pair.target} is the target",
        "| accuracy, marginal | accuracy, conditional | target accuracy | speed-up, marginal | speed-up, conditional | "
        f"rate, marginal (nominal {rate:g}) | rate, conditional",
        rows,
        *notes,
    )


def _notes(dataset: Dataset, target: Measured) -> tuple[str, str]:
    repeats = len(target.runs)
    how = f"median and range of {repeats} repeats" if repeats > 1 else "one measurement; --repeats gives a range"
    return (
        f"{len(dataset)} problems (digest {dataset.digest[:12]}), {target.size} samples, {repeats} seed"
        f"{'s' * (repeats > 1)}; 95 % intervals over problems. Answers are graded here, by equivalence.",
        f"Speed-up: seconds of the target alone over seconds of the arm, {how}. Arms run one after another on the same "
        "engines, whose caches stay warm.",
    )


def _runs(dataset: Dataset, rate: float, measured: Sequence[Measured]) -> Table:
    alone = next((one for one in measured if one.name == "target"), None)
    failed = sum(one.failed for one in measured)
    return Table.of(
        f"{dataset.name}: every run",
        f"run | any | vote | one sample | minus target, points | rate (nominal {rate:g}) | draft tokens | scored | "
        "target tokens | of target alone | seconds",
        [_run(one, alone) for one in measured],
        "The difference is of single samples, paired by problem.",
        *([f"{failed} problems failed and are in no rate; the journals say why."] if failed else []),
    )


def _run(one: Measured, alone: Measured | None) -> Row:
    accuracies = tuple(interval(one.estimate(metric)) for metric in ("any", "vote", "one"))
    usage, whole = one.usage, alone.usage.target_tokens if alone else 0
    tokens = (usage.draft_tokens, usage.scored_tokens, usage.target_tokens)
    share = f"{usage.target_tokens / whole:.1%}" if whole else "-"
    seconds = _spread(Spread.of([run.seconds for run in one.runs]), ".1f")
    return one.name, *accuracies, _difference(one, alone), interval(one.rate), *tokens, share, seconds


def _difference(one: Measured, alone: Measured | None) -> str:
    if alone is None or alone is one:
        return "-"
    mine, theirs = one.by_problem(), alone.by_problem()
    common = [name for name in theirs if name in mine]
    if not common:
        return "-"
    return points(compare_runs([theirs[name] for name in common], [mine[name] for name in common]).difference, 1)


def as_json(
    dataset: Dataset, pair: Pair, engines: Mapping[Role, str], rate: float, measured: Sequence[Measured]
) -> dict[str, Any]:
    """All of it as one strict JSON object."""
    alone = next((one for one in measured if one.name == "target"), None)
    known = pair.published.get(dataset.name.split("[")[0])
    return {
        "dataset": {"name": dataset.name, "source": dataset.source, "digest": dataset.digest, "problems": len(dataset)},
        "pair": pair.name,
        "engines": dict(engines),
        "nominal_rate": rate,
        "published": asdict(known) if known else None,
        "arms": {one.name: _arm_json(one, alone) for one in measured},
    }


def _arm_json(one: Measured, alone: Measured | None) -> dict[str, Any]:
    speed_up = [] if alone is None else [a.seconds / b.seconds for a, b in zip(alone.runs, one.runs, strict=True)]
    return {
        **{metric: one.estimate(metric).as_json() for metric in ("any", "vote", "one")},
        "rate": one.rate.as_json(),
        "usage": asdict(one.usage),
        "seconds": [run.seconds for run in one.runs],
        "speed_up": speed_up,
        "failed": one.failed,
    }


def _spread(spread: Spread, digits: str = ".2f") -> str:
    if spread.n == 1:
        return f"{spread.median:{digits}}"
    return f"{spread.median:{digits}} [{spread.low:{digits}}, {spread.high:{digits}}]"
