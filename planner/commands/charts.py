"""Charts as SVG text: lines, a heat map, a tornado. No script, no font, no file beside them.

Colours come from CSS classes (`s0`, `s1`, …) of the page, so that one style serves light and dark.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Final

WIDTH: Final = 560
HEIGHT: Final = 320
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 16, 46


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: points with a name, drawn in the style of `slot`; `dashed` for limits and references."""

    name: str
    points: Sequence[tuple[float, float]]
    slot: int = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled point."""

    x: float
    y: float
    text: str


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers that cover [low, high]."""
    span = (high - low) or 1.0
    raw = span / count
    power = 10.0 ** floor(log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    first = ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value / 1000:g}K"
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / ((self.x1 - self.x0) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / ((self.y1 - self.y0) or 1) * (HEIGHT - TOP - BOTTOM)


def _svg(body: Sequence[str], title: str, height: int = HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *body, "</svg>"])


def _axes(frame: _Frame, x_label: str, y_label: str, x_text: Callable[[float], str] = _number) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in ticks(frame.y0, frame.y1, 5):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in ticks(frame.x0, frame.x1, 7):
        x = frame.x(value)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{x_text(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (TOP + bottom) / 2
    parts.append(
        f'<text class="label" transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return parts


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    title: str,
    marks: Sequence[Mark] = (),
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Curves with a legend. Points that are not finite, or lie outside the ranges, are left out."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if isfinite(y)]
    x0, x1 = x_range or (min(xs), max(xs))
    y0, y1 = y_range or (0.0, max(ys) * 1.08 or 1.0)
    frame = _Frame(x0, x1, y0, y1)
    body = _axes(frame, x_label, y_label)
    for line in lines:
        inside = [(x, min(y, y1)) for x, y in line.points if x0 <= x <= x1 and isfinite(y) and y <= y1 * 1.5]
        if not inside:
            continue
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in inside)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        body.append(
            f'<polyline class="line s{line.slot}" points="{path}"{dash}><title>{escape(line.name)}</title></polyline>'
        )
    for mark in marks:
        x, y = frame.x(mark.x), frame.y(min(mark.y, y1))
        side, shift = ("end", -8) if x > WIDTH * 0.7 else ("start", 8)
        body.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        body.append(
            f'<text class="note" x="{x + shift:.1f}" y="{y - 7:.1f}" text-anchor="{side}">{escape(mark.text)}</text>'
        )
    return _svg(body, title) + _legend(lines)


def _legend(lines: Sequence[Line]) -> str:
    items = "".join(
        f'<span class="key"><i class="swatch b{line.slot}{" dashed" if line.dashed else ""}"></i>{escape(line.name)}</span>'
        for line in lines
    )
    return f'<div class="legend">{items}</div>'


def heat_map(
    columns: Sequence[float], rows: Sequence[int], values: Sequence[Sequence[float]], *, x_label: str, y_label: str,
    title: str, best: tuple[float, int] | None = None,
) -> str:  # fmt: skip
    """Cells whose darkness is their value over the largest; `columns` are the cells' left edges."""
    top = max(max(line) for line in values) or 1.0
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    step = (bottom - TOP) / len(rows)
    frame = _Frame(columns[0], columns[-1], 0, 1)
    body = []
    for index, row in enumerate(rows):
        y = bottom - (index + 1) * step
        for at, left in enumerate(columns[:-1]):
            x, width = frame.x(left), frame.x(columns[at + 1]) - frame.x(left)
            value = values[index][at]
            hint = f"t={left:,.0f}, {y_label} {row}: {value:.2f}"
            body.append(
                f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{width + 0.4:.1f}" height="{step + 0.4:.1f}" '
                f'fill-opacity="{(value / top) ** 1.5:.3f}"><title>{escape(hint)}</title></rect>'
            )
        body.append(f'<text class="tick" x="{LEFT - 6}" y="{y + step / 2 + 4:.1f}" text-anchor="end">{row}</text>')
        body.append(
            f'<text class="tick" x="{right - 4}" y="{y + step / 2 + 4:.1f}" text-anchor="end">max {max(values[index]):.2f}</text>'
        )
    for value in ticks(columns[0], columns[-1], 7):
        body.append(
            f'<text class="tick" x="{frame.x(value):.1f}" y="{bottom + 17}" text-anchor="middle">{_number(value)}</text>'
        )
    if best is not None:
        y = bottom - (rows.index(best[1]) + 0.5) * step
        body.append(f'<circle class="mark" cx="{frame.x(best[0]):.1f}" cy="{y:.1f}" r="5"/>')
    middle, centre = (LEFT + right) / 2, (TOP + bottom) / 2
    body.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    body.append(
        f'<text class="label" transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return _svg(body, title)


@dataclass(frozen=True, slots=True)
class Swing:
    """One input of a tornado: the result when it is low and when it is high, plan kept and solved again."""

    name: str
    kept: tuple[float, float]
    resolved: tuple[float, float]


def tornado(swings: Sequence[Swing], centre: float, *, x_label: str, title: str) -> str:
    """Bars from the result at low to that at high input; broad: plan kept, narrow: solved again."""
    height = TOP + BOTTOM + 46 * len(swings)
    everything = [value for swing in swings for value in (*swing.kept, *swing.resolved)]
    low, high = min([*everything, centre]), max([*everything, centre])
    pad = (high - low) * 0.08 or 0.1
    left = 150
    scale = (WIDTH - left - RIGHT) / (high - low + 2 * pad)

    def x(value: float) -> float:
        return left + (value - low + pad) * scale

    body = []
    for value in ticks(low - pad, high + pad, 6):
        body.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        body.append(
            f'<text class="tick" x="{x(value):.1f}" y="{height - BOTTOM + 17}" text-anchor="middle">{_number(value)}</text>'
        )
    for index, swing in enumerate(swings):
        y = TOP + 46 * index + 6
        body.append(f'<text class="label" x="{left - 8}" y="{y + 22}" text-anchor="end">{escape(swing.name)}</text>')
        for offset, thick, slot, (one, other), what in (
            (2, 16, 1, swing.kept, "kept"),
            (20, 10, 0, swing.resolved, "re-solved"),
        ):
            start, width = x(min(one, other)), abs(one - other) * scale
            hint = f"{swing.name} ±10 %, {what}: {min(one, other):.3f} to {max(one, other):.3f}"
            body.append(
                f'<rect class="bar b{slot}" x="{start:.1f}" y="{y + offset}" width="{max(width, 1.5):.1f}" height="{thick}">'
                f"<title>{escape(hint)}</title></rect>"
            )
    body.append(f'<line class="axis" x1="{x(centre):.1f}" x2="{x(centre):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
    body.append(
        f'<text class="label" x="{(left + WIDTH) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    keys = [Line("plan kept", [], 1), Line("solved again", [], 0)]
    return _svg(body, title, height) + _legend(keys)
