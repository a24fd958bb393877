// One view of an answer's tokens: what is pointed at, reached by keys or pinned is what the card tells of.
import { h } from "../dom";
import type { Message, NewTokens, TokenItem, TokensTraits } from "../protocol";
import { Card } from "./card";
import { Entropy } from "./entropy";
import { Head } from "./head";
import { TokenText, wordBox } from "./text";
import { UNCERTAIN } from "./words";

/** Wider than this the card has a column of its own; the style sheet says the same. */
const DOCKED = 640;
const ASK_AGAIN_MS = 2000;
const KEYS: [string[], string][] = [
  [["←", "→"], "token"],
  [["↑", "↓"], "line"],
  [["P", "N"], "uncertain"],
  [["Enter"], "pin"],
  [["Esc"], "close"],
];

export class TokensView {
  readonly element: HTMLElement;
  private readonly head = new Head((step) => this.goUncertain(step));
  private readonly text = new TokenText();
  private readonly entropy = new Entropy();
  private readonly card = new Card();
  private readonly tokens: TokenItem[] = [];
  /** The uncertain ones, in order. */
  private readonly uncertain: number[] = [];
  private active: number | null = null;
  private pinned = false;
  private asked: ReturnType<typeof setTimeout> | undefined;
  private painted: Partial<TokensTraits> = {};
  private readonly resized: ResizeObserver | null;

  constructor(private readonly send: (message: Message) => void) {
    this.element = h(
      "section",
      // JupyterLab's command mode would take N, P, Enter and the arrows
      { class: "mlx tokens", "aria-label": "Token probabilities", "data-lm-suppress-shortcuts": "true" },
      this.head.element,
      this.head.legend,
      h("div", { class: "reading" }, this.text.element, this.entropy.element, this.card.element),
      h(
        "p",
        { class: "keys" },
        ...KEYS.map(([keys, what]) => h("span", {}, ...keys.flatMap((key) => [h("kbd", {}, key), " "]), what)),
      ),
    );
    this.listen();
    this.resized =
      typeof ResizeObserver === "undefined" ? null : new ResizeObserver(() => this.docked && this.card.close());
    this.resized?.observe(this.element);
    addEventListener("scroll", this.moved, true);
  }

  update(traits: TokensTraits): void {
    const { answer, tokens } = traits;
    const before = this.painted;
    if (before.answer?.k !== answer.k) {
      this.card.reserve(answer.k);
      this.entropy.reserve(answer.k);
    }
    if (before.tokens !== tokens) this.grow(0, tokens);
    this.painted = traits;
    this.paint();
  }

  receive(message: unknown): void {
    const { kind, start, tokens } = message as NewTokens;
    if (kind !== "tokens") return;
    this.grow(start, tokens);
    this.paint();
  }

  dispose(): void {
    clearTimeout(this.asked);
    removeEventListener("scroll", this.moved, true);
    this.resized?.disconnect();
    this.card.close();
    this.text.dispose();
    this.element.remove();
  }

  /** Takes tokens that follow the first `start`; a view that lacks some of those asks for all. */
  private grow(start: number, tokens: readonly TokenItem[]): void {
    const missing = start - this.tokens.length;
    if (missing > 0) {
      if (this.asked !== undefined) return;
      this.send({ kind: "tokens" });
      this.asked = setTimeout(() => (this.asked = undefined), ASK_AGAIN_MS);
      return;
    }
    const fresh = tokens.slice(-missing);
    fresh.forEach((token, index) => {
      if (token.p < UNCERTAIN) this.uncertain.push(this.tokens.length + index);
    });
    for (const token of fresh) this.tokens.push(token);
    this.text.append(fresh);
    this.entropy.append(fresh);
  }

  private paint(): void {
    const { answer, figures } = this.painted as TokensTraits;
    const over = answer.state !== "running";
    this.element.dataset.state = answer.state;
    this.text.say(over ? "No tokens" : answer.note || "…", over);
    this.head.update(answer, figures, this.tokens.length);
    this.entropy.update(figures, over);
    this.tell();
  }

