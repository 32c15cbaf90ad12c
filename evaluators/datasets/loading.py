"""Dataset loader: a benchmark of the catalogue, the hub or a file, with a digest of exactly which problems they are."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import cast

from atts.core import Problem
from atts.errors import DatasetError, OptionError
from atts.evaluators.datasets import arithmetic, hub
from atts.evaluators.datasets.catalogue import BENCHMARKS, Benchmark, Columns, HubSource, LoadOptions, find_benchmark
from atts.evaluators.datasets.columns import Reader, cell, problems_of
from atts.evaluators.datasets.rows import RowTable, kind_of, read_table
from atts.evaluators.datasets.selection import Selection, select, split_slice


@dataclass(frozen=True, slots=True)
class Dataset:
    """Problems, and where they came from: enough to load the very same ones again, and to see that they are.

    `revision` is the hub commit, the sha256 of the file, or the generator's arguments; `digest` is of the problems.
    """

    name: str
    source: str
    revision: str
    digest: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.problems)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def __str__(self) -> str:
        return f"{self.name}: {len(self)} problems from {self.source}@{self.revision[:12]}, digest {self.digest[:12]}"


def load_dataset(name: str | Path, selection: Selection | None = None, options: LoadOptions | None = None) -> Dataset:
    """A benchmark by name ("math500", "aime24[:15]"), a file ("mine.csv"), or a hub dataset ("hub:owner/name").

    A slice in the name is applied after `selection`. Raises DatasetError for what cannot be read as asked, and
    OptionError for a name that is nothing known.
    """
    options, selection = options or LoadOptions(), selection or Selection()
    bare, cut = split_slice(str(name))
    whole = _load(bare, options, selection, cut)
    problems, notes = whole.problems, [*whole.notes]
    for part in () if whole.source == "generated" else (selection, cut):
        if words := part.words():
            problems = tuple(select(problems, part, str(name)))
            notes.append(f"selected: {words} ({len(problems)} of {len(whole)})")
    if options.shots:
        table = read_table([options.shots], str(options.shots))
        worked, _ = problems_of(Reader(table, Columns(answer="solution"), Benchmark.unknown("shot"), LoadOptions()))
        examples = tuple((shot.text, shot.answer or "") for shot in worked)
        problems = tuple(replace(it, examples=examples) for it in problems)
        notes.append(f"{len(worked)} worked examples before every problem")
    return replace(whole, name=str(name), problems=problems, digest=digest(problems), notes=tuple(notes))


def digest(problems: Sequence[Problem]) -> str:
    """sha256 of what the problems say and in which order, whatever file they came from."""
    state = sha256()
    for it in problems:
        fields = [it.id, it.text, it.answer, it.kind, it.level, it.subject, list(it.choices)]
        told = [*fields, *([asdict(it.grading)] if it.grading else ()), *it.examples]
        state.update(json.dumps(told, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
    return state.hexdigest()


def _load(name: str, options: LoadOptions, selection: Selection, cut: Selection) -> Dataset:
    """The whole dataset, its digest still to be taken."""
    benchmark = find_benchmark(name)
    if benchmark and benchmark.name == "arithmetic":
        return _arithmetic(options, selection, cut)
    if benchmark and options.file:
        return _file(options.file, options, benchmark)
    if benchmark:
        there = (it for it in benchmark.hubs if hub.cached_snapshot(it.repo, options.revision, it.files, options.cache))
        return _copy(benchmark, next(there, benchmark.hubs[0]), options)
    repo = re.fullmatch(r"(?:hub:)?([\w.-]+/[\w.-]+?)(?:@([\w.\-/]+))?", name)
    path, is_hub = Path(name), name.startswith("hub:")
    if repo and (is_hub or not (kind_of(path) or path.exists())):
        known = ((it, copy) for it in BENCHMARKS.values() for copy in it.hubs if copy.repo.lower() == repo[1].lower())
        benchmark, copy = next(known, (Benchmark.unknown(repo[1]), HubSource(repo[1], hub.DATA, Columns())))
        return _copy(benchmark, copy, replace(options, revision=repo[2] or options.revision))
    if path.exists() or (kind_of(path) and not is_hub):  # the reader says which kinds of file are read
        return _file(path, options, Benchmark.unknown(name))
    near = get_close_matches(name.lower(), BENCHMARKS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise OptionError("dataset", f"there is no benchmark or file {name!r}{hint}", [*BENCHMARKS])


def _copy(benchmark: Benchmark, copy: HubSource, options: LoadOptions) -> Dataset:
    here = hub.snapshot(copy.repo, options.revision, copy.files, options.cache, options.network)
    files = here.files(copy.files) if benchmark.hubs else hub.split_files(here, options.split, options.config)
    table = read_table(files, copy.repo)
    if copy.keep:
        table = _keep(table, *copy.keep)
    # side columns that the copy has lost since: problems can do without them, not without a text
    sides = {**asdict(copy.columns), **dict.fromkeys(("text", "answer", "choices", "distractors"), "")}
    gone = {field: name for field, name in sides.items() if name and name not in table.columns and not options.asked}
    columns = replace(copy.columns, **dict.fromkeys(gone, ""), distractors=copy.columns.distractors)
    found = _dataset(benchmark, table, columns, options)
    notes = (*found.notes, *(f"column {name!r} of this copy is gone" for name in gone.values()))
    return replace(found, source=f"hub:{copy.repo}", revision=here.commit, notes=notes)


def _file(path: Path, options: LoadOptions, benchmark: Benchmark) -> Dataset:
    """A file may be a hub copy saved under another name: then its columns are known, quirks and all."""
    table = read_table([path], str(path))
    copies = [copy.columns for copy in benchmark.hubs] or [Columns()]
    sides = {field: name for field in ("unit", "tolerance") if (name := getattr(copies[0], field)) in table.columns}
    needs = ({it.text, it.answer, it.id, it.context, *it.distractors} - {""} for it in copies)
    same = (it for it, names in zip(copies, needs, strict=True) if names and names <= {*table.columns})
    return _dataset(benchmark, table, next(same, Columns(**sides)), options)


def _dataset(benchmark: Benchmark, table: RowTable, columns: Columns, options: LoadOptions) -> Dataset:
    """The table's problems; by these columns where the caller asks for no others."""
    problems, notes = problems_of(Reader(table, options.asked or columns, benchmark, options))
    if benchmark.sample:
        problems = _drawn(benchmark, problems, *benchmark.sample, table.source)
        notes.append(benchmark.note)
    elif benchmark.hubs and len(problems) != benchmark.size:
        notes.append(f"{benchmark.title} has {benchmark.size} problems, this source {len(problems)}")
    return Dataset(benchmark.name, table.source, f"sha256:{table.digest}", "", tuple(problems), tuple(notes))


