// What a model's report says, part by part.

import { CHOICES, HIT_SOURCES, ROUTINGS } from "../constants.js";
import { html } from "../html.js";
import { fill } from "../languages.js";
import {
  bytes,
  bytesPerSecond,
  clock,
  count,
  duration,
  nameOf,
  percent,
  perMinute,
  perSecond,
  quantile,
  recentOf,
  rolledBack,
  sentenceOf,
  sum,
  tokensOf,
} from "./numbers.js";
import { bar, Card, note, Tile, table } from "./parts.js";
import { Plot } from "./plots.js";
import { language, named, reasonOf } from "./settings.js";
import { change } from "./state.js";

/**
 * Where tokens may come from: the disk only if a replica has one.
 * @param {Report} report
 */
function sourcesOf({ replicas, totals }) {
  const hasDisk = totals.hits.disk > 0 || replicas.some(({ disk }) => disk.state !== "");
  return HIT_SOURCES.filter((source) => source !== "disk" || hasDisk);
}

/**
 * Whether sharing helps, now and since the replicas started.
 * @param {{ report: Report, samples: Sample[], links: Link[] }} props
 */
export function Summary({ report, samples, links }) {
  const text = language.words;
  const { hits, bytes_received: received, fetches, seconds_saved: seconds } = report.totals;
  const recent = recentOf(samples);
  const share = (/** @type {Hits} */ tokens, /** @type {Source} */ key) =>
    tokensOf(tokens).all > 0 ? tokens[key] / tokensOf(tokens).all : null;
  const reasons = Object.entries(fetches.rolled_back)
    .sort(([, one], [, other]) => other - one)
    .map(([why, times]) => `${reasonOf(why)} (${count(times)})`);
  const failed = fill(text.rolledBack, { count: count(rolledBack(report.totals)) });
  const rate = bytesPerSecond(sum(links.map((link) => link.rate)));
  const saved = fill(text.byTokens, { count: count(tokensOf(hits).shared) });
  return html`
    ${report.enabled && html`<p id="helps">${answer(recent)}</p>`}
    <${Card} id="sources" title=${text.sources}>
      ${bar(recent?.hits ?? hits)}
      ${table("source-list", sourcesOf(report), [
        [text.source, (key) => text[key], (name, key) => [mark(key), name]],
        [text.recent, (key) => recent && share(recent.hits, key), percent],
        [
          text.sinceStart,
          (key) => share(hits, key),
          (part, key) => `${percent(part)} (${count(hits[key])})`,
        ],
        [text.firstToken, (key) => recent?.medians[key] ?? null, duration],
      ])}
    </${Card}>
    <div class="tiles">
      <${Tile} id="saved" title=${text.saved} big=${seconds > 0 ? duration(seconds) : "–"}
        small=${seconds > 0 ? saved : text.notMeasured} />
      <${Tile} id="received" title=${text.received} big=${bytes(received)}
        small=${fill(text.now, { rate })} />
      <${Tile} id="fetches" title=${text.fetches} big=${count(fetches.committed)}
        small=${[failed, reasons.join(", ")].filter(Boolean).join(": ")} />
    </div>`;
}

/** @param {ReturnType<typeof recentOf>} recent */
function answer(recent) {
  const text = language.words;
  if (recent === null) return text.noSamples;
  const { all, shared, share } = tokensOf(recent.hits);
  if (all === 0) return text.helpsNobody;
  return shared === 0 ? text.helpsNot : fill(text.helps, { percent: percent(share) });
}

/** @param {Source} key */
function mark(key) {
  return html`<i class="mark" style=${{ background: `var(--${key})` }}></i>`;
}

/** @param {{ report: Report, samples: Sample[] }} props */
export function FirstTokens({ report, samples }) {
  const text = language.words;
  return html`<${Plot} name="first-tokens" title=${text.firstTokens} help=${text.firstTokensHelp}
    stacked=${false} series=${sourcesOf(report)} format=${duration} samples=${samples} rates=${perMinute} />`;
}

/** @param {{ report: Report, samples: Sample[] }} props */
export function Hour({ report, samples }) {
  const text = language.words;
  return html`<section class="columns" aria-label=${text.hour}>
    <${Plot} name="tokens" title=${text.tokensPlot} stacked series=${sourcesOf(report)}
      format=${count} samples=${samples} rates=${perSecond} />
    <${Plot} name="bytes" title=${text.bytesPlot} stacked series=${["bytes"]} format=${bytes}
      binary samples=${samples} rates=${perSecond} />
    <${Plot} name="fetches" title=${text.fetchPlot} stacked series=${["committed", "rolled_back"]}
      format=${count} samples=${samples} rates=${perMinute} />
  </section>`;
}

