"""Reward models on servers, which rate the last step of a solution, and targets that use such a
model.

On vLLM, a process reward model answers `POST /pooling` with one row per separator token, and a
model that rates whole texts answers `POST /classify`. On SGLang, all reward models answer `POST
/classify` with one number per text. A request contains the solution up to and including the step
that is rated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec

from atts.core import Message, ScoreRequest, Scores
from atts.engine import Engine, EngineAround, EngineSpec, Tokenizer, opened
from atts.errors import BadReply, EngineUnavailable, OptionError, UnsupportedByEngine, counted
from atts.servers.addresses import ServerAddress, read_server
from atts.servers.client import Call, Client, error_text
from atts.servers.engine import open_tokenizer

SEPARATOR = "<extra_0>"
"""The separator token that Qwen2.5-Math-PRM expects after each step of a solution."""
_NAME = "reward model"
_SCHEMES = ("vllm", "sglang")
_TRIAL = ("What is 1 + 2 + 3?", "1 + 2 = 3.", "3 + 3 = 6, so the answer is \\boxed{6}.")
Route = Literal["/pooling", "/classify"]


class RewardModel(Protocol):
    """A model that rates the last step of a solution. It must be opened with `async with`."""

    async def reward(self, problem: str, steps: Sequence[str]) -> float:
        """Return the probability that the last step of a solution is correct.

        :raises EngineError: the server gave no reply, or a reply without a reward.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None: ...


class RemoteRewardModel:
    """A reward model on a vLLM or SGLang server.

    When it opens, a trial request checks that the server returns rewards.

    :raises OptionError: the address does not name a vLLM or SGLang server.
    """

    def __init__(self, address: str, separator: str = SEPARATOR) -> None:
        self._address = read_reward_address(address)
        self._separator = separator
        self._client: Client | None = None
        self._model = self._address.model
        self._route: Route = "/pooling" if self._address.dialect == "vllm" else "/classify"
        self._tokenizer: Tokenizer | None = None

    async def __aenter__(self) -> Self:
        address = self._address
        client = Client(_NAME, address.url, address.options)
        try:
            await self._open(client)
        except BaseException:
            await client.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        client = self._client
        self._client = None
        if client is not None:
            await client.aclose()
        return None

    async def reward(self, problem: str, steps: Sequence[str]) -> float:
        """Return the probability that the last step of a solution is correct; see `RewardModel`."""
        client = opened(self._client, _NAME)
        call = self._call(problem, steps)
        tokens = len(problem) + sum(map(len, steps))
        return await client.ask(
            lambda rid: call, lambda reply: self._read(reply, len(steps)), lambda rid: None, tokens
        )

    async def _open(self, client: Client) -> None:
        """Find the model on the server, and check with a trial solution that it returns a reward.

        :raises EngineError: the server cannot be reached, has another model, or returns no reward.
        """
        names = await _models(client)
        if not self._model:
            self._model = names[0]
        elif self._model not in names:
            raise UnsupportedByEngine(
                _NAME,
                f"{client.url} serves {', '.join(names)}, not {self._model}",
                "Write the name of a served model after the URL in score.reward",
            )
        if self._address.dialect == "sglang":
            self._tokenizer = await open_tokenizer(self._address.tokenizer, self._model, _NAME)
        problem, *steps = _TRIAL
        reply = await client.look(self._route, self._call(problem, steps).body)
        if reply.status == 404 and self._route == "/pooling":
            # servers have this route if their model rates only whole texts
            self._route = "/classify"
            reply = await client.look(self._route, self._call(problem, steps).body)
        if reply.status == 404:
            raise UnsupportedByEngine(
                _NAME,
                f"{client.url} has no route {self._route}, so the server's model writes text "
                "instead of rewards",
                "Start vLLM with --runner pooling, or SGLang with --is-embedding",
            )
        if reply.status != 200:
            raise UnsupportedByEngine(
                _NAME,
                f"{client.url}{self._route} refused a test request (status {reply.status}: "
                f"{error_text(reply.body)})",
                "See the server's log for the reason",
            )
        try:
            self._read(reply.body, len(steps))
        except BadReply as error:
            raise UnsupportedByEngine(_NAME, error.problem, _ADVICE) from error
        self._client = client

    def _call(self, problem: str, steps: Sequence[str]) -> Call:
        if self._tokenizer is not None:
            ids = self._tokenizer.render([Message("user", problem)])
            return Call("/classify", {"input_ids": ids + self._tokenizer.encode("".join(steps))})
        text = "".join(steps)
        if self._route == "/pooling":
            # The server returns one reward per separator. Replace separators inside a step, so that
            # each step gets one reward.
            parts = [step.replace(self._separator, " ").strip() for step in steps]
            text = "".join(part + self._separator for part in parts)
        messages = [
            {"role": "user", "content": problem},
            {"role": "assistant", "content": text},
        ]
        body = {"model": self._model, "messages": messages, "add_generation_prompt": False}
        return Call(self._route, body)

    def _read(self, reply: bytes, steps: int) -> float:
        """Read the reward of the last step from a reply to a request with `steps` steps.

        :raises BadReply: the number of rewards differs from the number of steps, or the reward is
            not a probability or a logit.
        """
        try:
            data: Any = msgspec.json.decode(reply)
            if self._tokenizer is not None:
                row: Any = (data[0] if isinstance(data, list) else data)["embedding"]
            elif self._route == "/classify":
                row = data["data"][0]["probs"]
            else:
                rows = data["data"][0]["data"]
                if len(rows) != steps:
                    raise BadReply(
                        _NAME,
                        f"the reply has {counted(len(rows), 'reward')} for "
                        f"{counted(steps, 'step')}; each step ends with the separator "
                        f"{self._separator!r}",
                    )
                row = rows[-1]
            values = [float(value) for value in (row if isinstance(row, list) else [row])]
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise BadReply(_NAME, f"the reply of {self._route} lacks a reward") from error
        return chance_of(values)


