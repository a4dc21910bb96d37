// Draws a tree of plain nodes into the document and changes only what differs, so that focus,
// scrolling and selections survive updates every second.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "rect", "text"]);
const drawn = Symbol("drawn");

// `properties` are attributes; those that begin with "on" are listeners, null and false mean none.
function h(tag, properties, ...children) {
  const flat = children.flat(Infinity).filter((child) => child !== null && child !== undefined
    && child !== false);
  return { tag, properties: properties ?? {}, children: flat.map((child) =>
    (typeof child === "object" ? child : String(child))) };
}

function draw(parent, ...wanted) {
  const { children } = h("", null, wanted);
  children.forEach((child, index) => {
    const old = parent.childNodes[index] ?? null;
    const node = typeof child === "string" ? drawText(old, child) : drawElement(old, child);
    if (node !== old) {
      if (old === null) parent.append(node);
      else old.replaceWith(node);
    }
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

function drawText(old, text) {
  if (old === null || old.nodeType !== Node.TEXT_NODE) return document.createTextNode(text);
  if (old.data !== text) old.data = text;
  return old;
}

function drawElement(old, { tag, properties, children }) {
  let node = old;
  if (node === null || node.localName !== tag || node[drawn]?.key !== properties.key) {
    node = SVG_TAGS.has(tag) ? document.createElementNS(SVG_SPACE, tag) : document.createElement(tag);
    node[drawn] = {};
  }
  const before = node[drawn];
  for (const name of new Set([...Object.keys(before), ...Object.keys(properties)])) {
    const value = properties[name] ?? null;
    if (value === (before[name] ?? null)) continue;
    if (name.startsWith("on")) node[name] = value;
    else if (name === "key") continue;
    else if (value === null || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node[drawn] = properties;
  draw(node, children);
  return node;
}
