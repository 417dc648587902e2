// The page: asks for a snapshot every second, keeps the history, and hands both to the view that is shown.

import { Feed } from "./feed.js";
import { h, text } from "./dom.js";
import { System } from "./system.js";
import { Traffic } from "./traffic.js";
import { Nodes } from "./nodes.js";
import { Egress } from "./egress.js";
import { Requests } from "./requests.js";
import { Query } from "./query.js";
import { Plan } from "./plan.js";

const VIEWS = [
  ["system", "System", System],
  ["traffic", "Traffic", Traffic],
  ["nodes", "Nodes", Nodes],
  ["egress", "Egress", Egress],
  ["requests", "Requests", Requests],
  ["try", "Try", Query],
  ["plan", "Plan", Plan],
];
const THEMES = ["auto", "light", "dark"];

const at = (id) => document.getElementById(id);
const feed = new Feed({ onSnapshot, onFailure });
const views = new Map();
let shown = null;

function tab(name, label, number) {
  return h(
    "button",
    { id: `tab-${name}`, type: "button", role: "tab", "aria-controls": "view", "aria-selected": "false", tabindex: "-1",
      title: `${label} (key ${number})`, onclick: () => { location.hash = name; } },
    label,
  );
}

function show(name) {
  const known = VIEWS.find(([each]) => each === name) ?? VIEWS[0];
  const [wanted, , Kind] = known;
  if (!views.has(wanted)) views.set(wanted, new Kind(feed));
  shown = views.get(wanted);
  at("view").replaceChildren(shown.element);
  for (const [each] of VIEWS) {
    const isShown = each === wanted;
    at(`tab-${each}`).setAttribute("aria-selected", String(isShown));
    at(`tab-${each}`).tabIndex = isShown ? 0 : -1;
    if (isShown) at(`tab-${each}`).scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  at("view").setAttribute("aria-labelledby", `tab-${wanted}`);
  shown.shown?.();
  if (feed.history.latest) shown.update(feed.history);
}

function onSnapshot(history) {
  const snapshot = history.latest;
  at("alarm").hidden = true;
  document.body.classList.remove("stale");
  text(at("model"), (snapshot.models ?? []).map((each) => each.model).filter(Boolean).join(", ") || snapshot.model);
  const workers = Object.values(snapshot.workers).reduce((sum, count) => sum + count, 0);
  text(at("pulse"), `live${workers ? `, ${workers} workers` : ""}${snapshot.is_draining ? ", draining" : ""}`);
  shown?.update(history);
}

function onFailure(reason, since) {
  document.body.classList.add("stale");
  text(at("pulse"), "no answer");
  at("alarm").hidden = false;
  if (reason === "key") at("alarm").replaceChildren("You are not logged in any more. ", h("button", { type: "button", onclick: () => location.reload() }, "Log in again"));
  else at("alarm").replaceChildren(`The gateway does not answer since ${since}: ${reason}. What is shown is how it was then.`);
}

// Where operators have names, whose session this is, and its end.
async function offerLogout() {
  const who = await feed.get("prfaas/session").catch(() => null);
  at("logout").hidden = !who?.name;
  if (who?.name) at("logout").title = `${who.name}, ${who.role}`;
}

async function logOut() {
  await feed.call("prfaas/session", { method: "DELETE", headers: { "Content-Type": "application/json" } }).catch(() => null);
  location.reload();
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length]);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  text(at("theme"), `theme: ${name}`);
  at("theme").setAttribute("aria-label", `Theme: ${name}. Change it`);
  try {
    localStorage.setItem("theme", name);
  } catch {
    // A browser that keeps nothing forgets the theme.
  }
  for (const view of views.values()) view.repaint?.();
}

function rememberedTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  const number = Number(event.key);
  if (number >= 1 && number <= VIEWS.length) location.hash = VIEWS[number - 1][0];
  if (event.target.role === "tab" && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
    const now = VIEWS.findIndex(([name]) => event.target.id === `tab-${name}`);
    const next = VIEWS[(now + (event.key === "ArrowRight" ? 1 : VIEWS.length - 1)) % VIEWS.length][0];
    location.hash = next;
    at(`tab-${next}`).focus();
  }
}

at("tabs").append(...VIEWS.map(([name, label], i) => tab(name, label, i + 1)));
at("theme").addEventListener("click", nextTheme);
at("logout").addEventListener("click", logOut);
setTheme(THEMES.includes(rememberedTheme()) ? rememberedTheme() : "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme));
addEventListener("hashchange", () => show(location.hash.slice(1)));
addEventListener("keydown", onKey);
document.addEventListener("visibilitychange", () => feed.look());
show(location.hash.slice(1));
feed.start();
offerLogout();
