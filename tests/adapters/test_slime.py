"""Tests of slime's custom generate function: it fills samples as slime's trainer reads them, also
after an update of weights.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from atts.adapters import slime
from atts.adapters.slime import generate
from atts.api import Session
from atts.errors import OptionError, UnsupportedByEngine
from atts.testing import ToyTokenizer, toy_problems

PARAMS = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "max_new_tokens": 256, "stop": None}
TYPES = os.environ.get("SLIME_TYPES", "")
"""Path of slime/utils/types.py in a checkout of slime."""


@dataclass
class Sample:
    """The fields of slime's sample that a generate function reads or fills."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    prompt: Any = ""
    tokens: list[int] = field(default_factory=list[int])
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


def slime_sample(**fields: Any) -> Any:
    """Make a sample of slime's own class, loaded from its source file alone, because importing the
    package needs Ray and SGLang.
    """
    if not Path(TYPES).is_file():
        pytest.skip(
            "SLIME_TYPES does not name a file: set it to slime/utils/types.py of a checkout"
        )
    pytest.importorskip("torch", reason="slime's types need torch")
    misc = ModuleType("slime.utils.misc")
    misc.decode_int32_meta_array = lambda *_: None  # type: ignore[attr-defined]
    sys.modules.setdefault("slime.utils.misc", misc)
    spec = importlib.util.spec_from_file_location("slime_types", TYPES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slime_types"] = module
    spec.loader.exec_module(module)
    return module.Sample(**fields)


def args(**settings: Any) -> Namespace:
    """Return the trainer's arguments with a table of atts settings."""
    return Namespace(atts={"draft": "scripted", "target": "scripted", **settings})


def written(
    prompts: list[Any],
    make: Callable[..., Any] = Sample,
    params: Any = PARAMS,
    **settings: Any,
) -> list[Any]:
    """Return the samples of some prompts; all samples are generated concurrently."""
    samples = [make(prompt=prompt) for prompt in prompts]

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for sample in samples:
                tasks.start_soon(generate, args(**settings), sample, dict(params))

    anyio.run(main)
    return samples


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Any:
    slime.workers.clear()
    yield
    slime.workers.clear()


@pytest.mark.parametrize("make", [Sample, slime_sample])
def test_a_sample_is_what_the_trainer_reads(make: Callable[..., Any]) -> None:
    """A sample has the fields that slime's trainer reads: mask and log-probabilities are as long as
    the response, and the mask excludes the target's tokens.
    """
    samples = written([one.text for one in toy_problems(4)], make, rate=0.3)
    masks: list[int] = []
    for sample in samples:
        assert sample.status is type(sample).Status.COMPLETED
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length > 0
        assert len(sample.tokens) > sample.response_length
        assert all(type(token) is int for token in sample.tokens)
        for is_trained, logprob in zip(sample.loss_mask, sample.rollout_log_probs, strict=True):
            assert logprob <= 0 if is_trained else logprob == 0
        facts = sample.metadata["atts"]
        assert facts["weights"] == 0
        assert 0 in sample.loss_mask or not facts["escalated"]
        masks += sample.loss_mask
    assert {*masks} == {0, 1}
    if make is slime_sample:
        for sample in samples:
            sample._validate_response_metadata_lengths()
            assert type(sample).from_dict(sample.to_dict()) == sample


def test_a_rollout_that_starts_again_has_the_tokens_of_its_text() -> None:
    """With `escalates=rollout`, the target writes an escalated rollout from the beginning; the
    sample leaves out the chunks that the draft wrote before.
    """
    samples = written([one.text for one in toy_problems(12)], rate=0.3, escalates="rollout")
    restarted = [one for one in samples if one.metadata["atts"]["escalated"]]
    assert len(restarted) > 3
    for sample in restarted:
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        assert ToyTokenizer().decode(response) == sample.response
        assert {*sample.loss_mask} == {0}


def test_samples_of_one_prompt_differ_and_messages_are_read() -> None:
    """Samples of one prompt (a text or a list of messages) have the same prompt but different
    random numbers.
    """
    text = toy_problems(1)[0].text
    messages = [{"role": "user", "content": text}]
    samples = written([messages] * 6, rate=0.0, params={**PARAMS, "temperature": 1.0})
    assert len({tuple(sample.tokens) for sample in samples}) > 1
    assert {*samples[0].loss_mask} == {1}


def test_a_limit_of_tokens_truncates() -> None:
    """`max_new_tokens` limits the number of tokens of the response."""
    [sample] = written([toy_problems(1)[0].text], params={**PARAMS, "max_new_tokens": 4}, rate=0.0)
    assert sample.status is Sample.Status.TRUNCATED
    assert 0 < sample.response_length <= 4


def test_changed_weights_open_a_session_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an engine's weights change, the engine refuses requests of the old session, so all later
    samples use one new session.
    """
    solve = Session.solve
    sessions: list[Session] = []
    closed: list[Session] = []
    close = Session.aclose

    async def solved(self: Session, *given: Any, **more: Any) -> Any:
        if self not in sessions:
            sessions.append(self)
        outcome = await solve(self, *given, **more)
        if self is sessions[0] and len(sessions) == 1 and refusing:
            raise UnsupportedByEngine("draft", "the server changed while in use")
        return outcome

    async def aclosed(self: Session) -> None:
        closed.append(self)
        await close(self)

    monkeypatch.setattr(Session, "solve", solved)
    monkeypatch.setattr(Session, "aclose", aclosed)
    refusing: list[bool] = []
    prompts = [one.text for one in toy_problems(3)]
    samples = [Sample(prompt=prompt) for prompt in prompts]

    async def main() -> None:
        await generate(args(), samples[0], PARAMS)
        refusing.append(True)
        for sample in samples[1:]:
            await generate(args(), sample, PARAMS)

    anyio.run(main)
    assert [sample.metadata["atts"]["weights"] for sample in samples] == [0, 1, 1]
    assert {sample.status for sample in samples} == {Sample.Status.COMPLETED}
    assert len(sessions) == 2
    assert closed == sessions[:1]


def test_an_engine_that_never_could_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an engine fails before its first answer, the sample is marked as failed with the engine's
    error, and no new session is tried.
    """
    asked: list[int] = []

    async def refused(self: Session, *given: Any, **more: Any) -> Any:
        asked.append(1)
        raise UnsupportedByEngine("draft", "llama.cpp cannot score")

    monkeypatch.setattr(Session, "solve", refused)
    [sample] = written([toy_problems(1)[0].text])
    assert sample.status is Sample.Status.FAILED
    assert "cannot score" in sample.metadata["atts"]["error"]
    assert len(asked) == 1


@pytest.mark.parametrize("given", [{}, {"atts": {"draft": "scripted"}}, {"atts": "scripted"}])
def test_settings_that_name_no_pair_are_refused(given: dict[str, Any]) -> None:
    """If the settings name no pair of models, the error names the slime flag that passes these
    settings.
    """

    async def main() -> None:
        await generate(Namespace(**given), Sample(prompt="1 + 1?"), PARAMS)

    with pytest.raises(OptionError, match="--custom-config-path"):
        anyio.run(main)