  /** Brings the card, the chart's mark and the buttons up to date. */
  private tell(): void {
    const { active, tokens, uncertain } = this;
    this.entropy.activate(active);
    const here = active ?? -1;
    this.head.enable(uncertain.length > 0 && uncertain[0]! < here, uncertain.length > 0 && uncertain.at(-1)! > here);
    if (active === null) this.card.clear();
    else this.card.show(tokens[active]!, active, tokens.length);
  }

  private get docked(): boolean {
    return this.element.clientWidth > DOCKED;
  }

  private show(index: number): void {
    if (!this.tokens.length) return;
    this.active = Math.max(0, Math.min(this.tokens.length - 1, index));
    this.text.activate(this.active);
    this.tell();
    this.place();
  }

  private place(): void {
    if (this.active === null || this.docked) return;
    this.card.open(wordBox(this.text.span(this.active)), this.element.getBoundingClientRect());
  }

  private readonly moved = () => {
    if (this.card.isOpen) this.place();
  };

  private reach(index: number): void {
    this.show(index);
    if (this.active !== null) this.text.reveal(this.active);
    this.place();
  }

  private togglePin(): void {
    if (this.active === null) return;
    this.pinned = !this.pinned;
    this.text.pin(this.pinned ? this.active : null);
  }

  private close(): void {
    if (this.pinned) this.togglePin();
    this.card.close();
  }

  private goUncertain(step: -1 | 1): void {
    const here = this.active ?? -1;
    const found = step > 0 ? this.uncertain.find((at) => at > here) : this.uncertain.filter((at) => at < here).at(-1);
    if (found === undefined) return;
    this.unpin();
    this.text.element.focus({ preventScroll: true });
    this.reach(found);
  }

  private unpin(): void {
    if (this.pinned) this.togglePin();
  }

  private goLine(step: -1 | 1): void {
    const found = this.active === null ? 0 : this.text.inLine(this.active, step);
    if (found !== null) this.reach(found);
  }

  private listen(): void {
    const { text, entropy } = this;
    const step = (by: number) => this.reach(this.active === null ? 0 : this.active + by);
    const keys: Record<string, () => void> = {
      ArrowRight: () => step(1),
      ArrowLeft: () => step(-1),
      ArrowDown: () => this.goLine(1),
      ArrowUp: () => this.goLine(-1),
      Home: () => this.reach(0),
      End: () => this.reach(this.tokens.length - 1),
      n: () => this.goUncertain(1),
      p: () => this.goUncertain(-1),
      Enter: () => this.togglePin(),
      Escape: () => this.close(),
    };
    text.element.addEventListener("keydown", (event) => {
      const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!act || event.metaKey || event.ctrlKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") this.unpin();
      act();
    });
    text.element.addEventListener("focus", () => {
      // A press of the pointer says itself which token is meant.
      if (text.element.matches(":focus-visible")) this.show(this.active ?? 0);
    });
    text.element.addEventListener("blur", () => this.pinned || this.card.close());
    text.element.addEventListener("pointerover", (event) => {
      const index = text.tokenAt(event.target);
      if (index !== null && !this.pinned) this.show(index);
    });
    text.element.addEventListener("pointerleave", () => {
      if (!this.pinned && document.activeElement !== text.element) this.card.close();
    });
    text.element.addEventListener("click", (event) => {
      const index = text.tokenAt(event.target);
      if (index === null) return;
      const again = this.pinned && index === this.active;
      this.unpin();
      this.show(index);
      if (!again) this.togglePin();
    });
    entropy.surface.addEventListener("pointermove", (event) => {
      const box = entropy.surface.getBoundingClientRect();
      const index = entropy.tokenAt((event.clientX - box.left) / box.width);
      if (index !== null && !this.pinned) this.show(index);
    });
    entropy.surface.addEventListener("pointerleave", () => this.pinned || this.card.close());
  }
}
