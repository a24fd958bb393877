// Rates with their sparklines, the three counts, and how full the batch is.
import { h, setAttribute, setText } from "../dom";
import { count, integer, rate, UNKNOWN } from "../format";
import { Pointer, type Point } from "../pointer";
import type { HistoryBand, LoadBand } from "../protocol";
import { Spark } from "../spark";

const UNIT = "tok/s";
/** More slots than this are one plain bar: single boxes would be too small to count. */
const MAX_BOXES = 32;
/** So many boxes stand beside each other; with more there are two lines of them. */
const BOXES_A_LINE = 16;

/** A figure and its past. While a moment of the past is pointed at, the figure is that moment's. */
class Rate {
  private readonly value = h("p", { class: "value" });
  private readonly unit = h("span", {}, UNIT);
  private readonly spark: Spark;
  private now = UNKNOWN;
  private point: Point | null = null;
  readonly element: HTMLElement;

  constructor(name: string) {
    this.spark = new Spark(`${name} rate, last 2 minutes`);
    new Pointer(
      this.spark,
      ({ sample, ago }) => `${rate(sample)} tokens per second, ${ago ? `${ago} seconds ago` : "now"}`,
      (point) => {
        this.point = point;
        this.paint();
      },
    );
    this.element = h(
      "figure",
      { class: "rate", "data-rate": name.toLowerCase() },
      h("figcaption", {}, h("span", {}, name), this.unit),
      this.value,
      this.spark.element,
    );
  }

  update(now: string): void {
    this.now = now;
    this.paint();
  }

  updateHistory(samples: HistoryBand["decode"], peak: number): void {
    this.spark.update(samples, peak);
  }

  private paint(): void {
    setText(this.value, this.point ? rate(this.point.sample) : this.now);
    setText(this.unit, !this.point ? UNIT : this.point.ago ? `${this.point.ago} s ago` : "now");
    this.element?.toggleAttribute("data-past", this.point !== null);
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
    this.decode.update(live ? rate(load.decode) : UNKNOWN);
    this.prefill.update(live ? rate(load.prefill) : UNKNOWN);
    this.running.update(load.running);
    this.waiting.update(load.waiting);
    this.finished.update(load.finished);
    this.updateSlots(load.running, load.slots);
  }

  updateHistory(history: HistoryBand): void {
    this.decode.updateHistory(history.decode, history.decode_peak);
    this.prefill.updateHistory(history.prefill, history.prefill_peak);
  }

  private updateSlots(running: number, slots: number | null): void {
    setText(this.used, `${integer(running)} / ${slots === null ? UNKNOWN : integer(slots)}`);
    setAttribute(this.boxes, "aria-label", `${running} of ${slots ?? "an unknown number of"} batch slots used`);
    const boxed = slots !== null && slots <= MAX_BOXES;
    const wanted = boxed ? slots : 1;
    const lines = wanted > BOXES_A_LINE ? 2 : 1;
    this.boxes.toggleAttribute("data-lines", lines > 1);
    this.boxes.style.setProperty("--columns", String(Math.ceil(wanted / lines)));
    while (this.boxes.childElementCount > wanted) this.boxes.lastElementChild!.remove();
    while (this.boxes.childElementCount < wanted) this.boxes.append(h("i"));
    [...this.boxes.children].forEach((box, index) => {
      const share = boxed ? Number(index < running) : Math.min(1, running / (slots ?? Infinity));
      (box as HTMLElement).style.setProperty("--share", String(share));
    });
  }
}
