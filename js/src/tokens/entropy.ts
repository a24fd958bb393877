// A bar for each token in the order of the tokens; in a long answer one for several, with their mean.
import { h, setAttribute, setText, svg } from "../dom";
import type { TokenFigures, TokenItem } from "../protocol";

/** Bars at most. */
export const MOST_BARS = 500;
const FEWEST = 64;
const EXPLANATION = "Of the likeliest tokens and the sampled one, with all others as one: the true entropy is no lower";

export class Entropy {
  private readonly title = h("span", { title: EXPLANATION });
  private readonly figures = h("span");
  private readonly bars = svg("path", { class: "bars" });
  private readonly mark = svg("rect", { class: "active" });
  private readonly chart = svg("svg", { preserveAspectRatio: "none", role: "img" }, this.bars, this.mark);
  private readonly ceiling = h("span");
  private values: number[] = [];
  private top = 1;
  private ended = false;
  readonly element = h(
    "figure",
    { class: "entropy" },
    h("figcaption", {}, this.title, this.figures),
    this.chart as unknown as Node,
    h("small", { class: "axis", "aria-hidden": "true" }, this.ceiling, h("span", {}, "0")),
  );

  /** The most that `k` alternatives, the sampled token and the others can have: the ceiling never moves. */
  reserve(k: number): void {
    this.top = Math.ceil(Math.log2(k + 2));
    setText(this.ceiling, String(this.top));
  }

  append(tokens: readonly TokenItem[]): void {
    for (const token of tokens) this.values.push(token.bits);
  }

  update(figures: TokenFigures, ended: boolean): void {
    this.ended = ended;
    const [mean, most] = [figures.mean_bits, figures.max_bits].map((bits) => bits?.toFixed(2) ?? "–");
    setText(this.figures, `mean ${mean} · max ${most}`);
    const group = this.group;
    setText(
      this.title,
      `Entropy of the known part, bits per token${group > 1 ? `, mean of each ${group}` : ""}`,
    );
    setAttribute(this.chart, "aria-label", `Entropy of each token: mean ${mean} bits, at most ${most}`);
    this.draw();
  }

  activate(index: number | null): void {
    this.mark.toggleAttribute("hidden", index === null);
    if (index === null) return;
    const bar = Math.floor(index / this.group);
    const value = this.value(bar);
    this.place(bar, Math.max(value, this.top / 24));
  }

  /** The token under a place of the chart, 0 to 1; of several the least certain. */
  tokenAt(fraction: number): number | null {
    const bar = Math.floor(fraction * this.scale);
    const begin = bar * this.group;
    const several = this.values.slice(begin, begin + this.group);
    return several.length ? begin + several.indexOf(Math.max(...several)) : null;
  }

  get surface(): SVGSVGElement {
    return this.chart;
  }

  private get group(): number {
    return Math.max(1, Math.ceil(this.values.length / MOST_BARS));
  }

  /** Bars that fit the width: while tokens come it grows in few steps, so that the bars keep their places. */
  private get scale(): number {
    const bars = Math.ceil(this.values.length / this.group);
    return this.ended ? Math.max(1, bars) : Math.max(FEWEST, 2 ** Math.ceil(Math.log2(bars || 1)));
  }

  private value(bar: number): number {
    const several = this.values.slice(bar * this.group, (bar + 1) * this.group);
    return several.reduce((sum, bits) => sum + bits, 0) / Math.max(1, several.length);
  }

  private draw(): void {
    const { top } = this;
    const bars = Math.ceil(this.values.length / this.group);
    const path: string[] = [];
    for (let bar = 0; bar < bars; bar += 1) {
      const height = Math.round(this.value(bar) * 1000) / 1000;
      if (height > 0) path.push(`M${bar + 0.12} ${top}v${-height}h0.76v${height}z`);
    }
    setAttribute(this.chart, "viewBox", `0 0 ${this.scale} ${top}`);
    setAttribute(this.bars, "d", path.join(""));
  }

  private place(bar: number, height: number): void {
    for (const [name, value] of Object.entries({ x: bar + 0.12, y: this.top - height, width: 0.76, height })) {
      setAttribute(this.mark, name, String(value));
    }
  }
}
