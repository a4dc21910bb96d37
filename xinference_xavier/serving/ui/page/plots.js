// Figures over the last hour, with a cursor for mouse, touch and arrow keys.

import { h } from "./dom.js";
import { clock, sum } from "./numbers.js";
import { language } from "./settings.js";

const HOUR = 3600;
const TICK = 600; // seconds between labels of the time axis
const PLOT_HEIGHT = 170;
const MARGIN = { left: 64, right: 8, top: 8, bottom: 22 };
/** @type {Record<string, number>} */
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

/**
 * How series are drawn, and the height that the values of one time reach.
 * @typedef {(value: number) => number} Scale
 * @typedef {{ draw: (rates: Rate[], series: Series[], x: Scale, y: Scale) => Tree[],
 *   height: (values: number[]) => number }} Shape
 */
/** @type {Shape} */
const AREAS = { draw: areas, height: sum };
/** @type {Shape} */
export const LINES = { draw: lines, height: (values) => Math.max(...values) };

/**
 * `cursors` holds each plot's selected time by name; `changed()` requests a new drawing.
 * @typedef {{ name: string, title: string, help?: string, shape?: Shape, series: Series[],
 *   format: (value: number | null) => string, nice: (value: number) => number, rates: Rate[],
 *   until: number, width: number, cursors: Record<string, number | undefined>,
 *   changed: () => void }} Plot
 */

/** @param {Plot} plot */
export function plotView(plot) {
  const { name, title, help, series, format, until } = plot;
  const text = language.words;
  const inside = plot.rates.filter(({ time }) => time >= until - HOUR && time <= until);
  const chosen = nearest(inside, plot.cursors[name]);
  const shown = chosen ?? inside.at(-1);
  return h(
    "figure",
    { class: "card plot", key: name },
    h("h2", null, title),
    help && h("p", { class: "muted small" }, help),
    shown === undefined
      ? h("p", { class: "muted" }, text.noSamples)
      : [
          drawing(plot, inside, chosen, shown),
          h(
            "figcaption",
            { class: "small" },
            h(
              "ul",
              { class: "legend" },
              h("li", { class: "muted" }, clock(shown.time)),
              series.map((key) =>
                h(
                  "li",
                  null,
                  h("i", { class: key }),
                  series.length > 1 ? `${text[key]} ` : "",
                  format(valueAt(shown, key)),
                ),
              ),
            ),
          ),
        ],
  );
}

/**
 * `shown` is what is read out: the `chosen` time, or the latest.
 * @param {Plot} plot
 * @param {Rate[]} inside
 * @param {Rate | null} chosen
 * @param {Rate} shown
 */
function drawing(plot, inside, chosen, shown) {
  const { name, title, shape = AREAS, series, format, nice, until, cursors, changed } = plot;
  const from = until - HOUR;
  const heights = inside.map((rate) => shape.height(series.map((key) => valueAt(rate, key) ?? 0)));
  const most = nice(Math.max(0, ...heights));
  const across = Math.max(280, plot.width);
  const right = across - MARGIN.right;
  const bottom = PLOT_HEIGHT - MARGIN.bottom;
  /** @type {Scale} */
  const x = (time) => MARGIN.left + ((right - MARGIN.left) * (time - from)) / HOUR;
  /** @type {Scale} */
  const y = (value) => bottom - ((bottom - MARGIN.top) * value) / most;
  /** @param {number | undefined} time */
  const seek = (time) => {
    cursors[name] = time;
    changed();
  };
  /** @param {KeyboardEvent} event */
  const step = (event) => {
    const steps = STEPS[event.key];
    if (event.key === "Escape") seek(undefined);
    if (steps === undefined) return;
    event.preventDefault();
    const at = chosen === null ? inside.length : inside.indexOf(chosen);
    seek(inside[Math.max(0, Math.min(inside.length - 1, at + steps))].time);
  };
  /** @param {PointerEvent & { currentTarget: SVGElement }} event */
  const follow = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const place = ((event.clientX - box.left) * across) / box.width;
    seek(from + (HOUR * (place - MARGIN.left)) / (right - MARGIN.left));
  };
  return h(
    "svg",
    {
      viewBox: `0 0 ${across} ${PLOT_HEIGHT}`,
      role: "img",
      tabindex: 0,
      id: `plot-${name}`,
      "aria-label": `${title}. ${readOut(shown, series, format)}. ${language.words.plotHelp}`,
      onkeydown: step,
      onpointermove: follow,
      onpointerdown: follow,
      onpointerleave: () => seek(undefined),
    },
    shape.draw(inside, series, x, y),
    axes(from, until, most, format, x, y, across),
    chosen && h("path", { class: "cursor", d: `M${x(chosen.time)} ${MARGIN.top}V${bottom}` }),
  );
}

