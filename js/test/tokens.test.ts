import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import raw from "./fixtures/protocol.json";
import { type FakeModel, mountWidget } from "./fixture";
import tokens from "../src/tokens";
import { MOST_BARS } from "../src/tokens/entropy";
import type { AllTokens, NewTokens, TokenItem, TokensTraits } from "../src/protocol";

// Fails to compile when a field is missing from the fixture, or has another type there.
raw.tokens.messages.all satisfies Record<keyof AllTokens, string>;
raw.tokens.news satisfies Record<keyof NewTokens, unknown>;
const fixture = raw.tokens.traits as TokensTraits;

let model: FakeModel<TokensTraits>;
let el: HTMLElement;
let cleanUp: () => void;

const show = (traits: Partial<TokensTraits> = {}) => {
  ({ model, el, cleanUp } = mountWidget(tokens, { ...fixture, ...traits }));
};
const one = <E extends Element = HTMLElement>(selector: string) => el.querySelector<E>(selector)!;
const words = () => [...el.querySelectorAll(".text b")].map((b) => b.textContent);
const text = () => [...el.querySelectorAll(".text .page")].map((page) => page.textContent).join("");
const card = () => one(".card header").textContent;
const press = (key: string) => one(".text").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const asked = () => model.sent.filter((message) => message.kind === "tokens");
const item = (text: string, more: Partial<TokenItem> = {}): TokenItem => ({
  text,
  part: "answer",
  p: 0.95,
  rank: 1,
  bits: 0.5,
  top: [{ text, p: 0.95 }],
  ...more,
});

/** Pages are drawn where a browser says that they can be seen. */
let inSight = true;
class Sight {
  constructor(private readonly report: (changes: { target: Element; isIntersecting: boolean }[]) => void) {}
  observe(target: Element): void {
    this.report([{ target, isIntersecting: inSight }]);
  }
  disconnect(): void {}
}

beforeEach(() => {
  inSight = true;
  vi.stubGlobal("IntersectionObserver", Sight);
  show();
});
afterEach(() => {
  vi.unstubAllGlobals();
  cleanUp();
  el.remove();
  vi.useRealTimers();
});

describe("the text", () => {
  test("is the answer, its words shaded and what was not likeliest underlined", () => {
    expect(text()).toBe("Canberra <img src=x onerror=alert(1)>.\n");
    const [first, second, third] = el.querySelectorAll<HTMLElement>(".text b");
    expect([first!.dataset.level, second!.dataset.level, third!.dataset.level]).toEqual(["1", "3", "4"]);
    expect([first, second, third].map((b) => b!.hasAttribute("data-second"))).toEqual([false, true, true]);
    expect(words()).toEqual(["Canberra", "<img src=x onerror=alert(1)>", "."]);
  });

  test("is text and never markup", () => {
    expect(el.querySelector("img, script")).toBeNull();
    press("Home");
    press("ArrowRight");
    expect(card()).toContain("·<img·src=x·onerror=alert(1)>");
    expect(el.querySelector("img, script")).toBeNull();
  });

  test("marks what has no shape, and stays as it was when copied", () => {
    cleanUp();
    show({ tokens: [item("a"), item("\n\n"), item("  "), item(""), item("é")] });
    expect([...el.querySelectorAll<HTMLElement>("b")].map((b) => b.dataset.mark)).toEqual([
      undefined,
      "⏎⏎",
      "··",
      "◌",
      undefined,
    ]);
    expect(text()).toBe("a\n\n  é");
  });

  test("keeps reasoning and calls apart, markers where they were written", () => {
    cleanUp();
    const part = (name: TokenItem["part"], said: string) => item(said, { part: name });
    show({ tokens: [part("marker", "<think>"), part("reasoning", "hm"), part("marker", "</think>"), item("So")] });
    expect([...el.querySelectorAll<HTMLElement>(".part")].map((each) => [each.dataset.part, each.textContent])).toEqual([
      ["answer", "<think>"],
      ["reasoning", "Reasoninghm</think>"],
      ["answer", "So"],
    ]);
    expect(el.querySelectorAll(".chip")).toHaveLength(2);
  });

  test("out of sight is plain text, until a key goes there", () => {
    cleanUp();
    inSight = false;
    show();
    expect(el.querySelectorAll("[data-i]")).toHaveLength(0);
    expect(text()).toBe("Canberra <img src=x onerror=alert(1)>.\n");
    expect(el.querySelector("img")).toBeNull();
    press("End");
    expect(el.querySelectorAll("[data-i]")).toHaveLength(3);
    expect(card()).toContain("3 of 3");
  });

  test("names each token for a screen reader", () => {
    const labels = [...el.querySelectorAll("[role=option]")].map((span) => span.getAttribute("aria-label"));
    expect(labels[0]).toBe("Canberra, 80.0 %");
    expect(labels[1]).toBe("<img src=x onerror=alert(1)>, 10.0 %; likelier: is 50.0 %");
  });
});

