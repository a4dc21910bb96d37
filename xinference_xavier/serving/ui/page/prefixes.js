// The named prefixes that belong to no tenant: whether they are there, and until when.

import { fill } from "../languages.js";
import { askJson, troubleOf } from "./api.js";
import { group, h } from "./dom.js";
import { count, duration, sum } from "./numbers.js";
import { language, named } from "./settings.js";
import { chosen, pathOf, show, state } from "./state.js";
import { cell, note, row, table } from "./views.js";

/** @type {{ busy: boolean, problem: string | null }} */
const naming = { busy: false, problem: null };

/** @param {Report} report */
export function prefixesView(report) {
  const text = language.words;
  const prefixes = report.prefixes ?? [];
  const hidden = sum(Object.values(report.prefix_states ?? {})) - prefixes.length;
  return h(
    "section",
    { class: "card", id: "prefixes" },
    h("h2", null, text.prefixes),
    h("p", { class: "muted small" }, text.prefixesHelp),
    group(
      prefixes.length > 0 &&
        table(
          "prefix-list",
          [
            [text.name],
            [text.state],
            [text.tokens, true],
            [text.chunksHeld, true],
            [text.keptAt],
            [text.expires, true],
            [""],
          ],
          prefixes.map(prefixRow),
        ),
    ),
    group(
      hidden > 0 &&
        h("p", { class: "muted small" }, fill(text.morePrefixes, { number: count(hidden) })),
    ),
    h("details", { id: "name-text" }, h("summary", null, text.nameText), namingForm()),
  );
}

function namingForm() {
  const text = language.words;
  /**
   * @param {string} name
   * @param {string} label
   */
  const option = (name, label) =>
    h("label", null, h("input", { type: "checkbox", name }), ` ${label}`);
  return h(
    "form",
    {
      class: "form",
      onsubmit: (/** @type {SubmitEvent & { target: HTMLFormElement }} */ event) => {
        event.preventDefault();
        nameText(event.target);
      },
    },
    h("label", null, `${text.name} `, h("input", { name: "named", required: true })),
    h("textarea", {
      name: "text",
      rows: 3,
      spellcheck: "false",
      required: true,
      "aria-label": text.prefixText,
    }),
    h(
      "div",
      { class: "row" },
      option("chat", text.asSystem),
      option("everywhere", text.everywhere),
      option("firm", text.neverEvict),
      h("label", null, `${text.lifetime} `, h("input", { name: "ttl", value: "1h", size: 4 })),
      h("button", { "aria-disabled": naming.busy ? "true" : null }, text.add),
    ),
    group(naming.problem !== null && h("p", { class: "notice" }, naming.problem)),
  );
}

/** @param {HTMLFormElement} form */
async function nameText(form) {
  if (naming.busy) return;
  const fields = new FormData(form);
  const text = fields.get("text");
  const content = fields.has("chat")
    ? { messages: [{ role: "system", content: text }] }
    : { prompt: text };
  const body = {
    name: fields.get("named"),
    ...content,
    ttl: fields.get("ttl"),
    copies: fields.has("everywhere") ? "all" : 1,
    retention: fields.has("firm") ? "hard" : "soft",
  };
  Object.assign(naming, { busy: true, problem: null });
  show();
  try {
    await askJson(pathOf(chosen(), "/prefixes"), { method: "POST", body });
    form.reset();
  } catch (error) {
    naming.problem = troubleOf(error).message || language.words.notAdded;
  }
  naming.busy = false;
  show();
}

/** @param {Prefix} prefix */
function prefixRow(prefix) {
  const text = language.words;
  const held = Math.max(0, ...Object.values(prefix.replicas).map((copy) => copy.held));
  const left = Math.max(0, prefix.expires - Date.now() / 1000);
  return row(
    prefix.name,
    h(
      "td",
      null,
      named(`prefix_${prefix.state}`) ?? prefix.state,
      prefix.reason !== "" && h("div", { class: "muted small wrapped" }, prefix.reason),
    ),
    cell(prefix.tokens > 0 ? count(prefix.tokens) : "–"),
    cell(`${count(held)} / ${count(prefix.chunks)}`),
    h(
      "td",
      null,
      Object.keys(prefix.replicas).join(", ") || "–",
      prefix.retention === "hard" && note(text.neverEvicted),
    ),
    cell(duration(left)),
    h("td", null, h("button", { type: "button", onclick: () => forget(prefix.name) }, text.remove)),
  );
}

/** @param {string} name */
async function forget(name) {
  try {
    const path = pathOf(chosen(), `/prefixes/${encodeURIComponent(name)}`);
    await askJson(path, { method: "DELETE" });
  } catch (error) {
    state.notice = troubleOf(error).message || language.words.notRemoved;
    show();
  }
}
