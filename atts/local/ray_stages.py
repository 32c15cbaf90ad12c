"""The stages of a model as actors of a Ray cluster."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Sequence
from typing import Any

from atts.errors import EngineUnavailable, UnsupportedByEngine
from atts.local.stages import BuildStage, StageServer


class StageActor(StageServer):
    """What runs in an actor; messages come as bytes, for what Ray itself unpacks cannot be written to."""

    def answer_bytes(self, message: bytes) -> bytes:
        """The answer to a message."""
        return pickle.dumps(self.answer(pickle.loads(message)))


class RayStage:
    """An actor with a stage, which is given as many cores and GPUs as the one that this engine is in."""

    def __init__(self, name: str, label: str, build: BuildStage) -> None:
        """Have it started, on another node where there is one; `label` says what it holds.

        :raises UnsupportedByEngine: this is no actor.
        """
        self._name, self._label, self._ray = name, label, _ray(name)
        given = self._ray.get_runtime_context().get_assigned_resources()
        limits = {"num_cpus": given.get("CPU", 0), "num_gpus": given.get("GPU", 0), "scheduling_strategy": "SPREAD"}
        actor: Any = self._ray.remote(StageActor).options(**limits, max_restarts=0)
        self._actor: Any = actor.remote(build)
        self.answer: Any = None

    def send(self, message: object) -> None:
        """Pass a message on."""
        self.answer = self._actor.answer_bytes.remote(pickle.dumps(message))

    def take(self) -> Any:
        """Wait for the answer.

        :raises EngineUnavailable: the actor is gone.
        """
        try:
            return pickle.loads(self._ray.get(self.answer))
        except importlib.import_module("ray.exceptions").RayError as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise EngineUnavailable(self._name, f"an actor with {self._label} died ({reason})") from error

    def close(self) -> None:
        """End it; twice is fine."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


def ready(actors: Sequence[RayStage], seconds: float | None) -> Sequence[RayStage]:
    """Which of them have answered or are gone; waits for one so many seconds, None: for as long as it takes."""
    found, _ = _ray("").wait([actor.answer for actor in actors], num_returns=len(actors), timeout=0)
    if not found:
        found, _ = _ray("").wait([actor.answer for actor in actors], timeout=seconds)
    return [actor for actor in actors if actor.answer in found]


def _ray(name: str) -> Any:
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        problem, advice = "stages are actors of an engine that is one", "Write ray: before its name"
        raise UnsupportedByEngine(name, problem, advice)
    return ray
