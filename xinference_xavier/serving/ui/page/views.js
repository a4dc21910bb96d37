// The parts of the page, each drawn from the state alone.

import { HIT_SOURCES } from "../constants.js";
import { fill } from "../languages.js";
import { h } from "./dom.js";
import { graphView } from "./graph.js";
import {
  brief,
  bytes,
  bytesPerSecond,
  clock,
  count,
  duration,
  firstTokensOf,
  nameOf,
  percent,
  perMinute,
  ratesOf,
  recentOf,
  rolledBack,
  sharedOf,
  sum,
  tokensOf,
} from "./numbers.js";
import { LINES, niceBytes, niceCeiling, plotView } from "./plots.js";
import { language, named } from "./settings.js";

/** @typedef {import("./plots.js").Plot} Plot */

/**
 * Where tokens may come from: the disk only if a replica has one.
 * @param {Report} report
 */
function sourcesOf({ replicas, totals }) {
  const hasDisk = totals.hits.disk > 0 || replicas.some(({ disk }) => disk.state !== "");
  return HIT_SOURCES.filter((source) => source !== "disk" || hasDisk);
}

/**
 * @param {Hits} hits
 * @param {boolean} thin
 */
function splitBar(hits, thin) {
  const { all } = tokensOf(hits);
  const text = language.words;
  return h(
    "div",
    {
      class: thin ? "split thin" : "split",
      role: "img",
      "aria-label": HIT_SOURCES.map((key) => `${text[key]} ${percent(hits[key], all)}`).join(", "),
    },
    all > 0 &&
      HIT_SOURCES.map((key) =>
        h("span", { class: key, style: widthOf(hits[key], all), title: text[key] }),
      ),
  );
}

/**
 * @param {number} part
 * @param {number} all
 */
export function widthOf(part, all) {
  return { width: `${((100 * part) / all).toFixed(2)}%` };
}

/**
 * @param {string} id
 * @param {string} title
 * @param {string} big
 * @param {string} small
 */
function tile(id, title, big, small) {
  return h(
    "section",
    { class: "card tile" },
    h("h2", { class: "muted small" }, title),
    h("p", { class: "big", id }, big),
    h("p", { class: "muted small" }, small),
  );
}

/**
 * Whether sharing helps now.
 * @param {Report} report
 * @param {Sample[]} samples
 */
export function recentView(report, samples) {
  const text = language.words;
  const recent = recentOf(samples, report.totals);
  return h(
    "section",
    { class: "stack", id: "recent" },
    h(
      "div",
      { class: "head" },
      h("h2", null, text.helping),
      h("span", { class: "muted" }, text.recent),
    ),
    recent === null
      ? h("p", { class: "muted" }, text.noSamples)
      : recentTiles(recent, sourcesOf(report)),
  );
}

/**
 * @param {NonNullable<ReturnType<typeof recentOf>>} recent
 * @param {Source[]} sources
 */
function recentTiles({ hits, shared, rate, saved, waits }, sources) {
  const text = language.words;
  const { all } = tokensOf(hits);
  const share = percent(shared, all);
  const helps = shared > 0 ? fill(text.helps, { percent: share }) : text.helpsNot;
  const rows = sources.map((source) =>
    row(text[source], cell(brief(waits[source].median)), cell(count(waits[source].requests))),
  );
  return [
    h("p", { id: "helps" }, all > 0 ? helps : text.helpsNobody),
    h(
      "div",
      { class: "tiles" },
      tile(
        "shared-now",
        text.sharedNow,
        fill(text.perSecond, { count: count(rate) }),
        fill(text.ofPrompt, { percent: share }),
      ),
      tile(
        "saved-now",
        text.savedNow,
        saved === null ? "–" : brief(saved),
        saved === null ? text.notMeasured : fill(text.byTokens, { count: count(shared) }),
      ),
      h(
        "section",
        { class: "card" },
        h("h2", { class: "muted small" }, text.firstTokenNow),
        table("waits-now", [[text.source], [text.median, true], [text.requests, true]], rows),
      ),
    ),
  ];
}

/**
 * @param {Report} report
 * @param {Link[]} links
 */
export function tilesView(report, links) {
  const text = language.words;
  const { hits, bytes_received: received, fetches, seconds_saved: seconds } = report.totals;
  const { all, reused } = tokensOf(hits);
  const rate = bytesPerSecond(sum(links.map((link) => link.rate)));
  return h(
    "section",
    { class: "stack" },
    h("h2", null, text.sinceStart),
    h(
      "div",
      { class: "tiles" },
      tile(
        "reused",
        text.reused,
        percent(reused, all),
        fill(text.ofTokens, { part: count(reused), all: count(all) }),
      ),
      tile(
        "from-remote",
        text.fromPeers,
        count(hits.remote),
        fill(text.ofPrompt, { percent: percent(hits.remote, all) }),
      ),
      tile(
        "saved",
        text.saved,
        count(sharedOf(hits)),
        seconds > 0 ? fill(text.savedSeconds, { time: duration(seconds) }) : text.notMeasured,
      ),
      tile("received", text.received, bytes(received), fill(text.now, { rate })),
      tile(
        "fetches",
        text.fetches,
        count(fetches.committed),
        fill(text.rolledBackCount, { count: count(rolledBack(fetches)) }),
      ),
    ),
  );
}

