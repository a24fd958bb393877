import { expect, test } from "vitest";
import { ceiling, runs, Spark } from "../src/spark";

test.each([
  [0, 1],
  [0.7, 1],
  [1.2, 2],
  [214, 300],
  [301, 500],
  [5001, 10_000],
])("the ceiling over %s is %s", (peak, top) => expect(ceiling(peak)).toBeCloseTo(top));

test("the newest sample is at the right edge", () => {
  expect(runs([0, 100], 100)).toEqual([["118 31", "119 1"]]);
});

test("a second nobody saw breaks the line", () => {
  expect(runs([50, null, 100], 100)).toEqual([["117 16"], ["119 1"]]);
});

test("an empty history draws nothing", () => {
  const spark = new Spark("Decode rate");
  spark.update([], 0);
  expect(spark.element.querySelector(".line")!.getAttribute("d")).toBe("");
});
