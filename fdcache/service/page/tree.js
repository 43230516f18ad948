"use strict";
// The hottest prefixes as a tree that opens. A run of blocks without branches is one row.

const CHILDREN_AT_ONCE = 50;

class PrefixTree {
  constructor(place) {
    this.place = place;
    this.open = new Set();
    this.shown = new Map();
    this.runs = new Map();
    this.list = el("ul", { class: "tree", role: "tree", "aria-label": "Hottest prefixes" });
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    this.list.addEventListener("click", (event) => this.onClick(event));
    fill(place, this.list);
  }

  update(nodes) {
    const children = new Map();
    for (const node of nodes) {
      const above = `${node.namespace} ${node.parent ?? ""}`;
      if (!children.has(above)) children.set(above, []);
      children.get(above).push(node);
    }
    // The hits of the hottest block in and below each: parents come first in the list, so from its end.
    this.hottest = new Map();
    for (const node of [...nodes].reverse()) {
      const hits = Math.max(node.hits, this.hottest.get(`${node.namespace} ${node.hash}`) ?? 0);
      const above = `${node.namespace} ${node.parent ?? ""}`;
      this.hottest.set(`${node.namespace} ${node.hash}`, hits);
      this.hottest.set(above, Math.max(hits, this.hottest.get(above) ?? 0));
    }
    for (const some of children.values()) some.sort((a, b) => this.heat(b) - this.heat(a) || a.idle_seconds - b.idle_seconds);
    this.children = children;
    this.count = nodes.length;
    this.namespaces = [...new Set(nodes.map((node) => node.namespace))];
    this.render();
  }

  heat(node) {
    return this.hottest.get(`${node.namespace} ${node.hash}`);
  }

  below(node) {
    return this.children.get(`${node.namespace} ${node.hash}`) ?? [];
  }

  // A block with those below it up to the next branch.
  run(node) {
    let last = node, blocks = 1;
    for (let below = this.below(last); below.length === 1; below = this.below(last)) {
      last = below[0];
      blocks += 1;
    }
    return { node, last, blocks, id: `${node.namespace} ${node.hash}` };
  }

  render() {
    const focus = document.activeElement?.closest?.("[role=treeitem]")?.dataset.id;
    if (!this.count) {
      fill(this.place, el("p", { class: "empty" }, "No blocks are cached yet."));
      return;
    }
    if (this.list.parentNode !== this.place) fill(this.place, this.list);
    this.runs.clear();
    this.most = Math.max(1, ...this.namespaces.map((name) => this.hottest.get(`${name} `)));
    fill(this.list, ...this.namespaces.flatMap((name) => this.rows(this.children.get(`${name} `) ?? [], 1, `${name} `)));
    const items = [...this.list.querySelectorAll("[role=treeitem]")];
    const chosen = items.find((item) => item.dataset.id === (focus ?? this.chosen)) ?? items[0];
    for (const item of items) item.tabIndex = item === chosen ? 0 : -1;
    if (focus) chosen?.focus({ preventScroll: true });
  }

  rows(nodes, level, above) {
    const limit = this.shown.get(above) ?? CHILDREN_AT_ONCE;
    const rows = nodes.slice(0, limit).map((node) => this.row(this.run(node), level));
    const rest = nodes.length - limit;
    if (rest > 0) rows.push(el("li", { role: "treeitem", class: "more", "aria-level": level, "data-id": `more ${above}`, tabIndex: -1 }, `show ${Math.min(rest, CHILDREN_AT_ONCE)} more of ${format.count(rest)}`));
    return rows;
  }

  row(run, level) {
    const below = this.below(run.last), isOpen = this.open.has(run.id);
    this.runs.set(run.id, run);
    const item = el("li", { role: "treeitem", "aria-level": level, "data-id": run.id, tabIndex: -1 });
    item.setAttribute("aria-label", `${format.hash(run.node.hash)}, ${run.blocks} blocks, ${this.heat(run.node)} hits`);
    if (below.length) item.setAttribute("aria-expanded", String(isOpen));
    item.append(el("div", { class: "row" },
      el("span", { class: "twist" }, below.length ? (isOpen ? "▾" : "▸") : ""),
      el("code", {}, format.hash(run.node.hash)),
      el("span", { class: "quiet" }, run.blocks === 1 ? "1 block" : `${format.count(run.blocks)} blocks`),
      below.length ? el("span", { class: "quiet" }, below.length === 1 ? "1 branch" : `${format.count(below.length)} branches`) : null,
      run.last.pins ? el("span", { class: "tag" }, "in use") : null,
      el("span", { class: "spring" }),
      el("span", { class: "heat", "aria-hidden": "true" }, el("span", { width: `${Math.max(2, (100 * Math.log1p(this.heat(run.node))) / Math.log1p(this.most))}%` })),
      el("span", { class: "hits" }, this.heat(run.node) === 1 ? "1 hit" : `${format.count(this.heat(run.node))} hits`),
      el("span", { class: "quiet idle" }, `${format.seconds(run.last.idle_seconds)} ago`)));
    if (below.length && isOpen) item.append(el("ul", { role: "group" }, ...this.rows(below, level + 1, run.id)));
    return item;
  }

  onClick(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    this.choose(item);
    this.toggle(item.dataset.id);
  }

  choose(item) {
    this.list.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    item.tabIndex = 0;
    this.chosen = item.dataset.id;
    item.focus({ preventScroll: false });
  }

  toggle(id, isOpen = !this.open.has(id)) {
    if (id.startsWith("more ")) {
      const above = id.slice(5);
      this.shown.set(above, (this.shown.get(above) ?? CHILDREN_AT_ONCE) + CHILDREN_AT_ONCE);
    } else if (isOpen) this.open.add(id);
    else this.open.delete(id);
    this.render();
  }

  onKey(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
    const items = [...this.list.querySelectorAll("[role=treeitem]")], at = items.indexOf(item);
    const expanded = item.getAttribute("aria-expanded");
    const go = (to) => to && this.choose(to);
    const keys = {
      ArrowDown: () => go(items[at + 1]),
      ArrowUp: () => go(items[at - 1]),
      Home: () => go(items[0]),
      End: () => go(items[items.length - 1]),
      ArrowRight: () => (expanded === "false" ? this.toggle(item.dataset.id, true) : expanded === "true" && go(items[at + 1])),
      ArrowLeft: () => (expanded === "true" ? this.toggle(item.dataset.id, false) : go(item.parentNode.closest("[role=treeitem]"))),
      Enter: () => this.toggle(item.dataset.id),
      " ": () => this.toggle(item.dataset.id),
    };
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  }
}
