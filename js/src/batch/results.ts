// The rows that ended last, the newest first. Five have their place from the beginning; more scroll.
import { h, setAttribute, setText } from "../dom";
import type { RowOutcome, RowResult } from "../protocol";

const RESERVED = 5;
const WORDS: Record<RowOutcome, string> = {
  done: "Done",
  cut: "Cut",
  failed: "Failed",
  skipped: "Skipped",
};

class Row {
  private readonly label = h("th", { role: "rowheader", scope: "row" });
  private readonly prompt = h("td", { role: "cell", class: "input" });
  private readonly answer = h("td", { role: "cell", class: "output" });
  private readonly outcome = h("td", { role: "cell", class: "outcome" });
  readonly element = h("tr", { role: "row" }, this.label, this.prompt, this.answer, this.outcome);

  update(result: RowResult | undefined): void {
    const { row, prompt, answer, outcome } = result ?? { row: "", prompt: "", answer: "", outcome: undefined };
    show(this.label, row);
    show(this.prompt, result && !prompt ? "(empty)" : prompt);
    show(this.answer, answer);
    setText(this.outcome, outcome ? WORDS[outcome] : "");
    setAttribute(this.element, "data-outcome", outcome ?? "");
    this.element.toggleAttribute("aria-hidden", false);
    if (!result) this.element.setAttribute("aria-hidden", "true");
  }
}

function show(cell: HTMLElement, text: string): void {
  setText(cell, text);
  cell.title = text;
}

export class Results {
  private readonly rows: Row[] = [];
  private readonly body = h("tbody", { role: "rowgroup" });
  private results: readonly RowResult[] = [];
  private readonly list: HTMLElement;
  readonly element: HTMLElement;

  constructor() {
    const th = (name: string, column: string) => h("th", { role: "columnheader", scope: "col", class: column }, name);
    this.list = h(
      "div",
      { class: "list", tabindex: 0, role: "group", "aria-label": "Last results" },
      h(
        "table",
        { role: "table", "aria-label": "Last results" },
        h(
          "thead",
          { role: "rowgroup" },
          h("tr", { role: "row" }, th("Row", ""), th("Input", "input"), th("Output", "output"), th("State", "outcome")),
        ),
        this.body,
      ),
    );
    // Whoever scrolled down reads: rows stand still for them until they are back at the top.
    this.list.addEventListener("scroll", () => this.paint());
    this.element = h("div", { class: "last" }, h("h4", {}, "Last results"), this.list);
  }

  update(results: readonly RowResult[]): void {
    this.results = results;
    this.paint();
  }

  private paint(): void {
    if (this.list.scrollTop > 0) return;
    const wanted = Math.max(RESERVED, this.results.length);
    while (this.rows.length > wanted) this.rows.pop()!.element.remove();
    while (this.rows.length < wanted) {
      const row = new Row();
      this.rows.push(row);
      this.body.append(row.element);
    }
    this.rows.forEach((row, index) => row.update(this.results[index]));
  }
}
