// The seal: what audits have found so far.

import { request } from "./stream.js";

const WHAT = "Targets computed answers of finished sessions again, and compared each token with the one that was sent.";
const LOOSE = " The build of this model does not promise the same tokens in any batch, so some may differ.";

/** Show in `element` how many tokens were audited; hide it where audits are off, or none was made yet. */
export async function showSeal(element, key) {
  const { ratio, damaged, deterministic, other } = await (await request("v1/audit", { key })).json();
  const counts = deterministic.tokens ? deterministic : other;
  const [tokens, differing, changed] = [counts.tokens, counts.differing, damaged].map((count) => count.toLocaleString("en-US"));
  element.hidden = !ratio || !(counts.tokens || damaged);
  element.textContent = `${tokens} tokens audited, ${differing} differ${damaged ? `, ${changed} stored sessions damaged` : ""}`;
  element.dataset.tip = counts === other ? WHAT + LOOSE : WHAT;
  element.classList.toggle("broken", damaged > 0 || deterministic.differing > 0);
}
