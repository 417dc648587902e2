"""A disturbance as a picture: the TTFT of every request by its arrival; below, requests under way and what the link
carries; below that the threshold and version of the plan in force, and how many nodes prefill."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from benchmarks.system.disturbances import Course

# Okabe and Ito's colours, told apart by colour-blind eyes as well; shapes differ, too.
STYLES: Final = {
    "local": ("#0072b2", "o"), "remote": ("#e69f00", "^"), "decode": ("#009e73", "s"),
    "refused": ("#999999", "x"), "failed": ("#d55e00", "X"), "wrong": ("#000000", "*"),
}  # fmt: skip
STEP_S: Final = 1.0
WINDOW_S: Final = 5.0


def plot(course: "Course", path: Path) -> None:
    """Writes the figure. Needs the extra `plots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, middle, below) = pyplot.subplots(3, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2, 2))
    _requests(course, above)
    _state(course, middle)
    _plan(course, below)
    lasts = course.end_s > course.begin_s
    for axes in (above, middle, below):
        axes.axvspan(
            course.begin_s, course.end_s, color="#000000", alpha=0.07 if lasts else 0.5, linewidth=0 if lasts else 1
        )
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    above.set_title(f"{course.name} ({'shaded' if lasts else 'at the line'})", fontsize=10)
    below.set_xlabel("seconds")
    figure.savefig(path, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


def _requests(course: "Course", axes: Any) -> None:
    answered = [each.ttft_s for each in course.answers if np.isfinite(each.ttft_s)]
    top = max(answered, default=1.0)
    for outcome, (colour, marker) in STYLES.items():
        found = [each for each in course.answers if each.outcome == outcome]
        if found:
            axes.scatter(
                [each.at_s for each in found], [min(each.ttft_s, 1.05 * top) for each in found],
                s=12, color=colour, marker=marker, alpha=0.6, label=f"{outcome} ({len(found)})", linewidths=0.7,
            )  # fmt: skip
    moments = np.arange(0.0, course.answers[-1].at_s, STEP_S)
    p90s = [course.p90_s(moment - WINDOW_S / 2, moment + WINDOW_S / 2) for moment in moments]
    axes.plot(moments, p90s, color="black", linewidth=1.6, label=f"P90 of {WINDOW_S:.0f} s")
    axes.set_ylabel("TTFT, s, by arrival")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.08, 0.5))


def _state(course: "Course", axes: Any) -> None:
    at_s = [each.at_s for each in course.samples]
    axes.plot(at_s, [each.under_way for each in course.samples], color="#0072b2", label="requests under way")
    axes.set_ylabel("requests under way")
    link = axes.twinx()
    link.plot(
        at_s, [each.available_bytes_per_s / 1e6 if each.up else 0.0 for each in course.samples],
        color="#d55e00", linestyle="--", linewidth=1.2, label="link as the gateway has it (0: down)",
    )  # fmt: skip
    link.set_ylabel("MB/s")
    _legend(axes, link)


def _plan(course: "Course", axes: Any) -> None:
    at_s = [each.at_s for each in course.samples]
    axes.step(
        at_s, [each.threshold_tokens for each in course.samples],
        where="post", color="#009e73", label="threshold t; numbers are versions of plans",
    )  # fmt: skip
    axes.set_ylabel("t, tokens")
    top = max((each.threshold_tokens for each in course.samples), default=1.0)
    for each in course.changes():
        axes.annotate(
            f"{each.version}", (each.at_s, each.threshold_tokens), (2, 3), textcoords="offset points", fontsize=7
        )
    axes.set_ylim(top=1.25 * top)
    nodes = axes.twinx()
    nodes.step(
        at_s, [each.num_prefill for each in course.samples],
        where="post", color="#cc79a7", linestyle="--", linewidth=1.2, label="prefill nodes that are ready",
    )  # fmt: skip
    nodes.step(
        at_s, [each.num_decode for each in course.samples],
        where="post", color="#56b4e9", linestyle=":", linewidth=1.4, label="decode nodes that are ready",
    )  # fmt: skip
    nodes.set_ylabel("nodes")
    _legend(axes, nodes)


def _legend(axes: Any, other: Any) -> None:
    """One for both, beside them."""
    other.set_ylim(bottom=0)
    other.spines["top"].set_visible(False)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(
        lines,
        [line.get_label() for line in lines],
        fontsize=8,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.08, 0.5),
    )