describe("the card", () => {
  test("tells of the token that the arrows reach", () => {
    press("ArrowRight");
    expect(card()).toBe("Canberra80.0 %Sampled, most likely1 of 3");
    press("End");
    expect(card()).toBe(".⏎1.0 %Sampled, not among the 2 likeliest3 of 3");
    expect([...el.querySelectorAll(".card li:not([hidden])")].map((row) => row.textContent)).toEqual([
      ",50.0 %",
      "\ufffd·#825.0 %",
      ".⏎1.0 %",
    ]);
    expect(one(".card footer").textContent).toBe("All others 24.0 %Entropy ≥ 1.56 bits");
    press("ArrowRight");
    expect(card()).toContain("3 of 3");
  });

  test("stays with a pinned token while the pointer wanders", () => {
    const [first, second] = el.querySelectorAll(".text b");
    second!.dispatchEvent(new Event("click", { bubbles: true }));
    first!.dispatchEvent(new Event("pointerover", { bubbles: true }));
    expect(card()).toContain("2 of 3");
    expect(one("[aria-selected=true]").getAttribute("data-i")).toBe("1");
    press("Escape");
    first!.dispatchEvent(new Event("pointerover", { bubbles: true }));
    expect(card()).toContain("1 of 3");
  });

  test("P, N and the buttons go to uncertain tokens", () => {
    const button = (name: string) => one<HTMLButtonElement>(`[data-do=${name}]`);
    expect([button("previous").disabled, button("next").disabled]).toEqual([true, false]);
    press("n");
    expect(card()).toContain("2 of 3");
    button("next").click();
    expect(card()).toContain("3 of 3");
    expect([button("previous").disabled, button("next").disabled]).toEqual([false, true]);
    press("P");
    expect(card()).toContain("2 of 3");
  });
});

describe("a growing answer", () => {
  const news = (start: number, ...said: string[]) =>
    model.receive({ kind: "tokens", start, tokens: said.map((each) => item(each)) });

  beforeEach(() => {
    cleanUp();
    show({ answer: { ...fixture.answer, state: "running", note: "waiting" }, tokens: [] });
  });

  test("says what goes on, then shows tokens as they come, each once", () => {
    expect(one(".note").textContent).toBe("waiting");
    news(0, "a", " b");
    news(1, " b", " c");
    expect(text()).toBe("a b c");
    expect(one(".note").hidden).toBe(true);
    expect(one(".head dd").textContent).toBe("3");
  });

  test("a view that missed tokens asks for all of them, and not again at each push", () => {
    news(2, " c");
    news(3, " d");
    expect(asked()).toEqual([raw.tokens.messages.all]);
    model.set({ tokens: [item("a"), item(" b"), item(" c"), item(" d")] });
    news(4, " e");
    expect(text()).toBe("a b c d e");
  });

  test("of a long one the entropies are grouped", () => {
    model.set({ tokens: Array.from({ length: 3 * MOST_BARS }, () => item(" x")) });
    expect(one("figcaption").textContent).toContain("mean of each 3");
    expect(one(".bars").getAttribute("d")!.split("M")).toHaveLength(MOST_BARS + 1);
  });
});

test("clean-up detaches everything", () => {
  vi.useFakeTimers();
  model.receive({ kind: "tokens", start: 9, tokens: [] });
  cleanUp();
  expect(model.listening).toBe(0);
  expect(el.childElementCount).toBe(0);
  expect(vi.getTimerCount()).toBe(0);
});
