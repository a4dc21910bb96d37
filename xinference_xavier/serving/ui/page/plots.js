// Figures over the last hour, with a cursor for mouse and arrow keys.

import uPlot from "../vendor/uPlot.esm.js";
import { Component, html } from "./html.js";
import { clock, sum } from "./numbers.js";
import { language } from "./settings.js";

const HOUR = 3600;
const HEIGHT = 180;
const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);
/** @type {Record<string, number>} */
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

/**
 * `stacked`: as areas one above the other; otherwise lines over a logarithmic axis.
 * @typedef {{ name: string, title: string, help?: string, stacked: boolean, series: Series[],
 *   format: (value: number | null) => string, binary?: boolean, rates: Rate[], until: number }}
 *   PlotProps
 */

/** @extends {Component<PlotProps, { index: number | null }>} */
export class Plot extends Component {
  /** @type {uPlot | null} */
  drawing = null;
  /** @type {HTMLElement | null} */
  room = null;
  drawn = "";
  observer = new ResizeObserver(([{ contentRect }]) => {
    this.drawing?.setSize({ width: contentRect.width, height: HEIGHT });
  });

  /** @param {PlotProps} props */
  constructor(props) {
    super(props);
    this.state = { index: null };
  }

  componentDidMount() {
    this.draw();
    if (this.room !== null) this.observer.observe(this.room);
  }

  /** @param {PlotProps} before */
  componentDidUpdate(before) {
    if (before.rates !== this.props.rates) this.draw();
  }

  componentWillUnmount() {
    this.observer.disconnect();
    this.drawing?.destroy();
  }

  draw() {
    const series = this.props.series.join();
    if (this.drawn !== series && this.room !== null) {
      this.drawing?.destroy();
      this.drawing = new uPlot(this.options(this.room.clientWidth), this.data(), this.room);
      this.drawn = series;
    } else {
      this.drawing?.setData(this.data());
    }
  }

  /** @returns {uPlot.AlignedData} */
  data() {
    const { rates, series, stacked } = this.props;
    const values = series.map((key, index) =>
      rates.map((rate) =>
        stacked ? sum(series.slice(index).map((below) => rate[below])) : (rate[key] ?? null),
      ),
    );
    return [rates.map(({ time }) => time), ...values];
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
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: {
        x: { range: () => [this.props.until - HOUR, this.props.until] },
        y: stacked
          ? { range: (_, __, most) => [0, most > 0 ? 1.05 * most : 1] }
          : { distr: 3, log: 10, range: (_, least, most) => decades(least, most) },
      },
      axes: [
        {
          ...common,
          space: 80,
          size: 30,
          grid: { show: false },
          values: (_, times) => times.map((time) => clock(time, false)),
        },
        {
          ...common,
          size: 66,
          ...(stacked ? {} : { splits: (_, __, least, most) => powers(least, most) }),
          ...(binary ? { incrs: BINARY } : {}),
          values: (_, values) => values.map((value) => (value === null ? "" : this.read(value))),
        },
      ],
      series: [
        {},
        ...series.map((key) => ({
          stroke: () => colour(key),
          width: stacked ? 1 : 2,
          points: { show: !stacked, size: 4 },
          ...(stacked ? { fill: () => colour(key) } : {}),
        })),
      ],
      hooks: { setCursor: [({ cursor }) => this.follow(cursor.idx ?? null)] },
    };
  }

  /** @param {number} value */
  read(value) {
    return this.props.format(value);
  }

  /** @param {number | null} index */
  follow(index) {
    if (index !== this.state.index) this.setState({ index });
  }

  /** @param {KeyboardEvent} event */
  step(event) {
    const { rates } = this.props;
    const steps = STEPS[event.key];
    if (event.key === "Escape") this.drawing?.setCursor({ left: -10, top: -10 });
    if (steps === undefined || this.drawing === null) return;
    event.preventDefault();
    const from = this.state.index ?? rates.length;
    const { time } = rates[Math.max(0, Math.min(rates.length - 1, from + steps))];
    this.drawing.setCursor({ left: this.drawing.valToPos(time, "x"), top: 0 });
  }

  render() {
    const text = language.words;
    const { name, title, help, series, format, rates } = this.props;
    const shown = rates[this.state.index ?? rates.length - 1] ?? rates.at(-1);
    const read = series.map((key) => `${text[key]} ${format(shown?.[key] ?? null)}`).join(", ");
    const said = shown === undefined ? text.noSamples : `${clock(shown.time)}, ${read}`;
    return html`<figure class="card plot">
      <h2>${title}</h2>
      ${help && html`<p class="muted small">${help}</p>`}
      <div id=${`plot-${name}`} class="drawing" role="img" tabindex="0"
        aria-label=${`${title}. ${said}. ${text.plotHelp}`}
        onKeyDown=${(/** @type {KeyboardEvent} */ event) => this.step(event)}
        ref=${(/** @type {HTMLElement | null} */ element) => {
          this.room = element;
        }}></div>
      <figcaption class="small">
        ${
          shown === undefined
            ? html`<span class="muted">${text.noSamples}</span>`
            : html`<ul class="legend">
                <li class="muted">${clock(shown.time)}</li>
                ${series.map(
                  (key) => html`<li>
                    <i class=${key}></i>
                    ${series.length > 1 && `${text[key]} `}${format(shown[key] ?? null)}
                  </li>`,
                )}
              </ul>`
        }
      </figcaption>
    </figure>`;
  }
}

/**
 * The powers of ten around the values; of hundredths to ones where there are none.
 * @param {number | null} least
 * @param {number | null} most
 * @returns {[number, number]}
 */
function decades(least, most) {
  return [
    10 ** Math.floor(Math.log10(least ?? 0.01)),
    10 ** Math.ceil(Math.log10(1.01 * (most ?? 1))),
  ];
}

/**
 * @param {number} least
 * @param {number} most
 */
function powers(least, most) {
  const [from, to] = [Math.round(Math.log10(least)), Math.round(Math.log10(most))];
  return Array.from({ length: to - from + 1 }, (_, index) => 10 ** (from + index));
}

/** @param {string} name */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
}
