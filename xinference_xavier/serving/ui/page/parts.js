// Parts of which the page is made.

import { HIT_SOURCES } from "../constants.js";
import { Component, html } from "./html.js";
import { count, percent, tokensOf } from "./numbers.js";
import { language } from "./settings.js";

const SHORT = 12; // rows; a longer table is folded and can be filtered

/**
 * `value` is what rows are sorted by; without it they are not.
 * @template T
 * @typedef {{ title: string, cell: (item: T) => unknown, value?: (item: T) => number | string }}
 *   Column
 */

/**
 * The first column names the rows, the others are numbers unless they are `plain`.
 * @template T
 * @typedef {{ id: string, columns: (Column<T> & { plain?: boolean })[], items: T[] }} Rows
 */

/**
 * @template T
 * @extends {Component<Rows<T>, { by: number, down: boolean, filter: string, all: boolean }>}
 */
export class Table extends Component {
  /** @param {Rows<T>} props */
  constructor(props) {
    super(props);
    this.state = { by: -1, down: true, filter: "", all: false };
  }

  /** @param {number} column */
  sort(column) {
    const { by, down } = this.state;
    this.setState({ by: column, down: by === column ? !down : true });
  }

  shown() {
    const { columns, items } = this.props;
    const { by, down, filter } = this.state;
    const name = columns[0].value;
    const found =
      name === undefined || filter === ""
        ? items
        : items.filter((item) => `${name(item)}`.toLowerCase().includes(filter.toLowerCase()));
    const value = columns[by]?.value;
    if (value === undefined) return found;
    const order = (/** @type {T} */ one, /** @type {T} */ other) =>
      `${value(one)}`.localeCompare(`${value(other)}`, "en", { numeric: true });
    return found.toSorted((one, other) => (down ? order(other, one) : order(one, other)));
  }

  render() {
    const text = language.words;
    const { id, columns, items } = this.props;
    const { by, down, filter, all } = this.state;
    const rows = this.shown();
    const isLong = items.length > SHORT && columns[0].value !== undefined;
    /** @param {number} index */
    const look = (index) => (index === 0 || columns[index].plain ? "" : "number");
    const direction = down ? "descending" : "ascending";
    return html`
      ${
        isLong &&
        html`<input type="search" id=${`${id}-filter`} placeholder=${text.filter}
          aria-label=${text.filter} value=${filter}
          onInput=${(/** @type {InputEvent & { target: HTMLInputElement }} */ event) =>
            this.setState({ filter: event.target.value })} />`
      }
      <table id=${id} class=${columns.length > 4 ? "many" : undefined}>
        <thead><tr>
          ${columns.map(
            ({ title, value }, index) => html`
              <th scope="col" class=${look(index)} aria-sort=${by === index ? direction : undefined}>
                ${
                  value === undefined || items.length < 2
                    ? title
                    : html`<button type="button" onClick=${() => this.sort(index)}>${title}</button>`
                }
              </th>`,
          )}
        </tr></thead>
        <tbody>
          ${rows.slice(0, isLong && !all ? SHORT : undefined).map(
            (item) => html`<tr key=${columns[0].value?.(item)}>
              ${columns.map(({ title, cell }, index) =>
                index === 0
                  ? html`<th scope="row">${cell(item)}</th>`
                  : html`<td class=${look(index)} data-title=${title}>${cell(item)}</td>`,
              )}
            </tr>`,
          )}
        </tbody>
      </table>
      ${
        isLong &&
        rows.length > SHORT &&
        html`<button type="button" id=${`${id}-all`} aria-expanded=${String(all)}
          onClick=${() => this.setState({ all: !all })}>
          ${all ? text.fewer : `${text.showAll} (${count(rows.length)})`}
        </button>`
      }`;
  }
}

/**
 * @param {{ id?: string, look?: string, title: string, help?: unknown, children?: unknown }} props
 */
export function Card({ id, look = "", title, help, children }) {
  return html`<section class=${`card ${look}`} id=${id}>
    <h2>${title}</h2>
    ${help && html`<p class="muted small">${help}</p>`}
    ${children}
  </section>`;
}

/** @param {{ id: string, title: string, big: string, small: string }} props */
export function Tile({ id, title, big, small }) {
  return html`<section class="card tile">
    <h2 class="muted small">${title}</h2>
    <p class="big" id=${id}>${big}</p>
    <p class="muted small">${small}</p>
  </section>`;
}

/** @param {unknown} content */
export function note(content) {
  return html`<div class="muted small">${content}</div>`;
}

/** @param {{ hits: Hits, thin?: boolean }} props */
export function SplitBar({ hits, thin = false }) {
  const text = language.words;
  const { all } = tokensOf(hits);
  const said = HIT_SOURCES.map((key) => `${text[key]} ${percent(hits[key], all)}`).join(", ");
  return html`<div class=${thin ? "split thin" : "split"} role="img" aria-label=${said}>
    ${
      all > 0 &&
      HIT_SOURCES.map(
        (key) => html`<span class=${key} title=${text[key]}
          style=${{ width: `${((100 * hits[key]) / all).toFixed(2)}%` }}></span>`,
      )
    }
  </div>`;
}
