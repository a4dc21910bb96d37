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
 * The text of a name that the server gives, such as an event's.
 * @param {string} name
 * @param {string} otherwise
 */
export function named(name, otherwise) {
  return known(language.words, name) ?? otherwise;
}

/**
 * Why a fetch failed, in words.
 * @param {string} reason
 */
export function reasonOf(reason) {
  return known(LANGUAGES[language.code].reasons, reason) ?? reason;
}

/**
 * @param {Record<string, string>} words
 * @param {string} name
 */
function known(words, name) {
  return Object.hasOwn(words, name) ? words[name] : undefined;
}
