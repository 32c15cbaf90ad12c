"""The export of recorded runs as training data, for example the draft's texts with the target's
log-probabilities.

The last part of the module makes examples for training a judge, from runs in which coins chose the
takeovers.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, NamedTuple, Protocol, get_args

from atts.calibration import Examples
from atts.core import CallSpan, Chunk, Outcome, Rollout, TokenIds, Turn
from atts.errors import JournalError, MissingExtra, OptionError, UsageError
from atts.files import jsonable, storage, write_atomic
from atts.journal import FACTS, Measured, RecordedRun, RunState, Scored
from atts.pipelines import JUDGE_FEATURES, judge_features
from atts.sampling import Seed, generator

DataKind = Literal["opd", "sft", "preference", "verifiers"]
KINDS: tuple[DataKind, ...] = get_args(DataKind)
VERSIONS: Mapping[DataKind, int] = {"opd": 2, "sft": 1, "preference": 1, "verifiers": 1}
"""The version of the record format for each kind of data; every record contains it, for example
"atts.opd/2".
"""


class TopTokens(NamedTuple):
    """The most likely tokens at each position of a text, the most likely first, with their
    log-probabilities.
    """

    ids: list[list[int]]
    logprobs: list[list[float]]


class Teacher(Protocol):
    """A model that returns the most likely tokens at every position of a rollout."""

    tokenizer: str  # digest that identifies the tokenizer

    def top_tokens(self, prompt: Sequence[int], ids: Sequence[int]) -> TopTokens:
        """Return the most likely tokens at the positions of `ids`, which follow `prompt`."""
        ...


Keep = Literal["correct", "answered", "all"]
"""The rollouts to export: rollouts with a correct answer, rollouts with any answer, or all
rollouts.
"""

_ORIGIN = {
    "schema": "text", "run": "text", "draft": "text", "target": "text", "draft_weights": "text",
    "target_weights": "text",
}  # fmt: skip
_ROLLOUT = {
    "problem": "text", "sample": "integer", "answer": "text", "reference": "text",
    "correct": "truth", "finish": "text",
}  # fmt: skip
COLUMNS: Mapping[DataKind, Mapping[str, str]] = {
    "opd": {
        **_ORIGIN, **_ROLLOUT, "part": "text", "prompt_ids": "integers", "ids": "integers",
        "mask": "integers", "student_logprobs": "numbers", "teacher_logprobs": "numbers",
        "top_ids": "lists of integers", "top_logprobs": "lists of numbers",
        "decisions": "decisions",
    },
    "sft": {
        **_ORIGIN, **_ROLLOUT, "messages": "messages", "prompt_ids": "integers", "ids": "integers",
    },
    "preference": {
        **_ORIGIN, "problem": "text", "reference": "text", "prompt": "messages",
        "chosen": "messages", "rejected": "messages", "chosen_sample": "integer",
        "rejected_sample": "integer", "chosen_answer": "text", "rejected_answer": "text",
    },
    "verifiers": {
        **_ORIGIN, **_ROLLOUT, "example_id": "text", "task": "text", "prompt": "messages",
        "completion": "messages", "reward": "number", "metrics": "named numbers",
    },
}  # fmt: skip
"""For each kind of data: the names of a record's fields, in order, and their types."""

