// The page as a whole: its parts in each state, and when it is drawn.

import { fill } from "../languages.js";
import { html, render } from "./html.js";
import { clock, count, nameOf, percent, tokensOf } from "./numbers.js";
import { language, reasonOf, theme } from "./settings.js";
import { change, choose, chosen, show, start, state } from "./state.js";
import {
  Events,
  FirstTokens,
  Hour,
  Links,
  Prefixes,
  Recent,
  Replicas,
  Routing,
  Totals,
} from "./views.js";

const COMMAND = `xinference launch --model-name qwen2.5-instruct --model-engine vLLM \\
    --size-in-billions 7 --model-format pytorch --replica 2 --enable_xavier true`;
// Set by our script in xinference's launch dialog.
const SWITCH_SEEN = "xavier.switch";
const MAX_TABS = 6; // more models are in a list
let copied = false;

function statusText() {
  const text = language.words;
  const { live, trouble, models, retryIn } = state;
  if (live) return text.live;
  switch (trouble?.kind) {
    case "signIn":
      return text.signIn;
    case "forbidden":
      return text.forbidden;
    case "absent":
      return text.absentShort;
    case "tracker":
      return text.trackerShort;
    case "away":
      return fill(text.away, { seconds: retryIn });
    default:
      return models?.length === 0 ? text.noModel : text.connecting;
  }
}

function Top() {
  const text = language.words;
  const light = state.live ? "on" : state.trouble === null ? "" : "off";
  const skip = (/** @type {Event} */ event) => {
    event.preventDefault(); // the fragment names the model
    document.getElementById("main")?.focus();
  };
  const turn = () => {
    theme.turn();
    show();
  };
  return html`<header class="top">
    <a class="skip" href="#main" onClick=${skip}>${text.skip}</a>
    <a class="home" href="/">‹ Xinference</a>
    <h1>${text.title}</h1>
    <div class="right">
      <span class=${`live ${light}`} id="live">${statusText()}</span>
      <button type="button" id="theme" onClick=${turn}>${theme.dark ? text.light : text.dark}</button>
    </div>
  </header>`;
}

/** @param {{ kind: import("./api.js").Kind }} props */
function TroubleCard({ kind }) {
  const text = language.words;
  /** @type {Record<import("./api.js").Kind, [string, string]>} */
  const said = {
    signIn: [text.signIn, text.signInHelp],
    forbidden: [text.forbidden, text.forbiddenHelp],
    absent: [text.absent, text.absentHelp],
    tracker: [text.trackerShort, text.trackerHelp],
    away: [fill(text.away, { seconds: state.retryIn }), text.awayHelp],
  };
  const [title, help] = said[kind];
  return html`<section class="card" id="trouble" role="alert">
    <h2>${title}</h2>
    <p>${help}</p>
    ${
      kind === "signIn" &&
      html`<p><a class="button primary" href="/login">${text.signInLink}</a></p>`
    }
  </section>`;
}

function Empty() {
  const text = language.words;
  const copy = async () => {
    await navigator.clipboard.writeText(COMMAND);
    copied = true;
    show();
  };
  return html`<section class="card stack" id="empty">
    <h2>${text.emptyTitle}</h2>
    <p>${text.emptyCommand} <a href="/login">${text.signInLink}</a></p>
    <pre><code>${COMMAND}</code></pre>
    <div class="head">
      ${
        // Without HTTPS, browsers have no clipboard.
        "clipboard" in navigator &&
        html`<button type="button" onClick=${copy}>${copied ? text.copied : text.copy}</button>`
      }
      <a class="button primary" href="/launch-model/llm">${text.launch}</a>
      <span class="muted small">${text.emptySwitch}</span>
    </div>
  </section>`;
}

function Models() {
  const uid = chosen();
  const uids = (state.models ?? []).map((report) => report.model_uid);
  const label = language.words.models;
  if (uids.length <= 1) return null;
  if (uids.length > MAX_TABS) {
    return html`<select id="models" aria-label=${label} value=${uid}
      onChange=${(/** @type {Event & { target: HTMLSelectElement }} */ event) => {
        location.hash = encodeURIComponent(event.target.value);
      }}>
      ${uids.map((each) => html`<option value=${each} selected=${each === uid}>${each}</option>`)}
    </select>`;
  }
  return html`<nav class="tabs" aria-label=${label}>
    ${uids.map(
      (each) => html`<a href=${`#${encodeURIComponent(each)}`}
        aria-current=${each === uid ? "page" : undefined}>${each}</a>`,
    )}
  </nav>`;
}

