// Requests to the server, with the token from xinference's sign-in page and a time limit each.
// A failure is a Trouble; its kind selects the message.

const TIMEOUT = 20_000; // milliseconds; for a stream, without any message
const NO_TOKEN = new Set([null, "", "no_auth"]);
// A refused token is not sent again: after a few wrong ones, xinference blocks the address, with
// everyone behind it.
let refused = null;
let renewing = null;

class Trouble extends Error {
  // "signIn", "forbidden", "absent" (404), "away" (no valid answer) or "tracker" (the server
  // answers, but the model's tracker does not).
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

async function ask(path, { method = "GET", body, again = true, signal } = {}) {
  const headers = {};
  const token = sessionStorage.getItem("token");
  const signedIn = !NO_TOKEN.has(token);
  if (signedIn && token === refused) throw new Trouble("signIn", "");
  if (signedIn) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal,
      body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    throw new Trouble("away", error.message);
  }
  if (answer.ok) return answer;
  if (answer.status === 401 && signedIn) {
    if (again && await renewed(token)) return ask(path, { method, body, again: false, signal });
    refused = token;
  }
  const kind = { 401: "signIn", 403: "forbidden", 404: "absent" }[answer.status] ?? "away";
  throw new Trouble(kind, await reasonOf(answer));
}

async function askJson(path, options = {}) {
  const answer = await ask(path, { signal: AbortSignal.timeout(TIMEOUT), ...options });
  try {
    return await answer.json();
  } catch (error) {
    throw new Trouble("away", error.message);
  }
}

// All requests with the same expired token share one renewal: a refresh token is valid once.
function renewed(token) {
  if (sessionStorage.getItem("token") !== token) return true;
  renewing ??= renewToken().finally(() => { renewing = null; });
  return renewing;
}

// As xinference's own pages do when an access token has expired.
async function renewToken() {
  const refresh = sessionStorage.getItem("refresh_token");
  if (NO_TOKEN.has(refresh)) return false;
  try {
    const answer = await fetch("/v1/auth/refresh", { method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ refresh_token: refresh }), signal: AbortSignal.timeout(TIMEOUT) });
    if (!answer.ok) return false;
    const { access_token: token, refresh_token: next } = await answer.json();
    if (!token) return false;
    sessionStorage.setItem("token", token);
    if (next) sessionStorage.setItem("refresh_token", next);
    return true;
  } catch (error) {
    throw new Trouble("away", error.message); // the refresh token may still be valid
  }
}

async function reasonOf(answer) {
  const text = await answer.text().catch(() => "");
  try {
    const { detail } = JSON.parse(text);
    return typeof detail === "string" ? detail : `${answer.status}`;
  } catch {
    return `${answer.status}`;
  }
}

// Calls `receive(event, data)` for each server-sent event; returns at the stream's end. EventSource
// cannot send the token.
async function listen(path, receive, signal) {
  const silent = new AbortController();
  const either = AbortSignal.any([signal, silent.signal]);
  let timer = setTimeout(() => silent.abort(), TIMEOUT);
  try {
    const answer = await ask(path, { signal: either });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), TIMEOUT);
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      blocks.forEach((block) => receiveBlock(block, receive));
    }
  } catch (error) {
    throw error instanceof Trouble ? error : new Trouble("away", error.message);
  } finally {
    clearTimeout(timer);
    silent.abort();
  }
}

function receiveBlock(block, receive) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (name === "event") event = value;
    else if (name === "data") data.push(value);
  }
  if (data.length > 0) receive(event, JSON.parse(data.join("\n")));
}
