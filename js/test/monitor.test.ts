import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import monitor from "../src/monitor";
import type { MonitorState, MonitorTraits } from "../src/protocol";
import { FakeModel, fixture, mount } from "./fixture";

let model: FakeModel;
let el: HTMLElement;
let cleanUp: () => void;

beforeEach(() => {
  ({ model, el, cleanUp } = mount());
});
afterEach(() => {
  cleanUp();
  el.remove();
  vi.useRealTimers();
});

const one = <E extends Element = HTMLElement>(selector: string) => el.querySelector<E>(selector)!;
const text = (selector: string) => one(selector).textContent;
const button = (selector: string) => one<HTMLButtonElement>(`button${selector}`);
const ids = () => [...el.querySelectorAll("tbody th")].map((cell) => cell.textContent);
const engine = (changes: Partial<MonitorTraits["engine"]>) =>
  model.set({ engine: { ...fixture.traits.engine, ...changes } });
const inState = (state: MonitorState) =>
  model.set({ engine: { ...fixture.traits.engine, state }, rows: [], progress: [] });

describe("workers of a cluster", () => {
  test("a row each, named as what they are, without an Abort", () => {
    model.set({
      engine: { ...fixture.traits.engine, workers: true },
      rows: [
        { id: "127.0.0.1:40001", prompt: "2 partitions, 8 running" },
        { id: "127.0.0.1:40002", prompt: "nothing" },
      ],
      progress: [
        { phase: "decode", done: 40, total: 200, rate: 91.5, elapsed: 61, cached: 12 },
        { phase: "waiting", done: 0, total: 0, rate: null, elapsed: 61, cached: 0 },
      ],
    });
    expect([...el.querySelectorAll("thead th")].map((cell) => cell.textContent)).toEqual([
      "Worker", "Rows", "tok/s", "Up", "Cached tok", "At work on", "Action",
    ]);
    expect(ids()).toEqual(["127.0.0.1:40001", "127.0.0.1:40002"]);
    expect([...el.querySelectorAll("td.phase div")].map((cell) => cell.textContent)).toEqual(["Running40 / 200", "Idle"]);
    expect(el.querySelector("tbody button")).toBeNull();
    model.set({ rows: [{ id: "127.0.0.1:40001", prompt: "1 partition" }, { id: "127.0.0.1:40002", prompt: "nothing" }] });
    expect(text("td.prompt")).toBe("1 partition");
    expect(one(".list").getAttribute("aria-label")).toBe("Workers");
  });
});

