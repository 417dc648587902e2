// Lines over time, by uPlot; colours are the style sheet's, so that a theme changes them.

import { h } from "./dom.js";
import { clock } from "./numbers.js";

const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3], [1, 4], [14, 4]]; // lines differ in more than colour

export class Chart {
  // `series`: names; `format`: a number as text; `marks`: () → [{at, label}] drawn as verticals
  constructor(title, format, { height = 180, marks = null, max = null } = {}) {
    this.title = title;
    this.format = format;
    this.height = height;
    this.marks = marks;
    this.max = max;
    this.names = [];
    this.plot = null;
    this.box = h("div", { class: "chart", role: "img" });
    this.element = h("figure", {}, h("figcaption", {}, title), this.box);
    this.resized = new ResizeObserver(() => this.fit());
    this.resized.observe(this.box);
  }

  set(names, columns) {
    if (!columns[0]?.length) return;
    if (!this.plot || names.join("\n") !== this.names.join("\n")) {
      this.names = names;
      this.build(columns);
    } else {
      this.plot.setData(columns);
    }
    this.showLatest();
    const last = names.map((name, i) => `${name} ${this.format(columns[i + 1].at(-1))}`);
    this.box.setAttribute("aria-label", `${this.title}, now: ${last.join(", ")}`);
  }

  build(columns) {
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const format = (value) => (value === null || value === undefined ? "–" : this.format(value));
    this.plot = new window.uPlot(
      {
        width: Math.max(200, this.box.clientWidth),
        height: this.height,
        cursor: { drag: { x: false, y: false } },
        legend: { live: true },
        scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), this.max ?? ((high || 1) * 1.08)] } },
        axes: [{ ...axis, space: 80, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 74, values: (_, ticks) => ticks.map(format) }],
        series: [
          { value: (_, at) => (at === null ? "" : clock(at)) },
          ...this.names.map((label, i) => ({
            label,
            stroke: colour(`--line-${i % 6}`),
            dash: DASHES[i % DASHES.length],
            width: 2,
            points: { show: false },
            value: (_, value) => format(value),
          })),
        ],
        hooks: { draw: [(plot) => this.drawMarks(plot, colour("--muted"))] },
      },
      columns,
      this.box,
    );
  }

  // In the legend, while nobody points anywhere.
  showLatest() {
    if (!(this.plot.cursor.left >= 0)) this.plot.setLegend({ idx: this.plot.data[0].length - 1 });
  }

  drawMarks(plot, colour) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.setLineDash([2, 3]);
    ctx.textAlign = "left";
    for (const mark of this.marks?.() ?? []) {
      if (mark.at < plot.scales.x.min || mark.at > plot.scales.x.max) continue;
      const x = plot.valToPos(mark.at, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(mark.label, x + 4, bbox.top + 12 * devicePixelRatio);
    }
    ctx.restore();
  }

  fit() {
    if (this.plot && this.box.clientWidth > 0) this.plot.setSize({ width: this.box.clientWidth, height: this.height });
  }

  // Another theme: the same lines in its colours.
  repaint() {
    if (!this.plot) return;
    this.build(this.plot.data);
    this.showLatest();
  }
}
