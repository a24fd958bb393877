import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import chat from "../src/chat";
import { MAX_BYTES } from "../src/chat/attachments";
import { Log } from "../src/chat/log";
import type { ChatState, ChatTalk, ChatTraits, ChatTurn, Message, TurnStatus } from "../src/protocol";
import { type FakeModel, mountWidget } from "./fixture";
import raw from "./fixtures/protocol.json";

type Name = "stop" | "regenerate" | "dismiss" | "reset" | "whole" | "send" | "edit" | "set";
const fixture = raw.chat as unknown as { traits: ChatTraits; growth: ChatTalk; messages: Record<Name, Message> };

let model: FakeModel<ChatTraits>;
let el: HTMLElement;
let cleanUp: () => void;

beforeEach(() => {
  ({ model, el, cleanUp } = mountWidget<ChatTraits>(chat, fixture.traits));
});
afterEach(() => {
  cleanUp();
  el.remove();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

const one = <E extends Element = HTMLElement>(selector: string) => el.querySelector<E>(selector)!;
const all = (selector: string) => [...el.querySelectorAll<HTMLElement>(selector)];
const text = (selector: string) => one(selector).textContent;
const button = (name: string) => one<HTMLButtonElement>(`button[data-do="${name}"]`);
const field = (label = "Message") => one<HTMLTextAreaElement>(`textarea[aria-label="${label}"]`);
const asked = () => model.sent.filter((message) => message.kind !== "view");
const head = (changes: Partial<ChatTraits["head"]>) => model.set({ head: { ...model.get("head"), ...changes } });
const inState = (state: ChatState) => head({ state });
const key = (target: HTMLElement, name: string, options: KeyboardEventInit = {}) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true, ...options }));
const status = (changes: Partial<TurnStatus> = {}): TurnStatus => ({
  ending: "done",
  problem: null,
  thought_s: null,
  left_out: 0,
  ...changes,
});
const turn = (changes: Partial<ChatTurn> = {}): ChatTurn => ({
  key: "t9",
  question: "Why?",
  images: [],
  answer: "Because.",
  reasoning: "",
  status: status(),
  ...changes,
});
let revision = 100;
const talk = (...turns: ChatTurn[]) =>
  model.set({ talk: { base: 0, revision: (revision += 1), keys: turns.map((each) => each.key), turns, grown: [] } });
const write = (words: string) => {
  field().value = words;
  field().dispatchEvent(new Event("input"));
};
const image = (name: string, size = 10, type = "image/png") => new File([new Uint8Array(size)], name, { type });
const drop = (...files: File[]) => {
  const event = new Event("drop", { bubbles: true, cancelable: true });
  Object.assign(event, { dataTransfer: { types: ["Files"], files } });
  one("form").dispatchEvent(event);
};

