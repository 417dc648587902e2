// Asks the gateway: for snapshots again and again, one at a time, and for whatever a view wants to know.

import { History } from "./model.js";

const EVERY_MS = 1000;
const UNSEEN_MS = 10000; // while nobody looks at the page
const PATIENCE_MS = 8000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Feed {
  constructor({ onSnapshot, onFailure }) {
    this.history = new History();
    this.onSnapshot = onSnapshot;
    this.onFailure = onFailure;
    this.silentSince = null;
    this.timer = null;
    this.asking = false;
  }

  start() {
    this.look();
  }

  // Now, and then at the usual pace.
  look() {
    clearTimeout(this.timer);
    if (!this.asking) this.ask();
  }

  async ask() {
    this.asking = true;
    try {
      this.history.add(await this.get(`prfaas/console?since=${this.history.seq}`));
      this.silentSince = null;
      this.onSnapshot(this.history);
    } catch (error) {
      this.silentSince ??= new Date().toLocaleTimeString("en-GB");
      this.onFailure(error.status === 401 ? "key" : error.message, this.silentSince);
    } finally {
      this.asking = false;
      this.timer = setTimeout(() => this.ask(), document.hidden ? UNSEEN_MS : EVERY_MS);
    }
  }

  get(path) {
    return this.call(path, { method: "GET" });
  }

  post(path, body, headers = {}) {
    return this.call(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", ...headers } });
  }

  // The browser's session cookie says who asks.
  async call(path, options, patienceMs = PATIENCE_MS) {
    const answer = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(patienceMs) });
    const found = await answer.json().catch(() => null);
    if (!answer.ok) throw new Refused(answer.status, found?.error?.message ?? `status ${answer.status}`);
    return found;
  }
}
