// What the console makes of snapshots, without a browser: run by test_console.py, `node --test`.

import assert from "node:assert/strict";
import test from "node:test";
import * as model from "./model.mjs";
import * as numbers from "./numbers.mjs";

const node = (name, fields = {}) => ({ node: name, cluster: "west", kind: "pd", role: "decode", state: "ready", running: 0, waiting: 0,
  queued_tokens: 0, pending_tokens: 0, egress_bytes: 0, ...fields });
const link = (fields = {}, senders = []) => ({ status: { source: "east", destination: "west", up: true, utilisation: 0, rtt_s: 0, queued_bytes: 0, promised_bytes: 0, ...fields }, senders, retransmit_ratio: 0 });
const snapshot = (fields = {}) => ({ boot: "a", at: 1000, clock_s: 50, last_seq: 0, nodes: [], links: [], requests: [], flows: [], plan: null, threshold_tokens: 10, in_flight: 0, waiting: 0, ...fields });
const record = (fields = {}) => ({ seq: 1, status: 200, arrived_s: 45, e2e_s: 2, route: "remote", target: "remote", service_class: "default", stream: true, output_tokens: 5,
  ttft_s: 1, prefill_node: "r0", decode_node: "d0", bytes: 100, bytes_saved: 20, predicted_bytes: 90, fallbacks: [], timeline: { routed: 0.1, prefill_start: 0.2, prefill_end: 0.7, kv_ready: 0.8, first_token: 1, last_token: 2 }, ...fields });

test("a link's level changes at 65 and at 80 per cent", () => {
  assert.deepEqual([0, 0.649, 0.65, 0.799, 0.8, 1.2].map((utilisation) => model.level({ up: true, utilisation })), ["ok", "ok", "busy", "busy", "full", "full"]);
  assert.equal(model.level({ up: false, utilisation: 0 }), "down");
  assert.equal(model.level({ up: false, drained: true, utilisation: 0 }), "drained");
});

test("a line says whether it is its use or its spend that is not well", () => {
  const line = { level: "ok", used_ratio: 0.1, spend_per_month: 500, budget_per_month: 1000, warn_ratio: 0.65, critical_ratio: 0.8 };
  assert.equal(model.lineLevel(line), "ok");
  assert.equal(model.lineLevel({ ...line, level: "critical", spend_per_month: 3650 }), "critical: spend");
  assert.equal(model.lineLevel({ ...line, level: "warn", used_ratio: 0.7 }), "warn: use");
  assert.equal(model.lineLevel({ ...line, level: "critical", used_ratio: 0.9, budget_per_month: 0 }), "critical: use");
  assert.equal(model.spentRatio({ ...line, budget_per_month: 0 }), null);
  assert.deepEqual([0.64, 0.65, 0.8, 3.65].map((ratio) => model.partLevel(line, ratio)), ["ok", "busy", "full", "full"]);
});

test("a breaker is that of the senders that are worst off", () => {
  const of = (...states) => model.breaker({ senders: states.map((breaker) => ({ breaker })) });
  assert.deepEqual([of("closed", "closed"), of("open", "open"), of("closed", "open"), of("half_open", "closed"), of()], ["closed", "open", "1 of 2 open", "1 of 2 half open", "no sender"]);
});

test("the history makes rates of counters, and is bounded", () => {
  const history = new model.History();
  for (let i = 0; i < model.KEPT_SAMPLES + 50; i += 1) {
    history.add(snapshot({ at: 1000 + 2 * i, nodes: [node("r0", { cluster: "east", egress_bytes: 500 * i })], requests: [record({ seq: i })] }));
  }
  assert.equal(history.samples.length, model.KEPT_SAMPLES);
  assert.equal(history.requests.length, model.KEPT_REQUESTS);
  assert.equal(history.samples.at(-1).clusters.east.egress, 250);
});

test("a gateway that was started again begins a new history", () => {
  const history = new model.History();
  history.add(snapshot({ last_seq: 7, requests: [record()] }));
  history.add(snapshot({ boot: "b", last_seq: 1 }));
  assert.deepEqual([history.seq, history.requests.length, history.samples.length], [1, 0, 1]);
});

test("a node that was started again has sent nothing, rather than less", () => {
  const before = snapshot({ nodes: [node("r0", { egress_bytes: 500 })] });
  assert.equal(model.sampleOf(snapshot({ at: 1001, nodes: [node("r0", { egress_bytes: 5 })] }), before).clusters.west.egress, 0);
});

test("times of requests are on the clock of the wall", () => {
  const history = new model.History();
  history.add(snapshot({ requests: [record()] }));
  assert.equal(history.requests[0].at, 995);
});

