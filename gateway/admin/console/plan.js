// What the plan service recommends, beside what is in force, and the buttons that change it.

import { h, panel, Table, text } from "./dom.js";
import { clock, percent, rate, tokens } from "./numbers.js";

const EVERY_MS = 5000;

export class Plan {
  constructor(feed) {
    this.feed = feed;
    this.asked = 0;
    this.note = h("p", { role: "status" }, "asking the plan service …");
    this.compared = new Table("In force and recommended", [
      { head: "", cell: (row) => row.label, isHead: true },
      { head: "gateway now", cell: (row) => row.now, isNumber: true },
      { head: "in force", cell: (row) => row.force, isNumber: true },
      { head: "recommended", cell: (row) => row.wanted, isNumber: true },
    ]);
    this.gateways = new Table("Gateways", [
      { head: "gateway", cell: (row) => row.name, isHead: true },
      { head: "follows", cell: (row) => row.follows },
    ], { empty: "none known" });
    this.changes = new Table("Last changes", [
      { head: "when", cell: (row) => new Date(1000 * row.at).toLocaleString("en-GB"), isHead: true },
      { head: "what", cell: (row) => row.change },
      { head: "plan", cell: (row) => `${row.version}, term ${row.term}` },
      { head: "t", cell: (row) => `${row.before ? tokens(row.before.threshold_tokens) : "–"} → ${row.after ? tokens(row.after.threshold_tokens) : "–"}` },
      { head: "gain", cell: (row) => percent(row.gain, 1), isNumber: true },
      { head: "by", cell: (row) => row.by },
      { head: "why", cell: (row) => row.reason },
    ], { empty: "none" });
    this.buttons = {
      apply: this.button("apply", "Apply the recommendation"),
      rollback: this.button("rollback", "Roll back"),
      pause: this.button("pause", "Pause"),
      resume: this.button("resume", "Resume"),
    };
    this.sure = h("div", { class: "sure", role: "alertdialog", "aria-label": "Sure?", hidden: true });
    this.body = h("div", { hidden: true }, panel("Plan against recommendation", this.compared.element,
      h("p", { class: "controls" }, Object.values(this.buttons)), this.sure), panel("History", this.changes.element), panel("Who follows", this.gateways.element));
    this.element = h("div", {}, panel("Plan service", this.note), this.body);
  }

  button(change, label) {
    return h("button", { type: "button", onclick: () => this.ask(change, label) }, label);
  }

  shown() {
    this.asked = 0;
  }

  update(history) {
    this.snapshot = history.latest;
    if (performance.now() - this.asked < EVERY_MS && this.asked) return;
    this.asked = performance.now();
    this.look();
  }

  async look() {
    try {
      this.show(await this.feed.get("prfaas/plan"));
    } catch (error) {
      this.body.hidden = true;
      text(this.note, error.message);
    }
  }

  show({ configured, url, status, history }) {
    this.body.hidden = !configured;
    if (!configured) {
      text(this.note, `No plan service is configured: t = ${tokens(this.snapshot.threshold_tokens)} is that of the gateway's file. [gateway.plan] with a url, or [plan] in a topology, names one.`);
      return;
    }
    this.status = status;
    const { in_force: force, proposal, mode, paused, superseded, diagnosis } = status;
    text(this.note, `${url}: ${mode}${paused ? ", paused" : ""}${superseded ? ", another service leads" : ""}. ${diagnosis}`);
    const setting = force?.setting ?? status.found;
    const row = (label, now, inForce, wanted) => ({ key: label, row: { label, now, force: inForce, wanted } });
    this.compared.update([
      row("version", this.snapshot.plan ? String(this.snapshot.plan.version) : "none", force ? String(force.version) : "none yet", proposal ? String(proposal.version) : "none"),
      row("threshold t", tokens(this.snapshot.threshold_tokens), setting ? tokens(setting.threshold_tokens) : "–", proposal ? tokens(proposal.setting.threshold_tokens) : "–"),
      row("tie share", percent(this.snapshot.tie_share), setting ? percent(setting.tie_share) : "–", proposal ? percent(proposal.setting.tie_share) : "–"),
      row("roles at home", this.rolesNow(), this.roles(setting), this.roles(proposal?.setting)),
      row("gain in throughput", "", force ? percent(force.gain, 1) : "–", proposal ? percent(proposal.gain, 1) : "–"),
      row("made at", "", force ? clock(force.made_at) : "–", proposal ? clock(proposal.made_at) : "–"),
      row("why", "", force?.reason ?? "–", proposal?.reason ?? "no better setting is known"),
      row("load seen", "", status.seen ? `${status.seen.offered_req_per_s.toFixed(1)} requests/s` : "–", proposal ? `${proposal.seen.offered_req_per_s.toFixed(1)} requests/s` : "–"),
      row("egress seen", "", rate(status.seen?.egress_bytes_per_s), rate(proposal?.seen.egress_bytes_per_s)),
    ]);
    this.buttons.apply.disabled = !proposal;
    this.buttons.rollback.disabled = !force;
    this.buttons.pause.hidden = paused;
    this.buttons.resume.hidden = !paused;
    this.gateways.update(Object.entries(status.gateways).map(([name, follows]) => ({ key: name, row: { name, follows: String(follows) } })));
    this.changes.update([...history].reverse().map((each, i) => ({ key: `${each.at} ${each.change} ${each.version} ${i}`, row: each })));
  }

  rolesNow() {
    const home = this.snapshot.nodes.filter((node) => node.kind === "pd");
    return `${home.filter((node) => node.role === "prefill").length} prefill, ${home.filter((node) => node.role === "decode").length} decode`;
  }

  // The nodes that a setting would have do something else than they do.
  roles(setting) {
    if (!setting) return "–";
    const now = new Map(this.snapshot.nodes.map((node) => [node.node, node.role]));
    const others = Object.entries(setting.roles).filter(([node, role]) => now.get(node) !== role);
    return others.map(([node, role]) => `${node}: ${role}`).join(", ") || "as they are";
  }

  // Every change is said once more before it is made.
  ask(change, label) {
    const version = change === "apply" ? this.status.proposal?.version : undefined;
    const yes = h("button", { type: "button", onclick: () => this.change(change, version) }, "Yes, do");
    const no = h("button", { type: "button", onclick: () => { this.sure.hidden = true; this.buttons[change].focus(); } }, "No");
    const what = version === undefined ? label : `${label} (version ${version}, t = ${tokens(this.status.proposal.setting.threshold_tokens)})`;
    this.sure.replaceChildren(h("span", {}, `${what}? All gateways that follow the service will do so. `), yes, " ", no);
    this.sure.hidden = false;
    yes.focus();
  }

  async change(change, version) {
    this.sure.hidden = true;
    try {
      await this.feed.post("prfaas/plan", version === undefined ? { change } : { change, version });
      await this.look();
      text(this.note, `Done: ${change}. ${this.note.textContent}`);
    } catch (error) {
      text(this.note, `Not done: ${error.message}`);
    }
  }
}
