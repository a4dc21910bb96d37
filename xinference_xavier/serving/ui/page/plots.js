// Figures over the last hour, with a cursor for mouse, touch and arrow keys.

const HOUR = 3600;
const TICK = 600; // seconds between labels of the time axis
const PLOT_HEIGHT = 170;
const MARGIN = { left: 64, right: 8, top: 8, bottom: 22 };

// How series are drawn, and the height that the values of one time reach.
const AREAS = { draw: areas, height: sum };
const LINES = { draw: lines, height: (values) => Math.max(...values) };

// `cursors` holds each plot's selected time by name; `changed()` requests a new drawing.
function plotView({ name, title, help, shape = AREAS, series, format, nice, rates, until, width,
  cursors, changed }) {
  const text = language.words;
  const from = until - HOUR;
  const inside = rates.filter((rate) => rate.time >= from && rate.time <= until);
  const all = inside.map((rate) => shape.height(series.map((key) => rate[key])));
  const most = nice(Math.max(0, ...all));
  const across = Math.max(280, width);
  const right = across - MARGIN.right;
  const bottom = PLOT_HEIGHT - MARGIN.bottom;
  const x = (time) => MARGIN.left + (right - MARGIN.left) * (time - from) / HOUR;
  const y = (value) => bottom - (bottom - MARGIN.top) * value / most;
  const chosen = nearest(inside, cursors[name]);
  const seek = (time) => {
    cursors[name] = time;
    changed();
  };
  const step = (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") seek(undefined);
    if (steps === undefined || inside.length === 0) return;
    event.preventDefault();
    const at = chosen === null ? inside.length : inside.indexOf(chosen);
    seek(inside[Math.max(0, Math.min(inside.length - 1, at + steps))].time);
  };
  const follow = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const place = (event.clientX - box.left) * across / box.width;
    seek(from + HOUR * (place - MARGIN.left) / (right - MARGIN.left));
  };
  const shown = chosen ?? inside.at(-1);
  return h("figure", { class: "card plot", key: name },
    h("h2", null, title),
    help && h("p", { class: "muted small" }, help),
    inside.length === 0 ? h("p", { class: "muted" }, text.noSamples) : [
      h("svg", { viewBox: `0 0 ${across} ${PLOT_HEIGHT}`, role: "img", tabindex: 0, id: `plot-${name}`,
        "aria-label": `${title}. ${valuesOf(shown, series, format)}. ${text.plotHelp}`,
        onkeydown: step, onpointermove: follow, onpointerdown: follow,
        onpointerleave: () => seek(undefined) },
      shape.draw(inside, series, x, y),
      axes(from, until, most, format, x, y, across),
      chosen && h("path", { class: "cursor", d: `M${x(chosen.time)} ${MARGIN.top}V${bottom}` })),
      h("figcaption", { class: "small" },
        h("ul", { class: "legend" },
          h("li", { class: "muted" }, clock(shown.time)),
          series.map((key) => h("li", null, h("i", { class: key }), series.length > 1 ? `${text[key]} ` : "",
            format(shown[key]))))),
    ]);
}

function valuesOf(rate, series, format) {
  const text = language.words;
  return [clock(rate.time), ...series.map((key) => `${text[key]} ${format(rate[key])}`)].join(", ");
}

// Stacked from the bottom up.
function areas(rates, series, x, y) {
  let base = rates.map(() => 0);
  return series.toReversed().map((key) => {
    const top = rates.map((rate, index) => base[index] + rate[key]);
    const upper = rates.map((rate, index) => `${x(rate.time).toFixed(1)} ${y(top[index]).toFixed(1)}`);
    const lower = rates.map((rate, index) => `${x(rate.time).toFixed(1)} ${y(base[index]).toFixed(1)}`);
    base = top;
    // Without a stroke, a single sample would be invisible.
    return h("path", { d: `M${upper.join("L")}L${lower.toReversed().join("L")}Z`, key,
      fill: `var(--${key})`, stroke: `var(--${key})`, "stroke-width": 1, "stroke-linejoin": "round" });
  });
}

// A line breaks where a value is missing; one value between two breaks is a dot.
function lines(rates, series, x, y) {
  return series.map((key) => {
    const pieces = rates.map((rate, index) => {
      if (rate[key] === null) return "";
      const place = `${x(rate.time).toFixed(1)} ${y(rate[key]).toFixed(1)}`;
      return (rates[index - 1]?.[key] ?? null) === null ? `M${place}h0` : `L${place}`;
    });
    return h("path", { class: "line", d: pieces.join(""), key, stroke: `var(--${key})` });
  });
}

function axes(from, until, most, format, x, y, across) {
  const values = [0, most / 2, most];
  const apart = across < 420 ? 2 * TICK : TICK;
  const times = [];
  for (let time = Math.ceil(from / apart) * apart; time <= until; time += apart) times.push(time);
  return [
    values.map((value) => [
      h("path", { class: "axis", d: `M${MARGIN.left} ${y(value)}H${across - MARGIN.right}` }),
      h("text", { class: "faint", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" },
        format(value)),
    ]),
    times.filter((time) => x(time) > MARGIN.left + 12 && x(time) < across - 16).map((time) =>
      h("text", { class: "faint", x: x(time), y: PLOT_HEIGHT - 5, "text-anchor": "middle" },
        clock(time, false))),
  ];
}

function nearest(rates, time) {
  if (time === undefined || rates.length === 0) return null;
  return rates.reduce((best, rate) =>
    (Math.abs(rate.time - time) < Math.abs(best.time - time) ? rate : best));
}

// The next 1, 2 or 5 times a power of ten.
function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((times) => times * power >= value) * power;
}

function niceBytes(value) {
  let unit = 1;
  while (value >= unit * 1024) unit *= 1024;
  return unit * niceCeiling(value / unit);
}
