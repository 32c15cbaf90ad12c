"""The stages of a model as actors of a Ray cluster: rows go from one to the next, not over the step loop's side."""

from __future__ import annotations

import importlib
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from atts.errors import EngineError, EngineUnavailable, UnsupportedByEngine
from atts.local.messages import FailureReply
from atts.local.stages import BuildStage, HeldLayers, StageSetup, StageStep


class StageActor:
    """What runs in an actor; steps come as bytes, for what Ray itself unpacks cannot be written to."""

    def __init__(self, setup: StageSetup, build: BuildStage) -> None:
        self._setup, self._build = setup, build

    def load(self) -> FailureReply | None:
        """Load the layers; why they cannot be."""
        try:
            self._held = HeldLayers(self._setup, self._build(self._setup))
        except EngineError as error:
            return FailureReply.of(error)
        return None

    def step(self, step: bytes) -> bytes:
        """The step behind these layers."""
        return pickle.dumps(self._held.step(pickle.loads(step)))


class RayLine:
    """A stage in each actor, which is given as many cores and GPUs as the one that this engine is in."""

    def __init__(self, setups: Sequence[StageSetup], build: BuildStage) -> None:
        """Have all of them begin to load, on other nodes where there are some.

        :raises UnsupportedByEngine: this is no actor.
        """
        self._name = setups[0].config.name
        self._ray: Any = sys.modules.get("ray")
        if self._ray is None or not self._ray.is_initialized():
            problem, advice = "stages are actors of an engine that is one", "Write ray: before its name"
            raise UnsupportedByEngine(self._name, problem, advice)
        given = self._ray.get_runtime_context().get_assigned_resources()
        limits = {"num_cpus": given.get("CPU", 0), "num_gpus": given.get("GPU", 0), "scheduling_strategy": "SPREAD"}
        actor: Any = self._ray.remote(StageActor).options(**limits, max_restarts=0)
        self._actors = [actor.remote(setup, build) for setup in setups]
        self.close: Callable[[], object] = weakref.finalize(self, _end, self._actors, self._ray)
        self._loading = [actor.load.remote() for actor in self._actors]

    def load(self) -> None:
        """Wait until their models are loaded, which began before.

        :raises EngineError: one could not be.
        """
        for failure in self._got(self._loading):
            if failure is not None:
                raise failure.error(self._name)

    def passed(self, step: StageStep) -> StageStep:
        """The step behind all of them.

        :raises EngineUnavailable: one is gone.
        """
        message: Any = pickle.dumps(step)
        for actor in self._actors:
            message = actor.step.remote(message)
        done: StageStep = pickle.loads(self._got(message))
        return done

    def _got(self, references: Any) -> Any:
        try:
            return self._ray.get(references)
        except importlib.import_module("ray.exceptions").RayError as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise EngineUnavailable(self._name, f"an actor with a stage of it died ({reason})") from error


def _end(actors: Sequence[Any], ray: Any) -> None:
    """When their user is gone."""
    if ray.is_initialized():
        for actor in actors:
            ray.kill(actor)
