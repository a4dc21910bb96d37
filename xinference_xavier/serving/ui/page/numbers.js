// Numbers as people read them, and what follows from several reports.

import { ANSWER_BOUNDS, HIT_SOURCES } from "../constants.js";
import { fill } from "../languages.js";
import { language, named, reasonOf } from "./settings.js";

const RECENT_SECONDS = 300; // "the last 5 minutes" of the words
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/**
 * @param {number} value
 * @param {Intl.NumberFormatOptions} options
 */
function format(value, options) {
  return new Intl.NumberFormat(language.code, options).format(value);
}

/** @param {number} value */
export function count(value) {
  if (value >= 1e6) return format(value, { notation: "compact", maximumFractionDigits: 2 });
  return format(value, { maximumFractionDigits: value < 10 ? 1 : 0 });
}

/** @param {number} share */
export function percent(share) {
  return format(share, { style: "percent", maximumSignificantDigits: 2 });
}

/** @param {number} value */
export function bytes(value) {
  const power = Math.min(BYTE_UNITS.length - 1, Math.floor(Math.log2(Math.max(1, value)) / 10));
  const size = value / 1024 ** power;
  return `${format(size, { maximumFractionDigits: size < 100 ? 1 : 0 })} ${BYTE_UNITS[power]}`;
}

/** @param {number} value */
export function bytesPerSecond(value) {
  return `${bytes(value)}/s`;
}

/** @param {number} seconds */
export function duration(seconds) {
  const unit = (/** @type {number} */ value, /** @type {string} */ name) =>
    format(value, { style: "unit", unit: name, maximumFractionDigits: value < 10 ? 1 : 0 });
  const [minutes, hours] = [Math.floor(seconds / 60), Math.floor(seconds / 3600)];
  if (hours > 0) return `${unit(hours, "hour")} ${unit(minutes % 60, "minute")}`;
  if (minutes > 1) return `${unit(minutes, "minute")} ${unit(Math.floor(seconds % 60), "second")}`;
  if (seconds === 0 || seconds >= 0.9995) return unit(seconds, "second");
  return unit(Math.max(1, Math.round(1000 * seconds)), "millisecond");
}

/**
 * @param {number} seconds since 1970
 * @param {"medium" | "short"} timeStyle
 */
export function clock(seconds, timeStyle = "medium") {
  return new Date(seconds * 1000).toLocaleTimeString(language.code, {
    timeStyle,
    hourCycle: "h23",
  });
}

/** @param {number[]} values */
export function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/**
 * All tokens, and the share of those that came from a replica's pool, a disk or another replica.
 * @param {Hits} hits
 */
export function tokensOf(hits) {
  const all = sum(HIT_SOURCES.map((source) => hits[source]));
  const shared = hits.local_pool + hits.disk + hits.remote;
  return { all, shared, share: shared / (all || 1) };
}

/**
 * @param {Report} report
 * @param {string} incarnation
 */
export function nameOf(report, incarnation) {
  const id = incarnation.slice(0, 8);
  const replica = report.replicas.find((each) => each.incarnation === incarnation);
  return replica === undefined ? fill(language.words.someoneGone, { id }) : replica.replica || id;
}

/**
 * @param {Report} report
 * @param {XavierEvent} event
 */
export function sentenceOf(report, event) {
  const replicas = new Set(report.replicas.map(({ incarnation }) => incarnation));
  const readable = Object.entries(event).map(([field, value]) => {
    if (field === "reason") return [field, reasonOf(`${value}`)];
    if (field === "routing") return [field, named(`mode_${value}`, `${value}`)];
    if (field === "donor" && value === "") return [field, language.words.ownPool];
    return [field, replicas.has(`${value}`) ? nameOf(report, `${value}`) : value];
  });
  const state = event.enabled === undefined ? "" : event.enabled ? "_on" : "_off";
  return fill(named(event.event + state, event.event), Object.fromEntries(readable));
}

/**
 * Every pair of replicas with transfers. Its rate is measured over these reports, oldest first.
 * @param {{ report: Report, time: number }[]} reports
 * @returns {Link[]}
 */
