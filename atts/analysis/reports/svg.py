"""Charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH = 460
HEIGHT = 260
_LEFT = 52
_RIGHT = 14
_TOP = 14
_BOTTOM = 44


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plot: its values and its label."""

    low: float
    high: float
    label: str
    values: Literal["any", "whole"] = "any"  # whole numbers only, because a turn 2.5 does not exist

    def ticks(self, about: int = 5) -> list[float]:
        """Return about `count` round values inside the axis.

        >>> Axis(0, 11, "turn", values="whole").ticks(), Axis(0, 3, "turn", values="whole").ticks()
        ([0.0, 5.0, 10.0], [0.0, 1.0, 2.0, 3.0])
        """
        if not self.high > self.low:
            return [self.low]
        whole = self.values == "whole"
        rough = max((self.high - self.low) / about, 1.0 if whole else 0.0)
        power = 10.0 ** math.floor(math.log10(rough))
        units = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
        step = next(power * unit for unit in units if power * unit >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def written(self, value: float) -> str:
        """Return the text of a tick."""
        return f"{round(value, 10):g}"


@dataclass(frozen=True, slots=True)
class Plot:
    """A rectangle with two axes, which converts values to pixels."""

    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixels of a pair of values, clipped to the frame."""
        return self.across(x), self.up(y)

    def across(self, x: float) -> float:
        """Return the horizontal position of a value in pixels from the left."""
        return _LEFT + _part(x, self.x) * (self.width - _LEFT - _RIGHT)

    def up(self, y: float) -> float:
        """Return the vertical position of a value in pixels from the top."""
        return self.height - _BOTTOM - _part(y, self.y) * (self.height - _TOP - _BOTTOM)

    def drawn(self, title: str, marks: Iterable[str]) -> str:
        """Return the whole picture, with a title for screen readers."""
        body = "".join([*self._grid(), *marks])
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(title)}" '
            f'class="chart">{body}</svg>'
        )

    def _grid(self) -> Iterable[str]:
        bottom = self.height - _BOTTOM
        right = self.width - _RIGHT
        for value in self.x.ticks():
            x = _n(self.across(value))
            yield f'<path class="grid" d="M{x} {_TOP}V{bottom}"/>'
            yield f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{escape(self.x.written(value))}</text>'
        for value in self.y.ticks():
            y = _n(self.up(value))
            yield f'<path class="grid" d="M{_LEFT} {y}H{right}"/>'
            yield f'<text x="{_LEFT - 7}" y="{float(y) + 4:g}" text-anchor="end">{escape(self.y.written(value))}</text>'
        middle = (_LEFT + right) / 2
        foot = self.height - 6
        yield f'<text class="axis" x="{middle:g}" y="{foot}" text-anchor="middle">{escape(self.x.label)}</text>'
        height = (_TOP + bottom) / 2
        yield (
            f'<text class="axis" transform="translate(13 {height:g}) rotate(-90)" '
            f'text-anchor="middle">'
            f"{escape(self.y.label)}</text>"
        )

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> str:
        """Return a line through the points."""
        return f'<path class="line {kind}" d="{_path(self.at(x, y) for x, y in points)}"/>'

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> str:
        """Return the area between two lines."""
        there = [self.at(x, y) for x, y in zip(xs, lows, strict=True)]
        back = [self.at(x, y) for x, y in zip(xs, highs, strict=True)]
        return f'<path class="band" d="{_path([*there, *reversed(back)])}Z"/>'

    def bar(self, left: float, right: float, top: float, kind: str, tip: str) -> str:
        """Return a bar from zero up, with a tooltip."""
        x, y = self.at(left, top)
        wide = self.across(right) - x
        tall = self.up(0.0) - y
        return (
            f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(tall)}">'
            f"<title>{escape(tip)}</title></rect>"
        )

    def dot(self, x: float, y: float, kind: str, tip: str, radius: float = 4) -> str:
        """Return a point with a tooltip."""
        across, up = self.at(x, y)
        return (
            f'<circle class="dot {kind}" cx="{_n(across)}" cy="{_n(up)}" r="{radius:g}">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        shift: float = 0.0,
        drop: float = 0.0,
    ) -> str:
        """Return a text in the plot."""
        across, up = self.at(x, y)
        place = f'x="{_n(across + shift)}" y="{_n(up - 7 + drop)}"'
        return f'<text class="label" {place} text-anchor="{anchor}">{escape(text)}</text>'


def _part(value: float, axis: Axis) -> float:
    if axis.high == axis.low:
        return 0.5
    return min(1.0, max(0.0, (value - axis.low) / (axis.high - axis.low)))


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