# number of records in a row group of a Parquet file; each row group is collected in memory
_ROW_GROUP = 512
_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of an export. `pairs` is the largest number of preference pairs per problem;
    `seed` determines which pairs are sampled.

    :raises OptionError: an unknown choice, or no pairs.
    """

    kind: DataKind = "sft"
    # The rollouts to export. With None, the kind "sft" exports only correct rollouts, and the other
    # kinds export all rollouts.
    keep: Keep | None = None
    pairs: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError("--as", f"{self.kind!r} is unknown", KINDS)
        if self.keep is not None and self.keep not in get_args(Keep):
            raise OptionError("--keep", f"{self.keep!r} is unknown", get_args(Keep))
        if self.pairs < 1:
            raise OptionError("--pairs", f"{self.pairs} is too few pairs; give at least 1")


@dataclass(slots=True)
class Exported:
    """The file that an export wrote, with the number of exported records and the numbers of omitted
    rollouts.
    """

    path: Path
    kind: DataKind
    problems: int = 0  # number of problems with at least one record
    records: int = 0
    # number of tokens for which the log-probabilities of both models are known
    trained_tokens: int = 0
    # number of rollouts that were left out, keyed by reason
    skipped: Counter[str] = field(default_factory=Counter[str])

    def as_json(self) -> dict[str, Any]:
        """Return the counts as data for JSON."""
        names = ("kind", "problems", "records", "trained_tokens")
        plain = {name: getattr(self, name) for name in names}
        return {"file": str(self.path), **plain, "skipped": dict(self.skipped)}


@dataclass(frozen=True, slots=True)
class FinishedCase:
    """A finished problem with the data that its records need."""

    outcome: Outcome
    verdicts: Mapping[int, str | None]  # verdicts on rollouts, keyed by sample
    # keyed by sample and turn: the target's log-probabilities of the draft's chunk
    teacher: Mapping[tuple[int, int], tuple[float, ...]]
    scores: Mapping[int, Mapping[str, float]]


def export_run(
    run: RecordedRun, path: Path, options: ExportOptions, teacher: Teacher | None = None
) -> Exported:
    """Write a run's rollouts as training data, problem by problem, and return the counts.

    A `teacher`, usually the run's target, reads each rollout again; the records of opd then also
    have the teacher's most likely tokens. The file is replaced atomically at the end.

    :raises OptionError: the kind of file is unknown, or the teacher has another tokenizer.
    :raises UsageError: the run did not record the data from which this kind of training data is
        built.
    :raises JournalError: no problem is finished, or the journal cannot be read.
    :raises StorageError: the file cannot be written.
    """
    if path.suffix not in _SUFFIXES:
        raise OptionError("--out", f"{path} does not end in {' or '.join(_SUFFIXES)}")
    if options.kind == "opd":
        _check_tokenizers(run, teacher)
    elif teacher is not None:
        raise OptionError(
            "--teacher",
            f"records of kind {options.kind} have no fields for a teacher's tokens; leave "
            "--teacher out, or use --as opd",
        )
    made = Exported(path, options.kind)
    records: Iterable[dict[str, Any]] = _records(run, options, made)
    if options.kind == "opd":
        records = (_taught(record, teacher) for record in records)
    if path.suffix == ".parquet":
        _write_parquet(path, records, COLUMNS[options.kind])
    else:
        write_atomic(path, (_line(record) for record in records))
    return made


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(jsonable(record), ensure_ascii=False).encode(errors="replace") + b"\n"


def _taught(record: dict[str, Any], teacher: Teacher | None) -> dict[str, Any]:
    """Return a record with the teacher's most likely tokens; without a teacher these fields are
    null.
    """
    if teacher is None:
        return {**record, "top_ids": None, "top_logprobs": None}
    top = teacher.top_tokens(record["prompt_ids"], record["ids"])
    return {**record, "top_ids": top.ids, "top_logprobs": top.logprobs}


def _check_tokenizers(run: RecordedRun, teacher: Teacher | None) -> None:
    engines = run.manifest.engines
    if not {"draft", "target"} <= engines.keys():
        raise UsageError(
            f"{run.directory}: opd needs a draft and a target, but this run used only "
            f"{' and '.join(engines) or 'neither'}; export the run as sft, preference or verifiers"
        )
    draft, target = (engines[role].get("tokenizer") for role in ("draft", "target"))
    if draft != target:
        raise UsageError(
            f"{run.directory}: draft and target have different tokenizers, so the target has no "
            "log-probabilities of the draft's tokens; export the run as sft, preference or "
            "verifiers"
        )
    if teacher is not None and teacher.tokenizer != draft:
        raise OptionError(
            "--teacher",
            "the teacher's tokenizer is not the one that the run's models use; name the run's "
            "target as the teacher",
        )


def _records(run: RecordedRun, options: ExportOptions, made: Exported) -> Iterator[dict[str, Any]]:
    maker = _MAKERS[options.kind]
    has_problem = False
    origin = _origin(run, options.kind)
    for case in finished_cases(run, needs_scores=options.kind == "opd"):
        has_problem = True
        before = made.records
        for record in maker(case, options, made):
            made.records += 1
            yield {**origin, **record}
        made.problems += made.records > before
    if not has_problem:
        raise JournalError(
            run.directory,
            "no problem is finished, so there is nothing to export",
            "Finish the run first",
        )
    if not made.records:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in made.skipped.items())
        raise UsageError(
            f"{run.directory}: this run yields no records of kind {options.kind} "
            f"({reasons or 'the run is empty'})"
        )


def _origin(run: RecordedRun, kind: DataKind) -> dict[str, Any]:
    """Return the first fields of every record of an export: the schema, the run and the models."""
    models = {
        role: str(engine.get("model", "")) for role, engine in sorted(run.manifest.engines.items())
    }
    return {
        "schema": f"atts.{kind}/{VERSIONS[kind]}",
        "run": run.directory.name,
        "draft": models.get("draft", ""),
        "target": models.get("target", ""),
        **{
            f"{role}_weights": str(run.manifest.engines.get(role, {}).get("weights", ""))
            for role in ("draft", "target")
        },
    }


def finished_cases(run: RecordedRun, *, needs_scores: bool) -> Iterator[FinishedCase]:
    """Yield every finished problem with its data; only unfinished problems are kept in memory."""
    state = RunState()
    kinds = (*FACTS, Measured, *((Scored, CallSpan) if needs_scores else ()))
    scored: Scored | None = None
    teacher: dict[str, dict[tuple[int, int], tuple[float, ...]]] = {}
    scores: dict[str, dict[int, Mapping[str, float]]] = {}
    for entry in run.entries(kinds):
        event = entry.event
        outcome = state.apply(entry)
        match event:
            case Scored():
                scored = event
            case CallSpan() if scored is not None:
                # A `Scored` event does not contain its turn. The `CallSpan` on the same line of the
                # journal does.
                key = event.sample, event.turn
                teacher.setdefault(event.problem, {})[key] = scored.scores.logprobs
                scored = None
            case Measured(problem, sample, values):
                scores.setdefault(problem, {})[sample] = values
            case _:
                pass
        if outcome is None or not outcome.is_complete:
            continue
        name = outcome.problem.id
        brief = state.finished.pop(name)
        verdicts = {one.sample: one.verdict for one in brief.samples}
        yield FinishedCase(outcome, verdicts, teacher.pop(name, {}), scores.pop(name, {}))


Maker = Callable[[FinishedCase, ExportOptions, Exported], Iterator[dict[str, Any]]]


def _kept(case: FinishedCase, options: ExportOptions, made: Exported) -> Iterator[Rollout]:
    """Yield the rollouts to export, and count the omitted rollouts for each reason."""
    keep = options.keep or ("correct" if options.kind == "sft" else "all")
    for rollout in sorted(case.outcome.rollouts, key=lambda one: one.sample):
        verdict = case.verdicts[rollout.sample]
        if verdict in ("spared", "lost"):
            made.skipped["stopped before an answer"] += 1
        elif keep != "all" and rollout.answer is None:
            made.skipped["no answer"] += 1
        elif keep == "correct" and verdict != "correct":
            made.skipped["not graded as correct"] += 1
        else:
            yield rollout


def _facts(case: FinishedCase, rollout: Rollout) -> dict[str, Any]:
    """Return the fields of a record that describe its rollout."""
    verdict = case.verdicts[rollout.sample]
    return {
        "problem": rollout.problem,
        "sample": rollout.sample,
        "answer": rollout.answer,
        "reference": case.outcome.problem.answer,
        "correct": None if verdict in (None, "unscored") else verdict == "correct",
        "finish": rollout.finish or "",
    }


def _messages(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def _sft(case: FinishedCase, options: ExportOptions, made: Exported) -> Iterator[dict[str, Any]]:
    """Yield one conversation per rollout, with the target's token ids if they were recorded."""
    question = case.outcome.problem.text
    for rollout in _kept(case, options, made):
        prompt = rollout.prompt.target_ids
        yield {
            **_facts(case, rollout),
            "messages": [*_messages("user", question), *_messages("assistant", rollout.text)],
            "prompt_ids": list(prompt),
            "ids": list(rollout.ids("target")[len(prompt) :]),
        }


