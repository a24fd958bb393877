// The text of a block to nodes: emphasis, code, links. All else is text, tags included.
// Only http and https make a link; an image is a link too, so that nothing is fetched for an answer.
import { h } from "../dom";

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const WEB = /^https?:\/\/[^\s<>"]+$/i;
const BARE = /https?:\/\/[^\s<>"`]+/iy;
const TARGET = /\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const MARKS = ["***", "___", "**", "__", "~~", "*", "_"] as const;
const TAGS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" } as const;

/** Emphasis within emphasis, at most. */
const DEPTH = 8;

export function inline(text: string): Node[] {
  return new Reader(text, 0).read();
}

/** A link, or where it leads nowhere safe its text with the address. */
export function link(address: string, ...text: (Node | string)[]): Node[] {
  const nodes = text.map((each) => (typeof each === "string" ? document.createTextNode(each) : each));
  if (WEB.test(address)) return [h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...nodes)];
  return address ? [...nodes, document.createTextNode(` (${address})`)] : nodes;
}

/** An address in running text, without the punctuation of the sentence around it. */
function trimmed(address: string): string {
  let end = address.length;
  for (; end > 0; end -= 1) {
    const last = address[end - 1]!;
    const inside = address.slice(0, end);
    const closed = last === ")" && inside.split("(").length < inside.split(")").length;
    if (!closed && !".,;:!?'*_~]".includes(last)) break;
  }
  return address.slice(0, end);
}

class Reader {
  private at = 0;
  private plain = "";
  private readonly nodes: Node[] = [];
  /** Marks that nothing closes from some place on: they need no second look. */
  private readonly open = new Set<string>();

  constructor(
    private readonly text: string,
    private readonly depth: number,
  ) {}

  read(): Node[] {
    while (this.at < this.text.length) {
      if (!this.special()) this.plain += this.text[this.at++];
    }
    this.flush();
    return this.nodes;
  }

  private flush(): void {
    if (this.plain) this.nodes.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  private put(end: number, ...nodes: Node[]): true {
    this.flush();
    this.nodes.push(...nodes);
    this.at = end;
    return true;
  }

  private special(): boolean {
    switch (this.text[this.at]) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "!":
      case "[":
        return this.linked();
      case "<":
        return this.autolink();
      case "h":
      case "H":
        return this.bare();
      case "\n":
        return this.newline();
      case "*":
      case "_":
      case "~":
        return this.emphasis();
      default:
        return false;
    }
  }

  private escape(): boolean {
    const next = this.text[this.at + 1];
    if (next === "\n") return this.put(this.at + 2, h("br"));
    if (next === undefined || !PUNCTUATION.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  private newline(): boolean {
    if (!this.plain.endsWith("  ")) return false;
    this.plain = this.plain.trimEnd();
    return this.put(this.at + 1, h("br"));
  }

  /** The end of the code that begins at `at`, and what it holds. */
  private codeAt(at: number): { text: string; end: number } | null {
    let start = at;
    while (this.text[start] === "`") start += 1;
    const ticks = this.text.slice(at, start);
    if (this.open.has(ticks)) return null;
    for (let found = this.text.indexOf(ticks, start); found >= 0; ) {
      let end = found;
      while (this.text[end] === "`") end += 1;
      if (end - found === ticks.length) return { text: this.text.slice(start, found), end };
      found = this.text.indexOf(ticks, end);
    }
    this.open.add(ticks);
    return null;
  }

  private code(): boolean {
    const code = this.codeAt(this.at);
    if (!code) {
      while (this.text[this.at] === "`") this.plain += this.text[this.at++];
      return true;
    }
    const text = code.text.replaceAll("\n", " ");
    const padded = text.startsWith(" ") && text.endsWith(" ") && text.trim() !== "";
    return this.put(code.end, h("code", {}, padded ? text.slice(1, -1) : text));
  }

  private linked(): boolean {
    const image = this.text[this.at] === "!";
    const start = this.at + (image ? 2 : 1);
    if ((image && this.text[start - 1] !== "[") || this.open.has("]") || this.depth >= DEPTH) return false;
    const close = this.closing(start);
    if (close < 0) {
      this.open.add("]");
      return false;
    }
    TARGET.lastIndex = close + 1;
    const target = TARGET.exec(this.text);
    if (!target) return false;
    const label = this.text.slice(start, close);
    const nodes = image ? [document.createTextNode(label || "image")] : new Reader(label, this.depth + 1).read();
    // A link holds no link
    const flat = nodes.some((node) => node instanceof HTMLElement && (node.matches("a") || node.querySelector("a")));
    return this.put(TARGET.lastIndex, ...link(target[1]!, ...(flat ? [label] : nodes)));
  }

  /** Where the bracket that was opened before `at` closes; -1 if it doesn't. */
  private closing(at: number): number {
    let depth = 1;
    for (let end = at; end < this.text.length; end += 1) {
      const sign = this.text[end];
      if (sign === "\\") end += 1;
      else if (sign === "[") depth += 1;
      else if (sign === "]" && (depth -= 1) === 0) return end;
    }
    return -1;
  }

  private autolink(): boolean {
    const end = this.text.indexOf(">", this.at);
    const address = this.text.slice(this.at + 1, end);
    return end > 0 && end - this.at < 2000 && WEB.test(address) ? this.put(end + 1, ...link(address, address)) : false;
  }

  private bare(): boolean {
    if (this.at > 0 && WORD.test(this.text[this.at - 1]!)) return false;
    BARE.lastIndex = this.at;
    const address = trimmed(BARE.exec(this.text)?.[0] ?? "");
    return address && WEB.test(address) ? this.put(this.at + address.length, ...link(address, address)) : false;
  }

  private emphasis(): boolean {
    const mark = MARKS.find((each) => this.text.startsWith(each, this.at));
    if (!mark || this.depth >= DEPTH) return false;
    const end = this.opens(mark) ? this.closes(mark) : -1;
    if (end < 0) {
      this.plain += mark;
      this.at += mark.length;
      return true;
    }
    const nodes = new Reader(this.text.slice(this.at + mark.length, end), this.depth + 1).read();
    const both = mark === "***" || mark === "___";
    const node = both ? h("strong", {}, h("em", {}, ...nodes)) : h(TAGS[mark], {}, ...nodes);
    return this.put(end + mark.length, node);
  }

  private opens(mark: string): boolean {
    const [before, after] = [this.text[this.at - 1] ?? " ", this.text[this.at + mark.length] ?? " "];
    return !/\s/.test(after) && !(mark.startsWith("_") && WORD.test(before));
  }

  /** Where `mark` closes what it opens here, code and longer runs of its sign left out. */
  private closes(mark: string): number {
    if (this.open.has(mark)) return -1;
    const sign = mark[0]!;
    let end = this.at + mark.length;
    while (end < this.text.length) {
      const here = this.text[end];
      if (here === "\\") end += 2;
      else if (here === "`") {
        const code = this.codeAt(end);
        if (code) end = code.end;
        else while (this.text[end] === "`") end += 1;
      } else if (here === sign) {
        let run = end;
        while (this.text[run] === sign) run += 1;
        const fits = run - end === mark.length || (run - end === 3 && mark.length < 3);
        const closes = !/\s/.test(this.text[end - 1]!) && !(sign === "_" && WORD.test(this.text[run] ?? " "));
        if (fits && closes) return run - mark.length;
        end = run;
      } else end += 1;
    }
    this.open.add(mark);
    return -1;
  }
}
