// Which tenants have used the most tokens, over all gateways: asked for now and then, as it may be long to add up.

import { h, panel, Table, text } from "./dom.js";
import { clock, count, percent, tokens } from "./numbers.js";

const TOP = 20;
const EVERY_MS = 10000;

export class Tenants {
  constructor(feed) {
    this.feed = feed;
    this.nextAt = 0;
    this.note = h("p", { class: "faint" });
    this.table = new Table("Tenants", [
      { head: "tenant", cell: (row) => row.tenant, isHead: true },
      { head: "requests", cell: (row) => count(Object.values(row.requests).reduce((sum, each) => sum + each, 0)), isNumber: true },
      { head: "prompt tokens", cell: (row) => tokens(row.prompt_tokens), isNumber: true },
      { head: "of them cached", cell: (row) => percent(row.cached_tokens / row.prompt_tokens), isNumber: true },
      { head: "answer tokens", cell: (row) => tokens(row.completion_tokens), isNumber: true },
    ], { empty: "no tenant has used anything", isNamed: true });
    this.element = h("div", { class: "wide" }, panel("Tenants with the most tokens", this.note, this.table.element));
  }

  // Called with every snapshot.
  async update() {
    if (Date.now() < this.nextAt) return;
    this.nextAt = Date.now() + EVERY_MS;
    try {
      const report = await this.feed.get(`prfaas/usage?top=${TOP}`);
      text(this.note, note(report));
      this.table.update(report.data.map((row) => ({ key: row.tenant, row })));
    } catch (error) {
      text(this.note, `The gateway does not tell: ${error.message}. What is shown is how it was before.`);
    }
  }
}

function note(report) {
  if (report.gateways === undefined) return "Of this gateway, since it started.";
  const since = report.since_unix_s ? `, since ${clock(report.since_unix_s)}` : "";
  const frozen = report.frozen_since_unix_s ? `: others' counts stay as they were at ${clock(report.frozen_since_unix_s)}` : "";
  return `Of ${count(report.gateways)} gateways${since}${report.complete ? "" : `, not complete${frozen}`}.`;
}
