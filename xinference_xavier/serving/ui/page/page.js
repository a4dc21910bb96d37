// The page as a whole: its parts in each state, and when it is drawn.

import { html, render } from "../html.js";
import { fill } from "../languages.js";
import { clock, count, linksOf, nameOf, percent, tokensOf } from "./numbers.js";
import { language, reasonOf, theme } from "./settings.js";
import { change, choose, chosen, show, start, state } from "./state.js";
import { Events, FirstTokens, Hour, Links, Prefixes, Replicas, Routing, Summary } from "./views.js";

const COMMAND = `xinference launch --model-name qwen2.5-instruct --model-engine vLLM \\
    --size-in-billions 7 --model-format pytorch --replica 2 --enable_xavier true`;

function statusText() {
  const text = language.words;
  const { live, trouble, models } = state;
  if (trouble !== null) return text[trouble.kind];
  if (live) return text.live;
  return models?.length === 0 ? text.noModel : text.connecting;
}

function Top() {
  const text = language.words;
  const light = state.trouble !== null ? "wrong" : state.live ? "on" : "";
  const skip = (/** @type {Event} */ event) => {
    event.preventDefault(); // the fragment names the model
    document.getElementById("main")?.focus();
  };
  const turn = () => {
    theme.turn();
    show();
  };
  return html`<header class="head">
    <a class="skip" href="#main" onClick=${skip}>${text.skip}</a>
    <a class="home" href="/">‹ Xinference</a>
    <h1>${text.title}</h1>
    <span class=${`live ${light}`} id="live">${statusText()}</span>
    <button type="button" id="theme" onClick=${turn}>${theme.dark ? text.light : text.dark}</button>
  </header>`;
}

/** @param {{ kind: import("./api.js").Kind }} props */
function TroubleCard({ kind }) {
  const text = language.words;
  return html`<section class="card stack" id="trouble" role="alert">
    <h2>${statusText()}</h2>
    <p>${text[`${kind}Help`]}</p>
    ${kind === "signIn" && html`<a class="primary" href="/login">${text.signInLink}</a>`}
  </section>`;
}

function Empty() {
  const text = language.words;
  const copy = (/** @type {Event & { target: HTMLElement }} */ { target }) =>
    navigator.clipboard.writeText(COMMAND).then(() => {
      target.textContent = text.copied;
    });
  return html`<section class="card stack" id="empty">
    <h2>${text.emptyTitle}</h2>
    <p>${text.emptyCommand} <a href="/login">${text.signInLink}</a></p>
    <pre><code>${COMMAND}</code></pre>
    <div class="head">
      ${
        // Without HTTPS, browsers have no clipboard.
        "clipboard" in navigator &&
        html`<button type="button" onClick=${copy}>${text.copy}</button>`
      }
      <a class="primary" href="/launch-model/llm">${text.launch}</a>
    </div>
    <p class="note">${text.emptySwitch}</p>
  </section>`;
}

/** @param {{ report: Report }} props */
function Head({ report: { model_uid: uid, enabled } }) {
  const text = language.words;
  const uids = (state.models ?? []).map((report) => report.model_uid);
  const turn = () => change("", { method: "PATCH", body: { enabled: !enabled } }, null);
  const flush = () => {
    if (!confirm(fill(text.flushAsk, { uid }))) return;
    change("/flush", { method: "POST", body: {} }, text.flushed);
  };
  const select = (/** @type {Event & { target: HTMLSelectElement }} */ { target }) => {
    location.hash = encodeURIComponent(target.value);
  };
  return html`<div class="head">
    <h2>${uid}</h2>
    ${
      uids.length > 1 &&
      html`<select id="models" aria-label=${text.models} value=${uid} onChange=${select}>
        ${uids.map((each) => html`<option selected=${each === uid}>${each}</option>`)}
      </select>`
    }
    <label>
      <input type="checkbox" role="switch" id="enabled" checked=${enabled} onClick=${turn} />
      ${text.sharing}
    </label>
    <button type="button" id="flush" onClick=${flush}>${text.flush}</button>
  </div>`;
}

