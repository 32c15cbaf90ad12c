"""Import of rollouts in two passes: find the rollouts of all files, then write them into a run, one
problem at a time.
"""

from __future__ import annotations

import re
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from atts.core import (
    AnswerKind,
    Chunk,
    Ending,
    Finish,
    Problem,
    ProblemSpan,
    Prompt,
    RolloutSpan,
    Turn,
    Usage,
)
from atts.errors import DatasetError, OptionError, UsageError, counted
from atts.evaluators import extract, group, judge, reference
from atts.importers.formats import (
    Ended,
    ForeignSample,
    Format,
    ReadOptions,
    RecordError,
    check_columns,
)
from atts.importers.records import RecordFile, digest_of, open_records, parse
from atts.journal import (
    Entry,
    Event,
    Graded,
    Journal,
    JournalOptions,
    Json,
    Manifest,
    Measured,
    OutcomeReached,
    ProblemStarted,
    RolloutFinished,
    RolloutStarted,
    Setting,
    TurnFinished,
    VerdictStatus,
    Warned,
    check_directory,
    dataset_digest,
    is_censored,
    open_journal,
)
from atts.ledger import PRICES, Price
from atts.pipelines import Ballot, tally

IMPORTED = "imported"
"""Name that marks a run as imported: a key in the configuration of the run's manifest, and the code
of a warning in its journal.
"""

Grades = Literal["recorded", "again"]
"""The source of verdicts. "recorded": use the other tool's verdicts, and let atts judge only the
rollouts without one. "again": atts judges all rollouts.
"""

_WORDS: Mapping[str, VerdictStatus] = MappingProxyType(
    {"equal": "correct", "different": "wrong", "unscored": "unscored"}
)
_MOST_OPEN = 128  # largest number of input files that are open at the same time
# Largest number of characters of a recorded answer. If the text has no marked answer, a longer
# recorded answer is not used, because it is probably not only an answer.
_FEW_WORDS = 60


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of an import.

    `model` and `filter` select rollouts if the files contain several models or several answer
    filters. `known` is the list of problems of the dataset named `known_as`. A problem of this
    dataset replaces an imported problem with the same question.
    """

    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    metric: str = ""
    model: str = ""
    filter: str = ""
    kind: AnswerKind | None = None
    grades: Grades = "recorded"
    known: Sequence[Problem] = ()
    known_as: str = ""

    def __post_init__(self) -> None:
        check_columns(self.columns)
        if self.grades not in ("recorded", "again"):
            raise OptionError("--grades", f"{self.grades!r} is unknown", ("recorded", "again"))


@dataclass(slots=True)
class Imported:
    """Summary of an imported run. The counts include rollouts that an earlier, interrupted import
    already wrote.
    """

    directory: Path
    format: str
    model: str = ""
    files: int = 0
    bytes: int = 0
    problems: int = 0
    rollouts: int = 0
    most_rollouts: int = 0  # number of rollouts of the problem that has the most
    graded: int = 0  # number of rollouts for which the other tool recorded a verdict
    referenced: int = 0  # number of problems with a reference answer
    with_answer: int = 0  # number of rollouts from which the other tool extracted an answer
    with_tokens: int = 0
    with_seconds: int = 0
    with_dollars: int = 0
    dollars: float = 0.0
    scores: tuple[str, ...] = ()
    unknown: int = 0  # number of imported problems that are not in the dataset that the user named
    already: int = 0  # number of problems that an earlier, interrupted import has written

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON data."""
        names = [name for name in self.__slots__ if name != "directory"]
        return {"run": str(self.directory), **{name: getattr(self, name) for name in names}}


