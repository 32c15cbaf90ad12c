"""Draws the loss and accuracy curves of a training run, from its logs, as one small SVG."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log10
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 360, 220, 46, 26
COLOURS = {"target": "#2458a6", "draft": "#c0392b"}
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """What one model's log holds, by millions of tokens."""

    loss: Points
    accuracy: Points


def read(log: Path) -> Curves:
    """The last line about a step wins, so a resumed run draws once."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    losses = {line["step"]: line for line in lines if "loss" in line}
    checks = {line["step"]: line["pass@1"] for line in lines if "pass@1" in line}
    loss = [(line["tokens"] / 1e6, float(line["loss"])) for _, line in sorted(losses.items())]
    accuracy = [(losses[step]["tokens"] / 1e6, float(mark)) for step, mark in sorted(checks.items()) if step in losses]
    return Curves(loss, accuracy)


def draw(curves: dict[str, Curves]) -> str:
    """Two panels side by side: loss on a logarithmic scale, pass@1 on a plain one."""
    furthest = max(point[0] for one in curves.values() for point in one.loss)
    body = _panel(
        0, "loss per learned token", {n: _logarithms(c.loss) for n, c in curves.items()}, furthest, (-2.0, 1.0)
    )
    right = {name: one.accuracy for name, one in curves.items()}
    body += _panel(WIDTH + 30, "pass@1 on calibration problems", right, furthest, (0.0, 1.0))
    size = f'width="{2 * WIDTH + 30}" height="{HEIGHT + 60}"'
    style = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}</svg>\n'


def _logarithms(points: Points) -> Points:
    return [(x, log10(y)) for x, y in points]


def _panel(x: int, title: str, lines: dict[str, Points], furthest: float, span: tuple[float, float]) -> str:
    across, down = (WIDTH - LEFT) / furthest, HEIGHT / (span[1] - span[0])
    parts = [f'<g transform="translate({x + LEFT},{TOP})">', f'<text x="0" y="-10" font-size="12">{title}</text>']
    for mark in _marks(span):
        y = HEIGHT - (mark - span[0]) * down
        label = f"{10**mark:g}" if span[0] < 0 else f"{mark:g}"
        parts.append(f'<path d="M0 {y:.1f}H{WIDTH - LEFT}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    every = max(1, ceil(furthest / 6))
    for mark in range(0, int(furthest) + 1, every):
        parts.append(f'<text x="{mark * across:.1f}" y="{HEIGHT + 16}" text-anchor="middle">{mark}</text>')
    parts.append(f'<text x="{(WIDTH - LEFT) / 2}" y="{HEIGHT + 32}" text-anchor="middle">million tokens</text>')
    for place, (name, points) in enumerate(lines.items()):
        places = " ".join(f"{px * across:.1f},{HEIGHT - (py - span[0]) * down:.1f}" for px, py in points)
        colour = COLOURS.get(name, "#333")
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{WIDTH - LEFT - 60}" y="{14 + 14 * place}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</g>\n"])


def _marks(span: tuple[float, float]) -> Sequence[float]:
    step = 1.0 if span[0] < 0 else 0.2
    return [span[0] + step * index for index in range(round((span[1] - span[0]) / step) + 1)]


def main() -> None:
    """Read the logs of a work folder and write the picture."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/train"))
    parser.add_argument("--out", type=Path, default=Path("docs/models.svg"))
    asked = parser.parse_args()
    found = {name: read(asked.work / f"{name}.jsonl") for name in COLOURS if (asked.work / f"{name}.jsonl").exists()}
    asked.out.write_text(draw(found), encoding="utf-8")
    print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