/** @param {{ report: Report, links: Link[] }} props */
export function Links({ report, links }) {
  const text = language.words;
  const busiest = links.toSorted((one, other) => other.rate - one.rate || other.bytes - one.bytes);
  return html`<${Card} title=${text.links}>
    ${
      links.length === 0
        ? note(text.noLinks)
        : table("links", busiest, [
            [text.from, (link) => nameOf(report, link.from)],
            [text.to, (link) => nameOf(report, link.to)],
            [text.bytes, (link) => link.bytes, bytes],
            [text.rate, (link) => link.rate, bytesPerSecond],
            [text.inFlight, (link) => link.rows, count],
          ])
    }
  </${Card}>`;
}

/** @param {{ report: Report }} props */
export function Replicas({ report }) {
  const text = language.words;
  const groups = [...new Set(report.replicas.map(({ namespace }) => namespace))];
  const loads = report.routing?.loads ?? {};
  const inWords = (/** @type {Replica} */ replica) =>
    fill(text.namespace, { number: groups.indexOf(replica.namespace) + 1 });
  const worstFirst = report.replicas.toSorted((one, other) => worry(other) - worry(one));
  return html`<${Card} title=${text.replicas}>
    ${table("replicas", worstFirst, [
      [
        text.replica,
        ({ incarnation }) => nameOf(report, incarnation),
        (name, replica) => [
          name,
          groups.length > 1 && ` · ${inWords(replica)}`,
          notesOf(replica, loads[replica.replica]).map(note),
        ],
      ],
      [text.pool, ({ pool }) => (pool.rows > 0 ? pool.ready + pool.filling : null), poolText],
      [text.offered, ({ holdings }) => holdings ?? 0, count],
      [text.requests, ({ requests }) => requests, count],
      [text.requestsNow, ({ replica }) => loads[replica]?.requests ?? null, count],
      [text.backlogNow, ({ replica }) => loads[replica]?.backlog_s ?? null, duration],
      [
        text.sharedShare,
        ({ hits }) => tokensOf(hits).share,
        (share, { hits }) => [percent(share), bar(hits)],
      ],
      [
        text.speed,
        ({ prefill_tokens_per_s: speed }) => speed,
        (speed) => fill(text.perSecond, { count: count(Math.round(speed)) }),
      ],
      [text.transport, ({ transport }) => transport && named(`transport_${transport}`, transport)],
    ])}
  </${Card}>`;
}

/**
 * How much a replica needs a look: wrong rows, then none, then none from some.
 * @param {Replica} replica
 */
function worry({ comparison, stale, fetch_decisions: decisions, draining }) {
  if (comparison.failed_audits > 0) return 4;
  if (comparison.differing > 0) return 3;
  if (stale || draining) return 2;
  return Object.keys(decisions.left_out).length > 0 ? 1 : 0;
}

/**
 * @param {Replica} replica
 * @param {Load | undefined} load
 */
function notesOf(replica, load) {
  const text = language.words;
  const names = replica.from_environment.map((name) => `xavier_${name}`).join(", ");
  return [
    replica.address,
    replica.vllm && `vLLM ${replica.vllm}${replica.vllm_untested ? ` (${text.untested})` : ""}`,
    named(`role_${load?.role}`, ""),
    load?.accepts === false && text.atLimit,
    names !== "" && fill(text.fromEnvironment, { names }),
    replica.draining && fill(text.draining, { requests: load?.requests ?? "?" }),
    replica.verdict === "cannot compare" &&
      fill(text.cannotCompare, { reason: replica.verdict_reason }),
    replica.stale && text.stale,
  ].filter(Boolean);
}

/**
 * @param {number} rows
 * @param {Replica} replica
 */
function poolText(rows, { pool, disk }) {
  const text = language.words;
  const of = (/** @type {number} */ used, /** @type {number} */ all) =>
    fill(text.poolOf, { used: bytes(used), all: bytes(all) });
  const size = pool.cache_rows * pool.row_bytes * pool.engines;
  return [
    of(rows * pool.row_bytes, pool.rows * pool.row_bytes),
    note(
      [
        fill(text.pinned, { count: count(pool.pinned) }),
        pool.quarantined > 0 && fill(text.quarantined, { count: count(pool.quarantined) }),
      ]
        .filter(Boolean)
        .join(", "),
    ),
    pool.rows < pool.cache_rows &&
      note(fill(text.smallPool, { share: percent(pool.rows / pool.cache_rows), size })),
    disk.state !== "" &&
      note(
        disk.problem !== ""
          ? fill(text.diskFails, { problem: disk.problem })
          : disk.state === "computed differently"
            ? text.diskDiffers
            : `${text.disk}: ${of(disk.rows * pool.row_bytes, disk.limit_bytes)}`,
      ),
  ];
}

