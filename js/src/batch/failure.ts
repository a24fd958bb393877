// What takes the place of the results when the engine failed; the height stays the same.
import { copyButton } from "../buttons";
import { h, setText } from "../dom";
import type { JobBand } from "../protocol";

export class Failure {
  private readonly reason = h("p", { class: "reason", tabindex: 0 });
  private readonly command = h("code");
  readonly element = h(
    "div",
    { class: "failure", role: "alert", hidden: true },
    h("strong", {}, "The engine ended before the job did"),
    this.reason,
    h("div", { class: "command" }, this.command, copyButton(() => this.command.textContent)),
  );

  update({ failure, command }: JobBand): void {
    this.element.hidden = failure === null;
    setText(this.reason, failure ?? "");
    setText(this.command, command);
  }
}
