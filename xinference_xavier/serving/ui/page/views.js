// What a model's report says, part by part.

import { CHOICES, HIT_SOURCES, ROUTINGS } from "../constants.js";
import { fill } from "../languages.js";
import { Graph, MAX_DRAWN } from "./graph.js";
import { html } from "./html.js";
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
  quantile,
  ratesOf,
  recentOf,
  rolledBack,
  sentenceOf,
  sum,
  tokensOf,
} from "./numbers.js";
import { Card, note, SplitBar, Table, Tile } from "./parts.js";
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
 * Whether sharing helps now.
 * @param {{ report: Report, samples: Sample[] }} props
 */
export function Recent({ report, samples }) {
  const text = language.words;
  const recent = recentOf(samples, report.totals);
  const share = recent === null ? "" : percent(recent.shared, tokensOf(recent.hits).all);
  return html`<section class="stack" id="recent">
    <div class="head"><h2>${text.helping}</h2><span class="muted">${text.recent}</span></div>
    <p id="helps">${recent === null ? text.noSamples : answer(report, recent, share)}</p>
    ${
      recent !== null &&
      html`<div class="tiles apart">
        <${Tile} id="shared-now" title=${text.sharedNow}
          big=${fill(text.perSecond, { count: count(recent.rate) })}
          small=${fill(text.ofPrompt, { percent: share })} />
        <${Tile} id="saved-now" title=${text.savedNow}
          big=${recent.saved === null ? "–" : brief(recent.saved)}
          small=${
            recent.saved === null
              ? text.notMeasured
              : fill(text.byTokens, { count: count(recent.shared) })
          } />
        <section class="card wider">
          <h2 class="muted small">${text.firstTokenNow}</h2>
          <${Table} id="waits-now" items=${sourcesOf(report)} columns=${[
            { title: text.source, cell: (/** @type {Source} */ key) => text[key] },
            {
              title: text.median,
              cell: (/** @type {Source} */ key) => brief(recent.waits[key].median),
            },
            {
              title: text.requests,
              cell: (/** @type {Source} */ key) => count(recent.waits[key].requests),
            },
          ]} />
        </section>
      </div>`
    }
  </section>`;
}

/**
 * @param {Report} report
 * @param {NonNullable<ReturnType<typeof recentOf>>} recent
 * @param {string} share
 */
function answer({ enabled }, { hits, shared }, share) {
  const text = language.words;
  if (tokensOf(hits).all === 0) return text.helpsNobody;
  if (shared === 0) return text.helpsNot;
  return fill(enabled ? text.helps : text.helped, { percent: share });
}

/** @param {{ report: Report, links: Link[] }} props */
export function Totals({ report, links }) {
  const text = language.words;
  const { hits, bytes_received: received, fetches, seconds_saved: seconds } = report.totals;
  const { all, shared } = tokensOf(hits);
  const rate = bytesPerSecond(sum(links.map((link) => link.rate)));
  const saved = seconds > 0 ? fill(text.byTokens, { count: count(shared) }) : text.notMeasured;
  return html`<section class="stack">
    <h2>${text.sinceStart}</h2>
    <div class="tiles">
      <${Tile} id="shared" title=${text.shared} big=${percent(shared, all)}
        small=${fill(text.ofTokens, { part: count(shared), all: count(all) })} />
      <${Tile} id="saved" title=${text.savedNow}
        big=${seconds > 0 ? duration(seconds) : "–"} small=${saved} />
      <${Tile} id="from-remote" title=${text.fromPeers} big=${count(hits.remote)}
        small=${fill(text.ofPrompt, { percent: percent(hits.remote, all) })} />
      <${Tile} id="received" title=${text.received} big=${bytes(received)}
        small=${fill(text.now, { rate })} />
      <${Tile} id="fetches" title=${text.fetches} big=${count(fetches.committed)}
        small=${fill(text.rolledBackCount, { count: count(rolledBack(fetches)) })} />
    </div>
    <${Card} id="sources" title=${text.sources}>
      <${SplitBar} hits=${hits} />
      ${
        all === 0
          ? html`<p class="muted small">${text.noTokens}</p>`
          : html`<ul class="legend small">${sourcesOf(report).map(
              (key) => html`<li>
                <i class=${key}></i>${text[key]} ${percent(hits[key], all)} (${count(hits[key])})
              </li>`,
            )}</ul>`
      }
    </${Card}>
  </section>`;
}

/** @param {Sample[]} samples */
function untilOf(samples) {
  return samples.at(-1)?.time ?? Date.now() / 1000;
}

