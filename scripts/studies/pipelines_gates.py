"""Gates on the embedded pair, live: ordered levels that spare scores, and a policy certified on labelled problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from atts.api import Setup
from atts.calibration import Calibrator, StoredScores
from atts.core import Outcome, Problem
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.methods import LabelledRun, SkippingGate, certified_gate, certify_net_runs, certify_runs, frozen_gate
from atts.pipelines import Gate
from scripts.studies.arms import RATE, Grid, Ledger, Pair, Sum, arm, run_block, run_grid
from scripts.studies.harness import Cell, Options, Row, Table, say
from scripts.studies.pipelines_tables import methods, scores_asked

SAMPLES = 8
EPSILON, NET, DELTA = 0.05, 0.02, 0.1
"""Two runs of the target alone differ in a few answers, too: no bound below that can be certified by any number."""


async def ordinal_tables(options: Options) -> list[Table]:
    """The gate of ordered levels, taught by the scores themselves, beside the conformal one at the same rate."""
    grid = Grid(options.pick(20, 150, 600), (options.seed,), 600, options.pick(20, 50, 50))
    ledger, names = Ledger(options.file(f"pipelines-ordinal-{options.effort}-{options.seed}.jsonl")), ["conformal"]
    arms = [arm("conformal", "atts", samples=SAMPLES)]
    for alpha in options.pick((0.05,), (0.05, 0.1), (0.02, 0.05, 0.1)):
        gate = SkippingGate(Calibrator(RATE, Setup().mode, seed=options.seed), alpha)
        names.append(f"ordinal, labels by score, alpha {alpha:g}")
        arms.append(arm(names[-1], "ordinal", samples=SAMPLES, gate=gate))
    async with Pair() as pair:
        await run_grid(arms, grid, ledger, pair, "ordinal")
    title = f"The ordinal gate beside the conformal one, rate {RATE:g}"
    words = "Labels are learnt in this run from the scores, of every chunk at first, then of a seeded 15 %."
    asked = scores_asked("Scores asked for", ledger, names, SAMPLES, "conformal")
    return [methods(title, ledger, names, SAMPLES, words, base="conformal"), asked]


async def certified_table(options: Options) -> list[Table]:
    """Stored scores, labelled runs from the highest rate down, a certificate, the certified gate on test problems."""
    async with Pair() as pair:
        return [await _certified(options, pair)]


async def _certified(options: Options, pair: Pair) -> Table:
    warm, labelled, fresh = options.pick((10, 40, 20), (40, 200, 200), (100, 1000, 1000))
    found, seed = arithmetic("calibration", warm + labelled), options.seed
    stored = await _scores(found[:warm], pair, seed)
    problems, unseen = found[warm:], arithmetic("test", fresh)
    target = await _run(problems, pair, seed)
    runs, rows = list[LabelledRun](), list[Row]()
    certificate = None
    for rate in options.pick((0.3, 0.2), (0.4, 0.3, 0.2, 0.1), (0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)):
        say(f"certificate: rate {rate:g}")
        outcomes = await _run(problems, pair, seed, frozen_gate(rate, stored))
        runs.append(LabelledRun("split", rate, outcomes))
        certificate = certify_runs(target, runs, _is_right, EPSILON, DELTA)
        last = certificate.tested[-1]
        words = "yes" if last.certified else "no"
        rows.append(_row("calibration", rate, outcomes, last.loss, last.p, words))
        if not last.certified:
            break  # a fixed sequence ends at its first failure: lower rates could not be certified
    assert certificate is not None
    net = certify_net_runs(target, runs, _is_right, NET, DELTA)
    if certificate.chosen is not None:
        alone = await _run(unseen, pair, seed + 1)
        outcomes = await _run(unseen, pair, seed + 1, certified_gate(certificate, stored))
        was_right: Mapping[str, bool] = {outcome.problem.id: _is_right(outcome) for outcome in alone}
        lost = sum(was_right[one.problem.id] and not _is_right(one) for one in outcomes) / len(outcomes)
        rows.append(_row("unseen", certificate.chosen.rate, outcomes, lost, None, "deployed"))
    return Table.of(
        f"Certified policy: at most {EPSILON:.0%} of answers lost, confidence {1 - DELTA:.0%}",
        "problems | rate | escalated | lost answers | p | certified | target tokens per problem",
        rows,
        f"{certificate.guarantee}.",
        f"Void with: {certificate.voided_by}.",
        f"Of the net difference: {net.guarantee}.",
    )


def _is_right(outcome: Outcome) -> bool:
    return outcome.answer == outcome.problem.answer


def _row(name: str, rate: float, outcomes: Sequence[Outcome], *tested: Cell) -> Row:
    found = Sum.of(name, outcomes)
    return f"{len(outcomes)} {name}", rate, round(found.rate or 0.0, 3), *tested, round(found.each("target"), 1)


async def _run(problems: Sequence[Problem], pair: Pair, seed: int, gate: Gate | None = None) -> tuple[Outcome, ...]:
    """Under this gate, or the target alone."""
    plan = pair.plan(arm("target-only" if gate is None else "atts", samples=SAMPLES), seed)
    return (await run_block(problems, plan if gate is None else replace(plan, gate=gate)))[0]


async def _scores(problems: Sequence[Problem], pair: Pair, seed: int) -> StoredScores:
    """Scores of every chunk of the draft on problems of their own."""
    plan = pair.plan(arm("atts", samples=4, rate=0.0, early_stop="none"), seed + 77)
    outcomes, _ = await run_block(problems, plan)
    turns = [(o.problem.id, t) for o in outcomes for line in o.rollouts for t in line.turns if t.score is not None]
    return StoredScores(
        tuple(turn.score or 1.0 for _, turn in turns),
        tuple(name for name, _ in turns),
        tuple(turn.index for _, turn in turns),
    )