describe("rendering", () => {
  test("head, turns and figures", () => {
    expect(one(".chat").dataset.state).toBe("running");
    expect(text(".state")).toBe("Answering");
    expect(text("h3")).toBe("Qwen3-VL-8B-Instruct");
    expect(all(".question").map((each) => each.textContent)).toEqual([
      "How do I smooth a noisy series?\nWith <b>pandas</b>?",
      "Is the window too wide?",
    ]);
    expect(all(".figures b").map((each) => each.textContent)).toEqual(["62.4", "0.18", "1,204", "896", "114"]);
    expect(text("summary")).toBe("Thinking 3.4 s");
    expect(all('[data-from="model"]').map((each) => each.hasAttribute("data-live"))).toEqual([false, true]);
  });

  test("text of a person or a model never becomes HTML", () => {
    const evil = "<img src=x onerror=alert(1)><script>alert(1)</script>";
    head({ model: evil, problem: evil });
    talk(turn({ question: evil, answer: evil, reasoning: evil, status: status({ ending: "failed", problem: evil }) }));
    expect(el.querySelector("img, script")).toBeNull();
    expect(el.textContent.split(evil).length - 1).toBe(6);
  });

  test("an attached image is shown only as the picture that Python made", () => {
    expect(all(".images img").map((each) => each.getAttribute("alt"))).toEqual(["Attached image: load-plot.png"]);
    talk(turn({ images: [{ name: "x", src: "https://example.org/track.png" }] }));
    expect(el.querySelector(".images img")).toBeNull();
  });

  test("an empty conversation", () => {
    talk();
    expect(one(".empty").hidden).toBe(false);
    expect(el.querySelector(".message")).toBeNull();
    expect(button("reset").disabled).toBe(true);
  });

  test("growth is added to the turn it belongs to, and other turns stay the same nodes", () => {
    const [first, second] = all(".turn");
    model.set({ talk: fixture.growth });
    expect(all(".turn")).toEqual([first, second]);
    expect(second!.querySelector(".answer")!.textContent).toBe("Yes, slightly. The line is 📈.");
    expect(second!.querySelector("[data-live]")).toBeNull();
    expect(text(".turn:last-child .remark")).toBe("The model's context had no room for the oldest 2 turns.");
  });

  test("a view that missed something asks for everything", () => {
    model.set({ talk: { ...fixture.growth, base: 12, revision: 13 } });
    expect(asked()).toEqual([fixture.messages.whole]);
  });

  test("thinking is open while it streams, folded once the answer begins, and then the reader's", () => {
    const thinking = (answer: string, ending: TurnStatus["ending"]) =>
      talk(turn({ answer, reasoning: "Hm", status: status({ ending }) }));
    thinking("", "answering");
    expect(one<HTMLDetailsElement>("details").open).toBe(true);
    thinking("So", "answering");
    expect(one<HTMLDetailsElement>("details").open).toBe(false);
    one("summary").click();
    one<HTMLDetailsElement>("details").open = true;
    thinking("So it is", "done");
    expect(one<HTMLDetailsElement>("details").open).toBe(true);
  });

  test("how an answer ended", () => {
    talk(turn({ status: status({ ending: "stopped" }) }));
    expect(text(".remark")).toBe("Stopped.");
    talk(turn({ status: status({ ending: "length" }) }));
    expect(text(".remark")).toContain("Cut off at max tokens");
    talk(turn({ answer: "", status: status({ ending: "stopped" }) }));
    expect(one(".problem").hidden).toBe(false);
    expect(text(".problem p")).toBe("Stopped before the answer began.");
  });

  test("the log follows an answer only from its end", () => {
    const log = one(".log");
    Object.defineProperties(log, { scrollHeight: { value: 1000, configurable: true }, clientHeight: { value: 400 } });
    log.scrollTop = 600;
    model.set({ talk: fixture.growth });
    expect(log.scrollTop).toBe(1000);
    log.scrollTop = 100;
    talk(turn(), turn({ key: "t10" }));
    expect(log.scrollTop).toBe(100);
  });

  test("a stopped engine says what to do, with the command to copy", async () => {
    const writeText = vi.fn(async () => undefined);
    vi.stubGlobal("navigator", { clipboard: { writeText } });
    head({ state: "stopped", problem: "engine 'default' is stopped", command: "%mlx_engine restart default" });
    expect(text(".notice p")).toBe("engine 'default' is stopped");
    one<HTMLButtonElement>(".notice button").click();
    await vi.waitFor(() => expect(writeText).toHaveBeenCalledWith("%mlx_engine restart default"));
    head({ problem: null, command: null });
    expect(one(".notice").hidden).toBe(true);
  });
});

describe("asking", () => {
  beforeEach(() => inState("idle"));

  test("Enter sends, Shift + Enter does not, nor does an input method's Enter", async () => {
    write("Hello");
    key(field(), "Enter", { shiftKey: true });
    key(field(), "Enter", { isComposing: true });
    await Promise.resolve();
    expect(asked()).toEqual([]);
    key(field(), "Enter");
    await vi.waitFor(() => expect(asked()).toHaveLength(1));
    expect(asked()[0]).toEqual({ ...fixture.messages.send, images: [] });
    expect(field().value).toBe("");
  });

  test("nothing is sent twice, or while it is empty", async () => {
    expect(button("send").disabled).toBe(true);
    write("  \n");
    key(field(), "Enter");
    write("Hello");
    button("send").click();
    write("again");
    button("send").click();
    key(field(), "Enter");
    await vi.waitFor(() => expect(asked()).toHaveLength(1));
    inState("running");
    key(field(), "Enter");
    await Promise.resolve();
    expect(asked()).toHaveLength(1);
    expect(field().value).toBe("again");
  });

  test("a question that Python refuses comes back to where it was written", async () => {
    write("Hello");
    key(field(), "Enter");
    await vi.waitFor(() => expect(asked()).toHaveLength(1));
    head({ problem: "the panel is closed: make another" });
    expect(field().value).toBe("Hello");
    expect(button("send").disabled).toBe(false);
    write("");
    inState("running");
    inState("idle");
    expect(field().value).toBe("");
  });

  test("so does one that does not arrive, until it arrives late", async () => {
    vi.useFakeTimers();
    write("Hello");
    key(field(), "Enter");
    await vi.advanceTimersByTimeAsync(1100);
    expect(field().value).toBe("Hello");
    talk(turn({ key: "t50", question: "Hello" }));
    expect(field().value).toBe("");
  });

  test("one that is in the log does not come back", async () => {
    write("Hello");
    key(field(), "Enter");
    await vi.waitFor(() => expect(asked()).toHaveLength(1));
    talk(turn({ key: "t51", question: "Hello", status: status({ ending: "failed" }) }));
    head({ problem: "the engine is stopped" });
    expect(field().value).toBe("");
  });

  test("Send and Stop are one button in one place; Escape stops too", () => {
    const send = button("send");
    inState("running");
    expect(button("stop")).toBe(send);
    expect([send.textContent, send.dataset.alt]).toEqual(["Stop", "Send"]);
    send.click();
    send.click();
    expect(asked()).toEqual([fixture.messages.stop]);
    inState("idle");
    inState("running");
    key(field(), "Escape");
    expect(asked()).toEqual([fixture.messages.stop, fixture.messages.stop]);
  });

  test("keys stay in the widget", () => {
    const seen = vi.fn();
    document.addEventListener("keydown", seen);
    key(field(), "d");
    key(one<HTMLInputElement>('[name="temperature"]'), "d");
    document.removeEventListener("keydown", seen);
    expect(seen).not.toHaveBeenCalled();
    expect(one(".chat").getAttribute("data-lm-suppress-shortcuts")).toBe("true");
  });

  test("regenerate is for the last answer, when none is being written", () => {
    expect(all('[data-do="regenerate"]').map((each) => each.hidden)).toEqual([true, false]);
    const last = all('[data-do="regenerate"]')[1] as HTMLButtonElement;
    inState("running");
    expect(last.disabled).toBe(true);
    inState("idle");
    last.click();
    expect(asked()).toEqual([fixture.messages.regenerate]);
  });

  test("a failed question can be tried again or dismissed", () => {
    talk(turn({ answer: "half", status: status({ ending: "failed", problem: "the engine stopped" }) }));
    expect(text(".problem p")).toBe("the engine stopped");
    expect(one(".problem").getAttribute("role")).toBe("alert");
    button("retry").click();
    button("dismiss").click();
    expect(asked()).toEqual([fixture.messages.regenerate, fixture.messages.dismiss]);
  });
});