/** @param {{ report: Report, samples: Sample[] }} props */
export function FirstTokens({ report, samples }) {
  const text = language.words;
  return html`<${Plot} name="first-tokens" title=${text.firstTokens} help=${text.firstTokensHelp}
    stacked=${false} series=${sourcesOf(report)} format=${brief}
    rates=${firstTokensOf(samples)} until=${untilOf(samples)} />`;
}

/** @param {{ report: Report, samples: Sample[] }} props */
export function Hour({ report, samples }) {
  const text = language.words;
  const until = untilOf(samples);
  const rates = ratesOf(samples);
  const number = (/** @type {number | null} */ value) => count(value ?? 0);
  return html`<section aria-label=${text.hour} class="columns">
    <h2 class="unseen">${text.hour}</h2>
    <${Plot} name="tokens" title=${text.tokensPlot} stacked series=${sourcesOf(report)}
      format=${number} rates=${rates} until=${until} />
    <${Plot} name="bytes" title=${text.bytesPlot} stacked series=${["bytes"]}
      format=${bytes} binary rates=${rates} until=${until} />
    <${Plot} name="fetches" title=${text.fetchPlot} stacked series=${["committed", "rolled_back"]}
      format=${number} rates=${perMinute(samples)} until=${until} />
  </section>`;
}

/** @param {{ report: Report, links: Link[] }} props */
export function Links({ report, links }) {
  const text = language.words;
  const { fetches } = report.totals;
  const name = (/** @type {string} */ incarnation) => nameOf(report, incarnation);
  const busiest = links.toSorted((one, other) => other.rate - one.rate || other.bytes - one.bytes);
  const outcomes = [
    { title: text.committed, times: fetches.committed },
    ...Object.entries(fetches.rolled_back)
      .sort(([, one], [, other]) => other - one)
      .map(([why, times]) => ({ title: fill(text.reason, { why: reasonOf(why) }), times })),
  ];
  /** @typedef {typeof outcomes[number]} Outcome */
  const { length } = report.replicas;
  return html`<div class="columns">
    ${
      length > 0 &&
      length <= MAX_DRAWN &&
      html`<${Card} title=${text.graph} look="drawn"><${Graph} report=${report} links=${links} /></${Card}>`
    }
    <div class="stack">
      <${Card} title=${text.links}>
        ${
          links.length === 0
            ? html`<p class="muted">${text.noLinks}</p>`
            : html`<${Table} id="links" items=${busiest} columns=${[
                {
                  title: text.from,
                  value: (/** @type {Link} */ link) => `${name(link.from)} ${name(link.to)}`,
                  cell: (/** @type {Link} */ link) => name(link.from),
                },
                {
                  title: text.to,
                  plain: true,
                  value: (/** @type {Link} */ link) => name(link.to),
                  cell: (/** @type {Link} */ link) => name(link.to),
                },
                {
                  title: text.bytes,
                  value: (/** @type {Link} */ link) => link.bytes,
                  cell: (/** @type {Link} */ link) => bytes(link.bytes),
                },
                {
                  title: text.rate,
                  value: (/** @type {Link} */ link) => link.rate,
                  cell: (/** @type {Link} */ link) => bytesPerSecond(link.rate),
                },
                {
                  title: text.inFlight,
                  value: (/** @type {Link} */ link) => link.rows,
                  cell: (/** @type {Link} */ link) => count(link.rows),
                },
              ]} />`
        }
      </${Card}>
      <${Card} title=${text.outcomes}>
        <${Table} id="outcomes" items=${outcomes} columns=${[
          { title: text.outcome, cell: (/** @type {Outcome} */ { title }) => title },
          { title: text.count, cell: (/** @type {Outcome} */ { times }) => count(times) },
        ]} />
      </${Card}>
    </div>
  </div>`;
}

