// The monitor as anywidget loads it: one view for each output cell that shows the model.
import type { Model, RenderProps } from "../model";
import type { Message, MonitorTraits } from "../protocol";
import { watchVisibility } from "../visibility";
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
  const view = new MonitorView(send);
  const paint = () => view.update(read(model));

  const watch = watchVisibility((change) => send(change));

  paint();
  el.append(view.element);
  model.on("change", paint);

  return () => {
    model.off("change", paint);
    watch.dispose();
    view.dispose();
  };
}

export default { render };
