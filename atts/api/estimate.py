"""Dry runs: what a configuration would run, and an estimate of its tokens, without loading a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atts.api.config import LENGTHS, Configuration
from atts.api.engines import speculation_words
from atts.api.setup import Setup
from atts.core import Problem, Role, Usage
from atts.errors import JournalError
from atts.journal import FACTS, MANIFEST, FinishedProblem, Setting, open_run
from atts.pipelines import FixedGate, Policy
from atts.run import Shard


@dataclass(frozen=True, slots=True)
class Tokens:
    """By what is done with them: written by the draft, scored by the target, written by the target."""

    draft: float
    scored: float
    target: float

    def times(self, factor: float) -> Tokens:
        """So many times as many."""
        return Tokens(self.draft * factor, self.scored * factor, self.target * factor)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What would run; `expected` is None where nothing is known to go by, and `basis` says what it
    rests on.
    """

    dataset: str
    problems: int
    rollouts: int
    directory: Path
    done: int  # problems that an earlier session finished there
    expected: Tokens | None
    basis: str
    at_most: Tokens
    budget: Mapping[str, Setting]  # the lengths of rollouts and chunks, each with what set it
    proposes: str = ""  # what proposes tokens to the target
    warnings: tuple[str, ...] = ()  # lengths that look too small

    def as_json(self) -> dict[str, Any]:
        """Strict JSON."""
        return {
            **asdict(replace(self, budget={})),
            "budget": self.budget,
            "directory": str(self.directory),
        }


@dataclass(frozen=True, slots=True)
class _Past:
    """What a rollout of an earlier run took on average, with the rate it was run at."""

    directory: Path
    rollouts: int
    mean: Tokens
    rate: float
    dataset: str


def dry_run(configuration: Configuration, shard: Shard | None = None) -> DryRun:
    """What this configuration would do. Reads the dataset and earlier runs of the same models;
    loads no model.

    Of a `shard`, what that part of the dataset would take.

    :raises DatasetError: the dataset cannot be read, or holds nothing.
    :raises OptionError: something is impossible.
    """
    setup = configuration.setup()
    job = configuration.job
    directory = configuration.directory_of(shard)
    problems = job.load().problems if shard is None else shard.take(job.load().problems)
    setup.engines()  # opens nothing; refuses what names no engine
    policy = setup.run_policy
    rollouts = len(problems) * policy.samples
    done = len(_finished(directory))
    mean, basis = _mean_rollout(configuration, setup, problems)
    return DryRun(
        job.dataset,
        len(problems),
        rollouts,
        directory,
        done=done,
        expected=mean.times(rollouts) if mean else None,
        basis=basis,
        at_most=_limits(setup, policy).times(rollouts),
        budget={name: configuration.settings[name] for name in LENGTHS},
        proposes=_proposer(setup),
        warnings=setup.warnings,
    )


def _proposer(setup: Setup) -> str:
    """Describe what proposes tokens to the target, where the method asks the target at all."""
    if "target" not in setup.roles:
        return "nothing: the method does not ask the target"
    return speculation_words(setup.draft, setup.target, setup.speculation)


def _limits(setup: Setup, policy: Policy) -> Tokens:
    """Return the tokens of a rollout that reaches every limit; discarded drafts count as written."""
    tokens, turns, drafted, written, _ = policy.bounds()
    length = min(tokens, turns * (drafted + written))
    if policy.drafter == "target":
        return Tokens(0, 0, length)
    if _accepts_everything(setup):
        return Tokens(min(length, turns * drafted), 0, 0)
    draft = turns * drafted
    if policy.takeover == "continue":
        draft = min(draft, length)
    return Tokens(draft, draft, min(length, turns * written))


def _accepts_everything(setup: Setup) -> bool:
    """Whether the method's gate accepts whatever the draft writes."""
    gate, _ = setup.decider()
    return isinstance(gate, FixedGate)


