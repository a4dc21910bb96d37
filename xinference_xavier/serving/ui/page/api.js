// Requests to the server, with the token from xinference's sign-in page and a time limit each.
// A failure is a Trouble; its kind selects the message.

const TIMEOUT = 20_000; // milliseconds
const NO_TOKEN = new Set([null, "", "no_auth"]);
/** @type {Record<number, Kind>} */
const KINDS = { 401: "signIn", 403: "forbidden", 404: "absent", 503: "tracker" };
/**
 * A refused token is not sent again: after a few wrong ones, xinference blocks the address, with
 * everyone behind it.
 * @type {string | null}
 */
let refused = null;
/** @type {Promise<boolean> | null} */
let renewing = null;

/**
 * "away": no valid answer; "tracker": the server answers, but the model's tracker does not.
 * @typedef {"signIn" | "forbidden" | "absent" | "away" | "tracker"} Kind
 * @typedef {{ method?: string, body?: unknown, again?: boolean, signal?: AbortSignal }} Options
 */

export class Trouble extends Error {
  /**
   * @param {Kind} kind
   * @param {string} message
   */
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

/**
 * @param {unknown} error
 * @returns {Trouble}
 */
export function troubleOf(error) {
  if (error instanceof Trouble) return error;
  return new Trouble("away", error instanceof Error ? error.message : String(error));
}

/**
 * @param {string} path
 * @param {Options} options
 * @returns {Promise<Response>}
 */
async function ask(path, { method = "GET", body, again = true, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  const token = sessionStorage.getItem("token");
  const signedIn = !NO_TOKEN.has(token);
  if (signedIn && token === refused) throw new Trouble("signIn", "");
  if (signedIn) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  }).catch((error) => {
    throw troubleOf(error);
  });
  if (answer.ok) return answer;
  if (answer.status === 401 && signedIn) {
    if (again && (await renewed(token))) return ask(path, { method, body, again: false, signal });
    refused = token;
  }
  throw new Trouble(KINDS[answer.status] ?? "away", await reasonOf(answer));
}

/**
 * @param {string} path
 * @param {Options} options
 */
export async function askJson(path, { signal, ...options } = {}) {
  const signals = [AbortSignal.timeout(TIMEOUT), ...(signal ? [signal] : [])];
  const answer = await ask(path, { signal: AbortSignal.any(signals), ...options });
  try {
    return await answer.json();
  } catch (error) {
    throw troubleOf(error);
  }
}

/**
 * All requests with the same expired token share one renewal: a refresh token is valid once.
 * @param {string | null} token
 */
function renewed(token) {
  if (sessionStorage.getItem("token") !== token) return true;
  renewing ??= renewToken().finally(() => {
    renewing = null;
  });
  return renewing;
}

// As xinference's own pages do when an access token has expired.
async function renewToken() {
  const refresh = sessionStorage.getItem("refresh_token");
  if (NO_TOKEN.has(refresh)) return false;
  try {
    const answer = await fetch("/v1/auth/refresh", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ refresh_token: refresh }),
      signal: AbortSignal.timeout(TIMEOUT),
    });
    if (!answer.ok) return false;
    const { access_token: token, refresh_token: next } = await answer.json();
    if (!token) return false;
    sessionStorage.setItem("token", token);
    if (next) sessionStorage.setItem("refresh_token", next);
    return true;
  } catch (error) {
    throw troubleOf(error); // the refresh token may still be valid
  }
}

/** @param {Response} answer */
async function reasonOf(answer) {
  const text = await answer.text().catch(() => "");
  try {
    const { detail } = JSON.parse(text);
    return typeof detail === "string" ? detail : `${answer.status}`;
  } catch {
    return `${answer.status}`;
  }
}
