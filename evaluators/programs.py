"""Programs as answers: they are run on tests in a confined process, judged, and grouped for votes."""

import ast
import base64
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from atts.errors import UsageError, counted
from atts.evaluators.verdict import Verdict

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_LANGUAGES = ("", "python", "python3", "py")
_WORKER = Path(__file__).with_name("program_worker.py")
# Additional time for the start of a child process on a busy machine, in seconds. The program's own
# time limit does not include it.
_STARTING_SECONDS = 5.0
_MOST_OUTPUT = 8  # limit on the output of a program, in MiB
_AT_ONCE = threading.BoundedSemaphore(max(1, os.cpu_count() or 1))

End = Literal["done", "error", "time", "memory", "output"]
"""Reason why a run of a program ended. "done" means that it ended normally, even if its output is
wrong.
"""


class Case(msgspec.Struct, frozen=True):
    """One test of a program: the input and the expected output, both as strings.

    If the program is a function, the strings are JSON, and each line of the input is one argument.
    """

    input: str
    output: str


class ProgramTests(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tests of a code task, which are its reference.

    The first `public` tests are public. Only these may be used for votes.
    """

    cases: tuple[Case, ...]
    public: int = 0
    # name of the function to test; "" if the program reads standard input instead
    function: str = ""
    seconds: int = 6  # limit on the CPU time of one run of the program, in seconds
    megabytes: int = 1024

    @classmethod
    def read(cls, text: str) -> "ProgramTests":
        """Read the tests from JSON, which is stored as the reference of a problem."""
        return msgspec.json.decode(text, type=cls)

    def text(self) -> str:
        """Return the tests as JSON, which is stored as the reference of a problem."""
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """The result of one run of a program. `output` is the printed text, or the returned value as
    JSON.
    """

    end: End
    output: str = ""
    detail: str = ""


def find_program(text: str) -> str | None:
    """Return the last complete Python code block of a text, or None.

    Blocks inside the model's reasoning are used only if no block follows the reasoning.

    >>> find_program("Try:\\n```python\\nprint(1)\\n```\\nBetter:\\n```python\\nprint(2)\\n```\\n")
    'print(2)\\n'
    """
    thought, mark, rest = text.rpartition("</think>")
    for part in (rest, thought) if mark else (text,):
        blocks = [
            block for language, block in _FENCE.findall(part) if language.lower() in _LANGUAGES
        ]
        if blocks:
            return str(blocks[-1])
    return None


def run_program(program: str, inputs: Sequence[str], tests: ProgramTests) -> list[ProgramRun]:
    """Run a program on several inputs in confined processes.

    The runs stop after the first run that does not end normally. If the task is a function, all
    inputs are run in one process. This function may be called from any thread.
    """
    if tests.function:
        return _call_function(program, inputs, tests)
    runs: list[ProgramRun] = []
    for text in inputs:
        end, output, detail = _child(program, {"function": ""}, text, tests)
        runs.append(ProgramRun(end, output if end == "done" else "", detail))
        if end != "done":
            break
    return runs


def judge_program(reference: str, program: str) -> Verdict:
    """Return the verdict on a program, which is correct if it passes all tests.

    The runs stop at the first failed test.
    """
    tests = ProgramTests.read(reference)
    total = len(tests.cases)
    # All tests of a function run in one process. Tests of standard input need a process each. So
    # run these one by one, because most wrong programs fail an early test.
    step = total if tests.function else 1
    for begin in range(0, total, step):
        cases = tests.cases[begin : begin + step]
        runs = run_program(program, [case.input for case in cases], tests)
        for number, case in enumerate(cases, begin + 1):
            run = runs[number - begin - 1]
            if run.end != "done":
                return Verdict(
                    "different", "tests", f"test {number} of {total}: {run.end} {run.detail}"
                )
            if not _same_output(case.output, run.output, is_value=bool(tests.function)):
                return Verdict(
                    "different",
                    "tests",
                    f"test {number} of {total}: the output differs from the expected output",
                )
    return Verdict("equal", "tests", f"{counted(total, 'test')} passed")


class ProgramVotes:
    """A grouper of programs for votes on one task. Programs of one class have equal outputs on the
    task's public inputs.

    A program that does not end normally on one of these inputs does not vote. Without public
    inputs, programs are equal if they differ only in comments and layout.
    """

    def __init__(self, reference: str | None) -> None:
        self._tests = None if reference is None else ProgramTests.read(reference)
        self._keys: dict[str, str | None] = {}

    def prepare(self, programs: Sequence[str | None]) -> None:
        """Run the programs that have not been run yet, which may take seconds."""
        for program in programs:
            if program is not None and program not in self._keys:
                self._keys[program] = self._key(program)

    def group(self, programs: Sequence[str | None]) -> list[int]:
        """Return the index of each program's class, in the order of first appearance; -1 means no
        vote.
        """
        self.prepare(programs)
        numbers: dict[str, int] = {}
        labels: list[int] = []
        for program in programs:
            key = None if program is None else self._keys[program]
            labels.append(-1 if key is None else numbers.setdefault(key, len(numbers)))
        return labels

    def _key(self, program: str) -> str | None:
        tests = self._tests
        if tests is None or not tests.public:
            return layout_free(program)
        inputs = [case.input for case in tests.cases[: tests.public]]
        runs = run_program(program, inputs, tests)
        if any(run.end != "done" for run in runs):
            return None
        outputs = [_words(run.output) for run in runs]
        return json.dumps(outputs)


def layout_free(program: str) -> str:
    """Return a program's syntax tree as a string, so that comments and layout do not matter.

    A text that is not a program is returned as it is.
    """
    try:
        return ast.dump(ast.parse(program))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program.strip()


@cache
def check_confinement() -> None:
    """Check that the system can confine programs, before any program runs.

    :raises UsageError: the system cannot; the message names the missing feature.
    """
    [run] = run_program("print(1)", [""], ProgramTests(()))
    if run.end != "done":
        raise UsageError(
            f"code tasks need a machine that can run untrusted programs in a sandbox: {run.detail}"
        )


def tests_of_row(row: Mapping[str, object]) -> tuple[ProgramTests, str]:
    """Return the tests and the starter code of a row in the format of LiveCodeBench.

    Raises ValueError if the row has no tests, or tests in another format.
    """
    public = _cases(row.get("public_test_cases"))
    private = _cases(row.get("private_test_cases"))
    if not public and not private:
        raise ValueError("has no test in public_test_cases or private_test_cases")
    metadata = row.get("metadata")
    facts: Any = json.loads(metadata) if isinstance(metadata, str) and metadata else metadata or {}
    function = ""
    if any(kind == "functional" for kind, _ in (*public, *private)):
        function = str(facts.get("func_name") or "")
        if not function:
            raise ValueError(
                "has tests of a function, but its metadata does not name the function in func_name"
            )
    cases = tuple(case for _, case in (*public, *private))
    starter = row.get("starter_code")
    return ProgramTests(cases, len(public), function), starter if isinstance(starter, str) else ""


def _cases(value: object) -> list[tuple[str, Case]]:
    """Return the tests in a cell, each with its type. The cell has a list, JSON, or LiveCodeBench's
    compressed format.
    """
    if value is None or value == "":
        return []
    tests: Any = value
    if isinstance(value, str):
        try:
            tests = json.loads(value)
        except ValueError:
            tests = json.loads(_unpacked(value))
    if not isinstance(tests, list):
        raise ValueError("has tests that are not a list")
    rows: list[Any] = tests
    cases: list[tuple[str, Case]] = []
    for test in rows:
        if not isinstance(test, dict) or not {"input", "output"} <= {*cast(dict[str, Any], test)}:
            raise ValueError("has a test without input or output")
        named = cast(dict[str, Any], test)
        cases.append(
            (str(named.get("testtype", "stdin")), Case(str(named["input"]), str(named["output"])))
        )
    return cases


class _TextOnly(pickle.Unpickler):
    """An unpickler for pickled strings, which refuses to create objects of any class."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise an error for every class."""
        raise ValueError(f"contains a pickled object of class {module}.{name} instead of a string")


def _unpacked(text: str) -> str:
    """Return the JSON of private tests, which are stored pickled, compressed, and encoded in
    base64.
    """
    try:
        value = _TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load()
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"has private tests that cannot be unpacked ({error})") from error
    if not isinstance(value, str):
        raise ValueError("has private tests that are not a string")
    return value