describe("rendering", () => {
  test("head, rates, counts and slots", () => {
    expect(one(".monitor").dataset.state).toBe("running");
    expect(text(".state")).toBe("Running");
    expect(text("h3")).toBe("Qwen3-8B-Instruct");
    expect(text(".about")).toBe("4-bit · MLX 0.32, Metal");
    expect(text('[data-rate="decode"] .value')).toBe("214.6");
    expect(text('[data-rate="prefill"] .value')).toBe("1,842");
    expect([...el.querySelectorAll(".counts dd")].map((dd) => dd.textContent)).toEqual(["2", "1", "131"]);
    expect(text(".slots .value")).toBe("2 / 8");
    expect(el.querySelectorAll(".slots i")).toHaveLength(8);
  });

  test("memory adds up to what is used", () => {
    expect(text("h4 span")).toBe("8.7 of 27.0 GB");
    expect(text('.key [data-seg="kv"] dd')).toBe("2.3 GB");
    expect(text('.key [data-seg="free"] dd')).toBe("18.3 GB");
    const widths = [...el.querySelectorAll<HTMLElement>(".stack [data-seg]")].map((part) =>
      Number(part.style.getPropertyValue("--v")),
    );
    expect(widths.reduce((sum, width) => sum + width)).toBeCloseTo((8.7 / 27) * 86, 1);
  });

  test("memory over the limit says by how much", () => {
    model.set({ memory: { ...fixture.traits.memory, kv: 22_000_000_000 } });
    expect(text('.key [data-seg="free"]')).toBe("Over1.4 GB");
    expect(one(".memory").hasAttribute("data-over")).toBe(true);
  });

  test("what the engine does not know is a dash", () => {
    model.set({ memory: { weights: null, kv: null, prefix: null, other: null, pool: null, limit: null } });
    expect(text("h4 span")).toBe("– of –");
    expect(text('.key [data-seg="free"] dd')).toBe("–");
  });

  test("prefix cache, and none", () => {
    expect([...el.querySelectorAll(".prefix dd")].map((dd) => dd.textContent)).toEqual([
      "42",
      "1.1 GB",
      "68 %",
      "118,204",
    ]);
    model.set({ prefix: { enabled: false, entries: 0, bytes: null, hit_rate: null, tokens_saved: 0 } });
    expect([...el.querySelectorAll(".prefix dd")].map((dd) => dd.textContent)).toEqual(["–", "–", "–", "–"]);
    expect(button('[data-do="clear"]').disabled).toBe(true);
  });

  test("a row for each request", () => {
    expect(ids()).toEqual(["7f3a", "c12e", "e5d0"]);
    expect([...el.querySelectorAll("tbody .phase div")].map((div) => div.textContent)).toEqual([
      "Decode312 / 1,024",
      "Prefill5,120 / 8,192",
      "Waiting40 tok",
    ]);
    expect([...el.querySelectorAll("tbody .rate-now")].map((cell) => cell.textContent)).toEqual(["61.8", "1,842", "–"]);
    expect(one<HTMLProgressElement>("progress").getAttribute("value")).toBe("312");
  });

  test("more slots than can be counted are one bar", () => {
    model.set({ load: { ...fixture.traits.load, slots: 32, running: 16 } });
    expect(el.querySelectorAll(".slots i")).toHaveLength(32);
    model.set({ load: { ...fixture.traits.load, slots: 64, running: 16 } });
    expect(el.querySelectorAll(".slots i")).toHaveLength(1);
    expect(one(".slots i").style.getPropertyValue("--share")).toBe("0.25");
  });

  test("requests beyond the list are counted", () => {
    model.set({ hidden_requests: 1200 });
    expect(text(".more")).toBe("and 1,200 more");
  });
});

describe("states", () => {
  test.each([
    ["idle", "Idle", "No requests. The engine is ready."],
    ["loading", "Loading", "Loading the model …"],
    ["paused", "Paused", "No requests. New ones wait until you resume."],
    ["unloaded", "Unloaded", "The model is not in memory. The next request loads it."],
  ] as const)("%s", (state, word, message) => {
    inState(state);
    expect(text(".state")).toBe(word);
    expect(text(".empty")).toBe(message);
    expect(one(".list").hidden).toBe(true);
  });

  test("stopped shows the command that starts it again", () => {
    inState("stopped");
    expect(text(".ended strong")).toBe("The engine is stopped");
    expect(text(".ended code")).toBe("%mlx_engine start Qwen3-8B-Instruct");
    expect(text('[data-rate="decode"] .value')).toBe("–");
    for (const name of ["pause", "abort-all", "stop", "clear"]) expect(button(`[data-do="${name}"]`).disabled).toBe(true);
  });

  test("error shows the reason", () => {
    model.set({
      engine: { ...fixture.traits.engine, state: "error", failure: "Metal ran out of memory" },
      rows: [],
      progress: [],
    });
    expect(text(".ended strong")).toBe("The engine failed");
    expect(text(".ended .reason")).toBe("Metal ran out of memory");
  });

  test("a button that failed says why in the head", () => {
    engine({ notice: "the cache is busy" });
    expect(text(".about")).toBe("the cache is busy");
    engine({ notice: null });
    expect(text(".about")).toBe("4-bit · MLX 0.32, Metal");
  });

  test.each([["paused", "Resume"], ["idle", "Pause"], ["unloaded", "Pause"]] as const)("%s offers %s", (state, label) => {
    inState(state);
    expect([...el.querySelectorAll(".head button")].map((b) => b.textContent)).toEqual([label, "Abort all", "Stop engine"]);
    expect(button('[data-do="pause"]').disabled).toBe(false);
  });

  test("a paused engine still shows what runs, and lets it be aborted", () => {
    engine({ state: "paused" });
    expect(text(".state")).toBe("Paused");
    expect(text('[data-rate="decode"] .value')).toBe("214.6");
    expect(button('[data-do="abort-all"]').disabled).toBe(false);
  });

  test("an engine that can't be restarted offers no button for it", () => {
    engine({ state: "stopped", can_restart: true });
    expect(button('[data-do="restart"]').hidden).toBe(false);
    engine({ state: "stopped", can_restart: false });
    expect(button('[data-do="restart"]').hidden).toBe(true);
  });

  test("a pressed restart is disabled, and back when the engine doesn't come up", () => {
    vi.useFakeTimers();
    engine({ state: "error", can_restart: true });
    const restart = button('[data-do="restart"]');
    restart.click();
    expect(restart.disabled).toBe(true);
    vi.advanceTimersByTime(3000);
    expect(restart.disabled).toBe(false);
  });
});

