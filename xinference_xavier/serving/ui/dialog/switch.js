// The switch in the launch dialog, with its hint and folded options.
//
// React may redraw the dialog at any time and remove our element. We then put it back and read what
// it shows from the form.

import {
  BACKENDS,
  DEFAULT_BACKEND,
  LANGUAGES,
  OWN_OPTIONS,
  UPSTREAM_OPTIONS,
} from "../constants.js";
import { html, render } from "../html.js";
import { fill, languageOf } from "../languages.js";
import { launchFormOf, parametersOf, setParameters } from "./form.js";

/**
 * @typedef {import("./form.js").Values} Values
 * @typedef {import("./form.js").Parameters} Parameters
 * @typedef {import("./form.js").LaunchForm} LaunchForm
 * @typedef {Record<string, string | null>} Changes
 */

const ENABLE = "enable_xavier";
const BACKEND = "xavier_backend";
const POOL = "xavier_pool_bytes";
const TRUE = new Set(["true", "1", "yes", "on"]);
const SIZE = /^\d+(\.\d+)?\s*([kmgt]i?b|b)?$/i;

/** @type {WeakMap<import("./form.js").Form, ShareSwitch>} */
const switches = new WeakMap();

class ShareSwitch {
  /** @type {Changes} */
  before = {}; // the options when sharing was last switched off
  section = document.createElement("section");

  /** @param {LaunchForm} launch */
  constructor({ form, edited }) {
    this.form = form;
    this.edited = edited;
    this.section.className = "xavier-share";
    form.subscribe(() => this.show());
  }

  /**
   * Below the choice of replicas and engine, above the context length, or at the end.
   * @param {Element} element
   */
  place(element) {
    const { section } = this;
    for (const old of element.querySelectorAll(".xavier-share")) if (old !== section) old.remove();
    const fields = [...element.children].filter((child) => child !== section);
    const range = fields.find((field) => field.querySelector("input[type=range]"));
    const next = range ?? fields.at(-1) ?? null;
    if (section.parentNode !== element || section.nextElementSibling !== next) {
      element.insertBefore(section, next);
    }
  }

  show() {
    const text = words();
    const values = this.form.getFieldsValue();
    const parameters = parametersOf(values);
    const on = isOn(parameters);
    const backend = backendOf(values, parameters);
    const isOurs = backend !== "builtin";
    const obstacle = isOurs ? obstacleTo(values, parameters) : null;
    const alone = on && Number(values.replica) === 1 ? text.alone : text.hint;
    const pool = parameters.get(POOL) ?? "";
    const isWrong = pool !== "" && !(SIZE.test(pool.trim()) && Number.parseFloat(pool) > 0);
    const noEnter = (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter") event.preventDefault(); // it would submit the form
    };
    /** @typedef {Event & { target: HTMLInputElement }} Edit */
    this.section.hidden = !(isVllm(values) || on);
    const content = html`
      <div class="xavier-row">
        <div>
          <span class="xavier-title">${text.title}</span>
          <div class=${on && obstacle !== null ? "xavier-wrong" : "xavier-note"} role="status">
            ${obstacle ?? (on && !isOurs ? text.builtin : alone)}
          </div>
        </div>
        <button type="button" role="switch" aria-checked=${String(on)} aria-label=${text.title}
          disabled=${!on && obstacle !== null} onClick=${() => this.turn()}></button>
      </div>
      <details hidden=${!on}>
        <summary>${text.options}</summary>
        <div class="xavier-options">
          ${
            isOurs &&
            html`<label>${text.pool}
              <input autocomplete="off" placeholder=${text.poolDefault} value=${pool}
                aria-invalid=${String(isWrong)} onKeyDown=${noEnter}
                onInput=${(/** @type {Edit} */ { target }) =>
                  this.change({ [POOL]: target.value || null })} />
              ${isWrong && html`<span class="xavier-wrong">${text.poolWrong}</span>`}
            </label>`
          }
          <label>${text.backend}
            <select value=${backend}
              onChange=${(/** @type {Edit} */ { target }) => this.choose(target.value)}>
              ${BACKENDS.map((each) => html`<option value=${each}>${text.backends[each]}</option>`)}
            </select>
          </label>
        </div>
      </details>`;
    render(content, this.section);
  }

