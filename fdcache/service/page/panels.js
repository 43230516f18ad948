"use strict";
// The panels: each shows a part of the record that the service sends.

const WINDOW = 15; // seconds over which rates are taken; a twentieth of a recording

const hitsOf = (difference) => difference("device_hit_tokens") + difference("host_hit_tokens") + difference("storage_hit_tokens");

// What an endless cache would have found: the hits, and that share of the rest which the sample says was known.
const ceilingOf = (difference) => {
  const prompts = difference("prompt_tokens"), missed = difference("missed_estimated");
  if (!prompts) return null;
  const found = Math.min(hitsOf(difference) / prompts, 1);
  return Math.min(found + (missed ? ((1 - found) * difference("missed_known")) / missed : 0), 1);
};

// Half of a 95 % interval of the ceiling, if the sample is only a part of the missing blocks.
const errorOf = (difference) => {
  const prompts = difference("prompt_tokens"), sample = difference("missed_sample"), missed = difference("missed_estimated");
  if (!prompts || !sample || sample === missed) return 0;
  const known = difference("missed_known") / missed;
  return 1.96 * Math.sqrt((known * (1 - known)) / sample) * Math.max(1 - hitsOf(difference) / prompts, 0);
};

class Panels {
  constructor(rows) {
    this.rows = rows;
    this.charts = {
      hits: new Chart($("hits"), [
        { name: "storage", colour: "--storage", fill: true },
        { name: "host", colour: "--host", fill: true },
        { name: "device", colour: "--device", fill: true },
        { name: "endless cache", colour: "--ceiling", dash: true },
      ], format.share, 1, (value) => `${Math.round(100 * value)} %`),
      bandwidth: new Chart($("bandwidth"), [
        { name: "host → device", colour: "--host" },
        { name: "device → host", colour: "--device" },
        { name: "storage → host", colour: "--storage" },
        { name: "host → storage", colour: "--warm" },
        { name: "peers", colour: "--ceiling", dash: true },
      ], format.rate, null, format.rate, BINARY),
      evictions: new Chart($("evictions"), [
        { name: "stored", colour: "--host" },
        { name: "evicted from host", colour: "--warm" },
        { name: "evicted from storage", colour: "--storage" },
      ], format.each),
      queues: new Chart($("queues"), [
        { name: "read from storage", colour: "--storage" },
        { name: "written to storage", colour: "--host" },
        { name: "waiting to be written", colour: "--warm" },
      ], format.count),
    };
  }

  redraw() {
    for (const chart of Object.values(this.charts)) chart.draw();
    for (const chart of Object.values(this.charts)) chart.tell(null);
  }

  drawCurves(seconds) {
    const { rows, charts } = this, first = rows.first(seconds), times = rows.times(first);
    const window = this.isRecorded && times.length ? Math.min(WINDOW, (times[times.length - 1] - times[0]) / 20) : WINDOW;
    const rate = (name) => rows.over(first, window, (difference, spent) => difference(name) / spent);
    const share = (names) => rows.over(first, window, (difference) => {
      const prompts = difference("prompt_tokens");
      return prompts ? names.reduce((sum, name) => sum + difference(`${name}_hit_tokens`), 0) / prompts : null;
    });
    const device = share(["device"]), host = share(["host"]), storage = share(["storage"]);
    const stack = (...some) => some[0].map((value, i) => (value === null ? null : some.reduce((sum, each) => sum + each[i], 0)));
    const ceiling = rows.over(first, window, ceilingOf);
    charts.hits.update(times, [stack(device, host, storage), stack(device, host), device, ceiling], [storage, host, device, ceiling]);
    charts.bandwidth.update(times, ["host_to_device_bytes", "device_to_host_bytes", "storage_to_host_bytes", "host_to_storage_bytes", "peer_bytes"].map(rate));
    charts.evictions.update(times, ["stored_blocks", "evicted_blocks", "storage_evicted_blocks"].map(rate));
    charts.queues.update(times, ["storage_reading", "storage_writing", "storage_queued"].map((name) => rows.level(first, name)));
  }

