// One view of a DataFrame job: head, tally, figures and the last results, each of a height that never changes.
import { confirmButton } from "../buttons";
import { h, setText } from "../dom";
import type { BatchState, BatchTraits, JobAction, Message } from "../protocol";
import { Failure } from "./failure";
import { Figures } from "./figures";
import { Results } from "./results";
import { Tally } from "./tally";

const STATE_NAMES: Record<BatchState, string> = {
  running: "Running",
  paused: "Paused",
  stopped: "Stopped",
  finished: "Finished",
  error: "Failed",
};

export class BatchView {
  private readonly state = h("strong", { class: "state", role: "status" });
  private readonly title = h("h3");
  private readonly pauseLabel = document.createTextNode("Pause");
  private readonly pause = h("button", { type: "button", "data-do": "pause", "data-alt": "Resume" }, this.pauseLabel);
  private readonly stop;
  private readonly tally = new Tally();
  private readonly figures = new Figures();
  private readonly results = new Results();
  private readonly failure = new Failure();
  private painted: Partial<BatchTraits> = {};
  readonly element: HTMLElement;

  constructor(send: (message: Message) => void) {
    const ask = (action: JobAction) => send({ kind: "job", action });
    this.pause.addEventListener("click", () => ask(this.element.dataset.state === "paused" ? "resume" : "pause"));
    this.stop = confirmButton("Stop", "Confirm stop", () => ask("stop"));
    this.stop.element.dataset.do = "stop";
    this.element = h(
      "section",
      // JupyterLab's command mode would take keys pressed inside the widget
      { class: "mlx batch", "aria-label": "DataFrame job", "data-lm-suppress-shortcuts": "true" },
      h("header", { class: "head" }, this.state, this.title, h("div", { class: "actions" }, this.pause, this.stop.element)),
      this.tally.element,
      this.figures.element,
      h("div", { class: "results" }, this.results.element, this.failure.element),
    );
  }

  /** Paints the bands whose trait is another object than last time. */
  update(traits: BatchTraits): void {
    const before = this.painted;
    const { job, counts, pace, tokens, results } = traits;
    if (before.job !== job) this.paintHead(traits);
    if (before.counts !== counts) this.tally.update(counts);
    if (before.job !== job || before.pace !== pace) this.figures.update(pace, job);
    if (before.tokens !== tokens) this.figures.updateTokens(tokens);
    if (before.results !== results) this.results.update(results);
    this.painted = traits;
  }

  dispose(): void {
    this.stop.dispose();
    this.element.remove();
  }

  private paintHead({ job }: BatchTraits): void {
    const paused = job.state === "paused";
    const live = paused || job.state === "running";
    this.element.dataset.state = job.state;
    setText(this.state, STATE_NAMES[job.state]);
    setText(this.title, job.title);
    this.title.title = job.title;
    this.pauseLabel.data = paused ? "Resume" : "Pause";
    this.pause.dataset.alt = paused ? "Pause" : "Resume";
    this.pause.disabled = !live;
    this.stop.enable(live);
    this.failure.update(job);
    this.results.element.hidden = job.failure !== null;
  }
}
