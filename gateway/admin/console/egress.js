// What crosses between clusters, and whose it is.

import { h, panel, Table } from "./dom.js";
import { Chart } from "./charts.js";
import { byCluster, clustersOf, egress, kinds, linkName } from "./model.js";
import { bytes, clock, percent, rate, seconds } from "./numbers.js";

const SHOWN = 20;

export class Egress {
  constructor() {
    this.clusters = new Chart("Bytes/s that leave each cluster, of any kind", rate);
    this.links = new Chart("Bytes/s over each link, as its senders say", rate);
    this.queues = new Chart("Bytes that wait for each link, promised ones too", bytes);
    this.byKind = new Table("By kind", [
      { head: "kind", cell: (row) => row.kind, isHead: true },
      { head: "how many", cell: (row) => String(row.count), isNumber: true },
      { head: "bytes", cell: (row) => bytes(row.bytes), isNumber: true },
      { head: "failed", cell: (row) => String(row.failed), isNumber: true },
    ], { empty: "nothing has crossed" });
    this.latest = new Table("Moves, copies and probes", [
      { head: "ended", cell: (row) => clock(row.at), isHead: true },
      { head: "kind", cell: (row) => row.kind },
      { head: "from", cell: (row) => `${row.source} (${row.source_cluster})` },
      { head: "to", cell: (row) => `${row.destination} (${row.destination_cluster})` },
      { head: "bytes", cell: (row) => bytes(row.bytes), isNumber: true },
      { head: "took", cell: (row) => seconds(row.seconds), isNumber: true },
      { head: "outcome", cell: (row) => row.outcome },
      { head: "why", cell: (row) => row.why },
      { head: "what", cell: (row) => row.who },
    ], { empty: "none", isNamed: true });
    this.byLink = table("KVCache of requests, by link", "link");
    this.byOwner = table("The same by tenant, or class where there are none", "who");
    this.element = h(
      "div", { class: "columns" },
      panel("Egress by cluster", this.clusters.element), panel("Egress by link", this.links.element), panel("Queues", this.queues.element),
      panel("What crossed lately", this.byKind.element, this.byLink.element, this.byOwner.element,
        h("p", { class: "faint" }, "Of the last 500 requests, and of the last 500 moves, copies and probes.")),
      h("div", { class: "wide" }, panel("Moves, copies and probes", this.latest.element)),
    );
  }

  update(history) {
    const { latest, requests } = history;
    const clusters = byCluster(latest.nodes).map((each) => each.name);
    const links = latest.links.map((each) => linkName(each.status));
    this.clusters.set(clusters, history.columns(clusters.map((name) => (each) => each.clusters[name]?.egress)));
    if (links.length) {
      this.links.set(links, history.columns(links.map((name) => (each) => each.links[name]?.carried)));
      this.queues.set(links, history.columns(links.map((name) => (each) => {
        const link = each.links[name];
        return link && link.queued_bytes + link.promised_bytes;
      })));
    }
    const where = clustersOf(latest);
    this.byKind.update(kinds(requests, history.flows, where).map((row) => ({ key: row.kind, row })));
    this.latest.update(history.flows.slice(-SHOWN).reverse().map((row) => ({ key: String(row.seq), row })));
    this.byLink.update(egress(requests, where, (_, from, to) => `${from} → ${to}`).map((row) => ({ key: row.name, row })));
    this.byOwner.update(egress(requests, where, (each) => each.tenant || each.service_class).map((row) => ({ key: row.name, row })));
  }

  repaint() {
    for (const chart of [this.clusters, this.links, this.queues]) chart.repaint();
  }
}

function table(caption, head) {
  return new Table(caption, [
    { head, cell: (row) => row.name, isHead: true },
    { head: "requests", cell: (row) => String(row.requests), isNumber: true },
    { head: "bytes", cell: (row) => bytes(row.bytes), isNumber: true },
    { head: "saved by coding", cell: (row) => percent(row.saved / row.bytes), isNumber: true },
    { head: "predicted", cell: (row) => bytes(row.predicted), isNumber: true },
  ], { empty: "nothing has crossed" });
}
