"""A method that asks one model runs on one model: the other is not opened, probed or allowed to set a budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.api import Setup, configure, diagnose, dry_run, evaluate
from atts.core import Role
from atts.errors import EngineUnavailable
from atts.journal import open_run
from atts.methods import PRESETS, preset
from atts.pipelines import Chunking, FixedGate, Policy, RandomGate
from atts.testing import DialectServer, ScriptedEngine, toy_problems

LONG, SHORT = 8192, 700
ONE_MODEL: dict[str, Role] = {
    "target-only": "target",
    "draft-only": "draft",
    "deep-conf": "draft",
}


class WatchedEngine(ScriptedEngine):
    """A scripted engine that counts how often it was opened."""

    def __init__(self, role: Role, context_length: int) -> None:
        super().__init__(role, context_length=context_length)
        self.num_opened = 0

    async def __aenter__(self) -> WatchedEngine:
        self.num_opened += 1
        await super().__aenter__()
        return self


def engines(used: Role) -> dict[Role, WatchedEngine]:
    """A long context for the role that is used, a short one for the other."""
    return {
        role: WatchedEngine(role, LONG if role == used else SHORT) for role in ("draft", "target")
    }


@pytest.fixture
def served() -> Iterator[DialectServer]:
    """A server with a long context."""
    with ExitStack() as stack:
        yield stack.enter_context(
            DialectServer(lambda: ScriptedEngine("target", context_length=40_000), "chat")
        )


@pytest.mark.parametrize(("method", "used"), ONE_MODEL.items())
@pytest.mark.anyio
async def test_only_the_model_that_is_asked_is_opened(method: str, used: Role) -> None:
    """The run, its budget and its manifest know one model."""
    made = engines(used)
    policy = Policy(samples=2, max_tokens=2000)
    setup = Setup(draft=made["draft"], target=made["target"], method=method, policy=policy)
    result = await evaluate(toy_problems(2), setup)
    assert result.status == "finished"
    assert {role for role, engine in made.items() if engine.num_opened} == {used}
    assert [*result.manifest.engines] == [used]
    for rollout in (one for outcome in result.outcomes() for one in outcome.rollouts):
        assert rollout.finish == "answer"


@pytest.mark.parametrize(("method", "used"), ONE_MODEL.items())
@pytest.mark.anyio
async def test_the_other_context_sets_no_budget(method: str, used: Role) -> None:
    """Lengths that nothing sets come from the model that is asked, before and after it is opened."""
    words = {used: "openai:http://a/v1/m", "draft" if used == "target" else "target": "embedded"}
    setup = Setup(**words, method=method)  # type: ignore[arg-type]  # engines by role
    assert setup.run_policy.bounds().max_tokens == 16_000
    alone = configure({**words, "method": method}, environment={}, folder="/")
    assert alone["max_tokens"] == 16_000
    assert alone["turns"] * alone["chunking.draft_tokens"] >= 16_000
    made = engines(used)
    plan = setup.plan(made["draft"], made["target"])
    bounds = plan.resolved().policy.bounds()
    assert bounds.max_tokens == LONG - 512
    assert bounds.turns * bounds.draft_tokens >= LONG - 512


@pytest.mark.anyio
async def test_a_served_target_needs_no_draft(served: DialectServer, tmp_path: Path) -> None:
    """Without --draft the embedded draft neither cuts rollouts nor appears in what is printed."""
    target = f"chat:{served.url}/v1/toy?context=40000"
    for method, role in (("target-only", "target"), ("draft-only", "draft")):
        configuration = configure(
            {role: target, "method": method, "dataset": "arithmetic[:1]", "out": str(tmp_path)},
            environment={},
            folder="/",
        )
        planned = dry_run(configuration)
        assert planned.budget["max_tokens"].value == 16_000
        assert planned.proposes.startswith("nothing") or role == "target"
        seen = {check.name for check in (await diagnose(configuration)).checks}
        assert role in seen
        assert ({"draft", "target"} - {role}).isdisjoint(seen)


@pytest.mark.anyio
async def test_an_engine_that_is_not_asked_may_be_down() -> None:
    """A dead draft server does not stop a run of the target alone."""
    dead = "vllm:http://127.0.0.1:9/none"
    result = await evaluate(
        toy_problems(1), Setup(draft=dead, target="scripted", method="target-only")
    )
    assert result.status == "finished"
    with pytest.raises(EngineUnavailable):
        await evaluate(toy_problems(1), Setup(draft=dead, target="scripted"))


def test_each_method_says_which_models_it_asks() -> None:
    """One model where every chunk stays as it is; both where a gate, a wave or a stream needs both."""
    both = ("draft", "target")
    for row in PRESETS:
        policy = row.policy(Policy())
        expected = (ONE_MODEL[row.name],) if row.name in ONE_MODEL else both
        assert row.roles(policy) == expected, row.name
    assert preset("draft-only").roles(Policy(later="target", first_wave=2)) == both
    assert preset("atts").roles(Policy(drafter="target")) == ("target",)
    alone = Setup(draft="scripted", target="scripted", method="draft-only")
    assert alone.roles == ("draft",)
    assert replace(alone, gate=RandomGate(0.5, 0)).roles == both
    assert replace(alone, method="atts", gate=FixedGate("accept")).roles == ("draft",)


def test_a_rollout_that_nothing_reads_is_one_request() -> None:
    """Chunks end where somebody looks; else a rollout is asked for whole, unless lengths are set."""
    model = "openai:http://a/v1/{}"
    for name, request, chunk in (("o-large", 4096, 500), ("Small-Instruct", 4096, 256)):
        words = model.format(name)
        for method in ("target-only", "draft-only"):
            alone = Setup(draft=words, target=words, method=method).run_policy.bounds()
            assert (alone.draft_tokens, alone.target_tokens) == (request, request)
            made = configure({"draft": words, "target": words, "method": method}, environment={})
            assert made["chunking.draft_tokens"] == request
        for method in ("atts", "deep-conf", "exact"):
            cut = Setup(draft=words, target=words, method=method).run_policy.bounds()
            assert (cut.draft_tokens, cut.target_tokens) == (chunk, chunk)
    base = Setup(target=model.format("Big-base"), method="target-only").run_policy.bounds()
    assert base.target_tokens == 256
    given = Policy(chunking=Chunking(target_tokens=100))
    assert Setup(target=words, method="target-only", policy=given).run_policy.bounds()[3] == 100
    assert Setup(method="target-only").run_policy.bounds().target_tokens == 64


def test_the_report_names_one_model(atts: Any) -> None:
    """The report and the list of runs say which model was not used."""
    run = ("eval", "arithmetic[:2]", "--samples", "1", "--target", "scripted", "--out", "alone")
    assert atts(*run, "--method", "target-only", "--report", "none").code == 0
    assert [*open_run(Path("alone")).manifest.engines] == ["target"]
    report = json.loads(atts("report", "alone", "--format", "json", "--out", "-").out)
    assert report["run"]["draft"] == "not used"
    assert "embedded" not in atts("runs", ".").out


def test_words_of_a_model_that_is_not_asked_are_still_read(atts: Any) -> None:
    """A typing error in a flag is refused whether or not the method uses it."""
    run = ("eval", "arithmetic[:1]", "--method", "target-only", "--target", "scripted", "--dry-run")
    assert atts(*run, "--draft", "vlm:http://a/m").code == 2
