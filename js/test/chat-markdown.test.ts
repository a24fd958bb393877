import { beforeEach, describe, expect, test, vi } from "vitest";
import { Answer } from "../src/chat/answer";

let answer: Answer;

beforeEach(() => {
  answer = new Answer();
});

const html = (text: string): string => {
  answer.update(text);
  return answer.element.innerHTML;
};
const text = (): string => answer.element.textContent;
const tags = (): string[] => [...answer.element.querySelectorAll("*")].map((element) => element.localName);

describe("what a model writes", () => {
  test.each([
    ["two\nlines\n\nand another", "<p>two\nlines</p><p>and another</p>"],
    ["a **bold** and *slanted* and ***both*** ~~gone~~", "<p>a <strong>bold</strong> and <em>slanted</em> and <strong><em>both</em></strong> <del>gone</del></p>"],
    ["a *b **c** d* e", "<p>a <em>b <strong>c</strong> d</em> e</p>"],
    ["snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"],
    ["`a*b*c` and ``x ` y``", "<p><code>a*b*c</code> and <code>x ` y</code></p>"],
    ["**bold with `**` in it**", "<p><strong>bold with <code>**</code> in it</strong></p>"],
    ["\\*not slanted\\*", "<p>*not slanted*</p>"],
    ["one  \ntwo", "<p>one<br>two</p>"],
    ["---", "<hr>"],
    ["> quoted\n> twice", "<blockquote><p>quoted\ntwice</p></blockquote>"],
    ["- a\n- b\n  - c\n\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"],
    ["3. three\n4. four", '<ol start="3"><li>three</li><li>four</li></ol>'],
    ["text\n- item", "<p>text</p><ul><li>item</li></ul>"],
    ["in\n2024. A year", "<p>in\n2024. A year</p>"],
    ["open **bold", "<p>open **bold</p>"],
    ["open `code", "<p>open `code</p>"],
    ["[half a link](http", "<p>[half a link](http</p>"],
  ])("%j", (markdown, expected) => {
    expect(html(markdown)).toBe(expected);
  });

  test("headings lie below the message's own", () => {
    html("## Title ##");
    const heading = answer.element.querySelector(".heading")!;
    expect([heading.textContent, heading.getAttribute("role"), heading.getAttribute("aria-level")]).toEqual(["Title", "heading", "6"]);
  });

  test("a table, its alignment, and a short row", () => {
    html("| a | b |\n|:--|--:|\n| 1 | `x\\|y` |\n| 2 |\n\nafter");
    expect([...answer.element.querySelectorAll("th, td")].map((cell) => cell.textContent)).toEqual(["a", "b", "1", "x|y", "2", ""]);
    expect(answer.element.querySelectorAll('[data-align="right"]')).toHaveLength(3);
    expect(text().endsWith("after")).toBe(true);
  });

  test("a block of code keeps every sign of it, and can be copied", async () => {
    const writeText = vi.fn(async () => undefined);
    vi.stubGlobal("navigator", { clipboard: { writeText } });
    const code = "if a < b && c:\n    print('<b>*x*</b>')\n\n# `end`";
    html(`\`\`\`python\n${code}\n\`\`\`\nafter`);
    expect(answer.element.querySelector("pre code")!.textContent).toBe(code);
    expect(answer.element.querySelector("figcaption")!.firstChild!.textContent).toBe("python");
    answer.element.querySelector("button")!.click();
    await vi.waitFor(() => expect(writeText).toHaveBeenCalledWith(code));
    vi.unstubAllGlobals();
  });

  test("a block of code inside a list", () => {
    html("1. first\n\n   ```\n   a\n     b\n   ```\n2. second");
    expect(answer.element.querySelectorAll("ol > li")).toHaveLength(2);
    expect(answer.element.querySelector("li pre code")!.textContent).toBe("a\n  b");
  });
});