def _call_function(program: str, inputs: Sequence[str], tests: ProgramTests) -> list[ProgramRun]:
    try:
        arguments = [
            [json.loads(line) for line in text.split("\n") if line.strip()] for text in inputs
        ]
    except ValueError as error:
        raise UsageError(
            f"a test of {tests.function} has an input that is not JSON: {error}"
        ) from error
    job = {"function": tests.function, "arguments": arguments}
    end, output, detail = _child(program, job, "", tests)
    runs: list[ProgramRun] = []
    for line in output.splitlines()[: len(inputs)]:
        # If the program was stopped, its last line of output may be cut. Ignore such a line, and a
        # value that is nested too deeply for Python's JSON reader.
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            runs.append(ProgramRun("done", json.dumps(json.loads(line)["value"])))
    if len(runs) < len(inputs):
        runs.append(ProgramRun("error" if end == "done" else end, "", detail))
    return runs


def _child(
    program: str, job: Mapping[str, object], text: str, tests: ProgramTests
) -> tuple[End, str, str]:
    """Run a program in a confined worker process. Return how the run ended, its output, and the
    last line of its error output.
    """
    limits = {
        "seconds": tests.seconds,
        "megabytes": tests.megabytes,
        "output_megabytes": _MOST_OUTPUT,
    }
    environment = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    with _AT_ONCE, tempfile.TemporaryDirectory(prefix="atts-program-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, **limits}), encoding="utf-8")
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "input").write_text(text, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_WORKER)]
        is_late = False
        with (
            open(folder / "input", "rb") as source,
            open(folder / "output", "wb") as output,
            open(folder / "errors", "wb") as errors,
        ):
            child = subprocess.Popen(
                command,
                stdin=source,
                stdout=output,
                stderr=errors,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
            try:
                child.wait(2 * tests.seconds + _STARTING_SECONDS)
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        written = (folder / "output").read_text(encoding="utf-8", errors="replace")
        said = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip()
    last = said.splitlines()[-1][:200] if said else ""
    code = child.returncode
    if is_late or code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "time", written, ""
    if code == -signal.SIGXFSZ or "File too large" in last:
        return "output", written, ""
    if "MemoryError" in last:
        return "memory", written, ""
    return ("done", written, "") if code == 0 else ("error", written, last)


def _same_output(expected: str, output: str, *, is_value: bool) -> bool:
    """Return True if two outputs are equal.

    The outputs of functions are compared as JSON values. The outputs of other programs are compared
    line by line and word by word, and numbers by their value.
    """
    if is_value:
        try:
            return bool(json.loads(expected) == json.loads(output))
        except RecursionError:  # a wrong program may return a value that is nested too deeply
            return False
    one = _words(expected)
    two = _words(output)
    if one == two:
        return True
    if [len(line) for line in one] != [len(line) for line in two]:
        return False
    pairs = [pair for lines in zip(one, two, strict=True) for pair in zip(*lines, strict=True)]
    return all(left == right or _number(left) == _number(right) != None for left, right in pairs)  # noqa: E711


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]


def _number(word: str) -> Decimal | None:
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    # a comparison with a signaling NaN would raise an error
    return None if number.is_snan() else number
