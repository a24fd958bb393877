// What might have stood in a token's place. Wide: a column of its own. Narrow: a popover beside the token.
import { h, setText } from "../dom";
import { UNKNOWN, integer } from "../format";
import type { TokenItem } from "../protocol";
import { share, visible } from "./words";

const GAP = 8;
/** Rows that show at once; more scroll. */
const ROWS = 10;
const HINT = "Point at a token, or use the arrow keys";

export class Card {
  readonly element = h("div", { class: "card", popover: "manual", role: "group", "aria-label": "Alternatives" });
  private readonly text = h("code");
  private readonly p = h("strong");
  private readonly rank = h("small");
  private readonly position = h("small");
  private readonly list = h("ol");
  private readonly other = h("span");
  private readonly bits = h("span");
  private rows: HTMLElement[] = [];

  constructor() {
    this.element.append(
      h("header", {}, this.text, this.p, this.rank, this.position),
      this.list,
      h("footer", {}, this.other, this.bits),
    );
    this.clear();
  }

  /** Keeps room for `k` alternatives and a token that is none of them, so that the card never resizes. */
  reserve(k: number): void {
    this.element.style.setProperty("--rows", String(Math.min(k + 1, ROWS)));
    if (k + 1 > ROWS) this.list.tabIndex = 0;
  }

  clear(): void {
    setText(this.text, "");
    setText(this.p, "");
    setText(this.rank, HINT);
    setText(this.position, "");
    setText(this.other, "");
    setText(this.bits, "");
    this.fill([]);
  }

  show(token: TokenItem, index: number, count: number): void {
    setText(this.text, visible(token.text));
    setText(this.p, share(token.p));
    setText(this.rank, describe(token));
    setText(this.position, `${integer(index + 1)} of ${integer(count)}`);
    const known = token.top.map((one, at) => ({ ...one, chosen: at + 1 === token.rank }));
    if (token.rank === null) known.push({ text: token.text, p: token.p, chosen: true });
    this.fill(known);
    const rest = 1 - known.reduce((sum, one) => sum + one.p, 0);
    setText(this.other, `All others ${share(Math.max(0, rest))}`);
    setText(this.bits, `Entropy ≥ ${token.bits.toFixed(2)} bits`);
  }

  /** Opens the popover, where the card has no column: below the word, or above it where there is no room. */
  open(word: DOMRect, frame: DOMRect): void {
    if (!this.isOpen) this.element.showPopover?.();
    const { offsetWidth: width, offsetHeight: height, style } = this.element;
    const below = word.bottom + GAP;
    const fits = below + height <= innerHeight || word.top - GAP - height < 0;
    style.left = `${Math.max(frame.left + GAP, Math.min(word.left, frame.right - width - GAP))}px`;
    style.top = `${fits ? below : word.top - GAP - height}px`;
  }

  close(): void {
    if (this.isOpen) this.element.hidePopover?.();
  }

  get isOpen(): boolean {
    return typeof this.element.showPopover === "function" && this.element.matches(":popover-open");
  }

  private fill(known: { text: string; p: number; chosen: boolean }[]): void {
    while (this.rows.length < known.length) {
      const row = h("li", {}, h("code"), h("i"), h("span"));
      this.rows.push(row);
      this.list.append(row);
    }
    this.rows.forEach((row, at) => {
      const one = known[at];
      row.hidden = !one;
      if (!one) return;
      const [text, bar, value] = row.children as unknown as [HTMLElement, HTMLElement, HTMLElement];
      row.toggleAttribute("data-chosen", one.chosen);
      setText(text, visible(one.text));
      text.title = one.text;
      bar.style.setProperty("--v", String(one.p * 100));
      setText(value, share(one.p));
    });
  }
}

function describe(token: TokenItem): string {
  if (token.part === "marker") return `Marker, rank ${token.rank ?? UNKNOWN}`;
  if (!token.text) return "Part of a character";
  if (token.rank === 1) return "Sampled, most likely";
  if (token.rank !== null) return `Sampled, rank ${token.rank}`;
  return token.top.length ? `Sampled, not among the ${token.top.length} likeliest` : "Sampled";
}
