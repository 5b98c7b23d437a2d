"use strict";
// Sort tables by a column; search and filter long ones. Without this script each shows its first rows.
const SHOWN = 500;
// Smaller tables need no search.
const FEW = 12;

function add(parent, tag, attributes, text) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return parent.appendChild(element);
}

function content(cell) {
  return cell.firstElementChild ?? cell;
}

function fill(row, texts) {
  texts.forEach((text, at) => {
    const place = content(row.cells[at]);
    place.textContent = place.localName === "code" && text.length > 90 ? text.slice(0, 60) + "…" + text.slice(-29) : text;
    place.removeAttribute("title");
    place.removeAttribute("href");
    if (place.textContent !== text) place.title = text;
    if (place.classList.contains("word")) place.className = "word " + text;
  });
  return row;
}

function rowsOf(frame) {
  const rows = [...frame.querySelector("tbody").rows].map((row) => {
    const texts = [...row.cells].map((cell) => content(cell).title || content(cell).textContent);
    return { row, texts };
  });
  const rest = frame.nextElementSibling;
  if (rest?.matches("script.rest")) {
    const { texts, cells } = JSON.parse(rest.textContent), width = rows[0].texts.length;
    for (let at = 0; at < cells.length; at += width)
      rows.push({ row: null, texts: cells.slice(at, at + width).map((place) => texts[place]) });
  }
  return rows;
}

// The value of a cell in its column: a number with its unit, a ratio of speeds, or a text.
const UNITS = { us: 1e-6, ms: 1e-3, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };
const NUMBER = /^[<#+]?(-?[\d,]*\.?\d+(?:e[-+]?\d+)?) ?(us|ms|s|bytes|[KMGT]iB|%|x faster|x slower|times)?\*?$/;
function valueOf(text) {
  if (text === "no difference") return 1;
  const [, figure, unit] = NUMBER.exec(text) ?? [];
  if (figure === undefined) return text;
  const value = Number(figure.replaceAll(",", "")) * (UNITS[unit] ?? 1);
  return unit === "x slower" ? 1 / value : value;
}

// Numbers come first, then texts; empty cells are last in both directions.
function compare(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === "");
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
}

function sortBy(table, all, show) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      for (const entry of all) entry.value = valueOf(entry.texts[at]);
      all.sort((a, b) => compare(a.value, b.value, sign));
      show();
    });
  });
}

function setUp(frame) {
  const table = frame.querySelector("table"), all = rowsOf(frame);
  const isLong = frame.matches(".grid") && all.length >= FEW;
  sortBy(table, all, isLong ? searched(frame, table, all) : () => table.tBodies[0].append(...all.map((entry) => entry.row)));
}

function searched(frame, table, all) {
  const body = table.tBodies[0], pattern = body.rows[0].cloneNode(true), label = frame.getAttribute("aria-label");
  const wordAt = [...pattern.cells].findIndex((cell) => content(cell).classList.contains("word"));
  const bar = document.createElement("div");
  bar.className = "filter";
  const search = add(bar, "input", { type: "search", placeholder: "Search", "aria-label": "Search in: " + label });
  const select = wordAt < 0 ? null : add(bar, "select", { "aria-label": "Show only, in: " + label });
  const status = add(bar, "span", { role: "status" });
  const more = document.createElement("button");
  more.type = "button";
  if (select) {
    const counts = new Map();
    for (const { texts } of all) counts.set(texts[wordAt], (counts.get(texts[wordAt]) ?? 0) + 1);
    add(select, "option", { value: "" }, "all");
    for (const [word, count] of counts) if (word) add(select, "option", { value: word }, `${word} (${count.toLocaleString("en")})`);
  }
  let room = SHOWN;
  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = all.filter((entry) => {
      if (select?.value && entry.texts[wordAt] !== select.value) return false;
      entry.text ??= entry.texts.join("\n").toLowerCase();
      return words.every((word) => entry.text.includes(word));
    });
    const shown = found.slice(0, room);
    body.replaceChildren(...shown.map((entry) => (entry.row ??= fill(pattern.cloneNode(true), entry.texts))));
    const part = shown.length < found.length ? `, the first ${shown.length.toLocaleString("en")} shown` : "";
    status.textContent = `${found.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} rows${part}`;
    more.hidden = !part;
    more.textContent = `Show ${Math.min(SHOWN, found.length - shown.length).toLocaleString("en")} more`;
  }
  let waiting = 0;
  function changed() {
    clearTimeout(waiting);
    waiting = setTimeout(() => { room = SHOWN; frame.scrollTop = 0; show(); }, 80);
  }
  search.addEventListener("input", changed);
  select?.addEventListener("change", changed);
  more.addEventListener("click", () => { room += SHOWN; show(); });
  const note = frame.previousElementSibling;
  if (note?.matches(".cut")) note.remove();
  frame.before(bar);
  frame.after(more);
  show();
  return show;
}

for (const { parentElement: frame } of document.querySelectorAll(".sorted")) {
  const details = frame.closest("details");
  if (!details || details.open) setUp(frame);
  else details.addEventListener("toggle", () => setUp(frame), { once: true });
}
