"""Hit ratio over capacity, a line for each policy."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cache.replay import Result
from benchmarks.cache.traces import RecordedTrace

COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#997700", "#44bb99", "#332288", "#bbbbbb")
MARKERS = "svD^<>pPXd"


def plot(trace: RecordedTrace, results: Sequence[Result], path: Path, what: str) -> None:
    """Writes the figure in the format that the file name says. Needs the extra `plots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    footprint = trace.footprint
    for name, style in _styles([result.policy for result in results]).items():
        points = sorted((r.capacity_blocks / footprint * 100, r.hit_ratio * 100) for r in results if r.policy == name)
        axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set_xscale("log")
    capacities = sorted({result.capacity_blocks / footprint * 100 for result in results})
    axes.xaxis.set_major_locator(FixedLocator(capacities))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(PercentFormatter(decimals=0 if min(capacities) > 0.9 else 2))
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity in blocks, share of the footprint")
    axes.set_ylabel(f"{what}, share of all blocks")
    title = f"{trace.blocks:,} lookups, {footprint:,} different blocks of {trace.block_size} tokens"
    axes.set_title(f"{trace.name}\n{title}", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _styles(policies: Sequence[str]) -> dict[str, dict[str, object]]:
    """The optimum, ours, and the others: workload-aware ones dashed, the classics thin."""
    names = dict.fromkeys(policies)
    styles: dict[str, dict[str, object]] = {}
    if "belady" in names:
        styles["belady"] = {"color": "black", "linestyle": ":", "linewidth": 1.5}
    if "default" in names:
        styles["default"] = {"color": "#cc3311", "marker": "o", "markersize": 5, "linewidth": 2.6, "zorder": 5}
    others = sorted((name for name in names if name not in styles), key=lambda name: name.startswith("wa"))
    for index, name in enumerate(others):
        line = "--" if name.startswith("wa") else "-"
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        styles[name] = {"color": colour, "linestyle": line, "marker": marker, "markersize": 3.5, "linewidth": 1.1}
    return styles
