// Numbers as people read them, and rates from successive reports.

import { ANSWER_BOUNDS, HIT_SOURCES } from "../constants.js";
import { fill } from "../languages.js";
import { language, named, reasonOf } from "./settings.js";

const RECENT_REPORTS = 6; // current rates are measured over these
const RECENT_SECONDS = 300; // "the last 5 minutes" of the words
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** @param {number} value */
export function count(value) {
  const long = value >= 1e6;
  const digits = value > 0 && value < 10 && !Number.isInteger(value) ? 1 : 0;
  return new Intl.NumberFormat(
    language.code,
    long ? { notation: "compact", maximumFractionDigits: 2 } : { maximumFractionDigits: digits },
  ).format(value);
}

/**
 * @param {number} part
 * @param {number} all
 */
export function percent(part, all) {
  const value = all > 0 ? part / all : 0;
  return new Intl.NumberFormat(language.code, {
    style: "percent",
    maximumFractionDigits: value > 0 && value < 0.1 ? 1 : 0,
  }).format(value);
}

/** @param {number | null} value */
export function bytes(value) {
  let unit = 0;
  let size = value ?? 0;
  while (size >= 1024 && unit < BYTE_UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toFixed(unit === 0 || size >= 100 ? 0 : 1)} ${BYTE_UNITS[unit]}`;
}

/** @param {number} value */
export function bytesPerSecond(value) {
  return `${bytes(value)}/${language.words.second}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  const { second, minute, hourUnit } = language.words;
  const minutes = Math.floor(seconds / 60);
  if (seconds < 60) return `${count(seconds)} ${second}`;
  if (seconds < 3600) return `${minutes} ${minute} ${Math.floor(seconds % 60)} ${second}`;
  return `${Math.floor(seconds / 3600)} ${hourUnit} ${minutes % 60} ${minute}`;
}

/**
 * A short time; forecasts are often of milliseconds.
 * @param {number | null} seconds
 */
export function brief(seconds) {
  if (seconds === null) return "–";
  if (seconds === 0 || seconds >= 0.9995) return duration(seconds);
  return `${Math.max(1, Math.round(1000 * seconds))} ${language.words.millisecond}`;
}

/**
 * @param {number} seconds
 * @param {boolean} withSeconds
 */
export function clock(seconds, withSeconds = true) {
  return new Date(seconds * 1000).toLocaleTimeString(language.code, {
    hour: "2-digit",
    minute: "2-digit",
    hourCycle: "h23",
    ...(withSeconds ? { second: "2-digit" } : {}),
  });
}

/**
 * @param {unknown[]} values
 * @returns {number}
 */
export function sum(values) {
  return values.reduce(
    (/** @type {number} */ total, value) => total + (Number.isFinite(value) ? Number(value) : 0),
    0,
  );
}

/**
 * All tokens, and those that are shared: from anywhere but vLLM's own cache.
 * @param {Hits} hits
 */
export function tokensOf(hits) {
  const all = sum(HIT_SOURCES.map((source) => hits[source]));
  return { all, shared: hits.local_pool + hits.disk + hits.remote };
}

