// Figures over the last hour, with a cursor for mouse and arrow keys.

import { HIT_SOURCES } from "../constants.js";
import { Component, html } from "../html.js";
import uPlot from "../vendor/uPlot.esm.js";
import { clock, sum } from "./numbers.js";
import { note } from "./parts.js";
import { language, theme } from "./settings.js";

const HOUR = 3600;
const HEIGHT = 180;
const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);
const POWERS = Array.from({ length: 12 }, (_, power) => 10 ** (power - 5)); // of seconds
/** @type {Record<string, number>} */
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

/**
 * `rates` makes the figures; `stacked`: as areas one above the other; otherwise as lines over a
 * logarithmic axis.
 * @typedef {{ name: string, title: string, help?: string, stacked: boolean, series: Series[],
 *   format: (value: number) => string, binary?: boolean, samples: Sample[],
 *   rates: (samples: Sample[]) => Rate[] }} PlotProps
 */

/** @extends {Component<PlotProps, {}>} */
export class Plot extends Component {
  /** @type {uPlot | null} */
  drawing = null;
  /** @type {HTMLElement | null} */
  room = null;
  drawn = "";
  /** @type {Rate[]} */
  rates = [];
  observer = new ResizeObserver(([{ contentRect: room }]) => {
    this.drawing?.setSize({ width: room.width, height: HEIGHT });
  });

  componentDidMount() {
    this.draw();
    if (this.room !== null) this.observer.observe(this.room);
  }

  /** @param {PlotProps} before */
  componentDidUpdate(before) {
    if (before.samples !== this.props.samples || this.look !== this.drawn) this.draw();
  }

  componentWillUnmount() {
    this.observer.disconnect();
    this.drawing?.destroy();
  }

  get look() {
    return `${language.code} ${theme.dark} ${this.props.series}`;
  }

  draw() {
    this.rates = this.props.rates(this.props.samples);
    if (this.look === this.drawn) return this.drawing?.setData(this.data());
    this.drawn = this.look;
    this.drawing?.destroy();
    if (this.room !== null) {
      this.drawing = new uPlot(this.options(this.room.clientWidth), this.data(), this.room);
    }
  }

  /** @returns {uPlot.AlignedData} */
  data() {
    const { series, stacked } = this.props;
    const values = series.map((key, index) =>
      this.rates.map((rate) =>
        stacked ? sum(series.slice(index).map((below) => rate[below] ?? 0)) : (rate[key] ?? null),
      ),
    );
    return [this.rates.map(({ time }) => time), ...values];
  }

  /**
   * @param {number} width
   * @returns {uPlot.Options}
   */
  options(width) {
    const { series, stacked, binary } = this.props;
    const common = {
      stroke: () => colour("muted"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: () => colour("border"), width: 1 },
      ticks: { show: false },
    };
    const mark = (/** @type {uPlot} */ _, /** @type {number} */ index) =>
      `var(--${series[index - 1]})`;
    return {
      width,
      height: HEIGHT,
      legend: { markers: { stroke: mark, fill: mark } },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: {
        x: { range: () => [this.until - HOUR, this.until] },
        y: stacked
          ? { range: (_, __, most) => [0, 1.05 * most || 1] }
          : {
              distr: 3,
              range: (_, least, most) => uPlot.rangeLog(least ?? 0.01, most ?? 1, 10, true),
            },
      },
      axes: [
        {
          ...common,
          space: 80,
          size: 30,
          grid: { show: false },
          values: (_, times) => times.map((time) => clock(time, "short")),
        },
        {
          ...common,
          size: stacked ? 66 : 84,
          ...(stacked ? {} : { splits: POWERS }),
          ...(binary ? { incrs: BINARY } : {}),
          values: (_, values) => values.map((value) => (value === null ? "" : this.read(value))),
        },
      ],
      series: [
        { label: "", value: (_, __, ___, index) => clock(this.at(index)?.time ?? this.until) },
        ...series.map((key) => ({
          label: language.words[key],
          value: /** @type {uPlot.Series.Value} */ (
            (_, __, ___, index) => this.read(this.at(index)?.[key])
          ),
          stroke: () => colour(key),
          width: stacked ? 1 : 2,
          points: { show: !stacked, size: 4 },
          ...(stacked ? { fill: () => colour(key) } : {}),
        })),
      ],
    };
  }

  get until() {
    return this.rates.at(-1)?.time ?? Date.now() / 1000;
  }

  /**
   * Where the cursor is, or the latest.
   * @param {number | null} index
   */
  at(index) {
    return this.rates.at(index ?? -1);
  }

  /** @param {number | null | undefined} value */
  read(value) {
    return value == null ? "–" : this.props.format(value);
  }

  /** @param {KeyboardEvent} event */
  step(event) {
    const { drawing, rates } = this;
    if (drawing === null) return;
    if (event.key in STEPS) event.preventDefault();
    const to = (drawing.cursor.idx ?? rates.length) + STEPS[event.key];
    const found = rates[Math.max(0, Math.min(rates.length - 1, to))];
    // Without one, the cursor is put beside the drawing.
    drawing.setCursor({ left: found ? drawing.valToPos(found.time, "x") : -10, top: 0 });
  }

  render() {
    const text = language.words;
    const { name, title, help, samples } = this.props;
    return html`<figure class="card">
      <h2>${title}</h2>
      ${help && note(help)}
      <div id=${`plot-${name}`} class="plot" role="group" tabindex="0"
        aria-label=${`${title}. ${text.plotHelp}`}
        onKeyDown=${(/** @type {KeyboardEvent} */ event) => this.step(event)}
        ref=${(/** @type {HTMLElement | null} */ element) => {
          this.room = element;
        }}></div>
      ${samples.length < 2 && note(text.noSamples)}
    </figure>`;
  }
}

// So that their values are colours that a canvas understands.
for (const name of ["muted", "border", "committed", "rolled_back", "bytes", ...HIT_SOURCES]) {
  CSS.registerProperty({
    name: `--${name}`,
    syntax: "<color>",
    inherits: true,
    initialValue: "gray",
  });
}

/** @param {string} name */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
}
