// One view of the chat panel, painted from the traits that changed. The log follows an answer only when it is at its end.
import { copyButton } from "../buttons";
import { h, setText } from "../dom";
import { decimal, integer, UNKNOWN } from "../format";
import type { Model } from "../model";
import type { Send } from "../mount";
import type { ChatAction, ChatFigures, ChatState, ChatTraits } from "../protocol";
import { Composer } from "./composer";
import { Drawer } from "./drawer";
import { asCell, insertCell, messages } from "./export";
import { Log } from "./log";
import { Turn } from "./turn";

const STATE_NAMES: Record<ChatState, string> = {
  loading: "Loading",
  running: "Answering",
  idle: "Ready",
  stopped: "Stopped",
  error: "Failed",
};
const AT_END = 8;

const FIGURES: { name: keyof ChatFigures; label: string; unit: string; text: (value: number) => string }[] = [
  { name: "rate", label: "Decode", unit: "tok/s", text: decimal },
  { name: "first_s", label: "First token", unit: "s", text: (value) => value.toFixed(2) },
  { name: "prompt", label: "Prompt", unit: "tok", text: integer },
  { name: "cached", label: "Cached", unit: "tok", text: integer },
  { name: "output", label: "Output", unit: "tok", text: integer },
];

export class ChatView {
  readonly element: HTMLElement;
  private readonly log = new Log();
  private readonly turns = new Map<string, Turn>();
  private readonly state = h("strong", { class: "state", role: "status" });
  private readonly model = h("h3");
  private readonly toggle = h("button", { type: "button", "data-do": "settings", "aria-expanded": "false" }, "Settings");
  private readonly empty = h("p", { class: "empty" }, "Ask the model something.");
  private readonly list = h("div", { class: "log", role: "log", "aria-label": "Messages", tabindex: 0 }, this.empty);
  private readonly reason = h("p");
  private readonly copy: HTMLButtonElement;
  private readonly notice: HTMLElement;
  private readonly drawer: Drawer;
  private readonly composer: Composer;
  private readonly figures = new Map<keyof ChatFigures, HTMLElement>();
  private painted: Partial<ChatTraits> = {};

  constructor(
    private readonly send: Send,
    private readonly widget: Model<ChatTraits>,
  ) {
    const act = (action: ChatAction) => this.send({ kind: "chat", action });
    this.drawer = new Drawer({
      set: (name, value) => this.send({ kind: "chat_set", values: { [name]: value } }),
      toCell: () => insertCell(this.widget.widget_manager, this.element, asCell(this.messages())),
      copyMessages: () => this.copyMessages(),
      reset: () => act("reset"),
    });
    this.composer = new Composer({
      send: (text, images, buffers) => {
        this.send({ kind: "chat_send", text, replaces: null, images }, buffers);
        this.list.scrollTop = this.list.scrollHeight;
      },
      stop: () => act("stop"),
    });
    this.copy = copyButton(() => this.painted.head?.command ?? "");
    this.notice = h("div", { class: "notice", role: "status", hidden: true }, this.reason, this.copy);
    this.toggle.setAttribute("aria-controls", this.drawer.element.id);
    this.toggle.addEventListener("click", () => {
      this.drawer.element.hidden = !this.drawer.element.hidden;
      this.toggle.setAttribute("aria-expanded", String(!this.drawer.element.hidden));
    });
    this.element = h(
      // No landmark: several views of one panel would be landmarks of one name
      "div",
      // JupyterLab's command mode would take keys pressed inside the widget
      { class: "mlx chat", role: "group", "aria-label": "Chat", "data-lm-suppress-shortcuts": "true" },
      h("div", { class: "head" }, this.state, this.model, this.toggle),
      h("div", { class: "body" }, this.list, this.drawer.element),
      this.notice,
      this.composer.element,
      h("dl", { class: "figures" }, ...FIGURES.map(({ name, label, unit }) => this.figure(name, label, unit))),
    );
  }

  update(traits: ChatTraits): void {
    const before = this.painted;
    const { head, talk, figures, settings } = traits;
    const busy = head.state === "running";
    if (before.head !== head) this.paintHead(traits);
    if (before.talk !== talk && !this.log.take(talk)) this.send({ kind: "chat", action: "whole" });
    if (before.talk !== talk || before.head !== head) {
      this.paintTurns(busy);
      this.composer.told(this.log.all(), before.head !== head && head.problem !== null);
    }
    if (before.figures !== figures) this.paintFigures(figures);
    this.drawer.update(settings, head.can_think, this.turns.size === 0);
    this.painted = traits;
  }

  dispose(): void {
    this.drawer.dispose();
    this.composer.dispose();
    this.element.remove();
  }

  private paintHead({ head }: ChatTraits): void {
    this.element.dataset.state = head.state;
    setText(this.state, STATE_NAMES[head.state]);
    setText(this.model, head.model || "No model");
    this.model.title = head.model;
    setText(this.reason, head.problem ?? "");
    this.notice.hidden = head.problem === null;
    this.copy.hidden = head.command === null;
    this.list.setAttribute("aria-busy", String(head.state === "running"));
    this.composer.update(head);
  }

  private paintTurns(busy: boolean): void {
    const list = this.list;
    const follow = list.scrollHeight - list.scrollTop - list.clientHeight < AT_END;
    const all = this.log.all();
    const wanted = new Set(all.map(({ key }) => key));
    for (const [key, turn] of this.turns) {
      if (wanted.has(key)) continue;
      turn.element.remove();
      this.turns.delete(key);
    }
    all.forEach((told, index) => {
      let turn = this.turns.get(told.key);
      if (!turn) this.turns.set(told.key, (turn = this.makeTurn()));
      if (list.children[index + 1] !== turn.element) list.insertBefore(turn.element, list.children[index + 1] ?? null);
      turn.update(told, busy, index === all.length - 1);
    });
    this.empty.hidden = all.length > 0;
    if (follow) list.scrollTop = list.scrollHeight;
  }

  private makeTurn(): Turn {
    return new Turn({
      edit: (key, text) => {
        this.send({ kind: "chat_send", text, replaces: key, images: [] });
        this.composer.focus();
      },
      regenerate: () => this.send({ kind: "chat", action: "regenerate" }),
      dismiss: () => this.send({ kind: "chat", action: "dismiss" }),
    });
  }

  private figure(name: keyof ChatFigures, label: string, unit: string): HTMLElement {
    const value = h("b", { "data-v": name }, UNKNOWN);
    this.figures.set(name, value);
    return h("div", {}, h("dt", {}, label), h("dd", {}, value, ` ${unit}`));
  }

  private paintFigures(figures: ChatFigures): void {
    for (const { name, text } of FIGURES) {
      const value = figures[name];
      setText(this.figures.get(name)!, value === null ? UNKNOWN : text(value));
    }
  }

  private messages() {
    return messages(this.painted.settings?.values.system ?? "", this.log.all());
  }

  private async copyMessages(): Promise<boolean> {
    try {
      await navigator.clipboard.writeText(JSON.stringify(this.messages(), null, 2));
      return true;
    } catch {
      return false;
    }
  }
}
