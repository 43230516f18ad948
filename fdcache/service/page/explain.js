"use strict";
// The explain box: where each block of a prompt is, or when and why it left.

function readPrompt(text) {
  const words = text.trim().replace(/[[\](),;]+/g, " ").split(/\s+/).filter(Boolean);
  if (words.length === 1 && /^[0-9a-f]{4,64}$/i.test(words[0])) return { hash: words[0].toLowerCase() };
  if (words.length && words.every((word) => /^\d{1,10}$/.test(word))) return { tokens: words.map(Number) };
  throw new Error("Give token ids, such as 1, 2, 3, or one hash of at least 4 hexadecimal digits.");
}

function readLookahead() {
  const field = $("explain-lookahead");
  if (!field.checkValidity()) throw new Error("Lookahead: give a whole number from 0 to 64, the FDCACHE_LOOKAHEAD_TOKENS of the engines.");
  return Number(field.value);
}

// A block that only the devices of some engines have is in no tier of the service.
const tierOf = (block) => block.tier ?? (block.devices ? "device" : null);
const place = (tier) => el("span", { class: `tag ${tier ?? "bad"}` }, tier ?? "missing");
const left = (block) => [block.reason ? format.words(block.reason) : "", ago(block.left_at)].filter(Boolean).join(", ");
const onDevices = (block) => `of ${format.count(block.devices)} ${block.devices === 1 ? "engine" : "engines"}${left(block) ? `; left the host: ${left(block)}` : ""}`;
const ago = (when) => (when ? `${format.seconds(Math.max(Date.now() / 1000 - when, 0))} ago` : "");

function drawPath(found) {
  if (!found.blocks.length) return [el("p", { class: "empty" }, "The prompt is shorter than a block.")];
  const all = found.blocks.length, present = found.broken_at ?? all;
  const absent = found.blocks.findIndex((block) => tierOf(block) === null), reach = absent < 0 ? all : absent;
  const groups = [];
  for (const block of found.blocks) {
    const last = groups[groups.length - 1], tier = tierOf(block);
    const why = tier === "device" ? `device ${block.devices} ${block.reason}` : tier ?? block.reason;
    if (last && last.why === why) {
      last.blocks.push(block);
    } else groups.push({ why, tier, blocks: [block] });
  }
  const rows = groups.map((group) => {
    const { blocks, tier } = group, first = blocks[0], last = blocks[blocks.length - 1];
    const positions = blocks.length === 1 ? `${first.position}` : `${first.position}–${last.position}`;
    let detail = left(first);
    if (tier === "host") detail = `stored ${ago(first.stored_at)}, ${format.count(first.hits)} hits`;
    if (tier === "storage") detail = first.left_host_at ? `left the host ${ago(first.left_host_at)}` : "";
    if (tier === "device") detail = onDevices(first);
    return [number(positions), el("td", {}, place(tier)), el("td", {}, el("code", {}, format.hash(first.hash))), detail];
  });
  let answer = found.broken_at === null ? `All ${all} blocks are there.` : `${present} of ${all} blocks can be reused.`;
  if (reach > present) answer = `${reach} of ${all} blocks can be reused by an engine that has them on its device, ${present} by others.`;
  return [el("p", { class: "answer" }, answer), table("Blocks of the prompt", ["block", "where", "hash", "since, or why"], rows, "")];
}

function drawBlocks(blocks) {
  const rows = blocks.map((block) => [block, tierOf({ ...block, tier: block.slot !== undefined ? "host" : block.stored ? "storage" : null })]).map(([block, tier]) => [
    el("td", {}, el("code", {}, format.hash(block.hash))),
    el("td", {}, place(tier)),
    tier !== "host" ? (tier === "device" ? onDevices(block) : left(block)) : `block ${block.depth} of its path, stored ${ago(block.stored_at)}, ${format.count(block.hits)} hits`,
  ]);
  return [table("Blocks with this hash", ["hash", "where", "since, or why"], rows, "No such block is there, and none is known to have left.")];
}

class ExplainBox {
  constructor(source) {
    this.source = source;
    $("explain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.explain();
    });
    $("explain-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.explain();
    });
  }

  update(namespaces) {
    const select = $("explain-namespace"), names = namespaces.map((each) => each.namespace);
    if (names.join() === this.names) return;
    this.names = names.join();
    const chosen = select.value;
    fill(select, ...namespaces.map((each) => el("option", { value: each.namespace }, `${each.model} ${each.namespace.slice(0, 8)}`)));
    if (names.includes(chosen)) select.value = chosen;
  }

  async explain() {
    const place = $("explained");
    try {
      const asked = readPrompt($("explain-text").value);
      if (asked.hash) fill(place, ...drawBlocks(await this.source.block(asked.hash)));
      else fill(place, ...drawPath(await this.source.explain({ namespace: $("explain-namespace").value || null, tenant: $("explain-tenant").value || null, adapter: $("explain-adapter").value || null, lookahead: readLookahead(), tokens: asked.tokens })));
    } catch (error) {
      fill(place, el("p", { class: "answer bad" }, error.message));
    }
  }
}
