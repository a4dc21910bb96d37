// xinference's launch form, as React holds it.
//
// Launch, launch history, autostart and the copied command line all use the form's values. So the
// switch only shows and edits rows of the form's "additional parameters". If another version of the
// page holds its form differently, there is no switch, and nothing else changes.

const FORM_METHODS = ["getFieldsValue", "setFieldsValue", "subscribe"];
const MAX_PARENTS = 20;

// Returns {form, edited}, or null. `edited()` tells the page that the user has changed something.
function launchFormOf(element) {
  const name = Object.keys(element).find((key) => key.startsWith("__reactFiber$"));
  let fiber = name === undefined ? null : element[name];
  for (let step = 0; fiber && step < MAX_PARENTS; step += 1, fiber = fiber.return) {
    const { form, onUserChange } = fiber.memoizedProps ?? {};
    if (form && FORM_METHODS.every((method) => typeof form[method] === "function")) {
      const edited = typeof onUserChange === "function" ? onUserChange : () => {};
      return isLaunch(form.getFieldsValue()) ? { form, edited } : null;
    }
  }
  return null;
}

function isLaunch(values) {
  return values !== null && typeof values === "object"
    && values.model_type === "LLM" && typeof values.model_name === "string" && "replica" in values;
}

// The values of the named additional parameters, by their names as the server reads them.
function parametersOf(values) {
  const rows = Array.isArray(values.kwargs) ? values.kwargs : [];
  return new Map(rows.filter(isNamed).map((row) => [plainName(row), String(row.value ?? "")]));
}

// Sets the rows of these names; null removes a row. Other rows stay.
function setParameters(form, changes) {
  const before = form.getFieldsValue().kwargs;
  const rows = Array.isArray(before) ? before : [];
  const kept = rows.filter((row) => !isNamed(row) || !(plainName(row) in changes));
  const added = Object.entries(changes)
    .filter(([, value]) => value !== null)
    .map(([key, value]) => ({ key, value }));
  form.setFieldsValue({ kwargs: [...kept, ...added] });
}

function isNamed(row) {
  return row !== null && typeof row === "object" && typeof row.key === "string";
}

function plainName(row) {
  return row.key.trim().replaceAll("-", "_");
}
