// The page's state, and the loop that keeps it up to date.
//
// The loop asks which models share, then each second for the selected one. The last data stay
// visible, marked as old, until newer data arrive.

import { fill } from "../languages.js";
import { ask, Trouble, troubleOf } from "./api.js";
import { sentenceOf } from "./numbers.js";
import { language } from "./settings.js";

const API = "/v1/xavier";
const LIST_INTERVAL = 10; // seconds
const PAUSES = [1, 2, 5]; // seconds before the next try; the last one repeats
const MAX_REPORTS = 6; // the rates of links are measured over these
const MAX_SAMPLES = 360;
const MAX_EVENTS = 100;
const NOTHING = { live: false, reports: [], samples: [], events: [], last: 0 };

/**
 * `models` are the reports of all models that share, null before the first answer. Of the selected
 * one: the latest reports with their times, the samples of the last hour, events and the number of
 * the last one; and the namespaces of its replicas, with the settings in which they differ. `lost`
 * is a model that was shown or is wanted and is not there.
 * @type {{ models: Report[] | null, live: boolean, reports: { report: Report, time: number }[],
 *   samples: Sample[], events: XavierEvent[], last: number,
 *   differing: { namespaces: string, fields: string[] }, trouble: Trouble | null,
 *   lost: string | null, notice: string | null }}
 */
export const state = {
  models: null,
  ...NOTHING,
  differing: { namespaces: "", fields: [] },
  trouble: null,
  lost: null,
  notice: null,
};
let interval = 10; // seconds between two samples
let ahead = 0; // seconds by which the server's clock is ahead
let choosing = new AbortController();
let draw = () => {};
let isPlanned = false;

/**
 * `drawing` draws the page after every change.
 * @param {() => void} drawing
 */
export async function start(drawing) {
  draw = drawing;
  show();
  for (let failures = 0; ; ) {
    choosing = new AbortController();
    const { signal } = choosing;
    try {
      await list();
      const uid = chosen();
      for (let second = 0; uid !== null && second < LIST_INTERVAL; second += 1) {
        await follow(uid, signal);
        failures = 0;
        await pause(signal);
      }
      if (uid !== null) continue;
      Object.assign(state, { trouble: null, live: false });
    } catch (error) {
      if (signal.aborted) continue; // another model was selected
      const trouble = troubleOf(error);
      // Absent: the model has just ended, if the next list does not have it.
      const ended = trouble.kind === "absent" && state.live;
      Object.assign(state, { trouble: ended ? null : trouble, live: false });
    }
    show();
    await pause(signal, PAUSES[Math.min(failures, PAUSES.length - 1)]);
    failures += 1;
  }
}

// Draws the page in the next frame, once for all changes before.
export function show() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    draw();
  });
}

export function choose() {
  choosing.abort();
}

export function chosen() {
  return isHere(wanted()) ? wanted() : (state.models?.[0]?.model_uid ?? null);
}

function wanted() {
  return decodeURIComponent(location.hash.slice(1));
}

/** @param {string | null} uid */
function isHere(uid) {
  return (state.models ?? []).some((report) => report.model_uid === uid);
}

/**
 * `what` is a part of the model, such as "/flush".
 * @param {string | null} uid
 * @param {string} what
 */
function pathOf(uid, what = "") {
  return `${API}/${encodeURIComponent(uid ?? "")}${what}`;
}

async function list() {
  const { models, unavailable = {} } = await ask(API);
  const old = (state.models ?? []).filter((report) => report.model_uid in unavailable);
  state.models = [...models, ...old];
  const before = state.reports.at(-1)?.report.model_uid;
  if (isHere(state.lost)) state.lost = null;
  state.lost = [wanted(), before].find((uid) => uid && !isHere(uid)) ?? state.lost;
  if (chosen() !== before) Object.assign(state, NOTHING);
  show();
  const [reason] = Object.values(unavailable);
  if (state.models.length === 0 && reason !== undefined) throw new Trouble("tracker", reason);
}

/**
 * Asks for what is new.
 * @param {string} uid
 * @param {AbortSignal} signal
 */
async function follow(uid, signal) {
  const how = { signal };
  if (!state.live) {
    const { interval_s: seconds, samples } = await ask(pathOf(uid, "/history"), how);
    interval = seconds;
    const newest = samples.at(-1)?.time;
    ahead = newest === undefined ? 0 : newest - Date.now() / 1000;
    Object.assign(state, { samples, events: [], last: 0 });
  }
  const [report, { events, last }] = await Promise.all([
    ask(pathOf(uid), how),
    ask(pathOf(uid, `/events?after=${state.last}`), how),
  ]);
  const time = Date.now() / 1000 + ahead;
  state.reports = [...state.reports, { report, time }].slice(-MAX_REPORTS);
  state.events = [...state.events, ...events].slice(-MAX_EVENTS);
  // The server is asked for its samples once; the page takes later ones itself.
  if (time - (state.samples.at(-1)?.time ?? 0) >= interval) {
    state.samples = [...state.samples, { time, ...report.totals }].slice(-MAX_SAMPLES);
  }
  if (state.live && events.length > 0) say(sentenceOf(report, events.at(-1)));
  Object.assign(state, { last, live: true, trouble: null });
  show();
  await compareNamespaces(report);
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
  const { models } = await ask("/v1/cluster/xavier").catch(() => ({ models: {} }));
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
 * Less if another model is selected.
 * @param {AbortSignal} signal
 * @param {number} seconds
 */
function pause(signal, seconds = 1) {
  return new Promise((resolve) => {
    setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", resolve, { once: true });
  });
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
  const text = language.words;
  try {
    await ask(pathOf(chosen(), what), how);
    state.notice = done;
  } catch (error) {
    const { kind, message } = troubleOf(error);
    state.notice =
      kind === "forbidden" ? text.mayNotChange : fill(text.failed, { reason: message });
  }
  if (state.notice !== null) say(state.notice);
  show();
}
