"""`atts certify`: the cheapest of several runs that is nearly as right as the target alone, and how
sure that is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atts.cli.options import Json
from atts.cli.output import print_result
from atts.errors import CheckFailed

if TYPE_CHECKING:
    from atts.calibration import Certificate


def certify(
    target: Annotated[
        Path, typer.Argument(help="The run directory of the target alone on labelled problems.")
    ],
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories of policies on the same problems.")
    ],
    epsilon: Annotated[
        float, typer.Option(help="How much less often right a policy may be.")
    ] = 0.02,
    delta: Annotated[
        float, typer.Option(help="The probability with which the certificate may be wrong.")
    ] = 0.1,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost",
            help="Bound the answers lost, those lost by sampling included, not the net loss.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Certify the cheapest policy that is right at most epsilon less often than the target alone on
    new problems.

    Runs of one method and mode are tested from the highest rate down until one fails. Net losses
    are counted: answers that the policy loses, less those that it wins, so that two runs of the
    same models may be certified against each other. Exit code 5 where no policy is certified; the
    words then say how many problems it would take.

    Example: atts certify runs/target-only runs/first --epsilon 0.02
    """
    from atts.api import certify as certified

    found = certified(target, runs, epsilon=epsilon, delta=delta, net=not lost)
    print_result(found, as_json, _table)
    if found.chosen is None:
        raise CheckFailed(found.guarantee)


def _table(found: Certificate) -> list[str]:
    lines = [f"{'policy':<28}{'rate':>6}{'loss':>10}{'p':>10}{'target tokens':>16}   certified"]
    for row in found.tested:
        p = "-" if row.p is None else f"{row.p:.2g}"
        verdict = "yes" if row.certified else "no"
        lines.append(
            f"{row.gate:<28}{row.rate:>6g}{row.loss:>+10.2%}{p:>10}{row.cost:>16,.1f}   {verdict}"
        )
    return [*lines, "", f"guarantee  {found.guarantee}", f"voided by  {found.voided_by}"]
