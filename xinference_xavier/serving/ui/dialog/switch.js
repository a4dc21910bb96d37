// The switch in the launch dialog, with its hint and folded options.
//
// React may redraw the dialog at any time and remove our element. We then put it back and read what
// it shows from the form.

const ENABLE = "enable_xavier";
const BACKEND = "xavier_backend";
const POOL = "xavier_pool_bytes";
const TRANSPORT = "xavier_transport";
const ROUTING = "xavier_routing";
const QUEUE = "xavier_queue";
const TRUE = new Set(["true", "1", "yes", "on"]);
const SIZE = /^\d+(\.\d+)?\s*([kmgt]i?b|b)?$/i;

// Tells our page whether xinference's launch dialog shows the switch.
const SEEN = "xavier.switch";

const STYLE = `
.xavier-share { grid-column: 1 / -1; border: 1px solid hsl(var(--border, 214 32% 91%));
  border-radius: .5rem; padding: .75rem 1rem; font-size: .875rem; line-height: 1.4; }
.xavier-share[hidden] { display: none; }
.xavier-share .xavier-row { display: flex; gap: 1rem; align-items: center;
  justify-content: space-between; }
.xavier-share .xavier-title { font-weight: 500; }
.xavier-share .xavier-note { margin-top: .125rem; font-size: .75rem;
  color: hsl(var(--muted-foreground, 215 25% 40%)); }
.xavier-share .xavier-note.xavier-wrong { color: hsl(var(--destructive, 0 84% 60%)); }
.xavier-share [role=switch] { flex: none; width: 2.75rem; height: 1.5rem; padding: 2px;
  border: 0; border-radius: 9999px; background: hsl(var(--input, 214 32% 91%)); cursor: pointer;
  transition: background-color .15s; }
.xavier-share [role=switch]::before { content: ""; display: block; width: 1.25rem; height: 1.25rem;
  border-radius: 9999px; background: hsl(var(--background, 0 0% 100%));
  box-shadow: 0 1px 3px rgb(0 0 0 / .3); transition: transform .15s; }
.xavier-share [role=switch][aria-checked=true] { background: hsl(var(--primary, 221 83% 53%)); }
.xavier-share [role=switch][aria-checked=true]::before { transform: translateX(1.25rem); }
.xavier-share [role=switch]:disabled { cursor: not-allowed; opacity: .5; }
.xavier-share :focus-visible { outline: 3px solid hsl(var(--ring, 221 83% 53%) / .5);
  outline-offset: 1px; }
.xavier-share details { margin-top: .5rem; }
.xavier-share summary { width: fit-content; cursor: pointer; font-size: .75rem;
  color: hsl(var(--muted-foreground, 215 25% 40%)); }
.xavier-share .xavier-options { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem,
  1fr)); gap: .75rem 1rem; margin-top: .5rem; }
.xavier-share [hidden] { display: none; }
.xavier-share label:not([hidden]) { display: block; font-weight: 500; }
.xavier-share input, .xavier-share select { display: block; width: 100%; height: 2.25rem;
  margin-top: .25rem; padding: 0 .75rem; border: 1px solid hsl(var(--input, 214 32% 91%));
  border-radius: .375rem; font-weight: 400; color: inherit;
  background: hsl(var(--background, 0 0% 100%)); }
.xavier-share :is(input, select):disabled { opacity: .5; }
.xavier-share input[aria-invalid=true] { border-color: hsl(var(--destructive, 0 84% 60%)); }
`;

class ShareSwitch {
  constructor(element, { form, edited }) {
    this.element = element;
    this.form = form;
    this.edited = edited;
    this.before = {}; // the options when sharing was last switched off
    this.build();
    this.unsubscribe = form.subscribe(() => this.show());
    this.show();
  }