  drawTiles(shown, seconds) {
    const { rows } = this, last = rows.length - 1, from = rows.first(seconds);
    const difference = (name) => (rows.length ? Math.max(rows.columns[name][last] - rows.columns[name][from], 0) : 0);
    const prompts = difference("prompt_tokens"), spent = rows.length ? rows.columns.time[last] - rows.columns.time[from] : 0;
    const hits = hitsOf(difference);
    const ceiling = ceilingOf(difference), error = errorOf(difference);
    const used = shown.host.ready.bytes + shown.host.writing.bytes, span = `last ${format.seconds(seconds)}`;
    const perSecond = (names) => (spent ? names.reduce((sum, name) => sum + difference(name), 0) / spent : 0);
    const tile = (name, value, note) => el("div", {}, el("dt", {}, name), el("dd", {}, el("b", {}, value), el("small", {}, note)));
    fill($("tiles"),
      tile("Hit rate", prompts ? format.share(hits / prompts) : "–", prompts ? `of ${format.count(prompts)} tokens, ${span}` : `no prompts, ${span}`),
      tile("Endless cache", ceiling === null ? "–" : format.share(ceiling), error ? `± ${(100 * error).toFixed(1)} %, by a sample` : "found at most"),
      tile("Host memory", format.share(shown.arena_bytes ? used / shown.arena_bytes : 0), `${format.bytes(used)} of ${format.bytes(shown.arena_bytes)}`),
      tile("Storage", shown.storage ? (shown.storage.capacity_blocks ? format.share(shown.storage.blocks / shown.storage.capacity_blocks) : shown.storage.state) : "none",
        shown.storage ? (shown.storage.bytes === null ? "shared with other services" : format.bytes(shown.storage.bytes)) : "host memory only"),
      tile("Loads", format.rate(perSecond(["host_to_device_bytes"])), "host → device"),
      tile("Evictions", format.each(perSecond(["evicted_blocks"])), "blocks of the host tier"),
      tile("Clients", format.count(shown.clients.length + shown.more_clients), shown.clients_lost ? `${shown.clients_lost} died since the start` : "engines registered"));
  }

  draw(shown) {
    fill($("tiers"), ...this.tiers(shown));
    const missed = Object.entries(shown.missed).filter(([, blocks]) => blocks).sort((a, b) => b[1] - a[1]);
    fill($("misses"), bars(missed.map(([reason, blocks]) => ({ name: format.words(reason), value: blocks, text: `${format.count(blocks)} blocks` })), "Nothing was missed yet."));
    fill($("clients"), this.clients(shown));
    fill($("storage"), ...this.storage(shown));
    fill($("hints"), ...this.hints(shown.hints));
    fill($("namespaces"), ...this.namespaces(shown));
  }

  tiers(shown) {
    const tier = (name, kind, total, parts, note) => el("div", { class: "tier" },
      el("div", { class: "bar" }, el("b", {}, name), el("span", { class: "spring" }), el("span", { class: "quiet" }, note)),
      el("div", { class: "stack", role: "img", "aria-label": parts.map((part) => `${part.name} ${format.bytes(part.bytes)}`).join(", ") },
        ...parts.filter((part) => total && part.bytes).map((part) => el("span", { class: `${kind} ${part.state}`, width: `${(100 * part.bytes) / total}%` }))),
      el("ul", { class: "legend" }, ...parts.map((part) => el("li", { class: kind }, el("span", { class: `swatch ${part.state}` }), part.name, " ", el("b", {}, part.blocks === undefined ? format.bytes(part.bytes) : `${format.count(part.blocks)} · ${format.bytes(part.bytes)}`)))));
    const { host, device, storage } = shown, found = [];
    if (device.blocks) {
      const each = device.bytes / device.blocks;
      found.push(tier("Device", "device", device.bytes, [
        { name: "used", state: "ready", blocks: shown.device_used, bytes: shown.device_used * each },
        { name: "free", state: "free", blocks: device.blocks - shown.device_used, bytes: (device.blocks - shown.device_used) * each },
      ], `${format.bytes(device.bytes)}, as engines say`));
    }
    const part = (name, state) => ({ name, state, ...host[state] });
    found.push(tier("Host", "host", shown.arena_bytes, [
      part("ready", "ready"), part("written", "writing"), part("free", "free"), { name: "unassigned", state: "unassigned", bytes: shown.free_bytes },
    ], format.bytes(shown.arena_bytes)));
    if (storage?.capacity_blocks) {
      const each = storage.blocks ? storage.bytes / storage.blocks : 0;
      found.push(tier("Storage", "storage", storage.capacity_blocks * each, [
        { name: "stored", state: "ready", blocks: storage.blocks, bytes: storage.blocks * each },
        { name: "bad slots", state: "writing", blocks: storage.quarantined, bytes: storage.quarantined * each },
        { name: "free", state: "free", blocks: storage.capacity_blocks - storage.blocks - storage.quarantined, bytes: (storage.capacity_blocks - storage.blocks - storage.quarantined) * each },
      ], each ? `${format.bytes(storage.capacity_blocks * each)}, ${storage.connector}` : storage.connector));
    } else if (storage) found.push(el("p", { class: "empty" }, `Storage: ${storage.connector}, shared with other services.`));
    return found;
  }

