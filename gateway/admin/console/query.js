// A request that is only explained, or really sent, and the path that it takes.

import { h, panel, Table } from "./dom.js";
import { Topology } from "./topology.js";
import { bytes, percent, rate, seconds, tokens } from "./numbers.js";

const TOKEN_IDS = 256;
const MOST_TOKENS = 1000000;

export class Query {
  constructor(feed) {
    this.feed = feed;
    this.topology = new Topology();
    this.lit = new Set();
    this.prompt = h("textarea", { id: "prompt", rows: "4", placeholder: "A prompt …" });
    this.tokens = h("input", { id: "tokens", type: "number", min: "0", max: String(MOST_TOKENS), placeholder: "or so many tokens that nobody has cached" });
    this.answer = h("input", { id: "answer", type: "number", min: "1", max: "4096", value: "16" });
    this.service = h("select", { id: "class" });
    this.tenant = h("select", { id: "tenant" });
    this.tenantLabel = h("label", { for: "tenant", hidden: true }, "Tenant");
    // Its key is the tenant's own, which nobody else can spell out: it stays in this page, and is sent with this request alone.
    this.key = h("input", { id: "key", type: "password", autocomplete: "off", placeholder: "to send it as this tenant", oninput: () => this.offer() });
    this.keyLabel = h("label", { for: "key", hidden: true }, "Its API key");
    this.send = h("button", { type: "button", onclick: () => this.act(() => this.really()) }, "Send it");
    this.result = h("div", { role: "status", "aria-live": "polite" });
    const explain = (event) => {
      event.preventDefault();
      this.act(() => this.explain());
    };
    this.prefills = new Table("Prefill candidates", [
      { head: "node", cell: (row) => `${row.is_chosen ? "→ " : ""}${row.node}`, isHead: true },
      { head: "cluster", cell: (row) => row.cluster },
      { head: "cached", cell: (row) => `${tokens(row.cached_tokens)}${row.fetch_from ? ` from ${row.fetch_from}` : ""}`, isNumber: true },
      { head: "queue", cell: (row) => (row.is_reachable ? seconds(row.queue_s) : "–"), isNumber: true },
      { head: "compute", cell: (row) => (row.is_reachable ? seconds(row.compute_s) : "–"), isNumber: true },
      { head: "price", cell: (row) => (row.is_reachable ? seconds(row.price_s) : "–"), isNumber: true },
      { head: "transfer", cell: (row) => (row.link_bytes ? seconds(row.transfer_s) : "–"), isNumber: true },
      { head: "TTFT", cell: (row) => (row.is_reachable ? seconds(Math.max(row.ttft_s, row.arrives_s)) : "–"), isNumber: true },
      { head: "why not", cell: (row) => row.why_not || "chosen" },
    ]);
    this.decodes = new Table("Decode candidates", [
      { head: "node", cell: (row) => `${row.is_chosen ? "→ " : ""}${row.node}`, isHead: true },
      { head: "cluster", cell: (row) => row.cluster },
      { head: "load", cell: (row) => `${row.running} + ${row.waiting} of ${row.max_running}`, isNumber: true },
      { head: "TBT", cell: (row) => seconds(row.tbt_s || null), isNumber: true },
      { head: "holds", cell: (row) => tokens(row.attention_tokens), isNumber: true },
      { head: "room", cell: (row) => tokens(row.room_tokens), isNumber: true },
      { head: "why not", cell: (row) => row.why_not || "chosen" },
    ]);
    this.links = new Table("Links as they were weighed", [
      { head: "link", cell: (row) => `${row.source} → ${row.destination}`, isHead: true },
      { head: "up", cell: (row) => (row.up ? "yes" : "no") },
      { head: "rate", cell: (row) => rate(row.rate_bytes_per_s), isNumber: true },
      { head: "used", cell: (row) => percent(row.utilisation), isNumber: true },
      { head: "backlog", cell: (row) => seconds(row.backlog_s), isNumber: true },
      { head: "pressure", cell: (row) => row.pressure.toFixed(2), isNumber: true },
      { head: "room for prefixes", cell: (row) => (row.is_scarce ? "no" : "yes") },
    ]);
    this.left = new Table("Left out", [
      { head: "node", cell: (row) => row.node, isHead: true },
      { head: "role", cell: (row) => `${row.role} of ${row.cluster}` },
      { head: "why", cell: (row) => row.why },
    ], { empty: "nobody" });
    this.tables = h("div", { hidden: true }, panel("Who was weighed", [this.prefills, this.decodes, this.links, this.left].map((each) => each.element)));
    this.element = h(
      "div", {},
      panel("A test request",
        h("form", { class: "controls tall", onsubmit: explain },
          h("label", { for: "prompt" }, "Prompt"), this.prompt,
          h("label", { for: "tokens" }, "Or tokens"), this.tokens,
          h("label", { for: "answer" }, "Answer, tokens"), this.answer,
          h("label", { for: "class" }, "Class"), this.service,
          this.tenantLabel, this.tenant,
          this.keyLabel, this.key,
          h("span", {}), h("span", {}, h("button", {}, "Explain"), " ", this.send)),
        this.result),
      panel("Its path", h("div", { class: "canvas" }, this.topology.element)),
      this.tables,
    );
  }

