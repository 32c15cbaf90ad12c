"""Tests that every known benchmark loads from a file and from the hub's cache, without the network."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atts.core import Grading, Problem
from atts.errors import DatasetError
from atts.evaluators import judge
from atts.evaluators.datasets import arithmetic
from atts.evaluators.datasets.loading import Dataset, Selection, load_dataset
from atts.evaluators.datasets.tables import BENCHMARKS, Columns, LoadOptions

FILES = {
    "math500": "math500",
    "math100": "math500",
    "aime24": "aime24",
    "aime25": "aime25",
    "amc23": "amc23",
    "gsm8k": "gsm8k_test",
    "olympiadbench": "olympiadbench_oe_math",
    "minerva_math": "minerva_math",
    "hmmt25_feb": "hmmt25_feb",
    "hmmt25_nov": "hmmt25_nov",
}


def from_file(name: str, shared: Path) -> Dataset:
    """Load a benchmark from its real file."""
    return load_dataset(
        name, options=LoadOptions(file=shared / "benchmarks" / f"{FILES[name]}.jsonl")
    )


@pytest.mark.parametrize("name", FILES)
def test_real_files_load_whole(name: str, shared_data: Path) -> None:
    """Each file has the known number of problems, complete texts and references, unique ids, and
    only the expected notes.
    """
    found = from_file(name, shared_data)
    extra = name == "olympiadbench"  # this file has one more problem than the hub's copy
    assert len(found) == BENCHMARKS[name].size + extra
    assert all(it.text and it.answer and it.kind == "math" for it in found)
    assert len({it.id for it in found}) == len(found)
    assert [note for note in found.notes if "has" in note and not extra] == []


def test_olympiadbench_rows_have_tolerances_and_units(shared_data: Path) -> None:
    """One problem of OlympiadBench accepts answers within 0.1 of the reference. If the reference
    has a unit, the answer may omit the unit but not have another one.
    """
    found = from_file("olympiadbench", shared_data)
    assert {it.grading for it in found} == {
        Grading(rounding="none"),
        Grading(absolute=0.1, rounding="none"),
    }
    assert sum(it.grading == Grading(absolute=0.1, rounding="none") for it in found) == 1
    (length,) = (it for it in found if it.answer and it.answer.endswith(r"\text{ km}"))
    bare = length.answer.removesuffix(r"\text{ km}") if length.answer else ""
    assert [judge(length, f"{bare}{unit}").status for unit in ("", " km", " m")] == [
        "equal",
        "equal",
        "different",
    ]


@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23", "gsm8k"])
def test_whole_number_benchmarks_have_whole_number_references(name: str, shared_data: Path) -> None:
    """If a reference is a whole number, it is written without a leading zero, ".0" or comma."""
    answers = [it.answer for it in from_file(name, shared_data)]
    assert all(answer == str(int(answer)) for answer in answers if answer)


def test_math100_is_the_reference_hundred_in_its_order(shared_data: Path) -> None:
    """MATH-100 has the questions of the published runs, in the same order."""
    found = from_file("math100", shared_data)
    ids = dict[int, str]()
    for line in (shared_data / "traces" / "answer_pairs.jsonl").read_text().splitlines():
        pair = json.loads(line)
        ids[pair["question_id"]] = pair["unique_id"].removeprefix("test/").removesuffix(".json")
    assert len(ids) == 60
    assert all(found.problems[at].id == f"math500/{name}" for at, name in ids.items())
    assert {it.id for it in found} <= {it.id for it in from_file("math500", shared_data)}


def test_math500_can_be_selected_by_level_and_subject(shared_data: Path) -> None:
    """Level and subject select problems of MATH-500."""
    options = LoadOptions(file=shared_data / "benchmarks" / "math500.jsonl")
    hard = load_dataset("math500", Selection(levels=(5,), subjects=("algebra",)), options)
    assert {(it.level, it.subject) for it in hard} == {(5, "Algebra")}
    assert len(load_dataset("MATH-500", Selection(levels=(5,)), options)) == 134


def test_math100_is_refused_from_a_part_of_math500(tmp_path: Path, shared_data: Path) -> None:
    """A part of MATH-500 is refused as a source of MATH-100, because MATH-100's indices would
    select other problems in it.
    """
    lines = (shared_data / "benchmarks" / "math500.jsonl").read_text().splitlines()[:499]
    (tmp_path / "part.jsonl").write_text("\n".join(lines))
    with pytest.raises(DatasetError, match="sample of the 500 problems"):
        load_dataset("math100", options=LoadOptions(file=tmp_path / "part.jsonl"))


# a cache as huggingface_hub writes it


def hub_copy(cache: Path, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
    """Write a dataset into the cache as huggingface_hub does: contents by hash, a snapshot with
    links to them, and a branch that names the snapshot. Return the commit.
    """
    root = cache / f"datasets--{repo.replace('/', '--')}"
    commit = hashlib.sha1(json.dumps(sorted(files)).encode() + b"".join(files.values())).hexdigest()
    for name, content in files.items():
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = root / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / branch).write_text(commit)
    return commit


def lines(rows: list[dict[str, Any]]) -> bytes:
    """Write rows as JSON Lines."""
    return "\n".join(json.dumps(row) for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """Write rows with pyarrow, or skip the test without it."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    sink = pyarrow.BufferOutputStream()
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def cached(name: str, cache: Path, **options: Any) -> Dataset:
    """Load from the cache, without a network."""
    return load_dataset(name, options=LoadOptions(cache=cache, network="never", **options))


