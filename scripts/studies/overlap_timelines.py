"""Draws what the virtual devices of overlapped schemes do, one strip a device, as one SVG file."""

from __future__ import annotations

from html import escape

from scripts.studies.charts import page
from scripts.studies.overlap_virtual import (
    AcceptanceTrace,
    Costs,
    Timeline,
    ahead,
    fuzzy_devices,
    mirror,
    serial,
)

_WIDTH = 760
_LEFT = 86
_STRIP = 18
_GAP = 30
_UNIT = 108  # pixels of a target step
_COLOURS = {
    "verify": "#2f6fb3", "to the exit": "#6a9bd1", "to the end": "#2f6fb3", "draft": "#c4511d", "branches": "#dd9a6d",
    "attention": "#c4511d", "mlp": "#dd9a6d",
}  # fmt: skip
_NAMES = {
    "draft": "draft; attention",
    "branches": "branches of guesses; MLP",
    "verify": "verify; after the exit",
    "to the exit": "up to the early exit",
}


def schemes() -> dict[str, Timeline]:
    """Each scheme on the same acceptances, five draft steps a target step."""
    ranks = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, *[0] * 60]
    trace = AcceptanceTrace(ranks, [rank % 2 for rank in ranks])
    costs = Costs(lambda branches: 0.2)
    exits = Costs(lambda branches: 0.1, message=0.04)
    easy = fuzzy_devices(8, 3, attention=0.5 / 5 / 8, mlp=0.5 / 5 / 8)
    return {
        "Serial: draft 4, verify, draft": serial(trace, costs, 4),
        "PEARL: one guess, everything stands": ahead(trace, costs, 4),
        "SSD: the draft's next choices at every place as well": ahead(trace, costs, 4, 2),
        "Mirror: the target's early exit names what is continued": mirror(trace, exits, 4, 2),
        "EasySpec: attentions of a group of 3 layers at once (8 layers)": serial(trace, costs, 4, easy),
    }  # fmt: skip


def drawn(lines: dict[str, Timeline]) -> str:
    """The picture: time goes from left to right, numbers are tokens written by a step."""
    parts = list[str]()
    top = 40
    for title, line in lines.items():
        parts.append(f'<text class="axis" x="8" y="{top - 8}">{escape(title)}</text>')
        for device in reversed(line.devices):
            parts.append(
                f'<text x="{_LEFT - 8}" y="{top + 13}" '
                f'text-anchor="end">{escape(device.name)}</text>'
            )
            is_target = device.name == "target"
            step = 0
            for work in device.work:
                x = _LEFT + work.begin * _UNIT
                wide = (work.end - work.begin) * _UNIT
                if x + wide > _WIDTH - 6:
                    break
                box = f'x="{x:.1f}" y="{top}" width="{max(1.0, wide - 1):.1f}" height="{_STRIP}"'
                parts.append(
                    f'<rect {box} fill="{_COLOURS[work.what]}"><title>{work.what}</title></rect>'
                )
                if is_target and work.what != "to the exit":
                    place = f'x="{x + wide / 2:.1f}" y="{top + 13}" text-anchor="middle" style="fill:#fff"'
                    parts.append(f"<text {place}>{line.written[step]}</text>")
                    step += 1
            top += _STRIP + 3
        top += _GAP
    for step in range((_WIDTH - _LEFT) // _UNIT + 1):
        parts.append(f'<path class="grid" d="M{_LEFT + step * _UNIT} 14V{top - 20}"/>')
        parts.append(
            f'<text x="{_LEFT + step * _UNIT}" y="{top - 6}" text-anchor="middle">{step}</text>'
        )
    parts.append(f'<text x="{_LEFT - 8}" y="{top - 6}" text-anchor="end">target steps</text>')
    parts += _legend(top + 8)
    return page(
        "What each device does, and how many tokens each step of the target writes",
        _WIDTH,
        top + 34,
        parts,
    )


def _legend(top: int) -> list[str]:
    parts = list[str]()
    for number, (what, name) in enumerate(_NAMES.items()):
        x = 8 + 190 * number
        parts.append(f'<rect x="{x}" y="{top}" width="14" height="14" fill="{_COLOURS[what]}"/>')
        parts.append(f'<text x="{x + 20}" y="{top + 12}">{escape(name)}</text>')
    return parts
