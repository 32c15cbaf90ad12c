"""A rollout under construction, turn by turn: what was written, what entered it, and whether that
was its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from atts.core import (
    Beginning,
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
from atts.errors import ContextOverflow, EngineError
from atts.graph import RolloutScope
from atts.pipelines.chunks import after, chunk_of, continued, forced
from atts.pipelines.context import Context, RolloutEngine
from atts.pipelines.policy import ConfidenceStop, Policy
from atts.pipelines.scores import resolved
from atts.pipelines.siblings import Siblings
from atts.sampling import Seed

Scope = RolloutScope[Rollout]
ROLES: tuple[Role, ...] = ("draft", "target")
# characters without an answer, from which on they are not looked through again after every chunk
_SEARCHED = 1_200


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chunk the drafter wrote and what is known of it before anyone decides."""

    chunk: Chunk
    place: int  # where the chunk leads in the tree of what siblings wrote
    answer: str | None
    score: float | None = None
    flaw: str = ""  # why there is no score although one was asked for
    # the token that the target doubts first; 0 also where that is not asked or not known
    doubt: int = 0
    is_recalled: bool = False  # the score is that of an equal sibling's chunk
    begun: Beginning | None = None  # what the target would write in its place; no gate sees it


def rollout_name(problem: str, sample: int) -> str:
    """What a rollout's requests call it."""
    return f"{problem}/{sample}"


