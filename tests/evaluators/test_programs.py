"""Tests of code tasks: programs are extracted, sandboxed, judged by hidden tests, and grouped by
their outputs.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import time
import zlib
from pathlib import Path

import anyio
import pytest

from atts.api import Setup, answers_for
from atts.api import evaluate_sync as evaluate
from atts.core import Completion, Problem, SampleRequest
from atts.errors import DatasetError
from atts.evaluators import (
    ProgramTests,
    ProgramVotes,
    extract,
    find_program,
    group,
    judge,
    load_dataset,
    run_program,
)
from atts.evaluators.programs import Case, layout_free
from atts.pipelines import Chunking, Policy
from atts.run import RunOptions
from atts.testing import ScriptedEngine

SOLUTIONS = [
    json.loads(line)
    for line in Path(__file__).with_name("program_solutions.jsonl").read_text().splitlines()
]
STDIN = ProgramTests(())
SHORT = ProgramTests((), seconds=1)


@pytest.fixture(scope="module")
def tasks() -> dict[str, Problem]:
    """Return the shipped tasks by their short names."""
    return {it.id.partition("/")[2]: it for it in load_dataset("programs").problems}


@pytest.mark.parametrize("entry", SOLUTIONS, ids=lambda entry: str(entry["id"]))
def test_solutions_pass_and_wrong_programs_fail(
    entry: dict[str, str], tasks: dict[str, Problem]
) -> None:
    """Each task accepts a correct program and rejects a program with a typical mistake."""
    task = tasks[entry["id"]]
    assert task.kind == "code"
    right = judge(task, entry["solution"])
    assert (right.status, right.rule) == ("equal", "tests"), right.detail
    wrong = judge(task, entry["wrong"])
    assert (wrong.status, wrong.rule) == ("different", "tests"), wrong.detail
    assert wrong.detail.startswith("test ")


def test_the_shipped_tasks_are_complete(tasks: dict[str, Problem]) -> None:
    """There are thirty shipped tasks, each with two public tests and at least two hidden tests."""
    assert len(tasks) == 30
    for task in tasks.values():
        assert task.answer is not None
        tests = ProgramTests.read(task.answer)
        assert tests.public == 2
        assert len(tests.cases) >= 4
        assert "```python" in task.text


ESCAPES = {
    "the parent's environment": "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
    "a file of the system": "print(open('/etc/passwd').read())",
    "a listing of home": "import os\nprint(os.listdir('/root'))",
    "a written file": "open('x', 'w').write('a')",
    "a socket": "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "a fork": "import os\nos.fork()",
    "another program": "import subprocess\nprint(subprocess.run(['/bin/ls']))",
    "a signal": "import os\nos.kill(os.getppid(), 9)",
    "rights of a file": "import os\nos.chmod('program.py', 0o777)",
    "a session of its own": "import os\nos.setsid()",
    "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_programs_are_confined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program can reach nothing outside its own process and Python's library."""
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    [run] = run_program(ESCAPES[name], [""], STDIN)
    assert run.end == "error"
    assert "hunter2" not in run.output + run.detail
    assert any(word in run.detail for word in ("PermissionError", "ValueError", "OSError"))


def test_programs_get_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's environment variables are not passed to the program."""
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    [run] = run_program("import os\nprint(sorted(os.environ))", [""], STDIN)
    assert run.output.strip() == "['LANG', 'PYTHONHASHSEED']"


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("while True: pass", "time"),
        ("import time\ntime.sleep(1000)", "time"),
        ("x = bytearray(10**11)", "memory"),
        ("while True: print('x' * 10**6)", "output"),
        ("1 / 0", "error"),
        ("raise SystemExit(97)", "error"),
        ("import os, signal\nos.abort()", "error"),
        ("def (", "error"),
    ],
)
def test_limits_end_a_program(program: str, end: str) -> None:
    """Time, memory and output of a program are limited, and the verdict names the limit that ended
    it.
    """
    began = time.monotonic()
    [run] = run_program(program, [""], SHORT)
    assert run.end == end, run
    assert time.monotonic() - began < 60