/** @param {Report} report */
export function sourcesView(report) {
  const text = language.words;
  const { hits } = report.totals;
  const { all } = tokensOf(hits);
  const legend = sourcesOf(report).map((key) =>
    h(
      "li",
      null,
      h("i", { class: key }),
      `${text[key]} ${percent(hits[key], all)} (${count(hits[key])})`,
    ),
  );
  return h(
    "section",
    { class: "card", id: "sources" },
    h("h2", null, text.sources),
    splitBar(hits, false),
    all === 0
      ? h("p", { class: "muted small" }, text.noTokens)
      : h("ul", { class: "legend small" }, legend),
  );
}

/**
 * @param {Report} report
 * @param {Link[]} links
 * @param {number} width
 */
export function graphCard(report, links, width) {
  return h(
    "section",
    { class: "card" },
    h("h2", null, language.words.graph),
    h("div", { class: "graph", "data-measure": "graph" }, graphView(report, links, width)),
  );
}

/**
 * A heading with `true` is that of numbers.
 * @param {string} id
 * @param {[string, boolean?][]} headings
 * @param {Child} rows
 */
export function table(id, headings, rows) {
  const titles = headings.map(([title, numeric]) =>
    h("th", { scope: "col", class: numeric ? "number" : null }, title),
  );
  return h(
    "div",
    { class: "wide", tabindex: 0 },
    h("table", { id }, h("thead", null, h("tr", null, titles)), h("tbody", null, rows)),
  );
}

/**
 * @param {Child} title
 * @param {Child[]} cells
 */
export function row(title, ...cells) {
  return h("tr", null, h("th", { scope: "row" }, title), cells);
}

/**
 * @param {Child} value
 * @param {boolean} numeric
 */
export function cell(value, numeric = true) {
  return h("td", { class: numeric ? "number" : null }, value);
}

/** @param {Child} content */
export function note(content) {
  return h("div", { class: "muted small" }, content);
}

/**
 * @param {Report} report
 * @param {Link[]} links
 */
export function linksView(report, links) {
  const text = language.words;
  const rows = links.map((link) =>
    row(
      nameOf(report, link.from),
      cell(nameOf(report, link.to), false),
      cell(bytes(link.bytes)),
      cell(bytesPerSecond(link.rate)),
      cell(count(link.rows)),
    ),
  );
  return h(
    "section",
    { class: "card" },
    h("h2", null, text.links),
    links.length === 0
      ? h("p", { class: "muted" }, text.noLinks)
      : table(
          "links",
          [[text.from], [text.to], [text.bytes, true], [text.rate, true], [text.inFlight, true]],
          rows,
        ),
  );
}

/** @param {Report} report */
export function replicasView(report) {
  const text = language.words;
  const groups = [...new Set(report.replicas.map((replica) => replica.namespace))];
  const headings = /** @type {[string, boolean?][]} */ ([
    [text.replica],
    [text.pool],
    [text.offered, true],
    [text.requests, true],
    [text.reusedShare],
    [text.speed, true],
    [text.transport],
  ]);
  return h(
    "section",
    { class: "card" },
    h("h2", null, text.replicas),
    table(
      "replicas",
      headings,
      report.replicas.map((replica) => replicaRow(report, replica, groups)),
    ),
  );
}

/**
 * @param {Report} report
 * @param {Replica} replica
 * @param {string[]} groups
 */
function replicaRow(report, replica, groups) {
  const text = language.words;
  const { all, reused } = tokensOf(replica.hits);
  const speed = replica.prefill_tokens_per_s ?? 0;
  const group = fill(text.namespace, { number: groups.indexOf(replica.namespace) + 1 });
  const names = replica.from_environment.map((name) => `xavier_${name}`).join(", ");
  const left = report.routing?.loads?.[replica.replica]?.requests ?? "?";
  return row(
    [
      nameOf(report, replica.incarnation),
      groups.length > 1 && ` · ${group}`,
      h("div", { class: "muted small", title: text.address }, replica.address),
      replica.vllm &&
        note(`vLLM ${replica.vllm}${replica.vllm_untested ? ` (${text.untested})` : ""}`),
      names !== "" && note(fill(text.fromEnvironment, { names })),
      replica.draining && note(fill(text.draining, { requests: left })),
      replica.stale && note(text.stale),
    ],
    cell(poolText(replica), false),
    cell(count(replica.holdings ?? 0)),
    cell(count(replica.requests)),
    cell([percent(reused, all), splitBar(replica.hits, true)], false),
    cell(speed > 0 ? fill(text.perSecond, { count: count(Math.round(speed)) }) : "–"),
    cell(replica.transport ?? "–", false),
  );
}

