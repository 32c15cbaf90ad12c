"""Tests of the key `speculate`: it chooses the model that proposes tokens, and changes no run's
text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.accel import SpeculationOptions, accelerated
from atts.analysis.reports.build import build_report
from atts.analysis.reports.tables import speculation_table
from atts.api import Setup, build_engines, evaluate
from atts.core import Message, SampleRequest
from atts.engine import Engine
from atts.local import LocalEngine, LocalOptions
from atts.pipelines import Policy
from atts.run import RunResult

HERE = "worker=thread&threads=1"
EMBEDDED = Setup(
    draft=f"embedded:draft?{HERE}",
    target=f"embedded:target?{HERE}",
    policy=Policy(samples=2, early_stop="none"),
)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("method", "rollouts", "ways"), [("target-only", 8, ("auto", "suffix")), ("atts", 1, ("auto",))]
)
async def test_speculation_changes_no_token_of_a_run(
    method: str, rollouts: int, ways: Sequence[Any], tmp_path: Path
) -> None:
    """Tokens, scores and decisions equal those without speculation.

    The rollouts run one at a time, because the gate learns from their order. The result, the run's
    journal and its report have the counters of proposals.
    """
    setup = replace(EMBEDDED, method=method, concurrency=rollouts, rate=0.5)
    written = list[Any]()
    for way in ("off", *ways):
        target = f"embedded:target?{HERE}" + "&k=4" * (way == "auto")
        result = await evaluate(
            "arithmetic[:1]", replace(setup, target=target, speculate=way), directory=tmp_path / way
        )
        check_told(result, way)
        lines = [line for outcome in result.outcomes() for line in outcome.rollouts]
        written.append(
            [(line.problem, line.sample, line.turns, line.finish, line.answer) for line in lines]
        )
    assert all(written[0] == other for other in written[1:])
    assert any(
        chunk.author == "target" for line in written[0] for turn in line[2] for chunk in turn.chunks
    )


def check_told(result: RunResult, way: str) -> None:
    """Check that result, journal and report agree on the number of proposed tokens, or that none of
    them has such a number.

    The draft proposes many tokens, and most of them are correct.
    """
    assert result.directory is not None
    told = build_report(result.directory).report
    found = result.speculated
    assert told.speculated == found
    assert result.as_json().get("speculated", {}).get("proposed") == (
        found.proposed if found else None
    )
    assert found is None or way != "off"
    if way == "auto":
        assert found is not None
        assert found.proposed >= found.accepted == sum(found.accepted_at) > 0
        assert found.tested_at[0] == found.rounds
        assert found.chosen == 4 * found.choices
        assert f"{found.proposed:,}" in str(found)
        assert any(
            cell.text == f"{found.proposed:,}"
            for row in speculation_table(told).rows
            for cell in row
        )


async def proposals(target: Engine) -> int | None:
    """Return the number of tokens proposed to an engine for a short text, or None if the engine
    does not speculate.
    """
    assert isinstance(target, LocalEngine)
    async with target:
        await target.sample(
            SampleRequest(target.tokenizer.render([Message("user", "What is 3 + 4?")]), 24)
        )
        speculation = target.loop_stats().speculation
        return None if speculation is None else speculation.proposed


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("setup", "does"),
    [
        (EMBEDDED, True),
        (replace(EMBEDDED, speculate="draft"), True),
        (replace(EMBEDDED, speculate="suffix"), True),
        (replace(EMBEDDED, speculate="pearl"), True),
        (replace(EMBEDDED, speculate="off"), False),
        (replace(EMBEDDED, method="exact"), False),
        (replace(EMBEDDED, draft="scripted"), False),
        (replace(EMBEDDED, target=f"embedded:target?{HERE}&speculate=off"), False),
        (
            replace(EMBEDDED, target=f"embedded:target?{HERE}&speculate=off", speculate="draft"),
            False,
        ),
        (replace(EMBEDDED, target=f"embedded:target?{HERE}&k=0"), False),
        (
            replace(
                EMBEDDED, target=f"embedded:target?{HERE}&drafter=embedded&k=2", speculate="off"
            ),
            True,
        ),
        (replace(EMBEDDED, draft=f"embedded:target?{HERE}"), False),
    ],
)
async def test_the_key_chooses_the_proposer_unless_the_engine_does(
    setup: Setup, does: bool
) -> None:
    """Options in the target's address take precedence over the key `speculate`.

    A method whose target writes nothing gets no drafter, and a model never drafts for itself.
    """
    assert ((await proposals(setup.engines()[1])) is not None) == does


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("flaw", ["tokenizer", "missing", "weights", "memory"])
async def test_a_draft_that_cannot_propose_is_left_out(
    flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By default a draft that cannot propose is left out and the run continues; if the user names
    this draft as proposer, the run ends with an error.
    """
    from atts.models import path

    folder = tmp_path / "draft"
    if flaw != "missing":
        shutil.copytree(path("draft"), folder)
    if flaw == "tokenizer":
        swap_two_tokens(folder / "tokenizer.json")
    if flaw == "weights":
        (folder / "model.safetensors").write_bytes(b"none")
    if flaw == "memory":
        scarce(monkeypatch, "drafter")
    options = LocalOptions(worker="thread", threads=1)
    engine = accelerated(path("target"), options=options, lent=str(folder))
    assert await proposals(engine) is None
    named = SpeculationOptions(drafter=str(folder))
    with pytest.raises(Exception, match="drafter"):
        await proposals(
            accelerated(path("target"), name="target", options=options, speculation=named)
        )