def _drawn(benchmark: Benchmark, problems: list[Problem], count: int, seed: int, source: str) -> list[Problem]:
    """The subset that this name stands for."""
    if len(problems) != (whole := BENCHMARKS[benchmark.prefix].size):
        problem = f"{benchmark.name} is drawn from {whole} problems in order, this source has {len(problems)}"
        raise DatasetError(source, problem, f"Give the whole of {benchmark.prefix}")
    return select(problems, Selection(sample=count, seed=seed), source)


def _keep(table: RowTable, column: str, part: str) -> RowTable:
    kept = [index for index, row in enumerate(table.rows) if part in cell(row.get(column))]
    if not kept:
        raise DatasetError(table.source, f"no row has {part!r} in column {column!r}", "Its layout has changed")
    return replace(table, rows=tuple(table.rows[i] for i in kept), places=tuple(table.places[i] for i in kept))


def _arithmetic(options: LoadOptions, selection: Selection, cut: Selection) -> Dataset:
    """Generated, so that `selection` says how many, which seed and which levels instead of picking from a file."""
    name, split = "arithmetic", cast(arithmetic.Split, options.split)  # the generator refuses any other
    count = selection.sample or BENCHMARKS[name].size
    levels = selection.levels or (1, 2, 3, 4, 5)
    revision = f"{split}, {count} problems, seed {selection.seed}, levels {','.join(map(str, levels))}"
    rest = replace(selection, sample=None, levels=())
    wanted = range(count)[cut.start : cut.stop : cut.step]
    is_whole = rest.words() or not wanted
    # a shorter call begins like a longer one: what the slice leaves out behind its end is not generated
    found = _generated(split, count if is_whole else max(wanted) + 1, selection.seed, levels)
    made = select(select(found, rest, name), cut, name) if is_whole else [found[index] for index in wanted]
    notes = (f"selected: {cut.words()} ({len(made)} of {count})",) if cut.words() else ()
    return Dataset(name, "generated", revision, "", tuple(made), notes)


@lru_cache(maxsize=16)
def _generated(split: arithmetic.Split, count: int, seed: int, levels: tuple[int, ...]) -> tuple[Problem, ...]:
    """The first exercises of a seed: a millisecond each, so that a process makes them once."""
    return tuple(arithmetic.problems(split, count, seed=seed, levels=levels))
