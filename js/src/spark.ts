// Sparkline: one sample a second, the newest at the right, under a round ceiling that holds still.
import { setAttribute, svg } from "./dom";
import { HISTORY_SECONDS } from "./protocol";

export const HEIGHT = 32;
export const LAST = HISTORY_SECONDS - 1;
const FLOOR = HEIGHT - 1;

/** The least of 1, 2, 3, 5 times a power of ten that `peak` stays under. */
export function ceiling(peak: number): number {
  if (peak <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(peak));
  return power * ([1, 2, 3, 5].find((step) => peak <= step * power) ?? 10);
}

/** How far from the top a sample is drawn. */
export function heightOf(sample: number, top: number): number {
  return Math.round((FLOOR - (FLOOR - 1) * Math.min(1, sample / top)) * 10) / 10;
}

/** Runs of known samples, as "x y" points; a second nobody saw breaks the line. */
export function runs(samples: readonly (number | null)[], top: number): string[][] {
  const offset = HISTORY_SECONDS - samples.length;
  const found: string[][] = [];
  let run: string[] | null = null;
  samples.forEach((sample, index) => {
    if (sample === null) {
      run = null;
      return;
    }
    if (!run) found.push((run = []));
    run.push(`${index + offset} ${heightOf(sample, top)}`);
  });
  return found;
}

export class Spark {
  readonly element: SVGSVGElement;
  samples: readonly (number | null)[] = [];
  top = 1;
  onUpdate?: () => void;
  private readonly area = svg("path", { class: "area" });
  private readonly line = svg("path", { class: "line" });

  constructor(label: string) {
    this.element = svg(
      "svg",
      { class: "spark", viewBox: `0 0 ${LAST} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      this.area,
      svg("path", { class: "base", d: `M0 ${FLOOR + 0.5}H${LAST}` }),
      this.line,
    );
  }

  update(samples: readonly (number | null)[], peak: number): void {
    this.samples = samples;
    this.top = ceiling(peak);
    const found = runs(samples, this.top);
    const first = (run: string[]) => run[0]!.split(" ")[0]!;
    const last = (run: string[]) => run.at(-1)!.split(" ")[0]!;
    setAttribute(this.line, "d", found.map((run) => `M${run.join("L")}`).join(""));
    setAttribute(
      this.area,
      "d",
      found.map((run) => `M${first(run)} ${FLOOR}L${run.join("L")}L${last(run)} ${FLOOR}Z`).join(""),
    );
    this.onUpdate?.();
  }
}