  build() {
    const id = `xavier-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
    this.title = make("span", { className: "xavier-title", id: `${id}-title` });
    this.note = make("div", { className: "xavier-note", id: `${id}-note`, role: "status" });
    this.button = make("button", { type: "button", role: "switch" });
    this.button.setAttribute("aria-labelledby", this.title.id);
    this.button.setAttribute("aria-describedby", this.note.id);
    this.button.addEventListener("click", () => this.turn());
    this.summary = make("summary", {});
    this.expertSummary = make("summary", {});
    this.backendLabel = make("span", {});
    this.backend = make("select", {});
    this.backend.addEventListener("change", () => this.choose(this.backend.value));
    this.poolLabel = make("span", {});
    this.pool = make("input", { type: "text", autocomplete: "off" });
    this.pool.addEventListener("input", () => this.change(POOL, this.pool.value.trim() || null));
    this.pool.addEventListener("keydown", withoutSubmit);
    this.poolNote = make("div", { className: "xavier-note xavier-wrong", id: `${id}-pool` });
    this.pool.setAttribute("aria-describedby", this.poolNote.id);
    this.transportLabel = make("span", {});
    this.transport = make("select", {});
    this.transport.addEventListener("change", () => {
      const chosen = this.transport.value;
      this.change(TRANSPORT, chosen === TRANSPORTS[0] ? null : chosen);
    });
    this.routingLabel = make("span", {});
    this.routing = make("select", {});
    this.routing.addEventListener("change", () => {
      const chosen = this.routing.value;
      this.change(ROUTING, chosen === ROUTINGS[0] ? null : chosen);
    });
    this.queueLabel = make("span", {});
    this.queue = make("input", { type: "text", inputMode: "numeric", autocomplete: "off" });
    this.queue.addEventListener("input", () => this.change(QUEUE, this.queue.value.trim() || null));
    this.queue.addEventListener("keydown", withoutSubmit);
    this.queueNote = make("div", { className: "xavier-note xavier-wrong", id: `${id}-queue` });
    this.queue.setAttribute("aria-describedby", this.queueNote.id);
    this.section = make("section", { className: "xavier-share" }, [
      make("div", { className: "xavier-row" }, [
        make("div", {}, [this.title, this.note]),
        this.button,
      ]),
      (this.details = make("details", {}, [
        this.summary,
        make("div", { className: "xavier-options" }, [
          (this.pooled = make("div", {}, [
            make("label", {}, [this.poolLabel, this.pool]), this.poolNote,
          ])),
          (this.routed = make("label", {}, [this.routingLabel, this.routing])),
          make("label", {}, [this.backendLabel, this.backend]),
        ]),
        (this.expert = make("details", {}, [
          this.expertSummary,
          make("div", { className: "xavier-options" }, [
            make("label", {}, [this.transportLabel, this.transport]),
            make("div", {}, [make("label", {}, [this.queueLabel, this.queue]), this.queueNote]),
          ]),
        ])),
      ])),
    ]);
  }

  // Below the choice of replicas and engine, above the context length, or at the end.
  place() {
    const fields = [...this.element.children].filter((child) => child !== this.section);
    const next = fields.find((field) => field.querySelector("input[type=range]")) ?? fields.at(-1);
    if (this.section.parentNode !== this.element || this.section.nextElementSibling !== next) {
      this.element.insertBefore(this.section, next);
    }
  }

  show() {
    const text = words();
    const values = this.form.getFieldsValue();
    const parameters = parametersOf(values);
    const on = isOn(parameters);
    const backend = backendOf(values, parameters);
    const builtin = backend === "builtin";
    const obstacle = builtin ? null : obstacleTo(values, parameters, text);
    this.section.hidden = !(isVllm(values) || on);
    this.button.setAttribute("aria-checked", String(on));
    this.button.disabled = !on && obstacle !== null;
    set(this.title, text.title);
    const alone = on && Number(values.replica) === 1 ? text.alone : null;
    set(this.note, obstacle ?? (on && builtin ? text.builtin : alone ?? text.hint));
    this.note.classList.toggle("xavier-wrong", on && obstacle !== null);

    set(this.summary, text.options);
    this.details.hidden = !on;
    set(this.backendLabel, text.backend);
    showChoice(this.backend, BACKENDS, backend, text.backends);
    set(this.expertSummary, text.expert);
    for (const part of [this.routed, this.pooled, this.expert]) part.hidden = builtin;
    set(this.poolLabel, text.pool);
    this.pool.placeholder = text.poolDefault;
    showTyped(this.pool, this.poolNote, parameters.get(POOL) ?? "", isSize, text.poolWrong);
    set(this.transportLabel, text.transport);
    showChoice(this.transport, TRANSPORTS, parameters.get(TRANSPORT) ?? TRANSPORTS[0]);
    set(this.routingLabel, text.routing);
    showChoice(this.routing, ROUTINGS, parameters.get(ROUTING) ?? ROUTINGS[0], text.routings);
    set(this.queueLabel, text.queue);
    this.queue.placeholder = text.queueDefault;
    const wrong = text.queueWrong(MAX_QUEUE);
    showTyped(this.queue, this.queueNote, parameters.get(QUEUE) ?? "", isQueue, wrong);
  }

  turn() {
    const parameters = parametersOf(this.form.getFieldsValue());
    if (isOn(parameters)) {
      this.before = Object.fromEntries([...parameters].filter(([name]) => name.startsWith("xavier_")
        && !UPSTREAM_OPTIONS.includes(name)));
      const gone = Object.keys(this.before).map((name) => [name, null]);
      setParameters(this.form, { [ENABLE]: null, ...Object.fromEntries(gone) });
    } else {
      setParameters(this.form, { [ENABLE]: "true", ...this.before });
    }
    this.edited();
  }

  // The built-in Xavier refuses our options.
  choose(backend) {
    const values = this.form.getFieldsValue();
    const parameters = parametersOf(values);
    parameters.delete(BACKEND);
    const gone = backend === "builtin" ? OWN_OPTIONS : [];
    for (const name of gone) parameters.delete(name);
    const unsaid = backendOf(values, parameters) === backend;
    setParameters(this.form, {
      ...Object.fromEntries(gone.map((name) => [name, null])), [BACKEND]: unsaid ? null : backend,
    });
    this.edited();
  }

  change(name, value) {
    setParameters(this.form, { [name]: value });
    this.edited();
  }

  end() {
    this.unsubscribe?.();
    this.section.remove();
  }
}

// Enter would submit the form.
function withoutSubmit(event) {
  if (event.key === "Enter") event.preventDefault();
}

function isSize(value) {
  return SIZE.test(value) && parseFloat(value) > 0;
}

function isQueue(value) {
  return /^\d+$/.test(value) && Number(value) <= MAX_QUEUE;
}

function showTyped(field, note, value, isValid, problem) {
  // Do not disturb typing.
  if (field.value.trim() !== value) field.value = value;
  const wrong = value !== "" && !isValid(value);
  field.setAttribute("aria-invalid", String(wrong));
  set(note, wrong ? problem : "");
}

// `titles` are by value; a value without one is shown as it is.
function showChoice(field, values, chosen, titles = {}) {
  const all = values.includes(chosen) ? values : [...values, chosen];
  const shown = (pairs) => pairs.flat().join("\n");
  const wanted = all.map((value) => [value, titles[value] ?? value]);
  if (shown(wanted) !== shown([...field.options].map(({ value, text }) => [value, text]))) {
    field.replaceChildren(...wanted.map(([value, title]) => new Option(title, value)));
  }
  if (field.value !== chosen) field.value = chosen;
}

function isOn(parameters) {
  return TRUE.has((parameters.get(ENABLE) ?? "").trim().toLowerCase());
}

function isVllm(values) {
  return String(values.model_engine ?? "").toLowerCase() === "vllm";
}

// The Xavier that a launch with these values gets; the server decides likewise.
function backendOf(values, parameters) {
  const said = parameters.get(BACKEND)?.trim().toLowerCase();
  if (said) return said;
  if (OWN_OPTIONS.some((name) => parameters.has(name))) return "extension";
  const theirs = UPSTREAM_OPTIONS.some((name) => parameters.has(name));
  return theirs || !isVllm(values) ? "builtin" : DEFAULT_BACKEND;
}

// Why this launch cannot share, or null.
function obstacleTo(values, parameters, text) {
  if (!isVllm(values)) return text.needsVllm;
  if (!/^[1-9]\d*$/.test(String(values.replica ?? "").trim())) return text.needsReplica;
  const placed = values.replica_placement_mode === "custom";
  if (!placed && !["", "1"].includes(String(values.n_worker ?? ""))) return text.needsOneWorker;
  const excluded = [...UPSTREAM_OPTIONS, "kv_transfer_config"].filter((name) => parameters.has(name));
  return excluded.length > 0 ? text.excluded(excluded.join(", ")) : null;
}

function make(kind, properties, children = []) {
  const { role, autocomplete, ...rest } = properties;
  const node = Object.assign(document.createElement(kind), rest);
  if (role !== undefined) node.setAttribute("role", role);
  if (autocomplete !== undefined) node.setAttribute("autocomplete", autocomplete);
  node.append(...children);
  return node;
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const switches = new Map();

function keepSwitches() {
  for (const [element, shown] of switches) {
    if (!element.isConnected) {
      shown.end();
      switches.delete(element);
    }
  }
  const dialogs = [...document.querySelectorAll("[role=dialog] form")];
  for (const element of dialogs) {
    const shown = switches.get(element);
    const found = launchFormOf(element);
    if (found === null) continue;
    if (shown !== undefined && shown.form !== found.form) shown.end();
    if (shown === undefined || shown.form !== found.form) {
      addStyle();
      switches.set(element, new ShareSwitch(element, found));
      localStorage.setItem(SEEN, "shown");
    }
    switches.get(element).place();
    switches.get(element).show();
  }
}

function addStyle() {
  if (document.getElementById("xavier-style") === null) {
    document.head.append(make("style", { id: "xavier-style", textContent: STYLE }));
  }
}
