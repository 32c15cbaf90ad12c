"""The tables of the GPU study, made from whatever cells are finished."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atts.evaluators import compare_runs, mean_estimate
from scripts.studies.gpu_lab import Lab
from scripts.studies.gpu_loops import least_step, shape_of
from scripts.studies.gpu_pairs import ARMS, RATE
from scripts.studies.harness import Row, Table, figure, points


def tables(lab: Lab) -> list[Table]:
    """Those that have a row."""
    made = [_device(lab), _kernel(lab), _exactness(lab), _decoding(lab), _scoring(lab), _pairs(lab)]
    return [table for table in (*made, _speculation(lab), _troubles(lab)) if table.rows]


def _found(lab: Lab, kind: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The finished cells of a kind: the rest of their names, and their values."""
    for name, value in lab.parts.items():
        first, *rest = name.split(" | ")
        if first == kind and value:
            yield rest, value


def _device(lab: Lab) -> Table:
    rows: list[Row] = [
        (
            one["name"],
            one["memory"] / 1e9,
            one["bytes"] / 1e9,
            one["flops"] / 1e12,
            1e6 * one["launch"],
        )
        for _, one in _found(lab, "device")
    ]
    header = "device | GB | GB/s read and written by a copy | TFLOP/s of a matrix product | us to launch an operation"
    return Table.of("The device, and what nothing on it can pass", header, rows)


def _kernel(lab: Lab) -> Table:
    names = ("shape", "type", "off", "words")
    rows: list[Row] = [tuple(one[name] for name in names) for one in lab.parts.get("kernel", [])]
    return Table.of(
        "The attention kernel beside gathered slots in float32",
        "heads of | type | largest difference | state",
        rows,
        "Random keys in scattered slots: blocks of 1 to 16 rows, contexts up to 616 tokens; for "
        "the embedded target a "
        "window of 100 as well.",
    )


def _exactness(lab: Lab) -> Table:
    rows: list[Row] = [
        (
            arm,
            one["texts"],
            one["equal"],
            f"{one['tokens']} of {one['of']}",
            one["off_mean"],
            one["off_most"],
        )
        for (arm,), one in _found(lab, "exactness")
    ]
    return Table.of(
        "The embedded target on the device beside float32 on a CPU",
        "computed as | texts | equal texts | tokens up to a first difference | log-prob off, mean "
        "| largest",
        rows,
        "Texts under four laws (greedy, .7, top-p, top-k with min-p) with the same random numbers; "
        "the log-probs are "
        "those of the CPU's texts. One token that differs makes all after it another text.",
    )


def _decoding(lab: Lab) -> Table:
    sizes = list(dict.fromkeys(size for (size, *_), _ in _found(lab, "decode")))
    rows = [row for size in sizes for row in _rows_of(lab, size)]
    return Table.of(
        "Writing: models of random weights",
        "shape | rollouts | tokens/s | ms a step | least ms | share of the limit | without graphs, "
        "ms | "
        "transformers.generate, tokens/s | ratio",
        rows,
        f"Prompts of {lab.sizes.prompt} tokens, {lab.sizes.tokens} written by each rollout, "
        f"temperature .7, the whole "
        "step loop; the median step of the second half. The limit reads weights and cache as fast "
        "as a copy does, or "
        "multiplies as fast as a large product. For generate: all its tokens less the first.",
    )


def _rows_of(lab: Lab, size: str) -> Iterator[Row]:
    parts = lab.parts
    limits = lab.parts["device"]
    for batch in sorted(lab.sizes.batches):
        ours, eager = (
            parts.get(f"decode | {size} | {graphs} | {batch}") for graphs in ("auto", "off")
        )
        if not ours:
            continue
        theirs = parts.get(f"generate | {size} | {batch}") or {}
        least = least_step(lab, shape_of(lab, size), batch, limits)
        step = ours["step"]
        rate = ours["rate"]
        their_rate = theirs.get("rate")
        yield (
            size, batch, rate, 1e3 * step, 1e3 * least, least / step, 1e3 * eager["step"] if eager else None,
            their_rate, rate / their_rate if their_rate else None,
        )  # fmt: skip


def _scoring(lab: Lab) -> Table:
    rows: list[Row] = []
    for (size, graphs, batch), one in _found(lab, "score"):
        written = lab.parts.get(f"decode | {size} | {graphs} | {batch}")
        rows.append(
            (size, int(batch), one["rate"], one["rate"] / written["rate"] if written else None)
        )
    return Table.of(
        f"Scoring {lab.sizes.chunk} new tokens on each of several rollouts of {lab.sizes.prefix} "
        f"known ones",
        "shape | rollouts | scored tokens/s | to tokens written a second",
        sorted(rows, key=lambda row: (str(row[0]), row[1])),
        "All chunks at once, whole step loop, the better of two rounds.",
    )


