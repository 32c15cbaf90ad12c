"""Tests of the study of a model zoo served by one engine loop: it counts shared work, and measures
the memory of processes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.studies.blocks import ALIKE, TENANTS, Arm, Arrival, arrive, make_family, resident


def test_requests_have_prompts_of_their_own_or_common_ones() -> None:
    """Requests come at the same moments from the same tenants, whether their prompts differ or are
    common.
    """
    own, common = (arrive(40, 2.0, 1, prompts) for prompts in ("own", "common"))
    assert [(one.at, one.tenant) for one in own] == [(one.at, one.tenant) for one in common]
    assert len({one.prompt for one in own}) == 40
    assert 40 / ALIKE <= len({one.prompt for one in common}) <= 40 / ALIKE + 1
    assert not {one.prompt for one in own} & {one.prompt for one in arrive(40, 2.0, 2, "common")}


def test_what_tenants_have_in_common_is_computed_once(tmp_path: Path) -> None:
    """If prompts differ, one loop computes blocks for about as many tokens as four separate engines
    do. If all tenants use one prompt, it computes fewer.
    """
    zoo = make_family(tmp_path, 1)
    one = Arm(zoo, shares=True)
    four = Arm(zoo, shares=False)
    first = [Arrival(0.0, at + 1, at, 100 + at) for at in range(len(TENANTS))]
    again = [Arrival(0.0, at + 11, at, 200) for at in range(len(TENANTS))]
    rows = [[arm.serve(arrivals).block_rows for arrivals in (first, again)] for arm in (one, four)]
    assert abs(rows[0][0] / rows[1][0] - 1) < 0.05
    assert rows[0][1] < 0.8 * rows[1][1]
    served = one.serve(
        [arrival._replace(number=arrival.number + 20, prompt=300) for arrival in first]
    )
    assert len(served.waits) == len(TENANTS)
    assert served.weight_bytes < four.serve(first[:1]).weight_bytes / 2


WRITING = "import sys; print(flush=True); sys.stdin.readline(); held = b'1' * 20_000_000; print(flush=True); input()"


def test_a_process_takes_what_it_has_written() -> None:
    """The memory of a process, in kilobytes, includes what the process has written and its share of
    pages that several processes use.
    """
    with subprocess.Popen(
        [sys.executable, "-S", "-c", WRITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        one.stdout.readline()
        process = Path(f"/proc/{one.pid}")
        before = resident(process)
        one.stdin.write(b"\n")
        one.stdin.flush()
        one.stdout.readline()
        assert 15_000 < resident(process) - before < 60_000
        one.kill()
