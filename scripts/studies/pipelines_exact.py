"""Method exact beside the target alone: every rollout's tokens compared, every difference traced to
its draw.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, takewhile
from typing import Any

import torch

from atts.api import Setup
from atts.core import Outcome, Problem, Rollout, Turn
from atts.evaluators import share_estimate
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local.logit_sampling import batch_sampling, inverse_cdf, probabilities
from atts.models import path as model_path
from atts.sampling import Seed, uniforms
from scripts.studies.arms import Arm, Pair, arm, run_block
from scripts.studies.harness import Options, Row, Table, interval, say
from scripts.studies.machine import pair_name
from scripts.studies.parts import Parts

SAMPLES = 8
BLOCK = 20
NEAR = 1e-4
"""How far a draw may lie from the border between two tokens for rounding to decide which of them it
is.
"""


@dataclass(frozen=True, slots=True)
class Flip:
    """The first place at which two rollouts differ, and how far the draw there lies from the border
    of both tokens.
    """

    problem: str
    sample: int
    place: int
    margin: float  # of the uniform number; inf where the two tokens are not neighbours at all


async def same_transcripts(options: Options) -> list[Table]:
    """Both methods with the same seed on the same problems, each on engines of its own, so that no
    cache is shared.
    """
    count = options.pick(4, 100, 500)
    parts = Parts(
        options.file(f"pipelines-exact-{options.effort}-{options.seed}-{pair_name()}.jsonl")
    )
    arms = [
        arm(method, samples=SAMPLES, early_stop="none", first_wave=0)
        for method in ("exact", "target-only")
    ]
    problems = arithmetic("test", count)
    async with Pair() as one, Pair() as other:
        for start in range(0, count, BLOCK):
            if str(start) not in parts:
                say(f"pipelines-exact: problems from {start} of {count}")
                block = problems[start : start + BLOCK]
                exact = await _run(arms[0], block, one, options.seed)
                alone = await _run(arms[1], block, other, options.seed)
                parts.keep(str(start), _compared(exact, alone, options.seed))
    return [_table(list(parts.values()))]


async def _run(method: Arm, problems: Sequence[Problem], pair: Pair, seed: int) -> list[Outcome]:
    plan = replace(method.setup, seed=seed).plan(pair.draft, pair.targets[1])
    return list((await run_block(problems, plan))[0])


def _compared(exact: Sequence[Outcome], alone: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """What a block came to, in numbers."""
    pairs = [
        pair
        for a, b in zip(exact, alone, strict=True)
        for pair in zip(a.rollouts, b.rollouts, strict=True)
    ]
    kinds = ("drawn_tokens", "target_tokens", "draft_tokens", "wasted_tokens")
    return {
        "problems": len(exact),
        "rollouts": len(pairs),
        "same_votes": sum(a.answer == b.answer for a, b in zip(exact, alone, strict=True)),
        **{name: sum(getattr(one.usage, name) for one in exact) for name in kinds},
        "flips": [
            asdict(_flip(mine, theirs, seed))
            for mine, theirs in pairs
            if _written(mine) != _written(theirs)
        ],
    }


def _written(line: Rollout) -> tuple[object, ...]:
    """All that a rollout wrote, and how it ended."""
    return line.ids("target"), line.finish, line.answer


def _flip(mine: Rollout, theirs: Rollout, seed: int) -> Flip:
    left = mine.ids("target")
    right = theirs.ids("target")
    place = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
    margin = _margin(theirs, place, {*left[place : place + 1], *right[place : place + 1]}, seed)
    return Flip(mine.problem, mine.sample, place - len(mine.prompt.target_ids), margin)


def _margin(line: Rollout, place: int, tokens: set[int], seed: int) -> float:
    """How far the uniform of a place must be moved for the draw there to change between these
    tokens.
    """
    ends = [
        *accumulate((_length(turn) for turn in line.turns), initial=len(line.prompt.target_ids))
    ]
    # the end itself is drawn in the last turn
    at = min(bisect_right(ends, place), len(line.turns)) - 1
    draw = Seed(seed, line.problem, line.sample, line.turns[at].index, "target")
    uniform = float(uniforms(draw, place - ends[at] + 1)[-1])
    with torch.inference_mode():
        logits = _reference()(torch.tensor([line.ids("target")[:place]])).logits[:, -1]
    law = probabilities(
        logits, batch_sampling([Setup().run_policy.sampling_of("target")], logits.shape[-1])
    )
    margin = float((law.cumsum(-1)[0] - uniform).abs().min())
    moved = [uniform, max(0.0, uniform - 1.01 * margin), min(1.0, uniform + 1.01 * margin)]
    drawn = inverse_cdf(law.expand(3, -1), torch.tensor(moved, dtype=torch.float64))
    return margin if tokens <= set(drawn.tolist()) else math.inf


def _length(turn: Turn) -> int:
    return sum(len(chunk.target_ids) for chunk in turn.chunks)


@cache
def _reference() -> Any:
    """The target in transformers, loaded when the first difference is met."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(model_path("target"), dtype=torch.float32).eval()


def _table(blocks: Sequence[dict[str, Any]]) -> Table:
    total = {name: sum(block[name] for block in blocks) for name in blocks[0] if name != "flips"}
    flips = [Flip(**flip) for block in blocks for flip in block["flips"]]
    by_problem = Counter(flip.problem for flip in flips)
    counts = [*by_problem.values(), *[0] * (total["problems"] - len(by_problem))]
    differing = share_estimate((count, SAMPLES) for count in counts)
    near = sum(flip.margin <= NEAR for flip in flips)
    rows: list[Row] = [
        ("problems x samples", f"{total['problems']} x {SAMPLES}"),
        (
            "rollouts identical to the target's alone",
            f"{total['rollouts'] - len(flips)} of {total['rollouts']}",
        ),
        ("rollouts that differ", interval(differing)),
        (
            f"of these, first at a draw within {NEAR:g} of the border of both tokens",
            f"{near} of {len(flips)}",
        ),
        ("votes identical", f"{total['same_votes']} of {total['problems']}"),
        ("tokens of the target", f"{total['target_tokens']:,}"),
        ("of these drawn while it scored", f"{total['drawn_tokens']:,}"),
        ("tokens of the draft", f"{total['draft_tokens']:,}"),
        ("of these thrown away", f"{total['wasted_tokens']:,}"),
    ]
    rows += [
        (f"flip: {one.problem}/{one.sample} at token {one.place}", f"{one.margin:.2g}")
        for one in flips[:20]
    ]
    return Table.of(
        "Method exact beside target-only: the same seed, engines of its own for each",
        "what | number",
        rows,
        "A draw takes the token in whose share of the law a uniform number falls. Scoring reads a "
        "chunk in one piece, "
        "decoding token by token: log-probabilities differ by some 1e-5, and a number so near a "
        "border may fall on its "
        "other side. The law at a flip is computed by `transformers`; inf: both tokens are not "
        "neighbours there.",
        headline=f"method exact wrote {total['rollouts'] - len(flips):,} of {total['rollouts']:,} "
        f"rollouts token for "
        f"token as the target alone; the others part at a draw on a border ({near} of "
        f"{len(flips)})",
    )