def test_threads_and_deep_recursion_work() -> None:
    """A program may use threads and a deep stack, as contest solutions do."""
    program = (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(15000)))\nt.start()\nt.join()\n"
    )
    [run] = run_program(program, [""], STDIN)
    assert run.output == "15000\n"


def test_no_process_or_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time-out, the folder of the program's run is removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_program("while True: pass", [""], SHORT)
    assert list(tmp_path.iterdir()) == []


def test_functions_share_a_process_and_print_nothing() -> None:
    """A function, or a method of a class Solution, is called with JSON arguments, one per line. One
    process runs all cases. Nothing that the function prints is part of its output.
    """
    tests = ProgramTests((), function="add")
    plain = "def add(a, b):\n    print('noise')\n    return a + b\n"
    method = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    for program in (plain, method):
        runs = run_program(program, ["1\n2", '"a"\n"b"'], tests)
        assert [run.output for run in runs] == ["3", '"ab"']
    [first, second] = run_program("def add(a, b): return a // b", ["1\n1", "1\n0"], tests)
    assert (first.output, second.end) == ("1", "error")
    assert "ZeroDivisionError" in second.detail


def test_the_last_python_block_is_the_program() -> None:
    """The last complete Python block of a text is the program. Blocks inside thoughts, in other
    languages, or cut off are ignored.
    """
    text = (
        "<think>```python\nprint(0)\n```</think>Use\n```\nprint(1)\n```\n"
        "```bash\nls\n```\nand\n```py\nprint(2)\n```\nlater ```python\nprint(3"
    )
    assert find_program(text) == "print(2)\n"
    assert extract(text, "code") == "print(2)\n"
    assert find_program("<think>\n```python\nprint(0)\n```\n</think>\nDone.") == "print(0)\n"
    assert find_program("no program") is None


@pytest.mark.parametrize("word", ["snan", "-sNaN7", "nan", "inf"])
def test_a_word_that_is_no_usual_number_is_a_wrong_output(word: str) -> None:
    """If a program prints NaN or infinity instead of the expected number, its output is wrong, and
    grading raises no error.
    """
    tests = ProgramTests((Case("", "3"),), public=1)
    problem = Problem("p", "text", tests.text(), kind="code")
    assert judge(problem, f"print({word!r})").status == "different"
    assert judge(problem, "print('3.0')").is_equal
    assert ProgramVotes(tests.text()).group([f"print({word!r})", "print(3)"]) == [0, 1]


DEEP = "def f():\n    deep = []\n    for _ in range({depth}): deep = [deep]\n    return deep"


@pytest.mark.parametrize("depth", [600, 900, 3000])
def test_a_deeply_nested_value_is_a_wrong_output(depth: int) -> None:
    """If a function returns a value that is nested too deeply for Python's JSON reader, its output
    is wrong. Neither grading nor grouping raises an error.
    """
    expected = "[" * 500 + "]" * 500
    tests = ProgramTests((Case("", expected),), public=1, function="f")
    problem = Problem("p", "text", tests.text(), kind="code")
    assert judge(problem, DEEP.format(depth=depth)).status == "different"
    assert (
        len(ProgramVotes(tests.text()).group([DEEP.format(depth=depth), "def f(): return 1"])) == 2
    )


def test_programs_with_equal_outputs_vote_together(tasks: dict[str, Problem]) -> None:
    """Programs with the same outputs on public inputs are in one class of the vote. A program that
    fails on a public input has no vote.
    """
    task = tasks["sum-of-evens"]
    right = "input()\nprint(sum(x for x in map(int, input().split()) if x % 2 == 0))\n"
    other = "n = input()\nt = 0\nfor w in input().split():\n    if int(w) % 2 == 0: t += int(w)\nprint(t)"
    wrong = "input()\nprint(sum(map(int, input().split())))\n"
    broken = "print(int('x'))\n"
    votes = ProgramVotes(task.answer)
    assert votes.group([wrong, right, None, other, broken]) == [0, 1, -1, 1, -1]
    # without a problem, programs are equal if only their layout differs
    assert group([right, right + "# end\n", other], "code") == [0, 0, 1]
    assert layout_free("not ( a program") == "not ( a program"


