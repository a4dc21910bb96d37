// A prompt's chunks: which replicas hold them, what a request would reuse, and which replica would
// answer it first.

import { fill } from "../languages.js";
import { askJson, troubleOf } from "./api.js";
import { h, say } from "./dom.js";
import { count, nameOf } from "./numbers.js";
import { forecastsView } from "./routing.js";
import { language } from "./settings.js";
import { chosen, pathOf, show, uidOf } from "./state.js";
import { cell, row, table, widthOf } from "./views.js";

/**
 * `answer` and `problem` belong to model `uid`.
 * @type {{ uid: string | null, busy: boolean, answer: Explanation | null,
 *   problem: { text: Problem, reason: string } | null }}
 */
const question = { uid: null, busy: false, answer: null, problem: null };

/** @typedef {"mayNotAsk" | "signIn" | "failed" | "noPrompt"} Problem */
/** @type {Partial<Record<import("./api.js").Kind, Problem>>} */
const PROBLEMS = { forbidden: "mayNotAsk", signIn: "signIn" };

/** @param {HTMLFormElement} form */
async function explain(form) {
  if (question.busy) return;
  const fields = new FormData(form);
  const text = fields.get("text");
  Object.assign(question, { uid: chosen(), busy: true, answer: null, problem: null });
  show();
  if (text === "") {
    question.problem = { text: "noPrompt", reason: "" };
    form.querySelector("textarea")?.focus();
  } else {
    const messages = [{ role: "user", content: text }];
    await askFor(fields.has("chat") ? { messages } : { prompt: text });
  }
  question.busy = false;
  say(question.answer === null ? problemText() : foundIn(question.answer));
  show();
}

/** @param {unknown} body */
async function askFor(body) {
  try {
    const path = pathOf(question.uid, "/explain");
    question.answer = await askJson(path, { method: "POST", body });
  } catch (error) {
    const { kind, message } = troubleOf(error);
    question.problem = { text: PROBLEMS[kind] ?? "failed", reason: message };
  }
}

function problemText() {
  const { text, reason } = question.problem ?? { text: "failed", reason: "" };
  return fill(language.words[text], { reason });
}

/** @param {Explanation} answer */
function foundIn({ prompt_tokens: tokens, chunk_tokens: size, chunks }) {
  const text = language.words;
  const all = count(chunks.length);
  if (chunks.length === 0) return fill(text.tooShort, { tokens: count(tokens), size: count(size) });
  const held = chunks.filter(({ replicas }) =>
    Object.values(replicas).some((where) => where !== "none"),
  ).length;
  return held === 0
    ? fill(text.heldNowhere, { all })
    : fill(text.held, { some: count(held), all, size: count(size) });
}

/** @param {Report} report */
export function explainView(report) {
  const text = language.words;
  const { uid, busy, problem, answer } = question;
  const mine = uid === uidOf(report);
  return h(
    "section",
    { class: "card", id: "explain" },
    h("h2", null, text.explain),
    h(
      "form",
      {
        class: "form",
        onsubmit: (/** @type {SubmitEvent & { target: HTMLFormElement }} */ event) => {
          event.preventDefault();
          explain(event.target);
        },
      },
      h("label", { for: "explain-text" }, text.explainHelp),
      h("textarea", { id: "explain-text", name: "text", rows: 3, spellcheck: "false" }),
      h(
        "div",
        { class: "row" },
        h(
          "label",
          null,
          h("input", { type: "checkbox", id: "explain-chat", name: "chat", checked: true }),
          ` ${text.asChat}`,
        ),
        h(
          "button",
          { id: "explain-ask", "aria-disabled": busy ? "true" : null },
          busy ? text.asking : text.ask,
        ),
      ),
    ),
    h(
      "div",
      { id: "explained" },
      mine && problem !== null && h("p", { class: "notice" }, problemText()),
      mine && answer !== null && answerView(report, answer),
    ),
  );
}

/**
 * @param {Report} report
 * @param {Explanation} answer
 */
function answerView(report, answer) {
  const text = language.words;
  const rows = Object.entries(answer.reuse).map(([incarnation, reuse]) =>
    row(
      nameOf(report, incarnation),
      cell(chunksView(answer, incarnation), false),
      cell(count(reuse.local_pool)),
      cell(count(reuse.disk)),
      cell(count(reuse.remote)),
      cell(count(reuse.computed)),
    ),
  );
  return [
    h("p", null, foundIn(answer)),
    table(
      "reuse",
      [
        [text.replica],
        [text.chunksHeld],
        [text.local_pool, true],
        [text.disk, true],
        [text.remote, true],
        [text.computed, true],
      ],
      rows,
    ),
    h("p", { class: "muted small" }, text.reuseHelp),
    ...forecastsView(report, answer.routing ?? {}),
  ];
}

/** The colours of where a replica has a chunk. */
const SOURCES = new Map([
  ["pool", "local_pool"],
  ["disk", "disk"],
]);

/**
 * The prompt from left to right, with the parts that the replica holds.
 * @param {Explanation} answer
 * @param {string} incarnation
 */
function chunksView({ prompt_tokens: tokens, chunks }, incarnation) {
  /** @type {{ where: string, size: number }[]} */
  const runs = [];
  let held = 0;
  for (const { from, to, replicas } of chunks) {
    const where = SOURCES.get(replicas[incarnation] ?? "none") ?? "";
    held += where ? 1 : 0;
    const last = runs.at(-1);
    if (last?.where === where) last.size += to - from;
    else runs.push({ where, size: to - from });
  }
  const said = fill(language.words.poolOf, { used: count(held), all: count(chunks.length) });
  const parts = runs.map(({ where, size }) =>
    h("span", { class: where, style: widthOf(size, tokens) }),
  );
  return [said, h("div", { class: "split thin", role: "img", "aria-label": said }, parts)];
}
