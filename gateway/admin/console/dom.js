// Elements without markup in strings: nothing that a node or a client says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function h(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function s(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

// A table whose rows stay the same elements from one update to the next: what has focus keeps it.
export class Table {
  // `columns`: {head, cell(row) → string or element, isNumber, isHead}; `isNamed`: a heading says the caption already
  constructor(caption, columns, { empty = "nothing yet", onPick = null, isNamed = false } = {}) {
    this.columns = columns;
    this.empty = empty;
    this.onPick = onPick;
    this.rows = new Map();
    this.body = h("tbody");
    this.element = h(
      "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h("table", {}, h("caption", { class: isNamed ? "unseen" : "" }, caption),
        h("thead", {}, h("tr", {}, columns.map((each) => h("th", { scope: "col", class: each.isNumber ? "number" : "" }, each.head)))),
        this.body),
    );
  }

  update(rows) {
    const seen = new Set();
    let place = null;
    for (const { key, row } of rows) {
      seen.add(key);
      let line = this.rows.get(key);
      if (!line) {
        line = this.newLine(key);
        this.rows.set(key, line);
      }
      line.row = row;
      this.columns.forEach((column, i) => setCell(line.cells[i], column.cell(row)));
      const next = place ? place.nextSibling : this.body.firstChild;
      if (next !== line.element) this.body.insertBefore(line.element, next);
      place = line.element;
    }
    for (const [key, line] of this.rows) {
      if (!seen.has(key)) {
        line.element.remove();
        this.rows.delete(key);
      }
    }
    if (!rows.length && !this.hint) {
      this.hint = h("tr", {}, h("td", { colspan: this.columns.length, class: "empty" }, this.empty));
      this.body.append(this.hint);
    } else if (rows.length && this.hint) {
      this.hint.remove();
      this.hint = null;
    }
  }

  newLine() {
    const cells = this.columns.map((each) => h(each.isHead ? "th" : "td", { class: each.isNumber ? "number" : "", scope: each.isHead ? "row" : null }));
    const line = { cells, row: null };
    const pick = () => this.onPick(line.row);
    const how = this.onPick
      ? { tabindex: "0", class: "pick", onclick: pick, onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); } } }
      : {};
    line.element = h("tr", how, cells);
    return line;
  }
}

function setCell(cell, value) {
  if (value instanceof Node) {
    if (cell.firstChild !== value) cell.replaceChildren(value);
  } else {
    text(cell, String(value));
  }
}

// A bar with its number beside it.
export function meter(share, label, kind = "ok") {
  const fill = h("span", { class: `fill ${kind}` });
  fill.style.width = `${Math.round(100 * Math.min(1, Math.max(0, share || 0)))}%`;
  return h("span", { class: "meter" }, h("span", { class: "track", "aria-hidden": "true" }, fill), h("span", { class: "reading" }, label));
}

export function panel(title, ...children) {
  return h("section", { class: "panel" }, h("h2", {}, title), children);
}

// A tile: one number and what it is.
export class Tile {
  constructor(label, title = "") {
    this.value = h("dd", {}, "–");
    this.element = h("div", { class: "tile", title }, h("dt", {}, label), this.value);
  }

  set(value) {
    text(this.value, value);
  }
}
