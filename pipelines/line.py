"""One line of reasoning, turn by turn: propose a chunk, have it judged, settle what enters the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atts.core import (
    Chunk,
    Completion,
    Decision,
    Finish,
    Problem,
    Prompt,
    Role,
    Rollout,
    SampleRequest,
    TokenIds,
    Turn,
    Usage,
)
from atts.engine import Engine
from atts.errors import ContextOverflow, EngineError
from atts.graph import RolloutScope
from atts.pipelines.asking import ask_sample
from atts.pipelines.chunks import chunk_of, forced
from atts.pipelines.context import Context
from atts.pipelines.policy import Policy
from atts.pipelines.scores import settled
from atts.pipelines.siblings import Siblings
from atts.seeds import Seed

Scope = RolloutScope[Rollout]
ROLES: tuple[Role, ...] = ("draft", "target")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chunk the drafter wrote and what is known of it before anyone decides."""

    chunk: Chunk
    answer: str | None
    attempt: int = 0
    score: float | None = None
    flaw: str = ""  # why there is no score although one was asked for
    doubt: int = 0  # the token that the target doubts first; 0 also where that is not known


class Line:
    """A rollout that grows; every wait is a node of the graph, every turn a new frozen value."""

    def __init__(
        self, problem: Problem, prompt: Prompt, policy: Policy, context: Context, siblings: Siblings, scope: Scope
    ) -> None:
        sample = scope.sample
        self.policy = policy
        self.context = context
        self.scope = scope
        self.siblings = siblings
        self.rollout = Rollout(problem.id, sample, prompt)
        self.score = settled(policy.score, context.draft.spec, context.target.spec)
        self.waits_left = policy.waits
        self._asked_again_at = 0  # characters: an answer before the last "wait" no longer ends the rollout
        self._earlier: str | None = None
        self._ahead: Chunk | None = None
        self._loose = 0  # tokens written that have neither entered a turn nor been discarded by one
        self._read: tuple[str, str | None] = ("", None)  # the last text that was looked through, and its answer
        self._ids_after: tuple[Turn, ...] | None = None  # the turns that `_ids` belong to
        self._ids: dict[Role, TokenIds] = {}
        siblings.rollouts[sample] = self.rollout

    @property
    def turn(self) -> int:
        """The index of the turn being worked on."""
        return len(self.rollout.turns)

    async def propose(self, attempt: int = 0) -> Proposal:
        """Let the drafter write the next chunk, unless it was written ahead."""
        chunk, self._ahead = self._ahead, None
        if chunk is None or attempt:
            chunk = await self.write(self.policy.drafter, (), attempt)
        return Proposal(chunk, self.answer_with(chunk), attempt)

    async def propose_ahead(self, chunk: Chunk) -> None:
        """Write the chunk after `chunk` before anyone has judged it: same prefix, same seed, same law as later.

        A failure is left to the later attempt; whoever rejects `chunk` calls `drop_ahead`.
        """
        if chunk.ended == "end" or self.turn + 1 >= self.policy.turns or self.room_left([chunk]) < 1:
            return
        try:
            self._ahead = await self.write(self.policy.drafter, (chunk,), turn=self.turn + 1)
        except EngineError:
            self._ahead = None

    def drop_ahead(self) -> None:
        """Forget what was written ahead: its prefix is not what entered the rollout."""
        if self._ahead is not None:
            self.count(Usage(wasted_tokens=self._ahead.tokens))
            self._loose = max(0, self._loose - self._ahead.tokens)
        self._ahead = None

    async def write(self, role: Role, pending: Sequence[Chunk], attempt: int = 0, turn: int | None = None) -> Chunk:
        """One piece of text after the rollout and the `pending` chunks, from the exact token state.

        :raises ContextOverflow: not one more token fits.
        :raises EngineError: the engine failed for good.
        """
        engine, room = self.engine(role), self.room_left(pending)
        turn = self.turn if turn is None else turn
        ids = self.ids(role, pending)
        if room < 1:
            raise ContextOverflow(engine.spec.name, len(ids) + 1, len(ids) + room)
        request = SampleRequest(
            ids,
            min(self.policy.limit(role), room),
            self.policy.sampling_of(role),
            Seed(self.context.seed, self.rollout.problem, self.rollout.sample, turn, role, attempt),
            self.policy.chunking.stop,
            rollout=self.name,
        )
        tokens = len(ids) + request.max_tokens
        limit = self.policy.timeout_seconds
        completion = await self.scope.call(role, ask_sample, engine, request, limit, turn=turn, tokens=tokens)
        self._spend(role, request, completion)
        chunk = chunk_of(completion, role, self.context.draft, self.context.target)
        self.context.listener.written(self.rollout, chunk)
        return chunk

    def enter(
        self,
        chunks: Sequence[Chunk],
        discarded: Sequence[Chunk] = (),
        decision: Decision | None = None,
        score: float | None = None,
        note: str = "",
        saved: int = 0,
    ) -> None:
        """Close the turn with these chunks, and the rollout if that was its end; `saved` of what is discarded stays."""
        turn = Turn(self.turn, tuple(chunks), tuple(discarded), score, decision, note)
        self.count(Usage(wasted_tokens=sum(chunk.tokens for chunk in discarded) - saved))
        self.rollout = replace(self.rollout, turns=(*self.rollout.turns, turn))
        self.context.listener.turned(self.rollout, turn)
        self._conclude()

    def adopt(self, other: Rollout, discarded: Chunk, decision: Decision, score: float | None) -> None:
        """Go on from a sibling's line up to and with this turn; its turns replace those reported before."""
        self.count(Usage(wasted_tokens=discarded.tokens))
        here = other.turns[self.turn]
        note = f"sample {self.rollout.sample} adopted the line of sample {other.sample}"
        turn = Turn(self.turn, here.chunks, (*here.discarded, discarded), score, decision, note)
        self.rollout = replace(self.rollout, turns=(*other.turns[: self.turn], turn))
        for each in self.rollout.turns:
            self.context.listener.turned(self.rollout, each)
        self._conclude()

    def close(self, finish: Finish, answer: str | None = None, why: str = "") -> None:
        """End the rollout."""
        self.rollout = replace(self.rollout, finish=finish, answer=answer, error=why)
        self.siblings.rollouts[self.rollout.sample] = self.rollout

    def _conclude(self) -> None:
        self._loose = 0 if self._ahead is None else self._ahead.tokens
        finish, answer, why = self._ending()
        if finish in ("answer", "end") and self.waits_left and self.room_left() > 1:
            self._wait(answer)
        elif finish:
            answer = answer or self._earlier
            self.close("answer" if answer is not None and finish == "end" else finish, answer, why)
        self.siblings.rollouts[self.rollout.sample] = self.rollout

    def answer_with(self, chunk: Chunk) -> str | None:
        """The answer the rollout would have with this chunk; a box that is cut is none."""
        return self._extract(self.rollout.text + chunk.text, chunk)

    def _extract(self, text: str, last: Chunk | None) -> str | None:
        asked = text[self._asked_again_at :]
        if self._read[0] != asked:  # a chunk that is proposed and then enters is looked through once
            answer = self.context.answers.extract(asked)
            if answer is not None and last is not None and last.ended == "length":
                # "The answer is 1" may be the beginning of 12: an answer the next digit would change is not yet one.
                answer = answer if self.context.answers.extract(asked + "0") == answer else None
            self._read = asked, answer
        return self._read[1]

    def _ending(self) -> tuple[Finish | None, str | None, str]:
        last = self.rollout.turns[-1]
        answer = self._extract(self.rollout.text, last.chunks[-1] if last.chunks else None)
        if answer is not None:
            return "answer", answer, ""
        if not last.chunks or not any(chunk.draft_ids or chunk.target_ids for chunk in last.chunks):
            return "end", None, "nothing was written"
        if last.chunks[-1].ended == "end":
            return "end", None, ""
        if self._repeats():
            return "end", None, f"the same chunk {self.policy.repeats} times in a row"
        if len(self.rollout.turns) >= self.policy.turns:
            return "turns", None, ""
        if self.room_left() < 1:
            return "tokens", None, ""
        return ("end", None, "low confidence") if self._doubtful() else (None, None, "")

    def _doubtful(self) -> bool:
        stop = self.policy.confidence_stop
        if stop is None or self.rollout.sample < stop.warmup:
            return False
        warmup = [line for sample, line in self.siblings.rollouts.items() if sample < stop.warmup and line.finish]
        return stop.is_below(self.rollout, warmup)

    def ids(self, role: Role, pending: Sequence[Chunk] = ()) -> TokenIds:
        """That model's ids of the rollout and of chunks that have not entered it yet."""
        if self._ids_after is not self.rollout.turns:
            self._ids_after, self._ids = self.rollout.turns, {}
        if role not in self._ids:
            self._ids[role] = self.rollout.ids(role)
        return sum((chunk.ids(role) for chunk in pending), self._ids[role])

    def room_left(self, pending: Sequence[Chunk] = ()) -> int:
        """Tokens this rollout may still grow by after the `pending` chunks: its own limit and both contexts."""
        written = len(self.ids("target")) - len(self.rollout.prompt.target_ids)
        room = self.policy.max_tokens - written
        for role in ROLES:
            room = min(room, self.engine(role).spec.context_length - len(self.ids(role)))
        return room - max((sum(len(chunk.ids(role)) for chunk in pending) for role in ROLES), default=0)

    def engine(self, role: Role) -> Engine:
        """The engine that plays this role."""
        return self.context.draft if role == "draft" else self.context.target

    def _repeats(self) -> bool:
        texts = [chunk.text for turn in self.rollout.turns for chunk in turn.chunks if chunk.text.strip()]
        tail = texts[-self.policy.repeats :]
        return len(tail) == self.policy.repeats and len(set(tail)) == 1

    def _wait(self, answer: str | None) -> None:
        """Budget forcing: put words into the rollout's mouth and let it go on; an answer so far is kept in reserve."""
        self.waits_left -= 1
        self._earlier = answer or self._earlier
        words = forced(self.policy.wait_text, self.policy.drafter, self.context.draft, self.context.target)
        turn = Turn(self.turn, (words,), note="budget forcing")
        self.rollout = replace(self.rollout, turns=(*self.rollout.turns, turn))
        self._asked_again_at = len(self.rollout.text)
        self.context.listener.turned(self.rollout, turn)

    @property
    def name(self) -> str:
        """Where caches may be warm."""
        return f"{self.rollout.problem}/{self.rollout.sample}"

    def _spend(self, role: Role, request: SampleRequest, completion: Completion) -> None:
        new, read = len(completion.ids), max(0, len(request.ids) - completion.cached_tokens)
        self._loose += new
        if role == "draft":
            self.count(Usage(draft_tokens=new, draft_prefill_tokens=read, calls=1))
        else:
            self.count(Usage(target_tokens=new, target_prefill_tokens=read, calls=1))

    def waste_unfinished(self) -> None:
        """Nobody wants any more what was written since the last whole turn."""
        self.count(Usage(wasted_tokens=self._loose))
        self._ahead, self._loose = None, 0

    def count(self, usage: Usage) -> None:
        """Add to what this rollout cost."""
        self.rollout = replace(self.rollout, usage=self.rollout.usage + usage)
