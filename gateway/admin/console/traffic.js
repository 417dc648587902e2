// Where prefills go, why, and the threshold that parts them.

import { h, panel, Table } from "./dom.js";
import { Chart } from "./charts.js";
import { counted, split } from "./model.js";
import { Tenants } from "./tenants.js";
import { clock, count, percent, tokens } from "./numbers.js";

const WINDOW_S = 300;
const STEP_S = 5;

export class Traffic {
  constructor(feed) {
    this.rates = new Chart("Requests/s that ended, by where they were computed", count);
    this.threshold = new Chart("Threshold t in uncached tokens, and the plan's versions", count, {
      marks: () => this.history.plans.map((each) => ({ at: each.seen, label: `plan ${each.version}` })),
    });
    this.reasons = new Table("Reasons of the latest requests", [
      { head: "where", cell: (row) => row.target, isHead: true },
      { head: "why", cell: (row) => row.reason },
      { head: "requests", cell: (row) => String(row.count), isNumber: true },
      { head: "share", cell: (row) => percent(row.share), isNumber: true },
    ]);
    this.fallbacks = new Table("Fallbacks of the latest requests", [
      { head: "what did not work out", cell: (row) => row.reason, isHead: true },
      { head: "times", cell: (row) => String(row.count), isNumber: true },
    ], { empty: "none" });
    this.plans = new Table("Plans followed while this page was open", [
      { head: "version", cell: (row) => `${row.version}, term ${row.term}`, isHead: true },
      { head: "since", cell: (row) => clock(row.seen) },
      { head: "t", cell: (row) => tokens(row.plan.setting.threshold_tokens), isNumber: true },
      { head: "tie share", cell: (row) => percent(row.plan.setting.tie_share), isNumber: true },
      { head: "by", cell: (row) => row.plan.by },
      { head: "why", cell: (row) => row.plan.reason },
    ], { empty: "none: the threshold is that of the gateway's file" });
    this.tenants = new Tenants(feed);
    this.element = h(
      "div", { class: "columns" },
      panel("Route split", this.rates.element),
      panel("Threshold", this.threshold.element),
      panel("Why", this.reasons.element, this.fallbacks.element),
      panel("Plans", this.plans.element),
      this.tenants.element,
    );
  }

  update(history) {
    this.tenants.update();
    this.history = history;
    const { requests, latest } = history;
    const parts = split(requests, latest.at, WINDOW_S, STEP_S);
    this.rates.set(["remote", "local", "on the decode node", "refused or failed"], [parts.times, parts.remote, parts.local, parts.decode, parts.refused]);
    this.threshold.set(["t"], history.columns([(each) => each.threshold]));
    this.reasons.update(counted(requests, (each) => `${each.target} ${each.reason}`).map(([key, count]) => {
      const [target, reason] = key.split(" ");
      return { key, row: { target, reason, count, share: count / requests.length } };
    }));
    this.fallbacks.update(counted(requests.flatMap((each) => each.fallbacks), (each) => each).map(([reason, count]) => ({ key: reason, row: { reason, count } })));
    this.plans.update([...history.plans].reverse().map((row) => ({ key: `${row.term} ${row.version}`, row })));
  }

  repaint() {
    this.rates.repaint();
    this.threshold.repaint();
  }
}
