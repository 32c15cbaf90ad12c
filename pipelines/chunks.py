"""Chunks from completions, in the token ids of both models."""

from __future__ import annotations

from dataclasses import replace

from atts.core import (
    Beginning,
    Chunk,
    Completion,
    Message,
    Problem,
    Prompt,
    Role,
    SampleRequest,
    TokenIds,
)
from atts.engine import Engine
from atts.pipelines.policy import Policy


def render(problem: Problem, policy: Policy, draft: Engine, target: Engine) -> Prompt:
    """Render the problem with each model's own chat template.

    Models that share a tokenizer may still have different templates, so both are always rendered.
    The text of a multiple-choice problem holds its lettered choices already.
    """
    messages = prompt_of(problem, policy)
    draft_ids = draft.tokenizer.render(messages)
    target_ids = target.tokenizer.render(messages)
    return Prompt(draft_ids, draft_ids if draft_ids == target_ids else target_ids)


def prompt_of(problem: Problem, policy: Policy) -> list[Message]:
    """The conversation that a rollout goes on from: a system prompt if there is one, worked
    examples, the problem.

    What it asks for is said in the same breath: the letter of a choice, then the instruction.
    """

    def asked(text: str) -> Message:
        parts = (text, policy.letter if problem.choices else "", policy.instruction)
        return Message("user", "\n\n".join(part for part in parts if part))

    worked = (
        part
        for text, solution in problem.examples
        for part in (asked(text), Message("assistant", solution))
    )
    return [
        *([Message("system", policy.system)] if policy.system else []),
        *worked,
        asked(problem.text),
    ]


def shared(draft: Engine, target: Engine) -> bool:
    """Whether both read ids alike."""
    return draft.spec.tokenizer == target.spec.tokenizer


def chunk_of(completion: Completion, author: Role, draft: Engine, target: Engine) -> Chunk:
    """The completion without its end token, in both tokenizers' ids.

    Between different tokenizers a character cut in the middle cannot be handed over: its bytes'
    tokens are dropped.
    """
    writer, reader = (draft, target) if author == "draft" else (target, draft)
    own = completion.ids
    text = completion.text
    if completion.ended == "end" and own and own[-1] in writer.spec.end_ids:
        own = own[:-1]
    if writer.spec.tokenizer == reader.spec.tokenizer:
        return Chunk(author, text, own, own, completion.ended, completion.logprobs)
    if text.endswith("\ufffd"):
        own, text = _whole_characters(own, writer)
    other = reader.tokenizer.encode(text)
    draft_ids, target_ids = (own, other) if author == "draft" else (other, own)
    return Chunk(author, text, draft_ids, target_ids, completion.ended, completion.logprobs)


def after(request: SampleRequest, begun: Beginning) -> SampleRequest:
    """The request for the rest of what has begun."""
    count = len(begun.ids)
    left = request.max_tokens - count
    return replace(
        request, ids=request.ids + begun.ids, max_tokens=left, begun=request.begun + count
    )


def continued(begun: Beginning, rest: Completion | None, engine: Engine) -> Completion:
    """A completion that was begun elsewhere, with the rest of it, if any was left to write."""
    ids = begun.ids + (rest.ids if rest else ())
    ended = rest.ended if rest else begun.ended
    assert ended is not None, "what has not ended has a rest"
    own = ids[:-1] if ended == "end" and ids[-1] in engine.spec.end_ids else ids
    logprobs = begun.logprobs + (rest.logprobs if rest else ())
    kept = logprobs if len(logprobs) == len(ids) else ()
    return Completion(
        ids, engine.tokenizer.decode(own), ended, kept, rest.cached_tokens if rest else 0
    )


def forced(text: str, author: Role, draft: Engine, target: Engine) -> Chunk:
    """Text put into a rollout from outside (a "wait"), encoded once for each side."""
    ids = draft.tokenizer.encode(text)
    return Chunk(
        author,
        text,
        ids,
        ids if shared(draft, target) else target.tokenizer.encode(text),
        "delimiter",
    )


def part_of(chunk: Chunk, tokens: int, engine: Engine) -> Chunk | None:
    """The first tokens of a chunk that both models read alike, fewer where a character would be
    cut; None if none.

    It has no log-probabilities of its own: its tokens were written, and counted, as those of the
    whole chunk.
    """
    ids, text = _whole_characters(chunk.target_ids[:tokens], engine)
    if not ids or not chunk.text.startswith(text):
        return None
    return Chunk(chunk.author, text, ids, ids, "length")


def _whole_characters(ids: TokenIds, engine: Engine) -> tuple[TokenIds, str]:
    while ids and engine.tokenizer.decode(ids).endswith("\ufffd"):
        ids = ids[:-1]
    return ids, engine.tokenizer.decode(ids)
