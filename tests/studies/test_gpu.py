"""Tests of the GPU study without a GPU: its imports, how it continues, the contents of its tables,
and all its code on a CPU.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

gpu = pytest.importorskip("scripts.studies.gpu", reason="needs a checkout")
harness = pytest.importorskip("scripts.studies.harness", reason="needs a checkout")

ALLOWED = {"torch", "transformers", "safetensors", "numpy", "anyio", "triton"}


def lab(folder: Path, seconds: float = 600.0) -> Any:
    """Make a lab on the CPU that keeps its measured cells in the folder."""
    return gpu.Lab("cpu", gpu.TINY, harness.Parts(folder / "cells.jsonl"), time.time() + seconds)


def loaded_first(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and name of every import that happens when this file is imported; the name
    is "" if the whole module is imported.
    """
    pending: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending += node.body


def file_of(root: Path, name: str) -> Path | None:
    """Return the file of one of this project's modules."""
    path = root.joinpath(*name.split("."))
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return found[0] if found else None


def closure(root: Path) -> tuple[set[str], set[str]]:
    """Return the packages outside the project that the study and its child processes import at
    start-up, and the names that they use from msgspec.
    """
    pending = ["scripts.studies.gpu", "atts.local.child"]
    known = set[str]()
    packages = set[str]()
    used = set[str]()
    while pending:
        name = pending.pop()
        if name in known or (path := file_of(root, name)) is None:
            continue
        known.add(name)
        pending += [name.rpartition(".")[0]]
        text = path.read_text()
        for module, part in loaded_first(path):
            top = module.split(".")[0]
            if top in ("atts", "scripts"):
                pending += [module, f"{module}.{part}"]
            elif top not in sys.stdlib_module_names:
                packages.add(top)
                if top == "msgspec":
                    used |= {part} if part else dotted(text)
    return packages, used


def dotted(text: str) -> set[str]:
    """Return the names that a module reads as attributes of msgspec."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in nodes
        if isinstance(node.value, ast.Name) and node.value.id == "msgspec"
    }


def test_it_imports_nothing_that_a_bare_machine_lacks(checkout: Path) -> None:
    """The study imports only packages that come with torch and transformers, and only names
    of msgspec for which it has a replacement.
    """
    packages, used = closure(checkout)
    assert packages - ALLOWED == {"msgspec"}
    stand_in = checkout / "scripts" / "studies" / "bare" / "msgspec"
    defined = {"asdict", "structs"}
    for node in ast.parse((stand_in / "__init__.py").read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
    assert used <= defined
    assert {"Meta", "convert"} <= used
    assert {"torch", "anyio"} <= packages


def cell(done: list[str], name: str, seconds: float, own: Any) -> None:
    """Let the study measure one cell, and record the cell's name when it is measured."""

    def measure() -> dict[str, int]:
        done.append(name)
        return {"value": 1}

    own.cell(name, measure, seconds)


def test_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    """Jobs that fail or run out of time do not stop the others; the next call repeats only these
    jobs.
    """
    done: list[str] = []

    def job(name: str, seconds: float = 0.0) -> Callable[[Any], None]:
        return partial(cell, done, name, seconds)

    def fail(own: Any) -> None:
        cell(done, "half", 0.0, own)
        raise RuntimeError("an illegal memory access was encountered")

    pages: list[int] = []
    work = {"one": job("one"), "two": fail, "three": job("three", 1e9), "four": job("four")}
    found = gpu.run(first := lab(tmp_path), work, [], lambda: pages.append(1))
    assert found == ("", ["three"])
    assert done == ["one", "half", "four"]
    assert "illegal memory" in first.parts["trouble | two"]
    assert len(pages) >= 3
    (troubles,) = [table for table in gpu.tables(first) if table.title == "Failed parts"]
    assert troubles.rows[0][0] == "two"
    again = lab(tmp_path)
    found = gpu.run(again, {**work, "two": job("half"), "three": job("three")}, [], lambda: None)
    assert found == ("", [])
    assert done == ["one", "half", "four", "three"]
    assert again.parts["trouble | two"] == ""


