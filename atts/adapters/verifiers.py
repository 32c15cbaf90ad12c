"""The verifiers adapter, which offers the problems of a dataset as tasks; atts grades the
replies.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import verifiers.v1 as vf

from atts.core import Problem
from atts.evaluators import LoadOptions, extract, judge, load_dataset
from atts.pipelines import Policy, prompt_of

__all__ = ["ATTSTaskset"]


class ATTSConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is not installed where types are checked
    """The settings under `--env.taskset.*`.

    They select the dataset in the same way as on the command line of atts.
    """

    dataset: str = "arithmetic"
    file: str | None = None


class ATTSData(vf.TaskData):  # type: ignore[misc]
    """One problem, as JSON data."""

    problem: dict[str, Any]


class ATTSTask(vf.Task[ATTSData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """A task that poses one problem and grades the model's last reply."""

    @property
    def key(self) -> str:
        """Return the problem's id, so that trainers can recognise the problem."""
        return str(self.data.problem["id"])

    @vf.reward  # type: ignore[untyped-decorator]
    async def correct(self, trace: Any) -> float:
        """Return 1 if the last reply states an answer that is equal to the problem's reference.
        Otherwise, return 0.
        """
        # Comparing two answers with sympy may take seconds. It runs in a thread, so that it does
        # not block the event loop.
        grading = partial(is_correct, self.data.problem, trace.last_reply)
        return float(await anyio.to_thread.run_sync(grading))

    @vf.metric  # type: ignore[untyped-decorator]
    async def answered(self, trace: Any) -> float:
        """Return whether the last reply states an answer."""
        problem = msgspec.convert(self.data.problem, Problem)
        return float(extract(trace.last_reply, kind=problem.kind) is not None)


class ATTSTaskset(vf.Taskset[ATTSTask, ATTSConfig]):  # type: ignore[misc]
    """The tasks of a dataset, one for each problem, with the prompts that a run of atts would
    use.
    """

    def load(self) -> Iterator[ATTSTask]:
        """Yield a task for every problem.

        :raises DatasetError: the dataset cannot be read, or a problem has no reference.
        """
        file = None if self.config.file is None else Path(self.config.file)
        for problem in load_dataset(self.config.dataset, options=LoadOptions(file=file)).problems:
            system, *turns, question = prompt_of(problem, Policy())
            shown = [{"role": turn.role, "content": turn.content} for turn in turns]
            data = ATTSData(
                id=problem.id,
                system_prompt=system.content,
                prompt=[*shown, {"role": "user", "content": question.content}]
                if shown
                else question.content,
                problem=msgspec.json.decode(msgspec.json.encode(problem)),
            )
            yield ATTSTask(data, self.config.task)


def is_correct(problem: dict[str, Any], reply: str) -> bool:
    """Return whether a reply states an answer that is equal to the problem's reference."""
    asked = msgspec.convert(problem, Problem)
    answer = extract(reply, kind=asked.kind)
    return answer is not None and judge(asked, answer).status == "equal"
