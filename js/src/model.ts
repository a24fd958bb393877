// The part of a widget model that our views use: what anywidget hands to render().

export interface Model<Traits> {
  get<Name extends keyof Traits & string>(name: Name): Traits[Name];
  on(event: string, callback: (message?: unknown) => void): void;
  off(event: string, callback: (message?: unknown) => void): void;
  send(message: unknown): void;
}

export interface RenderProps<Traits> {
  model: Model<Traits>;
  el: HTMLElement;
}
