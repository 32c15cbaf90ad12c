"""Validation of completions: ids, log-probs and ends that can be true become an engine's completion."""

from __future__ import annotations

from atts.core import Completion, Ending, SampleRequest, TokenIds
from atts.engine import EngineSpec, Tokenizer
from atts.errors import BadReply
from atts.remote.dialects import RawCompletion


def is_logprob(value: float) -> bool:
    """Whether it can be the log-probability of a token that was sampled; NaN cannot."""
    return -1e6 < value <= 1e-4


def check_completion(sampled: RawCompletion, request: SampleRequest, spec: EngineSpec) -> None:
    """Believe ids and log-probs only where they can be true.

    :raises BadReply: they cannot.
    """
    ids, flaw = sampled.ids, ""
    wrong = [value for value in sampled.logprobs if value is not None and not is_logprob(value)]
    if not ids:
        flaw = "it wrote nothing"
    elif len(ids) > request.max_tokens:
        flaw = f"it wrote {len(ids)} tokens, {request.max_tokens} were allowed"
    elif min(ids) < 0 or max(ids) >= spec.vocabulary:
        flaw = f"an id outside 0..{spec.vocabulary - 1} came back"
    elif len(sampled.logprobs) != len(ids) and (sampled.logprobs or spec.logprobs != "none"):
        flaw = f"{len(sampled.logprobs)} log-probabilities came with {len(ids)} ids"
    elif wrong:
        flaw = "a log-probability is above 0 or not a number"
    if flaw:
        raise BadReply(spec.name, flaw)


def find_end(
    sampled: RawCompletion, request: SampleRequest, spec: EngineSpec, tokenizer: Tokenizer
) -> tuple[int, Ending]:
    """How many of the ids belong to the completion, and why it ended there.

    Servers may run past a stop (several tokens a step) or not know a stop id: what counts is where the text completes
    one. One that stopped early must have had a reason.

    :raises BadReply: it stopped, and there is none.
    """
    ids = sampled.ids
    found: list[tuple[int, Ending]] = []
    if not {*spec.end_ids, *request.stop_ids}.isdisjoint(ids):
        places = (place for place, token in enumerate(ids) if token in spec.end_ids or token in request.stop_ids)
        first = next(places)
        found.append((first + 1, "end" if ids[first] in spec.end_ids else "delimiter"))
    stopped = _stop_place(ids[: found[0][0]] if found else ids, request.stop, tokenizer)
    if stopped and (not found or stopped < found[0][0]):
        return stopped, "delimiter"
    if found:
        return found[0]
    if sampled.finish == "length" and (len(ids) == request.max_tokens or spec.logprobs == "none"):
        # where text is spoken, a server's tokens may be without text, and then no ids stand for them
        return len(ids), "length"
    problem = f"it stopped after {len(ids)} of {request.max_tokens} tokens without a stop or an end among them"
    raise BadReply(spec.name, f"{problem} (the last id is {ids[-1]})", "Is it an end id that the tokenizer lacks?")


def _stop_place(ids: TokenIds, stops: tuple[str, ...], tokenizer: Tokenizer) -> int:
    """The least number of ids whose text holds a stop string, found by halving, for a text only grows; 0: none does."""

    def holds(count: int) -> bool:
        text = tokenizer.decode(ids[:count])
        return any(stop in text for stop in stops)

    if not stops or not holds(len(ids)):
        return 0
    low, high = 0, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def completed(
    sampled: RawCompletion,
    logprobs: tuple[float, ...],
    place: int,
    ended: Ending,
    tokenizer: Tokenizer,
) -> Completion:
    """The completion, cut where it ends."""
    ids = sampled.ids[:place]
    text = tokenizer.decode(ids[:-1] if ended == "end" else ids)  # an end token is the last one
    return Completion(ids, text, ended, logprobs[:place], sampled.cached_tokens)