def test_a_device_that_answers_no_more_is_left_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a job breaks the device, a new process runs the same command without this job, until the
    same deadline.
    """

    def fail(own: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    class Replaced(Exception):
        """An exception that ends the process in the test, in place of `execv`."""

    def execv(program: str, words: list[str]) -> None:
        raise Replaced(words)

    monkeypatch.setattr(gpu, "jobs", lambda sizes: {"bad": fail, "good": fail})
    monkeypatch.setattr(gpu, "_is_broken", lambda own: True)
    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Replaced) as caught:
        gpu.main(["--device", "cpu", "--tiny", "--out", str(tmp_path), "--until", "5e9"])
    (words,) = caught.value.args
    assert words[1:] == [
        *("-m", "scripts.studies.gpu", "--until", "5000000000.0", "--out", str(tmp_path)),
        *("--device", "cpu", "--tiny", "--skip", "bad"),
    ]


def test_a_first_round_leaves_time_to_every_part(tmp_path: Path) -> None:
    """A part that would take more than a third of the time runs only after the other parts had
    their turn.
    """
    done: list[str] = []
    work = {
        "long": partial(cell, done, "long", 500.0),
        "short": partial(cell, done, "short", 100.0),
    }
    assert gpu.run(lab(tmp_path), work, [], lambda: None) == ("", [])
    assert done == ["short", "long"]


def test_tables_say_what_the_cells_hold(tmp_path: Path) -> None:
    """The tables compare results with the hardware limit, with `generate` and with target-only, and
    use only cells for which both numbers were measured.
    """
    own = lab(tmp_path)
    shape = gpu.shape_of(own, "8M")
    weights = shape.matrix_weights
    own.parts.update(
        {
            "device": {
                "name": "a GPU",
                "memory": 8e10,
                "bytes": 4.0 * weights,
                "flops": 1e30,
                "launch": 5e-6,
            },
            "shape | 8M": {"trouble": "slots are gathered"},
            "decode | 8M | auto | 2": {"step": 2.0, "rate": 1.0},
            "decode | 8M | off | 2": {"step": 4.0, "rate": 0.5},
            "generate | 8M | 2": {"rate": 0.25},
            "score | 8M | auto | 2": {"rate": 7.0},
        }
    )
    pair: dict[str, Any] = {"share": 1.0, "draft": 1, "scored": 2, "target": 3, "drawn": 0}
    for number, (base, ours) in enumerate(((4.0, 2.0), (8.0, 4.0), (6.0, 3.0))):
        own.parts[f"pair |  | 8M | 2 | {number} | target-only"] = {
            **pair,
            "seconds": base,
            "right": 1.0,
        }
        own.parts[f"pair |  | 8M | 2 | {number} | atts"] = {
            **pair,
            "seconds": ours,
            "right": float(number > 0),
        }
    own.parts["pair |  | 8M | 2 | 3 | target-only"] = {**pair, "seconds": 1000.0, "right": 1.0}
    tables = {table.title.split(":")[0]: table for table in gpu.tables(own)}
    (writing,) = tables["Writing"].rows
    context = own.sizes.prompt + 3 * own.sizes.tokens / 4
    least = 1.0 + 2 * context * shape.kv_floats_per_token * 4 / (4.0 * weights)
    assert writing == (
        "8M",
        2,
        1.0,
        2000.0,
        pytest.approx(1e3 * least),
        pytest.approx(least / 2),
        4000.0,
        0.25,
        4.0,
    )
    assert tables["Scoring 6 new tokens on each of several rollouts of 16 cached tokens"].rows == (
        ("8M", 2, 7.0, 7.0),
    )
    rows = {row[2]: row for row in tables["Padded pairs"].rows}
    assert rows["atts"][5] == "2.00 [2.00, 2.00]"
    assert str(rows["atts"][7]).startswith("-33.3 [")
    assert (rows["target-only"][3], rows["atts"][3]) == (4, 3)
    assert tables["Failed parts"].rows == (("kernel, 8M", "slots are gathered"),)


def test_random_models_write_and_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, the study measures the device and the rates and checks the kernel; a second call
    measures nothing again.
    """
    kept = {"device", "kernel", "rates 8M"}
    every = gpu.jobs
    monkeypatch.setattr(
        gpu, "jobs", lambda sizes: {n: job for n, job in every(sizes).items() if n in kept}
    )
    command = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    gpu.main(command)
    cells = (tmp_path / "gpu-cpu-tiny.jsonl").read_text()
    gpu.main(command)
    assert (tmp_path / "gpu-cpu-tiny.jsonl").read_text() == cells
    record = json.loads((tmp_path / "gpu.json").read_text())
    titles = [table["title"] for table in record["tables"]]
    assert [title.split(" ")[0] for title in titles] == ["The", "The", "Writing:", "Scoring"]
    assert "| 8M | 2 |" in (tmp_path / "gpu.md").read_text()