LONG = "Janet has 9 * 120 = <<9*120=1080>>1080 eggs.\nSo she has 1,080 eggs.\n#### 1,080"
QUIRKS: list[tuple[str, str, str, Callable[[], bytes], Problem]] = [
    (
        "math500",
        "HuggingFaceH4/MATH-500",
        "test.jsonl",
        lambda: lines(
            [
                {
                    "problem": "P",
                    "solution": "s",
                    "answer": "x",
                    "subject": "Algebra",
                    "level": 3,
                    "unique_id": "test/algebra/7.json",
                }
            ]
        ),
        Problem("math500/algebra/7", "P", "x", level=3, subject="Algebra"),
    ),
    (
        "aime24",
        "HuggingFaceH4/aime_2024",
        "data/train-00000-of-00001.parquet",
        lambda: parquet(
            [
                {
                    "id": 60,
                    "problem": "P",
                    "solution": "s",
                    "answer": "025",
                    "url": "u",
                    "year": "2024",
                }
            ]
        ),
        Problem("aime24/60", "P", "25"),
    ),
    (
        "aime24",
        "Maxwell-Jia/AIME_2024",
        "aime_2024_problems.parquet",
        lambda: parquet([{"ID": "2024-II-4", "Problem": "P", "Solution": "s", "Answer": 33}]),
        Problem("aime24/2024-II-4", "P", "33"),
    ),
    (
        "aime25",
        "math-ai/aime25",
        "test.jsonl",
        lambda: lines([{"problem": "P", "answer": "70", "id": "0"}]),
        Problem("aime25/0", "P", "70"),
    ),
    (
        "aime25",
        "MathArena/aime_2025",
        "data/train-00000-of-00001.parquet",
        lambda: parquet(
            [
                {
                    "problem_idx": 1,
                    "problem": "P",
                    "answer": 70,
                    "problem_type": ["Number Theory", "Algebra"],
                }
            ]
        ),
        Problem("aime25/1", "P", "70", subject="Number Theory, Algebra"),
    ),
    (
        "amc23",
        "math-ai/amc23",
        "data/test-00000-of-00001.parquet",
        lambda: parquet([{"id": 0, "question": "P", "answer": "27.0", "url": "u"}]),
        Problem("amc23/0", "P", "27"),
    ),
    (
        "gsm8k",
        "openai/gsm8k",
        "main/test-00000-of-00001.parquet",
        lambda: parquet([{"question": "P", "answer": LONG}]),
        Problem("gsm8k/0", "P", "1080"),
    ),
    (
        "olympiadbench",
        "Hothan/OlympiadBench",
        "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet",
        lambda: parquet(
            [
                {
                    "id": 1606,
                    "question": "P",
                    "final_answer": ["$2$,$-\\frac{1}{2}$"],
                    "context": "C",
                    "subfield": "Algebra",
                }
            ]
        ),
        Problem("olympiadbench/1606", "C\n\nP", "2, -\\frac{1}{2}", subject="Algebra"),
    ),
    (
        "minerva_math",
        "math-ai/minervamath",
        "test.jsonl",
        lambda: lines([{"question": "P", "answer": "4.5e33"}]),
        Problem("minerva_math/0", "P", "4.5e33"),
    ),
    (
        "hmmt25_feb",
        "MathArena/hmmt_feb_2025",
        "data/train-00000-of-00001.parquet",
        lambda: parquet(
            [{"problem_idx": 1, "answer": "103", "problem": "P", "problem_type": ["Number Theory"]}]
        ),
        Problem("hmmt25_feb/1", "P", "103", subject="Number Theory"),
    ),
    (
        "aime26",
        "MathArena/aime_2026",
        "data/train-00000-of-00001.parquet",
        lambda: parquet([{"problem_idx": 1, "answer": 277, "problem": "P"}]),
        Problem("aime26/1", "P", "277"),
    ),
    (
        "hmmt26_feb",
        "MathArena/hmmt_feb_2026",
        "data/train-00000-of-00001.parquet",
        lambda: parquet(
            [{"problem_idx": 1, "answer": "103", "problem": "P", "problem_type": ["Algebra"]}]
        ),
        Problem("hmmt26_feb/1", "P", "103", subject="Algebra"),
    ),
    (
        "apex",
        "MathArena/apex_2025",
        "data/train-00000-of-00001.parquet",
        lambda: parquet([{"problem_idx": 1, "answer": "5", "problem": "P", "source": "S"}]),
        Problem("apex/1", "P", "5"),
    ),
    (
        "gpqa",
        "Idavidrein/gpqa",
        "gpqa_diamond.csv",
        lambda: (
            b"Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer "
            b"3,Record ID,"
            b'High-level domain\n"P\n",r,w,w,w,rec1,Physics\n'
        ),
        Problem(
            "gpqa/rec1",
            "P\n\n(A) w\n(B) w\n(C) w\n(D) r",
            "D",
            "choice",
            subject="Physics",
            choices=("w", "w", "w", "r"),
        ),
    ),
]