  clients(shown) {
    const shares = (its) => (Object.keys(its).length ? ["device", "host", "storage"].map((tier) => format.share(its[tier] ?? 0)).join(" · ") : "–");
    const rows = shown.clients.map((client) => [
      el("td", {}, client.name, " ", client.silent ? el("span", { class: "tag bad" }, "silent") : null),
      number(String(client.pid)), el("td", {}, el("code", {}, client.namespace.slice(0, 8))), number(String(client.ranks)),
      number(format.seconds(client.connected_seconds)), number(format.count(client.requests)),
      number(client.device_blocks ? `${format.count(client.device_used)} of ${format.count(client.device_blocks)}` : "–"),
      number(format.count(client.writable_slots)), number(format.count(client.pinned_runs)), number(format.count(client.queued_backups)),
      number(format.count(client.lookups)), number(format.count(client.stored)), number(shares(client.hit_shares)),
    ]);
    const found = table("Clients and what each holds", ["client", "pid", "namespace", "ranks", "since", "requests", "device blocks", "writable slots", "pinned runs", "backups queued", "look-ups", "stored", "hits device · host · storage"], rows, "No engine is registered.");
    return shown.more_clients ? el("div", {}, found, el("p", { class: "empty" }, `and ${shown.more_clients} more`)) : found;
  }

  storage(shown) {
    if (!shown.storage) return [el("p", { class: "empty" }, "This service has no storage tier: give --storage to fdcache serve.")];
    const rows = shown.storages.map((each) => [
      el("td", {}, el("code", {}, each.namespace.slice(0, 8))),
      el("td", {}, el("span", { class: `tag ${each.state === "ready" ? "good" : each.state === "off" ? "bad" : "warn"}` }, format.words(each.state))),
      number(each.blocks === null ? "–" : format.count(each.blocks)), number(each.capacity_blocks === null ? "–" : format.count(each.capacity_blocks)),
      number(each.totals ? format.bytes(each.totals.read_bytes) : "–"), number(each.totals ? format.bytes(each.totals.written_bytes) : "–"),
      number(each.totals ? format.count(each.totals.corrupt_blocks) : "–"), number(each.totals ? format.count(each.totals.errors + each.totals.timeouts) : "–"),
      number(format.count(each.quarantined)), el("td", {}, each.error ?? ""),
    ]);
    const { loading } = shown.storage;
    return [
      loading.active ? el("p", {}, `Loading the index: ${format.count(loading.done)} of ${format.count(loading.total)} slots.`) : null,
      table(`Storage: ${shown.storage.connector}`, ["namespace", "state", "blocks", "of", "read", "written", "corrupt", "errors", "bad slots", "last error"], rows, "No namespace has storage yet."),
    ];
  }

  hints(hints) {
    if (!hints.given) return [el("p", { class: "empty" }, "No hints were given.")];
    const row = (kind) => ([name, count]) => ({ name: format.words(name), value: count, text: format.count(count), kind });
    const counted = (some) => Object.entries(some).filter(([, count]) => count);
    const early = counted(hints.evicted_early);
    return [el("p", { class: "hint" }, `${format.count(hints.given)} given. What became of them:`), bars(counted(hints.outcomes).map(row("")), "Nothing yet."),
      early.length ? el("p", { class: "hint" }, "Evicted early, by reason:") : null, early.length ? bars(early.map(row("warm")), "") : null];
  }

  namespaces(shown) {
    const found = shown.namespaces.map((each) => el("div", { class: "namespace" },
      el("div", { class: "bar" }, el("b", {}, each.model), el("span", { class: "quiet" }, each.revision), el("code", {}, each.namespace), el("span", { class: "spring" }),
        el("span", { class: "quiet" }, `${format.count(each.ready)} blocks · ${format.bytes(each.bytes)} · ${each.ranks} ranks · ${each.block_size} tokens a block`)),
      table("Tenants with the most blocks", ["tenant", "blocks", "memory", "most blocks"], each.tenants.map((tenant) => [tenant.tenant, number(format.count(tenant.blocks)), number(format.bytes(tenant.bytes)), number(format.count(tenant.most_blocks))]), "No tenants.")));
    if (!found.length) return [el("p", { class: "empty" }, "No engine has registered yet.")];
    return shown.more_namespaces ? [...found, el("p", { class: "empty" }, `and ${shown.more_namespaces} more`)] : found;
  }
}

function drawSettings(config, filter) {
  const wanted = filter.trim().toLowerCase();
  const rows = Object.entries(config.settings)
    .filter(([name, each]) => (wanted ? `${name} ${each.text ?? ""}`.toLowerCase().includes(wanted) : each.origins.some((origin) => origin.source !== "default")))
    .map(([name, each]) => [el("td", {}, el("code", {}, name)), el("td", {}, each.text ?? "not set"), el("td", { class: "quiet" }, each.origins[0]?.place ?? "default")]);
  fill($("settings"), table(wanted ? "Settings that fit" : "Settings that were given; filter to see the others", ["variable", "value", "from"], rows, wanted ? "No setting fits." : "All settings have their defaults."));
}
