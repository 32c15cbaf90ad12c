"""Fits the cost formula to this machine and asks whether it predicts runs that it was not fitted
to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Literal, get_args

import anyio
import torch

from atts.core import Role
from atts.testing import run_virtual
from scripts.studies.harness import Options, Row, Table, pair_mark, say
from scripts.studies.modelled import Cost
from tests.studies.batched_engine import BatchedEngine, Host
from tests.studies.fitted import Observation, fit
from tests.studies.measured import ROLES, THREADS, Live, Run, Seen, Taken, measure, pieces_of, run

Clock = Literal["wall", "processor"]


def local_validation(options: Options) -> list[Table]:
    """The fitted costs of this machine, and predicted beside measured times of live runs; needs
    Linux's counters.
    """
    if not THREADS.exists():
        say("scale: no validation: this system does not count what each thread uses")
        return []
    torch.set_num_threads(1)
    rounds = options.pick(2, 4, 12)
    problems = options.pick(4, 8, 16)
    lives = [
        Live(method, 8, problems, 64) for method in ("atts", "top-b", "target-only", "draft-only")
    ]
    lives += [Live("atts", 8, problems, 16)] if options.effort != "quick" else []
    seen = anyio.run(measure, rounds, lives, options.seed)
    costs, table = _fitted(seen)
    return [table, _predicted(seen, costs, options.seed)]


def _fitted(seen: Seen) -> tuple[Mapping[Role, Cost], Table]:
    """Coefficients of both engines from pieces of work alone, and how well they fit those."""
    costs: dict[Role, Cost] = {}
    rows: list[Row] = []
    for role in ROLES:
        kinds = [
            [piece.seen for piece in pieces]
            for (name, _), pieces in seen.pieces.items()
            if name == role
        ]
        cost, error = fit([_typical(every) for every in kinds])
        costs[role] = replace(cost, origin="fitted on this machine")
        coefficients = (
            1e3 * cost.step,
            1e6 * cost.sequence,
            1e9 * cost.cached,
            1e6 * cost.prefilled,
        )
        shares = (_stretch(seen, role, "processor"), _stretch(seen, role, "wall"))
        rows.append((role, *coefficients, 1e6 * cost.request, *shares, error))
    return costs, Table.of(
        "The embedded pair's costs on this machine",
        "engine | a, ms a step | b, us a sequence | c, ns a KV token | d, us a fed token | us a "
        "request | "
        "beside the other, processor | beside the other, wall | fit's relative error",
        rows,
        f"Least squares over {len(pieces_of('draft'))} and {len(pieces_of('target'))} kinds of "
        f"work (decoding at "
        "several batches and lengths, rollouts that come and go, for the target scoring, too), "
        "processor seconds of "
        "the engine's thread, median of all rounds; no coefficient below 0.",
        f"Handing a request over costs the event loop {1e6 * _handing(seen):.0f} us. Beside the "
        f"other: how much longer "
        "the same work takes while the other engine has always something to do.",
    )


def _typical(every: Sequence[Observation]) -> Observation:
    return Observation(
        steps=fmean(one.steps for one in every),
        sequences=fmean(one.sequences for one in every),
        cached=fmean(one.cached for one in every),
        fed=fmean(one.fed for one in every),
        seconds=median(one.seconds for one in every),
        calls=fmean(one.calls for one in every),
    )


def _handing(seen: Seen) -> float:
    """The event loop's processor seconds for one request in pieces whose requests come and go as in
    a run.
    """
    busy = [
        pieces for (_, kind), pieces in seen.pieces.items() if kind.turns > 1 and kind.batch > 2
    ]
    return median(piece.taken.loop / piece.calls for pieces in busy for piece in pieces)


def _stretch(seen: Seen, role: Role, clock: Clock) -> float:
    """What the other engine's work adds to a step of this one."""

    def took(taken: Taken) -> float:
        return taken.wall if clock == "wall" else taken.engines[role]

    return max(1.0, median(took(beside) / took(alone) for alone, beside in seen.beside[role]))


