// Requests to the server, with the token from xinference's sign-in page and a time limit each.
// A failure is a Trouble; its kind selects the message.

const TIMEOUT = 20_000; // milliseconds
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
 * @typedef {{ method?: string, body?: unknown, signal?: AbortSignal }} Options
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
  return error instanceof Trouble ? error : new Trouble("away", `${error}`);
}

/**
 * @param {string} path
 * @param {Options} options
 */
export async function ask(path, options = {}) {
  const token = stored("token");
  if (token !== null && token === refused) throw new Trouble("signIn", "");
  let answer = await send(path, token, options);
  if (answer.status === 401 && token !== null) {
    if (await renewed(token)) answer = await send(path, stored("token"), options);
    if (answer.status === 401) refused = stored("token");
  }
  const body = await answer.json().catch(() => ({}));
  if (answer.ok) return body;
  throw new Trouble(KINDS[answer.status] ?? "away", `${body.detail ?? answer.status}`);
}

/**
 * @param {string} path
 * @param {string | null} token
 * @param {Options} options
 */
function send(path, token, { method, body, signal }) {
  const limit = AbortSignal.timeout(TIMEOUT);
  return fetch(path, {
    method,
    headers: {
      ...(token === null ? {} : { authorization: `Bearer ${token}` }),
      ...(body === undefined ? {} : { "content-type": "application/json" }),
    },
    signal: signal === undefined ? limit : AbortSignal.any([limit, signal]),
    body: JSON.stringify(body),
  });
}

/**
 * A token of xinference's pages; without accounts, these store another word in its place.
 * @param {"token" | "refresh_token"} name
 */
function stored(name) {
  const token = sessionStorage.getItem(name);
  return token === "" || token === "no_auth" ? null : token;
}

/**
 * All requests with the same expired token share one renewal: a refresh token is valid once.
 * @param {string} token
 */
function renewed(token) {
  if (stored("token") !== token) return true;
  renewing ??= renew().finally(() => {
    renewing = null;
  });
  return renewing;
}

// As xinference's own pages do when an access token has expired.
async function renew() {
  const body = { refresh_token: stored("refresh_token") };
  if (body.refresh_token === null) return false;
  const answer = await send("/v1/auth/refresh", null, { method: "POST", body });
  if (!answer.ok) return false;
  for (const [name, token] of Object.entries(await answer.json())) {
    if (name === "access_token") sessionStorage.setItem("token", token);
    if (name === "refresh_token") sessionStorage.setItem("refresh_token", token);
  }
  return true;
}