def _preference(
    case: FinishedCase, options: ExportOptions, made: Exported
) -> Iterator[dict[str, Any]]:
    """Yield pairs of a correct and a wrong rollout of one problem."""
    rollouts = list(_kept(case, options, made))
    correct = [one for one in rollouts if case.verdicts[one.sample] == "correct"]
    wrong = [one for one in rollouts if case.verdicts[one.sample] == "wrong"]
    pairs = [(good, bad) for good in correct for bad in wrong]
    if not pairs:
        made.skipped[
            "the problem's rollouts are all correct or all not correct, so they give no pair"
        ] += len(rollouts)
        return
    name = case.outcome.problem.id
    random = generator(Seed(run=options.seed, problem=name, purpose="preference pairs"))
    for place in sorted(random.permutation(len(pairs))[: options.pairs]):
        good, bad = pairs[place]
        yield {
            "problem": name,
            "reference": case.outcome.problem.answer,
            "prompt": _messages("user", case.outcome.problem.text),
            "chosen": _messages("assistant", good.text),
            "rejected": _messages("assistant", bad.text),
            "chosen_sample": good.sample,
            "rejected_sample": bad.sample,
            "chosen_answer": good.answer,
            "rejected_answer": bad.answer,
        }


def _verifiers(
    case: FinishedCase, options: ExportOptions, made: Exported
) -> Iterator[dict[str, Any]]:
    """Yield rollouts with their rewards, in the format in which the library `verifiers` saves
    rollouts.
    """
    problem = case.outcome.problem
    for rollout in _kept(case, options, made):
        facts = _facts(case, rollout)
        if facts["correct"] is None:
            made.skipped["not graded"] += 1
            continue
        yield {
            **facts,
            "example_id": problem.id,
            "task": problem.source,
            "prompt": _messages("user", problem.text),
            "completion": _messages("assistant", rollout.text),
            # the library `verifiers` uses "answer" for the reference answer
            "answer": problem.answer,
            "reward": float(facts["correct"]),
            "metrics": dict(case.scores.get(rollout.sample, {})),
        }


