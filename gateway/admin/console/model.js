// What snapshots mean: pure functions of values, and the bounded history that the page keeps of them.

export const BUSY = 0.65;
export const FULL = 0.8;
export const KEPT_SAMPLES = 600; // ten minutes of one a second
export const KEPT_REQUESTS = 500;

export const linkName = (status) => `${status.source} → ${status.destination}`;

// What part of a line's budget a month at this rate costs; null without one.
export const spentRatio = (line) => (line.budget_per_month ? line.spend_per_month / line.budget_per_month : null);

// The level of a part of what a line can carry, or of its budget, by the line's own limits.
export function partLevel(line, ratio) {
  if (ratio >= line.critical_ratio) return "full";
  return ratio >= line.warn_ratio ? "busy" : "ok";
}

// A line's level in words, and what it comes from where that is not well.
export function lineLevel(line) {
  if (line.level === "ok") return "ok";
  return `${line.level}: ${(spentRatio(line) ?? 0) > line.used_ratio ? "spend" : "use"}`;
}

// How full a link is, as a word: colour never says it alone.
export function level(status) {
  if (status.drained) return "drained";
  if (!status.up) return "down";
  if (status.utilisation >= FULL) return "full";
  return status.utilisation >= BUSY ? "busy" : "ok";
}

// What a link carries now, all its senders together, in bytes/s.
export function carried(link) {
  return link.senders.reduce((sum, each) => sum + (each.available_bytes_per_s ?? each.budget_bytes_per_s ?? 0) * each.utilisation, 0);
}

export function breaker(link) {
  const states = link.senders.map((each) => each.breaker);
  for (const worst of ["open", "half_open", "unheard"]) {
    const count = states.filter((state) => state === worst).length;
    if (count) return count === states.length ? worst.replace("_", " ") : `${count} of ${states.length} ${worst.replace("_", " ")}`;
  }
  return states.length ? "closed" : "no sender";
}

export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

export function byCluster(nodes) {
  const clusters = new Map();
  for (const node of nodes) {
    if (!clusters.has(node.cluster)) clusters.set(node.cluster, { name: node.cluster, kind: node.kind, nodes: [] });
    clusters.get(node.cluster).nodes.push(node);
  }
  return [...clusters.values()].sort((a, b) => (a.kind === b.kind ? a.name.localeCompare(b.name) : a.kind === "prfaas" ? -1 : 1));
}

export class History {
  constructor() {
    this.forget();
  }

  forget() {
    this.boot = "";
    this.seq = 0;
    this.samples = [];
    this.requests = [];
    this.flows = [];
    this.plans = [];
    this.latest = null;
  }

  // Takes a snapshot in; byte counts of a sample are rates since the one before.
  add(snapshot) {
    if (this.boot && this.boot !== snapshot.boot) this.forget();
    const before = this.latest;
    this.boot = snapshot.boot;
    this.seq = snapshot.last_seq;
    this.latest = snapshot;
    for (const record of snapshot.requests) {
      record.at = snapshot.at - (snapshot.clock_s - record.arrived_s);
      this.requests.push(record);
    }
    this.requests.splice(0, this.requests.length - KEPT_REQUESTS);
    for (const flow of snapshot.flows) this.flows.push({ ...flow, at: snapshot.at - (snapshot.clock_s - flow.at_s) });
    this.flows.splice(0, this.flows.length - KEPT_REQUESTS);
    const plan = snapshot.plan;
    const known = this.plans.at(-1);
    if (plan && (!known || known.version !== plan.version || known.term !== plan.term)) {
      this.plans.push({ version: plan.version, term: plan.term, seen: snapshot.at, plan });
      this.plans.splice(0, this.plans.length - 100);
    }
    this.samples.push(sampleOf(snapshot, before));
    this.samples.splice(0, this.samples.length - KEPT_SAMPLES);
  }

  // Columns for a chart: times, then one list for each of `of`, which maps a sample to a number or null.
  columns(of) {
    return [this.samples.map((each) => each.at), ...of.map((one) => this.samples.map((each) => one(each) ?? null))];
  }

  // The share of the last `seconds` in which a link was at least as full as `limit`, or down.
  violation(name, limit = FULL, seconds = 300) {
    const from = (this.latest?.at ?? 0) - seconds;
    const seen = this.samples.filter((each) => each.at >= from && each.links[name]);
    if (!seen.length) return null;
    return seen.filter((each) => !each.links[name].up || each.links[name].utilisation >= limit).length / seen.length;
  }

  since(seconds) {
    const from = (this.latest?.at ?? 0) - seconds;
    return this.requests.filter((each) => each.at + (each.e2e_s ?? 0) >= from);
  }
}

