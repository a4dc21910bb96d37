// Preact, with templates instead of a build.

import htm from "./vendor/htm.module.js";
import { Component, h, render } from "./vendor/preact.mjs";

export const html = htm.bind(h);
export { Component, render };
