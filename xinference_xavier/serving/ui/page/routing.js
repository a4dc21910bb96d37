// Where requests go: how it is chosen, which replicas get them and why, and how good the forecasts
// are.

function routingView(report) {
  const text = language.words;
  const routing = report.routing ?? {};
  const mode = routing.mode ?? "";
  const isKnown = mode === "off" || Object.keys(routing.loads ?? {}).length > 0;
  return h("section", { class: "card", id: "routing" },
    h("div", { class: "head" }, h("h2", null, text.routing),
      h("div", { class: "right choice", role: "group", "aria-label": text.routingMode },
        ROUTINGS.map((each) => h("button", { type: "button", id: `routing-${each}`,
          "aria-pressed": String(each === mode),
          onclick: () => change("", { routing: each }, null) }, text[`mode_${each}`])))),
    h("p", { class: "muted small" }, text[`how_${isKnown ? mode : ""}`]),
    h("div", { class: "columns" },
      routesView(routing),
      h("div", { style: "display: grid; gap: 1rem; align-content: start; min-width: 0" },
        choicesView(routing), routingFacts(routing))),
    firstBytesView(routing));
}

// What was forecast beside what happened, of streamed answers.
function firstBytesView({ first_bytes: firstBytes = {} }) {
  const text = language.words;
  const known = CHOICES.filter((reason) => firstBytes[reason] !== undefined);
  const cells = ({ counts }) => cell([0.5, 0.9, 0.99].map((share) =>
    brief(quantile(counts, share))).join(" · "));
  return known.length > 0 && [h("h3", null, text.firstByte),
    table("first-bytes", [[text.why], [text.requests, true], [text.forecast, true],
      [text.happened, true], [text.forecastError, true]],
    known.map((reason) => {
      const { predicted, actual, error } = firstBytes[reason];
      return h("tr", null, h("th", { scope: "row", class: "wrapped" }, text[`choice_${reason}`]),
        cell(count(sum(actual.counts))), cells(predicted), cells(actual), cells(error));
    })),
    h("p", { class: "muted small" }, text.firstByteHelp)];
}

function routesView({ loads = {}, replicas = {} }) {
  const text = language.words;
  const all = sum(Object.values(replicas));
  const names = [...new Set([...Object.keys(loads), ...Object.keys(replicas)])]
    .sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  return table("routes", [[text.replica], [text.share, true], [text.requests, true],
    [text.backlogNow, true], [text.requestsNow, true]],
  names.map((name) => {
    const known = loads[name];
    const sent = replicas[name] ?? 0;
    return h("tr", null, h("th", { scope: "row" }, name,
      text[`role_${known?.role}`] && h("div", { class: "muted small" }, text[`role_${known.role}`]),
      known?.accepts === false && h("div", { class: "muted small" }, text.atLimit)),
    cell(all > 0 ? percent(sent, all) : "–"), cell(count(sent)),
    cell(known === undefined ? "–" : brief(known.backlog_s)),
    cell(known === undefined ? "–" : count(known.requests)));
  }));
}

function choicesView({ choices = {} }) {
  const text = language.words;
  const all = sum(Object.values(choices));
  return table("choices", [[text.why], [text.share, true], [text.requests, true]],
    CHOICES.map((reason) => h("tr", null,
      h("th", { scope: "row", class: "wrapped" }, text[`choice_${reason}`]),
      cell(all > 0 ? percent(choices[reason] ?? 0, all) : "–"), cell(count(choices[reason] ?? 0)))));
}

function routingFacts(routing) {
  const text = language.words;
  const { waiting = 0, waited = 0, refused = 0, moved = 0, unrouted = 0,
    failed_prefills: failedPrefills = 0 } = routing;
  const facts = [
    [text.waitingNow, count(waiting)],
    [text.waited, waited > 0 ? text.onAverage(count(waited), brief(routing.waited_s / waited)) : "0"],
    [text.refused, count(refused)],
    [text.moved, count(moved)],
    [text.failedPrefills, count(failedPrefills)],
    [text.unrouted, count(unrouted)],
  ];
  return h("div", { class: "wide" }, h("table", { id: "routing-facts" }, h("tbody", null,
    facts.map(([name, value]) => h("tr", null,
      h("th", { scope: "row", class: "wrapped" }, name), cell(value))))));
}

// The seconds until each replica would answer a prompt. `forecasts` are by replica.
function forecastsView(report, forecasts) {
  const text = language.words;
  const known = Object.entries(forecasts)
    .map(([name, terms]) => ({ name, ...terms, all: terms.backlog + terms.fetch + terms.compute }));
  if (known.length === 0) return [];
  const first = known.reduce((best, each) => (each.all < best.all ? each : best));
  const isOff = report.routing?.mode === "off";
  return [h("p", { id: "first" }, (isOff ? text.firstOff : text.first)(first.name, brief(first.all))),
    table("forecasts", [[text.replica], [text.backlogTerm, true], [text.fetchTerm, true],
      [text.computeTerm, true], [text.firstToken, true]],
    known.map((each) => h("tr", { "aria-current": each === first ? "true" : null },
      h("th", { scope: "row" }, each.name,
        each.prefill && h("div", { class: "muted small" }, text.prefilledBy(each.prefill))),
      cell(brief(each.backlog)), cell(brief(each.fetch)), cell(brief(each.compute)),
      cell(brief(each.all))))),
    h("p", { class: "muted small" }, text.forecastHelp)];
}