export function sampleOf(snapshot, before) {
  const links = {};
  for (const link of snapshot.links) {
    const { up, utilisation, rtt_s, queued_bytes, promised_bytes } = link.status;
    links[linkName(link.status)] = {
      up, utilisation, rtt_s, queued_bytes, promised_bytes, carried: carried(link), loss: link.retransmit_ratio,
    };
  }
  const clusters = {};
  const earlier = new Map((before?.nodes ?? []).map((node) => [node.node, node]));
  const passed = before ? snapshot.at - before.at : 0;
  for (const node of snapshot.nodes) {
    const sum = (clusters[node.cluster] ??= { queued_tokens: 0, running: 0, waiting: 0, egress: before ? 0 : null });
    sum.queued_tokens += Math.max(node.queued_tokens, node.pending_tokens);
    sum.running += node.running;
    sum.waiting += node.waiting;
    const last = earlier.get(node.node);
    if (last && passed > 0 && node.egress_bytes >= last.egress_bytes) sum.egress += (node.egress_bytes - last.egress_bytes) / passed;
  }
  return {
    at: snapshot.at,
    threshold: snapshot.threshold_tokens,
    plan: snapshot.plan?.version ?? 0,
    inFlight: snapshot.in_flight,
    waiting: snapshot.waiting,
    links,
    clusters,
  };
}

// Requests that ended, per second, by where their prefill went; `step` seconds to a bin, of those that are over.
export function split(requests, until, seconds, step) {
  const bins = Math.ceil(seconds / step);
  const start = (Math.floor(until / step) - bins) * step;
  const times = Array.from({ length: bins }, (_, i) => start + i * step);
  const counts = { remote: times.map(() => 0), local: times.map(() => 0), decode: times.map(() => 0), refused: times.map(() => 0) };
  for (const each of requests) {
    const bin = Math.floor((each.at + (each.e2e_s ?? 0) - start) / step);
    if (bin < 0 || bin >= bins) continue;
    const kind = each.status !== 200 ? "refused" : each.target === "decode" ? "decode" : each.route;
    if (counts[kind]) counts[kind][bin] += 1 / step;
  }
  return { times, ...counts };
}