async def import_rollouts(
    format: Format, path: Path, out: Path, options: ImportOptions | None = None
) -> Imported:
    """Import another tool's files as a run in the directory `out`, and return a summary.

    The files are read twice, so that only one record at a time is in memory. If an import was
    interrupted and the files have not changed, it continues with the first incomplete problem.

    :raises DatasetError: a file or a record cannot be read; the message names file and line.
    :raises OptionError: the files contain several models or filters, and none was chosen.
    :raises FingerprintError: `out` contains another run.
    :raises JournalError: `out` cannot be used, or writing to the disk fails.
    """
    options = options or ImportOptions()
    check_directory(out)
    files = _files(format, path)
    reading = _Reading(format, files, options)
    with reading.opened():
        digest = dataset_digest(reading.find())
        made = reading.found(out)
        done = set[str]()
        manifest = _manifest(made, digest, options, path, reading)

        def recall(entry: Entry) -> None:
            # A problem has been written completely if the journal has its last event. This is the
            # problem's span if the durations of all rollouts are known, and the outcome if not.
            if isinstance(entry.event, ProblemSpan if reading.is_timed else OutcomeReached):
                done.add(entry.event.problem)

        # All events get the time 0, because the duration of the import says nothing about the
        # rollouts.
        async with open_journal(
            out, manifest, JournalOptions(clock=lambda: 0.0), recall
        ) as journal:
            made.already = len(done)
            if not done:
                journal.record(Warned(IMPORTED, _origin(made, options)))
            for number, name in enumerate(reading.problems):
                if name not in done:
                    _ProblemWriter(journal, options.grades).write(
                        reading.samples(name), number, is_timed=reading.is_timed
                    )
                    await journal.saved()
    return made