class RolloutBuilder:
    """A rollout that grows; every engine call is a node of the task graph, every turn makes a new
    frozen value.
    """

    def __init__(
        self,
        problem: Problem,
        prompt: Prompt,
        *,
        policy: Policy,
        context: Context,
        siblings: Siblings,
        scope: Scope,
    ) -> None:
        self.policy = policy
        self.context = context
        self.draft = context.bind(context.draft, "draft", scope, policy.timeout_seconds)
        self.target = context.bind(context.target, "target", scope, policy.timeout_seconds)
        self.scope = scope
        self.siblings = siblings
        self.name = rollout_name(problem.id, scope.sample)  # where caches may be warm
        self.turn = 0  # the index of the turn being worked on
        draft = self.draft.spec
        target = self.target.spec
        self.score = resolved(policy.score, draft, target)
        is_comparable = draft.tokenizer == target.tokenizer and draft.logprobs == "raw"
        # where the target begins to doubt
        self.finds_doubt = policy.takeover == "repair" and is_comparable
        is_scoring = policy.takeover == "replace" and policy.verification == "score"
        self.draws = is_scoring and "draw" in target.capabilities  # the takeover, while it scores
        self._bounds = bounds = policy.bounds()
        self._limits: dict[Role, int] = {
            "draft": bounds.draft_tokens,
            "target": bounds.target_tokens,
        }
        self._sampling = {role: policy.sampling_of(role) for role in ROLES}
        self.waits_left = policy.waits
        # characters: an answer before the last "wait" no longer ends the rollout
        self._asked_again_at = 0
        self._searched_at = 0  # characters: no answer begins before them
        self._earlier: str | None = None
        self._ahead: Chunk | None = None
        self._loose = 0  # tokens written that have neither entered a turn nor been discarded by one
        # the last text that was looked through, and its answer
        self._read: tuple[str, str | None] = (
            "",
            None,
        )
        self._set(Rollout(problem.id, scope.sample, prompt))

    def _set(self, rollout: Rollout) -> None:
        """Take a rollout up as it stands."""
        self.rollout = self.siblings.rollouts[rollout.sample] = rollout
        self.turn = len(rollout.turns)
        self.usage = rollout.usage  # with what the turn being worked on has cost so far
        self.text = rollout.text
        self._searched_at = self._asked_again_at
        self._ids: dict[Role, TokenIds] = {
            "draft": rollout.ids("draft"),
            "target": rollout.ids("target"),
        }
        self.place = self.siblings.place(chunk for turn in rollout.turns for chunk in turn.chunks)
        self._room = self.room_left()

    def _grow(self, turn: Turn) -> None:
        """Add a turn, and what it cost."""
        old = self.rollout
        self.rollout = rollout = Rollout(
            old.problem, old.sample, old.prompt, (*old.turns, turn), usage=self.usage
        )
        self.siblings.rollouts[rollout.sample] = rollout
        self.turn += 1
        self.place = self.siblings.place(turn.chunks, self.place)
        for chunk in turn.chunks:
            self.text += chunk.text
            self._ids = {
                "draft": self._ids["draft"] + chunk.draft_ids,
                "target": self._ids["target"] + chunk.target_ids,
            }
        self._room = self.room_left()
        self.context.listener.turned(rollout, turn)

    async def propose(self) -> Proposal:
        """Let the drafter write the next chunk, unless it was written ahead."""
        chunk = self._ahead
        self._ahead = None
        if chunk is None:
            chunk = await self.write(self.policy.drafter, ())
        place = self.siblings.place((chunk,), self.place)
        return Proposal(chunk, place, self._extract(self.text + chunk.text, chunk))

    async def propose_ahead(self, chunk: Chunk) -> None:
        """Write the chunk after `chunk` before it has been judged: same prefix, same seed, same
        distribution as later.

        A failure is left to the later attempt; where `chunk` is rejected, `drop_ahead` must be
        called.
        """
        if (
            chunk.ended == "end"
            or self.turn + 1 >= self._bounds.turns
            or self.room_left([chunk]) < 1
        ):
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

    async def write(self, role: Role, pending: Sequence[Chunk], turn: int | None = None) -> Chunk:
        """One piece of text after the rollout and the `pending` chunks, from the exact token state.

        :raises ContextOverflow: not one more token fits.
        :raises EngineError: the engine failed for good.
        """
        request = self.request(role, pending, turn)
        completion = await self.engine(role).sample(request)
        self.spend(role, request, completion)
        return self.written(role, completion)

    async def replace(self, proposal: Proposal) -> Chunk:
        """What the target writes in a proposal's place: what was drawn of it while it was scored,
        and the rest.

        The proposal is a hint besides: a target that speculates may be faster for it, and writes
        the same.
        """
        begun = proposal.begun
        request = replace(self.request("target"), draft=proposal.chunk.target_ids)
        rest: Completion | None = None
        if begun is not None:
            request = after(request, begun)
            self.count(Usage(target_tokens=len(begun.ids), drawn_tokens=len(begun.ids)))
            self._loose += len(begun.ids)
        if begun is None or begun.ended is None:
            rest = await self.target.sample(request)
            self.spend("target", request, rest)
        if begun is not None:
            rest = continued(begun, rest, self.target)
        assert rest is not None, "nothing was begun, so all of it was asked for"
        return self.written("target", rest)

    def written(self, role: Role, completion: Completion) -> Chunk:
        """A completion as a chunk, of which the listener is told."""
        chunk = chunk_of(completion, role, self.draft, self.target)
        self.context.listener.written(self.rollout, chunk)
        return chunk

    def request(
        self, role: Role, pending: Sequence[Chunk] = (), turn: int | None = None
    ) -> SampleRequest:
        """What a model is asked when it writes the next piece.

        :raises ContextOverflow: not one more token fits.
        """
        room = self.room_left(pending) if pending else self._room
        turn = self.turn if turn is None else turn
        ids = self.ids(role, pending) if pending else self._ids[role]
        if room < 1:
            raise ContextOverflow(self.engine(role).spec.name, len(ids) + 1, len(ids) + room)
        rollout = self.rollout
        return SampleRequest(
            ids,
            min(self._limits[role], room),
            self._sampling[role],
            Seed(self.context.seed, rollout.problem, rollout.sample, turn, role),
            self._bounds.stop,
            rollout=self.name,
            logprobs="raw" if role in self.context.logprobs else "unneeded",
        )

    def enter(
        self,
        chunks: Sequence[Chunk],
        discarded: Sequence[Chunk] = (),
        decision: Decision | None = None,
        score: float | None = None,
        note: str = "",
        saved: int = 0,
    ) -> None:
        """Close the turn with these chunks, and the rollout if that was its end; `saved` of what is
        discarded stays.
        """
        asked = self.usage.scored_tokens - self.rollout.usage.scored_tokens
        if discarded:
            self.count(Usage(wasted_tokens=sum([chunk.tokens for chunk in discarded]) - saved))
        self._grow(
            Turn(
                self.turn,
                tuple(chunks),
                tuple(discarded),
                score,
                decision,
                note,
                scored_tokens=asked,
            )
        )
        self._conclude()

    def close(self, finish: Finish, answer: str | None = None, why: str = "") -> None:
        """End the rollout; without a marked answer, a text that its model has ended is read again
        for one that it only states.
        """
        is_fallback = False
        if answer is None and self._has_model_ended():
            answer = self.context.answers.extract_finished(self.text)
            is_fallback = answer is not None
        self.rollout = replace(
            self.rollout, finish=finish, answer=answer, error=why, is_fallback_answer=is_fallback
        )
        self.siblings.rollouts[self.rollout.sample] = self.rollout

    def _has_model_ended(self) -> bool:
        # A text that a limit cut is not finished: "The total is 1" may go on as 12.
        chunks = self.rollout.turns[-1].chunks
        return bool(chunks) and chunks[-1].ended == "end"

    def _conclude(self) -> None:
        self._loose = 0 if self._ahead is None else self._ahead.tokens
        finish, answer, why = self._ending()
        if finish in ("answer", "end") and self.waits_left and self._room > 1:
            self._wait(answer)
        elif finish:
            answer = answer or self._earlier
            self.close("answer" if answer is not None and finish == "end" else finish, answer, why)

    def _extract(self, text: str, last: Chunk | None) -> str | None:
        """The answer in a text that ends with this chunk; a box that is cut is none."""
        asked = text[self._searched_at :]
        # a chunk that is proposed and then enters is looked through once
        if self._read[0] != asked:
            extract = self.context.answers.extract
            answer = extract(asked)
            if answer is not None and last is not None and last.ended == "length":
                # "The answer is 1" may be the beginning of 12: an answer the next digit would
                # change is not yet one.
                answer = answer if extract(asked + "0") == answer else None
            self._read = asked, answer
        return self._read[1]

    def _ending(self) -> tuple[Finish | None, str | None, str]:
        last = self.rollout.turns[-1]
        answer = self._extract(self.text, last.chunks[-1] if last.chunks else None)
        if answer is not None:
            return "answer", answer, ""
        if len(self.text) - self._searched_at > _SEARCHED:
            self._searched_at += self.context.answers.unmarked(self.text[self._searched_at :])
        if not any(chunk.draft_ids or chunk.target_ids for chunk in last.chunks):
            return "end", None, "nothing was written"
        if last.chunks[-1].ended == "end":
            return "end", None, ""
        if self._repeats():
            return "end", None, f"the same chunk {self.policy.repeats} times in a row"
        if self.turn >= self._bounds.turns:
            return "turns", None, ""
        if self._room < 1:
            return "tokens", None, ""
        stop = self.policy.confidence_stop
        return (
            ("end", None, "low confidence") if stop and self._is_unsure(stop) else (None, None, "")
        )

    def _is_unsure(self, stop: ConfidenceStop) -> bool:
        if self.rollout.sample < stop.warmup:
            return False
        warmup = [
            other
            for sample, other in self.siblings.rollouts.items()
            if sample < stop.warmup and other.finish
        ]
        return stop.is_below(self.rollout, warmup)

    def ids(self, role: Role, pending: Sequence[Chunk] = ()) -> TokenIds:
        """That model's ids of the rollout and of chunks that have not entered it yet."""
        ids = self._ids[role]
        for chunk in pending:
            ids += chunk.ids(role)
        return ids

    def room_left(self, pending: Sequence[Chunk] = ()) -> int:
        """Tokens this rollout may still grow by after the `pending` chunks: its own limit and both
        contexts.
        """
        draft = len(self._ids["draft"])
        target = len(self._ids["target"])
        room = min(
            self._bounds.max_tokens - target + len(self.rollout.prompt.target_ids),
            self.draft.spec.context_length - draft,
            self.target.spec.context_length - target,
        )
        if not pending:
            return room
        return room - max(
            sum([len(chunk.draft_ids) for chunk in pending]),
            sum([len(chunk.target_ids) for chunk in pending]),
        )

    def engine(self, role: Role) -> RolloutEngine:
        """Return the engine in this role."""
        return self.draft if role == "draft" else self.target

    def _repeats(self) -> bool:
        backwards = (
            chunk.text for turn in reversed(self.rollout.turns) for chunk in reversed(turn.chunks)
        )
        last = list(islice((text for text in backwards if text.strip()), self.policy.repeats))
        return len(last) == self.policy.repeats and len(set(last)) == 1

    def _wait(self, answer: str | None) -> None:
        """Budget forcing: put words into the rollout's mouth and let it go on; an answer so far is
        kept in reserve.
        """
        self.waits_left -= 1
        self._earlier = answer or self._earlier
        words = forced(self.policy.wait_text, self.policy.drafter, self.draft, self.target)
        self._asked_again_at = self._searched_at = len(self.text) + len(words.text)
        self._grow(Turn(self.turn, (words,), is_forced=True))

    def spend(self, role: Role, request: SampleRequest, completion: Completion) -> None:
        """Count what a model wrote, not yet part of any turn."""
        new = len(completion.ids)
        read = max(0, len(request.ids) - completion.cached_tokens)
        self._loose += new
        if role == "draft":
            self.count(Usage(draft_tokens=new, draft_prefill_tokens=read, calls=1))
        else:
            self.count(Usage(target_tokens=new, target_prefill_tokens=read, calls=1))

    def waste_unfinished(self) -> None:
        """Count what the turn that was not completed cost; what was written in it is wasted."""
        if self._loose:
            self.count(Usage(wasted_tokens=self._loose))
        self._ahead = None
        self._loose = 0
        self.rollout = replace(self.rollout, usage=self.usage)

    def count(self, usage: Usage) -> None:
        """Add to what this rollout cost."""
        self.usage += usage
