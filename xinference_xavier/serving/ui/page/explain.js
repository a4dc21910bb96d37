// A prompt's chunks: which replicas hold them, what a request would reuse, and which replica would
// answer it first.

const EXPLAIN_TIMEOUT = 90_000; // milliseconds; the first request loads a tokenizer
// `answer` and `problem` belong to model `uid`; `problem` is a key of the words and a reason.
const question = { uid: null, busy: false, answer: null, problem: null };

async function explain(form) {
  const { text, chat } = form.elements;
  if (question.busy) return;
  Object.assign(question, { uid: chosen(), busy: text.value !== "", answer: null, problem: null });
  if (question.busy) {
    const body = chat.checked ? { messages: [{ role: "user", content: text.value }] }
      : { prompt: text.value };
    show();
    try {
      question.answer = await askJson(pathOf(question.uid, "/explain"),
        { method: "POST", body, signal: AbortSignal.timeout(EXPLAIN_TIMEOUT) });
    } catch (error) {
      const message = { forbidden: "mayNotAsk", signIn: "signIn" }[error.kind];
      question.problem = [message ?? "failed", error.message];
    }
    question.busy = false;
  } else {
    question.problem = ["noPrompt", ""];
    text.focus();
  }
  say(question.problem === null ? foundIn(question.answer) : problemText());
  show();
}

function problemText() {
  const [name, reason] = question.problem;
  const word = language.words[name];
  return typeof word === "function" ? word(reason) : word;
}

function foundIn({ prompt_tokens: tokens, chunk_tokens: size, chunks }) {
  const text = language.words;
  if (chunks.length === 0) return text.tooShort(count(tokens), count(size));
  const held = chunks.filter(({ replicas }) => Object.values(replicas).includes("pool")).length;
  return held === 0 ? text.heldNowhere(count(chunks.length))
    : text.held(count(held), count(chunks.length), count(size));
}

function explainView(report) {
  const text = language.words;
  const mine = question.uid === uidOf(report);
  return h("section", { class: "card", id: "explain" }, h("h2", null, text.explain),
    h("form", { class: "form", onsubmit: (event) => {
      event.preventDefault();
      explain(event.target);
    } },
    h("label", { for: "explain-text" }, text.explainHelp),
    h("textarea", { id: "explain-text", name: "text", rows: 3, spellcheck: "false" }),
    h("div", { class: "row" },
      h("label", null, h("input", { type: "checkbox", id: "explain-chat", name: "chat",
        checked: true }), ` ${text.asChat}`),
      h("button", { id: "explain-ask", "aria-disabled": question.busy ? "true" : null },
        question.busy ? text.asking : text.ask))),
    h("div", { id: "explained" },
      mine && question.problem !== null && h("p", { class: "notice" }, problemText()),
      mine && question.answer !== null && answerView(report, question.answer)));
}

function answerView(report, answer) {
  const text = language.words;
  return [h("p", null, foundIn(answer)),
    table("reuse", [[text.replica], [text.chunksHeld], [text.local_pool, true], [text.remote, true],
      [text.computed, true]],
    Object.entries(answer.reuse).map(([incarnation, reuse]) => h("tr", null,
      h("th", { scope: "row" }, nameOf(report, incarnation)),
      cell(chunksView(answer, incarnation), false),
      cell(count(reuse.local_pool)), cell(count(reuse.remote)), cell(count(reuse.computed))))),
    h("p", { class: "muted small" }, text.reuseHelp),
    ...forecastsView(report, answer.routing ?? {})];
}

// The prompt from left to right, with the parts that the replica holds.
function chunksView({ prompt_tokens: tokens, chunks }, incarnation) {
  const runs = [];
  let held = 0;
  for (const { from, to, replicas } of chunks) {
    const here = replicas[incarnation] === "pool";
    held += here ? 1 : 0;
    if (runs.at(-1)?.here === here) runs.at(-1).size += to - from;
    else runs.push({ here, size: to - from });
  }
  const said = language.words.poolOf(count(held), count(chunks.length));
  return [said, h("div", { class: "split thin", role: "img", "aria-label": said },
    runs.map(({ here, size }) => h("span", { class: here ? "local_pool" : "",
      style: `width: ${(100 * size / tokens).toFixed(2)}%` })))];
}