describe("editing", () => {
  beforeEach(() => {
    inState("idle");
    button("edit").click();
  });
  const editor = () => field("Edit the question");

  test("begins with the question and sends it in its place", () => {
    expect(editor().value).toBe(fixture.traits.talk.turns[0]!.question);
    editor().value = "Hello";
    key(editor(), "Enter");
    expect(asked()).toEqual([fixture.messages.edit]);
    expect(one(".editor").hidden).toBe(true);
  });

  test("Escape leaves it as it was", () => {
    editor().value = "Hello";
    key(editor(), "Escape");
    expect(asked()).toEqual([]);
    expect([one(".editor").hidden, one(".question").hidden]).toEqual([true, false]);
    expect(document.activeElement).toBe(button("edit"));
  });

  test("an update does not disturb it", () => {
    editor().value = "half a thou";
    model.set({ talk: fixture.growth });
    head({ model: "another" });
    expect(editor().value).toBe("half a thou");
    expect([one(".editor").hidden, one(".question").hidden]).toEqual([false, true]);
  });
});

describe("images", () => {
  beforeEach(() => {
    vi.stubGlobal("URL", Object.assign(URL, { createObjectURL: () => "blob:x", revokeObjectURL: () => undefined }));
    inState("idle");
  });

  test("are dropped, pasted, removed and sent as bytes", async () => {
    const buffers: ArrayBuffer[][] = [];
    const send = model.send.bind(model);
    model.send = (message: unknown, _callbacks?: unknown, bytes?: ArrayBuffer[]) => {
      send(message);
      if (bytes) buffers.push(bytes);
    };
    drop(image("a.png", 3), image("b.png", 4));
    const paste = Object.assign(new Event("paste", { cancelable: true }), { clipboardData: { files: [image("c.png", 5)] } });
    field().dispatchEvent(paste);
    one<HTMLButtonElement>('[aria-label="Remove b.png"]').click();
    expect(all(".attach figcaption").map((each) => each.textContent)).toEqual(["a.png", "c.png"]);
    expect(button("send").disabled).toBe(false);
    write("Look");
    button("send").click();
    await vi.waitFor(() => expect(asked()).toHaveLength(1));
    expect(asked()[0]).toEqual({ kind: "chat_send", text: "Look", replaces: null, images: ["a.png", "c.png"] });
    expect(buffers[0]!.map((each) => each.byteLength)).toEqual([3, 5]);
    expect(all(".attach figure")).toEqual([]);
    head({ problem: "c.png is no image" });
    expect(all(".attach figcaption").map((each) => each.textContent)).toEqual(["a.png", "c.png"]);
  });

  test("picked ones can be sent without a word", async () => {
    const picker = one<HTMLInputElement>('input[type="file"]');
    Object.defineProperty(picker, "files", { value: [image("a.png")] });
    picker.dispatchEvent(new Event("change"));
    expect(button("send").disabled).toBe(false);
    button("send").click();
    await vi.waitFor(() => expect(asked()).toHaveLength(1));
    expect(asked()[0]).toMatchObject({ text: "", images: ["a.png"] });
  });

  test("too many bytes, and what is no image, are refused in one line", () => {
    drop(image("big.png", MAX_BYTES + 1));
    expect(text(".attach small")).toBe("The images of a question have 8 MB at most: make them smaller.");
    drop(image("notes.txt", 3, "text/plain"));
    expect(text(".attach small")).toBe("Only images can be attached.");
    expect(all(".attach figure")).toEqual([]);
  });

  test("are not offered where the model takes text only", () => {
    head({ takes_images: false });
    expect(one(".attach").hidden).toBe(true);
    drop(image("a.png"));
    expect(text(".attach small")).toBe("This model takes text only.");
    expect(all(".attach figure")).toEqual([]);
  });
});

