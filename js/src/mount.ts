// What every widget is to anywidget: one view for each output cell that shows the model.
import type { Model, RenderProps } from "./model";
import type { Message } from "./protocol";
import { watchVisibility } from "./visibility";

/** Sends a message to Python, and the bytes that go with it. */
export type Send = (message: Message, buffers?: ArrayBuffer[]) => void;

export interface View<Traits> {
  readonly element: HTMLElement;
  /** Paints the traits; those that are the same objects as last time need no work. */
  update(traits: Traits): void;
  /** Takes a message of Python's that is no trait. */
  receive?(message: unknown): void;
  /** Lets go of timers, listeners and the element. */
  dispose(): void;
}

export interface Widget<Traits> {
  render(props: RenderProps<Traits>): () => void;
}

export function widget<Traits extends object>(
  names: readonly (keyof Traits & string)[],
  make: (send: Send, model: Model<Traits>) => View<Traits>,
): Widget<Traits> {
  const read = (model: Model<Traits>) =>
    Object.fromEntries(names.map((name) => [name, model.get(name)])) as unknown as Traits;

  return {
    render({ model, el }) {
      const send: Send = (message, buffers) => model.send(message, undefined, buffers);
      const view = make(send, model);
      const paint = () => view.update(read(model));
      const receive = (message: unknown) => view.receive?.(message);
      const watch = watchVisibility(send);

      paint();
      el.append(view.element);
      model.on("change", paint);
      model.on("msg:custom", receive);

      return () => {
        model.off("change", paint);
        model.off("msg:custom", receive);
        watch.dispose();
        view.dispose();
      };
    },
  };
}
