"""The local engine on a GPU: what it computes, how fast, and where a draft pays, within some
minutes.

Needs no installation: a Python with torch and transformers, and this checkout on its path
(`scripts/bench gpu` sees to it). Every finished cell is on disk at once; the same command goes on
where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

# last: for what is not installed; children get the same path
sys.path.append(str(Path(__file__).with_name("bare")))

from atts.local.options import Graphs
from scripts.studies.gpu_checks import exactness, kernel
from scripts.studies.gpu_lab import TINY, Lab, OutOfTime, Sizes
from scripts.studies.gpu_loops import RandomModel, TheirModel, decoding, scoring
from scripts.studies.gpu_pairs import pair_cells, speculation_cells
from scripts.studies.gpu_tables import tables
from scripts.studies.harness import Parts, look

Job = Callable[[Lab], None]


def rates(lab: Lab, size: str) -> None:
    """Writing and scoring by random weights, captured and not."""
    _rates(lab, size, "auto", {"decode": decoding, "score": scoring})
    lab.clear()
    _rates(lab, size, "off", {"decode": decoding})


def _rates(
    lab: Lab, size: str, graphs: Graphs, works: Mapping[str, Callable[[Lab, RandomModel, int], Any]]
) -> None:
    cells = [
        (f"{work} | {size} | {graphs} | {batch}", work, batch)
        for batch in lab.sizes.batches
        for work in works
    ]
    if lab.missing((name for name, *_ in cells), 20.0):
        model = RandomModel(lab, size, graphs)
        lab.cell(
            f"shape | {size}", partial(dict, kernel=model.model.device_name, trouble=model.trouble)
        )
        for name, work, batch in cells:
            fits = batch <= model.most_sequences
            lab.cell(
                name, partial(works[work], lab, model, batch) if fits else lambda: None, 4.0 * fits
            )


def their_rates(lab: Lab, size: str) -> None:
    """The same sizes by `transformers.generate`."""
    names = {f"generate | {size} | {batch}": batch for batch in lab.sizes.generate}
    if lab.missing(names, 25.0):
        model = TheirModel(lab, size)
        for name, batch in names.items():
            lab.cell(name, partial(model.decoding, lab, batch), 8.0)


def jobs(sizes: Sizes) -> dict[str, Job]:
    """What is to be done, that which says most first."""
    found: dict[str, Job] = {
        "device": lambda lab: lab.cell("device", lab.look),
        "kernel": lambda lab: lab.cell("kernel", partial(kernel, lab)),
        "exactness": exactness,
        f"rates {sizes.shapes[0]}": partial(rates, size=sizes.shapes[0]),
    }
    for draft, target in sizes.pairs:
        found[f"pair {draft}/{target}"] = partial(pair_cells, draft=draft, target=target)
        found[f"speculation {draft}/{target}"] = partial(
            speculation_cells, draft=draft, target=target
        )
    found |= {f"rates {size}": partial(rates, size=size) for size in sizes.shapes[1:]}
    return found | {f"generate {size}": partial(their_rates, size=size) for size in sizes.shapes}


def run(
    lab: Lab, work: Mapping[str, Job], skipped: list[str], publish: Callable[[], object]
) -> tuple[str, list[str]]:
    """Job after job; which of them broke the device, and what time ran out for.

    At first a job may take a third of what is left, so that many parts get some rows; then what is
    missing is done. A job that fails costs the others nothing: its reason is kept, and the same
    command tries it again.
    """
    left = list[str]()
    for share in (1 / 3, 1.0):
        left = []
        for name, job in work.items():
            if name in skipped:
                continue
            lab.begin(share)
            try:
                job(lab)
            except OutOfTime:
                left.append(name)
            except Exception as error:  # noqa: BLE001  whatever a driver or a library says, other parts go on
                _told(lab, name, f"{type(error).__name__}: {str(error)[:500]}")
                skipped.append(name)
                if _is_broken(lab):
                    return name, left
            else:
                _told(lab, name, "")
            lab.clear()
            publish()
    return "", left


def _told(lab: Lab, name: str, trouble: str) -> None:
    """Keep why a job failed, or that it does no more."""
    if lab.parts.get(f"trouble | {name}", "") != trouble:
        lab.parts.keep(f"trouble | {name}", trouble)
        print(
            f"gpu: {name} failed: {trouble}" if trouble else f"gpu: {name} works",
            file=sys.stderr,
            flush=True,
        )


def _is_broken(lab: Lab) -> bool:
    """Whether the device answers nothing any more: after some errors only a new process can use it."""
    try:
        lab.synchronize()
    except Exception:  # noqa: BLE001  it was asked only whether it answers
        return True
    return False


def publish(lab: Lab, out: Path) -> str:
    """Write what there is as JSON and as a page; the page."""
    device: dict[str, Any] = lab.parts.get("device") or {}
    words = f"{device.get('name', lab.device)}, {device.get('memory', 0) / 1e9:.0f} GB"
    machine = replace(look(1), software=f"{words}; torch {device.get('torch', '')}")
    made = tables(lab)
    record: dict[str, Any] = {
        "study": "gpu",
        "effort": "full" if lab.is_cuda else "quick",
        "seed": 0,
    }
    record |= {
        "machine": machine.fields(),
        "spent": None,
        "tables": [asdict(table) for table in made],
    }
    (out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    page = f"# The local engine on {words}\n\n" + "\n".join(table.markdown() for table in made)
    (out / "gpu.md").write_text(page)
    return page


def main(arguments: list[str] | None = None) -> None:
    """Parse, go on with what is left, print the page."""
    asked = _parse(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    until = asked.until or time.time() + 60 * asked.minutes
    sizes = TINY if asked.tiny else Sizes()
    kind = f"{asked.device}{'-tiny' if asked.tiny else ''}"
    lab = Lab(asked.device, sizes, Parts(asked.out / f"gpu-{kind}.jsonl"), until)
    if lab.is_cuda:  # a kernel that never ends cannot be waited for
        faulthandler.dump_traceback_later(lab.left + 90, exit=True)
    work = jobs(sizes)
    broken, left = run(lab, work, asked.skip, partial(publish, lab, asked.out))
    if broken:
        again = [
            sys.executable,
            "-m",
            "scripts.studies.gpu",
            "--until",
            str(until),
            "--out",
            str(asked.out),
        ]
        again += ["--device", asked.device, *["--tiny"] * asked.tiny]
        os.execv(
            sys.executable, [*again, *(word for name in asked.skip for word in ("--skip", name))]
        )
    print(publish(lab, asked.out))
    failed = [name for name in work if lab.parts.get(f"trouble | {name}")]
    told = [f"out of time for: {', '.join(left)}; the same command goes on"] if left else []
    told += [f"failed: {', '.join(failed)}; the same command tries these again"] if failed else []
    print(f"gpu: {'; '.join(told) or 'all is done'}", file=sys.stderr)
    if failed:
        sys.exit(1)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench gpu", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="begin nothing that would take longer"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder of finished cells, gpu.json and gpu.md"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tiny", action="store_true", help="small models and few requests: whether the code runs"
    )
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", action="append", default=[], help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error(
                "this torch sees no CUDA device; --device cpu --tiny tries the code without one"
            )
    return asked


if __name__ == "__main__":
    main()