def swap_two_tokens(file: Path) -> None:
    """Exchange the ids of two tokens."""
    state = json.loads(file.read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary["ox"], vocabulary["The"] = vocabulary["The"], vocabulary["ox"]
    file.write_text(json.dumps(state))


def scarce(monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    """Make the weight loader see almost no free memory for engines whose name contains `whose`."""
    from atts.accel import build
    from atts.local.loader import load_weights

    def load(folder: Path, config: Any, dtype: Any, device: Any, name: str, **how: Any) -> Any:
        with monkeypatch.context() as patch:
            if whose in name:
                patch.setattr("atts.local.loader.free_memory", lambda: 1000)
            return load_weights(folder, config, dtype, device, name, **how)

    monkeypatch.setattr(build, "load_weights", load)


def test_a_dry_run_names_the_proposer(atts: Callable[..., Any]) -> None:
    """The dry run names the setting that chose the proposer; the run's directory does not depend on
    the proposer.
    """
    plain, off = (
        atts("eval", "arithmetic[:1]", *words, "--dry-run")
        for words in ((), ("--set", "speculate=off"))
    )
    assert "the draft, if both models share a tokenizer" in plain.out
    assert "speculate=auto" in plain.out
    assert "nothing (speculate=off" in off.out
    assert [line for line in plain.out.splitlines() if "output" in line] == [
        line for line in off.out.splitlines() if "output" in line
    ]
    server = atts("eval", "arithmetic[:1]", "--target", "vllm:http://h:1/M", "--dry-run")
    assert "nothing: atts speculates only if draft and target run on this machine" in server.out
    named = atts("eval", "arithmetic[:1]", "--set", "speculate=pearl", "--dry-run")
    assert "the draft (speculate=pearl)" in named.out
    own = atts("eval", "arithmetic[:1]", "--target", "embedded?k=3", "--dry-run")
    assert "the drafter named in the target's address" in own.out


def test_the_key_does_not_change_an_engine_object() -> None:
    """An engine that a program made gets no drafter, and requesting one with the key is an error."""
    from atts.errors import OptionError
    from atts.models import path

    own = LocalEngine(path("target"))
    assert build_engines("embedded", own)[1] is own
    with pytest.raises(OptionError, match="engine's own options"):
        build_engines("embedded", own, "suffix")
