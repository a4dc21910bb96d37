// xinference's launch form, as React holds it.
//
// Launch, launch history, autostart and the copied command line all use the form's values. So the
// switch only shows and edits rows of the form's "additional parameters". If another version of the
// page holds its form differently, there is no switch, and nothing else changes.

/**
 * @typedef {Record<string, unknown>} Values
 * @typedef {{ key: string, value?: unknown }} Row
 * @typedef {Map<string, string>} Parameters
 * @typedef {{ getFieldsValue: () => Values, setFieldsValue: (changes: Values) => void,
 *   subscribe: (listener: () => void) => (() => void) | undefined }} Form
 * @typedef {{ form: Form, edited: () => void }} LaunchForm
 * @typedef {{ memoizedProps?: { form?: Form, onUserChange?: unknown }, return?: Fiber }} Fiber
 */

const FORM_METHODS = /** @type {const} */ (["getFieldsValue", "setFieldsValue", "subscribe"]);
const MAX_PARENTS = 20;

/**
 * `edited()` tells the page that the user has changed something.
 * @param {Element} element
 * @returns {LaunchForm | null}
 */
export function launchFormOf(element) {
  const name = Object.keys(element).find((key) => key.startsWith("__reactFiber$")) ?? "";
  let fiber = /** @type {Record<string, Fiber | undefined>} */ (/** @type {any} */ (element))[name];
  for (let step = 0; fiber !== undefined && step < MAX_PARENTS; step += 1) {
    const { form, onUserChange } = fiber.memoizedProps ?? {};
    if (form && FORM_METHODS.every((method) => typeof form[method] === "function")) {
      const edited = typeof onUserChange === "function" ? () => onUserChange() : () => {};
      return isLaunch(form.getFieldsValue()) ? { form, edited } : null;
    }
    fiber = fiber.return ?? undefined;
  }
  return null;
}

/** @param {Values | null} values */
function isLaunch(values) {
  return (
    values !== null &&
    typeof values === "object" &&
    values.model_type === "LLM" &&
    typeof values.model_name === "string" &&
    "replica" in values
  );
}

/**
 * The values of the named additional parameters, by their names as the server reads them.
 * @param {Values} values
 * @returns {Parameters}
 */
export function parametersOf(values) {
  const named = rowsOf(values).filter(isNamed);
  return new Map(named.map((row) => [plainName(row), String(row.value ?? "")]));
}

/**
 * Sets the rows of these names; null removes a row. Other rows stay.
 * @param {Form} form
 * @param {Record<string, string | null>} changes
 */
export function setParameters(form, changes) {
  const rows = rowsOf(form.getFieldsValue());
  const kept = rows.filter((row) => !isNamed(row) || !(plainName(row) in changes));
  const added = Object.entries(changes)
    .filter(([, value]) => value !== null)
    .map(([key, value]) => ({ key, value }));
  form.setFieldsValue({ kwargs: [...kept, ...added] });
}

/**
 * @param {Values} values
 * @returns {unknown[]}
 */
function rowsOf({ kwargs }) {
  return Array.isArray(kwargs) ? kwargs : [];
}

/**
 * @param {any} row
 * @returns {row is Row}
 */
function isNamed(row) {
  return typeof row?.key === "string";
}

/** @param {Row} row */
function plainName(row) {
  return row.key.trim().replaceAll("-", "_");
}
