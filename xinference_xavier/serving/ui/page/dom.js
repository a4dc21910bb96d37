// Draws a tree of plain nodes into the document and changes only what differs, so that focus,
// scrolling and selections survive updates every second.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "rect", "text"]);
/**
 * What each element was drawn from.
 * @type {WeakMap<Element, Properties>}
 */
const drawn = new WeakMap();

/**
 * `properties` are attributes; those that begin with "on" are listeners, `style` has styles by name,
 * null and false mean none.
 * @param {string} tag
 * @param {Properties | null} properties
 * @param {Child[]} children
 * @returns {Tree}
 */
export function h(tag, properties, ...children) {
  return { tag, properties: properties ?? {}, children: flat(children) };
}

/**
 * @param {Child[]} children
 * @returns {(Tree | string)[]}
 */
function flat(children) {
  return children.flatMap((child) => {
    if (child === null || child === undefined || child === false) return [];
    if (Array.isArray(child)) return flat(child);
    return [typeof child === "object" ? child : String(child)];
  });
}

/**
 * Keeps optional parts in one node: otherwise everything below would move in the tree, be recreated
 * and lose typed text.
 * @param {Child[]} children
 */
export function group(...children) {
  return h("div", { class: "group" }, children);
}

/**
 * @param {Element} parent
 * @param {Child[]} wanted
 */
export function draw(parent, ...wanted) {
  const children = flat(wanted);
  for (const [index, child] of children.entries()) {
    const old = parent.childNodes[index] ?? null;
    const node = typeof child === "string" ? drawText(old, child) : drawElement(old, child);
    if (old === null) parent.append(node);
    else if (node !== old) old.replaceWith(node);
  }
  while (parent.childNodes.length > children.length) parent.lastChild?.remove();
}

/**
 * @param {ChildNode | null} old
 * @param {string} text
 */
function drawText(old, text) {
  if (!(old instanceof Text)) return document.createTextNode(text);
  if (old.data !== text) old.data = text;
  return old;
}

/**
 * @param {ChildNode | null} old
 * @param {Tree} wanted
 */
function drawElement(old, { tag, properties, children }) {
  let node = old instanceof Element ? old : null;
  if (node?.localName !== tag || drawn.get(node)?.key !== properties.key) node = create(tag);
  const before = drawn.get(node) ?? {};
  for (const name of new Set([...Object.keys(before), ...Object.keys(properties)])) {
    const value = properties[name] ?? null;
    if (value !== (before[name] ?? null) && name !== "key") set(node, name, value);
  }
  drawn.set(node, properties);
  draw(node, children);
  return node;
}

/** @param {string} tag */
function create(tag) {
  return SVG_TAGS.has(tag) ? document.createElementNS(SVG_SPACE, tag) : document.createElement(tag);
}

/**
 * @param {Element} node
 * @param {string} name
 * @param {Properties[string]} value
 */
function set(node, name, value) {
  if (name.startsWith("on")) Object.assign(node, { [name]: value });
  else if (typeof value === "object" && value !== null) Object.assign(styleOf(node), value);
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : String(value));
}

/**
 * Styles are set here, because the page's policy forbids style attributes.
 * @param {Element} node
 */
function styleOf(node) {
  return /** @type {HTMLElement | SVGElement} */ (node).style;
}

/**
 * The element with this id; the document has it.
 * @param {string} id
 */
export function at(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/**
 * Makes screen readers say the sentence.
 * @param {string} sentence
 */
export function say(sentence) {
  at("said").textContent = sentence;
}
