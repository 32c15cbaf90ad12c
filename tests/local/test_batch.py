"""Tests that a batch that is updated in place equals a batch that is made from scratch."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atts.core import SampleRequest
from atts.local.batch import PrefillChunk, Sequence, StepBatches, StepPlan, new_sequence, step_batch

_ROWS = 4
_WIDTH = 40


def _sequence(number: int) -> Sequence:
    sequence = new_sequence(number, SampleRequest((5, 6, 7), 30), 0.0)
    sequence.row = number
    sequence.num_computed = 2
    sequence.is_decoding = True
    sequence.rope_row = 100 * (number % 2)
    return sequence


@given(st.data())
def test_an_updated_batch_equals_a_new_one(data: st.DataObject) -> None:
    """A batch that is updated in place equals a new batch, even if sequences, rows and slot tables
    change between steps.
    """
    sequences = [_sequence(number) for number in range(_ROWS)]
    batches = StepBatches()
    table = np.arange(_ROWS * _WIDTH, dtype=np.int32).reshape(_ROWS, _WIDTH)
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = [
            one for one in sequences if data.draw(st.booleans()) and one.num_computed < _WIDTH - 1
        ]
        match data.draw(st.sampled_from(["on", "on", "on", "last", "prefill", "propose", "rows"])):
            case "prefill" if chosen:
                plan = StepPlan(chosen[1:], [PrefillChunk(chosen[0], 0, 2, 2)], [], [])
            case "last" if chosen:
                at = chosen[0].num_computed
                plan = StepPlan(chosen[1:], [PrefillChunk(chosen[0], at, at + 1, at)], [], [])
            case "propose" if chosen:
                plan = StepPlan(chosen, [], [], [(3,) for _ in chosen])
            case kind:
                plan = StepPlan(chosen or sequences[:1], [], [], [])
                if kind == "rows":
                    for one, row in zip(
                        sequences, data.draw(st.permutations(range(_ROWS))), strict=True
                    ):
                        one.row = row
        for _ in range(data.draw(st.integers(1, 3))):
            if data.draw(st.booleans()):
                table = table[::-1].copy()
            found = asdict(batches.of(plan, table))
            wanted = asdict(step_batch(plan, table))
            for name, values in wanted.items():
                np.testing.assert_array_equal(found[name], values, name)
            for one in plan.decoding:
                one.num_computed += 1
                one.ids.append(data.draw(st.integers(0, 99)))
