"""What conformance checks share: their registry and options, bounded requests, comparisons that
know about ties.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from types import MappingProxyType
from typing import Literal, NoReturn, TypeVar

from atts.concurrency import collect
from atts.core import Completion, Message, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.engine import Capability, Engine
from atts.sampling import Seed

_Result = TypeVar("_Result")
PLAIN = Sampling()
GREEDY = Sampling(temperature=0.0)
LOOSE = Sampling(temperature=1.5)  # so that even a sure model has something to draw


class Broken(Exception):
    """A promise the engine did not keep; the message is a line of the report."""


class NotApplicable(Exception):
    """A check that cannot be made of this engine; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How thorough and how patient a conformance check is; the defaults suit some thousand tokens a
    second.

    `tolerance` is in nats per token, between a token's log-prob when sampled and when scored; `tie`
    how close two best tokens may be before either counts as greedy. `tokens` bounds ordinary
    requests, `long_tokens` those meant to be cancelled or to reach the model's end. `draws` is how
    many single tokens test how they are drawn. `timeout_seconds` holds for each check,
    `settle_seconds` for the release of cancelled work. `boundary` is the longest context that is
    filled to the brim. `seeding` "none" is for engines that do not promise to reproduce a seed:
    they are compared by greedy texts, up to ties. `skip` names checks to leave out.
    """

    tolerance: float = 1e-3
    tie: float = 1e-4
    tokens: int = 24
    long_tokens: int = 256
    draws: int = 96
    timeout_seconds: float = 60.0
    settle_seconds: float = 2.0
    boundary: int = 2048
    seeding: Literal["exact", "none"] = "exact"
    skip: frozenset[str] = frozenset()
    questions: tuple[str, ...] = (
        "Start at 17. +5, -8, +11. What is the result?",
        "Which is larger, 2 to the power of 5 or 5 squared? Think step by step.",
        "Write a short sentence about the sea.",
    )


Need = Capability | Literal["seeds", "factory"]
Check = Callable[["Probe"], Awaitable[None]]
_registered: dict[str, Check] = {}
CHECKS: Mapping[str, Check] = MappingProxyType(_registered)
"""Every check by name, in the order they are made; the first line of its docstring is the promise.
"""


OPENING = "opening"
"""The check without which no other can be made."""


def check(*needs: Need) -> Callable[[Check], Check]:
    """Register a function as the check of its name; it is left out where the engine lacks what it
    needs.
    """

    def register(function: Check) -> Check:
        @wraps(function)
        async def checked(probe: Probe) -> None:
            probe.need(*needs)
            await function(probe)

        _registered[function.__name__.removeprefix("check_")] = checked
        return checked

    return register


class Probe:
    """An open engine and the requests its checks make."""

    def __init__(
        self, engine: Engine, options: CheckOptions, factory: Callable[[], Engine] | None = None
    ) -> None:
        self.engine = engine
        self.options = options
        self.factory = factory

    @cached_property
    def prompts(self) -> tuple[TokenIds, ...]:
        """The questions as the engine's tokenizer renders them."""
        return tuple(
            self.engine.tokenizer.render([Message("user", text)]) for text in self.options.questions
        )

    @property
    def prompt(self) -> TokenIds:
        """The first of the prompts."""
        return self.prompts[0]

    def request(self, prompt: int = 0, seed: int = 0, sampling: Sampling = PLAIN) -> SampleRequest:
        """A request whose answer can be asked for again: a greedy one where seeds are not
        reproduced.
        """
        name = Seed(run=20_250_918, problem=f"check {prompt}", sample=seed)
        sampling = sampling if self.options.seeding == "exact" else GREEDY
        return SampleRequest(self.prompts[prompt], self.options.tokens, sampling, name)

    def requests(self, seeds: int, sampling: Sampling = PLAIN) -> list[SampleRequest]:
        """Several seeds for every prompt."""
        return [
            self.request(p, seed, sampling)
            for p in range(len(self.prompts))
            for seed in range(seeds)
        ]

    def long(self, request: SampleRequest) -> SampleRequest:
        """The same request, as long as the options and the context allow."""
        room = self.engine.spec.context_length - len(request.ids)
        return replace(request, max_tokens=min(self.options.long_tokens, room))

    async def sample_all(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """All at once, in the order given."""
        return await collect([partial(self.engine.sample, request) for request in requests])

    async def score(
        self, prefix: TokenIds, suffix: TokenIds, rollout: str = ""
    ) -> tuple[float, ...]:
        """Log-probabilities, made sure to be one per token and possible."""
        logprobs = (await self.engine.score(ScoreRequest(prefix, suffix, rollout))).logprobs
        require(
            len(logprobs) == len(suffix),
            f"scoring {len(suffix)} tokens gave {len(logprobs)} log-probs",
        )
        wrong = [value for value in logprobs if not value <= 1e-6]  # NaN compares false
        require(not wrong, f"scored log-probs must be numbers and at most 0, got {wrong[:3]}")
        return logprobs

    def new_engine(self) -> Engine:
        """A second engine, not open yet, for checks that need a factory."""
        assert self.factory is not None, "the check says that it needs a factory"
        return self.factory()

    def can(self, capability: Capability) -> bool:
        """Whether the engine says that it has this capability."""
        return capability in self.engine.spec.capabilities

    def need(self, *needs: Need) -> None:
        """Leave the check out unless all of these are there."""
        missing = {"sample", "score", "draw"}.intersection(needs) - self.engine.spec.capabilities
        if missing:
            raise NotApplicable(f"the engine does not {' or '.join(sorted(missing))}")
        if "seeds" in needs and self.options.seeding != "exact":
            raise NotApplicable("the engine does not promise to reproduce seeds")
        if "factory" in needs and self.factory is None:
            raise NotApplicable(
                "a second engine is needed, and an open one is not closed: give a factory"
            )

    def require_close(self, what: str, ours: Iterable[float], theirs: Iterable[float]) -> None:
        """Two series of log-probabilities agree position by position."""
        for position, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            close = abs(left - right) <= self.options.tolerance
            require(
                close,
                f"{what}: at token {position} {left:.6f} is not {right:.6f} "
                f"(+-{self.options.tolerance:g})",
            )

    async def require_same(
        self, what: str, request: SampleRequest, ours: TokenIds, theirs: TokenIds
    ) -> None:
        """Two answers to a request are the same tokens; greedy ones, up to the first tie between
        best tokens.
        """
        if ours == theirs:
            return
        same = first_difference(ours, theirs)
        greedy = request.sampling.temperature == 0 and self.can("score")
        if greedy and same < min(len(ours), len(theirs)):
            before = request.ids + ours[:same]
            (left,) = await self.score(before, (ours[same],))
            (right,) = await self.score(before, (theirs[same],))
            if abs(left - right) <= self.options.tie:
                return
        fail(f"{what}: token {same} differs: {tail(ours, same)} is not {tail(theirs, same)}")


def require(kept: bool, message: str) -> None:
    """Fail the check unless a promise was kept."""
    if not kept:
        raise Broken(message)


def fail(message: str) -> NoReturn:
    """Fail the check."""
    raise Broken(message)


async def refused(
    what: str, error: type[Exception], call: Callable[[], Awaitable[_Result]]
) -> None:
    """A call must raise this error and no other."""
    try:
        result = await call()
    except error:
        return
    except Exception as other:
        raise Broken(
            f"{what}: expected {error.__name__}, got {type(other).__name__}: {other}"
        ) from other
    fail(f"{what}: expected {error.__name__}, got {str(result)[:120]}")


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def tail(ids: TokenIds, start: int) -> str:
    """A few ids from a place on, for messages."""
    more = ", ..." if len(ids) > start + 4 else ""
    return f"[{', '.join(str(index) for index in ids[start : start + 4])}{more}]"
