// Draw an answer. All text reaches the page as text, never as markup.

/** Make an element; `text` is its text, other properties become attributes. */
export function make(tag, { text, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

const FIGURES = {
  tokens: ["Tokens", "Output tokens so far."],
  first: ["First token", "Time from the request to the first tokens, as this page saw it."],
  rate: ["Tokens/s", "Tokens a second after the first ones, as this page saw them arrive."],
  rounds: ["Rounds", "A round is one proposal of the draft and its verification by the target, which confirms at least one token."],
  acceptance: ["Acceptance", "Share of the verified draft tokens that the target agreed with."],
  speedup: [
    "Estimated speed-up",
    "Tokens × the median time of this answer's rounds without draft tokens ÷ the time of its rounds. With ≤: too few of these; " +
      "then tokens a round, the most to expect. Compare to measure it.",
  ],
};

/** The view of one answer; call `update` after each of its events. */
export class AnswerView {
  /** `onRounds` shows the rounds of the answer. */
  constructor(answer, title, onRounds) {
    this.answer = answer;
    this.spans = [];
    this.drawn = 0;
    this.tokens = make("div", { class: "tokens", role: "group", tabindex: "0", "aria-label": `${title}. Arrow keys move between tokens.` });
    this.values = {};
    const figures = make("dl", { class: "figures" });
    for (const [name, [label, meaning]] of Object.entries(FIGURES)) {
      this.values[name] = make("dd");
      figures.append(make("div", { tabindex: "0", "data-tip": meaning }, make("dt", { text: label }), this.values[name]));
    }
    this.note = make("p", { class: "note" });
    const rounds = make("button", { type: "button", class: "small", text: "Show its rounds" });
    rounds.addEventListener("click", onRounds);
    const foot = make("div", { class: "row" }, figures, rounds);
    this.element = make("section", { class: "answer", "aria-label": title }, make("h2", { text: title }), this.tokens, this.note, foot);
    this.tokens.addEventListener("keydown", (event) => this.#move(event));
  }

  update() {
    const { answer } = this;
    const ready = answer.finishReason ? answer.tokens.length : answer.tokens.length - answer.waiting.length;
    for (; this.drawn < ready; this.drawn += 1) this.#draw(answer.tokens[this.drawn], this.drawn);
    const last = this.spans.at(-1);
    if (last) last.textContent = last.token.text;
    this.#figures();
  }

  /** Say below the answer how it ended. */
  end(text) {
    this.note.textContent = text;
    this.update();
  }

  /** Mark the first token that differs from another answer; -1 marks none. */
  mark(index) {
    const at = this.spans.find((span) => span.index >= index);
    if (index >= 0) at?.classList.add("differs");
  }

  #draw(token, index) {
    if (!token.text) return;
    const span = make("span", { class: `token ${token.fromDraft ? "of-draft" : "of-target"}`, tabindex: "-1" });
    Object.assign(span, { token, index, tip: () => describe(token, index) });
    span.textContent = token.text;
    this.spans.push(span);
    this.tokens.append(span);
  }

  #figures() {
    const { answer, values } = this;
    const { atMost, factor } = answer.speedup;
    const known = (value, text) => (value > 0 || value === 0 ? text : "–");
    values.tokens.textContent = answer.tokens.length;
    values.first.textContent = known(answer.firstMs || NaN, `${Math.round(answer.firstMs)} ms`);
    values.rate.textContent = known(answer.rate || NaN, answer.rate.toFixed(1));
    values.rounds.textContent = answer.rounds.length;
    values.acceptance.textContent = known(answer.acceptance, `${Math.round(answer.acceptance * 100)} %`);
    values.speedup.textContent = known(factor, `${atMost ? "≤ " : ""}${factor.toFixed(2)}×`);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !this.spans.length) return;
    event.preventDefault();
    const at = this.spans.indexOf(document.activeElement);
    this.spans[Math.min(this.spans.length - 1, Math.max(0, at + step))].focus();
  }
}

function describe(token, index) {
  const origin = token.fromDraft ? "proposed by the draft" : "decided by the target";
  const lines = [`Token ${index}, id ${token.id}: ${origin}`];
  if (token.logprob !== undefined) lines.push(`${chance(token.logprob)} (logprob ${token.logprob.toFixed(3)})`);
  for (const { token: text, logprob } of token.top) lines.push(`${chance(logprob)}  ${JSON.stringify(text)}`);
  return lines.join("\n");
}

function chance(logprob) {
  return `${(Math.exp(logprob) * 100).toFixed(1)} %`;
}

/** Show the tip of the element that is pointed at or has the focus; Escape hides it. */
export function showTips(tip) {
  const show = (event) => {
    const of = event.target.closest?.("[data-tip], .token");
    const text = of?.tip?.() ?? of?.dataset.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    of.setAttribute("aria-describedby", tip.id);
    const box = of.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    const below = box.bottom + 6;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 6 : below}px`;
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("keydown", (event) => event.key === "Escape" && (tip.hidden = true));
  document.addEventListener("scroll", () => (tip.hidden = true), true);
}
