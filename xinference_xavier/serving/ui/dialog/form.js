// xinference's launch form, as React holds it.
//
// Its values are the one truth: launch, launch history, autostart and the copied command line are
// all made from them. The switch is a view of some rows of its "additional parameters", so that
// each of these keeps them. Another version of the page may hold its form in another way: then
// there is no switch, and nothing else changes.

const FORM_METHODS = ["getFieldsValue", "setFieldsValue", "subscribe"];
const MOST_PARENTS = 20;

// Returns {form, edited}, or null. `edited()` tells the page that its user changed something.
function launchFormOf(element) {
  const name = Object.keys(element).find((key) => key.startsWith("__reactFiber$"));
  let fiber = name === undefined ? null : element[name];
  for (let step = 0; fiber && step < MOST_PARENTS; step += 1, fiber = fiber.return) {
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

// The rows of the additional parameters that have a name, by that name as the server reads it.
function parametersOf(values) {
  const rows = Array.isArray(values.kwargs) ? values.kwargs : [];
  return new Map(rows.filter(isNamed).map((row) => [plainName(row), String(row.value ?? "")]));
}

// Gives the named rows these values; null takes a row out. The other rows stay as they are.
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
