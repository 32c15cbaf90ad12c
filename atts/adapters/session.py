"""A solver session: questions answered one by one by engines that stay open and a gate that goes on learning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import TracebackType
from typing import Any, Literal, Self, get_args

import anyio

from atts.api import Setup, build_engines, configure
from atts.core import Outcome, Problem, Rollout, Usage
from atts.errors import EngineError, EngineUnavailable, OptionError, UsageError
from atts.pipelines import Policy
from atts.run import Plan, RunOptions, evaluate

ReplyKind = Literal["text", "answer"]
"""What is handed back: the reasoning of a rollout that voted for the answer, or the answer alone."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one question."""

    text: str
    answer: str | None
    usage: Usage
    facts: Mapping[str, Any]  # how it came about, as strict JSON

    @classmethod
    def of(cls, outcome: Outcome, kind: ReplyKind = "text") -> Reply:
        """From an outcome.

        :raises EngineError: it or a rollout of it failed; the answer without would be counted as the model's.
        """
        if not outcome.is_complete:
            errors = (rollout.error for rollout in outcome.rollouts if rollout.error)
            raise EngineError("atts", next(errors, outcome.why), "The run's engines are named in the message")
        text = (outcome.answer or "") if kind == "answer" else _speaker(outcome).text
        return cls(text, outcome.answer, outcome.usage, _facts(outcome))


class SolverSession:
    """Open it once, ask as often as wanted, from many tasks at once; opened by the first question if not before.

    The same question asked again is answered anew, by other random numbers. `kind` says what a reply's text is.

    >>> from atts.testing import run_virtual, toy_problems
    >>> async def main() -> str | None:
    ...     async with SolverSession(Setup(draft="scripted", target="scripted")) as session:
    ...         return (await session.ask(toy_problems(1)[0].text)).answer
    >>> run_virtual(main) == toy_problems(1)[0].answer
    True

    :raises OptionError: an unknown kind.
    """

    def __init__(self, setup: Setup, kind: ReplyKind = "text") -> None:
        if kind not in get_args(ReplyKind):
            raise OptionError("reply", f"unknown value {kind!r}", get_args(ReplyKind), kind)
        self._setup = setup
        self._kind: ReplyKind = kind
        self._stack = AsyncExitStack()
        self._opening = anyio.Lock()
        self._plan: Plan | None = None
        self._is_closed = False
        self._asked = Counter[str]()

    async def ask(self, question: str, *, policy: Mapping[str, Any] | None = None) -> Reply:
        """Solve it; `policy` changes fields of the setup's policy for this question.

        :raises EngineError: an engine cannot be opened, is lost, or failed at this question.
        :raises OptionError: an impossible policy.
        """
        plan = await self._ready()
        if policy:
            changed = replace(self._setup, policy=replace(self._setup.policy, **policy))
            plan = replace(plan, policy=changed.run_policy)
        digest = blake2b(question.encode(), digest_size=6).hexdigest()
        self._asked[digest] += 1
        problem = Problem(f"{digest}-{self._asked[digest]}", question)
        result = await evaluate([problem], plan, RunOptions(engines="are open", signals="ignore"))
        return Reply.of(next(result.outcomes()), self._kind)

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the engines; twice is fine."""
        self._is_closed = True
        await self._stack.aclose()

    async def _ready(self) -> Plan:
        async with self._opening:
            if self._is_closed:
                raise EngineUnavailable("atts", "it is closed", "Make a new one")
            if self._plan is None:
                engines = build_engines(self._setup.draft, self._setup.target)
                async with AsyncExitStack() as stack:
                    for engine in dict.fromkeys(engines):
                        await stack.enter_async_context(engine)
                    self._stack = stack.pop_all()
                self._plan = self._setup.plan(*engines)
            return self._plan


def setup_of(model: str, options: Mapping[str, object]) -> Setup:
    """The setup of a harness's model name and options: the names of the configuration, as on our own command line.

    `model` names both engines ("embedded", "scripted") unless `draft` and `target` are given; then it is a label.

    >>> setup_of("embedded", {"rate": "0.3", "samples": 4}).rate
    0.3

    :raises OptionError: an unknown option, with the nearest known one, or a value that is impossible.
    """
    named = {"draft", "target"} & options.keys()
    if len(named) == 1:
        raise OptionError("engines", f"only {named.pop()!r} is given; give draft and target, or neither")
    engines = {} if named else {"draft": model, "target": model}
    return configure({**engines, **options}).setup()


def question_of(turns: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """A conversation of (role, text) as a system prompt ("" for ours) and one question; earlier turns are quoted in it.

    >>> question_of([("system", "Be brief."), ("user", "1 + 1?")])
    ('Be brief.', '1 + 1?')
    >>> question_of([("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?")])[1]
    'User: 1 + 1?\\n\\nAssistant: 2\\n\\nUser: 2 + 2?'

    :raises UsageError: the conversation holds no question.
    """
    system = "\n\n".join(text for role, text in turns if role == "system")
    said = [(role, text) for role, text in turns if role != "system"]
    if not said:
        raise UsageError("a conversation without a question cannot be answered")
    if len(said) == 1:
        return system, said[0][1]
    return system, "\n\n".join(f"{role.capitalize()}: {text}" for role, text in said)


def policy_changes(base: Policy, system: str, temperature: float | None, max_tokens: int | None) -> dict[str, Any]:
    """What a harness's own words change in a policy; None and "" change nothing.

    A temperature of 0 is what harnesses send by default, and would make all rollouts alike: it changes nothing either.
    """
    changes: dict[str, Any] = {}
    if system:
        changes["system"] = system
    if temperature:
        changes["sampling"] = replace(base.sampling, temperature=temperature)
    if max_tokens:
        changes["max_tokens"] = max_tokens
    return changes


def _speaker(outcome: Outcome) -> Rollout:
    """The first rollout that gave the answer, else the first that got anywhere."""
    said = [line for line in outcome.rollouts if line.answer is not None and line.answer == outcome.answer]
    return [*said, *sorted(outcome.rollouts, key=lambda line: not line.turns)][0]


def _facts(outcome: Outcome) -> dict[str, Any]:
    asked = [turn.decision for line in outcome.rollouts for turn in line.turns if turn.decision]
    escalated = sum(decision.escalate for decision in asked)
    usage = outcome.usage
    return {
        "answer": outcome.answer,
        "votes": {name: votes for name, votes in outcome.votes.items() if math.isfinite(votes)},
        "rollouts": len(outcome.rollouts),
        "decisions": len(asked),
        "escalated": escalated,
        "draft_tokens": usage.draft_tokens,
        "target_tokens": usage.target_tokens,
        "scored_tokens": usage.scored_tokens,
    }
