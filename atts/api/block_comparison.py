"""Replace blocks of a model by similar blocks from the same zoo (a store of models), and measure
the loss that each replacement causes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atts.accel import BlockSimilarity, Zoo, check_name, divergence, substituted
from atts.api.evaluation import evaluate_sync
from atts.api.setup import Setup, load_problems
from atts.core import Problem, Sampling, TokenIds
from atts.evaluators import compare_runs
from atts.local import LocalEngine, LocalOptions
from atts.models.stored_blocks import Loss, StoredModel
from atts.pipelines import Policy
from atts.run import RunResult

_POLICY = Policy(samples=1, sampling=Sampling(0.0), early_stop="none")
_ROOM = 2
"""The token limit of a changed model, as a multiple of the token count of the original model's
longest answer.
"""


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A candidate to replace one block of the model, with the loss that this replacement causes."""

    likeness: BlockSimilarity
    loss: Loss


@dataclass(frozen=True, slots=True)
class ComparedBlocks:
    """The possible replacements of blocks of a model, with the loss that each one causes alone.

    `kept` is the loss of the changed model that was stored, or None if no changed model was stored.
    """

    model: str
    pairs: tuple[MeasuredPair, ...]
    kept: Loss | None


def compare_blocks(
    zoo: Path,
    name: str,
    problems: str = "arithmetic[:30]",
    *,
    most: int = 1,
    apart: float = 1.0,
    lossy: float = 0.01,
    keep: str | None = None,
    tell: Callable[[MeasuredPair], None] | None = None,
) -> ComparedBlocks:
    """Replace blocks of a model by similar blocks from the same zoo, one at a time, and measure how
    much the model changes.

    For each block of the model, atts tries the `most` blocks with the nearest parameters, if their
    relative distance is at most `apart`. The relative distance of unrelated blocks is about 1.4.
    Each changed model is compared with the original model in two ways. One is the divergence of the
    next-token distributions on the original's greedy answers to `problems`. The other is the
    correctness of the changed model's own answers.

    With `keep`, atts combines several of the replacements and stores the changed model under that
    name. This model diverges from the original by at most `lossy` nats per token. If no replacement
    is that close, no model is stored. "zoo:DIR/NAME?lossy=..." opens the stored model.

    :raises OptionError: the model is an adapter, or a model with the name in `keep` exists.
    :raises DatasetError: the problems cannot be read.
    :raises ZooError: there is no such model.
    :raises EngineError: a model cannot be opened.
    """
    store = Zoo(zoo)
    if keep is not None:
        check_name(keep, store.names())
    near = store.likenesses(name, most, apart)
    reference = _Reference.of(store, store.model(name), problems)
    measured = list[MeasuredPair]()
    for likeness in near:
        measured.append(MeasuredPair(likeness, reference.loss([likeness])))
        if tell is not None:
            tell(measured[-1])
    kept: Loss | None = None
    if keep is not None:
        chosen = reference.within(measured, lossy)
        if chosen is not None:
            replaced, kept = chosen
            digests = {one.place: one.digest for one in replaced}
            store.keep(keep, reference.model, digests, kept)
    return ComparedBlocks(name, tuple(measured), kept)


@dataclass(frozen=True, slots=True)
class _Reference:
    """The original model and its greedy answers to some problems; changed models are compared with
    these answers.
    """

    zoo: Zoo
    model: StoredModel
    words: str  # name of the dataset that contains `problems`
    problems: tuple[Problem, ...]
    # for each problem: the token ids of its prompt and the answer to it, and how many of these ids
    # belong to the prompt
    texts: tuple[tuple[TokenIds, int], ...]
    right: tuple[bool, ...]

    @classmethod
    def of(cls, zoo: Zoo, model: StoredModel, words: str) -> _Reference:
        problems = load_problems(words)
        with substituted(zoo.directory, model, {}) as folder:
            solved = _solved(folder, problems, _POLICY)
        lines = [outcome.rollouts[0] for outcome in solved.outcomes()]
        texts = tuple((line.ids("draft"), len(line.prompt.ids("draft"))) for line in lines)
        return cls(zoo, model, words, problems, texts, _right(solved, problems))

    def loss(self, chosen: Sequence[BlockSimilarity]) -> Loss:
        """Measure the loss of the model after all `chosen` replacements are made together."""
        longest = max(len(ids) - given for ids, given in self.texts)
        policy = replace(_POLICY, max_tokens=_ROOM * longest)
        with substituted(
            self.zoo.directory, self.model, {one.place: one.digest for one in chosen}
        ) as folder:
            apart = divergence(self.zoo.folder(self.model.name), folder, self.texts)
            right = _right(_solved(folder, self.problems, policy), self.problems)
        compared = compare_runs(self.right, right)
        return Loss(
            model=self.model.name,
            weights=self.model.marks[1],
            stands={one.place: one.other for one in chosen},
            problems=self.words,
            count=len(self.problems),
            tokens=apart.tokens,
            nats=apart.nats,
            flips=apart.flips,
            accuracy=(compared.first, compared.second),
            change=(max(-1.0, compared.difference.low), min(1.0, compared.difference.high)),
        )

    def within(
        self, measured: Sequence[MeasuredPair], bound: float
    ) -> tuple[list[BlockSimilarity], Loss] | None:
        """Choose replacement blocks whose joint loss is at most `bound`, and return them with this
        loss; None if there are none.

        At first, every position gets its best block, unless this block's loss alone is above the
        bound. Then the block with the largest loss is dropped, again and again, until the joint
        loss is within the bound.
        """
        best = dict[str, BlockSimilarity]()
        for pair in sorted(measured, key=lambda pair: pair.loss.nats):
            if pair.loss.nats <= bound:
                best.setdefault(pair.likeness.place, pair.likeness)
        chosen = list(best.values())
        while chosen:
            loss = self.loss(chosen)
            if loss.nats <= bound:
                return chosen, loss
            chosen.pop()
        return None


def _solved(folder: Path, problems: Sequence[Problem], policy: Policy) -> RunResult:
    engine = LocalEngine(folder, options=LocalOptions(worker="thread", device="cpu"), chat=True)
    return evaluate_sync(
        problems, Setup(draft=engine, target=engine, method="draft-only", policy=policy)
    )


def _right(result: RunResult, problems: Sequence[Problem]) -> tuple[bool, ...]:
    verdicts = {problem.problem: problem.is_correct for problem in result.problems}
    return tuple(verdicts.get(problem.id, False) for problem in problems)