/** @param {Fetches | undefined} fetches */
export function rolledBack(fetches) {
  return sum(Object.values(fetches?.rolled_back ?? {}));
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
 * @param {Report | null} report
 * @param {XavierEvent} event
 */
export function sentenceOf(report, event) {
  const text = language.words;
  const { donor, reason } = event;
  const values = {
    ...event,
    ...(donor === "" ? { donor: text.ownPool } : {}),
    ...(reason === undefined ? {} : { reason: reasonOf(`${reason}`) }),
  };
  const readable = Object.fromEntries(
    Object.entries(values).map(([field, value]) => {
      const isReplica = report?.replicas.some(({ incarnation }) => incarnation === value);
      return [field, report && isReplica ? nameOf(report, `${value}`) : `${value}`];
    }),
  );
  const state = event.enabled === undefined ? "" : event.enabled ? "_on" : "_off";
  const sentence = named(event.event + state);
  return sentence === undefined ? event.event : fill(sentence, readable);
}

// The latest reports with their times of arrival, in seconds.
export class Recent {
  constructor() {
    /** @type {{ report: Report, time: number }[]} */
    this.kept = [];
  }

  /**
   * @param {Report} report
   * @param {number} time
   */
  add(report, time) {
    this.kept = [...this.kept, { report, time }].slice(-RECENT_REPORTS);
  }

  get report() {
    return this.kept.at(-1)?.report ?? null;
  }

  get time() {
    return this.kept.at(-1)?.time ?? null;
  }

  /**
   * Every pair of replicas with transfers, and its recent bytes per second.
   * @returns {Link[]}
   */
  links() {
    const [first, last] = [this.kept.at(0), this.kept.at(-1)];
    if (first === undefined || last === undefined) return [];
    const seconds = last.time - first.time;
    return last.report.replicas.flatMap((consumer) => {
      const before = first.report.replicas.find(
        (each) => each.incarnation === consumer.incarnation,
      )?.received_from;
      const received = consumer.received_from ?? {};
      const fetching = consumer.fetching ?? {};
      return [...new Set([...Object.keys(received), ...Object.keys(fetching)])].map((donor) => {
        const all = received[donor] ?? 0;
        // A replica that has just joined has no rate until the next report.
        const moved = before === undefined ? 0 : Math.max(0, all - (before[donor] ?? 0));
        const rate = seconds > 0 ? moved / seconds : 0;
        const rows = fetching[donor] ?? 0;
        return { from: donor, to: consumer.incarnation, bytes: all, rate, rows };
      });
    });
  }
}

/**
 * Rates per second between samples, oldest first. Counters that fell were restarted: rate 0.
 * @param {Sample[]} samples
 */
export function ratesOf(samples) {
  return samples.slice(1).map((sample, index) => {
    const before = samples[index];
    const seconds = sample.time - before.time;
    /**
     * @param {number | undefined} now
     * @param {number | undefined} then
     */
    const rate = (now, then) => (seconds > 0 ? increase(now, then) / seconds : 0);
    return {
      time: sample.time,
      ...bySource((source) => rate(sample.hits?.[source], before.hits?.[source])),
      bytes: rate(sample.bytes_received, before.bytes_received),
      committed: rate(sample.fetches?.committed, before.fetches?.committed),
      rolled_back: rate(rolledBack(sample.fetches), rolledBack(before.fetches)),
    };
  });
}

/**
 * @param {number | undefined} now
 * @param {number | undefined} then
 */
function increase(now, then) {
  return Math.max(0, (now ?? 0) - (then ?? 0));
}

/**
 * @template T
 * @param {(source: Source) => T} value
 * @returns {Record<Source, T>}
 */
function bySource(value) {
  const pairs = HIT_SOURCES.map((source) => [source, value(source)]);
  return /** @type {Record<Source, T>} */ (Object.fromEntries(pairs));
}

/**
 * Fetches and requests may be too rare for figures over 10 s.
 * @param {Sample[]} samples
 */
function everyMinute(samples) {
  const minutes = new Map(samples.map((sample) => [Math.floor(sample.time / 60), sample]));
  return [...new Set([...samples.slice(0, 1), ...minutes.values()])];
}

/** @param {Sample[]} samples */
export function perMinute(samples) {
  return ratesOf(everyMinute(samples)).map((rate) => ({
    time: rate.time,
    committed: 60 * rate.committed,
    rolled_back: 60 * rate.rolled_back,
  }));
}

/**
 * The median time to first token in each minute by source, null where there was no request.
 * @param {Sample[]} samples
 */
export function firstTokensOf(samples) {
  const minutes = everyMinute(samples);
  return minutes.slice(1).map((sample, index) => ({
    time: sample.time,
    ...bySource((source) => quantile(waitsBetween(minutes[index], sample, source), 0.5)),
  }));
}

/**
 * What the last minutes brought: tokens by source, those shared per second, the seconds that
 * computing these would have taken, and the waits; null before there are two samples. `totals` are
 * those since the start, whose speed of computing is taken.
 * @param {Sample[]} samples
 * @param {Counters} totals
 */
export function recentOf(samples, totals) {
  const from = (samples.at(-1)?.time ?? 0) - RECENT_SECONDS;
  const inside = samples.filter(({ time }) => time >= from);
  const steps = inside.slice(1).map((sample, index) => ({ before: inside[index], sample }));
  if (steps.length === 0) return null;
  const seconds = steps[steps.length - 1].sample.time - steps[0].before.time;
  const hits = bySource((source) =>
    sum(steps.map(({ before, sample }) => increase(sample.hits?.[source], before.hits?.[source]))),
  );
  const { shared } = tokensOf(hits);
  const { shared: sharedEver } = tokensOf(totals.hits);
  return {
    hits,
    shared,
    rate: shared / seconds,
    saved: totals.seconds_saved > 0 ? (shared * totals.seconds_saved) / sharedEver : null,
    waits: bySource((source) => {
      const counts = [...ANSWER_BOUNDS, Infinity].map((_, bucket) =>
        sum(steps.map(({ before, sample }) => waitsBetween(before, sample, source)[bucket])),
      );
      return { requests: sum(counts), median: quantile(counts, 0.5) };
    }),
  };
}

/**
 * How many requests of a source waited for how long, by bucket.
 * @param {Sample} before
 * @param {Sample} sample
 * @param {Source} source
 */
function waitsBetween(before, sample, source) {
  const then = before.first_tokens?.[source]?.counts ?? [];
  const now = sample.first_tokens?.[source]?.counts ?? [];
  return now.map((all, bucket) => increase(all, then[bucket]));
}

/**
 * The seconds that this share of all observations do not exceed, as `Histogram.quantile` computes
 * them; null without observations. `counts` are those of ANSWER_BOUNDS' buckets.
 * @param {number[]} counts
 * @param {number} share
 */
export function quantile(counts, share) {
  const rank = share * sum(counts);
  if (!(rank > 0)) return null;
  let below = 0;
  let bucket = 0;
  for (; below + counts[bucket] < rank; bucket += 1) below += counts[bucket];
  const lower = ANSWER_BOUNDS[bucket - 1] ?? 0;
  const upper = ANSWER_BOUNDS[bucket] ?? lower;
  return lower + ((upper - lower) * (rank - below)) / counts[bucket];
}
