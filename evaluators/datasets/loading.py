"""Dataset loader: a benchmark of the catalogue, the hub or a file, with a digest of exactly which problems they are."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import cast, get_args

from atts.core import AnswerKind, Grading, Problem
from atts.errors import DatasetError, OptionError
from atts.evaluators.datasets import arithmetic, hub
from atts.evaluators.datasets.columns import ALIASES, LISTED, AnswerForm, Answers, Columns, Reader, cell, problems_of
from atts.evaluators.datasets.rows import RowTable, kind_of, read_table
from atts.evaluators.datasets.selection import Selection, select, split_slice
from atts.evaluators.verdict import STRICT, changed


@dataclass(frozen=True, slots=True)
class HubSource:
    """One copy of a benchmark on the hub: its files in reading order, its columns, its quirks in words."""

    repo: str
    files: tuple[str, ...]
    columns: Columns
    keep: tuple[str, str] | None = None  # only rows whose column contains this text
    quirk: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark by name; the first of `hubs` that is cached is read, else the first is fetched."""

    name: str
    title: str
    size: int
    kind: AnswerKind = "math"
    form: AnswerForm = "plain"
    grading: Grading = Grading()
    aliases: tuple[str, ...] = ()
    sample: tuple[int, int] | None = None  # count and seed of the subset this name stands for
    hubs: tuple[HubSource, ...] = ()
    prefix: str = ""  # what ids start with, when it is not the name
    note: str = ""


BENCHMARKS: Mapping[str, Benchmark] = {it.name: it for it in LISTED.table("benchmark", tuple[Benchmark, ...])}


def find_benchmark(name: str) -> Benchmark | None:
    """The benchmark of that name or alias, whatever its case, hyphens or underscores; None when there is none.

    >>> [found.name for text in ("MATH-500", "aime_2025") if (found := find_benchmark(text))]
    ['math500', 'aime25']
    """
    key = _bare(name)
    return next((it for it in BENCHMARKS.values() if key in (_bare(it.name), *it.aliases)), None)


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


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


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What may be said about a source beyond its name; the defaults read every known benchmark.

    `file` reads a known benchmark from that file instead of the hub; `seed` shuffles the choices of multiple choice;
    `grading` says what of the benchmark's own policy is to be otherwise.
    """

    columns: Columns | Mapping[str, str] = Columns()
    file: Path | None = None
    revision: str = "main"
    split: str = "test"
    config: str = ""
    kind: AnswerKind | None = None
    answers: Answers = "required"
    seed: int = 0
    grading: Mapping[str, float | str | None] = field(default_factory=dict[str, float | str | None])
    shots: Path | None = None  # a file of problems with their solutions, said before every problem
    network: hub.Network = "auto"
    cache: Path | None = None  # None: where huggingface_hub keeps it

    def __post_init__(self) -> None:
        for option, known in (("answers", Answers), ("network", hub.Network), ("kind", AnswerKind)):
            value = getattr(self, option)
            if value not in get_args(known) and (option, value) != ("kind", None):
                raise OptionError(option, f"{value!r} is not an option", get_args(known))
        changed(STRICT, self.grading)

    @property
    def asked(self) -> Columns | None:
        """The columns asked for; None where the source's own are to be read."""
        asked = self.columns if isinstance(self.columns, Columns) else Columns.of(self.columns)
        return None if asked == Columns() else asked


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
        worked, _ = problems_of(Reader(table, Columns(answer="solution"), prefix="shot"))
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
        benchmark, copy = next(known, (_unknown(repo[1]), HubSource(repo[1], hub.DATA, Columns())))
        return _copy(benchmark, copy, replace(options, revision=repo[2] or options.revision))
    if path.exists() or (
        kind_of(path) and not is_hub
    ):  # where it is of no kind that is read, the reader says which are
        return _file(path, options, _unknown(name))
    near = get_close_matches(name.lower(), BENCHMARKS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise OptionError("dataset", f"there is no benchmark or file {name!r}{hint}", [*BENCHMARKS])


def _unknown(source: str) -> Benchmark:
    """A source that is in no catalogue, as a benchmark without copies."""
    return Benchmark(Path(source).stem, "", 0)


def _copy(benchmark: Benchmark, copy: HubSource, options: LoadOptions) -> Dataset:
    here = hub.snapshot(copy.repo, options.revision, copy.files, options.cache, options.network)
    files = here.files(copy.files) if benchmark.hubs else hub.split_files(here, options.split, options.config)
    table = read_table(files, copy.repo)
    if copy.keep:
        table = _keep(table, *copy.keep)
    # side columns that the copy has lost since: problems can do without them, not without a text
    sides = {field: getattr(copy.columns, field) for field in ALIASES if field not in ("text", "answer", "choices")}
    gone = {} if options.asked else {field: name for field, name in sides.items() if name and name not in table.columns}
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
    columns = options.asked or columns
    reader = Reader(
        table,
        columns,
        prefix=benchmark.prefix or benchmark.name,
        kind=options.kind or (benchmark.kind if benchmark.hubs else None),
        form=benchmark.form,
        answers=options.answers,
        seed=options.seed,
        policy=changed(benchmark.grading, options.grading),
    )
    problems, notes = problems_of(reader)
    if columns.distractors:
        notes.append(f"choices shuffled per question with seed {options.seed}")
    problems, more = _as_known(benchmark, problems, table.source)
    return Dataset(benchmark.name, table.source, f"sha256:{table.digest}", "", tuple(problems), (*notes, *more))


def _as_known(benchmark: Benchmark, problems: list[Problem], source: str) -> tuple[list[Problem], list[str]]:
    """The subset this name stands for, and a note where the source is not the size it should be."""
    if benchmark.sample is None:
        note = f"{benchmark.title} has {benchmark.size} problems, this source {len(problems)}"
        return problems, [note] if benchmark.hubs and len(problems) != benchmark.size else []
    count, seed = benchmark.sample
    whole = BENCHMARKS[benchmark.prefix].size
    if len(problems) != whole:
        problem = f"{benchmark.name} is drawn from {whole} problems in order, this source has {len(problems)}"
        raise DatasetError(source, problem, f"Give the whole of {benchmark.prefix}")
    return select(problems, Selection(sample=count, seed=seed), source), [benchmark.note]


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
