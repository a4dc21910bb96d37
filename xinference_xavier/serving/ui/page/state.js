// The page's state, and the loop that keeps it up to date.
//
// The loop asks which models share, then follows the selected one until its stream ends, for
// whatever reason. The last data stay visible, marked as old, until newer data arrive.

import { fill } from "../languages.js";
import { askJson, listen, Trouble, troubleOf } from "./api.js";
import { say } from "./dom.js";
import { Recent } from "./numbers.js";
import { language } from "./settings.js";
import { sentenceOf } from "./views.js";

const API = "/v1/xavier";
const PAUSES = [1, 2, 5]; // seconds before the next try; the last one repeats
const LIST_INTERVAL = 10; // seconds
const MAX_SAMPLES = 360;
const MAX_EVENTS = 100;

/**
 * `models` are the reports of all models that share, null before the first answer; `lost` is the
 * model that was shown and has ended.
 * @type {{ models: Report[] | null, recent: Recent, samples: Sample[], events: XavierEvent[],
 *   live: boolean, trouble: Trouble | null, retryIn: number, lost: string | null,
 *   notice: string | null }}
 */
export const state = {
  models: null,
  recent: new Recent(),
  samples: [],
  events: [],
  live: false,
  trouble: null,
  retryIn: 0, // seconds
  lost: null,
  notice: null,
};
let interval = 10; // seconds between two samples
let ahead = 0; // seconds by which the server's clock is ahead
let caughtUp = false; // whether further events are new
let stream = new AbortController();
let wake = () => {};
let drawPage = () => {};
let planned = false;

/**
 * `drawPage` draws the page after every change.
 * @param {() => void} drawing
 */
export function start(drawing) {
  drawPage = drawing;
  show();
  setInterval(() => {
    // Failures show in the stream.
    if (state.live) refreshModels().then(show, () => {});
  }, LIST_INTERVAL * 1000);
  return feed();
}

// Draws the page in the next frame, once for all changes before.
export function show() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    drawPage();
  });
}

function now() {
  return Date.now() / 1000 + ahead;
}

/** @param {Report | null} report */
export function uidOf(report) {
  return report?.model_uid ?? null;
}

export function chosen() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const uids = (state.models ?? []).map(uidOf);
  return uids.includes(wanted) ? wanted : (uids[0] ?? null);
}

/** @param {string | null} uid */
function isHere(uid) {
  return (state.models ?? []).some((report) => uidOf(report) === uid);
}

/**
 * @param {string | null} uid
 * @param {string} what
 */
export function pathOf(uid, what = "") {
  return `${API}/${encodeURIComponent(uid ?? "")}${what}`;
}

async function refreshModels() {
  /** @type {{ models: Report[], unavailable?: Record<string, string> }} */
  const { models, unavailable = {} } = await askJson(API);
  state.models = models;
  const [reason] = Object.values(unavailable);
  if (models.length === 0 && reason !== undefined) throw new Trouble("tracker", reason);
}

/**
 * @param {string} event
 * @param {any} data
 */
function receive(event, data) {
  if (event === "status") receiveStatus(data);
  else if (event === "history") receiveHistory(data);
  else if (event === "event") receiveEvent(data);
  else if (event === "unavailable") {
    Object.assign(state, { live: false, trouble: new Trouble("tracker", data.detail) });
  }
  show();
}

/** @param {Report} report */
function receiveStatus(report) {
  Object.assign(state, { live: true, trouble: null });
  caughtUp = true;
  state.recent.add(report, now());
  state.models = (state.models ?? []).map((old) => (uidOf(old) === uidOf(report) ? report : old));
  // The server sends its samples once; the page takes later ones itself.
  if (now() - (state.samples.at(-1)?.time ?? -Infinity) >= interval) {
    state.samples = [...state.samples, { time: now(), ...report.totals }].slice(-MAX_SAMPLES);
  }
}

/** @param {{ interval_s: number, samples: Sample[] }} history */
function receiveHistory({ interval_s: seconds, samples }) {
  interval = seconds;
  const newest = samples.at(-1)?.time;
  const drift = newest === undefined ? 0 : newest - Date.now() / 1000;
  // A sample may be one interval old; more than that is a difference between clocks.
  ahead = drift > 0 || drift < -2 * interval ? drift : 0;
  Object.assign(state, { samples, events: [], recent: new Recent() });
  caughtUp = false;
}

/** @param {XavierEvent} event */
function receiveEvent(event) {
  state.events = [...state.events, event].slice(-MAX_EVENTS);
  if (caughtUp) say(sentenceOf(state.recent.report, event));
}

async function feed() {
  let failures = 0;
  for (;;) {
    stream = new AbortController();
    try {
      await refreshModels();
      state.trouble = null;
      const before = uidOf(state.recent.report);
      const uid = chosen();
      if (isHere(state.lost)) state.lost = null;
      if (before !== null && uid !== before) {
        if (!isHere(before)) state.lost = before;
        Object.assign(state, { recent: new Recent(), samples: [], events: [] });
      }
      show();
      if (uid !== null) {
        await follow(uid, () => {
          failures = 0;
        });
      }
    } catch (error) {
      state.trouble = troubleOf(error);
    }
    state.live = false;
    if (stream.signal.aborted) {
      state.trouble = null; // another model was selected
      continue;
    }
    failures += 1;
    const pause = state.models?.length === 0 ? undefined : PAUSES[failures - 1];
    await rest(pause ?? PAUSES[PAUSES.length - 1]);
  }
}

/**
 * Receives what the model's stream sends, until its end.
 * @param {string} uid
 * @param {() => void} heard
 */
async function follow(uid, heard) {
  try {
    await listen(
      pathOf(uid, "/events"),
      (event, data) => {
        heard();
        receive(event, data);
      },
      stream.signal,
    );
  } catch (error) {
    // Absent: the model has just ended; the next list will not have it.
    if (troubleOf(error).kind !== "absent") throw error;
  }
}

/**
 * Pauses with a visible countdown; `wake` ends it.
 * @param {number} seconds
 */
async function rest(seconds) {
  for (state.retryIn = seconds; state.retryIn > 0; state.retryIn -= 1) {
    show();
    const woken = await new Promise((resolve) => {
      wake = () => resolve(true);
      setTimeout(() => resolve(false), 1000);
    });
    if (woken) break;
  }
  state.retryIn = 0;
}

export function choose() {
  stream.abort();
  wake();
}

/**
 * `what` is a part of the model, such as "/flush"; without one, its settings change.
 * @param {string} what
 * @param {unknown} body
 * @param {string | null} done
 */
export async function change(what, body, done) {
  try {
    await askJson(pathOf(chosen(), what), { method: what ? "POST" : "PATCH", body });
    state.notice = done;
  } catch (error) {
    const text = language.words;
    const { kind, message } = troubleOf(error);
    state.notice =
      kind === "forbidden" ? text.mayNotChange : fill(text.failed, { reason: message });
  }
  if (state.notice !== null) say(state.notice);
  show();
}
