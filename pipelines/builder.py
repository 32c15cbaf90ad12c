"""The builder of a rollout, which requests chunks, adds turns and detects the end of the rollout.

The first part is the context of a pipeline: its engines, gate, answer functions, seed and listener.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from atts.core import (
    Beginning,
    Chunk,
    Combine,
    CombinePlan,
    Completion,
    Decision,
    Finish,
    Message,
    Problem,
    Prompt,
    Role,
    Rollout,
    SampleRequest,
    ScoreRequest,
    Scores,
    TokenIds,
    Turn,
    Usage,
)
from atts.engine import Engine
from atts.errors import ContextOverflow, EngineError
from atts.graph import Arrival, Caller, RolloutScope
from atts.pipelines.gates import Gate, RoundGate
from atts.pipelines.policy import THINK, THINK_END, ConfidenceStop, Policy
from atts.pipelines.scores import source_of
from atts.pipelines.speeds import DraftLength, WriterChoice
from atts.pipelines.votes import Grouper, classes
from atts.sampling import Seed


async def _nothing_to_prepare(answers: Sequence[str | None]) -> None:
    """Do nothing, because by default answers can be grouped without preparation."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Functions that extract answers from reasoning texts and group equal answers.

    `extract` returns None if the text has no answer yet. It must not guess, because a rollout ends
    at its first answer. `extract_finished` may guess: it reads a text that the model has ended
    without a marked answer. `unmarked` returns how many leading characters can be skipped: they
    contain no answer, whatever text follows. `prepare` is awaited before `group` gets a new answer,
    so that `group` need not wait.
    """

    extract: Callable[[str], str | None]
    group: Grouper
    unmarked: Callable[[str], int] = lambda text: 0
    extract_finished: Callable[[str], str | None] = lambda text: None
    prepare: Callable[[Sequence[str | None]], Awaitable[None]] = _nothing_to_prepare
    # Returns the `Answers` of a problem. None if all problems use the functions of this object.
    for_problem: Callable[[Problem], Answers] | None = None

    def of(self, problem: Problem) -> Answers:
        """Return the functions that extract and group answers for this problem."""
        return self if self.for_problem is None else self.for_problem(problem)


class RolloutListener(Protocol):
    """A listener that is called as rollouts grow; its methods must not block."""

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Handle a chunk that a model wrote to continue `rollout`; the chunk may still be
        discarded.
        """
        ...

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Handle a turn that was added to the rollout and is now final."""
        ...


class NullListener:
    """A listener that ignores everything."""

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Ignore the chunk."""

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Ignore the turn."""


class RunLength:
    """An estimate of how much of a run is left. This base class does not know the run's size."""

    @property
    def share(self) -> float | None:
        """Return the expected fraction of the run's decisions that are still to be taken, including
        the next one. Return None if it is unknown.
        """
        return None


class Planner(Protocol):
    """A planner that decides, after a problem's vote, whether and how the target combines the
    answers. An example is `Combiner`.
    """

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return how to combine a problem's answers after its vote. `share` is the leading answer's
        fraction of the votes, and `answers` is the number of different answers.
        """
        ...


class SplitPlanner:
    """A planner that learns nothing. It treats every vote that is not unanimous as split."""

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return a plan to combine the answers, or to keep the vote's winner if `kind` is "vote" or
        all answers agree. If `kind` is "auto", the target selects an answer.
        """
        if kind == "vote" or answers < 2:
            return CombinePlan("vote", why="the rollouts agree")
        return CombinePlan("select" if kind == "auto" else kind)


class RolloutEngine(Engine, Protocol):
    """An engine wrapped for one rollout, with limits, timeouts, checks and retries. It can also
    return results that an earlier session recorded.
    """

    # True if an earlier session of the run recorded calls for this problem
    has_recorded_calls: bool

    def recorded_scores(self, request: ScoreRequest) -> Scores | None:
        """Return the scores that an earlier session recorded for the same call, or None. The record
        is kept, so that the call itself can use it later.
        """
        ...

    def recorded_length(self, request: SampleRequest) -> int:
        """Return the token limit of the same request in an earlier session: the largest recorded
        one, up to `request.max_tokens`. Return 0 if there was no such request.
        """
        ...


