// One view of the monitor: five bands of fixed height, painted from the traits that changed.
import { confirmButton } from "../buttons";
import { h, setText } from "../dom";
import type { Command, Message as WireMessage, MonitorState, MonitorTraits } from "../protocol";
import { Load } from "./load";
import { Memory } from "./memory";
import { Message } from "./message";
import { Prefix } from "./prefix";
import { Requests } from "./requests";

const STATE_NAMES: Record<MonitorState, string> = {
  loading: "Loading",
  running: "Running",
  idle: "Idle",
  paused: "Paused",
  unloaded: "Unloaded",
  stopped: "Stopped",
  error: "Error",
};

const LIVE: ReadonlySet<MonitorState> = new Set(["running", "idle", "paused", "unloaded"]);

export class MonitorView {
  private readonly state = h("strong", { class: "state", role: "status" });
  private readonly model = h("h3");
  private readonly about = h("p", { class: "about" });
  private readonly pauseLabel = document.createTextNode("Pause");
  private readonly pause = h("button", { type: "button", "data-do": "pause", "data-alt": "Resume" }, this.pauseLabel);
  private readonly abortAll;
  private readonly stop;
  private readonly load = new Load();
  private readonly memory = new Memory();
  private readonly prefix;
  private readonly requests;
  private readonly message;
  private painted: Partial<MonitorTraits> = {};
  readonly element: HTMLElement;

  constructor(send: (message: WireMessage) => void) {
    const ask = (command: Command) => send({ kind: "command", command });
    this.pause.addEventListener("click", () => ask(this.painted.engine?.state === "paused" ? "resume" : "pause"));
    this.abortAll = confirmButton("Abort all", "Confirm abort", () => ask("abort_all"));
    this.stop = confirmButton("Stop engine", "Confirm stop", () => ask("stop"));
    this.abortAll.element.dataset.do = "abort-all";
    this.stop.element.dataset.do = "stop";
    this.prefix = new Prefix(() => ask("clear_cache"));
    this.message = new Message(() => ask("restart"));
    this.requests = new Requests((id) => send({ kind: "abort", request_id: id }));
    this.element = h(
      "section",
      // JupyterLab's command mode would take keys pressed inside the widget
      { class: "mlx monitor", "aria-label": "Engine monitor", "data-lm-suppress-shortcuts": "true" },
      h(
        "header",
        { class: "head" },
        this.state,
        this.model,
        this.about,
        h("div", { class: "actions" }, this.pause, this.abortAll.element, this.stop.element),
      ),
      this.load.element,
      this.memory.element,
      this.prefix.element,
      h("div", { class: "requests" }, this.requests.element, this.message.element),
    );
  }

  /** Paints the bands whose trait is another object than last time. */
  update(traits: MonitorTraits): void {
    const before = this.painted;
    const { engine, load, history, memory, prefix, rows, progress, hidden_requests } = traits;
    const live = LIVE.has(engine.state);
    const stateChanged = before.engine !== engine;

    if (stateChanged) {
      this.paintHead(traits);
      this.requests.setWorkers(engine.workers);
    }
    if (stateChanged || before.load !== load) {
      this.load.update(load, live);
      this.abortAll.enable(live && load.running + load.waiting > 0);
    }
    if (before.history !== history) this.load.updateHistory(history);
    if (before.memory !== memory) this.memory.update(memory);
    if (stateChanged || before.prefix !== prefix) this.prefix.update(prefix, live);
    if (before.rows !== rows || before.progress !== progress || before.hidden_requests !== hidden_requests) {
      this.requests.update(rows, progress, hidden_requests);
    }
    this.requests.element.hidden = rows.length === 0;
    this.message.element.hidden = rows.length > 0;
    this.painted = traits;
  }

  dispose(): void {
    this.abortAll.dispose();
    this.stop.dispose();
    this.requests.dispose();
    this.message.dispose();
    this.element.remove();
  }

  private paintHead({ engine }: MonitorTraits): void {
    this.element.dataset.state = engine.state;
    setText(this.state, STATE_NAMES[engine.state]);
    setText(this.model, engine.model || "No model");
    this.model.title = engine.model;
    setText(this.about, engine.notice ?? [engine.precision, engine.backend].filter(Boolean).join(" · "));
    this.about.title = this.about.textContent ?? "";
    this.about.toggleAttribute("data-notice", engine.notice !== null);
    const paused = engine.state === "paused";
    setText(this.pauseLabel, paused ? "Resume" : "Pause");
    this.pause.dataset.alt = paused ? "Pause" : "Resume";
    this.pause.disabled = !LIVE.has(engine.state);
    this.stop.enable(engine.state !== "stopped" && engine.state !== "error");
    this.message.update(engine);
  }
}
