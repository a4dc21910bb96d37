// The page as a whole: its parts in each state, and when it is drawn.

const COMMAND = `xinference launch --model-name qwen2.5-instruct --model-engine vLLM \\
    --size-in-billions 7 --model-format pytorch --replica 2 --enable_xavier true`;
// Set by our script in xinference's launch dialog.
const SWITCH_SEEN = "xavier.switch";
const cursors = {};
const widths = { graph: 640, plots: 400, firstTokens: 800 };
let copied = false;

function topView() {
  const text = language.words;
  const status = state.live ? ["on", text.live]
    : [state.trouble === null ? "" : "off",
      state.retryIn > 0 && state.trouble !== null ? text.away(state.retryIn) : text.connecting];
  return h("header", { class: "top" },
    h("a", { class: "skip", href: "#main", onclick: (event) => {
      event.preventDefault(); // the fragment names the model
      document.getElementById("main").focus();
    } }, text.skip),
    h("a", { class: "home", href: "/" }, "‹ Xinference"),
    h("h1", null, text.title),
    h("div", { class: "right" },
      h("span", { class: `live ${status[0]}`, id: "live" }, status[1]),
      h("button", { type: "button", id: "theme", onclick: () => look(theme) },
        theme.dark ? text.light : text.dark),
      h("button", { type: "button", id: "language", onclick: () => look(language) }, text.language)));
}

function look(setting) {
  setting.turn();
  show();
}

function messageView(id, title, help, ...more) {
  return h("section", { class: "card", id, role: "alert" }, h("h2", null, title),
    h("p", null, help), ...more);
}

function troubleView(trouble) {
  const text = language.words;
  switch (trouble.kind) {
    case "signIn":
      return messageView("trouble", text.signIn, text.signInHelp,
        h("p", null, h("a", { class: "button primary", href: "/login" }, text.signInLink)));
    case "forbidden": return messageView("trouble", text.forbidden, text.forbiddenHelp);
    case "absent": return messageView("trouble", text.absent, text.absentHelp);
    default: return messageView("trouble", text.away(state.retryIn), text.awayHelp);
  }
}

function noSwitchView() {
  const seen = localStorage.getItem(SWITCH_SEEN);
  return (seen === "missing" || seen === "failed")
    && h("p", { class: "notice", id: "no-switch" }, language.words.noSwitch);
}

function emptyView() {
  const text = language.words;
  const copy = async () => {
    await navigator.clipboard.writeText(COMMAND);
    copied = true;
    show();
  };
  return h("section", { class: "card", id: "empty" }, h("h2", null, text.emptyTitle),
    h("ol", { class: "steps" },
      h("li", null, h("p", null, text.emptySwitch), h("p", null,
        h("a", { class: "button primary", href: "/launch-model/llm" }, text.launch))),
      h("li", null, h("p", null, text.emptyCommand), h("pre", null, h("code", null, COMMAND)),
        // Without HTTPS, browsers have no clipboard.
        navigator.clipboard && h("button", { type: "button", onclick: copy },
          copied ? text.copied : text.copy))));
}

function tabsView() {
  const uid = chosen();
  return state.models.length > 1 && h("nav", { class: "tabs", "aria-label": language.words.models },
    state.models.map((report) => h("a", { href: `#${encodeURIComponent(report.model_uid)}`,
      "aria-current": report.model_uid === uid ? "page" : null }, report.model_uid)));
}

function headView(report) {
  const text = language.words;
  return h("div", { class: "head" }, h("h2", null, report.model_uid),
    h("div", { class: "right" },
      h("button", { type: "button", class: "switch", role: "switch", id: "enabled",
        "aria-checked": String(report.enabled),
        onclick: () => change("", { enabled: !report.enabled }, null) },
      h("i", null), text.sharing),
      h("button", { type: "button", id: "flush", onclick: () => {
        if (confirm(text.flushAsk(report.model_uid))) change("/flush", {}, text.flushed);
      } }, text.flush)));
}

