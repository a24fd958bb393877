// The prefix cache: what it holds, what it saved, and a button that empties it.
import { h, setText } from "../dom";
import { bytes, integer, percent, UNKNOWN } from "../format";
import type { PrefixBand } from "../protocol";

export class Prefix {
  private readonly entries = h("dd", { "data-prefix": "entries" });
  private readonly size = h("dd", { "data-prefix": "size" });
  private readonly hitRate = h("dd", { "data-prefix": "hit-rate" });
  private readonly saved = h("dd", { "data-prefix": "saved" });
  private readonly clear = h("button", { type: "button", "data-do": "clear" }, "Clear cache");
  readonly element = h(
    "div",
    { class: "prefix" },
    h("h4", {}, "Prefix cache"),
    h(
      "dl",
      {},
      h("div", {}, h("dt", {}, "Entries"), this.entries),
      h("div", {}, h("dt", {}, "Size"), this.size),
      h("div", {}, h("dt", {}, "Hit rate"), this.hitRate),
      h("div", {}, h("dt", {}, "Tokens saved"), this.saved),
    ),
    this.clear,
  );

  constructor(onClear: () => void) {
    this.clear.addEventListener("click", onClear);
  }

  update(prefix: PrefixBand, live: boolean): void {
    const { enabled } = prefix;
    setText(this.entries, enabled ? integer(prefix.entries) : UNKNOWN);
    setText(this.size, enabled ? bytes(prefix.bytes) : UNKNOWN);
    setText(this.hitRate, percent(prefix.hit_rate));
    setText(this.saved, enabled ? integer(prefix.tokens_saved) : UNKNOWN);
    this.clear.disabled = !live || !enabled;
  }
}