@pytest.mark.parametrize(
    ("name", "repo", "file", "content", "expected"),
    QUIRKS,
    ids=[f"{quirk[0]}-{quirk[1]}" for quirk in QUIRKS],
)
def test_each_benchmark_reads_from_the_hubs_cache(
    tmp_path: Path, name: str, repo: str, file: str, content: Callable[[], bytes], expected: Problem
) -> None:
    """The benchmark's name and the hub's name load the same problems from the recorded commit."""
    commit = hub_copy(tmp_path, repo, {file: content(), "README.md": b"# card"})
    for asked in (name, f"hub:{repo}", repo):
        found = cached(asked, tmp_path)
        assert (found.source, found.revision) == (f"hub:{repo}", commit)
        only = found.problems[0]
        assert only.source.startswith(repo)
        same = (only.id, only.text, only.answer, only.kind, only.level, only.subject, only.choices)
        want = expected
        assert same == (
            want.id,
            want.text,
            want.answer,
            want.kind,
            want.level,
            want.subject,
            want.choices,
        )


def test_two_configurations_are_read_in_order(tmp_path: Path) -> None:
    """opencompass/AIME2025 has two files without ids: part I is read before part II, and problems
    are numbered. A degree sign after a whole number is dropped.
    """
    files = {
        "aime2025-II.jsonl": lines([{"question": "II", "answer": "336^\\circ"}]),
        "aime2025-I.jsonl": lines([{"question": "I", "answer": "70"}]),
    }
    hub_copy(tmp_path, "opencompass/AIME2025", files)
    found = cached("aime25", tmp_path)
    assert [(it.id, it.text, it.answer) for it in found] == [
        ("aime25/0", "I", "70"),
        ("aime25/1", "II", "336"),
    ]
    assert "AIME 2025 has 30 problems, but this source has 2" in found.notes


def test_a_copy_without_an_optional_column_loads_with_a_note(tmp_path: Path) -> None:
    """If a copy of a benchmark lacks an optional column, it loads with a note. If it lacks problem
    texts or reference answers, it is refused.
    """
    hub_copy(tmp_path, "math-ai/aime25", {"test.jsonl": lines([{"problem": "P", "answer": "1"}])})
    found = cached("aime25", tmp_path)
    assert found.problems[0].id == "aime25/0"
    assert "this copy of the dataset no longer has column 'id'" in found.notes
    hub_copy(tmp_path, "math-ai/aime25", {"test.jsonl": lines([{"problem": "P", "id": "1"}])})
    with pytest.raises(
        DatasetError, match="there is no column 'answer'. Columns found: problem, id"
    ):
        cached("aime25", tmp_path)


