"""The chat API as hosted models offer it, or, by a quirk, as vLLM and SGLang extend it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from atts.core import Completion, Message, SampleRequest, Sampling, TokenIds
from atts.seeds import Seed
from atts.testing.server_settings import ServerFault
from atts.testing.servers import Bad, Floor, Routes

_STRICT = ("top_k", "min_p", "continue_final_message", "add_generation_prompt")  # what hosted ones refuse


async def models(floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None) -> Any:
    """GET /v1/models; nobody says how long a context is."""
    return {"object": "list", "data": [{"id": floor.model, "object": "model", "owned_by": "somebody"}]}


async def completions(
    floor: Floor, body: Mapping[str, Any], headers: Mapping[str, str], fault: ServerFault | None
) -> Any:
    """POST /v1/chat/completions."""
    if body.get("model") != floor.model:
        raise Bad(404, f"The model `{body.get('model')}` does not exist or you do not have access to it.")
    if floor.quirks.prefill in ("closed", "prefix"):
        for name in _STRICT:
            if name in body:
                raise Bad(400, f"Unrecognized request argument supplied: {name}")
    ids = conversation(floor, body["messages"], body)
    limit = int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)
    check_room(floor, ids, limit)
    law = Sampling(
        float(body.get("temperature", 1.0)),
        max(0, int(body.get("top_k", 0))),
        float(body.get("top_p", 1.0)),
        float(body.get("min_p", 0.0)),
    )
    stop = tuple(body.get("stop") or ())
    request = SampleRequest(ids, limit, law, Seed(run=int(body.get("seed") or 0)), stop)
    done = await floor.sample(request, f"chatcmpl-{id(request)}", None)
    if done is None:
        raise Bad(499, "aborted")
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_word(done)}
    choice["message"] = {"role": "assistant", "content": spoilt(shown(done, stop), fault), "refusal": None}
    if body.get("logprobs"):
        if floor.quirks.ratings == "off":
            raise Bad(400, "You are not allowed to request logprobs from this model.")
        row = {"token": done.text, "logprob": done.logprobs[0]}
        choice["logprobs"] = {"content": [row | {"top_logprobs": await _digits(floor, ids, fault)}], "refusal": None}
    usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": len(done.ids)}
    usage |= {"prompt_tokens_details": {"cached_tokens": done.cached_tokens}}
    choices = [] if fault == "wrong_ids" else [choice]
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": floor.model, "choices": choices, "usage": usage}


def conversation(floor: Floor, rows: list[dict[str, Any]], body: Mapping[str, Any]) -> TokenIds:
    """The ids of the messages; a last assistant message stays open only where this server leaves it open."""
    messages = [Message(row["role"], row["content"]) for row in rows]
    if messages and messages[-1].role == "assistant":
        wanted: dict[str, bool] = {
            "continue": bool(body.get("continue_final_message")) and body.get("add_generation_prompt") is False,
            "prefix": bool(rows[-1].get("prefix")),
            "trailing": True,
            "closed": False,
        }
        if not wanted[floor.quirks.prefill]:
            messages[-1] = Message("user", messages[-1].content)  # without a word, as SGLang does
    return floor.engine.tokenizer.render(messages)


def check_room(floor: Floor, ids: TokenIds, limit: int) -> None:
    """Refuse what does not fit.

    :raises Bad: it does not.
    """
    most = floor.engine.spec.context_length
    if len(ids) + limit > most:
        raise Bad(400, f"This model's maximum context length is {most} tokens; you asked for {len(ids) + limit}.")


def finish_word(done: Completion) -> Literal["stop", "length"]:
    """Why it ended: a stop string and the model's own end are one word."""
    return "length" if done.ended == "length" else "stop"


def shown(done: Completion, stop: tuple[str, ...]) -> str:
    """The text up to the first stop string, which is left out."""
    places = [done.text.find(word) for word in stop if word in done.text]
    return done.text[: min(places)] if places else done.text


def spoilt(text: str, fault: ServerFault | None) -> str | None:
    """The text, or none where numbers would have been spoilt."""
    return None if fault == "nan" else text


async def _digits(floor: Floor, ids: TokenIds, fault: ServerFault | None) -> list[dict[str, Any]]:
    """The ten digits stand in for the likeliest tokens, which only the law knows."""
    rows: list[dict[str, Any]] = []
    for digit in range(10):
        (token, *_) = floor.engine.tokenizer.encode(str(digit))
        _, scores = await floor.score((*ids, token), len(ids), f"digit {digit} {id(rows)}", fault)
        rows.append({"token": str(digit), "logprob": scores.logprobs[0], "bytes": [48 + digit]})
    return rows


ROUTES = Routes({"/v1/models": models}, {"/v1/chat/completions": completions})
