// The page as a whole: its parts in each state, and when it is drawn.

import { fill } from "../languages.js";
import { at, draw, group, h } from "./dom.js";
import { explainView } from "./explain.js";
import { clock, count, nameOf, percent, sharedOf } from "./numbers.js";
import { prefixesView } from "./prefixes.js";
import { routingView } from "./routing.js";
import { language, theme } from "./settings.js";
import { change, choose, chosen, show, start, state } from "./state.js";
import {
  eventsView,
  firstTokensView,
  graphCard,
  linksView,
  outcomesView,
  plotsView,
  recentView,
  replicasView,
  sourcesView,
  tilesView,
} from "./views.js";

const COMMAND = `xinference launch --model-name qwen2.5-instruct --model-engine vLLM \\
    --size-in-billions 7 --model-format pytorch --replica 2 --enable_xavier true`;
// Set by our script in xinference's launch dialog.
const SWITCH_SEEN = "xavier.switch";
/** @type {Record<string, number | undefined>} */
const cursors = {};
/** @type {Record<string, number>} */
const widths = { graph: 640, plots: 400, firstTokens: 800 };
let copied = false;

function topView() {
  const text = language.words;
  const { live, trouble, retryIn } = state;
  const waiting = trouble !== null && retryIn > 0;
  const light = live ? "on" : trouble === null ? "" : "off";
  const status = waiting ? fill(text.away, { seconds: retryIn }) : text.connecting;
  return h(
    "header",
    { class: "top" },
    h(
      "a",
      {
        class: "skip",
        href: "#main",
        onclick: (/** @type {Event} */ event) => {
          event.preventDefault(); // the fragment names the model
          at("main").focus();
        },
      },
      text.skip,
    ),
    h("a", { class: "home", href: "/" }, "‹ Xinference"),
    h("h1", null, text.title),
    h(
      "div",
      { class: "right" },
      h("span", { class: `live ${light}`, id: "live" }, live ? text.live : status),
      h(
        "button",
        {
          type: "button",
          id: "theme",
          onclick: () => {
            theme.turn();
            show();
          },
        },
        theme.dark ? text.light : text.dark,
      ),
    ),
  );
}

/**
 * @param {string} title
 * @param {string} help
 * @param {Child[]} more
 */
function troubleCard(title, help, ...more) {
  return h(
    "section",
    { class: "card", id: "trouble", role: "alert" },
    h("h2", null, title),
    h("p", null, help),
    ...more,
  );
}

/** @param {import("./api.js").Trouble} trouble */
function troubleView({ kind }) {
  const text = language.words;
  switch (kind) {
    case "signIn":
      return troubleCard(
        text.signIn,
        text.signInHelp,
        h("p", null, h("a", { class: "button primary", href: "/login" }, text.signInLink)),
      );
    case "forbidden":
      return troubleCard(text.forbidden, text.forbiddenHelp);
    case "absent":
      return troubleCard(text.absent, text.absentHelp);
    default:
      return troubleCard(fill(text.away, { seconds: state.retryIn }), text.awayHelp);
  }
}

function noSwitchView() {
  const seen = localStorage.getItem(SWITCH_SEEN);
  return (
    (seen === "missing" || seen === "failed") &&
    h("p", { class: "notice", id: "no-switch" }, language.words.noSwitch)
  );
}

function emptyView() {
  const text = language.words;
  const copy = async () => {
    await navigator.clipboard.writeText(COMMAND);
    copied = true;
    show();
  };
  return h(
    "section",
    { class: "card", id: "empty" },
    h("h2", null, text.emptyTitle),
    h(
      "ol",
      { class: "steps" },
      h(
        "li",
        null,
        h("p", null, text.emptySwitch),
        h("p", null, h("a", { class: "button primary", href: "/launch-model/llm" }, text.launch)),
      ),
      h(
        "li",
        null,
        h("p", null, text.emptyCommand),
        h("pre", null, h("code", null, COMMAND)),
        // Without HTTPS, browsers have no clipboard.
        "clipboard" in navigator &&
          h("button", { type: "button", onclick: copy }, copied ? text.copied : text.copy),
      ),
    ),
  );
}

function tabsView() {
  const uid = chosen();
  const models = state.models ?? [];
  return (
    models.length > 1 &&
    h(
      "nav",
      { class: "tabs", "aria-label": language.words.models },
      models.map(({ model_uid: each }) =>
        h(
          "a",
          {
            href: `#${encodeURIComponent(each)}`,
            "aria-current": each === uid ? "page" : null,
          },
          each,
        ),
      ),
    )
  );
}