describe("what must never become HTML", () => {
  const ALLOWED = new Set("p strong em del code pre a br hr ul ol li blockquote table thead tbody tr th td div figure figcaption button".split(" "));
  const HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe src=//evil>",
    "<style>*{display:none}</style>",
    "<a href=javascript:alert(1)>x</a>",
    "`<img src=x onerror=alert(1)>`",
    "```html\n<script>alert(1)</script>\n```",
    "```<img src=x onerror=alert(1)>\ncode",
    "# <b>heading</b>",
    "| <i>a</i> |\n|---|\n| <script>1</script> |",
    "- <details open ontoggle=alert(1)>",
    "[<img src=x onerror=alert(1)>](https://example.org/)",
    "&lt;script&gt; &#x3c;img&#x3e;",
  ];

  test.each(HOSTILE)("%s", (markdown) => {
    html(markdown);
    expect(tags().filter((tag) => !ALLOWED.has(tag))).toEqual([]);
    for (const element of answer.element.querySelectorAll("*")) {
      expect(element.getAttributeNames().filter((name) => name.startsWith("on") || name === "style" || name === "src")).toEqual([]);
    }
  });

  test.each([
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x)",
    "[x](file:///etc/passwd)",
    "[x](//example.org/path)",
    "[x](&#106;avascript:alert(1))",
    "<javascript:x(1)>",
    "![x](javascript:alert(1))",
  ])("%s is no link", (markdown) => {
    html(markdown);
    expect(answer.element.querySelector("a, img")).toBeNull();
    expect(text()).toContain("x");
  });

  test("links open apart, and an image is a link", () => {
    html("[docs](https://example.org/a_(b)) <https://example.org/c> see https://example.org/d. ![plot](https://example.org/e.png)");
    const links = [...answer.element.querySelectorAll("a")];
    expect(links.map((link) => link.href)).toEqual([
      "https://example.org/a_(b)",
      "https://example.org/c",
      "https://example.org/d",
      "https://example.org/e.png",
    ]);
    for (const link of links) expect([link.target, link.rel]).toEqual(["_blank", "noopener noreferrer"]);
    expect(answer.element.querySelector("img")).toBeNull();
  });

  test.each([
    ["emphasis", "*a ".repeat(20_000)],
    ["nested marks", "*_".repeat(5_000)],
    ["brackets", "[".repeat(20_000)],
    ["ticks", Array.from({ length: 200 }, (_, n) => "`".repeat(n + 1)).join(" ")],
    ["quotes", ">".repeat(5_000)],
    ["spaces", `# ${" ".repeat(50_000)}x`],
    ["lists", Array.from({ length: 400 }, (_, n) => `${"  ".repeat(n)}- x`).join("\n")],
  ])("%s without end are drawn in good time", (_name, markdown) => {
    const start = performance.now();
    html(markdown);
    expect(performance.now() - start).toBeLessThan(3000);
  });
});

describe("while it streams", () => {
  const WHOLE = "Use a **window**:\n\n```python\nsmooth = df.rolling(9)\n```\n\n1. one\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nDone, see https://example.org/x.";

  test("letter by letter it ends as if drawn at once", () => {
    for (let end = 1; end <= WHOLE.length; end += 1) answer.update(WHOLE.slice(0, end));
    const streamed = answer.element.innerHTML;
    expect(new Answer().element.innerHTML).toBe("");
    answer = new Answer();
    expect(streamed).toBe(html(WHOLE));
  });

  test("blocks above the last stay the same nodes", () => {
    html("first\n\nsecond");
    const [first, second] = [...answer.element.children];
    html("first\n\nsecond goes on\n\nthird");
    expect(answer.element.children[0]).toBe(first);
    expect(answer.element.children[1]).not.toBe(second);
  });

  test("code grows in place", () => {
    html("```python\na = 1");
    const figure = answer.element.querySelector("figure");
    html("```python\na = 1\nb = 2\n");
    expect(answer.element.querySelector("figure")).toBe(figure);
    expect(answer.element.querySelector("pre code")!.textContent).toContain("b = 2");
  });
});
