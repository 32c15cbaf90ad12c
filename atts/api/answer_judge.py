"""Let a model that the user names grade the answers that the grading rules leave unscored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from atts.api.engines import build_engine
from atts.concurrency import collect
from atts.core import Message, SampleRequest, Sampling
from atts.errors import OptionError
from atts.evaluators import GradedRecord, Status, Verdict
from atts.sampling import Seed

if TYPE_CHECKING:
    from atts.engine import Engine

_DEFAULT_PROMPT = Path(__file__).with_name("judge_prompt.txt")
_FIELDS = ("{reference}", "{answer}")
# Token limit of a judge's reply. It is high enough for a judge that reasons before it answers.
_MAX_TOKENS = 4096
_IN_FLIGHT = 16
_DECISION = re.compile(r"\b(EQUAL|DIFFERENT|UNSURE)\b")


def read_judge_prompt(file: Path | None) -> str:
    """Return the judge's prompt from a file, or the default prompt.

    :raises OptionError: the file cannot be read, or lacks `{reference}` or `{answer}`.
    """
    path = file or _DEFAULT_PROMPT
    try:
        prompt = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("judge prompt", f"{path} cannot be read: {error}") from None
    missing = [field for field in _FIELDS if field not in prompt]
    if missing:
        problem = f"{path} lacks {' and '.join(missing)}"
        raise OptionError(
            "judge prompt",
            f"{problem}; the prompt needs both fields, because atts replaces them with the "
            "reference and the answer",
        )
    return prompt


async def judge_unscored(
    records: Iterable[GradedRecord], model: str | Engine, prompt: str
) -> list[GradedRecord]:
    """Let the judge model grade the unscored records, and return all records in their order.

    A verdict from the model names "judged" as its rule. A record stays unscored if the model is
    unsure. A record without an answer or a reference is not sent to the model.
    """
    everything = list(records)
    if not any(_is_open(record) for record in everything):
        return everything
    slots = anyio.Semaphore(_IN_FLIGHT)
    # An engine that is built here is named "target" after its role, so results show the name that
    # the user gave.
    name = model.partition("?")[0] if isinstance(model, str) else model.spec.name
    async with build_engine(model, "target", chat=True) as engine:

        async def judged(record: GradedRecord) -> GradedRecord:
            if not _is_open(record):
                return record
            async with slots:
                return await _judged(record, engine, name, prompt)

        return await collect([partial(judged, record) for record in everything])


def _is_open(record: GradedRecord) -> bool:
    return (
        record.verdict.status == "unscored"
        and record.answer is not None
        and any(gold.strip() for gold in record.golds)
    )


async def _judged(record: GradedRecord, engine: Engine, name: str, prompt: str) -> GradedRecord:
    """Ask the judge model about one record, and return the record with the model's verdict."""
    references = "\n(or)\n".join(record.golds)
    texts = {"{reference}": references, "{answer}": record.answer or ""}
    # Both placeholders are replaced in one pass. If an answer contains the text "{reference}", this
    # text is not replaced.
    content = re.sub(r"\{(?:reference|answer)\}", lambda match: texts[match[0]], prompt)
    ids = engine.tokenizer.render([Message("user", content)])
    room = engine.spec.context_length - len(ids)
    if room < 1:
        return _left_open(
            record, "the reference and the answer together are too long for the judge's context"
        )
    reply = await engine.sample(
        SampleRequest(
            ids,
            min(_MAX_TOKENS, room),
            Sampling(temperature=0.0),
            Seed(),
            rollout=f"judge/{record.index}",
            logprobs="unneeded",
        )
    )
    status, reason = _decision(reply.text, reply.ended == "length")
    before = record.verdict
    if status is None:
        return _left_open(record, reason)
    detail = (
        f"judged by {name}: {reason}; the grading rules left the answer unscored ({before.rule})"
    )
    return replace(record, verdict=Verdict(status, "judged", f"{detail}; {before.detail}"))


def _left_open(record: GradedRecord, reason: str) -> GradedRecord:
    """Return the record, still unscored, with the reason why the judge model did not decide."""
    before = record.verdict
    detail = f"{before.detail}; {reason}" if before.detail else reason
    return replace(record, verdict=replace(before, detail=detail))


def _decision(reply: str, is_cut: bool) -> tuple[Status | None, str]:
    """Read the judge's verdict from the last line of its reply. Return the status and the judge's
    verdict, or None and the reason why there is no verdict.
    """
    if is_cut:
        return None, "the judge's reply was cut off by the token limit"
    lines = [line for line in reply.rsplit("</think>")[-1].splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    words = _DECISION.findall(last)
    shown = last if len(last) <= 60 else last[:57] + "..."
    match words:
        case ["EQUAL"]:
            return "equal", "EQUAL"
        case ["DIFFERENT"]:
            return "different", "DIFFERENT"
        case ["UNSURE"]:
            return None, "the judge is unsure"
        case _:
            return None, f"the last line of the judge's reply states no verdict: {shown!r}"