_ADVICE = "Serve a process reward model, and set score.separator to the token that ends each step"


def chance_of(values: Sequence[float]) -> float:
    """Convert a reward model's output to the probability that a step is correct.

    Two numbers are the probabilities, or the logits, of "wrong" and "correct". One number is a
    logit.

    >>> chance_of([0.25, 0.75]), chance_of([0.0])
    (0.75, 0.5)

    :raises BadReply: the row has more than two numbers, as an embedding has, or a number is not
        finite.
    """
    if not 1 <= len(values) <= 2:
        raise BadReply(
            _NAME,
            f"a reward consists of {len(values)} numbers instead of one or two, so the server "
            "returns embeddings, not rewards",
        )
    if not all(map(math.isfinite, values)):
        raise BadReply(_NAME, "a reward is infinite or not a number")
    if len(values) == 2 and min(values) >= 0 and abs(sum(values) - 1) < 1e-2:
        return min(1.0, values[1])
    logit = values[-1] - (values[0] if len(values) == 2 else 0.0)
    if logit < -700:
        return 0.0
    return 1 / (1 + math.exp(-logit))


def read_reward_address(address: str) -> ServerAddress:
    """Parse the address of a server with a reward model.

    :raises OptionError: the address does not name a vLLM or SGLang server.
    """
    scheme = address.partition(":")[0]
    if scheme not in _SCHEMES:
        raise OptionError(
            "score.reward",
            f"{address!r} is not the address of a reward model; write vllm:http://HOST:PORT/MODEL "
            "or sglang:http://HOST:PORT/MODEL",
            _SCHEMES,
            scheme,
        )
    return read_server(address)


async def _models(client: Client) -> list[str]:
    """Return the names of the models that the server lists at /v1/models.

    :raises EngineUnavailable: the server lists no model.
    """
    reply = await client.look("/v1/models")
    names: list[str] = []
    if reply.status == 200:
        try:
            names = [str(row["id"]) for row in msgspec.json.decode(reply.body)["data"]]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise BadReply(_NAME, f"{client.url}/v1/models lists no models") from error
    if not names:
        raise EngineUnavailable(
            _NAME,
            f"{client.url}/v1/models lists no model (status {reply.status})",
            "Check the URL in score.reward",
        )
    return names


class RewardedTarget(EngineAround):
    """A target engine combined with a reward model. If a scoring request contains a problem and
    steps as strings, the reward model answers it. The target answers all other requests.
    """

    def __init__(self, target: Engine, rewards: RewardModel) -> None:
        super().__init__(target, "own")
        self._rewards = rewards
        self._stack = AsyncExitStack()

    @property
    def spec(self) -> EngineSpec:
        spec = super().spec
        return replace(spec, capabilities=spec.capabilities | {"reward"})

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the scores of a request.

        If the request contains a problem and steps as strings, the result is a single score: the
        logarithm of the reward model's probability. Otherwise the target scores the request's
        tokens.
        """
        if not request.texts:
            return await super().score(request)
        problem, *steps = request.texts
        chance = await self._rewards.reward(problem, steps)
        return Scores((math.log(chance) if chance > 0 else -math.inf,))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._engine)
            await stack.enter_async_context(self._rewards)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)