/**
 * @param {Rate | undefined} rate
 * @param {Series} key
 */
function valueAt(rate, key) {
  return rate?.[key] ?? null;
}

/**
 * @param {Rate} rate
 * @param {Series[]} series
 * @param {Plot["format"]} format
 */
function readOut(rate, series, format) {
  const text = language.words;
  return [
    clock(rate.time),
    ...series.map((key) => `${text[key]} ${format(valueAt(rate, key))}`),
  ].join(", ");
}

/**
 * Stacked from the bottom up.
 * @type {Shape["draw"]}
 */
function areas(rates, series, x, y) {
  let base = rates.map(() => 0);
  return series.toReversed().map((key) => {
    const top = rates.map((rate, index) => base[index] + (valueAt(rate, key) ?? 0));
    /** @param {number[]} heights */
    const edge = (heights) =>
      rates.map(({ time }, index) => `${x(time).toFixed(1)} ${y(heights[index]).toFixed(1)}`);
    const outline = `M${edge(top).join("L")}L${edge(base).toReversed().join("L")}Z`;
    base = top;
    // Without a stroke, a single sample would be invisible.
    return h("path", {
      d: outline,
      key,
      fill: `var(--${key})`,
      stroke: `var(--${key})`,
      "stroke-width": 1,
      "stroke-linejoin": "round",
    });
  });
}

/**
 * A line breaks where a value is missing; one value between two breaks is a dot.
 * @type {Shape["draw"]}
 */
function lines(rates, series, x, y) {
  return series.map((key) => {
    const pieces = rates.map((rate, index) => {
      const value = valueAt(rate, key);
      if (value === null) return "";
      const place = `${x(rate.time).toFixed(1)} ${y(value).toFixed(1)}`;
      return valueAt(rates[index - 1], key) === null ? `M${place}h0` : `L${place}`;
    });
    return h("path", { class: "line", d: pieces.join(""), key, stroke: `var(--${key})` });
  });
}

/**
 * @param {number} from
 * @param {number} until
 * @param {number} most
 * @param {Plot["format"]} format
 * @param {Scale} x
 * @param {Scale} y
 * @param {number} across
 */
function axes(from, until, most, format, x, y, across) {
  const apart = across < 420 ? 2 * TICK : TICK;
  const times = [];
  for (let time = Math.ceil(from / apart) * apart; time <= until; time += apart) times.push(time);
  return [
    [0, most / 2, most].map((value) => [
      h("path", { class: "axis", d: `M${MARGIN.left} ${y(value)}H${across - MARGIN.right}` }),
      h(
        "text",
        { class: "faint", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" },
        format(value),
      ),
    ]),
    times
      .filter((time) => x(time) > MARGIN.left + 12 && x(time) < across - 16)
      .map((time) =>
        h(
          "text",
          { class: "faint", x: x(time), y: PLOT_HEIGHT - 5, "text-anchor": "middle" },
          clock(time, false),
        ),
      ),
  ];
}

/**
 * @param {Rate[]} rates
 * @param {number | undefined} time
 * @returns {Rate | null}
 */
function nearest(rates, time) {
  if (time === undefined || rates.length === 0) return null;
  return rates.reduce((best, rate) =>
    Math.abs(rate.time - time) < Math.abs(best.time - time) ? rate : best,
  );
}

/**
 * The next 1, 2 or 5 times a power of ten.
 * @param {number} value
 */
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5].find((times) => times * power >= value) ?? 10);
}

/** @param {number} value */
export function niceBytes(value) {
  let unit = 1;
  while (value >= unit * 1024) unit *= 1024;
  return unit * niceCeiling(value / unit);
}
