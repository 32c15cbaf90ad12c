"""Tests of chunks that a reward model scores over HTTP, on chunks with planted mistakes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from atts.api import Setup, evaluate_sync
from atts.core import ScoreRequest
from atts.errors import (
    BadReply,
    EngineUnavailable,
    OptionError,
    UnsupportedByEngine,
)
from atts.evaluators import compare_runs
from atts.models import path
from atts.pipelines import Policy, ScoreRule
from atts.run import RunResult
from atts.servers.rewards import RemoteRewardModel, RewardedTarget, chance_of
from atts.testing import ScriptedEngine, toy_problems
from atts.testing.servers import RewardServer

STEP = re.compile(r"(\d+) (plus|minus) (\d+) (?:is|gives|makes|was) (\d+)")
Start = Callable[..., RewardServer]


def truth(problem: str, steps: Sequence[str]) -> float:
    """Return a high reward if the last step's sum is correct and a low one if it is wrong. A step
    without a sum gets a fairly high reward.
    """
    match = STEP.search(steps[-1])
    if match is None:
        return 0.8
    first, second, result = int(match[1]), int(match[3]), int(match[4])
    value = first + second if match[2] == "plus" else first - second
    return 0.9 if value == result else 0.1


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts reward servers; the end of the test stops them."""
    with ExitStack() as stack:

        def make(rewards: Any = truth, **settings: Any) -> RewardServer:
            return stack.enter_context(RewardServer(rewards, **settings))

        yield make


def run(address: str, out: Path | None = None, problems: int = 40, **changes: Any) -> RunResult:
    """Run toy problems with scores of the reward model at this address."""
    policy = Policy(samples=4, early_stop="none", score=ScoreRule("prm", address))
    setup = Setup("scripted", "scripted", policy=policy, **changes)
    return evaluate_sync(toy_problems(problems, 5), setup, directory=out)


def shares(result: RunResult) -> list[float]:
    """Return the share of correct rollouts of each problem."""
    return [
        sum(one.verdict == "correct" for one in problem.samples) / len(problem.samples)
        for problem in result.problems
    ]


def test_a_skilled_reward_model_beats_a_coin_and_an_unskilled_one_does_not(start: Start) -> None:
    """A reward model with skill gives a higher accuracy than a coin at the same rate. A reward
    model without skill does not.
    """
    ignorant = start(lambda problem, steps: crc32(steps[-1].encode()) % 97 / 97)
    knowing = start()
    coin = run(knowing.address, method="coin")
    by_truth = run(knowing.address)
    by_lot = run(ignorant.address)
    for result in (by_truth, by_lot):
        assert abs(result.rate.value - 0.2) < 0.03
        assert result.unscored == 0
    gain = compare_runs(shares(coin), shares(by_truth)).difference
    assert gain.low > 0
    nothing = compare_runs(shares(coin), shares(by_lot)).difference
    assert nothing.low < 0 < nothing.high


@pytest.mark.anyio
async def test_vllm_is_asked_for_one_reward_a_step(start: Start) -> None:
    """Each step sent to vLLM ends with the separator, so vLLM returns a reward per step. The
    chunk's score is the log of the last step's reward.
    """
    server = start()
    rewards = RemoteRewardModel(server.address)
    async with RewardedTarget(ScriptedEngine("target"), rewards) as target:
        steps = ("4 plus 3 is 7.\n\n", "7 minus 2 is 6.\n\n")
        request = ScoreRequest((1,), (2,), texts=("Start at 4.", *steps))
        assert (await target.score(request)).logprobs == (math.log(0.1),)
        plain = await target.score(replace(request, texts=()))
        assert plain.logprobs != (math.log(0.1),)
    content = server.bodies[-1]["messages"][-1]["content"]
    assert content == "4 plus 3 is 7.<extra_0>7 minus 2 is 6.<extra_0>"
    assert server.bodies[-1]["add_generation_prompt"] is False