describe("requests", () => {
  test("keep their row, and with it the focus, while others come and go", () => {
    const [, second] = fixture.traits.rows;
    const [, moving] = fixture.traits.progress;
    const abort = button('[aria-label="Abort c12e"]');
    abort.focus();
    model.set({
      rows: [{ id: "new1", prompt: "first" }, second!],
      progress: [fixture.traits.progress[0]!, moving!],
    });
    expect(ids()).toEqual(["new1", "c12e"]);
    expect(button('[aria-label="Abort c12e"]')).toBe(abort);
    expect(document.activeElement).toBe(abort);
  });

  test("a pressed abort is disabled, and back when the request stays", () => {
    vi.useFakeTimers();
    const abort = button('[aria-label="Abort 7f3a"]');
    abort.click();
    expect(abort.disabled).toBe(true);
    vi.advanceTimersByTime(3000);
    expect(abort.disabled).toBe(false);
  });

  test("10,000 of them leave nothing behind", () => {
    for (let index = 0; index < 10_000; index += 100) {
      const rows = Array.from({ length: 100 }, (_, i) => ({ id: `r${index + i}`, prompt: "p" }));
      model.set({ rows, progress: rows.map(() => fixture.traits.progress[0]!) });
    }
    expect(el.querySelectorAll("tbody tr")).toHaveLength(100);
    model.set({ rows: [], progress: [] });
    expect(el.querySelectorAll("tbody tr")).toHaveLength(0);
  });
});

describe("escaping", () => {
  const evil = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>';

  test("data is text everywhere", () => {
    const count = el.querySelectorAll("*").length;
    model.set({
      engine: {
        state: "running",
        model: evil,
        precision: evil,
        backend: evil,
        failure: evil,
        command: evil,
        can_restart: true,
        notice: evil,
        workers: false,
      },
      rows: fixture.traits.rows.map((row) => ({ id: row.id + evil, prompt: evil })),
    });
    expect(el.querySelectorAll("*")).toHaveLength(count);
    expect(el.querySelector("img, script")).toBeNull();
    expect(text("h3")).toBe(evil);
    expect(text("tbody .prompt")).toBe(evil);
  });
});

describe("two steps", () => {
  test("an armed button disarms after three seconds, in the same place and width", () => {
    vi.useFakeTimers();
    const stop = button('[data-do="stop"]');
    stop.click();
    expect([stop.textContent, stop.dataset.alt, stop.hasAttribute("data-armed")]).toEqual([
      "Confirm stop",
      "Stop engine",
      true,
    ]);
    vi.advanceTimersByTime(3000);
    expect([stop.textContent, stop.dataset.alt, stop.hasAttribute("data-armed")]).toEqual([
      "Stop engine",
      "Confirm stop",
      false,
    ]);
    stop.click();
    expect(model.sent.filter((message) => message.kind === "command")).toEqual([]);
  });

  test("abort all is disabled and disarmed when nothing is left to abort", () => {
    button('[data-do="abort-all"]').click();
    model.set({ load: { ...fixture.traits.load, running: 0, waiting: 0 } });
    expect(button('[data-do="abort-all"]').disabled).toBe(true);
    expect(text('[data-do="abort-all"]')).toBe("Abort all");
  });
});