export function linksOf(reports) {
  const [first, last] = [reports[0], reports[reports.length - 1]];
  const seconds = last.time - first.time;
  return last.report.replicas.flatMap(({ incarnation: to, received_from: received, fetching }) => {
    const before = first.report.replicas.find(({ incarnation }) => incarnation === to);
    return [...new Set([...Object.keys(received), ...Object.keys(fetching)])].map((from) => {
      const all = received[from] ?? 0;
      // A replica that has just joined has no rate until the next report.
      const moved = before === undefined ? 0 : increase(all, before.received_from[from]);
      const rate = seconds > 0 ? moved / seconds : 0;
      return { from, to, bytes: all, rate, rows: fetching[from] ?? 0 };
    });
  });
}

/**
 * What was counted since, number by number. A counter that fell began anew: it counts nothing.
 * @param {any} now
 * @param {any} then
 * @returns {any}
 */
function increase(now, then) {
  if (typeof now === "number") return Math.max(0, now - (then ?? 0));
  if (Array.isArray(now)) return now.map((value, index) => increase(value, then?.[index]));
  return record(Object.keys(now), (key) => increase(now[key], then?.[key]));
}

/**
 * @template {string} Key
 * @template Value
 * @param {Key[]} keys
 * @param {(key: Key) => Value} value
 */
function record(keys, value) {
  const pairs = keys.map((key) => [key, value(key)]);
  return /** @type {Record<Key, Value>} */ (Object.fromEntries(pairs));
}

/**
 * What was counted between each two samples.
 * @param {Sample[]} samples
 * @returns {{ time: number, seconds: number, more: Counters }[]}
 */
function stepsOf(samples) {
  return samples.slice(1).map((sample, index) => ({
    time: sample.time,
    seconds: sample.time - samples[index].time,
    more: increase(sample, samples[index]),
  }));
}

/** @param {Counters} counters */
export function rolledBack({ fetches }) {
  return sum(Object.values(fetches.rolled_back));
}

/**
 * Tokens by source and bytes, per second.
 * @param {Sample[]} samples
 */
export function perSecond(samples) {
  return stepsOf(samples).map(({ time, seconds, more }) => ({
    time,
    ...record(HIT_SOURCES, (source) => more.hits[source] / seconds),
    bytes: more.bytes_received / seconds,
  }));
}

/**
 * Fetches, and the median time to first token by source: both are too rare for figures over 10 s.
 * @param {Sample[]} samples
 */
export function perMinute(samples) {
  const latest = new Map(samples.map((sample) => [Math.floor(sample.time / 60), sample]));
  const minutes = new Set([...samples.slice(0, 1), ...latest.values()]);
  return stepsOf([...minutes]).map(({ time, seconds, more }) => ({
    time,
    ...record(HIT_SOURCES, (source) => quantile(more.first_tokens[source].counts, 0.5)),
    committed: (60 * more.fetches.committed) / seconds,
    rolled_back: (60 * rolledBack(more)) / seconds,
  }));
}

/**
 * The tokens of the last minutes by source, and the median time to first token; null before there
 * are two samples.
 * @param {Sample[]} samples
 */
export function recentOf(samples) {
  const from = (samples.at(-1)?.time ?? 0) - RECENT_SECONDS;
  const steps = stepsOf(samples.filter(({ time }) => time >= from));
  if (steps.length === 0) return null;
  return {
    hits: record(HIT_SOURCES, (source) => sum(steps.map(({ more }) => more.hits[source]))),
    medians: record(HIT_SOURCES, (source) => {
      const waits = steps.map(({ more }) => more.first_tokens[source].counts);
      return quantile(
        waits[0].map((_, bucket) => sum(waits.map((counts) => counts[bucket]))),
        0.5,
      );
    }),
  };
}

/**
 * The seconds that this share of all observations do not exceed, as `Histogram.quantile` computes
 * them; null without observations. `counts` are those of ANSWER_BOUNDS' buckets.
 * @param {number[]} counts
 * @param {number} share
 */
export function quantile(counts, share) {
  const rank = share * sum(counts);
  if (rank === 0) return null;
  let below = 0;
  let bucket = 0;
  for (; below + counts[bucket] < rank; bucket += 1) below += counts[bucket];
  const lower = ANSWER_BOUNDS[bucket - 1] ?? 0;
  const upper = ANSWER_BOUNDS[bucket] ?? lower;
  return lower + ((upper - lower) * (rank - below)) / counts[bucket];
}
