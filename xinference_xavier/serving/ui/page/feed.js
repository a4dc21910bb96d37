// What the page knows, and what keeps it up to date.
//
// One loop runs for ever: it asks which models share, then listens to the chosen one until that
// ends, however it ends. What was shown last stays, marked as old, until there is something newer.

const API = "/v1/xavier";
const WAITS = [1, 2, 5]; // seconds before the next try; the last one for all later ones
const LIST_AGAIN = 10; // seconds
const MOST_SAMPLES = 360;
const MOST_EVENTS = 100;

const state = {
  models: null, // reports of all models that share; null while nobody has answered
  recent: new Recent(),
  samples: [],
  events: [],
  live: false,
  trouble: null,
  retryIn: 0, // seconds
  lost: null, // the model that was shown and is not there any more
  notice: null,
};
let interval = 10; // seconds between two samples
let ahead = 0; // seconds by which the server's clock is ahead of ours
let told = false; // whether what happens now is news
let stream = new AbortController();
let wake = () => {};

function now() {
  return Date.now() / 1000 + ahead;
}

function uidOf(report) {
  return report?.model_uid ?? null;
}

function chosen() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const uids = (state.models ?? []).map(uidOf);
  return uids.includes(wanted) ? wanted : (uids[0] ?? null);
}

function isHere(uid) {
  return state.models.some((known) => uidOf(known) === uid);
}

function pathOf(uid, what = "") {
  return `${API}/${encodeURIComponent(uid)}${what}`;
}

async function refreshModels() {
  const { models, unavailable = {} } = await askJson(API);
  state.models = models;
  const [reason] = Object.values(unavailable);
  if (models.length === 0 && reason !== undefined) throw new Trouble("tracker", reason);
}

function hear(event, data) {
  if (event === "status") hearStatus(data);
  else if (event === "history") hearHistory(data);
  else if (event === "event") hearEvent(data);
  else if (event === "unavailable") {
    Object.assign(state, { live: false, trouble: new Trouble("tracker", data.detail) });
  }
  show();
}

function hearStatus(report) {
  Object.assign(state, { live: true, trouble: null });
  told = true;
  state.recent.add(report, now());
  state.models = state.models.map((known) => (uidOf(known) === uidOf(report) ? report : known));
  // The server sends its samples once; from then on we take them ourselves.
  if (now() - (state.samples.at(-1)?.time ?? -Infinity) >= interval) {
    state.samples = [...state.samples, { time: now(), ...report.totals }].slice(-MOST_SAMPLES);
  }
}

function hearHistory(history) {
  interval = history.interval_s;
  const newest = history.samples.at(-1)?.time;
  const drift = newest === undefined ? 0 : newest - Date.now() / 1000;
  // A sample may be one interval old; only what is more than that is a difference of clocks.
  ahead = drift > 0 || drift < -2 * interval ? drift : 0;
  Object.assign(state, { samples: history.samples, events: [], recent: new Recent() });
  told = false;
}

function hearEvent(event) {
  state.events = [...state.events, event].slice(-MOST_EVENTS);
  if (told) say(sentenceOf(state.recent.report, event));
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
        await listen(pathOf(uid, "/events"), (event, data) => {
          failures = 0;
          hear(event, data);
        }, stream.signal).catch((error) => {
          // It went between the two questions: the next list will not have it.
          if (error.kind !== "absent") throw error;
        });
      }
    } catch (error) {
      state.trouble = error instanceof Trouble ? error : new Trouble("away", String(error));
    }
    state.live = false;
    if (stream.signal.aborted) {
      state.trouble = null; // it was we who ended it, for another model
      continue;
    }
    failures += 1;
    await rest(state.models?.length === 0 ? WAITS.at(-1) : WAITS[Math.min(failures, WAITS.length) - 1]);
  }
}

// Counts down for all to see; `wake` ends it.
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

function choose() {
  stream.abort();
  wake();
}

async function change(what, body, done) {
  const uid = chosen();
  try {
    await askJson(pathOf(uid, what), { method: "POST", body });
    state.notice = done;
  } catch (error) {
    const text = language.words;
    state.notice = error.kind === "forbidden" ? text.mayNotChange : text.failed(error.message);
  }
  if (state.notice !== null) say(state.notice);
  show();
}

setInterval(() => {
  // A failure shows where it matters, in the stream.
  if (state.live) refreshModels().then(show, () => {});
}, LIST_AGAIN * 1000);
