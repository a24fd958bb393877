// What takes the place of the request rows when there are none to show; the height stays the same.
import { copyButton } from "../buttons";
import { h, setText } from "../dom";
import type { EngineBand } from "../protocol";

const QUIET: Partial<Record<EngineBand["state"], string>> = {
  running: "No requests to list.",
  idle: "No requests. The engine is ready.",
  paused: "No requests. New ones wait until you resume.",
  unloaded: "The model is not in memory. The next request loads it.",
  loading: "Loading the model …",
};

/** How long a pressed Restart stays disabled when the engine doesn't come up. */
const RESTART_MS = 3000;

export class Message {
  private readonly quiet = h("p", { class: "empty" });
  private readonly title = h("strong");
  private readonly reason = h("p", { class: "reason", tabindex: 0 });
  private readonly command = h("code");
  private readonly restart = h("button", { type: "button", "data-kind": "primary", "data-do": "restart" }, "Restart engine");
  private readonly ended = h(
    "div",
    { class: "ended" },
    this.title,
    this.reason,
    h("div", { class: "command" }, this.command, copyButton(() => this.command.textContent), this.restart),
  );
  private timer: ReturnType<typeof setTimeout> | undefined;
  readonly element = h("div", { class: "message" }, this.quiet, this.ended);

  constructor(onRestart: () => void) {
    this.restart.addEventListener("click", () => {
      this.restart.disabled = true;
      this.timer = setTimeout(() => (this.restart.disabled = false), RESTART_MS);
      onRestart();
    });
  }

  update(engine: EngineBand): void {
    const failed = engine.state === "error";
    const ended = failed || engine.state === "stopped";
    this.quiet.hidden = ended;
    this.ended.hidden = !ended;
    setText(this.quiet, QUIET[engine.state] ?? "");
    setText(this.title, failed ? "The engine failed" : "The engine is stopped");
    setText(this.reason, failed ? (engine.failure ?? "") : "Start it again here or from a cell:");
    setText(this.command, engine.command);
    this.restart.hidden = !engine.can_restart;
    if (!ended) {
      clearTimeout(this.timer);
      this.restart.disabled = false;
    }
  }

  dispose(): void {
    clearTimeout(this.timer);
  }
}