/** @param {Replica} replica */
function poolText({ pool, disk }) {
  const text = language.words;
  if (!pool.rows) return "–";
  const used = bytes((pool.ready + pool.filling) * pool.row_bytes);
  const pinned = fill(text.pinned, { count: count(pool.pinned) });
  const quarantined = fill(text.quarantined, { count: count(pool.quarantined) });
  const enough = pool.cache_rows * pool.row_bytes * pool.engines;
  return [
    fill(text.poolOf, { used, all: bytes(pool.rows * pool.row_bytes) }),
    note(pool.quarantined > 0 ? `${pinned}, ${quarantined}` : pinned),
    pool.rows < pool.cache_rows &&
      note(fill(text.smallPool, { share: percent(pool.rows, pool.cache_rows), size: enough })),
    disk.state !== "" && note(diskText(disk, pool.row_bytes)),
  ];
}

/**
 * @param {Disk} disk
 * @param {number} rowBytes
 */
function diskText(disk, rowBytes) {
  const text = language.words;
  if (disk.problem !== "") return fill(text.diskFails, { problem: disk.problem });
  if (disk.state === "computed differently") return text.diskDiffers;
  const used = bytes(disk.rows * rowBytes);
  return fill(text.diskOf, { used, all: bytes(disk.limit_bytes) });
}

/** @param {Report} report */
export function outcomesView(report) {
  const text = language.words;
  const { fetches } = report.totals;
  const reasons = Object.entries(fetches.rolled_back).sort(([, one], [, other]) => other - one);
  return h(
    "section",
    { class: "card" },
    h("h2", null, text.outcomes),
    table(
      "outcomes",
      [[text.outcome], [text.count, true]],
      [
        row(text.committed, cell(count(fetches.committed))),
        ...reasons.map(([why, times]) => row(fill(text.reason, { why }), cell(count(times)))),
      ],
    ),
  );
}

/** @param {Sample[]} samples */
function untilOf(samples) {
  return samples.at(-1)?.time ?? Date.now() / 1000;
}

/**
 * @param {Report} report
 * @param {Sample[]} samples
 * @param {number} width
 * @param {Plot["cursors"]} cursors
 * @param {() => void} changed
 */
export function firstTokensView(report, samples, width, cursors, changed) {
  const text = language.words;
  return h(
    "div",
    { "data-measure": "firstTokens" },
    plotView({
      name: "first-tokens",
      title: text.firstTokens,
      help: text.firstTokensHelp,
      shape: LINES,
      series: sourcesOf(report),
      format: brief,
      nice: niceCeiling,
      rates: firstTokensOf(samples),
      until: untilOf(samples),
      width,
      cursors,
      changed,
    }),
  );
}

/**
 * @param {Report} report
 * @param {Sample[]} samples
 * @param {number} width
 * @param {Plot["cursors"]} cursors
 * @param {() => void} changed
 */
export function plotsView(report, samples, width, cursors, changed) {
  const text = language.words;
  const common = {
    rates: ratesOf(samples),
    nice: niceCeiling,
    until: untilOf(samples),
    format: (/** @type {number | null} */ value) => count(value ?? 0),
    width,
    cursors,
    changed,
  };
  return h(
    "section",
    { "aria-label": text.hour },
    h("h2", { class: "unseen" }, text.hour),
    h(
      "div",
      { class: "columns narrow", "data-measure": "plots" },
      plotView({ ...common, name: "tokens", title: text.tokensPlot, series: sourcesOf(report) }),
      plotView({
        ...common,
        name: "bytes",
        title: text.bytesPlot,
        series: ["bytes"],
        format: bytes,
        nice: niceBytes,
      }),
      plotView({
        ...common,
        name: "fetches",
        title: text.fetchPlot,
        rates: perMinute(samples),
        series: ["committed", "rolled_back"],
      }),
    ),
  );
}

/**
 * @param {Report | null} report
 * @param {XavierEvent} event
 */
export function sentenceOf(report, event) {
  const values = { ...event, donor: event.donor || language.words.ownPool };
  /** @type {Record<string, string | number>} */
  const readable = Object.fromEntries(
    Object.entries(values).map(([field, value]) => [field, replicaName(report, String(value))]),
  );
  const state = event.enabled === undefined ? "" : event.enabled ? "_on" : "_off";
  const sentence = named(event.event + state);
  return sentence === undefined ? event.event : fill(sentence, readable);
}

/**
 * What people call a replica, if the value is the engine id of one.
 * @param {Report | null} report
 * @param {string} value
 */
function replicaName(report, value) {
  const isReplica = report?.replicas.some(({ incarnation }) => incarnation === value);
  return report !== null && isReplica ? nameOf(report, value) : value;
}

/**
 * @param {Report} report
 * @param {XavierEvent[]} events
 */
export function eventsView(report, events) {
  const text = language.words;
  const lines = events
    .toReversed()
    .map((event) =>
      h(
        "li",
        null,
        h("time", { datetime: new Date(event.time * 1000).toISOString() }, clock(event.time)),
        h("span", null, sentenceOf(report, event)),
      ),
    );
  return h(
    "section",
    { class: "card" },
    h("h2", null, text.events),
    lines.length === 0
      ? h("p", { class: "muted" }, text.noEvents)
      : h("ol", { class: "events", id: "events", tabindex: 0 }, lines),
  );
}