/** @param {{ report: Report }} props */
function Head({ report: { model_uid: uid, enabled } }) {
  const text = language.words;
  const turn = () => change("", { method: "PATCH", body: { enabled: !enabled } }, null);
  const flush = () => {
    if (!confirm(fill(text.flushAsk, { uid }))) return;
    change("/flush", { method: "POST", body: {} }, text.flushed);
  };
  return html`<div class="head">
    <h2>${uid}</h2>
    <div class="right">
      <button type="button" class="switch" role="switch" id="enabled"
        aria-checked=${String(enabled)} onClick=${turn}><i></i>${text.sharing}</button>
      <button type="button" id="flush" onClick=${flush}>${text.flush}</button>
    </div>
  </div>`;
}

/** @param {Report} report */
function hintOf(report) {
  const text = language.words;
  const { replicas, tracker } = report;
  const groups = new Set(replicas.map((replica) => replica.namespace)).size;
  const { hits } = report.totals;
  if (!report.enabled) return text.sharingOff;
  if (replicas.length === 0) return text.none;
  if (replicas.length === 1) return text.alone;
  const differing = replicas.find((replica) => replica.comparison.differing > 0);
  if (differing !== undefined) {
    const { peer, layer, amount } = differing.comparison;
    const [one, other] = [differing.incarnation, peer].map((each) => nameOf(report, each));
    return fill(text.differ, { one, other, layer, share: percent(amount, 1) });
  }
  if (groups > 1) {
    const fields = state.differing.fields.join(", ");
    return fill(fields === "" ? text.apart : text.apartBy, { count: groups, fields });
  }
  for (const { incarnation, fetch_decisions: decisions } of replicas) {
    for (const [left, reason] of Object.entries(decisions.left_out)) {
      const [replica, peer] = [incarnation, left].map((each) => nameOf(report, each));
      return fill(text.leftOut, { replica, peer, reason: reasonOf(reason) });
    }
  }
  if (tracker.dropped > 0) return fill(text.trackerFull, { chunks: count(tracker.dropped) });
  return hits.computed > 0 && tokensOf(hits).shared === 0 ? text.quiet : null;
}

/** @param {{ report: Report }} props */
function Model({ report }) {
  const text = language.words;
  const { live, notice, recent, samples, events } = state;
  const links = recent.links();
  const hint = hintOf(report);
  const failed = report.replicas.find((replica) => replica.comparison.failed_audits > 0);
  const model = { report, samples, links };
  return html`
    <${Head} report=${report} />
    ${notice !== null && html`<p class="notice" id="notice">${notice}</p>`}
    ${
      failed !== undefined &&
      html`<p class="notice grave" role="alert" id="audit">
        ${fill(text.auditFailed, { replica: nameOf(report, failed.incarnation) })}
      </p>`
    }
    ${hint !== null && html`<p class="notice" id="hint">${hint}</p>`}
    ${
      !live &&
      recent.time !== null &&
      html`<p class="notice" id="aged">${fill(text.asOf, { time: clock(recent.time) })}</p>`
    }
    <div class=${live ? "stack" : "stack aged"} id="stats">
      <${Recent} ...${model} />
      <${Totals} ...${model} />
      <div class="columns">
        <${FirstTokens} ...${model} />
        <${Events} ...${model} events=${events} />
      </div>
      <${Hour} ...${model} />
      <${Replicas} ...${model} />
      <${Links} ...${model} />
      <${Routing} ...${model} />
      <${Prefixes} ...${model} />
    </div>`;
}

function Main() {
  const { models, trouble, lost } = state;
  const text = language.words;
  const passing = models !== null && (trouble?.kind === "away" || trouble?.kind === "tracker");
  if (trouble !== null && !passing) return html`<${TroubleCard} kind=${trouble.kind} />`;
  if (models === null) return html`<p class="muted">${text.loading}</p>`;
  const report = state.recent.report ?? models.find((model) => model.model_uid === chosen());
  const seen = localStorage.getItem(SWITCH_SEEN);
  return html`
    ${
      passing &&
      html`<p class="notice" role="alert" id="away">
        ${trouble?.kind === "tracker" ? text.trackerHelp : text.awayHelp}
      </p>`
    }
    ${lost !== null && html`<p class="notice" id="lost">${fill(text.gone, { uid: lost })}</p>`}
    ${
      (seen === "missing" || seen === "failed") &&
      html`<p class="notice" id="no-switch">${text.noSwitch}</p>`
    }
    <${Models} />
    ${report === undefined ? html`<${Empty} />` : html`<${Model} report=${report} />`}`;
}

function drawPage() {
  document.documentElement.lang = language.code;
  document.documentElement.classList.toggle("dark", theme.dark);
  document.title = language.words.title;
  for (const [id, Part] of /** @type {const} */ ([
    ["top", Top],
    ["main", Main],
  ])) {
    render(html`<${Part} />`, /** @type {Element} */ (document.getElementById(id)));
  }
}

addEventListener("hashchange", () => {
  Object.assign(state, { notice: null, lost: null });
  choose();
});
addEventListener("storage", show);
addEventListener("online", choose);
document.addEventListener("visibilitychange", show);
start(drawPage);