@pytest.mark.anyio
async def test_a_separator_inside_a_step_adds_no_step(start: Start) -> None:
    """If a model writes the separator inside a step, the step still gets one reward. Otherwise
    later rewards would be assigned to wrong steps.
    """
    server = start()
    async with RemoteRewardModel(server.address) as rewards:
        assert await rewards.reward("Start at 4.", ["So <extra_0> then", "4 plus 3 is 8."]) == 0.1


@pytest.mark.anyio
async def test_models_of_whole_texts_are_asked_over_classify(start: Start) -> None:
    """A reward model of whole texts is requested at /classify, from a vLLM server without /pooling
    or from SGLang. For SGLang the tokenizer's chat template is applied.
    """
    classifier = start(route="/classify")
    async with RemoteRewardModel(classifier.address) as rewards:
        assert await rewards.reward("Start at 4.", ["4 plus 3 ", "is 8."]) == 0.1
    texts: list[str] = []

    def judge(problem: str, steps: Sequence[str]) -> float:
        texts.append(steps[-1])
        return math.log(3)

    folder = path("draft")
    async with ScriptedEngine("draft"):
        from atts.models.tokenizers import ModelTokenizer

        tokenizer = ModelTokenizer(folder, "reward model")
        server = start(judge, dialect="sglang", numbers=1, decode=tokenizer.decode)
        async with RemoteRewardModel(f"{server.address}?tokenizer={folder}") as rewards:
            chance = await rewards.reward("Tom has 3 caps.", ["3 + 4 = 7.\n\n", "So 7."])
    assert chance == pytest.approx(0.75)
    assert texts[-1].endswith("3 + 4 = 7.\n\nSo 7.")
    assert "Tom has 3 caps." in texts[-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"route": ""}, "no route /classify, so the server's model writes text"),
        ({"pools": "all"}, "rewards? for 2 steps.*set score.separator"),
        ({"separator": "<step>"}, "0 rewards for 2 steps"),
        ({"numbers": 5}, "returns embeddings, not rewards"),
        ({"model": "other/model"}, "serves other/model, not toy-prm"),
    ],
)
def test_a_server_that_gives_no_rewards_is_refused_before_the_run(
    start: Start, settings: dict[str, Any], words: str
) -> None:
    """A server that gives no rewards is refused before the run, with a message that names the
    problem and the fix.
    """
    server = start(**settings)
    with pytest.raises(UnsupportedByEngine, match=words):
        run(f"vllm:{server.url}/toy-prm")


def test_impossible_addresses_and_missing_servers_are_named(start: Start) -> None:
    """The error about a missing address, another kind of engine, or a port without a server names
    the fault.
    """
    with pytest.raises(OptionError, match=r"score.kind prm needs the address of a reward model"):
        run("")
    with pytest.raises(OptionError, match="is not the address of a reward model; write vllm:http"):
        run("hf:Qwen/Qwen2.5-Math-PRM-7B")
    server = start()
    address = server.address
    server.__exit__(None, None, None)
    with pytest.raises(EngineUnavailable, match="reward model: cannot reach"):
        run(address)


def test_a_resumed_run_asks_for_no_reward_twice(start: Start, tmp_path: Path) -> None:
    """The journal records rewards like scores, so a finished run requests nothing but the trial
    reward.
    """
    server = start()
    first = run(server.address, tmp_path / "run", problems=4)
    asked = len(server.bodies)
    again = run(server.address, tmp_path / "run", problems=4)
    assert shares(again) == shares(first)
    assert len(server.bodies) - asked <= 1


def test_each_form_of_reward_becomes_a_probability() -> None:
    """A reward of any form becomes a probability: probabilities or logits of two classes, or a
    single logit.

    atts refuses any other form.
    """
    assert chance_of([0.2, 0.8]) == 0.8
    assert chance_of([1.0, 3.0]) == pytest.approx(1 / (1 + math.exp(-2.0)))
    assert chance_of([-9e9]) == 0.0
    assert chance_of([9e9]) == 1.0
    with pytest.raises(BadReply, match="3 numbers"):
        chance_of([0.1, 0.2, 0.7])
    with pytest.raises(BadReply, match="not a number"):
        chance_of([math.nan])