def test_half_of_two_configurations_is_not_the_benchmark(tmp_path: Path) -> None:
    """If the cache has only one of a benchmark's two files, the benchmark counts as not cached."""
    hub_copy(
        tmp_path,
        "opencompass/AIME2025",
        {"aime2025-I.jsonl": lines([{"question": "I", "answer": "70"}])},
    )
    with pytest.raises(DatasetError, match="not in the local cache"):
        cached("hub:opencompass/AIME2025", tmp_path)


def test_amc_keeps_2023_of_a_mixed_source(tmp_path: Path) -> None:
    """Only problems of 2023 are loaded from AMC's mixed source.

    The year is read from the url, and answers that are floats become whole numbers.
    """
    rows = [
        {
            "id": at,
            "problem": f"P{at}",
            "answer": float(at),
            "url": f"https://x/{2022 + at % 2}_AMC_12A",
        }
        for at in range(4)
    ]
    hub_copy(
        tmp_path, "AI-MO/aimo-validation-amc", {"data/train-00000-of-00001.parquet": parquet(rows)}
    )
    assert [it.answer for it in cached("amc23", tmp_path)] == ["1", "3"]


def test_a_missing_shard_is_not_overlooked(tmp_path: Path) -> None:
    """A cache with two of three shards is not accepted as the dataset."""
    shards = {
        f"data/train-{at:05d}-of-00003.parquet": parquet(
            [{"problem": "p", "answer": "1", "id": at}]
        )
        for at in (0, 2)
    }
    hub_copy(tmp_path, "HuggingFaceH4/aime_2024", shards)
    with pytest.raises(DatasetError, match="not in the local cache"):
        cached("aime24", tmp_path)


def test_revisions_are_configurable_and_recorded(tmp_path: Path) -> None:
    """The user can give a branch or a commit, and the record always has the commit."""
    old = hub_copy(
        tmp_path,
        "math-ai/aime25",
        {"test.jsonl": lines([{"problem": "old", "answer": "1"}])},
        branch="v1",
    )
    new = hub_copy(
        tmp_path, "math-ai/aime25", {"test.jsonl": lines([{"problem": "new", "answer": "1"}])}
    )
    assert (cached("aime25", tmp_path).revision, cached("aime25", tmp_path).problems[0].text) == (
        new,
        "new",
    )
    for revision in ("v1", old):
        found = cached("aime25", tmp_path, revision=revision)
        assert (found.revision, found.problems[0].text) == (old, "old")
    assert cached("hub:math-ai/aime25@v1", tmp_path).revision == old
    with pytest.raises(DatasetError, match="--revision v2"):
        cached("aime25", tmp_path, revision="v2")


def test_any_hub_dataset_reads_by_split_and_configuration(tmp_path: Path) -> None:
    """Split and configuration of a dataset are read from its file names. If several files match,
    the error lists them.
    """
    files = {
        "easy/test-00000-of-00001.jsonl": lines([{"q": "easy", "answer": "1"}]),
        "hard/test-00000-of-00001.jsonl": lines([{"q": "hard", "answer": "2"}]),
        "hard/train-00000-of-00001.jsonl": lines([{"q": "train", "answer": "3"}]),
    }
    hub_copy(tmp_path, "some/thing", files)
    mapping = {"text": "q"}
    assert (
        cached("hub:some/thing", tmp_path, config="hard", columns=mapping).problems[0].text
        == "hard"
    )
    assert (
        cached("hub:some/thing", tmp_path, config="hard", split="train", columns=mapping)
        .problems[0]
        .text
        == "train"
    )
    with pytest.raises(
        DatasetError, match=r"more than one set of data files belongs to split 'test'.*easy/test"
    ):
        cached("hub:some/thing", tmp_path, columns=mapping)
    with pytest.raises(DatasetError, match="no set of data files belongs to split 'dev'"):
        cached("hub:some/thing", tmp_path, split="dev", columns=Columns(text="q"))


