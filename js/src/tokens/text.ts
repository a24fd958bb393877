// The answer, token by token: parts (reasoning, answer, calls) of pages, one active token, at most one pinned.
import { h, setText } from "../dom";
import type { ShownPart, TokenItem } from "../protocol";
import { Page } from "./page";

const HEADS: Partial<Record<ShownPart, string>> = { reasoning: "Reasoning", tool: "Tool call" };
const LINE = 32;
const NEAR_END = 8;

interface Part {
  kind: ShownPart;
  element: HTMLElement;
}

export class TokenText {
  readonly element = h("div", {
    class: "text",
    role: "listbox",
    tabindex: 0,
    "aria-label": "Answer, token by token",
    "aria-busy": "true",
  });
  private readonly note = h("p", { class: "note" });
  private readonly name = `t${Math.random().toString(36).slice(2)}-`;
  private readonly pages: Page[] = [];
  private readonly pageOf = new WeakMap<Element, Page>();
  private part: Part | null = null;
  private active: number | null = null;
  private pinned: number | null = null;
  private readonly watcher: IntersectionObserver | null;

  constructor() {
    this.element.append(this.note);
    this.watcher =
      typeof IntersectionObserver === "undefined"
        ? null
        : new IntersectionObserver((changes) => this.seen(changes), { rootMargin: "400px 0px" });
  }

  /** Adds tokens; a reader at the end stays there, one who has scrolled up is left alone. */
  append(tokens: readonly TokenItem[]): void {
    const { element } = this;
    const follows = element.scrollHeight - element.clientHeight - element.scrollTop < NEAR_END;
    for (const token of tokens) this.pageFor(token).add(token);
    if (tokens.length) {
      this.note.hidden = true;
      element.setAttribute("aria-busy", "false");
      if (follows) element.scrollTop = element.scrollHeight;
    }
  }

  /** What stands there before the first token. */
  say(note: string, over: boolean): void {
    setText(this.note, note);
    this.element.setAttribute("aria-busy", String(!this.pages.length && !over));
  }

  get length(): number {
    const last = this.pages.at(-1);
    return last ? last.first + last.length : 0;
  }

  /** The token an event happened on. */
  tokenAt(target: EventTarget | null): number | null {
    const span = target instanceof Element ? target.closest<HTMLElement>("[data-i]") : null;
    return span ? Number(span.dataset.i) : null;
  }

  /** The element of a token, which is drawn if it was not. */
  span(index: number): HTMLElement {
    const page = this.page(index);
    return page.draw()[index - page.first]!;
  }

  activate(index: number | null): void {
    if (this.active !== null && this.active < this.length) this.span(this.active).removeAttribute("data-active");
    this.active = index;
    if (index === null) {
      this.element.removeAttribute("aria-activedescendant");
      return;
    }
    const span = this.span(index);
    span.setAttribute("data-active", "");
    this.element.setAttribute("aria-activedescendant", span.id);
  }

  pin(index: number | null): void {
    if (this.pinned !== null) this.span(this.pinned).setAttribute("aria-selected", "false");
    this.pinned = index;
    if (index !== null) this.span(index).setAttribute("aria-selected", "true");
  }

  /** Scrolls within the text, never the page. */
  reveal(index: number): void {
    const [frame, box] = [this.element.getBoundingClientRect(), wordBox(this.span(index))];
    if (box.top < frame.top) this.element.scrollTop -= frame.top - box.top + LINE / 2;
    else if (box.bottom > frame.bottom) this.element.scrollTop += box.bottom - frame.bottom + LINE / 2;
  }

  /** The token nearest to `index` in the line above (-1) or below (1); null where there is none. */
  inLine(index: number, step: -1 | 1): number | null {
    const at = this.pages.indexOf(this.page(index));
    const from = wordBox(this.span(index));
    const middle = from.left + from.width / 2;
    let best: { index: number; line: number; off: number } | null = null;
    for (const page of this.pages.slice(Math.max(0, at - 1), at + 2)) {
      page.draw().forEach((span, offset) => {
        const box = wordBox(span);
        const line = (box.top - from.top) * step;
        if (line < LINE / 2) return;
        const off = Math.abs(box.left + box.width / 2 - middle);
        const nearer = best === null || line < best.line - LINE / 2 || (line < best.line + LINE / 2 && off < best.off);
        if (nearer) best = { index: page.first + offset, line, off };
      });
    }
    return (best as { index: number } | null)?.index ?? null;
  }

  dispose(): void {
    this.watcher?.disconnect();
  }

  private page(index: number): Page {
    let [low, high] = [0, this.pages.length - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.pages[middle]!.first <= index) low = middle;
      else high = middle - 1;
    }
    return this.pages[low]!;
  }

  private pageFor(token: TokenItem): Page {
    const last = this.pages.at(-1);
    // A marker stands where it was written: at the end of what came before it.
    const kind = token.part === "marker" ? (this.part?.kind ?? "answer") : token.part;
    if (this.part?.kind !== kind) this.part = this.makePart(kind);
    else if (last && !last.endsBefore(token)) return last;
    const page = new Page(this.length, (index) => this.name + index);
    this.part.element.append(page.element);
    this.pages.push(page);
    this.pageOf.set(page.element, page);
    if (this.watcher) this.watcher.observe(page.element);
    else page.draw();
    return page;
  }

  private makePart(kind: ShownPart): Part {
    const head = HEADS[kind];
    const element = h("div", { class: "part", "data-part": kind });
    if (head) {
      element.setAttribute("role", "group");
      element.setAttribute("aria-label", head);
      element.append(h("small", { "aria-hidden": "true" }, head));
    }
    this.element.append(element);
    return { kind, element };
  }

  private seen(changes: IntersectionObserverEntry[]): void {
    for (const change of changes) {
      const page = this.pageOf.get(change.target)!;
      const kept = [this.active, this.pinned].some((index) => index !== null && this.page(index) === page);
      if (change.isIntersecting) page.draw();
      else if (!kept) page.rest();
    }
  }
}

/** Where a token's word is, or its first line if it has several. */
export function wordBox(span: HTMLElement): DOMRect {
  const word = span.querySelector("b")!;
  return word.getClientRects()[0] ?? word.getBoundingClientRect();
}
