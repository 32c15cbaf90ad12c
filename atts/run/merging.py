"""The merge of shards of an evaluation, or of other runs, into one run directory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from atts.core import Problem
from atts.errors import FingerprintError, OptionError, UsageError, counted
from atts.files import storage, sync_directory
from atts.journal import (
    JOURNAL,
    LOCK,
    MANIFEST,
    MERGED,
    SCHEMA,
    CallSpan,
    Entry,
    Event,
    Json,
    LineWriter,
    Manifest,
    ProblemStarted,
    RecordedRun,
    RunState,
    SessionOpened,
    Setting,
    dataset_digest,
    locked,
    open_run,
    save_manifest,
)

SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several parts of a dataset: every `of`-th problem, beginning with problem `number`
    (counted from 1).
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse a shard written as "2/3".

        >>> Shard.parse("2/3").take("abcdefgh")
        'beh'

        :raises OptionError: the string does not have the form NUMBER/COUNT, or names an impossible
            shard.
        """
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise OptionError("shard", f"{text!r} is not a shard; give NUMBER/COUNT, such as 2/3")
        return cls(int(number), int(of))

    def take(self, problems: Any) -> Any:
        """Return the elements of a sequence that belong to this shard.

        :raises OptionError: no element belongs to the shard.
        """
        part = problems[self.number - 1 :: self.of]
        if not part:
            raise OptionError(
                "shard",
                f"shard {self} of {counted(len(problems), 'problem')} is empty; use fewer shards",
            )
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True, slots=True)
class MergedPart:
    """One of the runs to merge; all of its problems are finished."""

    run: RecordedRun
    shard: Shard | None
    problems: tuple[Problem, ...]  # all problems of the run, in the order of the dataset
    sessions: int
    last_node: int


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge: the new directory, and the runs that were merged."""

    directory: Path
    parts: tuple[MergedPart, ...]
    problems: int


def merge(directories: Sequence[Path], out: Path) -> Merged:
    """Merge runs into a new run directory, as if one process had run all of their problems.

    The runs may differ only in their problems. Shards of one dataset are merged in the order of
    that dataset, and other runs in the order given. The merged run contains the sessions of all
    runs one after the other, so their seconds add up.

    :raises UsageError: there are fewer than two runs, a shard is missing or given twice, a problem
        is in two runs, a run is unfinished, or `out` is not empty.
    :raises FingerprintError: the runs have different settings.
    :raises JournalError: a run cannot be read, or `out` cannot be written.
    """
    if len(directories) < 2:
        raise UsageError("a merge needs at least two runs; give the directory of each run")
    parts = _ordered([_part(directory) for directory in directories])
    for part in parts[1:]:
        _check_same(parts[0], part)
    problems = _interleaved(parts)
    counts = Counter(problem.id for problem in problems)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise UsageError(
            f"problem {min(twice)!r} is in two of the given runs; merge only runs with different "
            "problems"
        )
    with storage(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK, out):
        if (out / JOURNAL).exists() or (out / MANIFEST).exists():
            raise UsageError(
                f"{out}: this directory already has a run; choose another directory for the "
                "merged run"
            )
        _write(parts, problems, out)
        save_manifest(out / MANIFEST, _manifest(parts, problems))
    return Merged(out, tuple(parts), len(problems))


def _part(directory: Path) -> MergedPart:
    run = open_run(
        directory, "Give the run directories that `atts eval --shard I/N --out ...` wrote"
    )
    state = RunState()
    problems = dict[str, Problem]()
    for entry in run.entries():
        state.apply(entry)
        if isinstance(entry.event, ProblemStarted):
            problems.setdefault(entry.event.problem.id, entry.event.problem)
    left = sum(not state.is_over(name) for name in problems)
    left += max(0, (run.manifest.problems or 0) - len(problems))
    if left:
        raise UsageError(
            f"{directory}: the run has {counted(left, 'unfinished problem')}; finish it with its "
            "own command, then merge"
        )
    named = run.setting(SHARD)
    shard = None if named is None else Shard.parse(str(named))
    return MergedPart(run, shard, tuple(problems.values()), state.sessions, state.last_node)


def _ordered(parts: list[MergedPart]) -> list[MergedPart]:
    """Return the runs, sorted by shard number if they are shards. Check that no shard is
    missing.
    """
    shards = [part.shard for part in parts if part.shard is not None]
    if not shards:
        return parts
    counts = {shard.of for shard in shards}
    if len(shards) < len(parts) or len(counts) > 1:
        raise UsageError(
            "the given runs are not shards of one evaluation: "
            + ", ".join(_named(part) for part in parts)
        )
    numbers = [shard.number for shard in shards]
    (count,) = counts
    twice = {number for number in numbers if numbers.count(number) > 1}
    if twice:
        raise UsageError(f"shard {min(twice)}/{count} is given twice")
    missing = sorted(set(range(1, count + 1)) - set(numbers))
    if missing:
        raise UsageError(
            f"shard {missing[0]}/{count} is missing; give the directories of all {count} shards"
        )
    return sorted(parts, key=lambda part: part.shard.number if part.shard is not None else 0)


def _named(part: MergedPart) -> str:
    shard = f"shard {part.shard}" if part.shard else "no shard"
    return f"{part.run.directory} ({shard})"


def _check_same(first: MergedPart, other: MergedPart) -> None:
    try:
        _neutral(other.run.manifest).check(_neutral(first.run.manifest), first.run.directory)
    except FingerprintError as error:
        what = f"the run in {other.run.directory}, compared with the run in {first.run.directory},"
        raise FingerprintError(
            what, error.differences, "Merge only runs with the same configuration"
        ) from None


def _neutral(manifest: Manifest) -> Manifest:
    """Return the manifest without its dataset digest and its shard and merge settings, because only
    these may differ between runs that are merged.
    """
    configuration = {
        name: setting
        for name, setting in manifest.configuration.items()
        if name not in (SHARD, MERGED)
    }
    return replace(manifest, dataset="", configuration=configuration)


def _interleaved(parts: Sequence[MergedPart]) -> list[Problem]:
    """Return the problems of all runs: shards in the order of the original dataset, other runs one
    after the other.
    """
    if parts[0].shard is None:
        return [problem for part in parts for problem in part.problems]
    longest = max(len(part.problems) for part in parts)
    return [
        part.problems[place]
        for place in range(longest)
        for part in parts
        if place < len(part.problems)
    ]


def _manifest(parts: Sequence[MergedPart], problems: Sequence[Problem]) -> Manifest:
    merged: list[Mapping[str, Json]] = [
        {"run": str(part.run.directory), "sessions": part.sessions} for part in parts
    ]
    first = _neutral(parts[0].run.manifest)
    return replace(
        first,
        dataset=dataset_digest(problems),
        problems=len(problems),
        configuration={**first.configuration, MERGED: Setting(merged, "atts merge")},
        created=min(part.run.manifest.created for part in parts),
    )


def _write(parts: Sequence[MergedPart], problems: Sequence[Problem], out: Path) -> None:
    writer = LineWriter()
    with storage(out / JOURNAL):
        with (out / JOURNAL).open("ab") as file:
            file.writelines(
                writer.line(entry.event, entry.at, entry.wall)
                for entry in _entries(parts, problems)
            )
            file.flush()
            os.fsync(file.fileno())
        sync_directory(out)


def _entries(parts: Sequence[MergedPart], problems: Sequence[Problem]) -> Iterator[Entry]:
    """Yield the journal entries of all runs, one run after the other.

    The entries that start problems are moved to the front, directly after the entry that opens the
    first session.
    """
    # Amounts that are added to the session and node ids of the next run, so that the ids of
    # different runs do not collide.
    sessions = 0
    nodes = 0
    for part in parts:
        for entry in part.run.entries():
            event = entry.event
            if isinstance(event, ProblemStarted):
                continue
            yield replace(entry, event=_shifted(event, sessions, nodes))
            if isinstance(event, SessionOpened) and not sessions and event.session == 1:
                yield from (replace(entry, event=ProblemStarted(problem)) for problem in problems)
        sessions += part.sessions
        nodes += part.last_node + 1


def _shifted(event: Event, sessions: int, nodes: int) -> Event:
    """Return the event with its session and node ids increased, so that they differ from those of
    the earlier runs.
    """
    if isinstance(event, SessionOpened):
        return structs.replace(event, schema=SCHEMA, session=event.session + sessions)
    if isinstance(event, CallSpan):
        return structs.replace(
            event, node=event.node + nodes, after=tuple(node + nodes for node in event.after)
        )
    return event
