// What the page uses of Preact.

export class Component<P, S> {
  constructor(props: P);
  props: P;
  state: S;
  setState(change: Partial<S>): void;
}
export function h(type: unknown, props: unknown, ...children: unknown[]): unknown;
export function render(tree: unknown, parent: Element): void;
