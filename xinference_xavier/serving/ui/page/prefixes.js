// The named prefixes that belong to no tenant: whether they are there, and until when.

const naming = { busy: false, problem: null };

function prefixesView(report) {
  const text = language.words;
  const prefixes = report.prefixes ?? [];
  const all = Object.values(report.prefix_states ?? {}).reduce((sum, some) => sum + some, 0);
  return h("section", { class: "card", id: "prefixes" },
    h("h2", null, text.prefixes),
    h("p", { class: "muted small" }, text.prefixesHelp),
    group(prefixes.length > 0 && table("prefix-list", [[text.name], [text.state],
      [text.tokens, true], [text.chunksHeld, true], [text.keptAt], [text.expires, true], [""]],
    prefixes.map((prefix) => prefixRow(prefix, text)))),
    group(all > prefixes.length
      && h("p", { class: "muted small" }, text.morePrefixes(count(all - prefixes.length)))),
    h("details", { id: "name-text" }, h("summary", null, text.nameText), namingForm(text)));
}

function namingForm(text) {
  const option = (name, label) => h("label", null, h("input", { type: "checkbox", name }),
    ` ${label}`);
  return h("form", { class: "form", onsubmit: (event) => {
    event.preventDefault();
    nameText(event.target);
  } },
  h("label", null, `${text.name} `, h("input", { name: "named", required: true })),
  h("textarea", { name: "text", rows: 3, spellcheck: "false", required: true,
    "aria-label": text.prefixText }),
  h("div", { class: "row" },
    option("chat", text.asSystem), option("everywhere", text.everywhere),
    option("firm", text.neverEvict),
    h("label", null, `${text.lifetime} `, h("input", { name: "ttl", value: "1h", size: 4 })),
    h("button", { "aria-disabled": naming.busy ? "true" : null }, text.add)),
  group(naming.problem !== null && h("p", { class: "notice" }, naming.problem)));
}

async function nameText(form) {
  if (naming.busy) return;
  const { named, text, chat, everywhere, firm, ttl } = form.elements;
  const content = chat.checked ? { messages: [{ role: "system", content: text.value }] }
    : { prompt: text.value };
  const body = { name: named.value, ...content, ttl: ttl.value,
    copies: everywhere.checked ? "all" : 1, retention: firm.checked ? "hard" : "soft" };
  Object.assign(naming, { busy: true, problem: null });
  show();
  try {
    await askJson(pathOf(chosen(), "/prefixes"),
      { method: "POST", body, signal: AbortSignal.timeout(EXPLAIN_TIMEOUT) });
    form.reset();
  } catch (trouble) {
    naming.problem = trouble.message || language.words.notAdded;
  }
  naming.busy = false;
  show();
}

function prefixRow(prefix, text) {
  const copies = Object.values(prefix.replicas);
  const held = Math.max(0, ...copies.map((copy) => copy.held));
  const left = Math.max(0, prefix.expires - Date.now() / 1000);
  return h("tr", { "data-state": prefix.state }, h("th", { scope: "row" }, prefix.name),
    h("td", null, text[`prefix_${prefix.state}`],
      prefix.reason !== "" && h("div", { class: "muted small wrapped" }, prefix.reason)),
    cell(prefix.tokens > 0 ? count(prefix.tokens) : "–"),
    cell(`${count(held)} / ${count(prefix.chunks)}`),
    h("td", null, Object.keys(prefix.replicas).join(", ") || "–",
      prefix.retention === "hard" && h("div", { class: "muted small" }, text.neverEvicted)),
    cell(duration(left)),
    h("td", null, h("button", { type: "button", onclick: () => forget(prefix.name) }, text.remove)));
}

async function forget(name) {
  try {
    await askJson(pathOf(chosen(), `/prefixes/${encodeURIComponent(name)}`), { method: "DELETE" });
  } catch (trouble) {
    state.notice = trouble.message || language.words.notRemoved;
    show();
  }
}
