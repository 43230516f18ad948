"use strict";
// The page: it takes each update, and draws what is in sight.

const TREE_SECONDS = 30;

class Page {
  constructor() {
    this.rows = new Rows();
    this.panels = new Panels(this.rows);
    this.tree = new PrefixTree($("tree"));
    const recording = $("recording");
    this.panels.isRecorded = recording !== null;
    const told = (shown) => this.take(shown), changed = (state, text) => this.showLink(state, text);
    this.source = recording ? new RecordedSource(JSON.parse(recording.textContent), told, changed) : new ServiceSource(told, changed);
    this.explainBox = new ExplainBox(this.source);
    this.treeAt = 0;
    $("span").addEventListener("change", () => this.draw());
    $("theme").addEventListener("click", () => this.changeTheme());
    $("tree-refresh").addEventListener("click", () => this.drawTree());
    $("tree-limit").addEventListener("change", () => this.drawTree());
    $("settings-filter").addEventListener("input", () => this.drawSettings());
    document.addEventListener("visibilitychange", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.panels.redraw());
  }

  run() {
    this.source.run();
  }

  take(shown) {
    if (this.shown?.started !== shown.started) {
      this.rows = this.panels.rows = new Rows();
      this.treeAt = 0;
      this.config = null;
      this.loadConfig();
    }
    this.shown = shown;
    this.rows.add(shown.columns, shown.rows);
    this.draw();
  }

  draw() {
    const shown = this.shown;
    if (!shown || document.hidden) return;
    const state = $("state");
    state.textContent = shown.state;
    state.className = `pill ${shown.state}`;
    $("about").textContent = `${shown.version} · up ${format.seconds(shown.time - shown.started)}`;
    const seconds = Number($("span").value);
    this.panels.drawTiles(shown, Math.min(seconds, 300));
    this.panels.drawCurves(seconds);
    this.panels.draw(shown);
    this.explainBox.update(shown.namespaces);
    const isEmpty = !this.tree.count && shown.host.ready.blocks;
    if (performance.now() >= this.treeAt || (isEmpty && performance.now() >= this.treeAt - 1000 * (TREE_SECONDS - 2))) this.drawTree();
  }

  async drawTree() {
    this.treeAt = performance.now() + 1000 * TREE_SECONDS;
    try {
      this.tree.update(await this.source.tree(Number($("tree-limit").value)));
    } catch (error) {
      this.showLink("lost", error.message);
    }
  }

  async loadConfig() {
    try {
      this.config = await this.source.config();
      this.drawSettings();
    } catch (error) {
      this.showLink("lost", error.message);
    }
  }

  drawSettings() {
    if (this.config) drawSettings(this.config, $("settings-filter").value);
  }

  showLink(state, text) {
    const link = $("link");
    link.className = `link quiet ${state}`;
    if (link.textContent !== text) link.textContent = text;
    document.body.classList.toggle("lost", state === "lost");
  }

  changeTheme() {
    const isDark = style("--scheme") === "dark";
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("fdcache-theme", document.documentElement.dataset.theme);
    this.panels.redraw();
  }
}

document.documentElement.dataset.theme = localStorage.getItem("fdcache-theme") ?? "";
const page = new Page();
page.run();