BARE = """
import re, runpy, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def plain(name): return re.sub(r"[-_.]+", "-", name).lower()

brought, pending = set(), json_names
while pending:
    name = plain(pending.pop())
    if name not in brought:
        brought.add(name)
        try:
            pending += [re.match(r"[\\w.-]+", one)[0] for one in requires(name) or () if "extra ==" not in one]
        except PackageNotFoundError:
            pass
owners = {top: {plain(one) for one in names} for top, names in packages_distributions().items()}

class Bare:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None and not brought & owners.get(name, brought):
            path = [place for place in sys.path if "site-packages" not in place]
        return PathFinder.find_spec(name, path, target)
    find_distributions = staticmethod(PathFinder.find_distributions)
    invalidate_caches = staticmethod(PathFinder.invalidate_caches)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
sys.path.insert(0, checkout)
sys.argv = ["gpu", "--device", "cpu", "--tiny", "--out", out]
runpy.run_module("scripts.studies.gpu", run_name="__main__")
print("msgspec from", sys.modules["msgspec"].__file__)
"""


@pytest.mark.slow
def test_all_of_it_runs_where_only_a_few_packages_are(checkout: Path, tmp_path: Path) -> None:
    """With every other package hidden, even msgspec, all parts of the study finish and no job
    fails.
    """
    names = (
        f"json_names, checkout, out = {sorted(ALLOWED)!r}, {str(checkout)!r}, {str(tmp_path)!r}\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", names + BARE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "gpu: all is done" in done.stderr
    assert done.stdout.splitlines()[-1].endswith("bare/msgspec/__init__.py")
    tables = json.loads((tmp_path / "gpu.json").read_text())["tables"]
    assert len(tables) == 7
    equal = [(row[1], row[2]) for row in tables[2]["rows"] if str(row[0]).startswith("float32")]
    assert equal == [(3, 3)] * 4
    assert [row[2] for row in tables[5]["rows"]] == ["target-only", "atts", "exact", "draft-only"]


def test_pairs_open_in_the_order_that_users_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft opens first, and its demand includes the target that opens next.

    On a GPU, no cache size is fixed beforehand.
    """
    own = lab(tmp_path)
    monkeypatch.setattr(gpu.Lab, "is_cuda", property(lambda self: True))
    opened: list[tuple[str, Any, Any]] = []

    class Recorded:
        def __init__(
            self, model: Any, *, name: str, demand: Any, options: Any, **rest: Any
        ) -> None:
            self.told = name, demand, options

        async def __aenter__(self) -> Any:
            opened.append(self.told)
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(gpu, "accelerated", Recorded)

    async def look() -> None:
        async with gpu.opened(own, "", "8M"):
            pass

    anyio.run(look)
    (first, draft_demand, options), (second, target_demand, _) = opened
    assert (first, second) == ("draft", "target")
    assert draft_demand.other
    assert not target_demand.other
    assert options.kv_tokens is None
