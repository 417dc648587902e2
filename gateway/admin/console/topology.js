// The system as a picture: clusters and their nodes, and the links between them, coloured by how full they are.

import { s, text } from "./dom.js";
import { carried, layout, level, linkName } from "./model.js";
import { percent, rate, seconds } from "./numbers.js";

const GLYPHS = { ready: "", down: "✕", draining: "↓", converting: "⇄", starting: "…", engine_down: "!", engine_silent: "!" };
const ROLES = { prefill: "P", decode: "D" };

export class Topology {
  // `onPick({node})` or `({link})` when somebody chooses one.
  constructor(onPick = () => {}) {
    this.onPick = onPick;
    this.made = "";
    this.parts = new Map();
    this.order = [];
    this.element = s("svg", { class: "topology", role: "group", "aria-label": "Clusters, nodes and links; arrow keys go from one to the next" });
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    this.resized = new ResizeObserver(() => this.latest && this.update(this.latest, this.lit));
    this.resized.observe(this.element);
  }

  // `lit`: names of the nodes and links on a request's path.
  update(snapshot, lit = null) {
    this.latest = snapshot;
    this.lit = lit;
    const width = Math.max(280, Math.floor(this.element.parentElement?.clientWidth ?? 800) - 2);
    const made = JSON.stringify([width, snapshot.nodes.map((node) => [node.node, node.cluster, node.kind]), snapshot.links.map((link) => linkName(link.status))]);
    if (made !== this.made) {
      this.build(snapshot, width);
      this.made = made;
    }
    for (const node of snapshot.nodes) this.paintNode(node, lit);
    for (const link of snapshot.links) this.paintLink(link, lit);
  }

  build(snapshot, width) {
    const focused = this.order.find((each) => each === document.activeElement)?.dataset.name;
    const plan = layout(snapshot, width);
    this.parts.clear();
    this.order = [];
    this.element.setAttribute("viewBox", `0 0 ${width} ${plan.height + 4}`);
    this.element.setAttribute("width", width);
    this.element.setAttribute("height", plan.height + 4);
    const ways = snapshot.links.map((link, i) => this.newLink(link, i, snapshot.links.length, plan)).filter(Boolean);
    const boxes = [...plan.boxes.values()].map((box) => this.newBox(box));
    this.element.replaceChildren(...ways.map((each) => each.line), ...boxes, ...ways.map((each) => each.tag));
    const first = this.order.find((each) => each.dataset.name === focused) ?? this.order[0];
    if (first) first.setAttribute("tabindex", "0");
    if (focused && first) first.focus();
  }

  newBox(box) {
    const cells = box.cells.map((cell) => this.newNode(cell, box.isDense));
    const kind = box.kind === "prfaas" ? "PrfaaS, prefill only" : "PD";
    return s(
      "g", {},
      s("rect", { class: "cluster", x: box.x + 1, y: box.y + 1, width: box.width - 2, height: box.height, rx: 8 }),
      s("text", { class: "cluster-name", x: box.x + 12, y: box.y + 20 }, box.name, s("tspan", { class: "faint", dx: 8 }, kind)),
      cells,
    );
  }

  newNode({ node, x, y, width, height }, isDense) {
    const fill = s("rect", { class: "load", x, y, width: 0, height, rx: 4 });
    const name = s("text", { x: x + width / 2, y: y + (isDense ? height / 2 + 4 : 16), class: "node-name" });
    const what = isDense ? null : s("text", { x: x + width / 2, y: y + 31, class: "node-what" });
    const title = s("title");
    const element = this.pickable({ node }, node, s("rect", { class: "frame", x, y, width, height, rx: 4 }), fill, name, what, title);
    this.parts.set(`node ${node}`, { element, fill, name, what, title, width });
    return element;
  }