  turn() {
    const parameters = parametersOf(this.form.getFieldsValue());
    if (!isOn(parameters)) return this.change({ [ENABLE]: "true", ...this.before });
    const ours = [...parameters].filter(
      ([name]) => name.startsWith("xavier_") && !UPSTREAM_OPTIONS.includes(name),
    );
    this.before = Object.fromEntries(ours);
    this.change({ [ENABLE]: null, ...Object.fromEntries(ours.map(([name]) => [name, null])) });
  }

  /**
   * The built-in Xavier refuses our options.
   * @param {string} backend
   */
  choose(backend) {
    const values = this.form.getFieldsValue();
    const parameters = parametersOf(values);
    parameters.delete(BACKEND);
    const gone = backend === "builtin" ? OWN_OPTIONS : [];
    for (const name of gone) parameters.delete(name);
    const unsaid = backendOf(values, parameters) === backend;
    this.change({
      ...Object.fromEntries(gone.map((name) => [name, null])),
      [BACKEND]: unsaid ? null : backend,
    });
  }

  /** @param {Changes} changes */
  change(changes) {
    setParameters(this.form, changes);
    this.edited();
  }
}

/** @param {Parameters} parameters */
function isOn(parameters) {
  return TRUE.has((parameters.get(ENABLE) ?? "").trim().toLowerCase());
}

/** @param {Values} values */
function isVllm(values) {
  return String(values.model_engine ?? "").toLowerCase() === "vllm";
}

/**
 * The Xavier that a launch with these values gets; the server decides likewise.
 * @param {Values} values
 * @param {Parameters} parameters
 */
function backendOf(values, parameters) {
  const said = parameters.get(BACKEND)?.trim().toLowerCase();
  if (said) return said;
  if (OWN_OPTIONS.some((name) => parameters.has(name))) return "extension";
  const theirs = UPSTREAM_OPTIONS.some((name) => parameters.has(name));
  return theirs || !isVllm(values) ? "builtin" : DEFAULT_BACKEND;
}

/**
 * Why this launch cannot share, or null.
 * @param {Values} values
 * @param {Parameters} parameters
 */
function obstacleTo(values, parameters) {
  const text = words();
  if (!isVllm(values)) return text.needsVllm;
  if (!/^[1-9]\d*$/.test(String(values.replica ?? "").trim())) return text.needsReplica;
  const placed = values.replica_placement_mode === "custom";
  if (!placed && !["", "1"].includes(String(values.n_worker ?? ""))) return text.needsOneWorker;
  const names = [...UPSTREAM_OPTIONS, "kv_transfer_config"].filter((name) => parameters.has(name));
  return names.length > 0 ? fill(text.excluded, { names: names.join(", ") }) : null;
}

// Shows the switch in each launch dialog that is open.
export function keepSwitches() {
  for (const element of document.querySelectorAll("[role=dialog] form")) {
    const launch = launchFormOf(element);
    if (launch === null) continue;
    const shown = switches.get(launch.form) ?? new ShareSwitch(launch);
    switches.set(launch.form, shown);
    addStyle();
    shown.place(element);
    shown.show();
  }
}

function addStyle() {
  if (document.getElementById("xavier-style") !== null) return;
  const { href } = new URL("style.css", import.meta.url);
  const link = { id: "xavier-style", rel: "stylesheet", href };
  document.head.append(Object.assign(document.createElement("link"), link));
}

// Our texts in the language of xinference's page.
export function words() {
  return LANGUAGES[languageOf(document.documentElement.lang, "")].dialog;
}