def _opd(case: FinishedCase, options: ExportOptions, made: Exported) -> Iterator[dict[str, Any]]:
    """Yield one record per rollout with its tokens, and one record per draft text that the target
    replaced.

    The mask of a token is 1 if the draft wrote the token and the log-probabilities of both models
    are known.
    """
    teacher = scored_chunks(case)
    for rollout in _kept(case, options, made):
        path = _Tokens()
        decisions: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        prompt = rollout.prompt.draft_ids
        for turn in rollout.turns:
            known = teacher.get((rollout.sample, turn.index))
            drafted = turn.drafted
            start = len(path.ids)
            for chunk in turn.discarded:
                if chunk is drafted and known is not None:
                    alone = _Tokens()
                    alone.add(chunk, known)
                    others.append(
                        _opd_record(case, rollout, "rejected", [*prompt, *path.ids], alone)
                    )
            if turn.restarts and path.ids:
                others.append(_opd_record(case, rollout, "rejected", list(prompt), path))
                path = _Tokens()
                decisions.clear()
                start = 0
            for chunk in turn.chunks:
                path.add(chunk, known if chunk is drafted else None)
            if turn.decision is not None:
                decisions.append(_decision(turn, start, len(path.ids)))
        records: list[dict[str, Any]] = [
            {**_opd_record(case, rollout, "rollout", list(prompt), path), "decisions": decisions},
            *({**other, "decisions": []} for other in others),
        ]
        for record in records:
            trained = sum(record["mask"])
            if not trained:
                made.skipped["no token has log-probabilities from both models"] += (
                    record["part"] == "rollout"
                )
                continue
            made.trained_tokens += trained
            yield record


