// Parts of which the page is made.

import { HIT_SOURCES } from "../constants.js";
import { Component, html } from "../html.js";
import { count, percent, tokensOf } from "./numbers.js";
import { language } from "./settings.js";

const SHORT = 12; // rows; a longer table is folded and can be filtered
const BLOCKS = 4; // rows of a folded table on a phone, where each row of a wide one is a block

/**
 * A title, the value that rows are sorted by (null where it is not known), and how it is shown: by
 * default, as it is. Numbers are on the right.
 * @template T
 * @typedef {[title: string, value: (item: T) => number | string | null,
 *   show?: (value: any, item: T) => unknown]} Column
 */

/**
 * @template T
 * @param {string} id
 * @param {T[]} items
 * @param {Column<T>[]} columns
 */
export function table(id, items, columns) {
  return html`<${Table} ...${{ id, items, columns }} />`;
}

/**
 * @template T
 * @extends {Component<{ id: string, items: T[], columns: Column<T>[] },
 *   { by: number, down: boolean, filter: string, all: boolean }>}
 */
class Table extends Component {
  state = { by: -1, down: true, filter: "", all: false };

  found() {
    const { items, columns } = this.props;
    const { by, down, filter } = this.state;
    const words = (/** @type {T} */ item) =>
      columns.map(([, value]) => value(item)).filter((value) => typeof value === "string");
    const found = items.filter((item) =>
      words(item).some((word) => word.toLowerCase().includes(filter.toLowerCase())),
    );
    if (by < 0) return found;
    const order = (/** @type {T} */ one, /** @type {T} */ other) => {
      const [left, right] = [one, other].map((item) => columns[by][1](item));
      return typeof left === "string"
        ? left.localeCompare(`${right}`, language.code, { numeric: true })
        : Number(left ?? -1) - Number(right ?? -1);
    };
    return found.sort((one, other) => (down ? order(other, one) : order(one, other)));
  }

  render() {
    const text = language.words;
    const { id, items, columns } = this.props;
    const { by, down, filter, all } = this.state;
    const found = this.found();
    const blocks = columns.length > 3 && matchMedia("(max-width: 40rem)").matches;
    const shown = all || found.length <= SHORT ? found.length : blocks ? BLOCKS : SHORT;
    const looks = columns.map(([, value]) =>
      items.some((item) => typeof value(item) === "string") ? undefined : "number",
    );
    return html`
      ${
        items.length > SHORT &&
        html`<input type="search" id=${`${id}-filter`} placeholder=${text.filter}
          aria-label=${text.filter} value=${filter}
          onInput=${(/** @type {InputEvent & { target: HTMLInputElement }} */ event) =>
            this.setState({ filter: event.target.value })} />`
      }
      <table id=${id} class=${columns.length > 3 ? "many" : undefined}>
        <thead><tr>
          ${columns.map(
            ([title], index) => html`
              <th scope="col" class=${looks[index]}
                aria-sort=${by === index ? (down ? "descending" : "ascending") : undefined}>
                ${
                  title !== "" &&
                  html`<button type="button" onClick=${() =>
                    this.setState({ by: index, down: by !== index || !down })}>${title}</button>`
                }
              </th>`,
          )}
        </tr></thead>
        <tbody>
          ${found.slice(0, shown).map(
            (item) => html`<tr>
              ${columns.map(([title, value, show = String], index) => {
                const known = value(item);
                const cell = known === null ? "–" : show(known, item);
                return index === 0
                  ? html`<th scope="row">${cell}</th>`
                  : html`<td class=${looks[index]} data-title=${title}>${cell}</td>`;
              })}
            </tr>`,
          )}
        </tbody>
      </table>
      ${
        found.length > SHORT &&
        html`<button type="button" id=${`${id}-all`} aria-expanded=${String(all)}
          onClick=${() => this.setState({ all: !all })}>
          ${all ? text.fewer : `${text.showAll} (${count(found.length)})`}
        </button>`
      }`;
  }
}

/** @param {{ id?: string, title: string, help?: unknown, children?: unknown }} props */
export function Card({ id, title, help, children }) {
  return html`<section class="card" id=${id}>
    <h2>${title}</h2>
    ${help && note(help)}
    ${children}
  </section>`;
}

/** @param {{ id: string, title: string, big: unknown, small: string }} props */
export function Tile({ id, title, big, small }) {
  return html`<section class="card">
    <h2 class="note">${title}</h2>
    <p class="big" id=${id}>${big}</p>
    ${note(small)}
  </section>`;
}

/** @param {unknown} content */
export function note(content) {
  return html`<div class="note">${content}</div>`;
}

/**
 * Where tokens came from, as a bar.
 * @param {Hits} hits
 */
export function bar(hits) {
  const text = language.words;
  const { all } = tokensOf(hits);
  const shares = HIT_SOURCES.map((key) => ({ key, share: hits[key] / (all || 1) }));
  const said = shares.map(({ key, share }) => `${text[key]} ${percent(share)}`).join(", ");
  return html`<div class="bar" role="img" aria-label=${said}>
    ${shares.map(
      ({ key, share }) => html`<i title=${text[key]}
        style=${{ background: `var(--${key})`, width: `${100 * share}%` }}></i>`,
    )}
  </div>`;
}
