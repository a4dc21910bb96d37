// The named prefixes that belong to no tenant: whether they are there, and until when.

function prefixesView(report) {
  const text = language.words;
  const prefixes = report.prefixes ?? [];
  if (prefixes.length === 0) return null;
  return h("section", { class: "card", id: "prefixes", key: "prefixes" },
    h("h2", null, text.prefixes),
    h("p", { class: "muted small" }, text.prefixesHelp),
    table("prefix-list", [[text.name], [text.state], [text.tokens, true], [text.chunksHeld, true],
      [text.keptAt], [text.expires, true], [""]],
    prefixes.map((prefix) => prefixRow(prefix, text))));
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
  const path = `/v1/xavier/${encodeURIComponent(state.recent.report.model_uid)}`
    + `/prefixes/${encodeURIComponent(name)}`;
  try {
    await askJson(path, { method: "DELETE" });
  } catch (trouble) {
    state.notice = trouble.message || language.words.notRemoved;
    show();
  }
}