test("violation is the share of the time that a link was full or down", () => {
  const history = new model.History();
  const seen = [{}, { utilisation: 0.9 }, { up: false }, { utilisation: 0.7 }];
  seen.forEach((fields, i) => history.add(snapshot({ at: 1000 + i, links: [link(fields)] })));
  assert.equal(history.violation("east → west"), 0.5);
  assert.equal(history.violation("north → west"), null);
});

test("plans are marked where they change", () => {
  const history = new model.History();
  for (const version of [1, 1, 2]) history.add(snapshot({ plan: { version, term: 1 } }));
  assert.deepEqual(history.plans.map((each) => each.version), [1, 2]);
});

test("the route split counts what ended, by where it was computed", () => {
  const at = (ago, fields) => ({ ...record(fields), at: 1000 - ago });
  const parts = model.split([at(3, {}), at(3, { route: "local", target: "local" }), at(3, { target: "decode", route: "local" }), at(3, { status: 429 }), at(900, {})], 1000, 20, 5);
  assert.deepEqual([parts.remote, parts.local, parts.decode, parts.refused].map((bins) => bins.reduce((a, b) => a + b) * 5), [1, 1, 1, 1]);
  assert.equal(parts.times.length, 4);
});

test("promises are kept or not; what promises nothing has no share", () => {
  const found = model.served([record(), record({ ttft_s: 3 }), record({ status: 429, ttft_s: null }), record({ service_class: "other" })], { name: "default", ttft_s: 2, tbt_s: null });
  assert.deepEqual([found.requests, found.refused, found.ttftKept, found.tbtKept], [3, 1, 0.5, null]);
  assert.equal(found.tbt[0], 0.25);
});

test("a waterfall has the steps that were reached, in order", () => {
  const { bars, end } = model.phases(record());
  assert.deepEqual(bars.map((bar) => bar.name), ["queue", "wait", "prefill", "transfer", "handover", "decode"]);
  assert.equal(end, 2);
  const whole = record({ stream: false });
  assert.deepEqual(model.phases(whole).bars.map((bar) => bar.name), ["queue", "wait", "prefill", "transfer", "decode", "decode"]);
  assert.deepEqual([model.readyAt(record()), model.readyAt(whole)], [1, 0.8]);
  assert.deepEqual(model.phases(record({ timeline: {}, e2e_s: null, status: 429 })).end, 0);
});

test("egress is what crossed between clusters, summed by whatever is asked", () => {
  const where = new Map([["r0", "east"], ["d0", "west"], ["p0", "west"]]);
  const found = model.egress([record(), record(), record({ prefill_node: "p0" }), record({ prefill_node: "gone" })], where, (_, from, to) => `${from} → ${to}`);
  assert.deepEqual(found, [{ name: "east → west", requests: 2, bytes: 200, saved: 40, predicted: 180 }]);
});

test("what crossed is told by kind, with what failed", () => {
  const where = new Map([["r0", "east"], ["d0", "west"]]);
  const move = { kind: "move", source_cluster: "west", destination_cluster: "east", bytes: 7, outcome: "ok" };
  const found = model.kinds([record()], [move, { ...move, outcome: "late" }, { ...move, destination_cluster: "west" }], where);
  assert.deepEqual(found, [{ kind: "request", count: 1, bytes: 100, failed: 0 }, { kind: "move", count: 2, bytes: 14, failed: 1 }]);
});

test("sixty-four nodes and a phone's width have a place for everybody, beside each other", () => {
  const nodes = Array.from({ length: 64 }, (_, i) => node(`n${i}`, i < 32 ? { cluster: "east", kind: "prfaas", role: "prefill" } : {}));
  for (const width of [320, 1200]) {
    const plan = model.layout({ nodes, links: [link()] }, width);
    const cells = [...plan.boxes.values()].flatMap((box) => box.cells);
    assert.equal(cells.length, 64);
    for (const cell of cells) assert.ok(cell.x >= 0 && cell.x + cell.width <= width && cell.y + cell.height <= plan.height, JSON.stringify(cell));
    for (const a of cells) for (const b of cells) assert.ok(a === b || a.x + a.width <= b.x || b.x + b.width <= a.x || a.y + a.height <= b.y || b.y + b.height <= a.y);
  }
});

test("numbers are short and keep their units", () => {
  assert.deepEqual([numbers.bytes(0), numbers.bytes(999), numbers.bytes(1500), numbers.rate(12.5e9), numbers.rate(null)], ["0 B", "999 B", "1.50 kB", "12.5 GB/s", "–"]);
  assert.deepEqual([numbers.seconds(0), numbers.seconds(0.0021), numbers.seconds(0.25), numbers.seconds(3.456), numbers.seconds(null)], ["0", "2.10 ms", "250 ms", "3.46 s", "–"]);
  assert.deepEqual([numbers.pair(0.2, 0.5), numbers.pair(0.2, 2), numbers.pair(null, null)], ["200 / 500 ms", "200 ms / 2.00 s", "– / –"]);
  assert.equal(numbers.percent(NaN), "–");
});