def _predicted(seen: Seen, costs: Mapping[Role, Cost], seed: int) -> Table:
    """Every live run beside its simulation, part by part."""
    rows: list[Row] = []
    errors: dict[Clock, list[float]] = {"wall": [], "processor": []}
    for live, every in seen.runs.items():
        guesses = [_guess(seen, costs, live, one, seed) for one in every]
        taken = [one.taken for one in every]
        for clock in get_args(Clock):
            errors[clock].append(
                _off([getattr(g, clock) for g in guesses], [getattr(t, clock) for t in taken])
            )
        parts = [
            _off([g.engines[role] for g in guesses], [t.engines[role] for t in taken])
            for role in ROLES
        ]
        parts.append(_off([g.loop for g in guesses], [t.loop for t in taken]))
        wall = sum(one.wall for one in taken)
        waited = sum(one.waited for one in taken)
        calls = fmean(one.tape.calls for one in every)
        processor = fmean(one.processor for one in taken)
        measured = (
            live.name,
            len(every),
            round(calls),
            processor,
            _percent(errors["processor"][-1]),
        )
        walls = (wall / len(every), _percent(errors["wall"][-1]), f"{waited / wall:.0%}")
        rows.append((*measured, *map(_percent, parts), *walls))
    runs = [one for every in seen.runs.values() for one in every]
    waited = sum(one.taken.waited for one in runs) / sum(one.taken.wall for one in runs)
    words = f"wall time {_words(errors['wall'])}" if waited < 0.05 else (
        f"wall time cannot be judged here: threads that were ready had to wait for a processor for "
        f"{waited:.0%} of it "
        f"({_words(errors['wall'])})"
    )  # fmt: skip
    said = (
        f"{len(runs)} live runs of {len(seen.runs)} kinds: processor time "
        f"{_words(errors['processor'])} (bar: 10 %); "
        f"{words}."
    )
    return Table.of(
        "Predicted and measured times on this machine",
        "live run on the embedded pair | runs | calls | processor s | predicted | draft | target | "
        "event loop | "
        "wall s | predicted wall | waited for a processor",
        rows,
        said,
        f"Embedded pair: {pair_mark()}. {next(iter(seen.runs)).problems} problems a run, none "
        f"twice; seconds are means "
        "of the runs, errors those of the totals: predicted over measured, less one. Draft, "
        "target, event loop: the "
        "same error of each thread. Waited: how long one of the threads was ready and had no "
        "processor, of the wall.",
        "Fitted to processor seconds of pieces of work: no run was used, but for what the same "
        "pipelines cost the "
        "event loop on engines that answer at once. The gate of atts is frozen, so that the "
        "simulated run asks for "
        "what the live one said.",
        headline=said,
    )


def _off(guess: Sequence[float], real: Sequence[float]) -> float:
    return sum(guess) / sum(real) - 1 if sum(real) > 1e-3 else math.nan


def _percent(error: float) -> str:
    return f"{error:+.1%}" if math.isfinite(error) else "-"


def _words(errors: Sequence[float]) -> str:
    rms = math.sqrt(sum(error**2 for error in errors) / len(errors))
    return f"off by {rms:.1%} (root mean square), {max(map(abs, errors)):.1%} at most"


def _guess(seen: Seen, costs: Mapping[Role, Cost], live: Live, one: Run, seed: int) -> Taken:
    """What the run should have taken: on the wall's clock as the engines get in each other's way
    there, and so on.
    """
    call = one.host + _handing(seen)
    found = dict[Clock, Taken]()
    for clock in get_args(Clock):
        shared: dict[Role, Cost] = {}
        for role, cost in costs.items():
            shared[role] = replace(cost, share=_stretch(seen, role, clock), call=call)
        found[clock] = run_virtual(_predict, live, one, shared, seed)
    return replace(found["processor"], wall=found["wall"].wall)


async def _predict(live: Live, one: Run, costs: Mapping[Role, Cost], seed: int) -> Taken:
    """The run again on engines that cost what was fitted."""
    host = Host()
    tape = one.tape
    async with (
        BatchedEngine("draft", tape, costs["draft"], chunk=512, batch=256, host=host) as draft,
        BatchedEngine("target", tape, costs["target"], chunk=512, batch=256, host=host) as target,
    ):
        wall = await run(live, one.first, draft, target, seed)
        calls = sum(engine.stats().requests * engine.cost.call for engine in (draft, target))
        return Taken(wall, {"draft": draft.load.busy, "target": target.load.busy}, calls)