/** @param {{ report: Report }} props */
export function Routing({ report }) {
  const text = language.words;
  const routing = report.routing ?? {};
  const { choices = {}, first_bytes: times = {}, mode = "" } = routing;
  const isKnown = mode === "off" || Object.keys(routing.loads ?? {}).length > 0;
  const used = CHOICES.filter((reason) => choices[reason]);
  const all = sum(Object.values(choices));
  /**
   * @param {string} title
   * @param {keyof FirstBytes} which
   * @returns {import("./parts.js").Column<Choice>}
   */
  const three = (title, which) => {
    const at = (/** @type {Choice} */ reason, /** @type {number} */ share) =>
      quantile(times[reason]?.[which].counts ?? [], share);
    return [
      title,
      (reason) => at(reason, 0.5),
      (_, reason) => [0.5, 0.9, 0.99].map((share) => duration(at(reason, share) ?? 0)).join(" · "),
    ];
  };
  return html`<section class="card stack" id="routing">
    <div class="head">
      <h2>${text.routing}</h2>
      <div role="group" aria-label=${text.routingMode}>
        ${ROUTINGS.map(
          (each) => html`<button type="button" id=${`routing-${each}`}
            aria-pressed=${String(each === mode)}
            onClick=${() => change("", { method: "PATCH", body: { routing: each } }, null)}>
            ${text[`mode_${each}`]}
          </button>`,
        )}
      </div>
    </div>
    ${note(text[`how_${isKnown ? mode : ""}`])}
    ${
      used.length > 0 &&
      html`<div>
        ${table("choices", used, [
          [text.why, (reason) => text[`choice_${reason}`]],
          [text.share, (reason) => choices[reason] / all, percent],
          [text.requests, (reason) => choices[reason], count],
          three(text.forecast, "predicted"),
          three(text.happened, "actual"),
          three(text.forecastError, "error"),
        ])}
        ${note(text.firstByteHelp)}
      </div>`
    }
    ${table("routing-facts", factsOf(routing), [
      [text.queue, ([name]) => name],
      [text.requests, ([, value]) => value, (value, [, , shown]) => shown ?? count(value)],
    ])}
  </section>`;
}

/**
 * @param {RoutingReport} routing
 * @returns {[name: string, value: number, shown?: string][]}
 */
function factsOf(routing) {
  const text = language.words;
  const { waiting = 0, waited = 0, waited_s: seconds = 0 } = routing;
  const waits = fill(text.onAverage, { requests: count(waited), time: duration(seconds / waited) });
  return [
    [text.waitingNow, waiting],
    [text.waited, waited, waited > 0 ? waits : undefined],
    [text.refused, routing.refused ?? 0],
    [text.moved, routing.moved ?? 0],
    [text.failedPrefills, routing.failed_prefills ?? 0],
    [text.unrouted, routing.unrouted ?? 0],
  ];
}

/**
 * The named prefixes that belong to no tenant: whether they are there, and until when.
 * @param {{ report: Report }} props
 */
export function Prefixes({ report }) {
  const text = language.words;
  const { prefixes = [], prefix_states: states = {} } = report;
  const hidden = sum(Object.values(states)) - prefixes.length;
  if (prefixes.length === 0 && hidden <= 0) return null;
  const held = (/** @type {Prefix} */ { replicas }) =>
    Math.max(0, ...Object.values(replicas).map((copy) => copy.held));
  const remove = (/** @type {string} */ name) =>
    change(`/prefixes/${encodeURIComponent(name)}`, { method: "DELETE" }, null);
  return html`<${Card} id="prefixes" title=${text.prefixes} help=${text.prefixesHelp}>
    ${
      prefixes.length > 0 &&
      table("prefix-list", prefixes, [
        [text.name, ({ name }) => name],
        [
          text.state,
          ({ state }) => named(`prefix_${state}`, state),
          (state, { reason }) => [state, reason !== "" && note(reason)],
        ],
        [text.tokens, ({ tokens }) => tokens || null, count],
        [text.chunksHeld, held, (chunks, prefix) => `${count(chunks)} / ${count(prefix.chunks)}`],
        [
          text.keptAt,
          ({ replicas }) => Object.keys(replicas).join(", ") || null,
          (names, { retention }) => [names, retention === "hard" && note(text.neverEvicted)],
        ],
        [text.expires, ({ expires }) => Math.max(0, expires - Date.now() / 1000), duration],
        [
          "",
          ({ name }) => name,
          (name) =>
            html`<button type="button" onClick=${() => remove(name)}>${text.remove}</button>`,
        ],
      ])
    }
    ${hidden > 0 && note(fill(text.morePrefixes, { number: count(hidden) }))}
  </${Card}>`;
}

/** @param {{ report: Report, events: XavierEvent[] }} props */
export function Events({ report, events }) {
  const text = language.words;
  return html`<${Card} title=${text.events}>
    ${
      events.length === 0
        ? note(text.noEvents)
        : html`<ol class="events" id="events" tabindex="0">
            ${events.toReversed().map(
              (event) => html`<li>
                <time datetime=${new Date(event.time * 1000).toISOString()}>${clock(event.time)}</time>
                <span>${sentenceOf(report, event)}</span>
              </li>`,
            )}
          </ol>`
    }
  </${Card}>`;
}