  update(history) {
    const snapshot = history.latest;
    this.snapshot = snapshot;
    this.tenant.hidden = this.tenantLabel.hidden = !snapshot.tenants.length;
    this.key.hidden = this.keyLabel.hidden = !snapshot.serves_clients || !snapshot.tenants.length;
    this.offer();
    if (snapshot.tenants.join() !== this.tenants) {
      this.tenants = snapshot.tenants.join();
      this.tenant.replaceChildren(...snapshot.tenants.map((name) => h("option", { value: name }, name)));
    }
    const names = snapshot.classes.map((each) => each.name);
    if (names.join() !== this.names) {
      this.names = names.join();
      this.service.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    }
    this.topology.update(snapshot, this.lit.size ? this.lit : null);
  }

  // An operator's key is no tenant's: where there are tenants, one's own is needed.
  offer() {
    const { serves_clients: serves, tenants } = this.snapshot;
    this.send.hidden = !serves || (tenants.length > 0 && !this.key.value);
  }

  body() {
    const count = Math.min(MOST_TOKENS, Number(this.tokens.value) || 0);
    const prompt = count ? Array.from({ length: count }, () => Math.floor(Math.random() * TOKEN_IDS)) : this.prompt.value || "Hello";
    return { model: this.snapshot.model, prompt, max_tokens: Number(this.answer.value) || 16 };
  }

  headers() {
    return this.service.value && this.service.value !== "default" ? { "x-prfaas-class": this.service.value } : {};
  }

  async act(what) {
    this.result.replaceChildren(h("p", {}, "asking …"));
    try {
      await what();
    } catch (error) {
      this.lit = new Set();
      this.result.replaceChildren(h("p", { class: "failed" }, error.message));
    }
    if (this.snapshot) this.topology.update(this.snapshot, this.lit.size ? this.lit : null);
  }

  async explain() {
    const found = await this.feed.post(`prfaas/explain${this.tenant.value ? `?tenant=${encodeURIComponent(this.tenant.value)}` : ""}`, this.body(), this.headers());
    const { decision, verdict } = found;
    const lines = [];
    if (decision) {
      const { route } = decision;
      lines.push(h("p", { class: "verdict" }, `Prefill on ${route.prefill_node ?? `${route.decode_node} itself`}, decode on ${route.decode_node}.`), h("p", {}, `${decision.words}.`));
      const sent = route.coded_bytes ? `, ${bytes(route.coded_bytes)} over a link` : "";
      lines.push(h("p", {}, `${tokens(found.num_tokens)} tokens, ${tokens(route.cached_tokens)} of them cached${sent}; first token predicted in ${seconds(decision.predicted_ttft_s)}.`));
      this.light(route.prefill_node, route.decode_node);
      this.prefills.update(decision.prefills.map((row) => ({ key: row.node, row })));
      this.decodes.update(decision.decodes.map((row) => ({ key: row.node, row })));
      this.links.update(decision.links.map((row) => ({ key: `${row.source} ${row.destination}`, row })));
    }
    if (!verdict.accepted) lines.push(h("p", { class: "failed" }, `It would be refused with ${verdict.status} (${verdict.code}): ${verdict.message}`));
    this.left.update(found.left_out.map((row) => ({ key: row.node, row })));
    this.tables.hidden = false;
    this.result.replaceChildren(...lines);
  }

  async really() {
    const id = `console-${crypto.randomUUID?.() ?? Math.random().toString(36).slice(2)}`;
    const began = performance.now();
    const headers = { "Content-Type": "application/json", "x-request-id": id, ...this.headers() };
    if (this.key.value) headers["x-api-key"] = this.key.value;
    const answer = { method: "POST", body: JSON.stringify(this.body()), headers };
    const found = await this.feed.call("v1/completions", answer, 120000);
    const took = (performance.now() - began) / 1000;
    const record = await this.recordOf(id);
    this.tables.hidden = true;
    const lines = [h("p", { class: "verdict" }, `Answered in ${seconds(took)}, as ${id}.`), h("pre", {}, found.choices?.[0]?.text ?? "")];
    if (record) {
      this.light(record.prefill_node, record.decode_node);
      lines.splice(1, 0, h("p", {}, `Prefill on ${record.prefill_node}, decode on ${record.decode_node} (${record.reason}); ${tokens(record.cached)} of ${tokens(record.total)} tokens cached, ${bytes(record.bytes)} sent.`));
    }
    this.result.replaceChildren(...lines);
  }

  // Its record comes with the next snapshots.
  async recordOf(id) {
    for (let tries = 0; tries < 10; tries += 1) {
      const found = this.feed.history.requests.find((each) => each.id === id);
      if (found) return found;
      await new Promise((go) => setTimeout(go, 500));
    }
    return null;
  }

  light(prefill, decode) {
    const where = new Map(this.snapshot.nodes.map((node) => [node.node, node.cluster]));
    this.lit = new Set([prefill, decode, `${where.get(prefill)} → ${where.get(decode)}`].filter(Boolean));
  }
}
