// A stretch of an answer that is drawn only while it can be seen; until then it is plain text of the same height.
import { h } from "../dom";
import type { TokenItem } from "../protocol";
import { wordElement } from "./words";

/** From here on a page ends at the next line break, where nobody sees that it does … */
const ENOUGH = 128;
/** … or at the next space. */
const MOST = 1024;

export class Page {
  readonly element = h("div", { class: "page" });
  private readonly tokens: TokenItem[] = [];
  private spans: HTMLElement[] | null = null;

  constructor(
    readonly first: number,
    private readonly idOf: (index: number) => string,
  ) {}

  get length(): number {
    return this.tokens.length;
  }

  /** Whether the token that comes next belongs to another page. */
  endsBefore(next: TokenItem): boolean {
    const last = this.tokens.at(-1);
    if (!last || this.length < ENOUGH) return false;
    return last.text.endsWith("\n") || (this.length >= MOST && next.text.startsWith(" "));
  }

  add(token: TokenItem): void {
    this.tokens.push(token);
    if (this.spans) this.drawOne(this.spans, token);
    else if (token.part !== "marker") this.element.append(token.text);
  }

  /** The elements of its tokens. */
  draw(): HTMLElement[] {
    if (!this.spans) {
      this.element.replaceChildren();
      const spans: HTMLElement[] = (this.spans = []);
      for (const token of this.tokens) this.drawOne(spans, token);
    }
    return this.spans;
  }

  /** Back to plain text. */
  rest(): void {
    if (!this.spans) return;
    this.spans = null;
    this.element.textContent = this.tokens.map((token) => (token.part === "marker" ? "" : token.text)).join("");
  }

  private drawOne(spans: HTMLElement[], token: TokenItem): void {
    const index = this.first + spans.length;
    const span = wordElement(token, this.idOf(index), index);
    spans.push(span);
    this.element.append(span);
  }
}