EngineBinder = Callable[[Engine, Role, Caller, float], RolloutEngine]
"""A function that wraps an engine for one rollout. Its arguments are the engine, its role, the
caller in the task graph, and the time limit of a call in seconds.
"""


@dataclass(frozen=True, slots=True)
class Context:
    """The engines, gate, functions and settings that a run gives to its pipelines.

    A run may wrap the engines and the gate to log their calls.
    """

    draft: Engine
    target: Engine
    gate: Gate | RoundGate
    answers: Answers
    bind: EngineBinder  # in a run, this function returns an `atts.run.EngineCalls`
    seed: int = 0
    listener: RolloutListener = NullListener()
    # The engines of these roles must return log-probabilities; `needed_logprobs` chooses the roles.
    logprobs: frozenset[Role] = frozenset({"draft", "target"})
    left: RunLength = field(default_factory=RunLength)
    # with method exact: decides how many tokens the draft writes before the target scores them
    draft_length: DraftLength = field(default_factory=DraftLength)
    planner: Planner = field(default_factory=SplitPlanner)
    # with method exact: decides whether the draft or the target writes a chunk
    writers: WriterChoice = field(default_factory=WriterChoice)
    # With score kind "learned": the function that predicts a chunk's score from its features (see
    # `judge_features`).
    judge: Callable[[Sequence[float]], float] | None = None


