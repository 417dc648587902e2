// How everything stands now: numbers, the picture, and the links as a table.

import { h, meter, panel, Table, text, Tile } from "./dom.js";
import { Chart } from "./charts.js";
import { Topology } from "./topology.js";
import { breaker, carried, FULL, level, lineLevel, linkName, partLevel, quantile, spentRatio } from "./model.js";
import { bytes, count, pair, percent, rate, seconds, tokens } from "./numbers.js";

const LAST_S = 60;
const LINK_WORDS = "breaker: closed is in use, open has failed and is not. promised: bytes that are routed over the link and not queued there yet. "
  + "pressure: 0 not congested, 1 blocked. resent: the share that TCP sent again.";
const levelWord = { ok: "", busy: "≥ 65 %", full: "≥ 80 %", down: "down", drained: "drained" };

const partMeter = (line, ratio) => meter(ratio, percent(ratio), partLevel(line, ratio));

export class System {
  constructor(feed) {
    this.feed = feed;
    this.tiles = {
      flight: new Tile("in flight"),
      waiting: new Tile("in line"),
      rate: new Tile("requests/s", "that ended in the last minute"),
      remote: new Tile("remote", "share of the last minute's requests whose prefill went to a PrfaaS cluster"),
      ttft: new Tile("TTFT p50 / p90", "of the last minute"),
      refused: new Tile("refused", "in the last minute"),
      threshold: new Tile("threshold t", "uncached tokens; longer prompts go remote"),
      plan: new Tile("plan"),
    };
    this.topology = new Topology((choice) => this.pick(choice));
    this.picked = null;
    this.detail = h("div", { class: "detail", hidden: true });
    this.chart = null;
    this.links = new Table("Links", [
      { head: "link", cell: (row) => linkName(row.link.status), isHead: true },
      { head: "breaker", cell: (row) => (row.link.status.up ? breaker(row.link) : `${level(row.link.status)}, ${breaker(row.link)}`) },
      { head: "used", cell: (row) => meter(row.link.status.utilisation, `${percent(row.link.status.utilisation)} ${levelWord[level(row.link.status)]}`, level(row.link.status)) },
      { head: "carries", cell: (row) => rate(carried(row.link)), isNumber: true },
      { head: "can carry", cell: (row) => rate(row.link.status.available_bytes_per_s), isNumber: true },
      { head: "budget", cell: (row) => rate(row.link.status.budget_bytes_per_s), isNumber: true },
      { head: "queue", cell: (row) => `${bytes(row.link.status.queued_bytes)}, ${seconds(row.link.drain_s)}`, isNumber: true },
      { head: "promised", cell: (row) => bytes(row.link.status.promised_bytes), isNumber: true },
      { head: "RTT (least)", cell: (row) => `${seconds(row.link.status.rtt_s)} (${seconds(row.link.min_rtt_s)})`, isNumber: true },
      { head: "resent", cell: (row) => percent(row.link.retransmit_ratio, 2), isNumber: true },
      { head: "pressure", cell: (row) => row.link.pressure.toFixed(2), isNumber: true },
      { head: "≥ 80 % or down, 5 min", cell: (row) => percent(row.violation), isNumber: true },
    ], { empty: "no link: no PrfaaS node and decode node are connected", isNamed: true, onPick: (row) => this.pick({ link: linkName(row.link.status) }) });
    this.lines = new Table("Lines", [
      { head: "line", cell: (row) => row.name, isHead: true },
      { head: "ends", cell: (row) => linkName(row) },
      { head: "level", cell: (row) => lineLevel(row) },
      { head: "used", cell: (row) => partMeter(row, row.used_ratio) },
      { head: "carries", cell: (row) => rate(row.carried_bytes_per_s), isNumber: true },
      { head: "ours", cell: (row) => rate(row.rate_bytes_per_s), isNumber: true },
      { head: "a month", cell: (row) => count(row.spend_per_month), isNumber: true },
      { head: "budget", cell: (row) => (row.budget_per_month ? count(row.budget_per_month) : "–"), isNumber: true },
      { head: "spent", cell: (row) => (row.budget_per_month ? partMeter(row, spentRatio(row)) : "–") },
      { head: "shared with", cell: (row) => row.shared_by.join(", ") || "–" },
    ], { empty: "no line is described", isNamed: true });
    this.linesPanel = panel("Lines", this.lines.element);
    this.linesPanel.hidden = true;
    this.element = h(
      "div", {},
      h("dl", { class: "tiles" }, Object.values(this.tiles).map((tile) => tile.element)),
      panel("Clusters and links", h("div", { class: "canvas" }, this.topology.element), legend(), this.detail),
      panel("Links", this.links.element, h("p", { class: "faint" }, LINK_WORDS)),
      this.linesPanel,
    );
  }

  pick(choice) {
    this.picked = choice;
    this.chart = null;
    this.detail.hidden = false;
    this.update(this.history);
    this.detail.scrollIntoView({ block: "nearest" });
  }

  update(history) {
    this.history = history;
    const snapshot = history.latest;
    const last = history.since(LAST_S);
    const done = last.filter((each) => each.status === 200);
    const ttfts = done.map((each) => each.ttft_s).filter((value) => value !== null);
    const { tiles } = this;
    tiles.flight.set(`${snapshot.in_flight} of ${snapshot.max_in_flight}`);
    tiles.waiting.set(`${snapshot.waiting} of ${snapshot.max_waiting}`);
    tiles.rate.set((last.length / LAST_S).toFixed(last.length < 600 ? 1 : 0));
    tiles.remote.set(percent(done.filter((each) => each.route === "remote").length / done.length));
    tiles.ttft.set(pair(quantile(ttfts, 0.5), quantile(ttfts, 0.9)));
    tiles.refused.set(String(last.filter((each) => each.status === 429 || each.status === 503).length));
    tiles.threshold.set(tokens(snapshot.threshold_tokens));
    tiles.plan.set(snapshot.plan ? `${snapshot.plan.version} (${snapshot.plan.by})` : "none");
    this.topology.update(snapshot);
    this.links.update(snapshot.links.map((link) => ({
      key: linkName(link.status), row: { link, violation: history.violation(linkName(link.status), FULL) },
    })));
    const lines = snapshot.links.flatMap((link) => link.status.lines);
    this.lines.update(lines.map((line) => ({ key: line.name, row: line })));
    this.linesPanel.hidden = lines.length === 0;
    if (this.picked) this.showDetail(history);
  }

