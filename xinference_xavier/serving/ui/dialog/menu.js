// The entry in xinference's menu, a copy of its neighbour, and the observer of the page.

import { PAGE_PATH } from "../constants.js";
import { keepSwitches, words } from "./switch.js";

const NEIGHBOUR = 'nav a[href="/running-model"]';
const ICON =
  '<path d="M4 6h6v12H4z"/><path d="M14 6h6v12h-6z"/><path d="M10 9h4"/><path d="M10 15h4"/>';
const DELAY = 50; // milliseconds from a change of the page to our look at it

function keepMenuEntry() {
  const neighbour = /** @type {HTMLAnchorElement | null} */ (document.querySelector(NEIGHBOUR));
  if (neighbour === null || !isAlive(neighbour)) return;
  const old = entries(document).find((entry) => entry.getAttribute("href") === PAGE_PATH);
  // Entries of the same section other than the current page are plain.
  const plain =
    entries(neighbour.parentElement ?? neighbour).find(
      (entry) => entry !== old && !entry.className.includes("text-primary"),
    ) ?? neighbour;
  const text = words().menu;
  const narrow = plain.querySelector("span") === null;
  const look = `${plain.className} ${narrow} ${text}`;
  if (old?.dataset.look === look) return;

  const entry = /** @type {HTMLAnchorElement} */ (plain.cloneNode(true));
  entry.href = PAGE_PATH;
  entry.dataset.look = look;
  entry.removeAttribute("id");
  entry.setAttribute("aria-label", text);
  const title = entry.querySelector("span");
  if (title === null) entry.title = text;
  else title.textContent = text;
  const icon = entry.querySelector("svg");
  if (icon !== null) icon.innerHTML = ICON;
  old?.remove();
  neighbour.after(entry);
}

/** @param {ParentNode} parent */
function entries(parent) {
  return [...parent.querySelectorAll("a")].filter((entry) => entry.closest("nav") !== null);
}

/**
 * If the server's HTML changes before React takes it over, React draws all of it again.
 * @param {Element} element
 */
function isAlive(element) {
  return (
    document.readyState === "complete" &&
    Object.keys(element).some((key) => key.startsWith("__reactProps$"))
  );
}

function look() {
  for (const part of [keepMenuEntry, keepSwitches]) {
    try {
      part();
    } catch (error) {
      // xinference's page must work without us.
      console.warn("xinference-xavier:", error);
    }
  }
}

let waiting = false;
new MutationObserver(() => {
  if (waiting) return;
  waiting = true;
  setTimeout(() => {
    waiting = false;
    look();
  }, DELAY);
}).observe(document.documentElement, {
  childList: true,
  subtree: true,
  attributes: true,
  attributeFilter: ["lang", "class"],
});
look();
