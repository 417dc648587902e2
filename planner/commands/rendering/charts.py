"""Charts as SVG text for a page: lines, a heat map, a tornado. Drawn by matplotlib, the extra `plots`.

Text, frames and marks take the page's own colours (`FROM_PAGE`), so that one picture serves light and dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from typing import Any, Final

from planner.errors import InputError

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError as exc:
    raise InputError(f"charts need the plots extra (pip install 'prfaas[plots]'): {exc}") from exc

WIDTH_IN, HEIGHT_IN = 5.8, 3.5
SERIES: Final = ("#3a7fc8", "#d9822b", "#3d8f5f", "#8b4f9f", "#b0413e")  # told apart on a light and on a dark page
INK, SOFT, PAGE = "#1b2430", "#5b6776", "#ffffff"
FROM_PAGE: Final = {INK: "var(--ink)", SOFT: "var(--soft)", PAGE: "var(--page)"}
STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.color": SOFT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "prfaas",  # the same plan gives the same file
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}
NO_METADATA: Final = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One curve: points with a name, in the colour of `slot`; `dashed` for limits and references."""

    name: str
    points: Sequence[tuple[float, float]]
    slot: int = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A labelled point."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Swing:
    """One input of a tornado: the result when it is low and when it is high, plan kept and solved again."""

    name: str
    kept: tuple[float, float]
    resolved: tuple[float, float]


def line_chart(
    lines: Sequence[ChartLine],
    *,
    x_label: str,
    y_label: str,
    title: str,
    marks: Sequence[ChartMark] = (),
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    is_dotted: bool = False,
) -> str:
    """Curves with a legend below, each point with a dot if `is_dotted`.

    Points that are not finite are left out, and so are curves above the range.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if isfinite(y)]
    x_low, x_high = x_range or (min(xs), max(xs))
    y_low, y_high = y_range or (0.0, max(ys) * 1.08 or 1.0)
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(HEIGHT_IN, x_label, y_label)
        for line in lines:
            points = [(x, y) for x, y in line.points if isfinite(y)]
            if any(y <= y_high for _, y in points):
                style = "--" if line.dashed else "-"
                dot = "o" if is_dotted else ""
                colour = SERIES[line.slot]
                axes.plot(
                    *zip(*points, strict=True), label=line.name, color=colour, linestyle=style, marker=dot, markersize=4
                )
        for mark in marks:
            _mark(axes, mark.x, mark.y)
            side, shift = ("right", -8) if mark.x > x_low + 0.7 * (x_high - x_low) else ("left", 8)
            axes.annotate(mark.text, (mark.x, mark.y), (shift, 7), textcoords="offset points", ha=side)
        axes.set_xlim(x_low, x_high)
        axes.set_ylim(y_low, y_high)
        axes.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=4)
        return _svg(figure, title)


def heat_map(
    columns: Sequence[float], rows: Sequence[int], values: Sequence[Sequence[float]], *, x_label: str, y_label: str,
    value_label: str, title: str, best: tuple[float, int] | None = None,
) -> str:  # fmt: skip
    """Cells as dark as their value, with a scale; `columns` are the cells' left edges, so the last column has no width."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(HEIGHT_IN, x_label, y_label)
        edges = [row - 0.5 for row in rows] + [rows[-1] + 0.5]
        inner = [line[: len(columns) - 1] for line in values]
        cells = axes.pcolormesh(columns, edges, inner, cmap="Blues", vmin=0, rasterized=True)
        figure.colorbar(cells, label=value_label)
        axes.set_yticks(rows)
        if best is not None:
            _mark(axes, *best)
        return _svg(figure, title)


def tornado(swings: Sequence[Swing], centre: float, *, x_label: str, title: str) -> str:
    """Bars from the result at low to that at high input; broad: plan kept, narrow: solved again."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(1.2 + 0.45 * len(swings), x_label, "")
        for name, height, shift, slot in (("plan kept", 0.34, -0.18, 1), ("solved again", 0.22, 0.16, 0)):
            ends = [swing.kept if slot else swing.resolved for swing in swings]
            axes.barh(
                [at + shift for at in range(len(swings))], [abs(one - other) for one, other in ends], height,
                [min(pair) for pair in ends], color=SERIES[slot], label=name,
            )  # fmt: skip
        axes.axvline(centre, color=SOFT, linewidth=1)
        axes.set_yticks(range(len(swings)), [swing.name for swing in swings])
        axes.invert_yaxis()
        axes.grid(axis="x")
        figure.legend(loc="outside lower center", ncols=4)
        return _svg(figure, title)


def _axes(height_in: float, x_label: str, y_label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _mark(axes: Any, x: float, y: float) -> None:
    axes.plot([x], [y], "o", markersize=6, color=PAGE, markeredgecolor=INK, markeredgewidth=1.6, clip_on=False)


def _svg(figure: Figure, title: str) -> str:
    """The figure as an element of a page: no prologue, no metadata, the page's colours."""
    file = StringIO()
    figure.savefig(file, format="svg", metadata=NO_METADATA)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    for colour, variable in FROM_PAGE.items():
        text = text.replace(colour, variable)
    return text
