import { afterEach, beforeEach, expect, test } from "vitest";
import { type FakeModel, fixture, mount } from "./fixture";

let model: FakeModel;
let el: HTMLElement;
let cleanUp: () => void;

beforeEach(() => {
  ({ model, el, cleanUp } = mount());
});
afterEach(() => {
  cleanUp();
  el.remove();
});

const button = (selector: string) => el.querySelector<HTMLButtonElement>(`button${selector}`)!;
const commands = () => model.sent.filter((message) => message.kind !== "view");

test("a view announces itself in the form of the fixture", () => {
  expect(Object.keys(model.sent[0]!).sort()).toEqual(Object.keys(fixture.messages.view).sort());
  expect(model.sent[0]).toMatchObject({ kind: "view", open: true });
});

test("abort of one request", () => {
  button('[aria-label="Abort 7f3a"]').click();
  expect(commands()).toEqual([fixture.messages.abort]);
});

test("pause, resume and restart act on the first press", () => {
  button('[data-do="pause"]').click();
  model.set({ engine: { ...fixture.traits.engine, state: "paused" } });
  button('[data-do="pause"]').click();
  model.set({ engine: { ...fixture.traits.engine, state: "stopped", can_restart: true }, rows: [], progress: [] });
  button('[data-do="restart"]').click();
  expect(commands()).toEqual([fixture.messages.pause, fixture.messages.resume, fixture.messages.restart]);
});

test("clear cache", () => {
  button('[data-do="clear"]').click();
  expect(commands()).toEqual([fixture.messages.clear_cache]);
});

test("abort all and stop act on the second press", () => {
  button('[data-do="abort-all"]').click();
  button('[data-do="stop"]').click();
  expect(commands()).toEqual([]);
  button('[data-do="abort-all"]').click();
  button('[data-do="stop"]').click();
  expect(commands()).toEqual([fixture.messages.abort_all, fixture.messages.stop]);
});