# After every chunk, the rollout's text is searched for an answer. A text with fewer characters than
# this is searched from its beginning, a longer one only at its end.
_READ_WHOLE = 1_200
# After an escalation, the target may write the rest of a rollout alone. Each request then asks for
# at least this many tokens, if the context has room.
_LONG_PIECE = 4_096


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chunk that the drafter wrote, with the data that the gate may use."""

    chunk: Chunk
    position: int  # tree node of the text that ends with this chunk; see `Siblings`
    answer: str | None
    score: float | None = None
    # why the chunk has no score, although the gate requested one; empty if it has a score
    flaw: str = ""
    # The target would reject the chunk's token with this index, and accept all earlier ones. 0 if
    # this is unknown or not needed.
    first_rejected: int = 0
    score_reused: bool = False  # True if the score was copied from an equal chunk of a sibling
    # The first tokens of a replacement for the chunk, which the target sampled while it scored the
    # chunk. Gates do not read them.
    beginning: Beginning | None = None


@dataclass(frozen=True, slots=True)
class KnownScore:
    """The target's score of a chunk. A sibling rollout with the same chunk after the same text
    reuses it.
    """

    score: float
    first_rejected: int


class Siblings:
    """The rollouts of one problem, keyed by sample number, and a tree of their texts.

    Each builder updates the entry of its own rollout. Rollouts that begin with the same chunks
    share a path in the tree.
    """

    def __init__(self, group: Grouper) -> None:
        self._group = group
        self.rollouts: dict[int, Rollout] = {}
        self._positions: dict[tuple[int, TokenIds], int] = {}
        # For each scored chunk: its score. The key is the tree node of the text that ends with the
        # chunk.
        self.scores: dict[int, KnownScore] = {}
        # For each chunk whose score was requested but is not known yet. The keys are tree nodes, as
        # in `scores`.
        self.pending_scores: dict[int, Arrival] = {}

    def agreement(self, but: int, answer: str | None) -> tuple[int, float, bool]:
        """Compare `answer` with the answers of all rollouts except number `but`. Return how many of
        them have answered, the fraction that gave the leading answer, and whether `answer` is the
        leading answer.
        """
        others: list[str] = []
        for sample in sorted(self.rollouts):
            rollout = self.rollouts[sample]
            if sample != but and rollout.finish and rollout.answer is not None:
                others.append(rollout.answer)
        if not others:
            return 0, 0.0, False
        answers = others if answer is None else [*others, answer]
        labels = classes(answers, self._group)
        theirs = labels[: len(others)]
        lead = max(set(theirs), key=theirs.count)
        share = theirs.count(lead) / len(others)
        return len(others), share, answer is not None and labels[-1] == lead

    def position(self, chunks: Iterable[Chunk], start: int = 0) -> int:
        """Return the tree node that is reached by following these chunks from the node `start`.
        Node 0 is the prompt.
        """
        for chunk in chunks:
            start = self._positions.setdefault((start, chunk.target_ids), len(self._positions) + 1)
        return start


def rollout_name(problem: str, sample: int) -> str:
    """Return the name that all requests of a rollout carry. Engines use it to find the rollout's KV
    cache.
    """
    return f"{problem}/{sample}"


class RolloutBuilder:
    """A rollout under construction. Every turn replaces the immutable `Rollout` by a longer one."""

    def __init__(
        self,
        problem: Problem,
        prompt: Prompt,
        *,
        policy: Policy,
        context: Context,
        siblings: Siblings,
        scope: RolloutScope[Rollout],
    ) -> None:
        self.policy = policy
        self.context = context
        self.scope = scope
        self.siblings = siblings
        self.name = rollout_name(problem.id, scope.sample)
        self.draft = context.bind(context.draft, "draft", scope, policy.timeout_seconds)
        self.target = context.bind(context.target, "target", scope, policy.timeout_seconds)
        draft = self.draft.spec
        target = self.target.spec
        self.problem_text = problem.text
        self.score_rule = policy.score
        self.score_source = source_of(policy.score)
        is_comparable = draft.tokenizer == target.tokenizer and draft.logprobs == "raw"
        self.needs_first_rejected = policy.takeover == "repair" and is_comparable
        # For these two sources, the target computes log-probabilities of the chunk's tokens. So it
        # can also sample a replacement in the same call.
        reads_chunks = self.score_source in ("log-probabilities", "judge")
        # If `escalates` is "rollout", the target writes the whole rollout again. Then no single
        # chunk needs a replacement.
        is_scoring = policy.takeover == "replace" and policy.escalates != "rollout" and reads_chunks
        self.draws = is_scoring and "draw" in target.capabilities
        self._bounds = policy.bounds()
        self._chunk_tokens: dict[Role, int] = {
            "draft": self._bounds.draft_tokens,
            "target": self._bounds.target_tokens,
        }
        self._sampling = {
            "draft": policy.sampling_of("draft"),
            "target": policy.sampling_of("target"),
        }

        # The rollout up to now. Other fields store values computed from its text, so that the text
        # is not read again.
        self.rollout = Rollout(problem.id, scope.sample, prompt)
        siblings.rollouts[scope.sample] = self.rollout
        self.turn = 0  # index of the turn that is being written
        # True if the text was discarded, so that the target writes the next turn directly after the
        # prompt
        self._is_restarting = False
        self.text = ""
        self.position = 0  # tree node of the text so far; see `Siblings`
        self._ids: dict[Role, TokenIds] = {"draft": prompt.draft_ids, "target": prompt.target_ids}
        self._room = self.room_left()
        # True while the think block is open. Only its tokens count against the thinking budget.
        self._is_thinking = policy.thinking_tokens is not None

        # Tokens and calls of the rollout, including the turn that is being written. `rollout.usage`
        # has only the finished turns.
        self.usage = Usage()
        # Tokens that were written in this turn, but whose chunks were neither accepted nor
        # discarded yet.
        self._unassigned = 0
        # The next chunk, if the drafter wrote it while the previous chunk was being judged.
        self._ahead: Chunk | None = None

        # how often the wait text may still be inserted instead of ending the rollout
        self.budget_forcings_left = policy.budget_forcing
        # The answer before the last inserted wait text. It is used if the rollout ends without
        # another answer.
        self._earlier_answer: str | None = None
        # Index of a character in `text`. Earlier characters belong to no answer, so they are not
        # searched again.
        self._searched_to = 0
        # the text that was searched last, with the result of the search
        self._last_search: tuple[str, str | None] = ("", None)

    async def propose(self) -> Proposal:
        """Return the drafter's next chunk. The drafter writes it now, unless `propose_ahead` has
        already written it.
        """
        chunk = self._ahead
        self._ahead = None
        if chunk is None:
            chunk = await self.write(self.policy.drafter)
        position = self.siblings.position((chunk,), self.position)
        return Proposal(chunk, position, self._find_answer(self.text + chunk.text, chunk))

    async def propose_ahead(self, chunk: Chunk) -> None:
        """Let the drafter write the next chunk while `chunk` is still being judged. The text is the
        same as if it were written later.

        A failure is ignored, because the chunk can be written later. If `chunk` is escalated, the
        caller must call `drop_ahead`.
        """
        is_last = chunk.ended == "end" or self.turn + 1 >= self._bounds.turns
        if is_last or not self.may_write([chunk]):
            return
        try:
            self._ahead = await self.write(self.policy.drafter, [chunk], turn=self.turn + 1)
        except EngineError:
            self._ahead = None

    def hand_over(self) -> None:
        """Let the target alone write the remaining chunks of this rollout.

        No gate judges these chunks, so they can be long.
        """
        self.policy = replace(self.policy, drafter="target")
        self._bounds = self._bounds._replace(stop=())
        self._chunk_tokens["target"] = max(self._chunk_tokens["target"], _LONG_PIECE)

    def start_again(self) -> None:
        """Discard the text so far, and let the target alone write the rollout again from the
        prompt.

        The earlier turns stay in the rollout as a record of decisions, but their chunks are no
        longer part of its text.
        """
        self.hand_over()
        # The draft's turns do not count: from here on, the target may write as many turns as the
        # draft could.
        self._bounds = self._bounds._replace(turns=self.turn + self._bounds.turns)
        self._is_restarting = True
        prompt = self.rollout.prompt
        self.text = ""
        self.position = 0
        self._ids = {"draft": prompt.draft_ids, "target": prompt.target_ids}
        self._room = self.room_left()
        self._is_thinking = self.policy.thinking_tokens is not None
        self.budget_forcings_left = self.policy.budget_forcing
        self._earlier_answer = None
        self._searched_to = 0
        self._last_search = ("", None)

    def drop_ahead(self) -> None:
        """Discard the chunk that was written ahead, if there is one, and count its tokens as
        wasted.
        """
        if self._ahead is not None:
            self.usage += Usage(wasted_tokens=self._ahead.tokens)
            self._unassigned = max(0, self._unassigned - self._ahead.tokens)
        self._ahead = None

    async def write(
        self, role: Role, pending: Sequence[Chunk] = (), turn: int | None = None
    ) -> Chunk:
        """Let a model write the chunk that follows the rollout and the `pending` chunks.

        :raises ContextOverflow: if the context has no room for one more token.
        :raises EngineError: if the engine failed for good.
        """
        request = self.request(role, pending, turn)
        engine = self.draft if role == "draft" else self.target
        completion = await engine.sample(request)
        self.spend(role, request, completion)
        return self.written(role, completion)

    async def replace(self, proposal: Proposal) -> Chunk:
        """Let the target write a chunk that replaces the proposed chunk.

        If the target already sampled the first tokens of the replacement while scoring, only the
        other tokens are requested. The request also contains the proposed chunk as a hint for a
        target with speculation, which may then write faster. The text stays the same.
        """
        request = replace(self.request("target"), hint=proposal.chunk.target_ids)
        beginning = proposal.beginning
        if beginning is None:
            completion = await self.target.sample(request)
            self.spend("target", request, completion)
            return self.written("target", completion)
        drawn = len(beginning.ids)
        self.usage += Usage(target_tokens=drawn, drawn_tokens=drawn)
        self._unassigned += drawn
        rest: Completion | None = None
        if beginning.ended is None:
            request = after(request, beginning)
            rest = await self.target.sample(request)
            self.spend("target", request, rest)
        return self.written("target", continued(beginning, rest, self.target))

    def written(self, role: Role, completion: Completion) -> Chunk:
        """Convert a completion to a chunk, and report the chunk to the listener."""
        chunk = chunk_of(completion, role, self.draft, self.target)
        self.context.listener.written(self.rollout, chunk)
        return chunk

    def request(
        self, role: Role, pending: Sequence[Chunk] = (), turn: int | None = None
    ) -> SampleRequest:
        """Return the request that lets a model write the next chunk.

        :raises ContextOverflow: if the context has no room for one more token.
        """
        room = self.room_left(pending) if pending else self._room
        ids = self.ids(role, pending) if pending else self._ids[role]
        if room < 1:
            raise ContextOverflow(self.engine(role).spec.name, len(ids) + 1, len(ids) + room)
        thinking_budget = 0
        if self._is_thinking:
            if "thinking" in self.engine(role).spec.capabilities:
                thinking_budget = self.policy.thinking_tokens or 0
            else:
                room = min(room, max(1, self.thinking_left(pending)))
        rollout = self.rollout
        turn = self.turn if turn is None else turn
        return SampleRequest(
            ids,
            min(self._chunk_tokens[role], room),
            self._sampling[role],
            Seed(self.context.seed, rollout.problem, rollout.sample, turn, role),
            self._bounds.stop,
            rollout=self.name,
            logprobs="raw" if role in self.context.logprobs else "unneeded",
            thinking_budget=thinking_budget,
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
        """Add a turn with these chunks to the rollout, and end the rollout if it is complete.

        `saved` is the number of tokens of the `discarded` chunks that are also part of the new
        chunks. These tokens are not counted as wasted.
        """
        scored_tokens = self.usage.scored_tokens - self.rollout.usage.scored_tokens
        if discarded:
            wasted = sum(chunk.tokens for chunk in discarded) - saved
            self.usage += Usage(wasted_tokens=wasted)
        if self._is_restarting:
            self.usage += Usage(wasted_tokens=_tokens_kept(self.rollout))
        turn = Turn(
            self.turn,
            tuple(chunks),
            tuple(discarded),
            score,
            decision,
            note,
            scored_tokens=scored_tokens,
            restarts=self._is_restarting,
        )
        self._is_restarting = False
        self._grow(turn)
        self._unassigned = 0 if self._ahead is None else self._ahead.tokens
        finish, answer, why = self._ending(turn)
        if finish is None:
            if self._is_thinking and self.thinking_left() < 1:
                self._stop_thinking()
            return
        if finish in ("answer", "end") and self.budget_forcings_left and self._room > 1:
            self._wait(answer)
            return
        if answer is None:
            answer = self._earlier_answer
        if answer is not None and finish == "end":
            finish = "answer"
        self._close(finish, answer, why)

    def _grow(self, turn: Turn) -> None:
        """Add a turn with its cost to the rollout, and report the turn to the listener."""
        old = self.rollout
        rollout = Rollout(old.problem, old.sample, old.prompt, (*old.turns, turn), usage=self.usage)
        self.rollout = rollout
        self.siblings.rollouts[rollout.sample] = rollout
        self.turn += 1
        self.position = self.siblings.position(turn.chunks, self.position)
        for chunk in turn.chunks:
            self.text += chunk.text
            # The end mark of the think block may begin in the previous chunk, so search the end of
            # that chunk too.
            if THINK_END in self.text[-len(chunk.text) - len(THINK_END) :]:
                self._is_thinking = False
            self._ids = {
                "draft": self._ids["draft"] + chunk.draft_ids,
                "target": self._ids["target"] + chunk.target_ids,
            }
        self._room = self.room_left()
        self.context.listener.turned(rollout, turn)

    def _ending(self, last: Turn) -> tuple[Finish | None, str | None, str]:
        """Return why the rollout ends, its answer, and a note on the reason. The first value is
        None if the rollout continues.
        """
        answer = self._find_answer(self.text, last.chunks[-1] if last.chunks else None)
        if answer is not None:
            return "answer", answer, ""
        if len(self.text) - self._searched_to > _READ_WHOLE:
            self._searched_to += self.context.answers.unmarked(self.text[self._searched_to :])
        if not any(chunk.draft_ids or chunk.target_ids for chunk in last.chunks):
            return "end", None, "nothing was written"
        if last.chunks[-1].ended == "end":
            return "end", None, ""
        if self._repeats():
            return (
                "end",
                None,
                f"the rollout repeated the same chunk {self.policy.repeats} times in a row",
            )
        if self.turn >= self._bounds.turns:
            return "turns", None, ""
        if self._room < 1:
            return "tokens", None, ""
        stop = self.policy.confidence_stop
        if stop is not None and self._is_unsure(stop):
            return "end", None, "low confidence"
        return None, None, ""

    def _find_answer(self, text: str, last: Chunk | None) -> str | None:
        """Return the answer in a text whose last chunk is `last`, or None. If the token limit cut
        the chunk, an answer that could still grow is ignored: "1" may become "12".
        """
        unread = text[self._searched_to :]
        # The same text is searched when a chunk is proposed, and again when it is accepted. The
        # second search uses the stored result.
        if self._last_search[0] != unread:
            extract = self.context.answers.extract
            answer = extract(unread)
            if answer is not None and last is not None and last.ended == "length":
                # The chunk's token limit may have cut a number: "The answer is 1" may continue as
                # "12". Ignore the answer if another digit would change it.
                if extract(unread + "0") != answer:
                    answer = None
            self._last_search = (unread, answer)
        return self._last_search[1]

    def _repeats(self) -> bool:
        """Return whether the last `policy.repeats` chunks have the same text. Empty chunks are
        ignored.
        """
        last: list[str] = []
        for chunk in reversed(self.rollout.chunks):
            if chunk.text.strip():
                last.append(chunk.text)
            if len(last) == self.policy.repeats:
                return len(set(last)) == 1
        return False

    def _is_unsure(self, stop: ConfidenceStop) -> bool:
        if self.rollout.sample < stop.warmup:
            return False
        warmup = [
            other
            for sample, other in self.siblings.rollouts.items()
            if sample < stop.warmup and other.finish
        ]
        return len(warmup) == stop.warmup and stop.is_below(self.rollout, warmup)

    def _wait(self, answer: str | None) -> None:
        """Insert the wait text into the rollout instead of ending it (budget forcing).

        An earlier answer is kept as a fallback, and does not end the rollout again.
        """
        self.budget_forcings_left -= 1
        self._earlier_answer = answer or self._earlier_answer
        words = forced(self.policy.wait_text, self.policy.drafter, self.draft, self.target)
        self._searched_to = len(self.text) + len(words.text)
        self._grow(Turn(self.turn, (words,), is_forced=True))

    def _stop_thinking(self) -> None:
        """Insert the text that ends the thinking, because the thinking budget is used up.

        If the model did not open a think block, the mark that closes a block is left out. If there
        is no room for the text and one more token, nothing is inserted.
        """
        self._is_thinking = False
        # The inserted wait text would make the model think longer, so do not insert it any more.
        self.budget_forcings_left = 0
        before = self.target.tokenizer.decode(self.rollout.prompt.target_ids) + self.text
        text = self.policy.thinking_end
        if before.rfind(THINK) <= before.rfind(THINK_END):
            text = re.sub(rf"\n?{re.escape(THINK_END)}", "", text)
        words = forced(text, self.policy.drafter, self.draft, self.target)
        if self.room_left([words]) < 1:
            return
        note = "the thinking budget is used up"
        if "thinking" in self.engine(self.policy.drafter).spec.capabilities:
            note += ", and the server did not end the thinking"
        self._grow(Turn(self.turn, (words,), note=note, is_forced=True))

    def _close(self, finish: Finish, answer: str | None, why: str) -> None:
        """End the rollout. If the model ended the text without a marked answer, search the text for
        an unmarked one.
        """
        # Search only a text that the model ended. If a limit cut the text, "The total is 1" may
        # continue as "12".
        chunks = self.rollout.turns[-1].chunks
        has_model_ended = bool(chunks) and chunks[-1].ended == "end"
        is_fallback = False
        if answer is None and has_model_ended:
            answer = self.context.answers.extract_finished(self.text)
            is_fallback = answer is not None
        self.rollout = replace(
            self.rollout, finish=finish, answer=answer, error=why, is_fallback_answer=is_fallback
        )
        self.siblings.rollouts[self.rollout.sample] = self.rollout

    def waste_unfinished(self) -> None:
        """Count as wasted the tokens of a turn that was not completed."""
        if self._unassigned:
            self.usage += Usage(wasted_tokens=self._unassigned)
        self._ahead = None
        self._unassigned = 0
        self.rollout = replace(self.rollout, usage=self.usage)

    def ids(self, role: Role, pending: Sequence[Chunk] = ()) -> TokenIds:
        """Return the token ids of the rollout and of the `pending` chunks, in the tokenizer of this
        role's model.
        """
        ids = self._ids[role]
        for chunk in pending:
            ids += chunk.ids(role)
        return ids

    def room_left(self, pending: Sequence[Chunk] = ()) -> int:
        """Return how many tokens may still follow the `pending` chunks, given the rollout's limit
        and the contexts of both models.
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
        pending_draft = sum(len(chunk.draft_ids) for chunk in pending)
        pending_target = sum(len(chunk.target_ids) for chunk in pending)
        return room - max(pending_draft, pending_target)

    def thinking_left(self, pending: Sequence[Chunk] = ()) -> int:
        """Return how many tokens of the thinking budget are left after the `pending` chunks.

        Tokens are counted with the target's tokenizer. The budget applies only while the rollout is
        thinking.
        """
        assert self.policy.thinking_tokens is not None, "the policy must have a thinking budget"
        written = len(self._ids["target"]) - len(self.rollout.prompt.target_ids)
        written += sum(len(chunk.target_ids) for chunk in pending)
        return self.policy.thinking_tokens - written

    def may_write(self, pending: Sequence[Chunk] = ()) -> bool:
        """Return whether the limit and the thinking budget of the rollout allow one more token
        after the `pending` chunks.
        """
        if self._is_thinking and self.thinking_left(pending) < 1:
            return False
        return self.room_left(pending) >= 1

    def engine(self, role: Role) -> RolloutEngine:
        """Return the engine of the draft or of the target."""
        return self.draft if role == "draft" else self.target

    def spend(self, role: Role, request: SampleRequest, completion: Completion) -> None:
        """Add the tokens and the call of a completion to the rollout's usage."""
        new = len(completion.ids)
        read = max(0, len(request.ids) - completion.cached_tokens)
        self._unassigned += new
        if role == "draft":
            self.usage += Usage(draft_tokens=new, draft_prefill_tokens=read, calls=1)
        else:
            self.usage += Usage(target_tokens=new, target_prefill_tokens=read, calls=1)


