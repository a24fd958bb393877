import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import batch from "../src/batch";
import { pace, span } from "../src/batch/figures";
import { percentage, widths } from "../src/batch/tally";
import type { BatchState, BatchTraits, Message } from "../src/protocol";
import { type FakeModel, mountWidget } from "./fixture";
import raw from "./fixtures/protocol.json";

const fixture = raw.batch as unknown as { traits: BatchTraits; messages: Record<"pause" | "resume" | "stop", Message> };

let model: FakeModel<BatchTraits>;
let el: HTMLElement;
let cleanUp: () => void;

beforeEach(() => {
  ({ model, el, cleanUp } = mountWidget<BatchTraits>(batch, fixture.traits));
});
afterEach(() => {
  cleanUp();
  el.remove();
  vi.useRealTimers();
});

const one = <E extends Element = HTMLElement>(selector: string) => el.querySelector<E>(selector)!;
const all = (selector: string) => [...el.querySelectorAll(selector)].map((part) => part.textContent);
const text = (selector: string) => one(selector).textContent;
const button = (name: string) => one<HTMLButtonElement>(`button[data-do="${name}"]`);
const asked = () => model.sent.filter((message) => message.kind !== "view");
const job = (changes: Partial<BatchTraits["job"]>) => model.set({ job: { ...fixture.traits.job, ...changes } });
const counts = (changes: Partial<BatchTraits["counts"]>) =>
  model.set({ counts: { ...fixture.traits.counts, ...changes } });

describe("rendering", () => {
  test("head, tally and figures", () => {
    expect(one(".batch").dataset.state).toBe("running");
    expect(text(".state")).toBe("Running");
    expect(text("h3")).toBe("df.abstract");
    expect(text(".rows")).toBe("842 of 1,200 rows");
    expect(text(".also")).toBe("300 from before · 3 cut at max_tokens");
    expect(text(".percent")).toBe("70 %");
    expect(all(".key dd")).toEqual(["812", "7", "23", "8", "350"]);
    expect(all(".figures > div > :is(dt, dd:not(.graph))")).toEqual([
      "Rate",
      "4.2 rows/s",
      "Time left",
      "1 min 25 s",
      "Elapsed",
      "3 min 20 s",
      "Decode",
      "486 tok/s",
    ]);
    expect(one(".stack").getAttribute("aria-label")).toBe(
      "812 done, 7 failed, 23 skipped, 8 running, 350 left, of 1,200 rows",
    );
    expect(one(".spark .line").getAttribute("d")).not.toBe("");
  });

  test("a row for each result, and five places from the beginning", () => {
    expect(all("tbody th")).toEqual(["841", "840", "('a', 2)", "839", ""]);
    expect(all("tbody .outcome")).toEqual(["Done", "Cut", "Failed", "Skipped", ""]);
    expect(all("tbody .input").slice(2)).toEqual(["<img src=x onerror=alert(1)>", "(empty)", ""]);
    expect(all("tbody .output")[3]).toBe("'abstract' is null");
    expect([...el.querySelectorAll("tbody tr")].map((row) => row.getAttribute("aria-hidden"))).toEqual([
      null,
      null,
      null,
      null,
      "true",
    ]);
    model.set({ results: [] });
    expect(el.querySelectorAll("tbody tr")).toHaveLength(5);
  });

  test("what nobody knows is a dash", () => {
    model.set({ pace: { rows: null, tokens: null, elapsed: 0, left: null } });
    expect(all(".figures b")).toEqual(["–", "–", "0", "–"]);
  });

  test("a job of no rows is whole", () => {
    counts({ total: 0, done: 0, failed: 0, skipped: 0, running: 0, cut: 0, reused: 0 });
    expect(text(".rows")).toBe("0 of 0 rows");
    expect(text(".percent")).toBe("100 %");
    expect(el.querySelectorAll(".stack [data-seg]:not([hidden])")).toHaveLength(0);
  });
});

describe("figures", () => {
  test.each([
    [0, "0 s"],
    [59.4, "59 s"],
    [59.6, "1 min 00 s"],
    [200, "3 min 20 s"],
    [3599.9, "1 h 00 min"],
    [7500, "2 h 05 min"],
    [null, "–"],
  ])("%s seconds", (seconds, shown) => expect(span(seconds).join(" ")).toBe(shown));

  test.each([
    [12.34, "12.3 s"],
    [59.97, "1 min 00 s"],
  ])("%s seconds, exactly", (seconds, shown) => expect(span(seconds, true).join(" ")).toBe(shown));

  test.each([
    [0.05, "3.0 rows/min"],
    [0.43, "0.43 rows/s"],
    [4.2, "4.2 rows/s"],
    [1234, "1,234 rows/s"],
    [54_321, "54.3k rows/s"],
    [null, "– rows/s"],
  ])("%s rows a second", (perSecond, shown) => expect(pace(perSecond).join(" ")).toBe(shown));

  test("segments are all seen and never more than the bar", () => {
    const shares = widths({ done: 999_990, failed: 1, skipped: 9, running: 0 }, 1_000_000);
    expect(shares.failed).toBe(0.5);
    expect(shares.skipped).toBe(0.5);
    expect(shares.running).toBe(0);
    expect(Object.values(shares).reduce((sum, share) => sum + share)).toBeCloseTo(100);
  });

  test("100 % is all of them", () => {
    expect(percentage(999_999, 1_000_000)).toBe("99 %");
    expect(percentage(1_000_000, 1_000_000)).toBe("100 %");
  });
});

