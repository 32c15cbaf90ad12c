"""`atts merge`: one run directory made of the shards of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atts.cli.options import Json
from atts.cli.output import print_json
from atts.cli.terminal import say, tell

CALIBRATOR = "calibrator.json"


def merge(
    directories: Annotated[
        list[Path], typer.Argument(help="The runs: directories given to `atts eval --out`.")
    ],
    out: Annotated[Path, typer.Option(help="A new directory, for the union.")],
    as_json: Json = False,
) -> None:
    """Make one run of the shards of an evaluation; `atts report`, `compare`, `replay` and `trace`
    read it as any other.

    With a gate that learns nothing the union is what one process would have come to. Gates that
    learn have each learnt from their own shard: what they saw together is saved beside, as
    calibrator.json.

    Example: atts merge runs/part-1 runs/part-2 runs/part-3 --out runs/whole
    """
    from atts.api import calibrator_of
    from atts.api import merge as merge_runs
    from atts.errors import CalibrationInputError, OptionError

    if str(out) == "-":
        raise OptionError("--out", "'-' names no directory, and a run is kept in one")
    made = merge_runs(directories, out)
    facts: dict[str, object] = {
        "run": str(out),
        "runs": len(made.parts),
        "problems": made.problems,
        "calibrator": None,
    }
    try:
        calibrator = calibrator_of(out)
    except CalibrationInputError as none:
        facts["why"] = str(none)
    else:
        calibrator.save(out / CALIBRATOR)
        facts |= {"calibrator": str(out / CALIBRATOR), "decisions": calibrator.decided}
        facts |= {"escalated": calibrator.escalated, "guarantee": calibrator.guarantee}
    if as_json:
        print_json(facts)
        return
    say(out)
    tell(f"{made.problems} problems of {len(made.parts)} runs. Next: atts report {out}")
    if facts["calibrator"] is None:
        tell(f"No calibrator: {facts['why']}")
    else:
        tell(f"Their calibrators together: {facts['calibrator']}")
