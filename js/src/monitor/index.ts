// The monitor as anywidget loads it: a view for each output cell, and word to Python of who can see it.
import type { Model, RenderProps } from "../model";
import type { Message, MonitorTraits } from "../protocol";
import { MonitorView } from "./view";

const NAMES = [
  "engine",
  "load",
  "history",
  "memory",
  "prefix",
  "rows",
  "progress",
  "hidden_requests",
] as const satisfies readonly (keyof MonitorTraits)[];

function read(model: Model<MonitorTraits>): MonitorTraits {
  return Object.fromEntries(NAMES.map((name) => [name, model.get(name)])) as unknown as MonitorTraits;
}

function render({ model, el }: RenderProps<MonitorTraits>): () => void {
  const send = (message: Message) => model.send(message);
  const name = Math.random().toString(36).slice(2);
  const view = new MonitorView(send);
  const paint = () => view.update(read(model));

  // A page in the background is nobody looking. Closing the page hides it first.
  let announced = false;
  const announce = (open: boolean) => {
    if (open === announced) return;
    announced = open;
    send({ kind: "view", view: name, open });
  };
  const seen = () => announce(document.visibilityState === "visible");

  paint();
  el.append(view.element);
  model.on("change", paint);
  document.addEventListener("visibilitychange", seen);
  seen();

  return () => {
    model.off("change", paint);
    document.removeEventListener("visibilitychange", seen);
    announce(false);
    view.dispose();
  };
}

export default { render };
