// Replicas as boxes, links as arrows that move during transfers.

import { fill } from "../languages.js";
import { h } from "./dom.js";
import { bytes, bytesPerSecond, count, nameOf } from "./numbers.js";
import { language } from "./settings.js";

const MAX_DRAWN = 12;
const NODE = { width: 156, height: 74 };
const NARROW = 560; // pixels; below, two replicas are stacked

/**
 * @param {Report} report
 * @param {Link[]} links
 * @param {number} width
 */
export function graphView(report, links, width) {
  const text = language.words;
  const { replicas } = report;
  const number = replicas.length;
  if (number === 0) return h("p", { class: "muted" }, text.none);
  if (number > MAX_DRAWN) return h("p", { class: "muted" }, fill(text.tooMany, { count: number }));
  const { places, size } = placesFor(number, width);
  const placeOf = new Map(replicas.map(({ incarnation }, index) => [incarnation, places[index]]));
  const arrows = links.flatMap((link) => {
    const [from, to] = [placeOf.get(link.from), placeOf.get(link.to)];
    return from === undefined || to === undefined ? [] : [linkView(link, from, to)];
  });
  return h(
    "svg",
    {
      viewBox: `0 0 ${size.width} ${size.height}`,
      role: "img",
      id: "graph",
      "aria-label": fill(text.graphOf, { nodes: number, links: arrows.length }),
      style: { maxWidth: `${size.width}px` },
    },
    arrows,
    replicas.map((replica, index) => nodeView(report, replica, places[index])),
  );
}

/**
 * Two side by side, or stacked where space is narrow; more on an ellipse.
 * @param {number} number
 * @param {number} width
 * @returns {{ places: Place[], size: { width: number, height: number } }}
 */
function placesFor(number, width) {
  const across = Math.max(300, Math.min(width, 760));
  const middle = across / 2;
  const side = NODE.width / 2 + 10;
  if (number === 1) {
    return { places: [{ x: middle, y: 55 }], size: { width: across, height: 110 } };
  }
  if (number === 2 && width >= NARROW) {
    const places = [side, across - side].map((x) => ({ x, y: 90 }));
    return { places, size: { width: across, height: 180 } };
  }
  if (number === 2) {
    const places = [50, 260].map((y) => ({ x: middle, y }));
    return { places, size: { width: across, height: 310 } };
  }
  const radiusX = middle - side;
  const radiusY = Math.max(120, number * 38);
  const places = Array.from({ length: number }, (_, index) => {
    const angle = (2 * Math.PI * index) / number - Math.PI / 2;
    return { x: middle + radiusX * Math.cos(angle), y: radiusY + 50 + radiusY * Math.sin(angle) };
  });
  return { places, size: { width: across, height: 2 * radiusY + 100 } };
}

/**
 * @param {Report} report
 * @param {Replica} replica
 * @param {Place} place
 */
function nodeView(report, replica, { x, y }) {
  const text = language.words;
  const { pool } = replica;
  const left = x - NODE.width / 2;
  const top = y - NODE.height / 2;
  const full = NODE.width - 20;
  const used = pool.ready + pool.filling;
  const fullness = fill(text.poolOf, { used: count(used), all: count(pool.rows) });
  /** @param {number} rows */
  const part = (rows) => (pool.rows > 0 ? full * Math.min(1, rows / pool.rows) : 0);
  /**
   * @param {string} kind
   * @param {number} width
   */
  const gauge = (kind, width) =>
    h("rect", { class: `gauge ${kind}`, x: left + 10, y: top + 47, width, height: 6, rx: 3 });
  return h(
    "g",
    { class: `node${replica.stale ? " stale" : ""}` },
    h("rect", { x: left, y: top, width: NODE.width, height: NODE.height, rx: 8 }),
    h("text", { x: left + 10, y: top + 20 }, short(nameOf(report, replica.incarnation), 18)),
    h(
      "text",
      { class: "faint", x: left + 10, y: top + 37 },
      `${text.pool}: ${pool.rows > 0 ? fullness : "–"}`,
    ),
    gauge("", full),
    gauge("full", part(used)),
    gauge("pinned", part(pool.pinned)),
    h(
      "text",
      { class: "faint", x: left + 10, y: top + 67 },
      fill(text.pinned, { count: count(pool.pinned) }),
    ),
  );
}

/**
 * A curve that leaves room for the opposite direction.
 * @param {Link} link
 * @param {Place} from
 * @param {Place} to
 */
function linkView(link, from, to) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(46, length / 4);
  const middle = {
    x: (from.x + to.x) / 2 - (dy / length) * bend,
    y: (from.y + to.y) / 2 + (dx / length) * bend,
  };
  const start = edgeOf(from, middle);
  const end = edgeOf(to, middle);
  const live = link.rate > 0 || link.rows > 0;
  const thick = 1.5 + Math.min(4, Math.log10(1 + link.rate / 1e5));
  const angle = (Math.atan2(end.y - middle.y, end.x - middle.x) * 180) / Math.PI;
  // Beside the curve, outwards.
  const label = {
    x: (start.x + 2 * middle.x + end.x) / 4 - (dy / length) * 12,
    y: (start.y + 2 * middle.y + end.y) / 4 + (dx / length) * 12,
  };
  const beside = dy > 0 ? "end" : "start";
  return h(
    "g",
    { class: `link${live ? " live" : ""}` },
    h("path", {
      d: `M${point(start)} Q${point(middle)} ${point(end)}`,
      "stroke-width": thick.toFixed(1),
    }),
    h("path", {
      class: "arrow",
      d: "M0 0 L-11 -5 L-11 5 Z",
      transform: `translate(${point(end)}) rotate(${angle.toFixed(1)})`,
    }),
    h(
      "text",
      {
        x: label.x.toFixed(1),
        y: (label.y + 4).toFixed(1),
        "text-anchor": Math.abs(dx) > Math.abs(dy) ? "middle" : beside,
      },
      live && link.rate > 0 ? bytesPerSecond(link.rate) : bytes(link.bytes),
    ),
  );
}

/**
 * Just outside the box, on the line from its middle to a point.
 * @param {Place} box
 * @param {Place} towards
 */
function edgeOf(box, towards) {
  const [dx, dy] = [towards.x - box.x, towards.y - box.y];
  const scale = Math.min(
    (NODE.width / 2 + 4) / Math.abs(dx || 1e-9),
    (NODE.height / 2 + 4) / Math.abs(dy || 1e-9),
  );
  return { x: box.x + dx * scale, y: box.y + dy * scale };
}

/** @param {Place} place */
function point({ x, y }) {
  return `${x.toFixed(1)},${y.toFixed(1)}`;
}

/**
 * @param {string} name
 * @param {number} most
 */
function short(name, most) {
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}
