// A question and its answer in the log. The question can be edited in place; nobody else's update disturbs that.
import { copyButton } from "../buttons";
import { h, setText } from "../dom";
import { duration, integer } from "../format";
import type { ChatTurn, TurnEnding } from "../protocol";
import { Answer } from "./answer";
import { onKeys } from "./keys";

const REMARKS: Partial<Record<TurnEnding, string>> = {
  stopped: "Stopped.",
  length: "Cut off at max tokens; Settings can raise that.",
};

export interface TurnActions {
  edit(key: string, text: string): void;
  regenerate(): void;
  dismiss(): void;
}

const quiet = (label: string, action: string) => h("button", { type: "button", "data-kind": "quiet", "data-do": action }, label);

export class Turn {
  readonly element: HTMLElement;
  private readonly question = h("p", { class: "question" });
  private readonly images = h("div", { class: "images", hidden: true });
  private readonly field = h("textarea", { "aria-label": "Edit the question", rows: 3 });
  private readonly editor: HTMLElement;
  private readonly edit = quiet("Edit", "edit");
  private readonly asked: HTMLElement;
  private readonly answered: HTMLElement;
  private readonly thinking: HTMLDetailsElement;
  private readonly thought = document.createTextNode("");
  private readonly reasoning = h("p");
  private readonly answer = new Answer();
  private readonly remark = h("p", { class: "remark", hidden: true });
  private readonly problem: HTMLElement;
  private readonly reason = h("p");
  private readonly dismiss = h("button", { type: "button", "data-do": "dismiss" }, "Dismiss");
  private readonly tools: HTMLElement;
  private readonly copy = copyButton(() => this.turn?.answer ?? "");
  private readonly again = quiet("Regenerate", "regenerate");
  private turn: ChatTurn | null = null;
  private openedByReader = false;
  private foldedByUs = false;

  constructor(private readonly actions: TurnActions) {
    const save = h("button", { type: "button", "data-kind": "primary", "data-do": "save" }, "Save and send");
    const cancel = h("button", { type: "button", "data-do": "cancel" }, "Cancel");
    this.editor = h("div", { class: "editor", hidden: true }, this.field, h("div", { class: "tools" }, save, cancel));
    this.thinking = h("details", { class: "thinking" }, h("summary", {}, h("b", {}, "Thinking"), this.thought), this.reasoning);
    const retry = h("button", { type: "button", "data-kind": "primary", "data-do": "retry" }, "Try again");
    this.problem = h("div", { class: "problem", role: "alert", hidden: true }, this.reason, h("div", { class: "tools" }, retry, this.dismiss));
    this.copy.dataset.kind = "quiet";
    this.tools = h("div", { class: "tools" }, this.copy, this.again);
    this.asked = h(
      "article",
      { class: "message", "data-from": "user", "aria-label": "You" },
      h("h4", {}, "You"),
      h("div", { class: "content" }, this.question, this.images, this.editor),
      h("div", { class: "tools" }, this.edit),
    );
    this.answered = h(
      "article",
      { class: "message", "data-from": "model", "aria-label": "Model" },
      h("h4", {}, "Model"),
      h("div", { class: "content" }, this.thinking, this.answer.element, this.remark, this.problem),
      this.tools,
    );
    this.element = h("div", { class: "turn" }, this.asked, this.answered);

    this.thinking.querySelector("summary")!.addEventListener("click", () => (this.openedByReader = true));
    this.edit.addEventListener("click", () => this.open());
    cancel.addEventListener("click", () => this.close());
    save.addEventListener("click", () => this.save());
    onKeys(this.field, { enter: () => this.save(), escape: () => this.close() });
    this.again.addEventListener("click", () => this.actions.regenerate());
    retry.addEventListener("click", () => this.actions.regenerate());
    this.dismiss.addEventListener("click", () => this.actions.dismiss());
  }

  /** Paints a turn; `busy` while any answer is written, `last` for the newest one. */
  update(turn: ChatTurn, busy: boolean, last: boolean): void {
    if (turn !== this.turn) this.paint(turn, this.turn);
    const { ending } = turn.status;
    const failed = ending === "failed" || (ending === "stopped" && turn.answer === "");
    this.edit.disabled = busy;
    this.again.hidden = !last;
    this.again.disabled = busy;
    this.tools.hidden = failed;
    this.copy.disabled = turn.answer === "";
    this.problem.hidden = !failed;
  }

  private paint(turn: ChatTurn, before: ChatTurn | null): void {
    this.turn = turn;
    const { ending, problem, thought_s, left_out } = turn.status;
    const live = ending === "waiting" || ending === "answering";
    setText(this.question, turn.question);
    this.question.hidden = turn.question === "" || !this.editor.hidden;
    if (turn.images !== before?.images) this.paintImages(turn);
    this.answered.toggleAttribute("data-live", live);
    this.answered.dataset.ending = ending;
    this.answer.update(turn.answer);
    this.paintThinking(turn, live);
    this.thought.data = thought_s === null ? "" : ` ${duration(thought_s)}`;
    const remarks = turn.answer === "" ? [] : [REMARKS[ending] ?? ""];
    if (left_out > 0) remarks.push(`The model's context had no room for the oldest ${left_out === 1 ? "turn" : `${integer(left_out)} turns`}.`);
    setText(this.remark, live ? "" : remarks.filter(Boolean).join(" "));
    this.remark.hidden = this.remark.textContent === "";
    setText(this.reason, problem ?? "Stopped before the answer began.");
  }

  /** Open while it streams, folded once the answer begins, unless the reader has chosen. */
  private paintThinking(turn: ChatTurn, live: boolean): void {
    this.thinking.hidden = turn.reasoning.trim() === "";
    setText(this.reasoning, turn.reasoning.trim());
    if (this.openedByReader) return;
    if (live && turn.answer === "") this.thinking.open = true;
    else if (!this.foldedByUs) {
      this.thinking.open = false;
      this.foldedByUs = true;
    }
  }

  private paintImages(turn: ChatTurn): void {
    const shown = turn.images.filter(({ src }) => src.startsWith("data:image/png;base64,"));
    this.images.replaceChildren(...shown.map(({ name, src }) => h("img", { src, alt: `Attached image: ${name}` })));
    this.images.hidden = shown.length === 0;
  }

  private open(): void {
    this.field.value = this.turn?.question ?? "";
    this.show(true);
    this.field.focus();
  }

  private close(): void {
    this.show(false);
    this.edit.focus();
  }

  private save(): void {
    const text = this.field.value;
    if (!this.turn || text.trim() === "") return;
    this.show(false);
    this.actions.edit(this.turn.key, text);
  }

  private show(editing: boolean): void {
    this.editor.hidden = !editing;
    this.question.hidden = editing || this.question.textContent === "";
    this.edit.hidden = editing;
    this.asked.toggleAttribute("data-editing", editing);
  }
}
