// The table of requests, or of a cluster's workers. Rows are kept by id, so that focus and scroll stay where they were.
import { h, setAttribute, setText } from "../dom";
import { duration, integer, rate, UNKNOWN } from "../format";
import type { RequestPhase, RequestProgress, RequestRow } from "../protocol";

const PHASE_NAMES: Record<RequestPhase, string> = { waiting: "Waiting", prefill: "Prefill", decode: "Decode" };
const WORKER_NAMES: Record<RequestPhase, string> = { waiting: "Idle", prefill: "Loading", decode: "Running" };

/** How long a pressed Abort stays disabled when its request does not leave. */
const ABORT_MS = 3000;

class Row {
  private readonly phase = h("span");
  private readonly count = h("span");
  private readonly bar = h("progress");
  private readonly rate = h("td", { role: "cell", class: "num rate-now" });
  private readonly elapsed = h("td", { role: "cell", class: "num elapsed" });
  private readonly cached = h("td", { role: "cell", class: "num cached" });
  private readonly prompt = h("td", { role: "cell", class: "prompt" });
  private readonly abort: HTMLButtonElement;
  private timer: ReturnType<typeof setTimeout> | undefined;
  readonly element: HTMLTableRowElement;

  constructor(
    private readonly request: RequestRow,
    private readonly worker: boolean,
    onAbort: (id: string) => void,
  ) {
    const { id } = request;
    this.says(request);
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
      this.prompt,
      h("td", { role: "cell", class: "abort" }, ...(worker ? [] : [this.abort])),
    );
  }

  /** Shows the prompt; or what a worker is at work on, which changes. */
  says({ prompt }: RequestRow): void {
    setText(this.prompt, prompt);
    setAttribute(this.prompt, "title", prompt);
  }

  update({ phase, done, total, rate: now, elapsed, cached }: RequestProgress): void {
    const name = (this.worker ? WORKER_NAMES : PHASE_NAMES)[phase];
    const idle = this.worker ? "" : `${integer(total)} tok`;
    setText(this.phase, name);
    setText(this.count, phase === "waiting" ? idle : `${integer(done)} / ${integer(total)}`);
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

function headers(workers: boolean): HTMLTableRowElement {
  const th = (name: string, column: string) => h("th", { role: "columnheader", scope: "col", class: column }, name);
  const action = th("", "abort");
  action.append(h("span", { class: "sr" }, "Action"));
  return h(
    "tr",
    { role: "row" },
    th(workers ? "Worker" : "Request", "id"),
    th(workers ? "Rows" : "Phase", "phase"),
    th("tok/s", "num"),
    th(workers ? "Up" : "Elapsed", "num"),
    th("Cached tok", "num cached"),
    th(workers ? "At work on" : "Prompt", "prompt"),
    action,
  );
}

export class Requests {
  private readonly rows = new Map<string, Row>();
  private readonly head = h("thead", { role: "rowgroup" }, headers(false));
  private readonly body = h("tbody", { role: "rowgroup" });
  private workers = false;
  private readonly more = h("p", { class: "more", hidden: true });
  readonly element = h(
    "div",
    { class: "list", tabindex: 0, role: "group", "aria-label": "Requests" },
    h("table", { role: "table" }, this.head, this.body),
    this.more,
  );

  constructor(private readonly onAbort: (id: string) => void) {}

  /** Says what the rows are. */
  setWorkers(workers: boolean): void {
    if (workers === this.workers) return;
    this.workers = workers;
    this.head.replaceChildren(headers(workers));
    setAttribute(this.element, "aria-label", workers ? "Workers" : "Requests");
    this.element.classList.toggle("workers", workers);
  }

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
      if (!row) this.rows.set(request.id, (row = new Row(request, this.workers, this.onAbort)));
      if (row.element === place) place = place.nextElementSibling;
      else this.body.insertBefore(row.element, place);
      if (this.workers) row.says(request);
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
