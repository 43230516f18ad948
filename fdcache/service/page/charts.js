"use strict";
// Curves over time, drawn by uPlot from rows of totals.

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB", time % 60 ? {} : { hour: "2-digit", minute: "2-digit" });

class Rows {
  // Totals by column, oldest first. A service that restarts begins them again.
  constructor() {
    this.columns = {};
    this.length = 0;
  }

  add(names, rows) {
    for (const name of names) this.columns[name] ??= [];
    for (const row of rows) {
      if (this.length && row[0] <= this.columns.time[this.length - 1]) continue;
      names.forEach((name, i) => this.columns[name].push(row[i]));
      this.length += 1;
    }
    const surplus = this.length - 2400;
    if (surplus > 600) {
      for (const name of names) this.columns[name].splice(0, surplus);
      this.length -= surplus;
    }
  }

  // First row that is not older than so many seconds.
  first(seconds) {
    const times = this.columns.time ?? [];
    const since = (times[this.length - 1] ?? 0) - seconds;
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] < since) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  times(first) {
    return (this.columns.time ?? []).slice(first);
  }

  // For each row from the first on: what `of(difference)` makes of the totals of the seconds before it.
  over(first, seconds, of) {
    const times = this.columns.time ?? [], found = [];
    let from = 0;
    for (let i = first; i < this.length; i += 1) {
      while (from + 1 < i && times[i] - times[from + 1] >= seconds) from += 1;
      found.push(i > from ? of((name) => Math.max(this.columns[name][i] - this.columns[name][from], 0), times[i] - times[from]) : null);
    }
    return found;
  }

  level(first, name) {
    return (this.columns[name] ?? []).slice(first);
  }

  last(name) {
    return this.length ? this.columns[name][this.length - 1] : 0;
  }
}

// Distances of an axis of bytes: 1, 2, 5, 10 ... of each unit.
const BINARY = UNITS.flatMap((_, unit) => [1, 2, 5, 10, 20, 50, 100, 200, 500].map((each) => each * 1024 ** unit));

class Chart {
  // `lines`: name, colour (a CSS variable), dash, fill. `text` writes a value; `most` is the top of a fixed scale.
  constructor(place, lines, text, most = null, mark = text, distances = undefined) {
    this.mark = mark;
    this.distances = distances;
    this.place = place;
    this.lines = lines;
    this.text = text;
    this.most = most;
    this.data = [[], ...lines.map(() => [])];
    this.values = lines.map(() => el("b", {}, "–"));
    this.legend = el("ul", { class: "legend" }, ...lines.map((line, i) => el("li", { class: line.colour.slice(2) },
      el("span", { class: line.dash ? "swatch dashed" : "swatch" }), line.name, " ", this.values[i])));
    this.canvas = el("div", { class: "plot", role: "img" });
    fill(place, this.canvas, this.legend);
    this.draw();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  draw() {
    this.plot?.destroy();
    const ink = style("--quiet"), grid = style("--grid"), font = `11px ${style("--font")}`;
    const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      width: Math.max(this.canvas.clientWidth, 160),
      height: 190,
      padding: [10, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      scales: { y: { range: (_, low, high) => [0, this.most ?? Math.max(high * 1.08, this.least ?? 1)] } },
      axes: [
        { ...axis, size: 28, space: 80, values: (_, ticks) => ticks.map(clock) },
        { ...axis, size: 66, space: 36, incrs: this.distances, values: (_, ticks) => ticks.map(this.mark) },
      ],
      series: [{}, ...this.lines.map((line) => ({
        stroke: style(line.colour),
        width: line.fill ? 1 : 1.75,
        dash: line.dash ? [5, 4] : undefined,
        fill: line.fill ? style(line.colour) : undefined,
        points: { show: false },
      }))],
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)] },
    }, this.data, this.canvas);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: 190 });
  }

  // `shown`: values to write, where the lines are stacked.
  update(times, columns, shown = columns) {
    this.data = [times, ...columns];
    this.shown = shown;
    this.plot.setData(this.data);
    this.tell(this.plot.cursor.idx);
  }

  tell(index) {
    const at = index ?? this.data[0].length - 1;
    this.lines.forEach((line, i) => {
      const value = this.shown?.[i]?.[at];
      this.values[i].textContent = value === null || value === undefined ? "–" : this.text(value);
    });
    this.canvas.setAttribute("aria-label", this.lines.map((line, i) => `${line.name}: ${this.values[i].textContent}`).join(", "));
  }
}
