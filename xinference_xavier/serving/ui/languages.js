// Texts in the languages of xinference's own pages.

import { LANGUAGES } from "./constants.js";

/**
 * The language in which xinference's own pages are, by its setting and, without one, by the
 * browser's language.
 * @param {string | null} setting
 * @param {string} browser
 * @returns {Language}
 */
export function languageOf(setting, browser) {
  if (setting !== null) return isLanguage(setting) ? setting : "en";
  if (/^zh-(hant|tw|hk|mo)/i.test(browser)) return "zh-TW";
  return /^zh/i.test(browser) ? "zh" : "en";
}

/**
 * @param {string} code
 * @returns {code is Language}
 */
export function isLanguage(code) {
  return Object.hasOwn(LANGUAGES, code);
}

/**
 * The text with the value of each name in braces.
 * @param {string} text
 * @param {Record<string, string | number>} values
 */
export function fill(text, values) {
  return text.replaceAll(/\{(\w+)\}/g, (braced, name) => String(values[name] ?? braced));
}
