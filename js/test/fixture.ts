// The fixture both sides check, typed as the protocol says, and a model that plays the Python side.
import monitor from "../src/monitor";
import raw from "./fixtures/protocol.json";
import type { Model } from "../src/model";
import type { Widget } from "../src/mount";
import type { Command, Message, MonitorTraits } from "../src/protocol";

/** The protocol as JSON knows it: without literal types. */
type Json<T> = T extends string
  ? string
  : T extends readonly (infer Item)[]
    ? Json<Item>[]
    : T extends object
      ? { [Key in keyof T]: Json<T[Key]> }
      : T;

// Fails to compile when a field of the protocol is missing from the fixture, or has another type there.
raw.traits satisfies Json<MonitorTraits>;
raw.messages satisfies Json<Record<string, Message>>;

export const fixture = raw as unknown as {
  traits: MonitorTraits;
  messages: Record<"view" | "abort" | Command, Message>;
};

export class FakeModel<Traits extends object = MonitorTraits> implements Model<Traits> {
  readonly sent: Message[] = [];
  private readonly listeners = new Map<string, Set<(message?: unknown) => void>>();

  constructor(private traits: Traits) {}

  get<Name extends keyof Traits & string>(name: Name): Traits[Name] {
    return this.traits[name];
  }

  set(changes: Partial<Traits>): void {
    this.traits = { ...this.traits, ...changes };
    this.tell("change");
  }

  /** A message of Python's that is no trait. */
  receive(message: unknown): void {
    this.tell("msg:custom", message);
  }

  private tell(event: string, message?: unknown): void {
    for (const listener of [...(this.listeners.get(event) ?? [])]) listener(message);
  }

  on(event: string, callback: (message?: unknown) => void): void {
    if (!this.listeners.has(event)) this.listeners.set(event, new Set());
    this.listeners.get(event)!.add(callback);
  }

  off(event: string, callback: (message?: unknown) => void): void {
    this.listeners.get(event)?.delete(callback);
  }

  send(message: unknown): void {
    this.sent.push(message as Message);
  }

  get listening(): number {
    return [...this.listeners.values()].reduce((sum, each) => sum + each.size, 0);
  }
}

export interface Mounted<Traits extends object> {
  model: FakeModel<Traits>;
  el: HTMLElement;
  cleanUp: () => void;
}

/** A widget on the page, over a model of its own. */
export function mountWidget<Traits extends object>(widget: Widget<Traits>, traits: Traits): Mounted<Traits> {
  const model = new FakeModel(structuredClone(traits));
  const el = document.createElement("div");
  document.body.append(el);
  return { model, el, cleanUp: widget.render({ model, el }) };
}

export function mount(): Mounted<MonitorTraits> {
  return mountWidget(monitor, fixture.traits);
}
