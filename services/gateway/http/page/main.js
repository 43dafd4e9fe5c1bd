// The page: a chat whose turns can be compared with and without speculation.

import { Answer, compare } from "./answer.js";
import { Controls, repeatable } from "./controls.js";
import { showRounds } from "./rounds.js";
import { showSeal } from "./seal.js";
import { answerEvents, request } from "./stream.js";
import { tabs } from "./tabs.js";
import { AnswerView, make, showTips } from "./view.js";

const STOP_MS = 2_000; // for the end of an answer that was stopped
const NEAR_PX = 80; // to the end of the page: the view then follows an answer that arrives
const DRAW_MS = 250; // between two drawings of the rounds of an answer that arrives
const ENDS = { stop: "", length: "Cut off: the most tokens were reached.", abort: "Stopped." };

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
const controls = new Controls(page.settings);
let turns = []; // { user, answer }
let shown = new Answer(); // whose rounds are shown
let drawnMs = 0;
let running = null; // the stream that runs: { controller, session, stopped }

function say(text) {
  page.status.textContent = text;
}

const select = tabs(page.tabs, () => drawRounds());

function drawRounds() {
  if (page.rounds.hidden) return;
  showRounds(page.rounds, shown);
  drawnMs = performance.now();
}

function newView(title) {
  const answer = (shown = new Answer());
  const view = new AnswerView(answer, title, () => {
    shown = answer;
    select(page["tab-rounds"]);
    page["tab-rounds"].focus();
  });
  return view;
}

async function showModel() {
  try {
    page.model.textContent = await controls.load();
    if (!running) say("");
    drawSeal();
  } catch (problem) {
    say(problem.message);
  }
}

function drawSeal() {
  showSeal(page.seal, controls.key).catch(() => {}); // what it showed before may stay
}

/** Stream the answer of `body` into a view. Throw if it fails; an answer that was stopped is complete. */
async function stream(body, view) {
  const { answer } = view;
  const controller = new AbortController();
  const run = (running = { controller, session: "", stopped: false });
  setBusy(true);
  answer.seed = body.seed;
  const handlers = {
    key: controls.key,
    signal: controller.signal,
    onSession: (id) => {
      run.session = answer.session = id;
      if (run.lost) say("Connected again; the answer goes on.");
      run.lost = false;
    },
    onRetry: ({ message }, tries) => (say(`${message} Trying again (${tries}).`), (run.lost = true)),
  };
  try {
    for await (const event of answerEvents(repeatable(body), handlers)) {
      if (!answer.tokens.length) say("");
      const follows = innerHeight + scrollY > document.documentElement.scrollHeight - NEAR_PX;
      answer.add(event);
      view.update();
      if (follows) scrollTo(0, document.documentElement.scrollHeight);
      if (performance.now() - drawnMs > DRAW_MS) drawRounds();
    }
  } catch (problem) {
    if (!run.stopped) throw problem;
    answer.finishReason ||= "abort";
  } finally {
    running = null;
    setBusy(false);
    view.end(ENDS[answer.finishReason] ?? "");
    drawRounds();
  }
}

function setBusy(busy) {
  page.send.disabled = page.clear.disabled = busy;
  page.stop.disabled = !busy;
  for (const button of document.querySelectorAll(".compare")) button.disabled = busy;
}

/** End the running session; its stream then ends by itself. */
async function stop() {
  const run = running;
  if (!run || run.stopped) return;
  run.stopped = true;
  say("Stopping.");
  setTimeout(() => run.controller.abort(), run.session ? STOP_MS : 0);
  if (run.session) await request(`v1/sessions/${run.session}`, { method: "DELETE", key: controls.key }).catch(() => {});
}

async function send(event) {
  event.preventDefault();
  const text = page.prompt.value.trim();
  if (running || !text) return;
  if (!page.settings.reportValidity()) return;
  const messages = turns.flatMap(({ user, answer }) => [
    { role: "user", content: user },
    { role: "assistant", content: answer.content },
  ]);
  const body = controls.body([...messages, { role: "user", content: text }]);
  const view = newView(body.speculation.mode === "off" ? "Without speculation" : "With speculation");
  const answers = make("div", { class: "answers" }, view.element);
  const article = make("article", {}, make("p", { class: "user", text }), answers);
  page.turns.append(article);
  page.prompt.value = "";
  scrollTo(0, document.documentElement.scrollHeight);
  say("Waiting for the first token.");
  try {
    await stream(body, view);
  } catch (problem) {
    say(problem.message);
    view.end(problem.message);
    if (!view.answer.tokens.length) {
      article.remove();
      page.prompt.value = text;
      return;
    }
  }
  turns.push({ user: text, answer: view.answer });
  controls.keepSeed(body.seed);
  if (view.answer.finishReason) say(summary(view.answer));
  drawSeal();
  article.append(actions(body, view, answers));
  scrollTo(0, document.documentElement.scrollHeight);
}

function summary({ tokens, rate, finishReason }) {
  const end = finishReason === "abort" ? "Answer stopped" : "Answer complete";
  return `${end}: ${tokens.length} tokens${rate ? `, ${rate.toFixed(1)} a second` : ""}.`;
}

function actions(body, view, answers) {
  const verdict = make("p", { class: "verdict", role: "status" });
  const off = body.speculation.mode === "off";
  const button = make("button", { type: "button", class: "compare", text: off ? "Compare with speculation" : "Compare without speculation" });
  button.addEventListener("click", async () => {
    const other = newView(off ? "With speculation" : "Without speculation");
    answers.replaceChildren(view.element, other.element);
    answers.classList.add("two");
    verdict.textContent = "";
    try {
      await stream({ ...body, speculation: off ? { mode: "auto" } : { mode: "off" } }, other);
      verdict.textContent = judge(view, other, off ? [view, other] : [other, view]);
      say("");
    } catch (problem) {
      say(problem.message);
      other.end(problem.message);
    }
  });
  const seed = make("p", { class: "faint", text: `Seed ${body.seed} · session ${view.answer.session}` });
  return make("div", { class: "row" }, button, verdict, seed);
}

/** Say whether two answers are equal, and how much faster the second of `[plain, drafted]` was. */
function judge(one, other, [plain, drafted]) {
  const { equal, first } = compare(one.answer, other.answer);
  one.mark(first);
  other.mark(first);
  const isCut = [one, other].some(({ answer }) => answer.finishReason === "abort");
  const same = first < 0 ? `All ${equal} tokens are equal.` : `Equal up to token ${equal}${isCut ? ", where one was stopped" : ""}.`;
  const [before, after] = [plain.answer.rate, drafted.answer.rate];
  return before && after ? `${same} Measured speed-up: ${(after / before).toFixed(2)}×.` : same;
}

page.composer.addEventListener("submit", send);
page.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  if (event.key === "Escape") stop();
});
page.stop.addEventListener("click", stop);
page.clear.addEventListener("click", () => {
  turns = [];
  shown = new Answer();
  page.turns.replaceChildren();
  say("");
  page.prompt.focus();
});
page.settings.elements.key.addEventListener("change", showModel);
page["settings-panel"].open = innerWidth > 800;
showTips(page.tip);
showModel();
