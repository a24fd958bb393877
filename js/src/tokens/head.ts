// Who answers, how sure it was on the whole, and the way to the places where it was not.
import { h, setText } from "../dom";
import { UNKNOWN, count, integer, percent } from "../format";
import type { AnswerBand, AnswerState, TokenFigures } from "../protocol";

const STATE_NAMES: Record<AnswerState, string> = {
  running: "Running",
  finished: "Finished",
  stopped: "Stopped",
  error: "Error",
};
const STEPS = ["≥ 90 %", "60–90", "30–60", "10–30", "< 10 %"];

export class Head {
  private readonly state = h("strong", { class: "state", role: "status" });
  private readonly title = h("h3");
  private readonly values = ["Tokens", "Mean probability", "Perplexity"].map((name) => ({
    name,
    value: h("dd"),
  }));
  private readonly previous;
  private readonly next;
  readonly element;
  readonly legend = h(
    "div",
    { class: "legend" },
    h("small", {}, "Probability"),
    h("ol", {}, ...STEPS.map((step, index) => h("li", { "data-level": index }, step))),
    h("small", {}, h("span", { "data-second": true }, "Underlined"), ": another token was likelier"),
  );

  constructor(go: (step: -1 | 1) => void) {
    const button = (label: string, name: string, step: -1 | 1) => {
      const element = h("button", { type: "button", "data-do": name, disabled: true }, label);
      element.addEventListener("click", () => go(step));
      return element;
    };
    this.previous = button("Previous uncertain", "previous", -1);
    this.next = button("Next uncertain", "next", 1);
    this.element = h(
      "header",
      { class: "head" },
      this.state,
      this.title,
      h("dl", {}, ...this.values.map(({ name, value }) => h("div", {}, h("dt", {}, name), value))),
      h("div", { class: "actions" }, this.previous, this.next),
    );
  }

  update(answer: AnswerBand, figures: TokenFigures, tokens: number): void {
    setText(this.state, STATE_NAMES[answer.state]);
    setText(this.title, answer.title || "Token probabilities");
    this.title.title = answer.title;
    const { perplexity } = figures;
    const shown = [
      integer(tokens),
      percent(figures.mean),
      perplexity === null ? UNKNOWN : perplexity < 1000 ? perplexity.toFixed(2) : count(perplexity),
    ];
    this.values.forEach(({ value }, index) => setText(value, shown[index]!));
  }

  /** Whether there is an uncertain token in either direction. */
  enable(previous: boolean, next: boolean): void {
    this.previous.disabled = !previous;
    this.next.disabled = !next;
  }
}
