// The page's state, and the loop that keeps it up to date.
//
// The loop asks which models share, then for the selected one each second, until that fails. The
// last data stay visible, marked as old, until newer data arrive.

import { fill } from "../languages.js";
import { askJson, Trouble, troubleOf } from "./api.js";
import { Recent, sentenceOf } from "./numbers.js";
import { language } from "./settings.js";

const API = "/v1/xavier";
const PAUSES = [1, 2, 5]; // seconds before the next try; the last one repeats
const LIST_INTERVAL = 10; // seconds
const MAX_SAMPLES = 360;
const MAX_EVENTS = 100;

/**
 * `models` are the reports of all models that share, null before the first answer; `lost` is the
 * model that was shown or is wanted and is not there; `differing` are the settings in which replicas
 * of several namespaces differ.
 * @type {{ models: Report[] | null, recent: Recent, samples: Sample[], events: XavierEvent[],
 *   live: boolean, trouble: Trouble | null, retryIn: number, lost: string | null,
 *   notice: string | null, differing: { namespaces: string, fields: string[] } }}
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
  differing: { namespaces: "", fields: [] },
};
let interval = 10; // seconds between two samples
let ahead = 0; // seconds by which the server's clock is ahead
let following = new AbortController();
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
    // Failures show when the selected one is asked for.
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

function wanted() {
  return decodeURIComponent(location.hash.slice(1));
}

export function chosen() {
  const uids = (state.models ?? []).map(uidOf);
  return uids.includes(wanted()) ? wanted() : (uids[0] ?? null);
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

/** @param {Report} report */
function receiveReport(report) {
  Object.assign(state, { live: true, trouble: null });
  state.recent.add(report, now());
  state.models = (state.models ?? []).map((old) => (uidOf(old) === uidOf(report) ? report : old));
  // The server is asked for its samples once; the page takes later ones itself.
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
}

async function feed() {
  let failures = 0;
  for (;;) {
    following = new AbortController();
    try {
      await refreshModels();
      state.trouble = null;
      const before = uidOf(state.recent.report);
      const uid = chosen();
      if (isHere(state.lost)) state.lost = null;
      const missing = [wanted(), before].find((each) => each && !isHere(each));
      state.lost = missing ?? state.lost;
      if (before !== null && uid !== before) {
        Object.assign(state, { recent: new Recent(), samples: [], events: [] });
      }
      show();
      if (uid !== null) {
        await follow(uid, following.signal, () => {
          failures = 0;
        });
      }
    } catch (error) {
      state.trouble = troubleOf(error);
    }
    state.live = false;
    if (following.signal.aborted) {
      state.trouble = null; // another model was selected
      continue;
    }
    failures += 1;
    const pause = state.models?.length === 0 ? undefined : PAUSES[failures - 1];
    await rest(pause ?? PAUSES[PAUSES.length - 1]);
  }
}

/**
 * Asks for what is new each second, until the model ends.
 * @param {string} uid
 * @param {AbortSignal} signal
 * @param {() => void} heard
 */
async function follow(uid, signal, heard) {
  try {
    receiveHistory(await askJson(pathOf(uid, "/history"), { signal }));
    /** @type {number | undefined} */
    let after;
    for (;;) {
      const [report, news] = await Promise.all([
        askJson(pathOf(uid), { signal }),
        askJson(pathOf(uid, `/events?after=${after ?? 0}`), { signal }),
      ]);
      heard();
      receiveReport(report);
      state.events = [...state.events, ...news.events].slice(-MAX_EVENTS);
      const newest = after === undefined ? undefined : news.events.at(-1);
      if (newest) say(sentenceOf(report, newest));
      after = news.last;
      show();
      await compareNamespaces(report);
      await pause(signal);
    }
  } catch (error) {
    // Absent: the model has just ended; the next list will not have it.
    if (troubleOf(error).kind !== "absent") throw error;
  }
}

/**
 * Asks once for what `doctor` knows of the replicas, if they are apart.
 * @param {Report} report
 */
async function compareNamespaces({ model_uid: uid, replicas }) {
  const namespaces = [...new Set(replicas.map(({ namespace }) => namespace))].sort().join();
  if (!namespaces.includes(",") || namespaces === state.differing.namespaces) return;
  state.differing = { namespaces, fields: [] };
  // Without an answer, the page names `doctor` instead.
  const { models } = await askJson("/v1/cluster/xavier").catch(() => ({ models: {} }));
  /** @type {Record<string, unknown>[]} */
  const settings = Object.values(models[uid]?.self_checks ?? {}).map(
    (check) => check.fingerprint_fields ?? {},
  );
  const names = [...new Set(settings.flatMap(Object.keys))];
  const values = (/** @type {string} */ name) => new Set(settings.map((each) => `${each[name]}`));
  state.differing.fields = names.filter((name) => values(name).size > 1);
  show();
}

/**
 * A second, or less if another model is selected.
 * @param {AbortSignal} signal
 */
function pause(signal) {
  return new Promise((resolve) => {
    setTimeout(resolve, 1000);
    signal.addEventListener("abort", resolve, { once: true });
  });
}

/**
 * Pauses with a visible countdown.
 * @param {number} seconds
 */
async function rest(seconds) {
  const { signal } = following;
  for (state.retryIn = seconds; state.retryIn > 0 && !signal.aborted; state.retryIn -= 1) {
    show();
    await pause(signal);
  }
  state.retryIn = 0;
}

export function choose() {
  following.abort();
}

/**
 * Makes screen readers say the sentence.
 * @param {string} sentence
 */
function say(sentence) {
  const said = document.getElementById("said");
  if (said !== null) said.textContent = sentence;
}

/**
 * `what` is a part of the model, such as "/flush"; without one, its settings change.
 * @param {string} what
 * @param {import("./api.js").Options} how
 * @param {string | null} done
 */
export async function change(what, how, done) {
  try {
    await askJson(pathOf(chosen(), what), how);
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
