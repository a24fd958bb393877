// One token as a reader sees it: a shaded word, its space unshaded, and marks for what has no shape of its own.
import { h } from "../dom";
import type { TokenItem } from "../protocol";

/** Below this probability a token is uncertain. */
export const UNCERTAIN = 0.3;

const BREAKS = [0.9, 0.6, 0.3, 0.1];
const NEWLINE = "⏎";
const WITHIN = "◌";

/** The step of shading: 0 from 90 %, then 60, 30, 10, and 4 below. */
export function level(p: number): number {
  const step = BREAKS.findIndex((least) => p >= least);
  return step < 0 ? BREAKS.length : step;
}

/** Whether another token was likelier, as far as that is known. */
export function likelier(token: TokenItem): boolean {
  return token.top.length > 0 && token.rank !== 1;
}

export function share(p: number): string {
  return p > 0 && p < 0.0005 ? "< 0.1 %" : `${(p * 100).toFixed(1)} %`;
}

/** A token's text with every space and line break to be seen. */
export function visible(text: string): string {
  return text.replaceAll(" ", "·").replaceAll("\n", NEWLINE).replaceAll("\t", "→") || WITHIN;
}

function spoken(text: string): string {
  if (!text) return "part of a character";
  return text.trim() || (text.includes("\n") ? "line break" : "space");
}

export function label(token: TokenItem): string {
  const name = `${spoken(token.text)}, ${share(token.p)}`;
  if (!likelier(token)) return name;
  const before = token.top.slice(0, (token.rank ?? 4) - 1).slice(0, 3);
  return `${name}; likelier: ${before.map((one) => `${spoken(one.text)} ${share(one.p)}`).join(", ")}`;
}

/** White space around a word; what a line break is stays visible. */
function space(text: string): Node[] {
  return text
    .split(/(\n)/)
    .filter(Boolean)
    .flatMap((part) =>
      part === "\n"
        ? [h("i", { class: "mark", "aria-hidden": "true", "data-mark": NEWLINE }), document.createTextNode(part)]
        : [document.createTextNode(part)],
    );
}

/** The element of a token; copying it copies the token's text and nothing else. */
export function wordElement(token: TokenItem, id: string, index: number): HTMLElement {
  const { text } = token;
  const word = text.trim();
  const shown = h("b", { "data-level": level(token.p), "data-second": likelier(token) });
  const element = h("span", {
    role: "option",
    id,
    "data-i": index,
    "aria-selected": "false",
    "aria-label": label(token),
  });
  if (token.part === "marker") shown.classList.add("chip");
  if (word) {
    const begin = text.indexOf(word);
    shown.textContent = word;
    element.append(...space(text.slice(0, begin)), shown, ...space(text.slice(begin + word.length)));
  } else if (text && !text.includes("\n")) {
    shown.classList.add("blank");
    shown.dataset.mark = visible(text);
    shown.textContent = text;
    element.append(shown);
  } else {
    shown.classList.add("mark");
    shown.dataset.mark = text ? NEWLINE.repeat(text.split("\n").length - 1) : WITHIN;
    element.append(shown, text);
  }
  return element;
}
