// Where requests go: how it is chosen, which replicas get them and why, and how good the forecasts
// are.

import { CHOICES, ROUTINGS } from "../constants.js";
import { fill } from "../languages.js";
import { h } from "./dom.js";
import { brief, count, percent, quantile, sum } from "./numbers.js";
import { language, named } from "./settings.js";
import { change } from "./state.js";
import { cell, note, row, table } from "./views.js";

/** @param {Report} report */
export function routingView(report) {
  const text = language.words;
  const routing = report.routing ?? {};
  const mode = routing.mode ?? "";
  const isKnown = mode === "off" || Object.keys(routing.loads ?? {}).length > 0;
  const modes = ROUTINGS.map((each) =>
    h(
      "button",
      {
        type: "button",
        id: `routing-${each}`,
        "aria-pressed": String(each === mode),
        onclick: () => change("", { routing: each }, null),
      },
      text[`mode_${each}`],
    ),
  );
  return h(
    "section",
    { class: "card", id: "routing" },
    h(
      "div",
      { class: "head" },
      h("h2", null, text.routing),
      h("div", { class: "right choice", role: "group", "aria-label": text.routingMode }, modes),
    ),
    h("p", { class: "muted small" }, text[`how_${isKnown ? mode : ""}`]),
    h(
      "div",
      { class: "columns" },
      routesView(routing),
      h("div", { class: "stack" }, choicesView(routing), routingFacts(routing)),
    ),
    firstBytesView(routing),
  );
}

/**
 * What was forecast beside what happened, of streamed answers.
 * @param {RoutingReport} routing
 */
function firstBytesView({ first_bytes: firstBytes = {} }) {
  const text = language.words;
  const known = CHOICES.filter((reason) => firstBytes[reason] !== undefined);
  /** @param {Histogram} histogram */
  const cells = ({ counts }) =>
    cell([0.5, 0.9, 0.99].map((share) => brief(quantile(counts, share))).join(" · "));
  const rows = known.map((reason) => {
    const { predicted, actual, error } = firstBytes[reason];
    return h(
      "tr",
      null,
      h("th", { scope: "row", class: "wrapped" }, text[`choice_${reason}`]),
      cell(count(sum(actual.counts))),
      cells(predicted),
      cells(actual),
      cells(error),
    );
  });
  return (
    known.length > 0 && [
      h("h3", null, text.firstByte),
      table(
        "first-bytes",
        [
          [text.why],
          [text.requests, true],
          [text.forecast, true],
          [text.happened, true],
          [text.forecastError, true],
        ],
        rows,
      ),
      h("p", { class: "muted small" }, text.firstByteHelp),
    ]
  );
}

/** @param {RoutingReport} routing */
function routesView({ loads = {}, replicas = {} }) {
  const text = language.words;
  const all = sum(Object.values(replicas));
  const names = [...new Set([...Object.keys(loads), ...Object.keys(replicas)])].sort((one, other) =>
    one.localeCompare(other, "en", { numeric: true }),
  );
  const rows = names.map((name) => {
    const load = loads[name];
    const sent = replicas[name] ?? 0;
    const role = named(`role_${load?.role}`);
    return row(
      [name, role && note(role), load?.accepts === false && note(text.atLimit)],
      cell(all > 0 ? percent(sent, all) : "–"),
      cell(count(sent)),
      cell(load === undefined ? "–" : brief(load.backlog_s)),
      cell(load === undefined ? "–" : count(load.requests)),
    );
  });
  return table(
    "routes",
    [
      [text.replica],
      [text.share, true],
      [text.requests, true],
      [text.backlogNow, true],
      [text.requestsNow, true],
    ],
    rows,
  );
}

/** @param {RoutingReport} routing */
function choicesView({ choices = {} }) {
  const text = language.words;
  const all = sum(Object.values(choices));
  return table(
    "choices",
    [[text.why], [text.share, true], [text.requests, true]],
    CHOICES.map((reason) =>
      h(
        "tr",
        null,
        h("th", { scope: "row", class: "wrapped" }, text[`choice_${reason}`]),
        cell(all > 0 ? percent(choices[reason] ?? 0, all) : "–"),
        cell(count(choices[reason] ?? 0)),
      ),
    ),
  );
}

/** @param {RoutingReport} routing */
function routingFacts(routing) {
  const text = language.words;
  const { waiting = 0, waited = 0, waited_s: seconds = 0 } = routing;
  const { refused = 0, moved = 0, unrouted = 0, failed_prefills: failed = 0 } = routing;
  const waits = { requests: count(waited), time: brief(seconds / waited) };
  const facts = [
    [text.waitingNow, count(waiting)],
    [text.waited, waited > 0 ? fill(text.onAverage, waits) : "0"],
    [text.refused, count(refused)],
    [text.moved, count(moved)],
    [text.failedPrefills, count(failed)],
    [text.unrouted, count(unrouted)],
  ];
  const rows = facts.map(([name, value]) =>
    h("tr", null, h("th", { scope: "row", class: "wrapped" }, name), cell(value)),
  );
  return h("div", { class: "wide" }, h("table", { id: "routing-facts" }, h("tbody", null, rows)));
}

/**
 * The seconds until each replica would answer a prompt. `forecasts` are by replica.
 * @param {Report} report
 * @param {Record<string, Terms>} forecasts
 */
export function forecastsView(report, forecasts) {
  const text = language.words;
  const known = Object.entries(forecasts).map(([name, terms]) => ({
    name,
    ...terms,
    all: terms.backlog + terms.fetch + terms.compute,
  }));
  if (known.length === 0) return [];
  const first = known.reduce((best, each) => (each.all < best.all ? each : best));
  const sentence = report.routing?.mode === "off" ? text.firstOff : text.first;
  const rows = known.map((each) =>
    h(
      "tr",
      { "aria-current": each === first ? "true" : null },
      h(
        "th",
        { scope: "row" },
        each.name,
        each.prefill && note(fill(text.prefilledBy, { name: each.prefill })),
      ),
      cell(brief(each.backlog)),
      cell(brief(each.fetch)),
      cell(brief(each.compute)),
      cell(brief(each.all)),
    ),
  );
  return [
    h("p", { id: "first" }, fill(sentence, { name: first.name, time: brief(first.all) })),
    table(
      "forecasts",
      [
        [text.replica],
        [text.backlogTerm, true],
        [text.fetchTerm, true],
        [text.computeTerm, true],
        [text.firstToken, true],
      ],
      rows,
    ),
    h("p", { class: "muted small" }, text.forecastHelp),
  ];
}
