// One bar that ends at the limit, at 86 % of its width; beyond the mark is room for what goes over.
import { h, setAttribute, setText } from "../dom";
import { bytes, UNKNOWN } from "../format";
import type { MemoryBand } from "../protocol";

const LIMIT_AT = 86;
const PARTS = [
  ["weights", "Weights"],
  ["kv", "KV in use"],
  ["prefix", "Prefix"],
  ["other", "Other"],
  ["pool", "MLX pool"],
] as const;

export class Memory {
  private readonly total = h("span");
  private readonly limit = document.createTextNode("");
  private readonly freeName = h("dt", {}, "Free");
  private readonly free = h("dd");
  private readonly values = new Map(PARTS.map(([key]) => [key, h("dd")]));
  private readonly segments = new Map(PARTS.map(([key]) => [key, h("span", { "data-seg": key })]));
  private readonly stack = h("div", { class: "stack", role: "img" }, ...this.segments.values());
  readonly element = h(
    "div",
    { class: "memory" },
    h("h4", {}, "Memory ", this.total),
    h(
      "dl",
      { class: "key" },
      ...PARTS.map(([key, name]) => h("div", { "data-seg": key }, h("dt", {}, name), this.values.get(key)!)),
      h("div", { "data-seg": "free" }, this.freeName, this.free),
    ),
    h("div", { class: "bar" }, this.stack, h("small", {}, h("span", {}, "Limit "), this.limit)),
  );

  update(memory: MemoryBand): void {
    const known = PARTS.some(([key]) => memory[key] !== null);
    const used = PARTS.reduce((sum, [key]) => sum + (memory[key] ?? 0), 0);
    const scale = LIMIT_AT / (memory.limit ?? (used || 1));
    for (const [key] of PARTS) {
      const segment = this.segments.get(key)!;
      setText(this.values.get(key)!, bytes(memory[key]));
      segment.hidden = !memory[key];
      segment.style.setProperty("--v", ((memory[key] ?? 0) * scale).toFixed(2));
    }
    const free = memory.limit === null || !known ? null : memory.limit - used;
    const over = free !== null && free < 0;
    setText(this.freeName, over ? "Over" : "Free");
    setText(this.free, bytes(free === null ? null : Math.abs(free)));
    setText(this.total, `${known ? amount(used, memory.limit) : UNKNOWN} of ${bytes(memory.limit)}`);
    setText(this.limit, bytes(memory.limit));
    this.element.toggleAttribute("data-over", over);
    setAttribute(this.stack, "aria-label", this.describe(memory, free, over));
  }

  private describe(memory: MemoryBand, free: number | null, over: boolean): string {
    const parts = PARTS.map(([key, name]) => `${name} ${bytes(memory[key])}`);
    return `Memory: ${parts.join(", ")}, ${over ? "over" : "free"} ${bytes(free === null ? null : Math.abs(free))}, limit ${bytes(memory.limit)}`;
  }
}

/** "8.6 of 27.0 GB": the unit is said once when both share it. */
function amount(used: number, limit: number | null): string {
  const text = bytes(used);
  const unit = text.slice(-3);
  return bytes(limit).endsWith(unit) ? text.slice(0, -3) : text;
}
