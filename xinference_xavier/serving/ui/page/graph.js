// Replicas as boxes, links as arrows that move during transfers.

import { html } from "../html.js";
import { fill } from "../languages.js";
import { bytes, bytesPerSecond, count, nameOf } from "./numbers.js";
import { language } from "./settings.js";

export const MAX_DRAWN = 12;
const WIDTH = 560;
const BOX = { width: 150, height: 58 };

/** @param {{ report: Report, links: Link[] }} props */
export function Graph({ report, links }) {
  const { replicas } = report;
  const height = replicas.length > 2 ? 240 + 40 * replicas.length : 200;
  /** @type {Map<string, Place>} */
  const places = new Map(
    replicas.map(({ incarnation }, index) => {
      const angle = (2 * Math.PI * index) / replicas.length + Math.PI;
      const [across, down] = [(WIDTH - BOX.width) / 2 - 6, (height - BOX.height) / 2 - 20];
      return [
        incarnation,
        { x: WIDTH / 2 + across * Math.cos(angle), y: height / 2 + down * Math.sin(angle) },
      ];
    }),
  );
  const drawn = links.filter(({ from, to }) => places.has(from) && places.has(to));
  const said = fill(language.words.graphOf, { nodes: replicas.length, links: drawn.length });
  return html`<svg id="graph" viewBox=${`0 0 ${WIDTH} ${height}`} role="img" aria-label=${said}>
    ${drawn.map((link) => arrow(link, at(places, link.from), at(places, link.to)))}
    ${replicas.map((replica) => box(report, replica, at(places, replica.incarnation)))}
  </svg>`;
}

/**
 * @param {Map<string, Place>} places
 * @param {string} incarnation
 */
function at(places, incarnation) {
  return /** @type {Place} */ (places.get(incarnation));
}

/**
 * @param {Report} report
 * @param {Replica} replica
 * @param {Place} place
 */
function box(report, replica, { x, y }) {
  const { pool, stale } = replica;
  const name = nameOf(report, replica.incarnation);
  const used = fill(language.words.poolOf, {
    used: count(pool.ready + pool.filling),
    all: count(pool.rows),
  });
  const full = BOX.width - 20;
  const share = pool.rows > 0 ? (pool.ready + pool.filling) / pool.rows : 0;
  return html`<g class=${stale ? "node stale" : "node"}
    transform=${`translate(${x - BOX.width / 2} ${y - BOX.height / 2})`}>
    <rect width=${BOX.width} height=${BOX.height} rx="8" />
    <text x="10" y="19">${name.length > 18 ? `${name.slice(0, 17)}…` : name}</text>
    <text x="10" y="36" class="faint">${pool.rows > 0 ? used : "–"}</text>
    <rect class="gauge" x="10" y="44" width=${full} height="6" rx="3" />
    <rect class="gauge full" x="10" y="44" width=${full * Math.min(1, share)} height="6" rx="3" />
  </g>`;
}

/**
 * A curve that leaves room for the opposite direction.
 * @param {Link} link
 * @param {Place} from
 * @param {Place} to
 */
function arrow({ rate, rows, bytes: all }, from, to) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy);
  const bend = Math.min(46, length / 4);
  /** @param {number} far */
  const beside = (far) => ({
    x: (from.x + to.x) / 2 - (dy / length) * far,
    y: (from.y + to.y) / 2 + (dx / length) * far,
  });
  const middle = beside(bend);
  const [start, end] = [edge(from, middle), edge(to, middle)];
  const angle = (Math.atan2(end.y - middle.y, end.x - middle.x) * 180) / Math.PI;
  const label = beside(bend / 2 + 14);
  return html`<g class=${rate > 0 || rows > 0 ? "link live" : "link"}>
    <path d=${`M${start.x} ${start.y}Q${middle.x} ${middle.y} ${end.x} ${end.y}`} />
    <path class="arrow" d="M0 0L-11-5L-11 5Z"
      transform=${`translate(${end.x} ${end.y}) rotate(${angle})`} />
    <text x=${label.x} y=${label.y + 4} text-anchor="middle">
      ${rate > 0 ? bytesPerSecond(rate) : bytes(all)}
    </text>
  </g>`;
}

/**
 * Just outside the box, on the line from its middle to a point.
 * @param {Place} middle
 * @param {Place} towards
 */
function edge(middle, towards) {
  const [dx, dy] = [towards.x - middle.x, towards.y - middle.y];
  const scale = Math.min(
    (BOX.width / 2 + 4) / Math.abs(dx || 1e-9),
    (BOX.height / 2 + 4) / Math.abs(dy || 1e-9),
  );
  return { x: middle.x + dx * scale, y: middle.y + dy * scale };
}
