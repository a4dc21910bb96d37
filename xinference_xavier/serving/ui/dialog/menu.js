// The entry in xinference's menu, a copy of its neighbour, and the observer of the page.

const NEIGHBOUR = 'nav a[href="/running-model"]';
const ICON = '<path d="M4 6h6v12H4z"/><path d="M14 6h6v12h-6z"/><path d="M10 9h4"/>'
  + '<path d="M10 15h4"/>';
const DELAY = 50; // milliseconds from a change of the page to our look at it

function keepMenuEntry() {
  const neighbour = document.querySelector(NEIGHBOUR);
  if (neighbour === null || !isAlive(neighbour)) return;
  const old = document.querySelector(`nav a[href="${PAGE_PATH}"]`);
  // Entries of the same section other than the current page are plain.
  const plain = [...neighbour.parentNode.querySelectorAll("a")]
    .find((entry) => entry !== old && !entry.className.includes("text-primary")) ?? neighbour;
  const text = words().menu;
  const narrow = plain.querySelector("span") === null;
  if (old !== null && old.dataset.look === `${plain.className} ${narrow} ${text}`) return;

  const entry = plain.cloneNode(true);
  entry.href = PAGE_PATH;
  entry.dataset.look = `${plain.className} ${narrow} ${text}`;
  entry.removeAttribute("id");
  entry.setAttribute("aria-label", text);
  if (narrow) entry.title = text;
  else set(entry.querySelector("span"), text);
  const icon = entry.querySelector("svg");
  if (icon !== null) icon.innerHTML = ICON;
  old?.remove();
  neighbour.after(entry);
}

// If the server's HTML changes before React takes it over, React draws all of it again.
function isAlive(element) {
  return document.readyState === "complete"
    && Object.keys(element).some((key) => key.startsWith("__reactProps$"));
}

function look() {
  for (const part of [keepMenuEntry, keepSwitches]) {
    try {
      part();
    } catch (error) {
      // xinference's page must work without us.
      localStorage.setItem(SEEN, "failed");
      console.warn("xinference-xavier:", error);
    }
  }
  noteMissing();
}

// Records that a launch dialog has a form we do not know; our page mentions it.
function noteMissing() {
  const dialog = document.querySelector("[role=dialog] form");
  const isHandled = dialog === null || switches.size > 0 || localStorage.getItem(SEEN) === "failed";
  if (!isHandled && location.pathname.startsWith("/launch-model")
      && dialog.querySelector("[name=replica], #replica, input[type=number]") !== null) {
    localStorage.setItem(SEEN, "missing");
  }
}

let waiting = null;
new MutationObserver(() => {
  waiting ??= setTimeout(() => {
    waiting = null;
    look();
  }, DELAY);
}).observe(document.documentElement, {
  childList: true, subtree: true, attributes: true, attributeFilter: ["lang", "class"],
});
look();
