// The conversation as messages, and into a new cell below the one that shows the panel.
import type { ChatTurn } from "../protocol";

interface Message {
  role: string;
  content: string;
}

export function messages(system: string, turns: readonly ChatTurn[]): Message[] {
  const said = turns.filter(({ answer, status }) => answer !== "" || status.ending === "done");
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said.flatMap(({ question, answer }) => [
      { role: "user", content: question },
      { role: "assistant", content: answer },
    ]),
  ];
}

/** Python that makes the messages: JSON's texts are Python's too. */
export function asCell(list: readonly Message[]): string {
  return `messages = ${JSON.stringify(list, null, 4)}`;
}

/** What JupyterLab's widget manager knows of the notebook it serves; other front ends have no such thing. */
interface Notebook {
  context?: {
    model?: { sharedModel?: { cells?: readonly unknown[]; insertCell?(index: number, cell: object): unknown } };
  };
}

/** Inserts a code cell below the one that `inside` is in; false where the front end can't. */
export function insertCell(manager: unknown, inside: Element, source: string): boolean {
  const notebook = (manager as Notebook | undefined)?.context?.model?.sharedModel;
  const cell = inside.closest(".jp-Cell");
  if (!notebook?.insertCell || !cell) return false;
  const place = cell.getAttribute("data-windowed-list-index");
  const beside = [...(cell.parentElement?.children ?? [])].filter((each) => each.matches(".jp-Cell"));
  const index = place === null ? beside.indexOf(cell) : Number(place);
  notebook.insertCell(Math.min(index + 1, notebook.cells?.length ?? 0), { cell_type: "code", source, metadata: {} });
  return true;
}
