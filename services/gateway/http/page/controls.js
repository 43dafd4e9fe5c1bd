// The settings: what a request is made of.

import { request } from "./stream.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"];
const WITHOUT_DEFAULT = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1 };
const KEY = "galley.key";
const TOP = 3;

export class Controls {
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    this.fields.key.value = sessionStorage.getItem(KEY) ?? "";
    this.fields.key.addEventListener("change", () => sessionStorage.setItem(KEY, this.key));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get key() {
    return this.fields.key.value.trim();
  }

  /** Show the served model's limits and defaults; return its name. */
  async load() {
    const { data } = await (await request("v1/models", { key: this.key })).json();
    const { id, galley } = data[0];
    for (const [name, value] of Object.entries({ ...WITHOUT_DEFAULT, ...galley.default_sampling })) {
      const field = this.fields[name];
      if (field) field.placeholder = `${+value.toFixed(4)}, the model's`;
    }
    this.fields.k.max = galley.max_draft_tokens;
    const strategies = (galley.strategies ?? []).map((name) => new Option(name, name));
    this.fields.strategy.replaceChildren(this.fields.strategy.options[0], ...strategies);
    return id;
  }

  /** Return the body of a request for these turns; a seed is drawn here, so that it can be sent again. */
  body(turns) {
    const system = this.fields.system.value.trim();
    const seed = this.fields.seed.value.trim();
    const body = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
      return_rounds: true,
      seed: seed ? Number(seed) : crypto.getRandomValues(new Uint32Array(1))[0],
      speculation: { mode: this.fields.mode.value, strategy: this.fields.strategy.value },
    };
    if (this.fields.k.value) body.speculation.k = Number(this.fields.k.value);
    if (this.fields.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: TOP });
    for (const name of NUMBERS) if (this.fields[name].value) body[name] = Number(this.fields[name].value);
    return body;
  }

  /** Show the seed of an answer, if it is kept for the next. */
  keepSeed(seed) {
    if (this.fields.lock.checked) this.fields.seed.value = seed;
  }
}

/** Return `body` as a new request that can be repeated after a failure. */
export function repeatable(body) {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return { ...body, idempotency_key: Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("") };
}
