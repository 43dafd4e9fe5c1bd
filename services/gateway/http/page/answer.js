// One answer while it arrives: its tokens with their text, its rounds and its figures.

export class Answer {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.startedMs = now();
    this.tokens = []; // { id, fromDraft, text, logprob, top, atMs }
    this.text = "";
    this.usage = null;
    this.finishReason = "";
    this.seed = null;
    this.session = "";
    this.arrivals = []; // { atMs, from, to }: tokens that arrived together
    this.waiting = []; // tokens whose text has not arrived; text can be held back for a stop string
    this.unplaced = "";
    this.decoder = new TextDecoder();
  }

  /** Take one parsed event of the stream. */
  add(event) {
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices ?? [];
    if (!choice) return;
    const atMs = this.now() - this.startedMs;
    const from = this.tokens.length;
    (choice.token_ids ?? []).forEach((id, i) => this.#take(id, choice.from_draft[i], choice.logprobs?.content[i], atMs));
    if (this.tokens.length > from) this.arrivals.push({ atMs, from, to: this.tokens.length });
    this.#place(choice.delta?.content ?? "");
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
  }

  #take(id, fromDraft, entry, atMs) {
    const expected = entry && this.decoder.decode(new Uint8Array(entry.bytes), { stream: true });
    const token = { id, fromDraft, atMs, text: "", expected, logprob: entry?.logprob, top: entry?.top_logprobs ?? [] };
    this.tokens.push(token);
    this.waiting.push(token);
  }

  /** Give `text` to the tokens that wait for theirs; without known bytes, all of it to the first of them. */
  #place(text) {
    this.text += text;
    this.unplaced += text;
    while (this.waiting.length && this.waiting[0].expected !== undefined && this.unplaced.startsWith(this.waiting[0].expected)) {
      const token = this.waiting.shift();
      token.text = token.expected;
      this.unplaced = this.unplaced.slice(token.expected.length);
    }
    if (!this.unplaced || this.waiting[0]?.expected?.startsWith(this.unplaced)) return;
    const token = this.waiting[0] ?? this.tokens.at(-1);
    if (!token) return;
    token.text += this.unplaced;
    this.unplaced = "";
    this.waiting = [];
  }

  get accepted() {
    return this.tokens.filter((token) => token.fromDraft).length;
  }

  get firstMs() {
    return this.arrivals[0]?.atMs ?? 0;
  }

  /** Return tokens a second after the first arrival; 0 until there are two arrivals. */
  get rate() {
    const [first, last] = [this.arrivals[0], this.arrivals.at(-1)];
    return first === last ? 0 : ((this.tokens.length - first.to) * 1000) / (last.atMs - first.atMs || 1);
  }

  /** Return the steps of the target: each decides one token that the draft did not propose. */
  get steps() {
    return this.tokens.length - this.accepted;
  }
}

/** Compare two answers token by token: how many are equal, and the index of the first difference or -1. */
export function compare(one, other) {
  const shared = Math.min(one.tokens.length, other.tokens.length);
  let equal = 0;
  while (equal < shared && one.tokens[equal].id === other.tokens[equal].id) equal += 1;
  const differs = equal < shared || one.tokens.length !== other.tokens.length;
  return { equal, first: differs ? equal : -1 };
}
