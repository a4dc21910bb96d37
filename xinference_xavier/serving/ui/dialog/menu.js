// The entry in xinference's menu, made like its neighbour; then the watch over the page.

const NEIGHBOUR = 'nav a[href="/running-model"]';
const ICON = '<path d="M4 6h6v12H4z"/><path d="M14 6h6v12h-6z"/><path d="M10 9h4"/>'
  + '<path d="M10 15h4"/>';
const CALM = 50; // milliseconds from a change until we look

function keepMenuEntry() {
  const neighbour = document.querySelector(NEIGHBOUR);
  if (neighbour === null || !isAlive(neighbour)) return;
  const old = document.querySelector(`nav a[href="${PAGE_PATH}"]`);
  // Any entry of the same section that is not the current page has the plain look.
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

// What the server sent must stay as it is until React has taken it over, or React draws it anew.
function isAlive(element) {
  return document.readyState === "complete"
    && Object.keys(element).some((key) => key.startsWith("__reactProps$"));
}

function look() {
  for (const part of [keepMenuEntry, keepSwitches]) {
    try {
      part();
    } catch (error) {
      // The page belongs to xinference and goes on without us.
      localStorage.setItem(SEEN, "failed");
      console.warn("xinference-xavier:", error);
    }
  }
  noteMissing();
}

// A launch dialog whose form we do not know is noted, for our page to say so.
function noteMissing() {
  const dialog = document.querySelector("[role=dialog] form");
  const known = dialog === null || switches.size > 0 || localStorage.getItem(SEEN) === "failed";
  if (!known && location.pathname.startsWith("/launch-model")
      && dialog.querySelector("[name=replica], #replica, input[type=number]") !== null) {
    localStorage.setItem(SEEN, "missing");
  }
}

let waiting = null;
new MutationObserver(() => {
  waiting ??= setTimeout(() => {
    waiting = null;
    look();
  }, CALM);
}).observe(document.documentElement, {
  childList: true, subtree: true, attributes: true, attributeFilter: ["lang", "class"],
});
look();
