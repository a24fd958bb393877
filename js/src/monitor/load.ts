// Rates with their sparklines, the three counts, and how full the batch is.
import { h, setAttribute, setText } from "../dom";
import { count, integer, rate, UNKNOWN } from "../format";
import type { HistoryBand, LoadBand } from "../protocol";
import { Spark } from "../spark";

/** More slots than this are one plain bar: single boxes would be too small to count. */
const MAX_BOXES = 32;
/** So many boxes stand beside each other; with more there are two lines of them. */
const BOXES_A_LINE = 16;

class Rate {
  readonly value = h("p", { class: "value" });
  readonly spark: Spark;
  readonly element: HTMLElement;

  constructor(name: string) {
    this.spark = new Spark(`${name} rate, last 2 minutes`);
    this.element = h(
      "figure",
      { class: "rate", "data-rate": name.toLowerCase() },
      h("figcaption", {}, h("span", {}, name), h("span", {}, "tok/s")),
      this.value,
      this.spark.element,
    );
  }
}

class Count {
  private readonly value = h("dd", { class: "value" });
  readonly element: HTMLElement;

  constructor(name: string) {
    this.element = h("div", {}, h("dt", {}, name), this.value);
  }

  update(value: number): void {
    setText(this.value, count(value));
    this.value.title = integer(value);
  }
}

export class Load {
  private readonly decode = new Rate("Decode");
  private readonly prefill = new Rate("Prefill");
  private readonly running = new Count("Running");
  private readonly waiting = new Count("Waiting");
  private readonly finished = new Count("Finished");
  private readonly used = h("p", { class: "value" });
  private readonly boxes = h("div", { role: "img" });
  readonly element = h(
    "div",
    { class: "rates" },
    this.decode.element,
    this.prefill.element,
    h("dl", { class: "counts" }, this.running.element, this.waiting.element, this.finished.element),
    h("div", { class: "slots" }, h("small", {}, "Batch slots"), this.used, this.boxes),
  );

  update(load: LoadBand, live: boolean): void {
    setText(this.decode.value, live ? rate(load.decode) : UNKNOWN);
    setText(this.prefill.value, live ? rate(load.prefill) : UNKNOWN);
    this.running.update(load.running);
    this.waiting.update(load.waiting);
    this.finished.update(load.finished);
    this.updateSlots(load.running, load.slots);
  }

  updateHistory(history: HistoryBand): void {
    this.decode.spark.update(history.decode, history.decode_peak);
    this.prefill.spark.update(history.prefill, history.prefill_peak);
  }

  private updateSlots(running: number, slots: number | null): void {
    setText(this.used, `${integer(running)} / ${slots === null ? UNKNOWN : integer(slots)}`);
    setAttribute(this.boxes, "aria-label", `${running} of ${slots ?? "an unknown number of"} batch slots used`);
    const boxed = slots !== null && slots <= MAX_BOXES;
    const wanted = boxed ? slots : 1;
    const lines = wanted > BOXES_A_LINE ? 2 : 1;
    this.boxes.style.setProperty("--columns", String(Math.ceil(wanted / lines)));
    while (this.boxes.childElementCount > wanted) this.boxes.lastElementChild!.remove();
    while (this.boxes.childElementCount < wanted) this.boxes.append(h("i"));
    [...this.boxes.children].forEach((box, index) => {
      const share = boxed ? Number(index < running) : Math.min(1, running / (slots ?? Infinity));
      (box as HTMLElement).style.setProperty("--share", String(share));
    });
  }
}
