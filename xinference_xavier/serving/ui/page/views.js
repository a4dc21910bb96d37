// The parts of the page, each drawn from the state alone.

function legend(keys) {
  const text = language.words;
  return h("ul", { class: "legend small" },
    keys.map(([key, value]) => h("li", null, h("i", { class: key }), `${text[key]} `, value)));
}

function splitBar(hits, thin) {
  const { all } = tokensOf(hits);
  const text = language.words;
  return h("div", { class: thin ? "split thin" : "split", role: "img",
    "aria-label": HIT_SOURCES.map((key) => `${text[key]} ${percent(hits[key] ?? 0, all)}`).join(", ") },
  all > 0 && HIT_SOURCES.map((key) => h("span", { class: key,
    style: `width: ${(100 * (hits[key] ?? 0) / all).toFixed(2)}%`, title: text[key] })));
}

function tile(id, title, big, small) {
  return h("section", { class: "card tile" },
    h("h2", { class: "muted small" }, title),
    h("p", { class: "big", id }, big),
    h("p", { class: "muted small" }, small));
}

function tilesView(report, links) {
  const text = language.words;
  const { hits, bytes_received: received, fetches } = report.totals;
  const { all, reused } = tokensOf(hits);
  const seconds = sum(report.replicas.map((replica) => replica.seconds_saved));
  return h("div", { class: "tiles" },
    tile("reused", text.reused, percent(reused, all), text.ofTokens(count(reused), count(all))),
    tile("from-remote", text.fromPeers, count(hits.remote), text.ofPrompt(percent(hits.remote, all))),
    tile("saved", text.saved, count(hits.local_pool + hits.remote),
      seconds > 0 ? text.savedSeconds(duration(seconds)) : text.notMeasured),
    tile("received", text.received, bytes(received),
      text.now(bytesPerSecond(sum(links.map((link) => link.rate))))),
    tile("fetches", text.fetches, count(fetches.committed),
      text.rolledBackCount(count(rolledBack(fetches)))));
}

function sourcesView(report) {
  const text = language.words;
  const { hits } = report.totals;
  const { all } = tokensOf(hits);
  return h("section", { class: "card", id: "sources" },
    h("h2", null, text.sources),
    splitBar(hits, false),
    all === 0 ? h("p", { class: "muted small" }, text.noTokens)
      : legend(HIT_SOURCES.map((key) => [key, `${percent(hits[key], all)} (${count(hits[key])})`])));
}

function graphCard(report, links, width) {
  return h("section", { class: "card" }, h("h2", null, language.words.graph),
    h("div", { class: "graph", "data-measure": "graph" }, graphView(report, links, width)));
}

function table(id, headings, rows) {
  return h("div", { class: "wide", tabindex: 0 }, h("table", { id },
    h("thead", null, h("tr", null, headings.map(([title, numeric]) =>
      h("th", { scope: "col", class: numeric ? "number" : null }, title)))),
    h("tbody", null, rows)));
}

function cell(value, numeric = true) {
  return h("td", { class: numeric ? "number" : null }, value);
}

function linksView(report, links) {
  const text = language.words;
  return h("section", { class: "card" }, h("h2", null, text.links),
    links.length === 0 ? h("p", { class: "muted" }, text.noLinks)
      : table("links", [[text.from], [text.to], [text.bytes, true], [text.rate, true],
        [text.inFlight, true]],
      links.map((link) => h("tr", null,
        h("th", { scope: "row" }, nameOf(report, link.from)), cell(nameOf(report, link.to), false),
        cell(bytes(link.bytes)), cell(bytesPerSecond(link.rate)), cell(count(link.rows))))));
}