export function counted(requests, key) {
  const counts = new Map();
  for (const each of requests) counts.set(key(each), (counts.get(key(each)) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

// How a class was served: the share of its requests within each promise, and what was seen.
export function served(requests, service) {
  const mine = requests.filter((each) => each.service_class === service.name);
  const done = mine.filter((each) => each.status === 200);
  const ttfts = done.map((each) => each.ttft_s).filter((value) => value !== null);
  const tbts = done.map(tbt).filter((value) => value !== null);
  return {
    name: service.name,
    requests: mine.length,
    refused: mine.filter((each) => each.status === 429 || each.status === 503).length,
    ttft: ttfts,
    tbt: tbts,
    ttftKept: kept(ttfts, service.ttft_s),
    tbtKept: kept(tbts, service.tbt_s),
  };
}

export function tbt(record) {
  const { first_token: first, last_token: last } = record.timeline;
  if (!record.stream || first === undefined || last === undefined || record.output_tokens < 2) return null;
  return (last - first) / (record.output_tokens - 1);
}

function kept(values, promise) {
  if (promise === null || promise === undefined || !values.length) return null;
  return values.filter((value) => value <= promise).length / values.length;
}

// The phases of a request, in seconds after its arrival; those that overlap (prefill and transfer) are separate bars.
export function phases(record) {
  const line = record.timeline;
  const end = line.last_token ?? record.e2e_s ?? Math.max(0, ...Object.values(line));
  const found = [];
  const bar = (name, from, to) => {
    if (from !== undefined && to !== undefined && to >= from) found.push({ name, from, to });
  };
  bar("queue", 0, line.routed ?? line.first_token ?? end);
  bar("wait", line.routed, line.prefill_start ?? line.first_token);
  bar("prefill", line.prefill_start, line.prefill_end);
  bar("transfer", line.prefill_end, line.kv_ready);
  bar("decode", line.first_token, line.last_token);
  if (line.kv_ready !== undefined) bar(record.stream ? "handover" : "decode", line.kv_ready, line.first_token); // a whole answer has no first token
  return { bars: found.sort((a, b) => a.from - b.from), end };
}

// Until when a request was waited for before anything could be read: its first token, or the KVCache of an answer that came whole.
export function readyAt(record) {
  return (record.stream ? record.ttft_s : record.timeline.kv_ready) ?? record.timeline.routed ?? 0;
}

// KVCache bytes of requests that crossed between clusters, by whatever `key` names.
export function egress(requests, clusterOf, key) {
  const found = new Map();
  for (const each of requests) {
    const from = clusterOf.get(each.prefill_node);
    const to = clusterOf.get(each.decode_node);
    if (!each.bytes || !from || !to || from === to) continue;
    const name = key(each, from, to);
    const sum = found.get(name) ?? { name, requests: 0, bytes: 0, saved: 0, predicted: 0 };
    sum.requests += 1;
    sum.bytes += each.bytes;
    sum.saved += each.bytes_saved;
    sum.predicted += each.predicted_bytes;
    found.set(name, sum);
  }
  return [...found.values()].sort((a, b) => b.bytes - a.bytes);
}

// Everything that crossed, by kind: requests' KVCache, and the flows that are no request's.
export function kinds(requests, flows, clusterOf) {
  const [own] = egress(requests, clusterOf, () => "request");
  const found = new Map(own ? [["request", { kind: "request", count: own.requests, bytes: own.bytes, failed: 0 }]] : []);
  for (const flow of flows) {
    if (flow.source_cluster === flow.destination_cluster) continue;
    const sum = found.get(flow.kind) ?? { kind: flow.kind, count: 0, bytes: 0, failed: 0 };
    sum.count += 1;
    sum.bytes += flow.bytes;
    if (flow.outcome !== "ok") sum.failed += 1;
    found.set(flow.kind, sum);
  }
  return [...found.values()];
}

export const clustersOf = (snapshot) => new Map(snapshot.nodes.map((node) => [node.node, node.cluster]));

// Where everything is drawn: clusters that only prefill to the left (or on top), the others to the right, links between.
export function layout(snapshot, width) {
  const clusters = byCluster(snapshot.nodes);
  const remote = clusters.filter((each) => each.kind === "prfaas");
  const home = clusters.filter((each) => each.kind !== "prfaas");
  const isNarrow = width < 640;
  const isDense = snapshot.nodes.length > 24;
  const column = isNarrow ? width : Math.floor(width * (remote.length ? 0.36 : 1));
  const boxes = new Map();
  const place = (group, x, top) => {
    let y = top;
    for (const cluster of group) {
      const box = boxOf(cluster, x, y, column, isDense);
      boxes.set(cluster.name, box);
      y += box.height + 14;
    }
    return y - 14;
  };
  const pairs = snapshot.links.length;
  if (isNarrow) {
    const lower = place(remote, 0, 0);
    const gap = remote.length ? 28 + 24 * Math.max(1, pairs) : 0;
    const bottom = place(home, 0, Math.max(0, lower) + gap);
    return { isNarrow, boxes, width, height: Math.max(60, bottom), gapTop: lower, gap };
  }
  const left = place(remote, 0, 0);
  const right = place(home, remote.length ? width - column : 0, 0);
  const height = Math.max(60, left, right, 40 + 46 * pairs);
  centre([...boxes.values()].filter((box) => box.x === 0 && remote.length), left, height);
  centre([...boxes.values()].filter((box) => box.x > 0), right, height);
  return { isNarrow, boxes, width, height, labels: labelled(snapshot.links, boxes, height) };
}

// Links' labels one under the other, in the order in which their lines pass the middle.
function labelled(links, boxes, height) {
  const middle = (name) => {
    const box = boxes.get(name);
    return box ? box.y + box.height / 2 : 0;
  };
  const names = links.map(({ status }) => ({ name: linkName(status), y: middle(status.source) + middle(status.destination) }));
  names.sort((a, b) => a.y - b.y);
  if (names.length === 1) return new Map([[names[0].name, names[0].y / 2]]);
  const step = Math.min(70, height / Math.max(1, names.length));
  return new Map(names.map((each, i) => [each.name, height / 2 + (i - (names.length - 1) / 2) * step]));
}

function centre(boxes, bottom, height) {
  for (const box of boxes) {
    const by = (height - bottom) / 2;
    box.y += by;
    for (const cell of box.cells) cell.y += by;
  }
}

function boxOf(cluster, x, y, width, isDense) {
  const cellWidth = isDense ? 30 : 108;
  const cellHeight = isDense ? 26 : 40;
  const perRow = Math.max(1, Math.floor((width - 16) / (cellWidth + 6)));
  const rows = Math.ceil(cluster.nodes.length / perRow);
  const cells = cluster.nodes.map((node, i) => ({
    node: node.node,
    x: x + 10 + (i % perRow) * (cellWidth + 6),
    y: y + 30 + Math.floor(i / perRow) * (cellHeight + 6),
    width: cellWidth,
    height: cellHeight,
  }));
  return { name: cluster.name, kind: cluster.kind, isDense, x, y, width, height: 38 + rows * (cellHeight + 6), cells };
}
