"""Catalogue of known benchmarks: where each lives, how its columns read, what is odd about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from atts.core import AnswerKind
from atts.errors import OptionError
from atts.evaluators.datasets.columns import AnswerForm, Columns


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
    hubs: tuple[HubSource, ...]
    kind: AnswerKind = "math"
    form: AnswerForm = "plain"
    aliases: tuple[str, ...] = ()
    sample: tuple[int, int] | None = None  # count and seed of the subset this name stands for
    prefix: str = ""  # what ids start with, when it is not the name
    columns: Columns = Columns()  # of a file that is no hub copy
    note: str = ""


_MATH500 = (
    HubSource(
        "HuggingFaceH4/MATH-500",
        ("test.jsonl",),
        Columns(text="problem", answer="answer", id="unique_id", level="level", subject="subject"),
        quirk="ids are file names: test/precalculus/807.json",
    ),
)
_MATHARENA = Columns(text="problem", answer="answer", id="problem_idx", subject="problem_type")
_TRAIN = ("data/train-*.parquet",)
_GPQA = Columns(
    text="Question",
    answer="Correct Answer",
    id="Record ID",
    subject="High-level domain",
    distractors=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
)

_ALL = (
    Benchmark("math500", "MATH-500", 500, _MATH500, aliases=("math",)),
    Benchmark(
        "math100",
        "MATH-100: the hundred of MATH-500 that seed 42 draws",
        100,
        _MATH500,
        sample=(100, 42),
        prefix="math500",
        note="the problems, in order, of random.seed(42); random.sample(range(500), 100)",
    ),
    Benchmark(
        "aime24",
        "AIME 2024",
        30,
        (
            HubSource(
                "HuggingFaceH4/aime_2024",
                _TRAIN,
                Columns(text="problem", answer="answer", id="id"),
                quirk="its test is called train; answers keep leading zeros (025)",
            ),
            HubSource(
                "Maxwell-Jia/AIME_2024",
                ("*.parquet",),
                Columns(text="Problem", answer="Answer", id="ID"),
                quirk="its test is called train; columns are capitalised; answers are numbers",
            ),
            HubSource("MathArena/aime_2024", _TRAIN, _MATHARENA, quirk="its test is called train"),
        ),
        form="integer",
        aliases=("aime2024",),
    ),
    Benchmark(
        "aime25",
        "AIME 2025",
        30,
        (
            HubSource("math-ai/aime25", ("test.jsonl",), Columns(text="problem", answer="answer", id="id")),
            HubSource(
                "yentinglin/aime_2025",
                _TRAIN,
                Columns(text="problem", answer="answer", id="id"),
                quirk="its test is called train",
            ),
            HubSource("MathArena/aime_2025", _TRAIN, _MATHARENA, quirk="its test is called train; answers are numbers"),
            HubSource(
                "opencompass/AIME2025",
                ("aime2025-I.jsonl", "aime2025-II.jsonl"),
                Columns(text="question", answer="answer"),
                quirk="two configurations, AIME2025-I and AIME2025-II, without ids; one answer carries a degree sign",
            ),
        ),
        form="integer",
        aliases=("aime2025",),
    ),
    Benchmark(
        "amc23",
        "AMC 12 2023",
        40,
        (
            HubSource(
                "math-ai/amc23",
                ("data/test-*.parquet",),
                Columns(text="question", answer="answer", id="id"),
                quirk="answers are written 27.0",
            ),
            HubSource(
                "AI-MO/aimo-validation-amc",
                _TRAIN,
                Columns(text="problem", answer="answer", id="id"),
                keep=("url", "2023"),
                quirk="its test is called train and mixes 2022 with 2023, told apart by url; answers are floats",
            ),
        ),
        form="integer",
        aliases=("amc", "amc2023"),
    ),
    Benchmark(
        "gsm8k",
        "GSM8K, test",
        1319,
        (
            HubSource(
                "openai/gsm8k",
                ("main/test-*.parquet",),
                Columns(text="question", answer="answer"),
                quirk="the answer is what follows #### at the end of the solution, with thousands commas",
            ),
        ),
        form="final",
    ),
    Benchmark(
        "olympiadbench",
        "OlympiadBench, open-ended English mathematics without images",
        675,
        (
            HubSource(
                "Hothan/OlympiadBench",
                ("OlympiadBench/OE_TO_maths_en_COMP/*.parquet",),
                Columns(text="question", answer="final_answer", id="id", subject="subfield", context="context"),
                quirk="answers are lists, in dollar signs; some questions have their beginning in `context`",
            ),
        ),
        aliases=("olympiad", "olympiadbenchoemath"),
    ),
    Benchmark(
        "minerva_math",
        "Minerva-math (undergraduate science)",
        272,
        (HubSource("math-ai/minervamath", ("test.jsonl",), Columns(text="question", answer="answer")),),
        aliases=("minerva",),
    ),
    Benchmark(
        "hmmt25_feb",
        "HMMT February 2025",
        30,
        (HubSource("MathArena/hmmt_feb_2025", _TRAIN, _MATHARENA, quirk="its test is called train"),),
        aliases=("hmmtfeb2025", "hmmtfeb25", "hmmt25"),
    ),
    Benchmark(
        "hmmt25_nov",
        "HMMT November 2025",
        30,
        (HubSource("MathArena/hmmt_nov_2025", _TRAIN, _MATHARENA, quirk="its test is called train"),),
        aliases=("hmmtnov2025", "hmmtnov25"),
    ),
    Benchmark(
        "gpqa",
        "GPQA diamond",
        198,
        (
            HubSource(
                "Idavidrein/gpqa",
                ("gpqa_diamond.csv",),
                _GPQA,
                quirk="gated; the right choice has a column of its own, so choices are shuffled by seed per question",
            ),
        ),
        kind="choice",
        aliases=("gpqadiamond",),
        columns=_GPQA,
    ),
    Benchmark(
        "arithmetic",
        "Arithmetic for the embedded models, generated",
        200,
        (),
        form="integer",
        note="any number of problems: select.sample says how many, 200 unless told",
    ),
)
BENCHMARKS: Mapping[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ALL}


def find_benchmark(name: str) -> Benchmark | None:
    """The benchmark of that name or alias, whatever its case, hyphens or underscores; None when there is none.

    >>> [found.name for text in ("MATH-500", "aime_2025") if (found := find_benchmark(text))]
    ['math500', 'aime25']
    """
    key = _bare(name)
    return next((it for it in _ALL if key in (_bare(it.name), *it.aliases)), None)


def find_hub_source(repo: str) -> tuple[Benchmark, HubSource] | None:
    """The benchmark and copy a hub dataset is known as."""
    return next(((it, hub) for it in _ALL for hub in it.hubs if hub.repo.lower() == repo.lower()), None)


def unknown(name: str) -> OptionError:
    """The error for a name that is neither a benchmark nor a file."""
    near = get_close_matches(name.lower(), BENCHMARKS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return OptionError("dataset", f"there is no benchmark or file {name!r}{hint}", [*BENCHMARKS])


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
