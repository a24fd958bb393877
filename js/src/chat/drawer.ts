// System prompt, sampling, and what can be done with the conversation. Python checks what is typed; what isn't valid
// is said below its field.
import { type ConfirmButton, confirmButton } from "../buttons";
import { h, setAttribute, setText } from "../dom";
import type { ChatSettings } from "../protocol";

type Field = HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement;

interface Spec {
  name: string;
  label: string;
  placeholder?: string;
  slider?: { min: number; max: number; step: number };
}

const NUMBERS: Spec[] = [
  { name: "temperature", label: "Temperature", slider: { min: 0, max: 2, step: 0.05 } },
  { name: "top_p", label: "Top-p", slider: { min: 0.01, max: 1, step: 0.01 } },
  { name: "top_k", label: "Top-k, 0 for all" },
  { name: "min_p", label: "Min-p" },
  { name: "repetition_penalty", label: "Repetition penalty" },
  { name: "max_tokens", label: "Max tokens" },
  { name: "seed", label: "Seed", placeholder: "random" },
];

export interface DrawerActions {
  set(name: string, value: string): void;
  toCell(): boolean;
  copyMessages(): Promise<boolean>;
  reset(): void;
}

let drawers = 0;

export class Drawer {
  readonly element: HTMLElement;
  private readonly id = `mlx-chat-${(drawers += 1)}`;
  private readonly fields = new Map<string, Field>();
  private readonly sliders = new Map<string, HTMLInputElement>();
  private readonly problems = new Map<string, HTMLElement>();
  private readonly thinking: HTMLElement;
  private readonly fresh: ConfirmButton;
  private readonly said = h("small", { role: "status" });
  private shown: ChatSettings | null = null;

  constructor(private readonly actions: DrawerActions) {
    this.fresh = confirmButton("New conversation", "Forget all turns", () => this.actions.reset());
    this.fresh.element.dataset.do = "reset";
    const select = h("select", {}, ...["", "on", "off"].map((value) => h("option", { value }, value || "default")));
    this.thinking = this.row("thinking", "Thinking", select);
    const toCell = h("button", { type: "button", "data-do": "to-cell" }, "To a new cell");
    const copy = h("button", { type: "button", "data-do": "copy-messages" }, "Copy as messages");
    toCell.addEventListener("click", () => void this.export());
    copy.addEventListener("click", () => void this.copy("Copied."));
    this.element = h(
      "div",
      { class: "drawer", role: "group", "aria-label": "Settings", id: this.id, hidden: true },
      this.row("system", "System prompt", h("textarea", { rows: 4 })),
      ...NUMBERS.map((spec) => this.number(spec)),
      this.thinking,
      h("div", { class: "exports" }, toCell, copy, this.fresh.element, this.said),
    );
  }

  update(settings: ChatSettings, canThink: boolean, empty: boolean): void {
    this.thinking.hidden = !canThink;
    this.fresh.enable(!empty);
    if (settings === this.shown) return;
    this.shown = settings;
    for (const [name, field] of this.fields) {
      const [value, problem] = [settings.values[name] ?? "", settings.problems[name] ?? ""];
      this.put(name, field, value);
      const line = this.problems.get(name)!;
      setText(line, problem);
      line.hidden = problem === "";
      setAttribute(field, "aria-invalid", String(problem !== ""));
    }
  }

  dispose(): void {
    this.fresh.dispose();
  }

  private put(name: string, field: Field, value: string): void {
    const active = document.activeElement;
    // What somebody is writing is theirs until they leave the field
    if (field === active && field.value !== field.dataset.sent) return;
    if (field.value !== value) field.value = value;
    const slider = this.sliders.get(name);
    if (slider && slider !== active) slider.value = value;
  }

  private row(name: string, label: string, field: Field, ...more: Node[]): HTMLElement {
    const id = `${this.id}-${name}`;
    const problem = h("p", { class: "invalid", id: `${id}-problem`, role: "alert", hidden: true });
    setAttribute(field, "id", id);
    setAttribute(field, "name", name);
    setAttribute(field, "aria-describedby", `${id}-problem`);
    field.addEventListener("change", () => this.send(name, field.value));
    field.addEventListener("keydown", (event) => event.stopPropagation());
    this.fields.set(name, field);
    this.problems.set(name, problem);
    return h("div", { class: "field", "data-field": name }, h("label", { for: id }, label), field, ...more, problem);
  }

  private number({ name, label, placeholder, slider }: Spec): HTMLElement {
    const field = h("input", { type: "text", inputmode: "decimal", autocomplete: "off", ...(placeholder ? { placeholder } : {}) });
    if (!slider) return this.row(name, label, field);
    const range = h("input", { type: "range", ...slider, "aria-label": `${label}, slider` });
    range.addEventListener("input", () => (field.value = range.value));
    range.addEventListener("change", () => this.send(name, range.value));
    range.addEventListener("keydown", (event) => event.stopPropagation());
    this.sliders.set(name, range);
    return this.row(name, label, field, range);
  }

  private send(name: string, value: string): void {
    this.fields.get(name)!.dataset.sent = value;
    this.actions.set(name, value);
  }

  private async export(): Promise<void> {
    if (this.actions.toCell()) setText(this.said, "In a new cell below.");
    else await this.copy("Copied: paste it into a cell.");
  }

  private async copy(done: string): Promise<void> {
    setText(this.said, (await this.actions.copyMessages()) ? done : "No clipboard here: panel.messages has them.");
  }
}