describe("states", () => {
  test.each([
    ["running", "Running", "Pause", false],
    ["paused", "Paused", "Resume", false],
    ["stopped", "Stopped", "Pause", true],
    ["finished", "Finished", "Pause", true],
    ["error", "Failed", "Pause", true],
  ] as [BatchState, string, string, boolean][])("%s", (state, word, label, disabled) => {
    job({ state });
    expect(text(".state")).toBe(word);
    expect(button("pause").textContent).toBe(label);
    expect([button("pause").disabled, button("stop").disabled]).toEqual([disabled, disabled]);
    expect([button("pause").textContent, button("pause").dataset.alt].sort()).toEqual(["Pause", "Resume"]);
  });

  test("the end says when, and what the means were", () => {
    job({ state: "finished", ended: "14:32" });
    model.set({ pace: { rows: 4.2, tokens: 479, elapsed: 12.34, left: 0 } });
    expect(all(".figures > div > :is(dt, dd:not(.graph))")).toEqual([
      "Mean rate",
      "4.2 rows/s",
      "Ended at",
      "14:32",
      "Elapsed",
      "12.3 s",
      "Mean decode",
      "479 tok/s",
    ]);
  });

  test("a failed engine takes the place of the results", () => {
    job({ state: "error", failure: "Metal ran out of memory", ended: "14:32" });
    expect(one(".last").hidden).toBe(true);
    expect(one(".failure").hidden).toBe(false);
    expect(text(".failure .reason")).toBe("Metal ran out of memory");
    expect(text(".failure code")).toBe("%mlx_engine restart");
    job({});
    expect(one(".last").hidden).toBe(false);
    expect(one(".failure").hidden).toBe(true);
  });
});

describe("buttons", () => {
  test("pause, then resume", () => {
    button("pause").click();
    job({ state: "paused" });
    button("pause").click();
    expect(asked()).toEqual([fixture.messages.pause, fixture.messages.resume]);
  });

  test("stop acts on the second press, and forgets the first after three seconds", () => {
    vi.useFakeTimers();
    button("stop").click();
    expect(button("stop").textContent).toBe("Confirm stop");
    vi.advanceTimersByTime(3000);
    button("stop").click();
    expect(asked()).toEqual([]);
    button("stop").click();
    expect(asked()).toEqual([fixture.messages.stop]);
  });

  test("an armed stop is disarmed when the job ends", () => {
    button("stop").click();
    job({ state: "finished", ended: "14:32" });
    expect(button("stop").textContent).toBe("Stop");
    expect(button("stop").disabled).toBe(true);
  });

  test("the pause button keeps its focus when its label changes", () => {
    button("pause").focus();
    job({ state: "paused" });
    expect(document.activeElement).toBe(button("pause"));
  });
});

describe("results", () => {
  const later = (n: number) =>
    Array.from({ length: 20 }, (_, i) => ({ row: `r${n - i}`, prompt: "p", answer: "a", outcome: "done" as const }));

  test("stand still for whoever scrolled down, and catch up at the top", () => {
    const list = one(".list");
    model.set({ results: later(100) });
    list.scrollTop = 40;
    model.set({ results: later(200) });
    expect(all("tbody th")[0]).toBe("r100");
    list.scrollTop = 0;
    list.dispatchEvent(new Event("scroll"));
    expect(all("tbody th")[0]).toBe("r200");
  });

  test("a million rows keep the page as it is", () => {
    for (let n = 0; n < 1_000_000; n += 10_000) {
      model.set({ results: later(n), counts: { ...fixture.traits.counts, total: 1_000_000, done: n } });
    }
    expect(el.querySelectorAll("tbody tr")).toHaveLength(20);
  });
});

test("data is text everywhere", () => {
  const evil = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>';
  job({ ended: "14:32" });
  const before = el.querySelectorAll("*").length;
  model.set({
    job: { state: "error", title: evil, failure: evil, command: evil, ended: evil },
    results: [{ row: evil, prompt: evil, answer: evil, outcome: "failed" }],
  });
  expect(el.querySelectorAll("*")).toHaveLength(before);
  expect(el.querySelector("img, script")).toBeNull();
  for (const place of ["h3", ".failure .reason", ".failure code", "tbody th", "tbody .input", "tbody .output"]) {
    expect(text(place)).toBe(evil);
  }
});

test("two views of one job agree", () => {
  const other = document.createElement("div");
  const close = batch.render({ model, el: other });
  counts({ done: 900 });
  job({ state: "paused" });
  expect(other.innerHTML).toBe(el.innerHTML);
  close();
});

test("clean-up detaches everything", () => {
  vi.useFakeTimers();
  button("stop").click();
  cleanUp();
  expect(model.listening).toBe(0);
  expect(el.childElementCount).toBe(0);
  expect(vi.getTimerCount()).toBe(0);
  expect(model.sent.filter((message) => message.kind === "view").map((message) => message.open)).toEqual([true, false]);
});
