// An answer's markdown on the page. While it streams only its last block is drawn anew, so that a selection in what
// stands above it stays.
import { copyButton } from "../buttons";
import { h, setText } from "../dom";
import { type Block, blocks, type Sourced } from "./blocks";
import { inline } from "./inline";

interface Painted extends Sourced {
  node: HTMLElement;
}

export class Answer {
  readonly element = h("div", { class: "answer" });
  private painted: Painted[] = [];
  private text = "";

  update(text: string): void {
    if (text === this.text) return;
    this.text = text;
    const wanted = blocks(text);
    let same = 0;
    while (same < wanted.length && this.painted[same]?.source === wanted[same]!.source) same += 1;
    if (same === wanted.length - 1 && same === this.painted.length - 1 && grow(this.painted[same]!, wanted[same]!)) return;
    for (const { node } of this.painted.splice(same)) node.remove();
    for (const { block, source } of wanted.slice(same)) {
      const node = render(block);
      this.element.append(node);
      this.painted.push({ block, source, node });
    }
  }
}

/** Lets a block of code grow in place, so that its scroll position and its button stay. */
function grow(painted: Painted, { block, source }: Sourced): boolean {
  const before = painted.block;
  if (block.kind !== "code" || before.kind !== "code" || block.language !== before.language) return false;
  setText(painted.node.querySelector("pre code")!, block.text);
  painted.block = block;
  painted.source = source;
  return true;
}

function render(block: Block): HTMLElement {
  switch (block.kind) {
    case "paragraph":
      return h("p", {}, ...inline(block.text));
    case "heading":
      // Below the message's own heading
      return h("p", { class: "heading", role: "heading", "aria-level": Math.min(6, block.level + 4), "data-level": block.level }, ...inline(block.text));
    case "code":
      return code(block.language, block.text);
    case "quote":
      return h("blockquote", {}, ...block.blocks.map(render));
    case "list":
      return list(block);
    case "table":
      return table(block);
    case "rule":
      return h("hr");
  }
}

function code(language: string, text: string): HTMLElement {
  const shown = h("code", {}, text);
  const copy = copyButton(() => shown.textContent);
  copy.dataset.kind = "quiet";
  const name = language || "text";
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, name, copy),
    h("pre", { tabindex: 0, role: "group", "aria-label": `Code, ${name}` }, shown),
  );
}

function list({ ordered, start, items }: Block & { kind: "list" }): HTMLElement {
  const entries = items.map((item) => {
    const [first, ...rest] = item;
    // A line of its own needs no paragraph around it
    if (first?.kind !== "paragraph") return h("li", {}, ...item.map(render));
    return h("li", {}, ...inline(first.text), ...rest.map(render));
  });
  return ordered ? h("ol", start === 1 ? {} : { start }, ...entries) : h("ul", {}, ...entries);
}

function table({ align, head, rows }: Block & { kind: "table" }): HTMLElement {
  const cell = (tag: "th" | "td", text: string, column: number) =>
    h(tag, { ...(tag === "th" ? { scope: "col" } : {}), ...(align[column] ? { "data-align": align[column] } : {}) }, ...inline(text));
  return h(
    "div",
    { class: "table", tabindex: 0, role: "group", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...head.map((text, column) => cell("th", text, column)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((text, column) => cell("td", text, column))))),
    ),
  );
}
