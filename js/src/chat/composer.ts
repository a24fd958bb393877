// Where the next question is written; Send and Stop are one button in one place. It is the drop zone too.
import { h, setText } from "../dom";
import type { ChatHead, ChatTurn } from "../protocol";
import { Attachments } from "./attachments";
import { onKeys } from "./keys";

/** How long a pressed Send or Stop waits for its effect. */
const PRESSED_MS = 1000;

export interface ComposerActions {
  send(text: string, names: string[], buffers: ArrayBuffer[]): void;
  stop(): void;
}

export class Composer {
  private readonly field = h("textarea", {
    "aria-label": "Message",
    placeholder: "Write a message. Enter sends, Shift + Enter adds a line.",
  });
  private readonly label = document.createTextNode("Send");
  private readonly button = h("button", { type: "submit", "data-alt": "Stop", "data-kind": "primary", "data-do": "send" }, this.label);
  private readonly attachments = new Attachments(() => this.paint());
  readonly element = h(
    "form",
    { class: "composer" },
    this.field,
    this.button,
    this.attachments.element,
    h("div", { class: "drop", "aria-hidden": "true" }, "Drop the image to attach it"),
  );
  private busy = false;
  private pressed: ReturnType<typeof setTimeout> | undefined;
  /** What was sent and is not in the log yet: it comes back if it is refused. */
  private sent: { text: string; files: File[]; back: boolean } | null = null;
  private known: ReadonlySet<string> = new Set();
  private dragged = 0;

  constructor(private readonly actions: ComposerActions) {
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.busy) this.stop();
      else void this.send();
    });
    onKeys(this.field, { enter: () => void this.send(), escape: () => this.stop() });
    this.field.addEventListener("input", () => this.paint());
    this.field.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (files.length === 0) return;
      event.preventDefault();
      this.attachments.take(files);
    });
    this.watchDrops();
  }

  update(head: ChatHead): void {
    const busy = head.state === "running";
    const changed = busy !== this.busy;
    this.busy = busy;
    if (changed) this.settle();
    this.attachments.allow(head.takes_images);
    this.paint();
  }

  /** Sees the log, and whether Python has just refused something. */
  told(turns: readonly ChatTurn[], refused: boolean): void {
    const { sent, known } = this;
    this.known = new Set(turns.map(({ key }) => key));
    if (sent === null) return;
    if (turns.some(({ key, question }) => !known.has(key) && question === sent.text)) {
      this.sent = null;
      if (this.field.value === sent.text) this.field.value = ""; // it came late, after it was given back
      this.paint();
    } else if (refused) this.settle();
  }

  focus(): void {
    this.field.focus();
  }

  dispose(): void {
    clearTimeout(this.pressed);
    this.attachments.dispose();
  }

  private paint(): void {
    const empty = this.field.value.trim() === "" && this.attachments.count === 0;
    setText(this.label, this.busy ? "Stop" : "Send");
    this.button.dataset.alt = this.busy ? "Send" : "Stop";
    this.button.dataset.do = this.busy ? "stop" : "send";
    this.button.toggleAttribute("data-kind", !this.busy);
    if (!this.busy) this.button.dataset.kind = "primary";
    this.button.disabled = this.pressed !== undefined || (!this.busy && empty);
  }

  private async send(): Promise<void> {
    const text = this.field.value;
    if (this.busy || this.pressed !== undefined || (text.trim() === "" && this.attachments.count === 0)) return;
    this.press();
    this.field.value = "";
    this.sent = { text, files: this.attachments.all, back: false };
    const { names, buffers } = await this.attachments.release();
    this.actions.send(text, names, buffers);
    this.paint();
  }

  private stop(): void {
    if (!this.busy || this.pressed !== undefined) return;
    this.press();
    this.actions.stop();
  }

  /** Not twice: the button works again once Python has answered, or after a while. */
  private press(): void {
    this.pressed = setTimeout(() => this.settle(), PRESSED_MS);
    this.paint();
  }

  private settle(): void {
    clearTimeout(this.pressed);
    this.pressed = undefined;
    this.giveBack();
    this.paint();
  }

  /** Puts what was sent and did not arrive back, before what was written since. */
  private giveBack(): void {
    const { sent } = this;
    if (sent === null || sent.back || this.busy) return;
    sent.back = true;
    this.field.value = [sent.text, this.field.value].filter(Boolean).join("\n");
    this.attachments.take(sent.files);
  }

  private watchDrops(): void {
    const carriesFiles = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false;
    const mark = (change: number) => {
      this.dragged = Math.max(0, this.dragged + change);
      this.element.toggleAttribute("data-drag", this.dragged > 0);
    };
    const on = (name: "dragenter" | "dragover" | "dragleave" | "drop", act: (event: DragEvent) => void) =>
      this.element.addEventListener(name, (event) => {
        if (!carriesFiles(event)) return;
        event.preventDefault();
        event.stopPropagation();
        act(event);
      });
    on("dragenter", () => mark(1));
    on("dragleave", () => mark(-1));
    on("dragover", () => undefined);
    on("drop", (event) => {
      mark(-this.dragged);
      this.attachments.take([...(event.dataTransfer?.files ?? [])]);
    });
  }
}
