// One answer while it arrives: its tokens with their text, its rounds and its figures.

const PLAIN_ROUNDS = 3; // fewer say too little of the time of a round without draft tokens

const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

/** Return how long a round took, in ms. */
export const roundMs = (round) => round.draft_ms + round.queue_ms + round.compute_ms + round.wire_ms;

export class Answer {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.startedMs = now();
    this.tokens = []; // { id, fromDraft, text, logprob, top, atMs }
    this.content = ""; // the text without the reasoning
    this.usage = null;
    this.finishReason = "";
    this.seed = null;
    this.session = "";
    this.firstMs = 0; // when the first tokens arrived, and how many they were
    this.firstCount = 0;
    this.lastMs = 0;
    this.rounds = []; // as the API describes them
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
    if (this.tokens.length > from) this.lastMs = atMs;
    if (!from && this.tokens.length) [this.firstMs, this.firstCount] = [atMs, this.tokens.length];
    this.rounds.push(...this.#shifted(choice.rounds ?? []));
    const { reasoning_content: reasoning = "", content = "" } = choice.delta ?? {};
    this.content += content;
    this.#place(reasoning + content);
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
  }

  /** Return rounds in the time of the first one; a resumed stream counts from its own first round. */
  #shifted(rounds) {
    if (rounds[0]?.at_ms === 0) this.offsetMs = this.rounds.length ? this.rounds.at(-1).at_ms + roundMs(this.rounds.at(-1)) : 0;
    return rounds.map((round) => ({ ...round, at_ms: round.at_ms + this.offsetMs }));
  }

  #take(id, fromDraft, entry, atMs) {
    const expected = entry && this.decoder.decode(new Uint8Array(entry.bytes), { stream: true });
    const token = { id, fromDraft, atMs, text: "", expected, logprob: entry?.logprob, top: entry?.top_logprobs ?? [] };
    this.tokens.push(token);
    this.waiting.push(token);
  }

  /** Give `text` to the tokens that wait for theirs; without known bytes, all of it to the first of them. */
  #place(text) {
    this.unplaced += text;
    this.#skip();
    while (this.waiting.length && this.waiting[0].expected !== undefined && this.unplaced.startsWith(this.waiting[0].expected)) {
      const token = this.waiting.shift();
      token.text = token.expected;
      this.unplaced = this.unplaced.slice(token.expected.length);
      this.#skip();
    }
    if (!this.unplaced || this.waiting[0]?.expected?.startsWith(this.unplaced)) return;
    const token = this.waiting[0] ?? this.tokens.at(-1);
    if (!token) return;
    token.text += this.unplaced;
    this.unplaced = "";
    this.waiting = [];
  }

  /** Let tokens wait no longer whose text the answer leaves out, such as the marks of its reasoning. */
  #skip() {
    const fits = ({ expected }) => expected && (this.unplaced.startsWith(expected) || expected.startsWith(this.unplaced));
    if (this.unplaced) this.waiting.splice(0, Math.max(0, this.waiting.findIndex(fits)));
  }

  /** Return tokens a second after the first arrival; 0 until there are two arrivals. */
  get rate() {
    const ms = this.lastMs - this.firstMs;
    return ms > 0 ? ((this.tokens.length - this.firstCount) * 1000) / ms : 0;
  }

  /** Return the share of verified draft tokens that were accepted; NaN if none was verified. */
  get acceptance() {
    return sum(this.rounds.map((round) => round.accepted)) / sum(this.rounds.map((round) => round.verified));
  }

  /**
   * Return how much faster than plain decoding the rounds were, and whether that is only the most to expect.
   * The factor is NaN if no draft token was verified.
   *
   * A plain round decides one token. Its time is the median of this answer's rounds without draft tokens; if
   * there are too few, a round with draft tokens counts as long as a plain one.
   */
  get speedup() {
    if (!this.rounds.some((round) => round.verified)) return { atMost: false, factor: NaN };
    const rounds = this.rounds.filter((round) => !round.reads_prompt);
    const tokens = sum(rounds.map((round) => round.confirmed));
    const plain = rounds.filter((round) => !round.verified).map(roundMs).sort((one, other) => one - other);
    const atMost = plain.length < PLAIN_ROUNDS;
    const times = atMost ? rounds.length : sum(rounds.map(roundMs)) / plain[plain.length >> 1];
    return { atMost, factor: tokens / times };
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
