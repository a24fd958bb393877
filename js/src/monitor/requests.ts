// The table of requests. Rows are kept by request id, so that focus and scroll stay where they were.
import { h, setAttribute, setText } from "../dom";
import { duration, integer, rate, UNKNOWN } from "../format";
import type { RequestPhase, RequestProgress, RequestRow } from "../protocol";

const PHASE_NAMES: Record<RequestPhase, string> = { waiting: "Waiting", prefill: "Prefill", decode: "Decode" };

/** How long a pressed Abort stays disabled when its request does not leave. */
const ABORT_MS = 3000;

class Row {
  private readonly phase = h("span");
  private readonly count = h("span");
  private readonly bar = h("progress");
  private readonly rate = h("td", { role: "cell", class: "num rate-now" });
  private readonly elapsed = h("td", { role: "cell", class: "num elapsed" });
  private readonly cached = h("td", { role: "cell", class: "num cached" });
  private readonly abort: HTMLButtonElement;
  private timer: ReturnType<typeof setTimeout> | undefined;
  readonly element: HTMLTableRowElement;

  constructor(
    private readonly request: RequestRow,
    onAbort: (id: string) => void,
  ) {
    const { id, prompt } = request;
    this.abort = h("button", { type: "button", "aria-label": `Abort ${id}` }, "Abort");
    this.abort.addEventListener("click", () => {
      this.abort.disabled = true;
      this.timer = setTimeout(() => (this.abort.disabled = false), ABORT_MS);
      onAbort(id);
    });
    this.element = h(
      "tr",
      { role: "row" },
      h("th", { role: "rowheader", scope: "row", title: id }, id),
      h("td", { role: "cell", class: "phase" }, h("div", {}, this.phase, this.count), this.bar),
      this.rate,
      this.elapsed,
      this.cached,
      h("td", { role: "cell", class: "prompt", title: prompt }, prompt),
      h("td", { role: "cell", class: "abort" }, this.abort),
    );
  }

  update({ phase, done, total, rate: now, elapsed, cached }: RequestProgress): void {
    const name = PHASE_NAMES[phase];
    setText(this.phase, name);
    setText(this.count, phase === "waiting" ? `${integer(total)} tok` : `${integer(done)} / ${integer(total)}`);
    setAttribute(this.bar, "data-phase", phase);
    setAttribute(this.bar, "aria-label", `${this.request.id} ${name.toLowerCase()}`);
    setAttribute(this.bar, "max", String(Math.max(1, total)));
    setAttribute(this.bar, "value", String(Math.min(done, Math.max(1, total))));
    setText(this.rate, rate(now));
    setText(this.elapsed, duration(elapsed));
    setText(this.cached, phase === "waiting" ? UNKNOWN : integer(cached));
  }

  dispose(): void {
    clearTimeout(this.timer);
    this.element.remove();
  }
}

function headers(): HTMLTableRowElement {
  const th = (name: string, column: string) => h("th", { role: "columnheader", scope: "col", class: column }, name);
  const action = th("", "abort");
  action.append(h("span", { class: "sr" }, "Action"));
  return h(
    "tr",
    { role: "row" },
    th("Request", "id"),
    th("Phase", "phase"),
    th("tok/s", "num"),
    th("Elapsed", "num"),
    th("Cached tok", "num cached"),
    th("Prompt", "prompt"),
    action,
  );
}

export class Requests {
  private readonly rows = new Map<string, Row>();
  private readonly body = h("tbody", { role: "rowgroup" });
  private readonly more = h("p", { class: "more", hidden: true });
  readonly element = h(
    "div",
    { class: "list", tabindex: 0, role: "group", "aria-label": "Requests" },
    h("table", { role: "table" }, h("thead", { role: "rowgroup" }, headers()), this.body),
    this.more,
  );

  constructor(private readonly onAbort: (id: string) => void) {}

  update(requests: readonly RequestRow[], progress: readonly RequestProgress[], hidden: number): void {
    const wanted = new Set(requests.map((request) => request.id));
    for (const [id, row] of this.rows) {
      if (wanted.has(id)) continue;
      row.dispose();
      this.rows.delete(id);
    }
    let place = this.body.firstElementChild;
    requests.forEach((request, index) => {
      let row = this.rows.get(request.id);
      if (!row) this.rows.set(request.id, (row = new Row(request, this.onAbort)));
      if (row.element === place) place = place.nextElementSibling;
      else this.body.insertBefore(row.element, place);
      const moving = progress[index];
      if (moving) row.update(moving);
    });
    this.more.hidden = hidden === 0;
    setText(this.more, hidden ? `and ${integer(hidden)} more` : "");
  }

  dispose(): void {
    for (const row of this.rows.values()) row.dispose();
    this.rows.clear();
  }
}
