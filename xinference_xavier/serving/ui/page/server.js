// Talks to the server: with the rights of the one who signed in on xinference's pages, and with an
// end to every wait. What goes wrong is a Trouble, whose kind says which words and remedy fit.

const TIMEOUT = 20_000; // milliseconds; of a stream: without a word from it
const NO_TOKEN = new Set([null, "", "no_auth"]);
// A token that was refused is not shown again: xinference shuts an address out, with all behind it,
// that shows wrong ones a few times.
let refused = null;
let renewing = null;

class Trouble extends Error {
  // "signIn", "forbidden", "absent" (no such thing there), "away" (no sensible answer) or "tracker"
  // (the server answers, but not what knows of the model).
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

// One renewal serves all who were refused the same token: a refresh token is good for one.
function renewed(token) {
  if (sessionStorage.getItem("token") !== token) return true;
  renewing ??= renewToken().finally(() => { renewing = null; });
  return renewing;
}

// As xinference's own pages do when an access token has run out.
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
    throw new Trouble("away", error.message); // it may be good for a token yet
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

// Calls `heard(event, data)` for each event of a stream of server-sent events; returns at its end.
// EventSource cannot send the token.
async function listen(path, heard, signal) {
  const quiet = new AbortController();
  const either = AbortSignal.any([signal, quiet.signal]);
  let timer = setTimeout(() => quiet.abort(), TIMEOUT);
  try {
    const answer = await ask(path, { signal: either });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => quiet.abort(), TIMEOUT);
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      blocks.forEach((block) => hearBlock(block, heard));
    }
  } catch (error) {
    throw error instanceof Trouble ? error : new Trouble("away", error.message);
  } finally {
    clearTimeout(timer);
    quiet.abort();
  }
}

function hearBlock(block, heard) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (name === "event") event = value;
    else if (name === "data") data.push(value);
  }
  if (data.length > 0) heard(event, JSON.parse(data.join("\n")));
}
