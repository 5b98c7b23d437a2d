"use strict";
// Sort tables by a column; search and filter long ones.
// Smaller tables need no search.
const FEW = 12;

function add(parent, tag, attributes, text) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return parent.appendChild(element);
}

// A long name is cut in its middle, and is whole in the title of its element.
function textOf(cell) {
  return (cell.firstElementChild?.title || cell.textContent).trim();
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
  const table = frame.querySelector("table"), body = table.tBodies[0];
  const all = [...body.rows].map((row) => ({ row, texts: [...row.cells].map(textOf) }));
  const show = frame.matches(".grid") && all.length >= FEW ? searched(frame, body, all) : () => {};
  sortBy(table, all, () => { body.append(...all.map((entry) => entry.row)); show(); });
}

function searched(frame, body, all) {
  const label = frame.getAttribute("aria-label"), number = (count) => count.toLocaleString("en");
  const wordAt = [...body.rows[0].cells].findIndex((cell) => cell.querySelector(".word"));
  const bar = document.createElement("div");
  bar.className = "filter";
  const search = add(bar, "input", { type: "search", placeholder: "Search", "aria-label": "Search in: " + label });
  const select = wordAt < 0 ? null : add(bar, "select", { "aria-label": "Show only, in: " + label });
  const status = add(bar, "span", { role: "status" });
  if (select) {
    const counts = new Map();
    for (const { texts } of all) counts.set(texts[wordAt], (counts.get(texts[wordAt]) ?? 0) + 1);
    add(select, "option", { value: "" }, "all");
    for (const [word, count] of counts) if (word) add(select, "option", { value: word }, `${word} (${number(count)})`);
  }
  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const entry of all) {
      entry.text ??= entry.texts.join("\n").toLowerCase();
      const fits = (!select?.value || entry.texts[wordAt] === select.value) && words.every((word) => entry.text.includes(word));
      entry.row.hidden = !fits;
      found += fits;
    }
    status.textContent = `${number(found)} of ${number(all.length)} rows`;
  }
  search.addEventListener("input", () => { frame.scrollTop = 0; show(); });
  select?.addEventListener("change", show);
  frame.before(bar);
  show();
  return show;
}

for (const { parentElement: frame } of document.querySelectorAll(".sorted")) {
  const details = frame.closest("details");
  if (!details || details.open) setUp(frame);
  else details.addEventListener("toggle", () => setUp(frame), { once: true });
}
