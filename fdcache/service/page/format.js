"use strict";
// Elements and numbers. Text is only ever set as text: names of models, tenants and clients are not to be trusted.

const $ = (id) => document.getElementById(id);

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "width") node.style.width = value;
    else if (name in node && !name.startsWith("aria")) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined));
  return node;
}

function fill(node, ...children) {
  node.replaceChildren(...children.filter((each) => each !== null && each !== undefined));
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

const format = {
  bytes(value) {
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
      value /= 1024;
      unit += 1;
    }
    return `${value >= 100 || unit === 0 ? Math.round(value) : value.toPrecision(3)} ${UNITS[unit]}`;
  },
  count(value) {
    if (Math.abs(value) < 10000) return Number.isInteger(value) ? `${value}` : value.toFixed(value < 10 ? 1 : 0);
    return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
  },
  share: (value) => `${(100 * value).toFixed(value >= 0.9995 || value === 0 ? 0 : 1)} %`,
  rate: (value) => `${format.bytes(value)}/s`,
  each: (value) => `${format.count(value)}/s`,
  seconds(value) {
    if (value < 1) return `${Math.round(1000 * value)} ms`;
    if (value < 90) return `${Math.round(value)} s`;
    if (value < 5400) return `${Math.round(value / 60)} min`;
    return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
  },
  words: (name) => name.replaceAll("_", " "),
  hash: (text) => text.slice(0, 12),
};

function table(caption, titles, rows, empty) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const head = el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, column) => {
    const made = cell instanceof Node && cell.nodeName === "TD" ? cell : el("td", {}, cell);
    made.dataset.title = titles[column];
    return made;
  })));
  return el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, ...body));
}

const number = (text) => el("td", { class: "number" }, text);

function bars(rows, empty) {
  const most = Math.max(...rows.map((row) => row.value), 0);
  if (!most) return el("p", { class: "empty" }, empty);
  return el("ul", { class: "bars" }, ...rows.map((row) => el("li", {},
    el("span", { class: "name" }, row.name),
    el("span", { class: "value" }, row.text),
    el("span", { class: "track" }, el("span", { class: `fill ${row.kind || ""}`, width: `${(100 * row.value) / most}%` })))));
}
