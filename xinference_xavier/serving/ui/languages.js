// Texts in English and Chinese.

/**
 * Chinese where xinference's own pages are in Chinese: by its setting and, without one, by the
 * browser's language.
 * @param {string | null} setting
 * @param {string} browser
 * @returns {Language}
 */
export function languageOf(setting, browser) {
  return /^zh/i.test(setting ?? browser) ? "zh" : "en";
}

/**
 * The text with the value of each name in braces, or a dash.
 * @param {string} text
 * @param {Record<string, string | number>} values
 */
export function fill(text, values) {
  return text.replaceAll(/\{(\w+)\}/g, (_, name) => String(values[name] ?? "–"));
}
