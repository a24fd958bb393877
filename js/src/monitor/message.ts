// What takes the place of the request rows when there are none to show; the height stays the same.
import { copyButton } from "../buttons";
import { h, setText } from "../dom";
import type { EngineBand } from "../protocol";

const QUIET: Partial<Record<EngineBand["state"], string>> = {
  running: "No requests to list.",
  idle: "No requests. The engine is ready.",
  loading: "Loading the model …",
};

export class Message {
  private readonly quiet = h("p", { class: "empty" });
  private readonly title = h("strong");
  private readonly reason = h("p", { class: "reason", tabindex: 0 });
  private readonly command = h("code");
  private readonly ended = h(
    "div",
    { class: "ended" },
    this.title,
    this.reason,
    h("div", { class: "command" }, this.command, copyButton(() => this.command.textContent)),
  );
  readonly element = h("div", { class: "message", role: "status" }, this.quiet, this.ended);

  update(engine: EngineBand): void {
    const failed = engine.state === "error";
    const ended = failed || engine.state === "stopped";
    this.quiet.hidden = ended;
    this.ended.hidden = !ended;
    setText(this.quiet, QUIET[engine.state] ?? "");
    setText(this.title, failed ? "The engine failed" : "The engine is stopped");
    setText(this.reason, failed ? (engine.failure ?? "") : "Start it again from a cell:");
    setText(this.command, engine.command);
  }
}