def test_an_uncached_benchmark_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the network is turned off, the error about a benchmark that is not cached has the command
    that downloads it. The network may be turned off by atts' setting or by huggingface_hub's.
    """
    with pytest.raises(
        DatasetError,
        match="hf download --repo-type dataset HuggingFaceH4/MATH-500",
    ):
        cached("math500", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DatasetError, match="hf download --repo-type dataset HuggingFaceH4/MATH-500"
    ):
        load_dataset("math500", options=LoadOptions(cache=tmp_path))
    with pytest.raises(DatasetError, match="not the name of a hub dataset"):
        cached("hub:-bad-/..name", tmp_path)


# a local stand-in for the hub, from which missing data is fetched once


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the hub with one public and one gated repository. It replies 404 for any other
    repository.
    """

    commit = "c" * 40
    content = lines([{"problem": "fetched", "answer": "1", "id": "0"}])
    asked: list[str]

    def log_message(self, format: str, *args: object) -> None:
        """Write no access log."""

    def do_HEAD(self) -> None:
        """Answer a HEAD request as a GET request."""
        self.do_GET()

    def do_GET(self) -> None:
        """Serve the stand-in's repository, its list of files and its file."""
        self.asked.append(self.path)
        entry = {"type": "file", "path": "test.jsonl", "size": len(self.content), "oid": "e" * 40}
        if "/gpqa" in self.path.lower():
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "nothing" in self.path:
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in self.path:
            self.reply(200, json.dumps([entry]).encode())
        elif "/resolve/" in self.path:
            headers = {
                "X-Repo-Commit": self.commit,
                "ETag": '"etag"',
                "X-Linked-Size": str(len(self.content)),
            }
            self.reply(200, self.content, headers)
        elif "/api/datasets/math-ai/aime25" in self.path:
            repo = {
                "id": "math-ai/aime25",
                "sha": self.commit,
                "siblings": [{"rfilename": "test.jsonl"}],
            }
            self.reply(200, json.dumps(repo).encode())
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send status, headers and body."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run a local stand-in for the hub, and list every path that is requested."""
    handler = type("Handler", (Hub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield handler.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_missing_dataset_is_fetched_once(tmp_path: Path, hub: list[str]) -> None:
    """A missing dataset is fetched once; the second load sends no request to the hub."""
    options = LoadOptions(cache=tmp_path)
    found = load_dataset("hub:math-ai/aime25", options=options)
    assert (found.problems[0].text, found.revision) == ("fetched", Hub.commit)
    asked = len(hub)
    assert asked
    assert load_dataset("hub:math-ai/aime25", options=options).digest == found.digest
    assert len(hub) == asked


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        (
            "gpqa",
            "main",
            "gated; accept the terms at https://huggingface.co/datasets/Idavidrein/gpqa",
        ),
        (
            "hub:math-ai/aime25",
            "nothing",
            "the hub does not have revision 'nothing' of this dataset",
        ),
        ("hub:no/such", "main", "could not be fetched"),
    ],
)
def test_each_refusal_of_the_hub_gives_advice(
    tmp_path: Path, hub: list[str], name: str, revision: str, says: str
) -> None:
    """Gated, absent and unknown datasets each have their own advice in the error."""
    with pytest.raises(DatasetError, match=says):
        load_dataset(name, options=LoadOptions(cache=tmp_path, revision=revision))
    assert hub


@pytest.mark.parametrize(
    "cut", ["[:3]", "[2:9:3]", "[-2:]", "[:-7]", "[8:3:-2]", "[-4::-1]", "[:]", "[10:]"]
)
def test_a_slice_of_a_generated_benchmark_names_the_whole(cut: str) -> None:
    """Only the problems of a slice are generated, but the dataset's revision and the note about the
    slice describe the whole set.
    """
    of_twelve = Selection(sample=12, seed=5)
    whole = load_dataset("arithmetic", of_twelve)
    start, stop, step = (int(end) if end else None for end in f"{cut[1:-1]}::".split(":")[:3])
    found = load_dataset(f"arithmetic{cut}", of_twelve)
    assert found.problems == whole.problems[start:stop:step]
    assert found.revision == whole.revision
    assert found.notes == ((f"selected: slice {cut} ({len(found)} of 12)",) if cut != "[:]" else ())


def test_only_the_slice_of_a_benchmark_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems outside the slice are not generated, because drawing them would waste time."""
    asked = list[int]()
    make = arithmetic.problems

    def counted(
        split: arithmetic.Split, count: int, seed: int, levels: Sequence[int]
    ) -> list[Problem]:
        asked.append(count)
        return make(split, count, seed, levels)

    monkeypatch.setattr(arithmetic, "problems", counted)
    load_dataset("arithmetic[2:5]", Selection(seed=77))
    load_dataset("arithmetic[2:5]", Selection(seed=77))
    assert asked == [5]
    with pytest.raises(DatasetError, match="none of 4 problems matches the selection"):
        load_dataset("arithmetic[9:]", Selection(sample=4, seed=77))
