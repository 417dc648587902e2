// Queues, promises and caches.

import { h, meter, panel, Table } from "./dom.js";
import { Chart } from "./charts.js";
import { byCluster, quantile, served } from "./model.js";
import { bytes, count, pair, percent, seconds, tokens } from "./numbers.js";

const BY_STATE = ["down", "engine_down", "engine_silent", "starting", "converting", "draining", "unknown", "ready"];

export class Nodes {
  constructor() {
    this.queues = new Chart("Tokens that wait to be computed, by cluster", count);
    this.running = new Chart("Requests that run or wait, by cluster", count);
    this.classes = new Table("Classes and their promises, latest requests", [
      { head: "class", cell: (row) => row.service.name, isHead: true },
      { head: "requests", cell: (row) => String(row.requests), isNumber: true },
      { head: "refused", cell: (row) => String(row.refused), isNumber: true },
      { head: "TTFT p50 / p90", cell: (row) => pair(quantile(row.ttft, 0.5), quantile(row.ttft, 0.9)), isNumber: true },
      { head: "promised", cell: (row) => seconds(row.service.ttft_s), isNumber: true },
      { head: "kept", cell: (row) => percent(row.ttftKept ?? NaN, 1), isNumber: true },
      { head: "TBT p50 / p90", cell: (row) => pair(quantile(row.tbt, 0.5), quantile(row.tbt, 0.9)), isNumber: true },
      { head: "promised", cell: (row) => seconds(row.service.tbt_s), isNumber: true },
      { head: "kept", cell: (row) => percent(row.tbtKept ?? NaN, 1), isNumber: true },
    ]);
    this.groups = new Table("KV cache groups: what the gateway knows to be cached anywhere", [
      { head: "group", cell: (row) => row.name, isHead: true },
      { head: "layers", cell: (row) => String(row.layers), isNumber: true },
      { head: "different blocks", cell: (row) => tokens(row.blocks), isNumber: true },
      { head: "of", cell: (row) => bytes(row.block_bytes), isNumber: true },
      { head: "together", cell: (row) => bytes(row.blocks * row.block_bytes), isNumber: true },
    ], { empty: "no node has said what it caches" });
    this.errors = new Table("How wrong predictions were (p90)", [
      { head: "of", cell: (row) => row.name, isHead: true },
      { head: "relative error", cell: (row) => percent(row.error), isNumber: true },
    ], { empty: "nothing has been predicted yet" });
    this.nodes = new Table("Nodes", [
      { head: "node", cell: (row) => row.node, isHead: true },
      { head: "cluster", cell: (row) => row.cluster },
      { head: "role", cell: (row) => row.role },
      { head: "model", cell: (row) => row.model || "–" },
      { head: "state", cell: (row) => row.state },
      { head: "running", cell: (row) => meter(row.slots ? row.running / row.slots : 0, `${row.running} of ${row.slots}`, "load") },
      { head: "waiting", cell: (row) => String(row.waiting), isNumber: true },
      { head: "tokens queued", cell: (row) => tokens(Math.max(row.queued_tokens, row.pending_tokens)), isNumber: true },
      { head: "step", cell: (row) => seconds(row.step_s || null), isNumber: true },
      { head: "prompts", cell: (row) => percent(row.prefill_share), isNumber: true },
      { head: "arena in use", cell: (row) => arena(row) },
      { head: "cache that may go", cell: (row) => (row.pages_total ? percent(row.pages_evictable / row.pages_total) : "–"), isNumber: true },
      { head: "heard of", cell: (row) => `${seconds(row.age_s)} ago`, isNumber: true },
    ], { empty: "no node has been reached", isNamed: true });
    this.models = new Table("Models", [
      { head: "model", cell: (row) => row.model || "not known yet", isHead: true },
      { head: "also called", cell: (row) => row.aliases.join(", ") || "–" },
      { head: "state", cell: (row) => (row.is_ready ? "served" : "no decode node ready") },
      { head: "nodes", cell: (row) => String(row.nodes), isNumber: true },
      { head: "revisions", cell: (row) => String(row.revisions), isNumber: true },
      { head: "waiting", cell: (row) => String(row.waiting), isNumber: true },
      { head: "threshold", cell: (row) => tokens(row.threshold_tokens), isNumber: true },
      { head: "plan", cell: (row) => (row.plan ? String(row.plan) : "none"), isNumber: true },
    ], { empty: "the gateway does not say" });
    this.registries = new Table("Where nodes are listed", [
      { head: "registry", cell: (row) => row.source, isHead: true },
      { head: "state", cell: (row) => (row.frozen_s ? `${row.state} for ${seconds(row.frozen_s)}` : row.state) },
      { head: "nodes", cell: (row) => String(row.members), isNumber: true },
      { head: "left out", cell: (row) => String(row.refused), isNumber: true },
      { head: "why", cell: (row) => [row.reason, ...row.problems].filter(Boolean).join("; ") },
    ], { empty: "the gateway does not say" });
    this.element = h(
      "div", { class: "columns" },
      panel("Queues", this.queues.element), panel("Requests", this.running.element),
      h("div", { class: "wide" }, panel("Promises", this.classes.element)),
      panel("Caches", this.groups.element), panel("Predictions", this.errors.element),
      h("div", { class: "wide" }, panel("Models", this.models.element)),
      h("div", { class: "wide" }, panel("Nodes", this.nodes.element)),
      h("div", { class: "wide" }, panel("Registries", this.registries.element)),
    );
  }

  update(history) {
    const { latest, requests } = history;
    const clusters = byCluster(latest.nodes).map((each) => each.name);
    this.queues.set(clusters, history.columns(clusters.map((name) => (each) => each.clusters[name]?.queued_tokens)));
    this.running.set(clusters, history.columns(clusters.map((name) => (each) => {
      const sum = each.clusters[name];
      return sum && sum.running + sum.waiting;
    })));
    this.classes.update(latest.classes.map((service) => ({ key: service.name, row: { service, ...served(requests, service) } })));
    this.groups.update(latest.groups.map((row) => ({ key: row.name, row })));
    this.errors.update(Object.entries(latest.errors).map(([name, error]) => ({ key: name, row: { name, error } })));
    this.models.update((latest.models ?? []).map((row) => ({ key: row.model, row })));
    this.registries.update((latest.registries ?? []).map((row) => ({ key: row.source, row })));
    const order = (node) => `${BY_STATE.indexOf(node.state)} ${node.cluster} ${node.role} ${node.node}`;
    this.nodes.update([...latest.nodes].sort((a, b) => order(a).localeCompare(order(b), "en", { numeric: true })).map((row) => ({ key: row.node, row })));
  }

  repaint() {
    this.queues.repaint();
    this.running.repaint();
  }
}

function arena(row) {
  if (!row.pages_total) return "–";
  const used = 1 - (row.pages_free + row.pages_evictable) / row.pages_total;
  return meter(used, percent(used), "load");
}
