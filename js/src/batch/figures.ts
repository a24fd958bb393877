// Rate, time and tokens: four figures whose places and widths never depend on their values.
import { h, setText } from "../dom";
import { count, decimal, integer, rate, UNKNOWN } from "../format";
import type { JobBand, PaceBand, TokensBand } from "../protocol";
import { Spark } from "../spark";

/** A figure and its unit, alternating: ["3", "min", "20", "s"]. */
type Amount = string[];

/** Under a minute in seconds, under an hour in minutes and seconds, then in hours and minutes. */
export function span(seconds: number | null, exact = false): Amount {
  if (seconds === null) return [UNKNOWN];
  if (exact && seconds < 59.95) return [decimal(seconds), "s"];
  const whole = Math.round(seconds);
  const two = (value: number) => String(value).padStart(2, "0");
  if (whole < 60) return [integer(whole), "s"];
  if (whole < 3600) return [integer(Math.floor(whole / 60)), "min", two(whole % 60), "s"];
  return [integer(Math.floor(whole / 3600)), "h", two(Math.floor(whole / 60) % 60), "min"];
}

/** A decimal while it says something. */
function speed(value: number): string {
  return value < 100 ? rate(value) : count(Math.round(value));
}

/** Rows a second, or a minute when there is less than one in ten seconds. */
export function pace(perSecond: number | null): Amount {
  if (perSecond === null) return [UNKNOWN, "rows/s"];
  if (perSecond > 0 && perSecond < 0.1) return [decimal(perSecond * 60), "rows/min"];
  return [perSecond < 1 ? perSecond.toFixed(2) : speed(perSecond), "rows/s"];
}

class Figure {
  private readonly name = h("dt");
  private readonly value = h("dd");
  readonly element: HTMLElement;

  constructor(key: string) {
    this.element = h("div", { "data-figure": key }, this.name, this.value);
  }

  update(name: string, amount: Amount): void {
    setText(this.name, name);
    if (this.value.textContent === amount.join(" ")) return;
    const parts = amount.flatMap((part, index) => [index ? " " : "", index % 2 ? part : h("b", {}, part)]);
    this.value.replaceChildren(...parts);
  }
}

export class Figures {
  private readonly rate = new Figure("rate");
  private readonly time = new Figure("time");
  private readonly elapsed = new Figure("elapsed");
  private readonly tokens = new Figure("tokens");
  private readonly spark = new Spark("Tokens per second, last 2 minutes");
  readonly element = h(
    "dl",
    { class: "figures" },
    this.rate.element,
    this.time.element,
    this.elapsed.element,
    this.tokens.element,
  );

  constructor() {
    this.tokens.element.append(h("dd", { class: "graph" }, this.spark.element));
  }

  update(now: PaceBand, job: JobBand): void {
    const ended = job.ended !== null;
    this.rate.update(ended ? "Mean rate" : "Rate", pace(now.rows));
    if (ended) this.time.update("Ended at", [job.ended!]);
    else this.time.update("Time left", span(now.left));
    this.elapsed.update("Elapsed", span(now.elapsed, ended));
    this.tokens.update(ended ? "Mean decode" : "Decode", [now.tokens === null ? UNKNOWN : speed(now.tokens), "tok/s"]);
  }

  updateTokens({ samples, peak }: TokensBand): void {
    this.spark.update(samples, peak);
  }
}
