// What crosses between clusters, and whose it is.

import { h, panel, Table } from "./dom.js";
import { Chart } from "./charts.js";
import { byCluster, clustersOf, egress, linkName } from "./model.js";
import { bytes, percent, rate } from "./numbers.js";

export class Egress {
  constructor() {
    this.clusters = new Chart("Bytes/s that leave each cluster, of any kind", rate);
    this.links = new Chart("Bytes/s over each link, as its senders say", rate);
    this.queues = new Chart("Bytes that wait for each link, promised ones too", bytes);
    this.byLink = table("By link", "link");
    this.byOwner = table("By tenant, or class where there are none", "who");
    this.element = h(
      "div", { class: "columns" },
      panel("Egress by cluster", this.clusters.element), panel("Egress by link", this.links.element), panel("Queues", this.queues.element),
      panel("KVCache of the latest requests", this.byLink.element, this.byOwner.element,
        h("p", { class: "faint" }, "Of requests that ended, up to 500. Moves, copies and probes are in “prfaas flows” and in the first chart.")),
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