def _tokens_kept(rollout: Rollout) -> int:
    """Count the tokens of a rollout's text, without the tokens that atts inserted."""
    return sum(
        chunk.tokens for turn in rollout.turns if not turn.is_forced for chunk in turn.chunks
    )


# The following functions make prompts and chunks. Both have token ids for draft and target, whose
# tokenizers may differ.


def render(problem: Problem, policy: Policy, draft: Engine, target: Engine) -> Prompt:
    """Render the problem with the chat template of each model, as token ids.

    Models that share a tokenizer may still have different templates, so both are always rendered.
    The text of a multiple-choice problem already contains its lettered choices.
    """
    messages = prompt_of(problem, policy)
    draft_ids = draft.tokenizer.render(messages)
    target_ids = target.tokenizer.render(messages)
    return Prompt(draft_ids, draft_ids if draft_ids == target_ids else target_ids)


_PROGRAM = "Solve the task step by step. End with the whole program in one ```python block."


def prompt_of(problem: Problem, policy: Policy) -> list[Message]:
    """Return the conversation that a rollout continues: an optional system prompt, worked examples,
    and the problem.

    The message of the problem also contains the instruction and, for multiple choice, the request
    for a letter.
    """

    def question(text: str) -> Message:
        parts = (text, policy.letter if problem.choices else "", policy.instruction)
        return Message("user", "\n\n".join(part for part in parts if part))

    messages: list[Message] = []
    system = policy.system
    if problem.kind == "code" and system == Policy().system:
        # The default system prompt asks for an answer in a LaTeX box, which is wrong for programs.
        system = _PROGRAM
    if system:
        messages.append(Message("system", system))
    for text, solution in problem.examples:
        messages.append(question(text))
        messages.append(Message("assistant", solution))
    messages.append(question(problem.text))
    return messages