function replicasView(report) {
  const text = language.words;
  const groups = [...new Set(report.replicas.map((replica) => replica.namespace))];
  return h("section", { class: "card" }, h("h2", null, text.replicas),
    table("replicas", [[text.replica], [text.pool], [text.offered, true], [text.requests, true],
      [text.reusedShare], [text.speed, true], [text.transport]],
    report.replicas.map((replica) => {
      const { all, reused } = tokensOf(replica.hits);
      const pool = replica.pool ?? {};
      return h("tr", null,
        h("th", { scope: "row" }, nameOf(report, replica.incarnation),
          groups.length > 1 && ` · ${text.namespace(groups.indexOf(replica.namespace) + 1)}`,
          h("div", { class: "muted small", title: text.address }, replica.address),
          replica.vllm && h("div", { class: "muted small" }, `vLLM ${replica.vllm}`,
            replica.vllm_untested && ` (${text.untested})`),
          replica.from_environment?.length > 0 && h("div", { class: "muted small" },
            text.fromEnvironment(replica.from_environment.map((name) => `xavier_${name}`).join(", "))),
          replica.draining && h("div", { class: "muted small" }, 
            text.draining(report.routing?.loads?.[replica.replica]?.requests)),
          replica.stale && h("div", { class: "muted small" }, text.stale)),
        cell(poolText(replica, pool), false),
        cell(count(replica.holdings ?? 0)), cell(count(replica.requests ?? 0)),
        cell([percent(reused, all), splitBar(replica.hits, true)], false),
        cell(replica.prefill_tokens_per_s > 0
          ? text.perSecond(count(Math.round(replica.prefill_tokens_per_s))) : "–"),
        cell(replica.transport ?? "–", false));
    })));
}

function poolText(replica, pool) {
  const text = language.words;
  if (!pool.rows) return "–";
  const used = pool.ready + pool.filling;
  const notes = [text.pinned(count(pool.pinned)),
    pool.quarantined > 0 && text.quarantined(count(pool.quarantined))].filter(Boolean);
  const { cache_rows: cached, engines } = pool;
  return [`${text.poolOf(bytes(used * pool.row_bytes), bytes(pool.rows * pool.row_bytes))}`,
    h("div", { class: "muted small" }, notes.join(", ")),
    pool.rows < cached && h("div", { class: "muted small" },
      text.smallPool(percent(pool.rows, cached), cached * pool.row_bytes * engines))];
}

function outcomesView(report) {
  const text = language.words;
  const { fetches } = report.totals;
  const reasons = Object.entries(fetches.rolled_back).sort(([, one], [, other]) => other - one);
  return h("section", { class: "card" }, h("h2", null, text.outcomes),
    table("outcomes", [[text.outcome], [text.count, true]], [
      h("tr", null, h("th", { scope: "row" }, text.committed), cell(count(fetches.committed))),
      reasons.map(([reason, times]) => h("tr", null,
        h("th", { scope: "row" }, text.reason(reason)), cell(count(times)))),
    ]));
}

function untilOf(samples) {
  return samples.at(-1)?.time ?? Date.now() / 1000;
}

function firstTokensView(samples, width, cursors, changed) {
  const text = language.words;
  return h("div", { "data-measure": "firstTokens" }, plotView({ name: "first-tokens",
    title: text.firstTokens, help: text.firstTokensHelp, shape: LINES, series: HIT_SOURCES,
    format: brief, nice: niceCeiling, rates: firstTokensOf(samples), until: untilOf(samples), width,
    cursors, changed }));
}

function plotsView(samples, width, cursors, changed) {
  const text = language.words;
  const until = untilOf(samples);
  const common = { rates: ratesOf(samples), nice: niceCeiling, until, width, cursors, changed };
  return h("section", { "aria-label": text.hour },
    h("h2", { class: "unseen" }, text.hour),
    h("div", { class: "columns narrow", "data-measure": "plots" },
      plotView({ ...common, name: "tokens", title: text.tokensPlot, series: HIT_SOURCES,
        format: (value) => count(value) }),
      plotView({ ...common, name: "bytes", title: text.bytesPlot, series: ["bytes"], format: bytes,
        nice: niceBytes }),
      plotView({ ...common, name: "fetches", title: text.fetchPlot, rates: perMinute(samples),
        series: ["committed", "rolled_back"], format: (value) => count(value) })));
}

function sentenceOf(report, event) {
  const text = language.words;
  const named = { ...event };
  for (const key of ["incarnation", "donor", "replica"]) {
    const isReplica = report?.replicas.some((replica) => replica.incarnation === named[key]);
    if (isReplica) named[key] = nameOf(report, named[key]);
  }
  const sentence = Object.hasOwn(text, event.event) ? text[event.event] : null;
  return sentence === null ? event.event : sentence(named);
}

function eventsView(report, events) {
  const text = language.words;
  return h("section", { class: "card" }, h("h2", null, text.events),
    events.length === 0 ? h("p", { class: "muted" }, text.noEvents)
      : h("ol", { class: "events", id: "events", tabindex: 0 }, events.toReversed().map((event) =>
        h("li", null,
          h("time", { datetime: new Date(event.time * 1000).toISOString() }, clock(event.time)),
          h("span", null, sentenceOf(report, event))))));
}
