"use strict";
// Search and filter for long tables. Without this script each table shows its first rows.
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

function setUp(frame) {
  const table = frame.querySelector("table"), body = table.tBodies[0], pattern = body.rows[0].cloneNode(true);
  const all = rowsOf(frame), label = frame.getAttribute("aria-label");
  if (all.length < FEW) return;
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
}

for (const frame of document.querySelectorAll(".grid")) {
  const details = frame.closest("details");
  if (!details || details.open) setUp(frame);
  else details.addEventListener("toggle", () => setUp(frame), { once: true });
}
