// The part of a widget model that our views use: what anywidget hands to render().

export interface Model<Traits> {
  get<Name extends keyof Traits & string>(name: Name): Traits[Name];
  on(event: string, callback: (message?: unknown) => void): void;
  off(event: string, callback: (message?: unknown) => void): void;
  send(message: unknown, callbacks?: unknown, buffers?: ArrayBuffer[]): void;
  /** The front end's own, which JupyterLab's knows its notebook by. */
  readonly widget_manager?: unknown;
}

export interface RenderProps<Traits> {
  model: Model<Traits>;
  el: HTMLElement;
}
