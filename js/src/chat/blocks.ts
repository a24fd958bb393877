// A model's markdown to blocks: a plain subset of CommonMark and its tables, line by line.
// HTML is no part of it: a tag is text like any other. What follows never changes a block that is closed.

export type Align = "left" | "center" | "right" | null;

export type Block =
  | { kind: "paragraph"; text: string }
  | { kind: "heading"; level: number; text: string }
  | { kind: "code"; language: string; text: string }
  | { kind: "quote"; blocks: Block[] }
  | { kind: "list"; ordered: boolean; start: number; items: Block[][] }
  | { kind: "table"; align: Align[]; head: string[]; rows: string[][] }
  | { kind: "rule" };

/** A block and the lines it was read from. */
export interface Sourced {
  block: Block;
  source: string;
}

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|[ \t]*)$/;
const DELIMITER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const BLANK = /^\s*$/;

/** Quotes and lists within each other, at most. */
const DEPTH = 12;

export function blocks(text: string): Sourced[] {
  return read(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function read(lines: string[], depth: number): Sourced[] {
  const found: Sourced[] = [];
  let at = 0;
  while (at < lines.length) {
    if (BLANK.test(lines[at]!)) {
      at += 1;
      continue;
    }
    const [block, end] = next(lines, at, depth);
    found.push({ block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return found;
}

const inner = (lines: string[], depth: number): Block[] => read(lines, depth + 1).map(({ block }) => block);

/** The block that begins at a line that isn't blank, and the line after it. */
function next(lines: string[], at: number, depth: number): [Block, number] {
  const line = lines[at]!;
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1]!.length, text: title(heading[2]!) }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && !BLANK.test(lines[end]!) && !interrupts(lines, end)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((each) => each.trimStart()).join("\n") }, end];
}

/** A heading without the signs that may close it. */
function title(text: string): string {
  const words = text.trim();
  const open = words.replace(/#+$/, "");
  return open === "" || /\s$/.test(open) ? open.trimEnd() : words;
}

/** Whether a line ends the paragraph before it. */
function interrupts(lines: string[], at: number): boolean {
  const line = lines[at]!;
  const item = ITEM.exec(line);
  const begins = item !== null && item[3] !== undefined && /^(?:[-*+]|1[.)])$/.test(item[2]!);
  return begins || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, at);
}

function code(lines: string[], at: number, [, indent, fence, info]: RegExpExecArray): [Block, number] {
  const closing = new RegExp(`^ {0,3}${fence![0]}{${fence!.length},}[ \\t]*$`);
  const strip = new RegExp(`^ {0,${indent!.length}}`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end]!)) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.replace(strip, ""));
  const language = info!.trim().split(/\s/)[0]!;
  return [{ kind: "code", language, text: text.join("\n") }, Math.min(lines.length, end + 1)];
}

function quote(lines: string[], at: number, depth: number): [Block, number] {
  let end = at;
  while (end < lines.length && !BLANK.test(lines[end]!) && (QUOTE.test(lines[end]!) || !interrupts(lines, end))) end += 1;
  return [{ kind: "quote", blocks: inner(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth) }, end];
}

const indentOf = (line: string): number => line.length - line.trimStart().length;

function list(lines: string[], at: number, depth: number): [Block, number] {
  const [, spaces, marker] = ITEM.exec(lines[at]!)!;
  const ordered = /\d/.test(marker!);
  const indent = spaces!.length;
  const items: Block[][] = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]!);
    if (!item || indentOf(lines[end]!) >= indent + 2 || /\d/.test(item[2]!) !== ordered || RULE.test(lines[end]!)) break;
    const content = indentOf(lines[end]!) + item[2]!.length + 1;
    const own = [item[3] ?? ""];
    end += 1;
    while (end < lines.length && belongs(lines, end, indent)) {
      own.push(lines[end]!.slice(Math.min(content, indentOf(lines[end]!))));
      end += 1;
    }
    items.push(inner(own, depth));
    // Blank lines between two items
    let after = end;
    while (after < lines.length && BLANK.test(lines[after]!)) after += 1;
    if (after < lines.length && ITEM.test(lines[after]!)) end = after;
  }
  return [{ kind: "list", ordered, start: ordered ? parseInt(marker!, 10) : 1, items }, Math.max(end, at + 1)];
}

/** Whether a line goes on with a list's item: indented, or the next line of a paragraph that wasn't. */
function belongs(lines: string[], at: number, indent: number): boolean {
  const line = lines[at]!;
  if (BLANK.test(line)) {
    let after = at + 1;
    while (after < lines.length && BLANK.test(lines[after]!)) after += 1;
    return after < lines.length && indentOf(lines[after]!) >= indent + 2;
  }
  if (indentOf(line) >= indent + 2) return true;
  return !BLANK.test(lines[at - 1]!) && !ITEM.test(line) && !interrupts(lines, at);
}

function isTable(lines: string[], at: number): boolean {
  const delimiter = lines[at + 1];
  if (!lines[at]!.includes("|") || delimiter === undefined || !delimiter.includes("-") || !DELIMITER.test(delimiter)) return false;
  return cells(lines[at]!).length === cells(delimiter).length;
}

function table(lines: string[], at: number): [Block, number] {
  const head = cells(lines[at]!);
  const align = cells(lines[at + 1]!).map((cell): Align => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return left && right ? "center" : right ? "right" : left ? "left" : null;
  });
  const rows: string[][] = [];
  let end = at + 2;
  while (end < lines.length && lines[end]!.includes("|") && !BLANK.test(lines[end]!)) {
    const row = cells(lines[end]!);
    rows.push(head.map((_, column) => row[column] ?? ""));
    end += 1;
  }
  return [{ kind: "table", align, head, rows }, end];
}

function cells(line: string): string[] {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
