"""Load a dataset from a benchmark, the hub's cache or a file, with a digest of its problems."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from atts.core import Problem
from atts.errors import DatasetError, OptionError, counted
from atts.evaluators.datasets import arithmetic
from atts.evaluators.datasets.tables import (
    BENCHMARKS,
    Benchmark,
    Columns,
    HubSource,
    LoadOptions,
    Reader,
    RowTable,
    cell,
    find_benchmark,
    kind_of,
    problems_of,
    read_table,
)

DATA = ("*.jsonl", "*.json", "*.csv", "*.tsv", "*.parquet")


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of problems: first by id, level and subject, then by a random sample, then by a
    slice.

    `sample` is the number of problems that `random.Random(seed).sample` draws; their random order
    is kept. Problems that are selected by id follow the order of `ids`.
    """

    ids: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    subjects: tuple[str, ...] = ()
    sample: int | None = None
    seed: int = 0
    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def words(self) -> str:
        """Return a description of the selection; "" if everything is selected."""
        ends = ["" if end is None else str(end) for end in (self.start, self.stop, self.step)]
        parts = [
            f"{len(self.ids)} ids" if self.ids else "",
            f"levels {', '.join(map(str, self.levels))}" if self.levels else "",
            f"subjects {', '.join(self.subjects)}" if self.subjects else "",
            f"a random sample of {self.sample} with seed {self.seed}"
            if self.sample is not None
            else "",
            f"slice [{':'.join(ends if ends[2] else ends[:2])}]" if any(ends) else "",
        ]
        return ", ".join(part for part in parts if part)


def split_slice(name: str) -> tuple[str, Selection]:
    """Split a name such as "math500[:100]" into the name without its slice and a `Selection` of
    this slice.
    """
    match = re.fullmatch(r"(.+?)\[(-?\d{0,18}):(-?\d{0,18})(?::(-?\d{0,18}))?\]", name)
    if not match:
        return name, Selection()
    start, stop, step = (int(end) if end and end != "-" else None for end in match.groups()[1:])
    if step == 0:
        raise OptionError(
            "dataset", f"the slice in {name!r} has step 0; give a different step, or leave it out"
        )
    return match[1], Selection(start=start, stop=stop, step=step)


def select(
    problems: Sequence[Problem], selection: Selection, source: str = "selection"
) -> list[Problem]:
    """Return the selected problems.

    Raises DatasetError for an id, level or subject that no problem has, for a sample larger than
    the dataset, or if no problem remains.
    """
    chosen = list(problems)
    if selection.ids:
        chosen = _by_id(chosen, selection.ids, source)
    for trait, wanted in (("level", selection.levels), ("subject", selection.subjects)):
        chosen = _by(chosen, trait, wanted, source) if wanted else chosen
    if selection.sample is not None:
        if not 0 < selection.sample <= len(chosen):
            raise DatasetError(
                source,
                f"cannot sample {selection.sample} of {counted(len(chosen), 'problem')}",
                "Sample fewer problems",
            )
        chosen = random.Random(selection.seed).sample(chosen, selection.sample)
    chosen = chosen[selection.start : selection.stop : selection.step]
    if not chosen:
        raise DatasetError(
            source,
            f"none of {counted(len(problems), 'problem')} matches the selection "
            f"({selection.words()})",
            "Widen the selection",
        )
    return chosen


def _by_id(problems: list[Problem], ids: Sequence[str], source: str) -> list[Problem]:
    by_id = {problem.id: problem for problem in problems}
    short = {name.split("/", 1)[-1]: problem for name, problem in by_id.items()}
    for name in ids:
        if name not in by_id and name not in short:
            near = get_close_matches(name, [*by_id, *short], n=3)
            raise DatasetError(
                source,
                f"no problem has the id {name!r}",
                f"Similar ids: {', '.join(near or [*by_id][:3])}",
            )
    return [by_id.get(name) or short[name] for name in dict.fromkeys(ids)]


