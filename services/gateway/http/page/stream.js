// Read an answer as server-sent events, and continue it when the connection or the gateway fails.

const IDLE_MS = 60_000; // a silent connection may be dead
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 4_000;
const PATIENCE_MS = 120_000;
const MOST_CALLS = 65_535; // in one stream; later ones have this number, too
const RETRIED = new Set([409, 429, 502, 503, 504]); // 409: an earlier try still has the session

/** An error of the API, or of the connection; `retried` says that another try may help. */
export class Problem extends Error {
  constructor(message, { status = 0, code = "", retried = false, afterMs = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, retried, afterMs });
  }
}

/** Send a request to the gateway. Throw Problem unless it succeeds. */
export async function request(path, { method = "GET", body, headers = {}, key, signal } = {}) {
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  if (body) sent["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers: sent, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The gateway cannot be reached.", { retried: true });
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  const { error = {} } = await response.json().catch(() => ({}));
  const afterMs = Number(response.headers.get("retry-after-ms") ?? 0);
  return problem(error, response.status, afterMs);
}

function problem({ message = "", code = "" }, status, afterMs = 0) {
  const said = message && `: ${message}`;
  const plain = {
    401: "The API key is missing or wrong. Enter it in the settings.",
    403: `The gateway refuses this${said}`,
    404: `Not found${said}`,
    413: "The conversation is too large for one request.",
    429: `The gateway is busy${said}`,
    503: `A part of the service is away${said}`,
  };
  const text = plain[status] ?? (message || `The gateway answered with status ${status}.`);
  const retried = RETRIED.has(status) || code === "unavailable";
  return new Problem(text, { status, code, retried, afterMs });
}

/**
 * Yield the parsed events of one answer until its end.
 *
 * `body` needs an idempotency key: a request that broke before its first event is repeated and joins its
 * session. Later, the stream continues after its last event. `onRetry(problem, tries)` is called before each
 * further try, `onSession(id)` once the session's id is known.
 */
export async function* answerEvents(body, { key, signal, onRetry, onSession }) {
  const place = { session: "", lastId: "", key };
  const name = randomName();
  let failingSince = 0;
  let calls = 0;
  for (let tries = 0; ; tries += 1) {
    let failure;
    try {
      const attempt = `${name}-${Math.min((calls += 1), MOST_CALLS)}`;
      for await (const event of connection(body, { ...place, attempt }, signal)) {
        if (event.session) onSession((place.session = event.session));
        if (event.id) place.lastId = event.id;
        if (event.done) return;
        if (!event.data) continue;
        [failingSince, tries] = [0, 0];
        yield event.data;
      }
      failure = new Problem("The connection has ended.", { retried: true });
    } catch (error) {
      failure = error;
    }
    if (signal.aborted || !failure.retried) throw failure;
    failingSince ||= performance.now();
    if (performance.now() - failingSince > PATIENCE_MS) throw failure;
    onRetry(failure, tries + 1);
    await pause(failure.afterMs || Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** tries), signal);
  }
}

/** Return a random name for a stream. Its calls are numbered: one that comes late takes nothing from a later one. */
function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(6));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function* connection(body, { session, lastId, key, attempt }, outer) {
  const idle = new AbortController();
  const signal = AbortSignal.any([outer, idle.signal]);
  let timer;
  const restart = () => {
    clearTimeout(timer);
    timer = setTimeout(() => idle.abort(), IDLE_MS);
  };
  restart();
  const headers = { "x-galley-attempt": attempt, ...(lastId && { "last-event-id": lastId }) };
  try {
    const response = session
      ? await request(`v1/sessions/${session}/events`, { headers, key, signal })
      : await request("v1/chat/completions", { method: "POST", body, headers, key, signal });
    yield { session: response.headers.get("x-galley-session-id") ?? session };
    if (response.status === 204) yield { done: true };
    else yield* events(response.body, restart);
  } catch (error) {
    if (error instanceof Problem || outer.aborted) throw error;
    throw new Problem("The connection broke.", { retried: true });
  } finally {
    clearTimeout(timer);
    idle.abort();
  }
}

async function* events(stream, onBytes) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let text = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    onBytes();
    text += decoder.decode(read.value, { stream: true });
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) yield parse(block);
  }
}

function parse(block) {
  const fields = {};
  for (const line of block.split("\n")) {
    const at = line.indexOf(": ");
    if (at > 0) fields[line.slice(0, at)] = line.slice(at + 2);
  }
  if (fields.data === "[DONE]") return { done: true };
  const data = fields.data && JSON.parse(fields.data);
  if (data?.error) throw problem(data.error, 0);
  return { id: fields.id, data };
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