def _pairs(lab: Lab) -> Table:
    cells: dict[tuple[str, str, int], dict[str, dict[int, dict[str, float]]]] = {}
    for (draft, target, samples, number, arm), one in _found(lab, "pair"):
        cells.setdefault((draft, target, int(samples)), {}).setdefault(arm, {})[int(number)] = one
    rows = [
        row
        for key in sorted(cells)
        for arm in ARMS
        if (row := _arm(key, arm, cells[key])) is not None
    ]
    return Table.of(
        "Padded pairs: a question at a time, its rollouts side by side",
        "draft/target | rollouts | method | questions | s a question | times target-only | right "
        "by vote | difference "
        "to target-only, points | right of rollouts | tokens a question: draft, scored, target",
        rows,
        f"Padded: the embedded models' words and answers at the cost of models of that size, "
        f"computed for real; "
        f"temperature .7, rate {RATE}, early stop, methods in turn on each question. The embedded "
        f"draft agrees with "
        "its target on .98 of tokens, which flatters `exact` and speculation. Only questions that "
        "both methods "
        "finished are compared; intervals at 95 %, by question.",
    )


def _arm(
    key: tuple[str, str, int], arm: str, cells: Mapping[str, Mapping[int, Mapping[str, float]]]
) -> Row | None:
    own = cells.get(arm, {})
    base = cells.get("target-only", {})
    both = sorted(own.keys() & base.keys())
    if not own:
        return None
    right, share = ([one[what] for one in own.values()] for what in ("right", "share"))
    kinds = [
        sum(one[kind] for one in own.values()) / len(own) for kind in ("draft", "scored", "target")
    ]
    seconds = sum(one["seconds"] for one in own.values()) / len(own)
    times = _times([base[n]["seconds"] for n in both], [own[n]["seconds"] for n in both])
    apart = "-"
    if arm != "target-only" and len(both) > 1:
        apart = points(
            compare_runs(
                [base[n]["right"] for n in both], [own[n]["right"] for n in both]
            ).difference,
            1,
        )
    return (
        f"{key[0] or 'embedded'}/{key[1] or 'embedded'}", key[2], arm, len(own), seconds, times, _rate(right),
        apart, _rate(share), ", ".join(figure(kind, 3) for kind in kinds),
    )  # fmt: skip


def _times(base: Sequence[float], own: Sequence[float]) -> str:
    """The ratio of all seconds, with the interval of a ratio of means (Fieller's, to first order)."""
    if not own:
        return "-"
    ratio = sum(base) / sum(own)
    n = len(own)
    if n < 2:
        return f"{ratio:.2f} (n=1)"
    mean = sum(own) / n
    spread = (
        math.sqrt(sum((b - ratio * o) ** 2 for b, o in zip(base, own, strict=True)) / (n - 1) / n)
        / mean
    )
    return f"{ratio:.2f} [{ratio - 1.96 * spread:.2f}, {ratio + 1.96 * spread:.2f}]"


def _rate(values: Sequence[float]) -> str:
    found = mean_estimate(list(values), len(values))
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _speculation(lab: Lab) -> Table:
    cells = {tuple(rest): one for rest, one in _found(lab, "speculation")}
    rows: list[Row] = []
    for (draft, target, way, count), one in cells.items():
        plain = cells.get((draft, target, "off", count))
        rate = one["tokens"] / one["seconds"]
        kept = one["accepted"] / one["proposed"] if one.get("proposed") else None
        ratio = rate * plain["seconds"] / plain["tokens"] if plain else None
        rows.append(
            (f"{draft or 'embedded'}/{target or 'embedded'}", int(count), way, rate, ratio, kept)
        )
    return Table.of(
        "The target alone, with and without speculation",
        "drafter/target | rollouts | proposals | tokens/s | to none | share of proposed tokens "
        "that stood",
        sorted(rows, key=lambda row: (str(row[0]), int(str(row[1])))),
        "Padded, temperature .7; three rounds of one question's rollouts after two that are not "
        "counted. `auto` takes "
        "what earlier texts and the drafter propose, as many tokens as pay. The embedded drafter "
        "agrees with its "
        "target on .98 of tokens, more than real ones do.",
    )


def _troubles(lab: Lab) -> Table:
    failed: list[Row] = [(part, str(words)) for (part,), words in _found(lab, "trouble")]
    failed += [
        (f"kernel, {size}", shape["trouble"])
        for (size,), shape in _found(lab, "shape")
        if shape["trouble"]
    ]
    return Table.of("What failed", "part | reason", failed)
