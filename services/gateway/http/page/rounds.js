// The rounds of an answer in time, in the colours of `galley trace --html`.

import { roundMs } from "./answer.js";
import { make } from "./view.js";

const PARTS = {
  draft: "waiting for a draft",
  queue: "in the target's queue",
  compute: "computing",
  wire: "on the network and in the gateway",
};
const MOST_ROWS = 500;
const SVG = "http://www.w3.org/2000/svg";

/** Show the rounds of `answer` in `panel`. */
export function showRounds(panel, answer) {
  const { rounds } = answer;
  if (!rounds.length) {
    panel.replaceChildren(make("p", { text: "No rounds yet. Send a message; its rounds appear here." }));
    return;
  }
  const wholeMs = Math.max(...rounds.map((round) => round.at_ms + roundMs(round)));
  const longestMs = Math.max(...rounds.map(roundMs));
  const last = rounds.slice(-MOST_ROWS);
  const missing = rounds.length - last.length;
  panel.replaceChildren(
    make("h2", { text: `${rounds.length} rounds, ${Math.round(wholeMs)} ms` }),
    legend(),
    chart("strip", wholeMs, rounds, `All rounds, ${Math.round(wholeMs)} ms from left to right`),
    table(answer, last, longestMs, missing),
    make("p", { class: "faint", text: `For calls, batches and the store, trace the stack and run: galley trace ${answer.session}` }),
  );
}

function legend() {
  const items = Object.entries(PARTS).map(([part, meaning]) => make("li", {}, make("span", { class: `swatch ${part}` }), meaning));
  return make("ul", { class: "legend", "aria-label": "Parts of a round's time" }, ...items);
}

function table(answer, rounds, longestMs, missing) {
  const heads = ["Round", "At ms", "Tokens", "Accepted", "ms", "Time by its parts", "Text"];
  const caption = missing ? `The last ${rounds.length} rounds; ${missing} before them are not listed.` : "Rounds";
  const rows = rounds.map((round, i) => {
    const took = roundMs(round);
    const parts = Object.entries(PARTS).filter(([part]) => round[`${part}_ms`] > 0);
    const label = parts.map(([part, meaning]) => `${round[`${part}_ms`].toFixed(1)} ms ${meaning}`).join(", ");
    const tokens = answer.tokens.slice(round.index, round.index + round.confirmed);
    const text = tokens.map((token) => make("span", { class: `token ${token.fromDraft ? "of-draft" : "of-target"}`, text: token.text }));
    const accepted = round.verified ? `${round.accepted} of ${round.verified}` : "–";
    const cells = [missing + i, Math.round(round.at_ms), round.confirmed, accepted, took.toFixed(1)];
    return make(
      "tr",
      { "data-tip": `${label}${round.verified ? `\naccepted: ${sources(round)}` : ""}${round.ranks ? `\nby rank: ${ranks(round)}` : ""}` },
      ...cells.map((cell) => make("td", { text: cell })),
      make("td", { class: "bar" }, chart("", longestMs, [{ ...round, at_ms: 0 }], label)),
      make("td", { class: "text" }, ...text),
    );
  });
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col", text })));
  const made = make("table", {}, make("caption", { text: caption }), make("thead", {}, head), make("tbody", {}, ...rows));
  return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table of rounds" }, made);
}

/** Say how many draft tokens of each source were accepted. */
function sources(round) {
  return Object.entries(round.sources).map(([source, [accepted, verified]]) => `${source} ${accepted} of ${verified}`).join(", ");
}

/** Say how many draft tokens of each rank were accepted: the candidates for a position, the likeliest first. */
function ranks(round) {
  return round.ranks.map(([accepted, verified]) => `${accepted} of ${verified}`).join(", ");
}

/** Draw rounds side by side, `ms` wide. */
function chart(kind, ms, rounds, label) {
  const svg = document.createElementNS(SVG, "svg");
  const set = (element, values) => Object.entries(values).forEach(([name, value]) => element.setAttribute(name, value));
  set(svg, { class: `chart ${kind}`, viewBox: `0 0 ${ms} 1`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  for (const round of rounds) {
    let x = round.at_ms;
    for (const part of Object.keys(PARTS)) {
      const width = round[`${part}_ms`];
      if (width > 0) {
        const rect = document.createElementNS(SVG, "rect");
        set(rect, { class: part, x, y: 0, width, height: 1 });
        svg.append(rect);
      }
      x += width;
    }
  }
  return svg;
}