describe("settings", () => {
  const input = (name: string) => one<HTMLInputElement>(`[name="${name}"]`);

  test("lie in a drawer", () => {
    expect(one(".drawer").hidden).toBe(true);
    button("settings").click();
    expect(one(".drawer").hidden).toBe(false);
    expect(button("settings").getAttribute("aria-expanded")).toBe("true");
    expect(input("top_p").value).toBe("0.95");
    expect(one<HTMLTextAreaElement>('[name="system"]').value).toBe("You are concise.");
  });

  test("are sent when a field is left, and a slider moves its field", () => {
    input("temperature").value = "0.2";
    input("temperature").dispatchEvent(new Event("change"));
    expect(asked()).toEqual([fixture.messages.set]);
    const slider = one<HTMLInputElement>('[aria-label="Temperature, slider"]');
    slider.value = "1.5";
    slider.dispatchEvent(new Event("input"));
    expect(input("temperature").value).toBe("1.5");
  });

  test("what is not valid is said below its field", () => {
    const problem = "temperature must be at least 0, got -1";
    model.set({ settings: { values: { ...fixture.traits.settings.values, temperature: "-1" }, problems: { temperature: problem } } });
    expect(input("temperature").getAttribute("aria-invalid")).toBe("true");
    expect(one(`#${input("temperature").getAttribute("aria-describedby")}`).textContent).toBe(problem);
    expect(input("temperature").value).toBe("-1");
  });

  test("thinking is offered only by a model that thinks", () => {
    expect(one('[data-field="thinking"]').hidden).toBe(false);
    head({ can_think: false });
    expect(one('[data-field="thinking"]').hidden).toBe(true);
  });

  test("a new conversation takes two presses", () => {
    button("reset").click();
    expect(asked()).toEqual([]);
    button("reset").click();
    expect(asked()).toEqual([fixture.messages.reset]);
  });
});

describe("export", () => {
  test("messages are copied where no cell can be added", async () => {
    const writeText = vi.fn(async (_text: string) => undefined);
    vi.stubGlobal("navigator", { clipboard: { writeText } });
    button("to-cell").click();
    await vi.waitFor(() => expect(writeText).toHaveBeenCalled());
    const copied = JSON.parse(writeText.mock.calls[0]![0]) as { role: string; content: string }[];
    expect(copied.map(({ role }) => role)).toEqual(["system", "user", "assistant", "user", "assistant"]);
    await vi.waitFor(() => expect(text(".exports small")).toBe("Copied: paste it into a cell."));
  });

  test("a cell is added below the panel's own", () => {
    const insertCell = vi.fn();
    Object.assign(model, { widget_manager: { context: { model: { sharedModel: { cells: [1, 2, 3], insertCell } } } } });
    const cell = document.createElement("div");
    cell.className = "jp-Cell";
    cell.dataset.windowedListIndex = "1";
    el.replaceWith(cell);
    cell.append(el);
    button("to-cell").click();
    const [index, { cell_type, source }] = insertCell.mock.calls[0]!;
    expect([index, cell_type]).toEqual([2, "code"]);
    expect(source).toContain('messages = [\n    {\n        "role": "system",');
    cell.remove();
  });
});

describe("clean-up", () => {
  test("a view that is gone listens to nothing and shows nothing", () => {
    cleanUp();
    expect(model.listening).toBe(0);
    expect(el.childElementCount).toBe(0);
  });

  test("10,000 pieces of an answer leave one turn", () => {
    const log = new Log();
    log.take({ base: 0, revision: 1, keys: ["t9"], turns: [turn({ answer: "" })], grown: [] });
    for (let at = 1; at <= 10_000; at += 1) {
      const grown = [{ key: "t9", answer: "ab ", reasoning: "", status: status() }];
      expect(log.take({ base: at, revision: at + 1, keys: ["t9"], turns: [], grown })).toBe(true);
    }
    expect(log.all().map(({ answer }) => answer.length)).toEqual([30_000]);
  });
});
