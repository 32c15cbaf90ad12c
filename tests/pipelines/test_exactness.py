"""Tests that pipelines draw from exactly the documented distribution, computed for engines that are
small tables.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio.lowlevel
import pytest
from scipy import stats

from atts.core import (
    Beginning,
    Completion,
    Ending,
    Message,
    Problem,
    Role,
    Rollout,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    TokenIds,
)
from atts.engine import EngineSpec, EngineStats, check_sample, check_score
from atts.graph import Graph, ProblemScope
from atts.pipelines import (
    Answers,
    Chunking,
    Context,
    FixedGate,
    Gate,
    Policy,
    ScoreRule,
    ThresholdGate,
    solve,
)
from atts.run import EngineCalls
from atts.sampling import Seed, uniforms
from atts.testing import run_virtual

# "a" and "b" are letters, and "a" is also the prompt. "n" is the delimiter and "." the end of the
# text.
DRAFT = {"a": [0.4, 0.3, 0.2, 0.1], "b": [0.2, 0.2, 0.5, 0.1], "n": [0.3, 0.5, 0.1, 0.1]}
TARGET = {"a": [0.2, 0.4, 0.2, 0.2], "b": [0.5, 0.1, 0.2, 0.2], "n": [0.1, 0.3, 0.4, 0.2]}
LENGTH = 4
ROLLOUTS = 1200
POLICY = Policy(
    samples=ROLLOUTS // 20,
    turns=8,
    max_tokens=LENGTH,
    chunking=Chunking(draft_tokens=2, target_tokens=2, stop=("n",)),
    sampling=Sampling(),
    early_stop="none",
    system="",
    repeats=99,  # practically no limit on repeated chunks; a limit would change the distribution
)
RAW = Sampling()


class LetterTokenizer:
    """A tokenizer with one token per character; the last id is the end and has no text."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.digest = f"letters-{letters}"

    def encode(self, text: str) -> TokenIds:
        """Return the ids of the letters; a character outside the alphabet is an error of the test."""
        return tuple(self.letters.index(letter) for letter in text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the letters of the ids, without the end."""
        return "".join(self.letters[index] for index in ids if index < len(self.letters))

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return the first letter for any message, so that every text starts in the same state."""
        return (0,)


class TableEngine:
    """An engine that is a Markov chain: the last letter gives the probabilities of the next letter
    and the end.
    """

    def __init__(
        self, table: Mapping[str, Sequence[float]], role: Role = "draft", context_length: int = 256
    ) -> None:
        letters = "".join(table)
        assert all(
            len(row) == len(letters) + 1 and math.isclose(sum(row), 1.0) for row in table.values()
        )
        self.table = table
        self.tokenizer = LetterTokenizer(letters)
        self.spec = EngineSpec(
            name=role,
            model=f"table-{role}",
            tokenizer=self.tokenizer.digest,
            context_length=context_length,
            end_ids=(len(letters),),
            vocabulary=len(letters) + 1,
            engine="table",
        )

    def probability(self, text: str, sampling: Sampling = RAW, start: str = "") -> float:
        """Return the exact probability that a text after `start` (by default the prompt) begins
        with `text`.
        """
        letters = self.tokenizer.letters
        last = start or letters[0]
        product = 1.0
        for letter in text:
            index = len(letters) if letter == "." else letters.index(letter)
            product *= self.distribution(last, sampling)[index]
            last = letter
        return product

    def distribution(self, last: str, sampling: Sampling = RAW) -> tuple[float, ...]:
        """Return the next token's distribution after this letter; of the sampling settings, only
        the temperature matters.
        """
        powered = [p ** (1 / sampling.temperature) for p in self.table[last]]
        return tuple(p / sum(powered) for p in powered)

    async def sample(self, request: SampleRequest) -> Completion:
        """Draw letter after letter from the chain."""
        check_sample(request, self.spec)
        await anyio.lowlevel.checkpoint()
        last = self.tokenizer.letters[request.ids[-1]]
        ids = list[int]()
        logprobs = list[float]()
        ended: Ending = "length"
        for uniform in uniforms(request.seed, request.num_begun + request.max_tokens)[
            request.num_begun :
        ]:
            index = _pick(self.distribution(last, request.sampling), float(uniform))
            ids.append(index)
            logprobs.append(math.log(self.table[last][index]))
            if index in self.spec.end_ids:
                ended = "end"
                break
            last = self.tokenizer.letters[index]
            if any(self.tokenizer.decode(ids).endswith(stop) for stop in request.stop):
                ended = "delimiter"
                break
        return Completion(tuple(ids), self.tokenizer.decode(ids), ended, tuple(logprobs))

    async def score(self, request: ScoreRequest) -> Scores:
        """Read the probabilities of the suffix from the table."""
        check_score(request, self.spec)
        await anyio.lowlevel.checkpoint()
        steps = zip((request.prefix[-1], *request.suffix[:-1]), request.suffix, strict=True)
        chances = [self.table[self.tokenizer.letters[last]][index] for last, index in steps]
        return Scores(tuple(math.log(p) if p > 0 else -math.inf for p in chances))

    def stats(self) -> EngineStats:
        """Return empty counters, because nothing is counted."""
        return EngineStats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        return None


def _pick(distribution: Sequence[float], uniform: float) -> int:
    total = 0.0
    for index, p in enumerate(distribution):
        total += p
        if uniform < total:
            return index
    return max(index for index, p in enumerate(distribution) if p > 0)


class Glued(TableEngine):
    """A planted bug: a delimiter is inserted between chunks."""

    async def sample(self, request: SampleRequest) -> Completion:
        glue = self.tokenizer.encode("n") if len(request.ids) > 1 else ()
        return await super().sample(replace(request, ids=(*request.ids, *glue)))


class Beheaded(TableEngine):
    """A planted bug: the first token of every completion is dropped."""

    async def sample(self, request: SampleRequest) -> Completion:
        whole = await super().sample(replace(request, max_tokens=request.max_tokens + 1))
        ids = whole.ids[1:]
        return replace(whole, ids=ids, text=self.tokenizer.decode(ids), logprobs=whole.logprobs[1:])


class Reusing(TableEngine):
    """A planted bug: for half of the requests, the target's replacement is a chunk that the draft
    would write with the same random numbers.
    """

    async def sample(self, request: SampleRequest) -> Completion:
        if request.seed.key() % 2:
            draft = TableEngine(DRAFT)
            return await draft.sample(replace(request, seed=replace(request.seed, role="draft")))
        return await super().sample(request)


class Drawing(TableEngine):
    """An engine that samples at a chunk's positions while it scores the chunk."""

    def __init__(self, table: Mapping[str, Sequence[float]], role: Role = "target") -> None:
        super().__init__(table, role)
        self.spec = replace(self.spec, capabilities=frozenset({"sample", "score", "draw"}))

    async def score(self, request: ScoreRequest) -> Scores:
        scores = await super().score(request)
        draw = request.draw
        if draw is None:
            return scores
        whole = await self.sample(draw)
        pairs = enumerate(zip(whole.ids, request.suffix, strict=False), 1)
        count = next(
            (at for at, (own, given) in pairs if own != given),
            min(len(whole.ids), len(request.suffix) + 1),
        )
        ended = whole.ended if count == len(whole.ids) else None
        return replace(
            scores, beginning=Beginning(whole.ids[:count], whole.logprobs[:count], ended)
        )


class Leaking(Drawing):
    """A planted bug: tokens that are sampled while scoring use the random numbers that the scored
    chunk was sampled with.
    """

    async def score(self, request: ScoreRequest) -> Scores:
        draw = request.draw and replace(request.draw, seed=replace(request.draw.seed, role="draft"))
        return await super().score(replace(request, draw=draw))


ACCEPT = FixedGate("accept")
ESCALATE = FixedGate("escalate")


def texts(draft: TableEngine, target: TableEngine, policy: Policy, gate: Gate) -> Counter[str]:
    """Count the texts of many rollouts. Each text is cut to a fixed length, and "." marks a text
    that ended earlier.
    """
    context = Context(
        draft,
        target,
        gate,
        Answers(lambda text: None, lambda answers: list(range(len(answers)))),
        EngineCalls,
    )

    async def main() -> list[Rollout]:
        async def one(problem: Problem, scope: ProblemScope) -> tuple[Rollout, ...]:
            return (await solve(problem, policy, context, scope)).rollouts

        problems = [Problem(f"p{i}", "?") for i in range(20)]
        results = await Graph(rollouts=256).run(problems, one)
        return [rollout for result in results for rollout in result.value or ()]

    return Counter(_text(rollout) for rollout in run_virtual(main))


def _text(rollout: Rollout) -> str:
    ended = rollout.finish == "end" and len(rollout.text) < LENGTH
    return rollout.text[:LENGTH] + ("." if ended else "")


def cells(probability: Callable[[str], float]) -> dict[str, float]:
    """Return the exact probability of each possible text: those of the full length, and those that
    end earlier.
    """
    whole = ["".join(letters) for letters in itertools.product("abn", repeat=LENGTH)]
    short = [
        "".join(letters) + "."
        for n in range(LENGTH)
        for letters in itertools.product("abn", repeat=n)
    ]
    found = {text: probability(text) for text in [*whole, *short]}
    assert math.isclose(sum(found.values()), 1.0)
    return found


def p_value(seen: Counter[str], exact: dict[str, float]) -> float:
    """Return the p-value of a chi-square test of the counts against exact probabilities. Texts with
    an expected count below 5 are pooled.
    """
    total = sum(seen.values())
    big = [text for text, p in exact.items() if p * total >= 5]
    observed = [*(seen[text] for text in big), total - sum(seen[text] for text in big)]
    expected = [
        *(exact[text] * total for text in big),
        total * (1 - sum(exact[text] for text in big)),
    ]
    return float(stats.chisquare(observed, expected).pvalue)


def exact(engine: TableEngine, sampling: Sampling = RAW) -> dict[str, float]:
    return cells(lambda text: engine.probability(text, sampling))


REPLACING = replace(POLICY, takeover="replace", answers="verify")
# more texts than for the planted bugs, because a wrong temperature changes the distribution less
TEMPERED = replace(REPLACING, samples=2 * POLICY.samples)


@pytest.mark.parametrize("optimistic", [False, True])
def test_rate_0_draws_from_the_draft(optimistic: bool) -> None:
    """If every chunk is accepted, the distribution is the draft's, with and without drafting ahead."""
    draft = TableEngine(DRAFT, "draft")
    target = TableEngine(TARGET, "target")
    seen = texts(draft, target, replace(POLICY, optimistic=optimistic), ACCEPT)
    assert p_value(seen, exact(draft)) > 1e-4


def test_rate_1_with_replace_draws_from_the_target() -> None:
    """If every chunk is replaced, the distribution is the target's and nothing of the draft
    remains.
    """
    draft = TableEngine(DRAFT, "draft")
    target = TableEngine(TARGET, "target")
    assert p_value(texts(draft, target, REPLACING, ESCALATE), exact(target)) > 1e-4


def test_the_targets_own_temperature_is_used() -> None:
    """At rate 1 with `replace`, only the target's sampling settings count."""
    draft = TableEngine(DRAFT, "draft")
    target = TableEngine(TARGET, "target")
    warm = Sampling(temperature=0.6)
    seen = texts(draft, target, replace(TEMPERED, target_sampling=warm), ESCALATE)
    assert p_value(seen, exact(target, warm)) > 1e-4


def test_continue_alternates_the_two_models() -> None:
    """With takeover `continue`, chunks of draft and target alternate, and the distribution of texts
    equals that of alternating models.
    """
    draft = TableEngine(DRAFT, "draft")
    target = TableEngine(TARGET, "target")
    seen = texts(draft, target, replace(POLICY, takeover="continue", answers="stop"), ESCALATE)
    assert p_value(seen, cells(lambda text: _alternating(text, (draft, target)))) > 1e-4


def _alternating(
    text: str, engines: Sequence[TableEngine], last: str = "a", turn: int = 0, used: int = 0
) -> float:
    """Return the probability of a text if draft and target alternate with chunks of up to two
    letters.

    If the draft ends the text, the target continues it; if the target ends it, the text is
    complete.
    """
    if not text:
        return 1.0
    end = engines[turn].probability(".", start=last)
    letter = text[0]
    handed_over = end * _alternating(text, engines, last, 1) if turn == 0 else 0.0
    if letter == ".":
        return handed_over if turn == 0 else end
    over = used == 1 or letter == "n"
    following = _alternating(
        text[1:], engines, letter, 1 - turn if over else turn, 0 if over else used + 1
    )
    return handed_over + engines[turn].probability(letter, start=last) * following


@pytest.mark.parametrize("bug", [Glued, Beheaded, Reusing])
def test_each_planted_bug_fails_the_test(bug: type[TableEngine]) -> None:
    """The chi-square test rejects each engine with a planted bug, so it has power."""
    draft = TableEngine(DRAFT, "draft")
    target = bug(TARGET, "target")
    assert p_value(texts(draft, target, REPLACING, ESCALATE), exact(TableEngine(TARGET))) < 1e-6


def test_a_wrong_temperature_fails_the_test() -> None:
    """The chi-square test also rejects sampling at another temperature than requested."""
    draft = TableEngine(DRAFT, "draft")
    target = TableEngine(TARGET, "target")
    seen = texts(
        draft, target, replace(TEMPERED, target_sampling=Sampling(temperature=0.8)), ESCALATE
    )
    assert p_value(seen, exact(target)) < 1e-6


GATED = replace(REPLACING, score=ScoreRule("mean"))
# a gate that escalates chunks whose perplexity under the target is above 6
CUT = ThresholdGate(6.0)


def gated(
    text: str, draft: TableEngine, target: TableEngine, last: str = "a", used: int = 0
) -> float:
    """Return the probability of a text if each chunk that the gate escalates is replaced by a chunk
    of the target.
    """
    if not text:
        return 1.0
    size = min(2, LENGTH - used)
    proposed = pieces(draft, last, size)
    instead = pieces(target, last, size)
    went = sum(chance for piece, chance in proposed.items() if not stays(piece, target, last))
    return sum(
        (went * chance + proposed[piece] * stays(piece, target, last))
        * gated(text[len(piece) :], draft, target, piece[-1], used + len(piece))
        for piece, chance in instead.items()
        if text.startswith(piece)
    )


def pieces(engine: TableEngine, last: str, size: int) -> dict[str, float]:
    """Return the probability of every chunk of up to this many letters."""
    short = [letter for letter in "abn." if size == 1 or letter in "n."]
    long = [first + second for first in "ab" for second in "abn."] if size > 1 else []
    return {piece: engine.probability(piece, start=last) for piece in [*short, *long]}


def stays(piece: str, target: TableEngine, last: str) -> bool:
    """Return whether the gate accepts a chunk. If the chunk ends the text, the end itself has no
    score.
    """
    written = piece.removesuffix(".")
    return (
        bool(written)
        and target.probability(written, start=last) ** (-1 / len(written)) <= CUT.threshold
    )


@pytest.mark.parametrize("kind", [TableEngine, Drawing])
def test_a_replacement_is_drawn_from_the_target(kind: type[TableEngine]) -> None:
    """The text that replaces an escalated chunk has the target's distribution.

    The gate reads the chunk and its score, but the takeover's random numbers depend on neither of
    them.
    """
    draft = TableEngine(DRAFT)
    target = kind(TARGET, "target")
    exactly = cells(lambda text: gated(text, draft, target))
    assert p_value(texts(draft, target, GATED, CUT), exactly) > 1e-4


@pytest.mark.parametrize("kind", [TableEngine, Drawing, Leaking])
def test_a_takeover_with_its_chunks_stream_fails_the_test(
    kind: type[TableEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chi-square test rejects a takeover that uses the random numbers of the rejected chunk,
    because its text then depends on the rejection.
    """
    draft = TableEngine(DRAFT)
    target = kind(TARGET, "target")
    exactly = cells(lambda text: gated(text, draft, target))
    if kind is not Leaking:
        monkeypatch.setattr(
            "atts.pipelines.builder.Seed", lambda *place: replace(Seed(*place), role="draft")
        )
    assert p_value(texts(draft, target, GATED, CUT), exactly) < 1e-6
