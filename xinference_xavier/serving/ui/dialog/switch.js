// The switch in the launch dialog, with its hint and folded options.
//
// React may redraw the dialog at any time and remove our element. We then put it back and read what
// it shows from the form.

import {
  BACKENDS,
  DEFAULT_BACKEND,
  LANGUAGES,
  MAX_QUEUE,
  OWN_OPTIONS,
  ROUTINGS,
  TRANSPORTS,
  UPSTREAM_OPTIONS,
} from "../constants.js";
import { fill, languageOf } from "../languages.js";
import { launchFormOf, parametersOf, setParameters } from "./form.js";

/**
 * @typedef {import("./form.js").Values} Values
 * @typedef {import("./form.js").Parameters} Parameters
 * @typedef {import("./form.js").LaunchForm} LaunchForm
 */

const ENABLE = "enable_xavier";
const BACKEND = "xavier_backend";
const POOL = "xavier_pool_bytes";
const TRANSPORT = "xavier_transport";
const ROUTING = "xavier_routing";
const QUEUE = "xavier_queue";
const TRUE = new Set(["true", "1", "yes", "on"]);
const SIZE = /^\d+(\.\d+)?\s*([kmgt]i?b|b)?$/i;

// Tells our page whether xinference's launch dialog shows the switch.
export const SEEN = "xavier.switch";

/** @type {Map<Element, ShareSwitch>} */
export const switches = new Map();

class ShareSwitch {
  /** @type {Record<string, string>} */
  #before = {}; // the options when sharing was last switched off
  #title = make("span", { className: "xavier-title" });
  #note = make("div", { className: "xavier-note", role: "status" });
  #button = make("button", { type: "button", role: "switch" });
  #summary = make("summary");
  #expertSummary = make("summary");
  #backend = new Choice();
  #pool = new Typed();
  #transport = new Choice();
  #routing = new Choice();
  #queue = new Typed();
  #expert = make("details", {}, [
    this.#expertSummary,
    make("div", { className: "xavier-options" }, [this.#transport.label, this.#queue.field]),
  ]);
  #details = make("details", {}, [
    this.#summary,
    make("div", { className: "xavier-options" }, [
      this.#pool.field,
      this.#routing.label,
      this.#backend.label,
    ]),
    this.#expert,
  ]);
  #section = make("section", { className: "xavier-share" }, [
    make("div", { className: "xavier-row" }, [
      make("div", {}, [this.#title, this.#note]),
      this.#button,
    ]),
    this.#details,
  ]);

  /**
   * @param {Element} element
   * @param {LaunchForm} launch
   */
  constructor(element, { form, edited }) {
    this.element = element;
    this.form = form;
    this.edited = edited;
    this.#button.setAttribute("aria-labelledby", identified(this.#title));
    this.#button.setAttribute("aria-describedby", identified(this.#note));
    this.#button.addEventListener("click", () => this.#turn());
    this.#backend.changed((chosen) => this.#choose(chosen));
    this.#pool.changed((typed) => this.#change({ [POOL]: typed }));
    this.#queue.changed((typed) => this.#change({ [QUEUE]: typed }));
    this.#queue.input.inputMode = "numeric";
    this.#transport.changed((chosen) =>
      this.#change({ [TRANSPORT]: chosen === TRANSPORTS[0] ? null : chosen }),
    );
    this.#routing.changed((chosen) =>
      this.#change({ [ROUTING]: chosen === ROUTINGS[0] ? null : chosen }),
    );
    this.unsubscribe = form.subscribe(() => this.show());
    this.show();
  }

  // Below the choice of replicas and engine, above the context length, or at the end.
  place() {
    const section = this.#section;
    const fields = [...this.element.children].filter((child) => child !== section);
    const range = fields.find((field) => field.querySelector("input[type=range]"));
    const next = range ?? fields.at(-1) ?? null;
    if (section.parentNode !== this.element || section.nextElementSibling !== next) {
      this.element.insertBefore(section, next);
    }
  }

  show() {
    const text = words();
    const values = this.form.getFieldsValue();
    const parameters = parametersOf(values);
    const on = isOn(parameters);
    const backend = backendOf(values, parameters);
    const builtin = backend === "builtin";
    const obstacle = builtin ? null : obstacleTo(values, parameters);
    this.#section.hidden = !(isVllm(values) || on);
    this.#button.setAttribute("aria-checked", String(on));
    this.#button.disabled = !on && obstacle !== null;
    set(this.#title, text.title);
    const alone = on && Number(values.replica) === 1 ? text.alone : null;
    set(this.#note, obstacle ?? (on && builtin ? text.builtin : (alone ?? text.hint)));
    this.#note.classList.toggle("xavier-wrong", on && obstacle !== null);

    set(this.#summary, text.options);
    this.#details.hidden = !on;
    set(this.#expertSummary, text.expert);
    for (const part of [this.#routing.label, this.#pool.field, this.#expert]) part.hidden = builtin;
    this.#backend.show(text.backend, BACKENDS, backend, text.backends);
    const transport = parameters.get(TRANSPORT) ?? TRANSPORTS[0];
    this.#transport.show(text.transport, TRANSPORTS, transport, {});
    const routing = parameters.get(ROUTING) ?? ROUTINGS[0];
    this.#routing.show(text.routing, ROUTINGS, routing, text.routings);
    const pool = parameters.get(POOL) ?? "";
    this.#pool.show(text.pool, pool, text.poolDefault, isSize(pool) ? "" : text.poolWrong);
    const queue = parameters.get(QUEUE) ?? "";
    const queueWrong = fill(text.queueWrong, { most: MAX_QUEUE });
    this.#queue.show(text.queue, queue, text.queueDefault, isQueue(queue) ? "" : queueWrong);
  }

  #turn() {
    const parameters = parametersOf(this.form.getFieldsValue());
    if (isOn(parameters)) {
      this.#before = Object.fromEntries(
        [...parameters].filter(
          ([name]) => name.startsWith("xavier_") && !UPSTREAM_OPTIONS.includes(name),
        ),
      );
      const gone = Object.keys(this.#before).map((name) => [name, null]);
      this.#change({ [ENABLE]: null, ...Object.fromEntries(gone) });
    } else {
      this.#change({ [ENABLE]: "true", ...this.#before });
    }
  }

  /**
   * The built-in Xavier refuses our options.
   * @param {string} backend
   */
  #choose(backend) {
    const values = this.form.getFieldsValue();
    const parameters = parametersOf(values);
    parameters.delete(BACKEND);
    const gone = backend === "builtin" ? OWN_OPTIONS : [];
    for (const name of gone) parameters.delete(name);
    const unsaid = backendOf(values, parameters) === backend;
    this.#change({
      ...Object.fromEntries(gone.map((name) => [name, null])),
      [BACKEND]: unsaid ? null : backend,
    });
  }

  /** @param {Record<string, string | null>} changes */
  #change(changes) {
    setParameters(this.form, changes);
    this.edited();
  }

  end() {
    this.unsubscribe?.();
    this.#section.remove();
  }
}

