// Reads single samples off a sparkline, by mouse or by arrow keys: one tab stop, a slider that sets nothing.
import { setAttribute, svg } from "./dom";
import { HISTORY_SECONDS } from "./protocol";
import { HEIGHT, heightOf, LAST, type Spark } from "./spark";

/** What is under the pointer; `ago` in seconds, `sample` null for a second nobody saw. */
export interface Point {
  ago: number;
  sample: number | null;
}

export class Pointer {
  private readonly rule = svg("path", { class: "rule" });
  private readonly dot = svg("path", { class: "dot" });
  private ago: number | null = null;

  /** `show` gets the point to be shown, or null when there is none; `describe` puts it in words. */
  constructor(
    private readonly spark: Spark,
    private readonly describe: (point: Point) => string,
    private readonly show: (point: Point | null) => void,
  ) {
    const { element } = spark;
    element.append(this.rule, this.dot);
    const slider = { role: "slider", tabindex: 0, "aria-readonly": true, "aria-valuemin": -LAST, "aria-valuemax": 0 };
    for (const [name, value] of Object.entries(slider)) element.setAttribute(name, String(value));
    element.addEventListener("pointermove", (event) => this.move(this.under(event)));
    element.addEventListener("pointerleave", () => this.move(null));
    element.addEventListener("focus", () => this.move(this.ago ?? 0));
    element.addEventListener("blur", () => this.move(null));
    element.addEventListener("keydown", (event) => this.press(event));
    spark.onUpdate = () => this.paint();
    this.paint();
  }

  private under(event: PointerEvent): number {
    const { left, width } = this.spark.element.getBoundingClientRect();
    return clamp(Math.round(LAST * (1 - (event.clientX - left) / (width || 1))));
  }

  private press(event: KeyboardEvent): void {
    const now = this.ago ?? 0;
    const moved: Record<string, number> = {
      ArrowLeft: now + 1,
      ArrowDown: now + 1,
      ArrowRight: now - 1,
      ArrowUp: now - 1,
      PageDown: now + 10,
      PageUp: now - 10,
      Home: LAST,
      End: 0,
    };
    const ago = moved[event.key];
    if (ago === undefined) return;
    event.preventDefault();
    this.move(clamp(ago));
  }

  private move(ago: number | null): void {
    if (ago === this.ago) return;
    this.ago = ago;
    this.paint();
  }

  /** The place stays and what is under it changes, as samples move on. */
  private paint(): void {
    const ago = this.ago ?? 0;
    const point = { ago, sample: this.spark.samples.at(-1 - ago) ?? null };
    setAttribute(this.spark.element, "aria-valuenow", String(-ago));
    setAttribute(this.spark.element, "aria-valuetext", this.describe(point));
    const at = this.ago === null ? null : LAST - this.ago;
    setAttribute(this.rule, "d", at === null ? "" : `M${at} 0V${HEIGHT}`);
    // a line of no length with a round cap: a dot that the stretched picture leaves round
    const y = at === null || point.sample === null ? null : heightOf(point.sample, this.spark.top);
    setAttribute(this.dot, "d", y === null ? "" : `M${at} ${y}h0`);
    this.show(this.ago === null ? null : point);
  }
}

function clamp(ago: number): number {
  return Math.max(0, Math.min(HISTORY_SECONDS - 1, ago));
}