def _by(
    problems: list[Problem], field: str, wanted: Sequence[int | str], source: str
) -> list[Problem]:
    def folded(value: int | str | None) -> int | str | None:
        return value.casefold() if isinstance(value, str) else value

    values = {folded(getattr(problem, field)): getattr(problem, field) for problem in problems}
    asked = [folded(name) for name in wanted]
    unknown = [name for name in asked if name not in values]
    if unknown:
        known = ", ".join(sorted(str(name) for name in values.values() if name not in (None, "")))
        raise DatasetError(
            source,
            f"no problem has the {field} {unknown[0]!r}",
            f"Known values: {known or 'none, because the dataset does not record them'}",
        )
    return [problem for problem in problems if folded(getattr(problem, field)) in asked]


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """One commit of a hub dataset in the local cache."""

    repo: str
    folder: Path

    def files(self, patterns: Sequence[str]) -> list[Path]:
        """Return the files that match the patterns, in the order of the patterns and then by name.

        The result is empty if a pattern without wildcards matches nothing, or if a shard such as
        00001-of-00004 is missing.
        """
        names = sorted(
            path.relative_to(self.folder).as_posix()
            for path in self.folder.rglob("*")
            if path.is_file()
        )
        matching = dict.fromkeys(
            name for pattern in patterns for name in names if fnmatch(name, pattern)
        )
        exact = {pattern for pattern in patterns if not re.search(r"[*?\[]", pattern)}
        if not exact <= {*matching}:
            return []
        shards = [re.search(r"^(.*)-(\d{5})-of-(\d{5})", name) for name in matching]
        present = Counter(shard[1] for shard in shards if shard)
        if any(shard and present[shard[1]] < int(shard[3]) for shard in shards):
            return []
        return [self.folder / name for name in matching]