def _mean_rollout(
    configuration: Configuration, setup: Setup, problems: Sequence[Problem]
) -> tuple[Tokens | None, str]:
    """Tokens of one rollout, and how that is known."""
    dataset = _without_slice(configuration["dataset"])
    past = max(
        _earlier_runs(configuration, setup.roles),
        key=lambda run: (run.dataset == dataset, run.rollouts),
        default=None,
    )
    if past is not None:
        words = f"as in {past.directory}: the same models and method, {past.rollouts:,} rollouts"
        grown = setup.rate / past.rate if past.rate > 0 else 1.0
        if not math.isclose(grown, 1.0):
            words += f" at rate {past.rate:g}; the target's share is taken to grow with the rate"
        if past.dataset != dataset:
            words += f"; on {past.dataset}, so take it as a guess"
        return Tokens(past.mean.draft, past.mean.scored, past.mean.target * grown), words
    if set(setup.asked) == {"embedded"}:
        return _from_solutions(setup, problems)
    return (
        None,
        "no earlier run of these models to go by; run a few problems (--limit 5), then ask again",
    )


def _from_solutions(setup: Setup, problems: Sequence[Problem]) -> tuple[Tokens | None, str]:
    """The embedded models were taught the generated problems' worked solutions, and write about as
    much.
    """
    from tokenizers import Tokenizer

    from atts.evaluators import exercises
    from atts.models import path

    parts = problems[0].id.split("-")
    if (
        parts[0] != "arithmetic"
        or len(parts) != 4
        or parts[1] not in ("train", "calibration", "test")
    ):
        return None, "no earlier run of the embedded models on other problems to go by"
    split = parts[1]
    seed = int(parts[2])
    exercise_list = exercises(split, 5 * len(problems), seed)  # type: ignore[arg-type]  # checked above
    known = {exercise.text: exercise.solution for exercise in exercise_list}
    texts = [known[problem.text] for problem in problems if problem.text in known]
    if not texts:
        return None, "no earlier run of the embedded models on these problems to go by"
    tokenizer = Tokenizer.from_file(str(path("draft") / "tokenizer.json"))
    length = sum(len(encoded.ids) for encoded in tokenizer.encode_batch(texts)) / len(texts)
    words = f"the worked solutions of {len(texts)} of these problems have {length:.0f} tokens on average"
    if setup.method == "target-only":
        return Tokens(0, 0, length), words
    if _accepts_everything(setup):
        return Tokens(length, 0, 0), words
    # then what the target writes comes on top of the draft's chunk
    appended = setup.policy.takeover == "continue"
    drafted = length / (1 + setup.rate) if appended else length
    words += (
        f"; with {setup.rate:g} of the drafted chunks the target is taken to write one of its own"
    )
    return Tokens(drafted, drafted, drafted * setup.rate), words


def _earlier_runs(configuration: Configuration, roles: Sequence[Role]) -> Iterator[_Past]:
    """Runs beside this one, and its own beginning, that had the same models and method."""
    folders = {path.parent for path in Path(configuration["runs"]).glob(f"*/{MANIFEST}")} | {
        configuration.directory
    }
    for folder in sorted(folders):
        finished = _finished(folder)
        rollouts = sum(len(one.samples) for one in finished)
        settings = (
            {name: held.value for name, held in open_run(folder).manifest.settings.items()}
            if rollouts
            else {}
        )
        same = (*roles, "method")
        if rollouts and all(settings.get(name) == configuration[name] for name in same):
            used = sum((one.usage for one in finished), Usage())
            mean = Tokens(used.draft_tokens, used.scored_tokens, used.target_tokens).times(
                1 / rollouts
            )
            dataset = _without_slice(str(settings.get("dataset", "other problems")))
            yield _Past(folder, rollouts, mean, float(str(settings["rate"])), dataset)


def _finished(directory: Path) -> list[FinishedProblem]:
    """Every complete problem of a run; none where there is no run, or one that cannot be read."""
    try:
        state = open_run(directory).state(FACTS)
    except JournalError:
        return []
    return [one for one in state.finished.values() if one.is_complete]


def _without_slice(dataset: str) -> str:
    return dataset.partition("[")[0]
