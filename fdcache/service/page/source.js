"use strict";
// Where the page has its data from: a running service, or the recording of a replay in the document itself.

const PATIENCE = 20000; // milliseconds without an update after which a connection counts as lost

const keyHeader = (key) => ({ Authorization: `Bearer ${key}` });

function canBeSent(key) {
  try {
    new Headers(keyHeader(key));
    return true;
  } catch {
    return false;
  }
}

class ServiceSource {
  // `told(shown)` for each update, `changed(state, text)` for the connection.
  constructor(told, changed) {
    this.told = told;
    this.changed = changed;
    this.row = 0;
    this.wait = 500;
    $("key-form").addEventListener("submit", (event) => {
      const sent = canBeSent($("key-text").value);
      $("key-refused").textContent = sent ? "" : "This key has a character that a request cannot carry; type or copy the key again.";
      if (sent) return;
      event.preventDefault();
      $("key-text").select();
    });
  }

  headers() {
    const key = sessionStorage.getItem("fdcache-key");
    return key && canBeSent(key) ? keyHeader(key) : {};
  }

  async ask(path, options = {}) {
    const answer = await fetch(path, { ...options, headers: { ...this.headers(), ...(options.headers ?? {}) }, cache: "no-store", credentials: "omit" });
    if (answer.ok) return answer;
    if (answer.status === 401) {
      await this.askKey();
      return this.ask(path, options);
    }
    const told = await answer.json().catch(() => ({}));
    throw new Error(typeof told.detail === "string" ? told.detail : told.detail?.map((each) => `${each.loc.slice(1).join(".")}: ${each.msg}`).join("; ") ?? `HTTP ${answer.status}`);
  }

  askKey() {
    this.asking ??= new Promise((resolve) => {
      this.changed("waits", "a key is needed");
      const dialog = $("key");
      dialog.addEventListener("cancel", (event) => event.preventDefault());
      dialog.addEventListener("close", () => {
        sessionStorage.setItem("fdcache-key", $("key-text").value);
        $("key-text").value = "";
        this.asking = null;
        resolve();
      }, { once: true });
      dialog.showModal();
    });
    return this.asking;
  }

  async json(path, options) {
    return (await this.ask(path, options)).json();
  }

  config() {
    return this.json("v1/config");
  }

  tree(limit) {
    return this.json(`v1/tree?limit=${limit}`);
  }

  block(hash) {
    return this.json(`v1/block?hash=${hash}`);
  }

  explain(prompt) {
    return this.json("v1/explain", { method: "POST", body: JSON.stringify(prompt), headers: { "Content-Type": "application/json" } });
  }

  async run() {
    for (;;) {
      try {
        await this.read();
        this.wait = 500;
      } catch (error) {
        this.changed("lost", `reconnecting: ${error.name === "AbortError" ? "no answer" : error.message}`);
        await new Promise((resolve) => setTimeout(resolve, this.wait));
        this.wait = Math.min(2 * this.wait, 5000);
      }
    }
  }

  // Reads one stream to its end; the service ends it after some seconds.
  async read() {
    const abort = new AbortController();
    let watch = setTimeout(() => abort.abort(), PATIENCE);
    try {
      const answer = await this.ask(`v1/page/events?row=${this.row}`, { signal: abort.signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "", updates = 0;
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        clearTimeout(watch);
        watch = setTimeout(() => abort.abort(), PATIENCE);
        text += part.value;
        for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
          this.take(JSON.parse(text.slice("data: ".length, end)));
          text = text.slice(end + 2);
          updates += 1;
        }
      }
      if (!updates) throw new Error("the service does not answer");
    } finally {
      clearTimeout(watch);
    }
  }

  take(shown) {
    this.row = shown.row;
    this.changed("live", "live");
    this.told(shown);
  }
}

class RecordedSource {
  constructor(recording, told, changed) {
    this.recording = recording;
    this.told = told;
    this.changed = changed;
  }

  async run() {
    this.changed("recorded", "recorded by fdcache replay");
    this.told(this.recording.shown);
  }

  async config() {
    return this.recording.config;
  }

  async tree(limit) {
    return this.recording.tree.slice(0, 20 * limit);
  }

  async block(hash) {
    const now = this.recording.shown.time;
    return this.recording.tree.filter((node) => node.hash.startsWith(hash)).map((node, slot) => ({ ...node, slot, stored_at: now - node.idle_seconds }));
  }

  async explain() {
    throw new Error("A recording finds blocks by their hash: tokens are hashed by a running service.");
  }
}