def chunk_of(completion: Completion, author: Role, draft: Engine, target: Engine) -> Chunk:
    """Convert a completion to a chunk with the token ids of both models. The end token is left out.

    If the tokenizers differ, an incomplete character at the end cannot be converted, so its tokens
    are dropped.
    """
    writer, reader = (draft, target) if author == "draft" else (target, draft)
    ids = completion.ids
    text = completion.text
    if completion.ended == "end" and ids and ids[-1] in writer.spec.end_ids:
        ids = ids[:-1]
    if writer.spec.tokenizer == reader.spec.tokenizer:
        return Chunk(author, text, ids, ids, completion.ended, completion.logprobs)
    if text.endswith("\ufffd"):
        ids, text = _whole_characters(ids, writer)
    read_ids = reader.tokenizer.encode(text)
    draft_ids, target_ids = (ids, read_ids) if author == "draft" else (read_ids, ids)
    return Chunk(author, text, draft_ids, target_ids, completion.ended, completion.logprobs)


def after(request: SampleRequest, beginning: Beginning) -> SampleRequest:
    """Return a request for the rest of a completion whose first tokens are `beginning`."""
    count = len(beginning.ids)
    return replace(
        request,
        ids=request.ids + beginning.ids,
        max_tokens=request.max_tokens - count,
        num_begun=request.num_begun + count,
    )