// A labelled choice among values.
class Choice {
  #title = make("span");
  #select = make("select");
  label = make("label", {}, [this.#title, this.#select]);

  /** @param {(chosen: string) => void} receive */
  changed(receive) {
    this.#select.addEventListener("change", () => receive(this.#select.value));
  }

  /**
   * `titles` are by value; a value without one is shown as it is.
   * @param {string} title
   * @param {string[]} values
   * @param {string} chosen
   * @param {Record<string, string>} titles
   */
  show(title, values, chosen, titles) {
    set(this.#title, title);
    const all = values.includes(chosen) ? values : [...values, chosen];
    const wanted = all.map((value) => new Option(titles[value] ?? value, value));
    if (described(wanted) !== described([...this.#select.options])) {
      this.#select.replaceChildren(...wanted);
    }
    if (this.#select.value !== chosen) this.#select.value = chosen;
  }
}

/** @param {HTMLOptionElement[]} options */
function described(options) {
  return options.flatMap(({ value, text }) => [value, text]).join("\n");
}

// A labelled text, with a note of what is wrong with it.
class Typed {
  #title = make("span");
  #note = make("div", { className: "xavier-note xavier-wrong" });
  input = make("input", { type: "text", autocomplete: "off" });
  field = make("div", {}, [make("label", {}, [this.#title, this.input]), this.#note]);

  constructor() {
    this.input.setAttribute("aria-describedby", identified(this.#note));
    // Enter would submit the form.
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") event.preventDefault();
    });
  }

  /** @param {(typed: string | null) => void} receive */
  changed(receive) {
    this.input.addEventListener("input", () => receive(this.input.value.trim() || null));
  }

  /**
   * @param {string} title
   * @param {string} value
   * @param {string} placeholder
   * @param {string} problem
   */
  show(title, value, placeholder, problem) {
    set(this.#title, title);
    this.input.placeholder = placeholder;
    // Do not disturb typing.
    if (this.input.value.trim() !== value) this.input.value = value;
    const wrong = value !== "" && problem !== "";
    this.input.setAttribute("aria-invalid", String(wrong));
    set(this.#note, wrong ? problem : "");
  }
}

/** @param {string} value */
function isSize(value) {
  return SIZE.test(value) && Number.parseFloat(value) > 0;
}

/** @param {string} value */
function isQueue(value) {
  return /^\d+$/.test(value) && Number(value) <= MAX_QUEUE;
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

/**
 * @template {keyof HTMLElementTagNameMap} Kind
 * @param {Kind} kind
 * @param {Record<string, string>} properties
 * @param {Node[]} children
 * @returns {HTMLElementTagNameMap[Kind]}
 */
function make(kind, { role, ...properties } = {}, children = []) {
  const node = Object.assign(document.createElement(kind), properties);
  if (role !== undefined) node.setAttribute("role", role);
  node.append(...children);
  return node;
}

/**
 * The element's id; it gets one that no other has.
 * @param {Element} node
 */
function identified(node) {
  node.id = `xavier-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
  return node.id;
}

/**
 * @param {Element} node
 * @param {string} text
 */
export function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function keepSwitches() {
  for (const [element, shown] of switches) {
    if (!element.isConnected) {
      shown.end();
      switches.delete(element);
    }
  }
  for (const element of document.querySelectorAll("[role=dialog] form")) {
    const found = launchFormOf(element);
    if (found !== null) switchOf(element, found).place();
  }
  for (const shown of switches.values()) shown.show();
}

/**
 * @param {Element} element
 * @param {LaunchForm} found
 */
function switchOf(element, found) {
  const shown = switches.get(element);
  if (shown?.form === found.form) return shown;
  shown?.end();
  addStyle();
  const made = new ShareSwitch(element, found);
  switches.set(element, made);
  localStorage.setItem(SEEN, "shown");
  return made;
}

function addStyle() {
  if (document.getElementById("xavier-style") === null) {
    const { href } = new URL("style.css", import.meta.url);
    document.head.append(make("link", { id: "xavier-style", rel: "stylesheet", href }));
  }
}

// Our texts in the language of xinference's page.
export function words() {
  return LANGUAGES[languageOf(document.documentElement.lang, "")].dialog;
}