def snapshot(repo: str, patterns: Sequence[str], options: LoadOptions) -> HubSnapshot:
    """Return the requested revision of a hub dataset from the local cache, or download it.

    A cached branch is used even if the hub has a newer commit. Raises DatasetError, with advice on
    how to get the files, if neither works.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RevisionNotFoundError,
    )

    revision = options.revision
    if here := cached_snapshot(repo, revision, patterns, options.cache):
        return here
    if options.network == "never":
        raise _absent(
            repo,
            revision,
            "the dataset is not in the local cache, and network access is turned off",
        )
    try:
        here = _download(repo, revision, patterns, options.cache, fetch=True)
    except GatedRepoError:
        problem = f"the dataset is gated; accept the terms at https://huggingface.co/datasets/{repo} and run: hf auth login"
        raise _absent(repo, revision, problem) from None
    except RevisionNotFoundError:
        problem = f"the hub does not have revision {revision!r} of this dataset"
        raise DatasetError(repo, problem, "Name a branch, tag or commit") from None
    except (OSError, EntryNotFoundError, HfHubHTTPError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise _absent(repo, revision, f"the dataset could not be fetched ({reason})") from error
    if not here.files(patterns):
        raise DatasetError(
            repo,
            f"commit {here.folder.name} has no files {', '.join(patterns)}",
            "The layout of the dataset has changed",
        )
    return here


def cached_snapshot(
    repo: str, revision: str, patterns: Sequence[str], cache: Path | None
) -> HubSnapshot | None:
    """Return the snapshot from the local cache without using the network; None if a requested file
    is missing.
    """
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        here = _download(repo, revision, patterns, cache, fetch=False)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise DatasetError(
            repo,
            f"this is not the name of a hub dataset ({error})",
            "Names have the form owner/name",
        ) from None
    return here if here.files(patterns) else None


def _download(
    repo: str, revision: str, patterns: Sequence[str], cache: Path | None, *, fetch: bool
) -> HubSnapshot:
    from huggingface_hub import snapshot_download

    what: dict[str, Any] = {
        "revision": revision,
        "cache_dir": cache,
        "allow_patterns": list(patterns),
    }
    folder = Path(snapshot_download(repo, repo_type="dataset", local_files_only=not fetch, **what))
    return HubSnapshot(repo, folder)


def split_files(here: HubSnapshot, split: str, config: str) -> list[Path]:
    """Return the data files of one split of a hub dataset that is not a known benchmark.

    A file belongs to a split if its path contains the split's name. Raises DatasetError, whose
    message lists the files, if the split or the configuration is ambiguous.
    """

    def parted(name: str, word: str) -> bool:
        return bool(re.search(rf"(^|[-_/.]){re.escape(word)}([-_/.]|$)", name))

    files = (
        path
        for path in here.files(DATA)
        if path.name not in ("dataset_infos.json", "dataset_dict.json")
    )
    names = [path.relative_to(here.folder).as_posix() for path in files]
    ours = [name for name in names if not config or parted(name, config)]
    chosen = [name for name in ours if parted(name, split)]
    chosen = chosen or (ours if len(ours) == 1 else [])
    if len({Path(name).parent for name in chosen}) != 1:
        problem = (
            f"{'no' if not chosen else 'more than one'} set of data files belongs to split "
            f"{split!r}"
        )
        raise DatasetError(
            here.repo,
            problem,
            "Name the split and the configuration; the dataset has the files "
            f"{', '.join(names[:12])}",
        )
    return [here.folder / name for name in sorted(chosen)]


def _absent(repo: str, revision: str, problem: str) -> DatasetError:
    at = "" if revision == "main" else f" --revision {revision}"
    advice = (
        f"On a machine with a network connection, run: hf download --repo-type dataset {repo}{at}. "
        "Or give a file of the dataset with --file"
    )
    return DatasetError(f"{repo}@{revision}", problem, advice)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Problems, with the information needed to load the same problems again and to verify them.

    `revision` is the hub commit, the sha256 of the file, or the generator's arguments. `digest` is
    the sha256 of the problems' contents.
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
        problems = counted(len(self), "problem")
        return f"{self.name}: {problems} from {self.source}@{self.revision[:12]}, digest {self.digest[:12]}"


def load_dataset(
    name: str | Path, selection: Selection | None = None, options: LoadOptions | None = None
) -> Dataset:
    """Load a benchmark ("math500", "aime24[:15]"), a file ("mine.csv") or a hub dataset.

    Hub datasets are named "hub:owner/name". A slice in the name is applied after `selection`.
    Raises DatasetError if the source cannot be read as requested, and OptionError for an unknown
    name.
    """
    options = options or LoadOptions()
    selection = selection or Selection()
    bare, cut = split_slice(str(name))
    whole = _load(bare, options, selection, cut)
    problems = whole.problems
    notes = [*whole.notes]
    # For a generated dataset, selection and slice were applied when it was generated.
    parts = () if whole.source == "generated" else (selection, cut)
    for part in parts:
        words = part.words()
        if words:
            problems = tuple(select(problems, part, str(name)))
            notes.append(f"selected: {words} ({len(problems)} of {len(whole)})")
    if options.shots:
        table = read_table([options.shots], str(options.shots))
        shot = Benchmark.unknown("shot")
        worked, _ = problems_of(Reader(table, Columns(answer="solution"), shot, LoadOptions()))
        examples = tuple((each.text, each.answer or "") for each in worked)
        problems = tuple(replace(it, examples=examples) for it in problems)
        notes.append(f"{len(worked)} worked examples precede every problem")
    return replace(
        whole, name=str(name), problems=problems, digest=digest(problems), notes=tuple(notes)
    )


def digest(problems: Sequence[Problem]) -> str:
    """Return the sha256 of the problems' contents in their order. It is the same for every source
    of the same problems.
    """
    state = sha256()
    for it in problems:
        fields: list[Any] = [it.id, it.text, it.answer, it.kind, it.level, it.subject]
        fields.append(list(it.choices))
        if it.grading:
            fields.append(asdict(it.grading))
        fields += it.examples
        state.update(json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
    return state.hexdigest()


def _load(name: str, options: LoadOptions, selection: Selection, cut: Selection) -> Dataset:
    """Load a dataset from its source. The digest stays empty, because the caller computes it after
    the selection.
    """
    benchmark = find_benchmark(name)
    if benchmark and benchmark.name == "arithmetic":
        return _arithmetic(options, selection, cut)
    if benchmark and benchmark.name == "programs" and not options.file:
        return _file(Path(__file__).with_name("programs.jsonl"), options, benchmark)
    if benchmark and options.file:
        return _file(options.file, options, benchmark)
    if benchmark:
        for copy in benchmark.hubs:
            if cached_snapshot(copy.repo, options.revision, copy.files, options.cache):
                return _copy(benchmark, copy, options)
        return _copy(benchmark, benchmark.hubs[0], options)
    repo = re.fullmatch(r"(?:hub:)?([\w.-]+/[\w.-]+?)(?:@([\w.\-/]+))?", name)
    path = Path(name)
    is_hub = name.startswith("hub:")
    if repo and (is_hub or not (kind_of(path) or path.exists())):
        options = replace(options, revision=repo[2] or options.revision)
        for known in BENCHMARKS.values():
            for copy in known.hubs:
                if copy.repo.lower() == repo[1].lower():
                    return _copy(known, copy, options)
        copy = HubSource(repo[1], DATA, Columns())
        return _copy(Benchmark.unknown(repo[1]), copy, options)
    # A file of unknown type goes to the reader too, because its error message lists the known
    # types.
    if path.exists() or (kind_of(path) and not is_hub):
        return _file(path, options, Benchmark.unknown(name))
    raise OptionError(
        "dataset", f"there is no benchmark or file {name!r}", [*BENCHMARKS], given=name.lower()
    )


def _copy(benchmark: Benchmark, copy: HubSource, options: LoadOptions) -> Dataset:
    """Load a benchmark from one of its copies on the hub."""
    here = snapshot(copy.repo, copy.files, options)
    if benchmark.hubs:
        files = here.files(copy.files)
    else:
        files = split_files(here, options.split, options.config)
    table = read_table(files, copy.repo)
    if copy.keep:
        column, part = copy.keep
        kept = [index for index, row in enumerate(table.rows) if part in cell(row.get(column))]
        if not kept:
            raise DatasetError(
                table.source,
                f"no row of the dataset has {part!r} in column {column!r}",
                "The layout of the dataset has changed",
            )
        table = replace(
            table,
            rows=tuple(table.rows[i] for i in kept),
            places=tuple(table.places[i] for i in kept),
        )
    # A newer version of the hub dataset may lack optional columns, such as the level. Load it
    # without them, and report this in the notes.
    needed = ("text", "answer", "choices", "distractors")
    gone = {
        field: name
        for field, name in asdict(copy.columns).items()
        if field not in needed and name and name not in table.columns and not options.asked
    }
    columns = replace(copy.columns, **dict.fromkeys(gone, ""), distractors=copy.columns.distractors)
    dataset = _dataset(benchmark, table, columns, options)
    losses = [f"this copy of the dataset no longer has column {name!r}" for name in gone.values()]
    notes = (*dataset.notes, *losses)
    return replace(dataset, source=f"hub:{copy.repo}", revision=here.folder.name, notes=notes)


def _file(path: Path, options: LoadOptions, benchmark: Benchmark) -> Dataset:
    """Load a file. A file with the columns of one of the benchmark's hub copies is read like that
    copy.
    """
    table = read_table([path], str(path))
    copies = [copy.columns for copy in benchmark.hubs] or [Columns()]
    for columns in copies:
        names = {columns.text, columns.answer, columns.id, columns.context, *columns.distractors}
        names -= {""}
        if names and names <= {*table.columns}:
            return _dataset(benchmark, table, columns, options)
    sides = {field: getattr(copies[0], field) for field in ("unit", "tolerance")}
    sides = {field: name for field, name in sides.items() if name in table.columns}
    return _dataset(benchmark, table, Columns(**sides), options)


def _dataset(
    benchmark: Benchmark, table: RowTable, columns: Columns, options: LoadOptions
) -> Dataset:
    """Convert the rows of a table to a dataset. Columns that the user named take precedence over
    `columns`.

    If the benchmark is a fixed sample of another benchmark, only the problems of the sample are
    kept.
    """
    problems, notes = problems_of(Reader(table, options.asked or columns, benchmark, options))
    if benchmark.sample:
        whole = BENCHMARKS[benchmark.prefix].size
        if len(problems) != whole:
            problem = (
                f"{benchmark.name} is a sample of the {whole} problems of {benchmark.prefix} in "
                f"a fixed order, but this source has {counted(len(problems), 'problem')}"
            )
            raise DatasetError(
                table.source, problem, f"Use a source with all problems of {benchmark.prefix}"
            )
        problems = select(
            problems, Selection(sample=benchmark.sample[0], seed=benchmark.sample[1]), table.source
        )
        notes.append(benchmark.note)
    elif benchmark.hubs and len(problems) != benchmark.size:
        notes.append(
            f"{benchmark.title} has {benchmark.size} problems, but this source has {len(problems)}"
        )
    return Dataset(
        benchmark.name, table.source, f"sha256:{table.digest}", "", tuple(problems), tuple(notes)
    )


def _arithmetic(options: LoadOptions, selection: Selection, cut: Selection) -> Dataset:
    """Generate arithmetic problems, with the number, seed and levels that `selection` gives."""
    name = "arithmetic"
    # The cast only satisfies type checkers. The generator raises an error for an unknown split.
    split = cast(arithmetic.Split, options.split)
    count = selection.sample or BENCHMARKS[name].size
    levels = selection.levels or (1, 2, 3, 4, 5)
    revision = (
        f"{split}, {count} problems, seed {selection.seed}, levels {','.join(map(str, levels))}"
    )
    rest = replace(selection, sample=None, levels=())
    wanted = range(count)[cut.start : cut.stop : cut.step]
    is_whole = rest.words() or not wanted
    # A problem does not depend on the problems after it. So problems after the end of the slice are
    # not generated.
    generated = _generated(split, count if is_whole else max(wanted) + 1, selection.seed, levels)
    if is_whole:
        problems = select(select(generated, rest, name), cut, name)
    else:
        problems = [generated[index] for index in wanted]
    notes = (f"selected: {cut.words()} ({len(problems)} of {count})",) if cut.words() else ()
    return Dataset(name, "generated", revision, "", tuple(problems), notes)


@lru_cache(maxsize=16)
def _generated(
    split: arithmetic.Split, count: int, seed: int, levels: tuple[int, ...]
) -> tuple[Problem, ...]:
    """Return the first `count` problems for a seed. They are cached, because generating each one
    takes about a millisecond.
    """
    return tuple(arithmetic.problems(split, count, seed=seed, levels=levels))