  newLink(link, number, count, plan) {
    const from = plan.boxes.get(link.status.source);
    const to = plan.boxes.get(link.status.destination);
    if (!from || !to) return null;
    const name = linkName(link.status);
    const spread = number - (count - 1) / 2;
    let path, x, y, place;
    if (plan.isNarrow) {
      x = plan.width / 2;
      y = plan.gapTop + 26 + number * 24;
      const offset = plan.width / 2 + spread * Math.min(24, plan.width / (count + 2));
      path = `M ${offset} ${from.y + from.height} L ${offset} ${to.y}`;
      place = { x: 4, width: plan.width - 8 };
    } else {
      const y0 = from.y + from.height / 2 + spread * 10;
      const y1 = to.y + to.height / 2 + spread * 10;
      const x0 = from.x + from.width;
      x = (x0 + to.x) / 2;
      y = plan.labels.get(name) ?? (y0 + y1) / 2;
      const bend = (to.x - x0) / 4;
      path = `M ${x0} ${y0} C ${x0 + bend} ${y0}, ${x - bend} ${y}, ${x} ${y} S ${to.x - bend} ${y1}, ${to.x} ${y1}`;
      const wide = Math.min(to.x - x0 - 40, count > 1 ? 240 : 190);
      place = { x: x - wide / 2, width: wide };
    }
    const line = s("path", { class: "way", d: path });
    const lines = plan.isNarrow ? 1 : 2;
    const isNamed = plan.isNarrow || count > 1;
    const label = [0, 1].slice(0, lines).map((i) => s("text", { class: i ? "link-more" : "link-name", x, y: y + (lines === 1 ? 4 : 16 * i - 4) }));
    const title = s("title");
    const height = lines === 1 ? 20 : 38;
    const tag = this.pickable({ link: name }, name, s("rect", { class: "frame", x: place.x, y: y - height / 2, width: place.width, height, rx: 6 }), ...label, title);
    tag.classList.add("link");
    this.parts.set(`link ${name}`, { element: tag, line, label, title, isNamed });
    return { line, tag };
  }

  pickable(choice, name, ...children) {
    const element = s("g", { class: "pick", role: "button", tabindex: "-1", "data-name": name, onclick: () => this.onPick(choice) }, children);
    this.order.push(element);
    return element;
  }

  paintNode(node, lit) {
    const part = this.parts.get(`node ${node.node}`);
    if (!part) return;
    const load = Math.min(1, node.slots ? Math.max(node.running + node.waiting, node.pending_requests) / node.slots : 0);
    part.fill.setAttribute("width", (part.width * load).toFixed(1));
    const role = ROLES[node.role] ?? "?";
    const glyph = GLYPHS[node.state] ?? "?";
    text(part.name, part.what ? node.node : `${role}${glyph}`);
    if (part.what) text(part.what, node.state === "ready" ? `${role} ${node.running} + ${node.waiting} of ${node.slots}` : `${role} ${glyph} ${node.state}`);
    const told = `${node.node}: ${node.role}, ${node.state}, ${node.running} running and ${node.waiting} waiting of ${node.slots}, ${node.queued_tokens} tokens queued`;
    part.element.setAttribute("class", `pick node ${node.role} ${node.state}${lit ? (lit.has(node.node) ? " lit" : " dim") : ""}`);
    part.element.setAttribute("aria-label", told);
    text(part.title, told);
  }

  paintLink(link, lit) {
    const { status } = link;
    const name = linkName(status);
    const part = this.parts.get(`link ${name}`);
    if (!part) return;
    const how = level(status);
    const isLit = lit ? (lit.has(name) ? " lit" : " dim") : "";
    part.line.setAttribute("class", `way ${how}${isLit}`);
    part.element.setAttribute("class", `pick link ${how}${isLit}`);
    const full = how === "down" || how === "drained" ? how : `${percent(status.utilisation)}${how === "ok" ? "" : ` ${how}`}`;
    const speed = rate(carried(link));
    const line = !part.isNamed || !part.label[1] ? `${full} · ${speed}` : full;
    text(part.label[0], part.isNamed ? `${name}: ${line}` : line);
    if (part.label[1]) text(part.label[1], `${part.isNamed ? `${speed} · ` : ""}RTT ${seconds(status.rtt_s)} · queue ${seconds(link.drain_s)}`);
    const told = `Link ${name}: ${how === "ok" ? "in use" : how}, ${percent(status.utilisation)} used, ${rate(carried(link))}, round trip ${seconds(status.rtt_s)}, queue ${seconds(link.drain_s)}`;
    part.element.setAttribute("aria-label", told);
    text(part.title, told);
  }

  onKey(event) {
    const now = this.order.indexOf(event.target);
    if (now < 0) return;
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -now, End: this.order.length - 1 - now };
    if (event.key in steps) {
      event.preventDefault();
      const next = this.order[(now + steps[event.key] + this.order.length) % this.order.length];
      event.target.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.target.dispatchEvent(new MouseEvent("click"));
    }
  }
}