/** @param {Report} report */
function hintOf(report) {
  const text = language.words;
  const { replicas, tracker, totals } = report;
  const name = (/** @type {string} */ incarnation) => nameOf(report, incarnation);
  const groups = new Set(replicas.map((replica) => replica.namespace)).size;
  if (!report.enabled) return text.sharingOff;
  if (replicas.length === 0) return text.none;
  if (replicas.length === 1) return text.alone;
  const differing = replicas.find((replica) => replica.comparison.differing > 0);
  if (differing !== undefined) {
    const { peer, layer, amount } = differing.comparison;
    const [one, other] = [name(differing.incarnation), name(peer)];
    return fill(text.differ, { one, other, layer, share: percent(amount) });
  }
  if (groups > 1) {
    const fields = state.differing.fields.join(", ");
    return fill(fields === "" ? text.apart : text.apartBy, { count: groups, fields });
  }
  for (const { incarnation, fetch_decisions: decisions } of replicas) {
    for (const [peer, why] of Object.entries(decisions.left_out)) {
      const [one, other] = [name(incarnation), name(peer)];
      return fill(text.leftOut, { replica: one, peer: other, reason: reasonOf(why) });
    }
  }
  if (tracker.dropped > 0) return fill(text.trackerFull, { chunks: count(tracker.dropped) });
  return totals.hits.computed > 0 && tokensOf(totals.hits).shared === 0 ? text.quiet : null;
}

/**
 * @param {string} id
 * @param {string | null} content
 * @param {boolean} isGrave
 */
function notice(id, content, isGrave = false) {
  if (content === null) return null;
  return html`<p class=${isGrave ? "notice grave" : "notice"} id=${id}
    role=${isGrave ? "alert" : undefined}>${content}</p>`;
}

/** @param {{ report: Report }} props */
function Model({ report }) {
  const text = language.words;
  const { live, samples, events, reports } = state;
  const links = reports.length > 0 ? linksOf(reports) : [];
  const failed = report.replicas.find((replica) => replica.comparison.failed_audits > 0);
  const wrong = failed && fill(text.auditFailed, { replica: nameOf(report, failed.incarnation) });
  const latest = reports.at(-1);
  const old = live || !latest ? null : fill(text.asOf, { time: clock(latest.time) });
  const props = { report, samples, links, events };
  return html`
    <${Head} report=${report} />
    ${notice("notice", state.notice)}
    ${notice("audit", wrong ?? null, true)}
    ${notice("hint", hintOf(report))}
    ${notice("aged", old)}
    <div class=${live ? "stack" : "stack aged"}>
      <div class="columns">
        <div class="stack"><${Summary} ...${props} /></div>
        <div class="stack"><${FirstTokens} ...${props} /><${Events} ...${props} /></div>
      </div>
      <${Hour} ...${props} />
      <${Replicas} ...${props} />
      <${Links} ...${props} />
      <${Routing} ...${props} />
      <${Prefixes} ...${props} />
    </div>`;
}

function Main() {
  const { models, reports, trouble, lost } = state;
  const text = language.words;
  // The last data stay visible while nothing answers.
  const passing = trouble?.kind === "away" || trouble?.kind === "tracker" ? trouble.kind : null;
  if (trouble !== null && (!models?.length || passing === null)) {
    return html`<${TroubleCard} kind=${trouble.kind} />`;
  }
  if (models === null) return html`<p class="note">${text.connecting}</p>`;
  const report = reports.at(-1)?.report ?? models.find((model) => model.model_uid === chosen());
  return html`
    ${notice("away", passing && text[`${passing}Help`])}
    ${notice("lost", lost && fill(text.gone, { uid: lost }))}
    ${report === undefined ? html`<${Empty} />` : html`<${Model} report=${report} />`}`;
}

function drawPage() {
  document.documentElement.lang = language.code;
  document.documentElement.classList.toggle("dark", theme.dark);
  document.title = language.words.title;
  for (const [id, Part] of Object.entries({ top: Top, main: Main })) {
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