  showDetail(history) {
    const { node: name, link: way } = this.picked;
    const snapshot = history.latest;
    if (name) {
      const node = snapshot.nodes.find((each) => each.node === name);
      this.detail.replaceChildren(node ? nodeDetail(node) : h("p", {}, `${name} is not there any more.`));
      return;
    }
    const link = snapshot.links.find((each) => linkName(each.status) === way);
    if (!link) {
      this.detail.replaceChildren(h("p", {}, `${way} is not there any more.`));
      return;
    }
    if (!this.chart) {
      this.chart = new Chart(`${way}: used, of what it can carry`, (value) => percent(value), { max: 1 });
      this.senders = sendersTable();
      this.says = h("p", {});
      this.switch = h("button", { type: "button", onclick: () => this.ask() });
      this.sure = h("div", { class: "sure", role: "alertdialog", "aria-label": "Sure?", hidden: true });
      this.detail.replaceChildren(h("h3", {}, `Link ${way}`), this.says, h("p", {}, this.switch), this.sure, this.chart.element, this.senders.element);
    }
    const { status } = link;
    const lost = status.lost.map((pair) => pair.join(" to ")).join(", ");
    text(this.says, [
      status.drained ? "Drained: nothing new goes over it, either way." : status.up ? "In use." : "Down: long prompts stay at home.",
      status.coded_ratio < 1 ? `While it binds, coding makes ${percent(status.coded_ratio)} of what crosses.` : "",
      lost ? `Without a way: ${lost}.` : "",
    ].join(" "));
    text(this.switch, status.drained ? "Use it again" : "Drain it for maintenance");
    this.chart.set(["used"], history.columns([(each) => each.links[way]?.utilisation]));
    this.senders.update(link.senders.map((row) => ({ key: row.node, row })));
  }

  // A change is said once more before it is made.
  ask() {
    const link = this.history.latest.links.find((each) => linkName(each.status) === this.picked.link);
    const { source, destination, drained } = link.status;
    const close = () => {
      this.sure.hidden = true;
      this.switch.focus();
    };
    const yes = h("button", { type: "button", onclick: () => this.turn({ source, destination, drained: !drained }).finally(close) }, "Yes, do");
    const what = drained ? `Use ${linkName(link.status)} again?` : `Drain ${linkName(link.status)}? New prompts stay at home or take other links; what is under way goes on.`;
    this.sure.replaceChildren(h("span", {}, `${what} `), yes, " ", h("button", { type: "button", onclick: close }, "No"));
    this.sure.hidden = false;
    yes.focus();
  }

  async turn(wanted) {
    try {
      await this.feed.post("prfaas/links", wanted);
      this.feed.look();
    } catch (error) {
      text(this.says, `Not done: ${error.message}`);
    }
  }

  repaint() {
    this.chart?.repaint();
  }
}

function legend() {
  const entry = (kind, label) => h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), label);
  return h("ul", { class: "legend" }, entry("ok", "link below 65 %"), entry("busy", "from 65 %, thicker"), entry("full", "from 80 %, thickest"),
    entry("down", "down or drained, dashed"), entry("load", "a node's places that are taken"),
    h("li", {}, "P prefill, D decode: running + waiting of places"));
}

function sendersTable() {
  return new Table("Senders", [
    { head: "sender", cell: (row) => row.node, isHead: true },
    { head: "breaker", cell: (row) => row.breaker.replace("_", " ") },
    { head: "used", cell: (row) => percent(row.utilisation), isNumber: true },
    { head: "can send", cell: (row) => rate(row.available_bytes_per_s), isNumber: true },
    { head: "budget", cell: (row) => rate(row.budget_bytes_per_s), isNumber: true },
    { head: "queue", cell: (row) => bytes(row.queued_bytes), isNumber: true },
    { head: "RTT (least)", cell: (row) => `${seconds(row.rtt_s)} (${seconds(row.min_rtt_s)})`, isNumber: true },
    { head: "resent", cell: (row) => percent(row.retransmit_ratio, 2), isNumber: true },
    { head: "congested", cell: (row) => (row.congested ? "yes" : "no") },
  ]);
}

function nodeDetail(node) {
  const used = node.pages_total - node.pages_free - node.pages_evictable;
  const facts = [
    ["state", node.state], ["cluster", node.cluster], ["role", node.role], ["agent", node.agent],
    ["model", node.model || "–"],
    ["running + waiting", `${node.running} + ${node.waiting} of ${node.slots}`],
    ["tokens queued there", tokens(node.queued_tokens)], ["tokens that gateways sent", tokens(node.pending_tokens)],
    ["time spent on prompts", percent(node.prefill_share)], ["decode step", seconds(node.step_s)],
    ["pages in use / evictable / free", `${used} / ${node.pages_evictable} / ${node.pages_free}`],
    ["sent to other clusters", bytes(node.egress_bytes)], ["last report", `${seconds(node.age_s)} ago`],
  ];
  return h("div", {}, h("h3", {}, `Node ${node.node}`), h("dl", { class: "facts" }, facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))));
}