function hints(report) {
  const text = language.words;
  const groups = new Set(report.replicas.map((replica) => replica.namespace)).size;
  const { hits } = report.totals;
  if (!report.enabled) return text.sharingOff;
  if (report.replicas.length === 1) return text.alone;
  const differing = report.replicas.find((replica) => replica.comparison?.differing > 0);
  if (differing !== undefined) {
    const { peer, layer, amount } = differing.comparison;
    return text.differ(nameOf(report, differing.incarnation), nameOf(report, peer), layer,
      percent(amount, 1));
  }
  if (groups > 1) return text.apart(groups);
  for (const { incarnation, fetch_decisions: { left_out: leftOut } } of report.replicas) {
    for (const [peer, reason] of Object.entries(leftOut ?? {})) {
      return text.leftOut(nameOf(report, incarnation), nameOf(report, peer), reason);
    }
  }
  const { dropped, hooks } = report.tracker;
  if (dropped > 0) return text.trackerFull(count(dropped));
  const lost = sum([hooks, ...report.replicas.map((replica) => replica.hooks)]
    .map(({ failed, dropped: late }) => failed + late));
  if (lost > 0) return text.eventsLost(count(lost));
  return hits.computed > 0 && hits.local_pool + hits.remote === 0 ? text.quiet : null;
}

// Keeps optional parts in one node: otherwise everything below would move in the tree, be recreated
// and lose typed text.
function group(...children) {
  return h("div", { class: "group" }, children);
}

function modelView(report) {
  const links = state.recent.links();
  const hint = hints(report);
  const failed = report.replicas.find((replica) => replica.comparison?.failed_audits > 0);
  return [
    headView(report),
    group(
      state.notice !== null && h("p", { class: "notice", id: "notice" }, state.notice),
      failed !== undefined && h("p", { class: "notice grave", role: "alert", id: "audit" },
        language.words.auditFailed(nameOf(report, failed.incarnation))),
      hint !== null && h("p", { class: "notice", id: "hint" }, hint),
      !state.live && state.recent.time !== null
        && h("p", { class: "notice", id: "aged" }, language.words.asOf(clock(state.recent.time)))),
    h("div", { class: state.live ? null : "aged", style: "display: grid; gap: 1rem", id: "stats" },
      tilesView(report, links),
      sourcesView(report),
      firstTokensView(state.samples, widths.firstTokens, cursors, show),
      h("div", { class: "columns" }, graphCard(report, links, widths.graph),
        h("div", { style: "display: grid; gap: 1rem; align-content: start; min-width: 0" },
          linksView(report, links), outcomesView(report))),
      plotsView(state.samples, widths.plots, cursors, show),
      replicasView(report),
      routingView(report),
      prefixesView(report),
      explainView(report),
      eventsView(report, state.events)),
  ];
}

function mainView() {
  const { models, trouble, lost } = state;
  const text = language.words;
  const passing = models !== null && ["away", "tracker"].includes(trouble?.kind);
  if (trouble !== null && !passing) return troubleView(trouble);
  if (models === null) return h("p", { class: "muted" }, text.loading);
  const report = state.recent.report ?? models.find((model) => model.model_uid === chosen());
  return [
    group(
      passing && h("p", { class: "notice", role: "alert", id: "away" },
        trouble.kind === "tracker" ? text.trackerHelp : text.awayHelp),
      lost !== null && h("p", { class: "notice", id: "lost" }, text.gone(lost)),
      noSwitchView(),
      tabsView()),
    report === undefined ? emptyView() : modelView(report),
  ];
}

let planned = false;

function show() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    document.documentElement.lang = language.code;
    document.documentElement.classList.toggle("dark", theme.dark);
    document.title = language.words.title;
    draw(document.getElementById("top"), topView());
    draw(document.getElementById("main"), mainView());
    measure();
  });
}

// Drawings are made for their actual width, so that text keeps its size.
function measure() {
  let changed = false;
  for (const element of document.querySelectorAll("[data-measure]")) {
    const name = element.dataset.measure;
    const room = name === "graph" ? element : element.querySelector("svg");
    const width = Math.round(room?.clientWidth ?? 0);
    if (width > 0 && Math.abs(width - widths[name]) > 1) {
      widths[name] = width;
      changed = true;
    }
  }
  if (changed) show();
}

function say(sentence) {
  document.getElementById("said").textContent = sentence;
}

addEventListener("hashchange", () => {
  Object.assign(state, { notice: null, lost: null });
  choose();
});
addEventListener("resize", show);
addEventListener("storage", show);
addEventListener("online", choose);
document.addEventListener("visibilitychange", show);
show();
feed();