def _opd_record(
    case: FinishedCase, rollout: Rollout, part: str, prompt: Sequence[int], tokens: _Tokens
) -> dict[str, Any]:
    return {
        **_facts(case, rollout),
        "part": part,
        "prompt_ids": list(prompt),
        "ids": tokens.ids,
        "mask": tokens.mask,
        "student_logprobs": tokens.student,
        "teacher_logprobs": tokens.teacher,
    }


def _decision(turn: Turn, start: int, end: int) -> dict[str, Any]:
    """Return a gate's decision, with the start and end positions of the tokens that were written in
    its turn.
    """
    assert turn.decision is not None, "a turn passed to this function must have a decision"
    decision = turn.decision
    return {
        "turn": turn.index,
        "action": decision.action,
        "score": decision.score,
        "p": decision.p,
        "start": start,
        "end": end,
    }


class _Tokens:
    """Tokens with their log-probabilities under both models; a log-probability is None if it was
    not recorded.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.student: list[float | None] = []
        self.teacher: list[float | None] = []

    def add(self, chunk: Chunk, scored: tuple[float, ...] | None) -> None:
        """Add a chunk; for a chunk of the draft, `scored` has the target's log-probabilities."""
        count = len(chunk.draft_ids)
        # `chunk.logprobs` may have one more value, for a generated end token. Drop this value,
        # because the chunk's ids do not contain the end token.
        own = _as_many(chunk.logprobs[:count], count)
        nothing = _as_many((), count)
        is_draft = chunk.author == "draft"
        student = own if is_draft else nothing
        teacher = _as_many((scored or ())[:count], count) if is_draft else own
        self.ids += chunk.draft_ids
        self.student += student
        self.teacher += teacher
        for one, other in zip(student, teacher, strict=True):
            self.mask.append(int(one is not None and other is not None))


def _as_many(values: tuple[float, ...], count: int) -> list[float | None]:
    """Return the values as a list if there are `count` of them; otherwise return a list of `count`
    Nones.
    """
    return list(values) if len(values) == count else [None] * count


def scored_chunks(case: FinishedCase) -> dict[tuple[int, int], tuple[float, ...]]:
    """Return the target's log-probabilities of every chunk that the draft wrote, keyed by sample
    and turn.

    A chunk was scored only once if several rollouts have the same text up to its end. These
    rollouts share its log-probabilities.
    """
    teacher = dict(case.teacher)
    by_text: dict[tuple[TokenIds, TokenIds], tuple[float, ...]] = {}
    missing: list[tuple[tuple[int, int], tuple[TokenIds, TokenIds]]] = []
    for rollout in case.outcome.rollouts:
        prefix = list(rollout.prompt.target_ids)
        for turn in rollout.turns:
            drafted = turn.drafted
            key = rollout.sample, turn.index
            if drafted is not None:
                text = tuple(prefix), drafted.target_ids
                logprobs = teacher.get(key)
                if logprobs is None and turn.score_reused:
                    missing.append((key, text))
                elif logprobs is not None:
                    by_text[text] = logprobs
            if turn.restarts:
                prefix = list(rollout.prompt.target_ids)
            for chunk in turn.chunks:
                prefix.extend(chunk.target_ids)
    for key, text in missing:
        if text in by_text:
            teacher[key] = by_text[text]
    return teacher


_MAKERS: Mapping[DataKind, Maker] = {
    "opd": _opd,
    "sft": _sft,
    "preference": _preference,
    "verifiers": _verifiers,
}


