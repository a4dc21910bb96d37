// The language and the theme of xinference's own pages, which this page shares with them.

import { LANGUAGES } from "../constants.js";
import { languageOf } from "../languages.js";

// Under xinference's own keys. The language is chosen there.
const LANGUAGE_KEY = "app_locale";
const THEME_KEY = "theme";

export const language = {
  get code() {
    return languageOf(localStorage.getItem(LANGUAGE_KEY), navigator.language);
  },
  get words() {
    return LANGUAGES[language.code].page;
  },
};

export const theme = {
  get dark() {
    return localStorage.getItem(THEME_KEY) === "dark";
  },
  turn() {
    localStorage.setItem(THEME_KEY, theme.dark ? "light" : "dark");
  },
};

/**
 * The text of a name that the server gives, such as an event's; undefined for one that is unknown.
 * @param {string} name
 * @returns {string | undefined}
 */
export function named(name) {
  return Object.hasOwn(language.words, name)
    ? language.words[/** @type {keyof Words["page"]} */ (name)]
    : undefined;
}

/**
 * Why a fetch failed, in words.
 * @param {string} reason
 */
export function reasonOf(reason) {
  /** @type {Record<string, string>} */
  const known = LANGUAGES[language.code].reasons;
  return Object.hasOwn(known, reason) ? known[reason] : reason;
}