def continued(beginning: Beginning, rest: Completion | None, engine: Engine) -> Completion:
    """Join `beginning` and `rest`, the first and the remaining tokens of a reply, into one
    completion.
    """
    ids = beginning.ids
    logprobs = beginning.logprobs
    ended = beginning.ended
    cached_tokens = 0
    if rest is not None:
        ids += rest.ids
        logprobs += rest.logprobs
        ended = rest.ended
        cached_tokens = rest.cached_tokens
    assert ended is not None, "a beginning that has not ended must have a continuation"
    text_ids = ids[:-1] if ended == "end" and ids[-1] in engine.spec.end_ids else ids
    if len(logprobs) != len(ids):
        logprobs = ()  # The engine sent no log-probabilities for some tokens, so use none at all.
    return Completion(ids, engine.tokenizer.decode(text_ids), ended, logprobs, cached_tokens)


def forced(text: str, author: Role, draft: Engine, target: Engine) -> Chunk:
    """Return a text that atts inserts into a rollout, such as "wait", as a chunk with the token ids
    of both models.
    """
    draft_ids = draft.tokenizer.encode(text)
    if draft.spec.tokenizer == target.spec.tokenizer:
        target_ids = draft_ids
    else:
        target_ids = target.tokenizer.encode(text)
    return Chunk(author, text, draft_ids, target_ids, "delimiter")


def first_tokens(chunk: Chunk, tokens: int, engine: Engine) -> Chunk | None:
    """Return the first `tokens` tokens of a chunk as a new chunk, without log-probabilities.

    Tokens at the end that form only part of a character are dropped. Return None if no token
    remains, or if the chunk's text does not begin with the decoded text.
    """
    ids, text = _whole_characters(chunk.target_ids[:tokens], engine)
    if not ids or not chunk.text.startswith(text):
        return None
    return Chunk(chunk.author, text, ids, ids, "length")


def _whole_characters(ids: TokenIds, engine: Engine) -> tuple[TokenIds, str]:
    while ids and engine.tokenizer.decode(ids).endswith("\ufffd"):
        ids = ids[:-1]
    return ids, engine.tokenizer.decode(ids)