/** @param {Report} report */
function headView({ model_uid: uid, enabled }) {
  const text = language.words;
  return h(
    "div",
    { class: "head" },
    h("h2", null, uid),
    h(
      "div",
      { class: "right" },
      h(
        "button",
        {
          type: "button",
          class: "switch",
          role: "switch",
          id: "enabled",
          "aria-checked": String(enabled),
          onclick: () => change("", { enabled: !enabled }, null),
        },
        h("i", null),
        text.sharing,
      ),
      h(
        "button",
        {
          type: "button",
          id: "flush",
          onclick: () => {
            if (confirm(fill(text.flushAsk, { uid }))) change("/flush", {}, text.flushed);
          },
        },
        text.flush,
      ),
    ),
  );
}

/** @param {Report} report */
function hintOf(report) {
  const text = language.words;
  const { replicas, tracker } = report;
  const groups = new Set(replicas.map((replica) => replica.namespace)).size;
  const { hits } = report.totals;
  if (!report.enabled) return text.sharingOff;
  if (replicas.length === 1) return text.alone;
  const differing = replicas.find((replica) => replica.comparison.differing > 0);
  if (differing !== undefined) {
    const { peer, layer, amount } = differing.comparison;
    const [one, other] = [differing.incarnation, peer].map((each) => nameOf(report, each));
    return fill(text.differ, { one, other, layer, share: percent(amount, 1) });
  }
  if (groups > 1) return fill(text.apart, { count: groups });
  for (const { incarnation, fetch_decisions: decisions } of replicas) {
    for (const [left, reason] of Object.entries(decisions.left_out)) {
      const [replica, peer] = [incarnation, left].map((each) => nameOf(report, each));
      return fill(text.leftOut, { replica, peer, reason });
    }
  }
  if (tracker.dropped > 0) return fill(text.trackerFull, { chunks: count(tracker.dropped) });
  return hits.computed > 0 && sharedOf(hits) === 0 ? text.quiet : null;
}

/** @param {Report} report */
function modelView(report) {
  const text = language.words;
  const links = state.recent.links();
  const hint = hintOf(report);
  const failed = report.replicas.find((replica) => replica.comparison.failed_audits > 0);
  return [
    headView(report),
    group(
      state.notice !== null && h("p", { class: "notice", id: "notice" }, state.notice),
      failed !== undefined &&
        h(
          "p",
          { class: "notice grave", role: "alert", id: "audit" },
          fill(text.auditFailed, { replica: nameOf(report, failed.incarnation) }),
        ),
      hint !== null && h("p", { class: "notice", id: "hint" }, hint),
      !state.live &&
        state.recent.time !== null &&
        h(
          "p",
          { class: "notice", id: "aged" },
          fill(text.asOf, { time: clock(state.recent.time) }),
        ),
    ),
    h(
      "div",
      { class: state.live ? "stack" : "stack aged", id: "stats" },
      recentView(report, state.samples),
      tilesView(report, links),
      sourcesView(report),
      firstTokensView(report, state.samples, widths.firstTokens, cursors, show),
      h(
        "div",
        { class: "columns" },
        graphCard(report, links, widths.graph),
        h("div", { class: "stack" }, linksView(report, links), outcomesView(report)),
      ),
      plotsView(report, state.samples, widths.plots, cursors, show),
      replicasView(report),
      routingView(report),
      prefixesView(report),
      explainView(report),
      eventsView(report, state.events),
    ),
  ];
}

function mainView() {
  const { models, trouble, lost } = state;
  const text = language.words;
  const passing = models !== null && (trouble?.kind === "away" || trouble?.kind === "tracker");
  if (trouble !== null && !passing) return troubleView(trouble);
  if (models === null) return h("p", { class: "muted" }, text.loading);
  const report = state.recent.report ?? models.find((model) => model.model_uid === chosen());
  return [
    group(
      passing &&
        h(
          "p",
          { class: "notice", role: "alert", id: "away" },
          trouble?.kind === "tracker" ? text.trackerHelp : text.awayHelp,
        ),
      lost !== null && h("p", { class: "notice", id: "lost" }, fill(text.gone, { uid: lost })),
      noSwitchView(),
      tabsView(),
    ),
    report === undefined ? emptyView() : modelView(report),
  ];
}

function drawPage() {
  document.documentElement.lang = language.code;
  document.documentElement.classList.toggle("dark", theme.dark);
  document.title = language.words.title;
  draw(at("top"), topView());
  draw(at("main"), mainView());
  measure();
}

// Drawings are made for their actual width, so that text keeps its size.
function measure() {
  let changed = false;
  for (const element of document.querySelectorAll("[data-measure]")) {
    const name = element.getAttribute("data-measure") ?? "";
    const room = name === "graph" ? element : element.querySelector("svg");
    const width = Math.round(room?.clientWidth ?? 0);
    if (width > 0 && Math.abs(width - widths[name]) > 1) {
      widths[name] = width;
      changed = true;
    }
  }
  if (changed) show();
}

addEventListener("hashchange", () => {
  Object.assign(state, { notice: null, lost: null });
  choose();
});
addEventListener("resize", show);
addEventListener("storage", show);
addEventListener("online", choose);
document.addEventListener("visibilitychange", show);
start(drawPage);