describe("views", () => {
  const views = () => model.sent.filter((message) => message.kind === "view");

  test("two views of one model agree", () => {
    const other = document.createElement("div");
    const close = monitor.render({ model, el: other });
    model.set({ load: { ...fixture.traits.load, finished: 500 } });
    expect(other.innerHTML).toBe(el.innerHTML);
    expect(new Set(views().map((message) => message.view)).size).toBe(2);
    close();
  });

  test("a hidden page says that nobody looks", () => {
    const visibility = vi.spyOn(document, "visibilityState", "get");
    visibility.mockReturnValue("hidden");
    document.dispatchEvent(new Event("visibilitychange"));
    visibility.mockReturnValue("visible");
    document.dispatchEvent(new Event("visibilitychange"));
    expect(views().map((message) => message.open)).toEqual([true, false, true]);
    expect(views().map((message) => message.order)).toEqual([1, 2, 3]);
    visibility.mockRestore();
  });

  test("an open view says so again, as its first message may wait behind a busy cell", () => {
    cleanUp();
    vi.useFakeTimers();
    model = new FakeModel(fixture.traits);
    cleanUp = monitor.render({ model, el });
    vi.advanceTimersByTime(10_000);
    expect(views().map(({ order, open }) => [order, open])).toEqual([[1, true], [1, true], [1, true]]);
  });

  test("clean-up detaches everything and says so once", () => {
    vi.useFakeTimers();
    button('[data-do="stop"]').click();
    button('[aria-label="Abort 7f3a"]').click();
    cleanUp();
    expect(model.listening).toBe(0);
    expect(el.childElementCount).toBe(0);
    expect(views().map((message) => message.open)).toEqual([true, false]);
    expect(vi.getTimerCount()).toBe(0);
    document.dispatchEvent(new Event("visibilitychange"));
    expect(views()).toHaveLength(2);
  });
});

describe("reading a sparkline", () => {
  const spark = () => one<SVGElement>('[data-rate="decode"] .spark');
  const press = (key: string) => spark().dispatchEvent(new KeyboardEvent("keydown", { key }));
  const shown = () => [text('[data-rate="decode"] .value'), text('[data-rate="decode"] figcaption span:last-child')];

  beforeEach(() => {
    model.set({ history: { decode: [null, 180, 200.5, 214.6], prefill: [], decode_peak: 220, prefill_peak: 0 } });
  });

  test("by arrow keys: the value and how long ago it was", () => {
    spark().dispatchEvent(new Event("focus"));
    expect(shown()).toEqual(["214.6", "now"]);
    press("ArrowLeft");
    expect(shown()).toEqual(["200.5", "1 s ago"]);
    expect(spark().getAttribute("aria-valuetext")).toBe("200.5 tokens per second, 1 seconds ago");
    press("Home");
    expect(shown()).toEqual(["–", "119 s ago"]);
    press("End");
    expect(shown()).toEqual(["214.6", "now"]);
    spark().dispatchEvent(new Event("blur"));
    expect(shown()).toEqual(["214.6", "tok/s"]);
  });

  test("by mouse, and the place stays while samples move on", () => {
    vi.spyOn(spark(), "getBoundingClientRect").mockReturnValue({ left: 100, width: 119 } as DOMRect);
    spark().dispatchEvent(new PointerEvent("pointermove", { clientX: 100 + 117 }));
    expect(shown()).toEqual(["180.0", "2 s ago"]);
    model.set({ history: { decode: [180, 200.5, 214.6, 190], prefill: [], decode_peak: 220, prefill_peak: 0 } });
    expect(shown()).toEqual(["200.5", "2 s ago"]);
    expect(one('[data-rate="decode"] .dot').getAttribute("d")).toMatch(/^M117 /);
    spark().dispatchEvent(new PointerEvent("pointerleave"));
    expect(shown()).toEqual(["214.6", "tok/s"]);
  });
});