def livecodebench(tmp_path: Path, private: object) -> Path:
    """Write one task in the form of LiveCodeBench."""
    public = json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}])
    row = {
        "question_title": "Add",
        "question_content": "Add two numbers.",
        "question_id": "q1",
        "difficulty": "easy",
        "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:",
        "public_test_cases": public,
        "private_test_cases": private,
        "metadata": json.dumps({"func_name": "add"}),
    }
    path = tmp_path / "lcb.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def packed(value: object) -> str:
    """Return a value as LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_livecodebench_files_are_read(tmp_path: Path) -> None:
    """Private tests of LiveCodeBench are unpacked without creating Python objects, and decide the
    verdict.
    """
    hidden = json.dumps([{"input": "5\n6", "output": "11", "testtype": "functional"}])
    [task] = load_dataset(livecodebench(tmp_path, packed(hidden))).problems
    assert (task.kind, task.subject, task.level) == ("code", "easy", None)
    assert "def add(self" in task.text
    assert judge(task, "class Solution:\n def add(self, a, b): return a + b").is_equal
    assert not judge(task, "class Solution:\n def add(self, a, b): return 3").is_equal


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return os.getenv, ("HOME",)


@pytest.mark.parametrize(
    ("private", "words"),
    [
        (packed(_Trap()), "instead of a string"),
        (packed([1, 2]), "not a string"),
        ("not packed", "cannot be unpacked"),
        ([{"input": "1"}], "without input or output"),
    ],
)
def test_unreadable_tests_name_the_row(tmp_path: Path, private: object, words: str) -> None:
    """Private tests are refused if their pickle contains anything but text, or if they cannot be
    read. The error names the row.
    """
    with pytest.raises(DatasetError, match=f"line 1 .*{words}"):
        load_dataset(livecodebench(tmp_path, private))


class Programmer(ScriptedEngine):
    """A scripted engine that writes one of two programs, depending on the sample."""

    async def _sample(self, request: SampleRequest) -> Completion:
        program = SOLUTIONS[2]["solution"] if request.seed.sample % 3 else SOLUTIONS[2]["wrong"]
        text = f"So:\n```python\n{program}```\n"
        ids = tuple(self.tokenizer.encode(text))
        return Completion(ids, text, "end", (-0.1,) * len(ids))


def test_a_run_of_code_votes_by_outputs(tmp_path: Path, tasks: dict[str, Problem]) -> None:
    """Two of three rollouts are correct and win the vote, and each rollout has its verdict."""
    task = tasks[SOLUTIONS[2]["id"]]
    policy = Policy(samples=3, early_stop="none", max_tokens=1000, chunking=Chunking(512, 512, ()))
    setup = Setup(Programmer("draft"), "scripted", method="draft-only", policy=policy)
    options = RunOptions(signals="ignore")
    result = evaluate([task], setup, directory=tmp_path / "run", options=options)
    [line] = result.problems
    assert line.verdict == "correct", line
    assert sorted(str(one.verdict) for one in line.samples) == ["correct", "correct", "wrong"]
    assert max(line.votes.values()) == 2


def test_answers_of_code_never_end_a_rollout() -> None:
    """A rollout continues after its first program, because a later part of the text may have a
    better one.
    """
    answers = answers_for("code")
    assert answers.extract("```python\nprint(1)\n```\n") is None
    assert answers.extract_finished("```python\nprint(1)\n```\n") == "print(1)\n"
    bound = answers.of(Problem("p", "text", ProgramTests(()).text(), kind="code"))

    async def main() -> None:
        await bound.prepare(["print(1)\n"])

    anyio.run(main)
    assert list(bound.group(["print(1)\n", "print(1) # so\n"])) == [0, 0]