def _files(format: Format, path: Path) -> list[Path]:
    """Return the file at a path, or the files of the format in a directory, sorted so that rs2
    comes before rs10.
    """
    if not path.is_dir():
        return [path]
    for pattern in format.patterns:
        files = [each for each in path.rglob(pattern) if each.is_file()]
        if files:
            return sorted(files, key=_natural)
    pickles = sorted(path.rglob("*.pkl"))
    if pickles:
        # opening this file raises an error that explains why pickle files are refused
        return pickles[:1]
    raise DatasetError(
        str(path),
        f"the directory has no file that matches {' or '.join(format.patterns)}, as the format "
        f"{format.name} requires",
        "Give the directory that contains the files, or the path of a single file",
    )


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in file names by value: output-rs2 comes before
    output-rs10.
    """
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


class _Reading:
    """The input files of an import, with the position of every record, grouped by problem."""

    def __init__(self, format: Format, files: Sequence[Path], options: ImportOptions) -> None:
        self.format = format
        self.files = files
        self.options = options
        self.is_timed = False  # whether the files give the duration of every rollout
        # For each problem, a flat list with three numbers per record: index of the record's file,
        # `Place.start` and `Place.size`.
        self.problems: dict[str, array[int]] = {}
        self.digests = list[str]()
        self._known = {_plain(problem.text): problem for problem in options.known}
        self._known_ids = {problem.id for problem in options.known}
        # Names that atts gave to problems without a name, keyed by a hash of the question.
        self._names: dict[bytes, str] = {}
        self._made = Imported(Path(), format.name, files=len(files))
        self._models = Counter[str]()
        self._filters = Counter[str]()
        self._scores: dict[str, None] = {}
        self._prices = set[tuple[float, float] | None]()
        self._open: OrderedDict[int, tuple[RecordFile, ExitStack]] = OrderedDict()
        self._read_options = ReadOptions(options.columns, options.metric)

    @contextmanager
    def opened(self) -> Generator[None]:
        """Close the input files when the `with` block ends."""
        try:
            yield
        finally:
            for _, stack in self._open.values():
                stack.close()

    def find(self) -> Iterator[Problem]:
        """Read all files once, and yield each problem when its first rollout is found.

        :raises DatasetError: a record cannot be read, or the files contain no rollout.
        :raises OptionError: the files contain several models or filters, and none was chosen.
        """
        counts = Counter[str]()
        for index, path in enumerate(self.files):
            self.digests.append(self._digest(path))
            self._made.bytes += path.stat().st_size
            file = self._file(index)
            for place, data in file.places():
                where = f"{file.word} {place.number}"
                samples = self._samples(index, data, where)
                if not samples:
                    continue
                problem = self.problem(samples[0])
                if problem.id not in self.problems:
                    self.problems[problem.id] = array("q")
                    self._made.referenced += problem.answer is not None
                    self._made.unknown += bool(self._known) and problem.id not in self._known_ids
                    yield problem
                self.problems[problem.id].extend((index, place.start, place.size))
                counts[problem.id] += len(samples)
                for sample in samples:
                    self._count(sample)
        self._refuse_several("--model", self._models, "models")
        self._refuse_several("--filter", self._filters, "answer filters")
        if not counts:
            wanted = self.options.model or self.options.filter
            raise DatasetError(
                str(self.files[0]),
                f"the file has no rollout of {wanted!r}"
                if wanted
                else "the file does not contain rollouts",
                f"Check that its format is {self.format.name}",
            )
        if self._known and self._made.unknown == len(self.problems):
            raise DatasetError(
                self.options.known_as,
                "none of the dataset's questions occurs in the files",
                "Apart from white space, a question must have the same text in the dataset and in "
                "the files; to keep the problems of the files, leave out --dataset",
            )
        self._made.most_rollouts = max(counts.values())
        self.is_timed = self._made.with_seconds == self._made.rollouts

    @property
    def price(self) -> Price | None:
        """Return the model's token prices. Return None if these prices are unknown, or are not the
        same for all rollouts.
        """
        if len(self._prices) != 1:
            return None
        (prices,) = self._prices
        return None if prices is None else Price(*prices)

    def found(self, out: Path) -> Imported:
        """Return a summary of the files, problems and rollouts that `find` read."""
        self._made.directory = out
        self._made.problems = len(self.problems)
        self._made.model = next(iter(self._models), "")
        self._made.scores = tuple(self._scores)
        return self._made

    def samples(self, name: str) -> Iterator[tuple[Problem, ForeignSample]]:
        """Read the rollouts of a problem a second time, and yield each one with its problem. Each
        rollout gets an index that is unique within the problem.
        """
        places = self.problems[name]
        used = set[int]()
        for at in range(0, len(places), 3):
            index, start, size = places[at : at + 3]
            data = self._file(index).read(start, size)
            for sample in self._samples(index, data, f"the record at byte {start}"):
                number = sample.number
                if number is None or number in used:
                    number = next(free for free in range(len(used) + 1) if free not in used)
                used.add(number)
                yield self.problem(sample, name), replace(sample, number=number)

    def problem(self, sample: ForeignSample, name: str = "") -> Problem:
        """Return the problem of a rollout: the dataset's problem with the same question, or else
        the problem that the other tool recorded.
        """
        known = self._known.get(_plain(sample.question))
        if known is not None:
            return known
        kind = self.options.kind or sample.kind or "math"
        answer = sample.reference
        if answer is not None and kind == "math":
            # A reference of GSM8K is a whole solution that ends in the answer, such as "#### 18".
            answer = reference(answer.rpartition("####")[2].strip())
        return Problem(
            id=name or sample.problem or self._name(sample.question),
            text=sample.question,
            answer=answer,
            kind=kind,
            choices=sample.choices,
            source=self.format.name,
        )

    def _name(self, question: str) -> str:
        """Return a generated name, such as "problem-1", for a problem without a name. The same
        question always gets the same name.
        """
        key = blake2b(_plain(question).encode(errors="surrogatepass"), digest_size=16).digest()
        return self._names.setdefault(key, f"problem-{len(self._names) + 1}")

    def _samples(self, index: int, data: bytes, where: str) -> list[ForeignSample]:
        """Parse a record, and return those of its rollouts that have the selected model and filter.

        :raises DatasetError: the record cannot be read; the message names the file and the record.
        """
        path = self.files[index]
        try:
            samples = list(self.format.read(parse(data), path, self._read_options))
        except RecordError as error:
            raise DatasetError(
                str(path), f"{where}: {error}", f"Check that its format is {self.format.name}"
            ) from None
        except ValueError as error:
            raise DatasetError(
                str(path), f"{where}: {error}", "Correct or remove the record"
            ) from None
        options = self.options
        return [
            sample
            for sample in samples
            if options.model in ("", sample.model) and options.filter in ("", sample.filter)
        ]

    def _count(self, sample: ForeignSample) -> None:
        made = self._made
        made.rollouts += 1
        made.graded += sample.is_correct is not None
        made.with_answer += bool(sample.answer) and not _is_whole_text(sample)
        made.with_tokens += sample.tokens is not None
        made.with_seconds += sample.seconds is not None
        made.with_dollars += sample.dollars is not None
        made.dollars += sample.dollars or 0.0
        self._models[sample.model] += 1
        self._filters[sample.filter] += 1
        self._prices.add(sample.prices)
        self._scores.update(dict.fromkeys(sample.scores))

    def _refuse_several(self, option: str, counts: Counter[str], what: str) -> None:
        if len(counts) > 1:
            listed = ", ".join(f"{name!r} ({count:,})" for name, count in counts.most_common(12))
            raise OptionError(
                option,
                f"the files contain rollouts from {len(counts)} {what}; choose one of {listed}",
            )

    def _file(self, index: int) -> RecordFile:
        """Return an input file, opening it if necessary. If too many files are open, close the
        least recently used one.
        """
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index][0]
        if len(self._open) >= _MOST_OPEN:
            _, (_, oldest) = self._open.popitem(last=False)
            oldest.close()
        stack = ExitStack()
        file = stack.enter_context(open_records(self.files[index], self.format.list_field))
        self._open[index] = file, stack
        return file

    def _digest(self, path: Path) -> str:
        # open the file first, because this raises a clear error if the file cannot be read
        self._file(len(self.digests))
        return digest_of(path)


def _plain(text: str) -> str:
    """Return a question with normalised white space, so that questions can be compared."""
    return " ".join(text.split())


def _manifest(
    made: Imported, digest: str, options: ImportOptions, path: Path, reading: _Reading
) -> Manifest:
    files = blake2b("".join(reading.digests).encode(), digest_size=16).hexdigest()
    choices: dict[str, Json] = {
        "format": made.format, "files": files, "columns": dict(options.columns),
        "metric": options.metric, "filter": options.filter, "kind": options.kind,
        "grades": options.grades, "dataset": options.known_as,
    }  # fmt: skip
    policy: dict[str, Json] = {
        "samples": made.most_rollouts, "turns": 1, "drafter": "target", "vote": "majority",
        "early_stop": "none",
    }  # fmt: skip
    settings = {
        "dataset": Setting(options.known_as or str(path), IMPORTED),
        "samples": Setting(made.most_rollouts, IMPORTED),
    }
    if reading.price is not None:
        prices: dict[str, Json] = {"target": asdict(reading.price)}
        settings[PRICES] = Setting(prices, IMPORTED)
    return Manifest(
        dataset=digest,
        problems=made.problems,
        configuration={
            "policy": Setting(policy, IMPORTED),
            "gate": Setting("FixedGate", IMPORTED),
            "method": Setting("target-only", IMPORTED),
            "rate": Setting(0.0, IMPORTED),
            IMPORTED: Setting(choices, "atts import"),
        },
        engines={"target": {"engine": made.format, "model": made.model or "unknown"}},
        created=time.time(),
        settings=settings,
    )


def _origin(made: Imported, options: ImportOptions) -> str:
    """Return a note that says where the run's rollouts come from. It also says for how many of the
    rollouts the other tool recorded token counts, durations and costs.
    """
    counts = {"tokens": made.with_tokens, "seconds": made.with_seconds, "costs": made.with_dollars}
    known = [f"the {name} of {counted(count, 'rollout')}" for name, count in counts.items()]
    whose = "atts graded all of them"
    if options.grades == "recorded":
        whose = (
            f"atts kept the other tool's verdict on {counted(made.graded, 'rollout')}, and graded "
            "the rest"
        )
    return (
        "atts did not generate the texts of this run: it imported "
        f"{counted(made.rollouts, 'rollout')} from {made.format} files. The other tool recorded "
        f"{', '.join(known)}; {whose}"
    )


_FINISHES: Mapping[Ended, Finish] = MappingProxyType(
    {"end": "end", "length": "tokens", "stopped": "cancelled", "failed": "failed"}
)


class _ProblemWriter:
    """Writer of one problem's events into the journal."""

    def __init__(self, journal: Journal, grades: Grades) -> None:
        self._record: Callable[[Event], None] = journal.record
        self._grades = grades
        # verdicts that atts gave on answers of this problem, keyed by answer
        self._verdicts: dict[str, tuple[VerdictStatus, str]] = {}
        # for each answer of this problem, how often the other tool judged it correct and how often
        # wrong
        self._recorded: dict[str, Counter[VerdictStatus]] = {}

    def write(
        self, samples: Iterable[tuple[Problem, ForeignSample]], number: int, *, is_timed: bool
    ) -> None:
        """Write the problem with all its rollouts and verdicts, then the vote and the outcome.
        `number` is the problem's index in the run.
        """
        problem: Problem | None = None
        answers: dict[int, str] = {}
        usage = Usage()
        errors = list[str]()
        longest = 0.0
        numbers = list[int]()
        for its_problem, sample in samples:
            if problem is None:
                problem = its_problem
                self._record(ProblemStarted(problem))
            assert sample.number is not None, "every rollout must have a number after reading"
            numbers.append(sample.number)
            answer = self._rollout(problem, sample, sample.number)
            if answer is not None:
                answers[sample.number] = answer
            usage += _usage(sample)
            longest = max(longest, sample.seconds or 0.0)
            if is_timed:
                self._time(problem, sample)
            if sample.ended == "failed":
                errors.append(sample.error)
        assert problem is not None, "every problem must have a rollout"
        self._finish(problem, answers, tuple(sorted(numbers)), usage, errors)
        if is_timed:
            self._record(ProblemSpan(problem.id, number, "done", 0.0, longest))

    def _rollout(self, problem: Problem, sample: ForeignSample, number: int) -> str | None:
        """Write one rollout with its verdict. Return its answer, or None if it has no answer."""
        answer = None if sample.answer is None else sample.answer.strip() or None
        if sample.ended != "failed" and (sample.answer is None or _is_whole_text(sample)):
            # Use the answer that the text marks, for example with \boxed. If there is none, use the
            # recorded answer, unless it is long.
            answer = extract(sample.text, problem.kind) or (
                answer if answer and len(answer) <= _FEW_WORDS else None
            )
        finish = "answer" if answer is not None else _FINISHES[sample.ended]
        ended: Ending = "length" if sample.ended == "length" else "end"
        chunk = Chunk("target", sample.text, sample.ids, sample.ids, ended, sample.logprobs)
        self._record(RolloutStarted(problem.id, number, Prompt((), ())))
        self._record(TurnFinished(problem.id, number, Turn(0, (chunk,))))
        self._record(
            RolloutFinished(
                problem.id,
                number,
                finish,
                turns=1,
                answer=answer,
                usage=_usage(sample),
                error=sample.error if finish == "failed" else "",
            )
        )
        if sample.scores or sample.dollars is not None or sample.seconds is not None:
            self._record(
                Measured(problem.id, number, dict(sample.scores), sample.dollars, sample.seconds)
            )
        verdict = self._verdict(problem, sample, answer)
        if verdict is not None and not is_censored(answer, finish):
            status, rule = verdict
            self._record(Graded(problem.id, status, number, answer, rule))
        return answer

    def _verdict(
        self, problem: Problem, sample: ForeignSample, answer: str | None
    ) -> tuple[VerdictStatus, str] | None:
        """Return the verdict on a rollout, and the name of the rule that decided it. Return None if
        the tool recorded no verdict and the problem has no reference answer.
        """
        if sample.is_correct is not None and self._grades == "recorded":
            status: VerdictStatus = "correct" if sample.is_correct else "wrong"
            if answer is not None:
                self._recorded.setdefault(answer, Counter())[status] += 1
            return status, f"recorded by {problem.source or 'the other tool'}"
        if problem.answer is None:
            return None
        return ("wrong", "no answer") if answer is None else self._own(problem, answer)

    def _own(self, problem: Problem, answer: str) -> tuple[VerdictStatus, str]:
        """Return atts's own verdict on an answer, and the name of the rule that decided it.
        Verdicts are cached by answer.
        """
        if answer not in self._verdicts:
            verdict = judge(problem, answer)
            self._verdicts[answer] = _WORDS[verdict.status], verdict.rule
        return self._verdicts[answer]

    def _time(self, problem: Problem, sample: ForeignSample) -> None:
        seconds = sample.seconds or 0.0
        number = sample.number or 0
        self._record(
            RolloutSpan(
                problem.id, number, "done", queued=0.0, started=0.0, ended=seconds, released=seconds
            )
        )

    def _finish(
        self,
        problem: Problem,
        answers: Mapping[int, str],
        numbers: tuple[int, ...],
        usage: Usage,
        errors: Sequence[str],
    ) -> None:
        """Count the votes for the rollouts' answers, then write the verdict on the winning answer
        and the problem's outcome.
        """
        votes = tally(
            [Ballot(answers[number]) for number in sorted(answers)],
            lambda texts: group(texts, problem.kind),
        )
        winner = votes.winner
        verdict = self._vote_verdict(problem, winner)
        if verdict is not None:
            status, rule = verdict
            self._record(Graded(problem.id, status, None, winner, rule))
        is_failed = bool(errors) and len(errors) == len(numbers)
        self._record(
            OutcomeReached(
                problem.id,
                "failed" if is_failed else "unanswered" if winner is None else "answered",
                winner,
                numbers,
                dict(zip(votes.answers, votes.weights, strict=True)),
                why=errors[0] if is_failed else "",
                usage=usage,
            )
        )

    def _vote_verdict(
        self, problem: Problem, winner: str | None
    ) -> tuple[VerdictStatus, str] | None:
        """Return the verdict on the answer that won the vote, and the name of the rule that decided
        it.

        If the other tool graded this answer, use the verdict that it gave most often. Otherwise
        atts judges the answer. Return None if the problem has no reference answer to judge by.
        """
        if winner is not None and winner in self._recorded:
            ((status, _),) = self._recorded[winner].most_common(1)
            return status, f"recorded by {problem.source or 'the other tool'}"
        if problem.answer is None:
            return None
        return ("wrong", "no answer") if winner is None else self._own(problem, winner)


def _is_whole_text(sample: ForeignSample) -> bool:
    """Return True if the recorded answer is the whole text that the model wrote after its
    reasoning.

    The scorers `match` and `includes` of inspect_ai record this whole text as the answer, because
    they search it for the reference answer. The comparison ignores case, because some scorers
    change the case of the answer.
    """
    if sample.answer is None:
        return False
    spoken = sample.text.rpartition("</think>")[2]
    return sample.answer.strip().casefold() == spoken.strip().casefold()


def _usage(sample: ForeignSample) -> Usage:
    return Usage(
        target_tokens=sample.tokens or 0,
        target_prefill_tokens=sample.prompt_tokens or 0,
        calls=1,
    )


def check_format(name: str, known: Mapping[str, Format]) -> Format:
    """Return the format with this name.

    :raises OptionError: if no format has this name.
    """
    if name not in known:
        raise OptionError("format", f"{name!r} is unknown", [*known], name)
    return known[name]


def check_out(out: Path) -> None:
    """Check that the run directory is not "-", because this name means standard output.

    :raises UsageError: if the run directory is "-".
    """
    if str(out) == "-":
        raise UsageError("--out: '-' is not a directory; give a directory for the run")
