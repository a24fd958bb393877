// How many rows there are of each outcome: a count, a percentage, and one bar of segments with its key.
import { h, setAttribute, setText } from "../dom";
import { integer } from "../format";
import type { CountsBand } from "../protocol";

const PARTS = [
  ["done", "Done"],
  ["failed", "Failed"],
  ["skipped", "Skipped"],
  ["running", "Running"],
] as const;

type Part = (typeof PARTS)[number][0];

/** The least width of a segment, in percent of the bar: one failed row in a million is still seen. */
const LEAST = 0.5;

/** Widths in percent, each segment visible; what the small ones gain, the widest gives. */
export function widths(counts: Record<Part, number>, total: number): Record<Part, number> {
  const shares = PARTS.map(([key]) => (counts[key] ? Math.max(LEAST, (counts[key] / total) * 100) : 0));
  const over = Math.max(0, shares.reduce((sum, share) => sum + share, 0) - 100);
  const widest = shares.indexOf(Math.max(...shares));
  return Object.fromEntries(
    PARTS.map(([key], index) => [key, shares[index]! - (index === widest ? over : 0)]),
  ) as Record<Part, number>;
}

/** Rounded down, so that 100 % means all of them. */
export function percentage(handled: number, total: number): string {
  return `${total ? Math.floor((handled / total) * 100) : 100} %`;
}

export class Tally {
  private readonly handled = h("b", { class: "handled" });
  private readonly total = h("b");
  private readonly also = h("p", { class: "also" });
  private readonly percent = h("p", { class: "percent" });
  private readonly segments = new Map(PARTS.map(([key]) => [key, h("span", { "data-seg": key })]));
  private readonly values = new Map(PARTS.map(([key]) => [key, h("dd")]));
  private readonly left = h("dd");
  private readonly stack = h("div", { class: "stack", role: "img" }, ...this.segments.values());
  readonly element = h(
    "div",
    { class: "tally" },
    h("p", { class: "rows" }, this.handled, " of ", this.total, " rows"),
    this.also,
    this.percent,
    this.stack,
    h(
      "dl",
      { class: "key" },
      ...PARTS.map(([key, name]) => h("div", { "data-seg": key }, h("dt", {}, name), this.values.get(key)!)),
      h("div", { "data-seg": "left" }, h("dt", {}, "Left"), this.left),
    ),
  );

  update(counts: CountsBand): void {
    const { total, done, failed, skipped, running } = counts;
    const handled = done + failed + skipped;
    const left = Math.max(0, total - handled - running);
    const shares = widths(counts, total);
    setText(this.handled, integer(handled));
    this.handled.dataset.widest = integer(total);
    setText(this.total, integer(total));
    setText(this.also, besides(counts));
    this.also.title = this.also.textContent;
    setText(this.percent, percentage(handled, total));
    for (const [key] of PARTS) {
      const segment = this.segments.get(key)!;
      segment.hidden = !counts[key];
      segment.style.setProperty("--v", shares[key].toFixed(2));
      setText(this.values.get(key)!, integer(counts[key]));
    }
    setText(this.left, integer(left));
    const parts = PARTS.map(([key, name]) => `${integer(counts[key])} ${name.toLowerCase()}`);
    setAttribute(
      this.stack,
      "aria-label",
      `${parts.join(", ")}, ${integer(left)} left, of ${integer(total)} rows`,
    );
  }
}

function besides({ cut, reused }: CountsBand): string {
  const parts = [];
  if (reused) parts.push(`${integer(reused)} from before`);
  if (cut) parts.push(`${integer(cut)} cut at max_tokens`);
  return parts.join(" · ");
}