/** @param {{ report: Report }} props */
export function Replicas({ report }) {
  const text = language.words;
  const groups = [...new Set(report.replicas.map(({ namespace }) => namespace))];
  const loads = report.routing?.loads ?? {};
  const load = (/** @type {Replica} */ { replica }) => loads[replica];
  const name = (/** @type {Replica} */ { incarnation }) => nameOf(report, incarnation);
  const share = (/** @type {Replica} */ { hits }) =>
    tokensOf(hits).all > 0 ? tokensOf(hits).shared / tokensOf(hits).all : 0;
  const worstFirst = report.replicas.toSorted(
    (one, other) =>
      worry(other) - worry(one) || name(one).localeCompare(name(other), "en", { numeric: true }),
  );
  return html`<${Card} title=${text.replicas}>
    <${Table} id="replicas" items=${worstFirst} columns=${[
      {
        title: text.replica,
        value: name,
        cell: (/** @type {Replica} */ replica) => [
          name(replica),
          groups.length > 1 &&
            ` · ${fill(text.namespace, { number: groups.indexOf(replica.namespace) + 1 })}`,
          ...notesOf(replica, load(replica)).map(note),
        ],
      },
      {
        title: text.pool,
        plain: true,
        value: (/** @type {Replica} */ { pool }) => pool.ready + pool.filling,
        cell: poolText,
      },
      {
        title: text.offered,
        value: (/** @type {Replica} */ { holdings }) => holdings ?? 0,
        cell: (/** @type {Replica} */ { holdings }) => count(holdings ?? 0),
      },
      {
        title: text.requests,
        value: (/** @type {Replica} */ { requests }) => requests,
        cell: (/** @type {Replica} */ { requests }) => count(requests),
      },
      {
        title: text.requestsNow,
        value: (/** @type {Replica} */ replica) => load(replica)?.requests ?? -1,
        cell: (/** @type {Replica} */ replica) => {
          const found = load(replica);
          return found === undefined ? "–" : count(found.requests);
        },
      },
      {
        title: text.backlogNow,
        value: (/** @type {Replica} */ replica) => load(replica)?.backlog_s ?? -1,
        cell: (/** @type {Replica} */ replica) => brief(load(replica)?.backlog_s ?? null),
      },
      {
        title: text.sharedShare,
        plain: true,
        value: share,
        cell: (/** @type {Replica} */ replica) => [
          percent(share(replica), 1),
          html`<${SplitBar} hits=${replica.hits} thin />`,
        ],
      },
      {
        title: text.speed,
        value: (/** @type {Replica} */ { prefill_tokens_per_s: speed }) => speed ?? 0,
        cell: (/** @type {Replica} */ { prefill_tokens_per_s: speed }) =>
          speed ? fill(text.perSecond, { count: count(Math.round(speed)) }) : "–",
      },
      {
        title: text.transport,
        plain: true,
        cell: (/** @type {Replica} */ { transport }) =>
          transport === null ? "–" : (named(`transport_${transport}`) ?? transport),
      },
    ]} />
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
  const vllm = `vLLM ${replica.vllm}${replica.vllm_untested ? ` (${text.untested})` : ""}`;
  return [
    replica.address,
    replica.vllm && vllm,
    named(`role_${load?.role}`),
    load?.accepts === false && text.atLimit,
    names !== "" && fill(text.fromEnvironment, { names }),
    replica.draining && fill(text.draining, { requests: load?.requests ?? "?" }),
    replica.stale && text.stale,
  ].filter(Boolean);
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

/** @param {{ report: Report }} props */
export function Routing({ report }) {
  const text = language.words;
  const routing = report.routing ?? {};
  const { choices = {}, first_bytes: firstBytes = {}, mode = "" } = routing;
  const isKnown = mode === "off" || Object.keys(routing.loads ?? {}).length > 0;
  const all = sum(Object.values(choices));
  const facts = factsOf(routing);
  const timed = CHOICES.filter((reason) => firstBytes[reason] !== undefined);
  /** @param {Histogram} histogram */
  const three = ({ counts }) =>
    [0.5, 0.9, 0.99].map((share) => brief(quantile(counts, share))).join(" · ");
  const why = (/** @type {Choice} */ reason) => text[`choice_${reason}`];
  return html`<section class="card stack" id="routing">
    <div class="head">
      <h2>${text.routing}</h2>
      <div class="right choice" role="group" aria-label=${text.routingMode}>
        ${ROUTINGS.map(
          (each) => html`<button type="button" id=${`routing-${each}`}
            aria-pressed=${String(each === mode)}
            onClick=${() => change("", { method: "PATCH", body: { routing: each } }, null)}>
            ${text[`mode_${each}`]}
          </button>`,
        )}
      </div>
    </div>
    <p class="muted small">${text[`how_${isKnown ? mode : ""}`]}</p>
    <div class="columns">
      <div><${Table} id="choices" items=${CHOICES} columns=${[
        { title: text.why, cell: why },
        {
          title: text.share,
          cell: (/** @type {Choice} */ reason) =>
            all > 0 ? percent(choices[reason] ?? 0, all) : "–",
        },
        {
          title: text.requests,
          cell: (/** @type {Choice} */ reason) => count(choices[reason] ?? 0),
        },
      ]} /></div>
      <div><${Table} id="routing-facts" items=${facts} columns=${[
        { title: text.queue, cell: (/** @type {string[]} */ [name]) => name },
        { title: text.requests, cell: (/** @type {string[]} */ [, value]) => value },
      ]} /></div>
    </div>
    ${
      timed.length > 0 &&
      html`<h3>${text.firstByte}</h3>
        <${Table} id="first-bytes" items=${timed} columns=${[
          { title: text.why, cell: why },
          {
            title: text.requests,
            cell: (/** @type {Choice} */ reason) => count(sum(firstBytes[reason].actual.counts)),
          },
          {
            title: text.forecast,
            cell: (/** @type {Choice} */ reason) => three(firstBytes[reason].predicted),
          },
          {
            title: text.happened,
            cell: (/** @type {Choice} */ reason) => three(firstBytes[reason].actual),
          },
          {
            title: text.forecastError,
            cell: (/** @type {Choice} */ reason) => three(firstBytes[reason].error),
          },
        ]} />
        <p class="muted small">${text.firstByteHelp}</p>`
    }
  </section>`;
}

/** @param {RoutingReport} routing */
function factsOf(routing) {
  const text = language.words;
  const { waiting = 0, waited = 0, waited_s: seconds = 0 } = routing;
  const { refused = 0, moved = 0, unrouted = 0, failed_prefills: failed = 0 } = routing;
  const waits = { requests: count(waited), time: brief(seconds / waited) };
  return [
    [text.waitingNow, count(waiting)],
    [text.waited, waited > 0 ? fill(text.onAverage, waits) : "0"],
    [text.refused, count(refused)],
    [text.moved, count(moved)],
    [text.failedPrefills, count(failed)],
    [text.unrouted, count(unrouted)],
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
  const held = (/** @type {Prefix} */ { replicas }) =>
    Math.max(0, ...Object.values(replicas).map((copy) => copy.held));
  const remove = (/** @type {string} */ name) =>
    change(`/prefixes/${encodeURIComponent(name)}`, { method: "DELETE" }, null);
  return (
    (prefixes.length > 0 || hidden > 0) &&
    html`<${Card} id="prefixes" title=${text.prefixes} help=${text.prefixesHelp}>
      ${
        prefixes.length > 0 &&
        html`<${Table} id="prefix-list" items=${prefixes} columns=${[
          {
            title: text.name,
            value: (/** @type {Prefix} */ { name }) => name,
            cell: (/** @type {Prefix} */ { name }) => name,
          },
          {
            title: text.state,
            plain: true,
            value: (/** @type {Prefix} */ { state }) => state,
            cell: (/** @type {Prefix} */ { state, reason }) => [
              named(`prefix_${state}`) ?? state,
              reason !== "" && note(reason),
            ],
          },
          {
            title: text.tokens,
            value: (/** @type {Prefix} */ { tokens }) => tokens,
            cell: (/** @type {Prefix} */ { tokens }) => (tokens > 0 ? count(tokens) : "–"),
          },
          {
            title: text.chunksHeld,
            cell: (/** @type {Prefix} */ prefix) =>
              `${count(held(prefix))} / ${count(prefix.chunks)}`,
          },
          {
            title: text.keptAt,
            plain: true,
            cell: (/** @type {Prefix} */ { replicas, retention }) => [
              Object.keys(replicas).join(", ") || "–",
              retention === "hard" && note(text.neverEvicted),
            ],
          },
          {
            title: text.expires,
            value: (/** @type {Prefix} */ { expires }) => expires,
            cell: (/** @type {Prefix} */ { expires }) =>
              duration(Math.max(0, expires - Date.now() / 1000)),
          },
          {
            title: "",
            plain: true,
            cell: (/** @type {Prefix} */ { name }) =>
              html`<button type="button" onClick=${() => remove(name)}>${text.remove}</button>`,
          },
        ]} />`
      }
      ${hidden > 0 && html`<p class="muted small">${fill(text.morePrefixes, { number: count(hidden) })}</p>`}
    </${Card}>`
  );
}

/** @param {{ report: Report, events: XavierEvent[] }} props */
export function Events({ report, events }) {
  const text = language.words;
  const lines = events.toReversed().map(
    (event) => html`<li>
      <time datetime=${new Date(event.time * 1000).toISOString()}>${clock(event.time)}</time>
      <span>${sentenceOf(report, event)}</span>
    </li>`,
  );
  return html`<${Card} title=${text.events}>
    ${
      lines.length === 0
        ? html`<p class="muted">${text.noEvents}</p>`
        : html`<ol class="events" id="events" tabindex="0">${lines}</ol>`
    }
  </${Card}>`;
}
