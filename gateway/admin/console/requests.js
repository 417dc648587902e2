// The latest requests, each as a waterfall of its steps.

import { h, panel, text } from "./dom.js";
import { phases, readyAt } from "./model.js";
import { bytes, clock, seconds, tokens } from "./numbers.js";

const SHOWN = 60;
const NAMES = {
  queue: "until it was routed", wait: "until prefill began", prefill: "prefill", transfer: "transfer beyond prefill",
  handover: "until the first token", decode: "decode",
};

export class Requests {
  constructor() {
    this.filter = h("input", { id: "filter", type: "search", placeholder: "id, node, reason, class …", oninput: () => this.update(this.history) });
    this.isHeld = h("input", { id: "hold", type: "checkbox", onchange: () => this.update(this.history) });
    this.isShort = h("input", { id: "short", type: "checkbox", onchange: () => this.update(this.history) });
    this.list = h("ol", { class: "waterfalls" });
    this.count = h("p", { class: "faint", role: "status" });
    this.lines = new Map();
    this.opened = null;
    const legend = h("ul", { class: "legend" }, Object.entries(NAMES).map(([name, label]) => h("li", {}, h("span", { class: `swatch phase-${name}`, "aria-hidden": "true" }), label)));
    this.element = panel(
      "Latest requests",
      h("div", { class: "controls" }, h("label", { for: "filter" }, "Only those with "), this.filter,
        h("label", {}, this.isShort, " to the first token"), h("label", {}, this.isHeld, " hold the list")),
      legend, this.count, this.list,
    );
  }

  update(history) {
    this.history = history;
    if (this.isHeld.checked && this.lines.size && ![this.filter, this.isShort].includes(document.activeElement)) return;
    const wanted = this.filter.value.trim().toLowerCase();
    const matches = (each) => !wanted || [each.id, each.prefill_node, each.decode_node, each.target, each.reason, each.service_class, each.error, String(each.status), ...each.fallbacks]
      .some((value) => value.toLowerCase().includes(wanted));
    const found = history.requests.filter(matches).slice(-SHOWN).reverse();
    const shownTo = (each) => (this.isShort.checked ? readyAt(each) : phases(each).end);
    const longest = Math.max(0.001, ...found.map(shownTo));
    text(this.count, `${found.length} of the last ${history.requests.length}, newest first; the whole width is ${seconds(longest)}.`);
    const lines = found.map((record) => {
      const known = this.lines.get(record.seq) ?? newLine(record, () => this.toggle(record));
      scale(known, longest);
      return known;
    });
    this.lines = new Map(found.map((record, i) => [record.seq, lines[i]]));
    const elements = lines.map((line) => line.element);
    if (elements.length !== this.list.children.length || elements.some((each, i) => this.list.children[i] !== each)) {
      const focused = document.activeElement;
      this.list.replaceChildren(...elements);
      if (focused && this.list.contains(focused)) focused.focus();
    }
  }

  toggle(record) {
    const line = this.lines.get(record.seq);
    const isOpen = line.more.hidden;
    line.more.hidden = !isOpen;
    line.button.setAttribute("aria-expanded", String(isOpen));
    if (isOpen && !line.more.childElementCount) line.more.append(facts(record));
  }
}

function newLine(record, toggle) {
  const { bars } = phases(record);
  const spans = bars.map((bar) => ({ bar, element: h("span", { class: `bar phase-${bar.name}` }) }));
  const told = bars.map((bar) => `${NAMES[bar.name]} ${seconds(bar.to - bar.from)}`).join(", ");
  const where = record.target === "none" ? record.error || "not routed" : `${record.target}, ${record.reason} · ${record.prefill_node} to ${record.decode_node}`;
  const computed = record.target === "none" ? "" : `, ${tokens(record.uncached)} computed`;
  const label = `${clock(record.at)}  ${tokens(record.total)} tokens${computed} · ${where}`;
  const end = record.status === 200 ? seconds(record.ttft_s ?? record.e2e_s) : String(record.status);
  const more = h("div", { hidden: true });
  const button = h(
    "button", { type: "button", class: `waterfall ${record.status === 200 ? "" : "failed"}`, "aria-expanded": "false", title: told, onclick: toggle },
    h("span", { class: "what" }, label), h("span", { class: "lane", role: "img", "aria-label": told }, spans.map((each) => each.element)), h("span", { class: "number" }, end),
  );
  return { element: h("li", {}, button, more), button, more, spans };
}

function scale(line, longest) {
  for (const { bar, element } of line.spans) {
    element.style.left = `${(100 * bar.from) / longest}%`;
    element.style.width = `max(1px, ${(100 * (bar.to - bar.from)) / longest}%)`;
  }
}

function facts(record) {
  const rows = [
    ["id", record.id], ["status", `${record.status}${record.error ? `: ${record.error}` : ""}`], ["class", record.service_class],
    ["plan", record.plan || "none"], ["threshold", tokens(record.threshold)],
    ["TTFT", `${seconds(record.ttft_s)}, predicted ${seconds(record.predicted_ttft_s)}`], ["whole", seconds(record.e2e_s)],
    ["cached", `${tokens(record.cached)} of ${tokens(record.total)}${record.fetched_from ? `, moved from ${record.fetched_from}` : ""}`],
    ["answer", `${tokens(record.output_tokens)} tokens`],
    ["sent", record.bytes ? `${bytes(record.bytes)} by ${record.link}, predicted ${bytes(record.predicted_bytes)}, ${bytes(record.bytes_saved)} saved by coding` : "nothing"],
    ["sent before prefill ended", record.overlap === null ? "–" : `${Math.round(100 * record.overlap)} %`],
    ["fallbacks", record.fallbacks.join(", ") || "none"],
  ];
  return h("dl", { class: "facts" }, rows.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, String(value)))));
}
