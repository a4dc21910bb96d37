// What the page uses of htm.

declare const htm: {
  bind(h: unknown): (strings: TemplateStringsArray, ...values: unknown[]) => unknown;
};
export default htm;