def _write_parquet(
    path: Path, records: Iterable[dict[str, Any]], columns: Mapping[str, str]
) -> None:
    """Write records to a Parquet file in groups of rows.

    :raises MissingExtra: pyarrow is not installed.
    """
    try:  # import by name, because pyarrow is optional and has no type annotations
        pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise MissingExtra("a Parquet file", "pyarrow", "parquet") from None
    types = _arrow_types(pyarrow)
    schema = pyarrow.schema([(name, types[word]) for name, word in columns.items()])
    temporary = path.with_name(f".{path.name}.{token_hex(6)}")
    try:
        with storage(path):
            with parquet.ParquetWriter(temporary, schema) as writer:
                for rows in _groups(records):
                    writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _arrow_types(pyarrow: Any) -> dict[str, Any]:
    """Return a mapping from the type names in `COLUMNS` to Arrow types."""
    text = pyarrow.string()
    integer = pyarrow.int64()
    number = pyarrow.float64()
    decision = {
        "turn": integer, "action": text, "score": number, "p": number, "start": integer,
        "end": integer,
    }  # fmt: skip
    return {
        "text": text,
        "integer": integer,
        "number": number,
        "truth": pyarrow.bool_(),
        "integers": pyarrow.list_(integer),
        "numbers": pyarrow.list_(number),
        "lists of integers": pyarrow.list_(pyarrow.list_(integer)),
        "lists of numbers": pyarrow.list_(pyarrow.list_(number)),
        "named numbers": pyarrow.map_(text, number),
        "messages": pyarrow.list_(pyarrow.struct([("role", text), ("content", text)])),
        "decisions": pyarrow.list_(pyarrow.struct(list(decision.items()))),
    }


def _groups(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for record in records:
        rows.append(record)
        if len(rows) == _ROW_GROUP:
            yield rows
            rows = []
    if rows:
        yield rows


TRIAL = "trial"
"""The method of runs on which a judge is fitted: every chunk is scored, and a coin decides whether
it escalates.
"""


def takeover_examples(run: RecordedRun) -> Examples:
    """Return the chunks of a run with their features, and with an unbiased estimate of the gain of
    a takeover.

    For each chunk, a coin of known probability e decided if the chunk was escalated (W = 1) or not
    (W = 0). Let y be 1 if the rollout is correct, else 0. Let m be the share of correct rollouts
    among its siblings. Then the expectation of (W - e) / (e (1 - e)) (y - m) is the gain of a
    takeover at that chunk. This is true for any m, because m does not depend on W.

    :raises UsageError: the run's gate was not a coin, its rate is 0 or 1, or no rollout was graded.
    :raises JournalError: no problem is finished, or the journal cannot be read.
    """
    setting = run.manifest.configuration.get("method")
    method = "" if setting is None else str(setting.value)
    if method != TRIAL:
        raise UsageError(
            f"method {method or '(none)'} escalates chunks by their scores, so its escalated "
            "chunks are not comparable with its accepted ones; start a run with --method "
            f"{TRIAL}"
        )
    agreements: dict[tuple[str, int, int], float | None] = {}
    for event in run.decisions():
        share = event.features.get("agreement", 0.0) if event.features.get("answered") else None
        agreements[event.decision.turn_key] = share
    features: list[tuple[float, ...]] = []
    gains: list[float] = []
    problems: list[str] = []
    for case in finished_cases(run, needs_scores=True):
        correct: dict[int, float] = {}
        for sample, verdict in case.verdicts.items():
            if verdict not in ("spared", "lost", "unscored", None):
                correct[sample] = float(verdict == "correct")
        teacher = scored_chunks(case)
        for rollout in case.outcome.rollouts:
            others = [share for sample, share in correct.items() if sample != rollout.sample]
            if rollout.sample not in correct or not others:
                continue
            surprise = correct[rollout.sample] - sum(others) / len(others)
            for turn in rollout.turns:
                drafted = turn.drafted
                decision = turn.decision
                if drafted is None or decision is None or decision.origin == "forced":
                    continue
                rate = decision.rate
                if not 0 < rate < 1:
                    raise UsageError(
                        f"at rate {rate:g} every decision is the same, so there is nothing to "
                        "learn; start a run with a rate strictly between 0 and 1"
                    )
                row = judge_features(
                    teacher.get((rollout.sample, turn.index), ()),
                    drafted.logprobs,
                    turn.index,
                    agreements.get(decision.turn_key),
                )
                if any(map(math.isnan, row)):
                    continue
                weight = (float(decision.escalate) - rate) / (rate * (1 - rate))
                features.append(row)
                gains.append(weight * surprise)
                problems.append(rollout.problem)
    if not gains:
        raise UsageError(
            "no graded rollout of the run has a chunk with log-probabilities from both models; "
            "problems need reference answers, and both models the same tokenizer"
        )
    return Examples(JUDGE_FEATURES, features, gains, problems)
