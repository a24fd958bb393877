import { expect, test } from "vitest";
import { bytes, count, duration, percent, rate } from "../src/format";

test.each([
  [null, "–"],
  [0, "0.0"],
  [61.83, "61.8"],
  [1842.2, "1,842"],
])("rate %s", (value, shown) => expect(rate(value)).toBe(shown));

test.each([
  [0, "0"],
  [9_999, "9,999"],
  [12_345, "12.3k"],
  [123_456, "123k"],
  [999_600, "1.00M"],
])("count %s", (value, shown) => expect(count(value)).toBe(shown));

test.each([
  [null, "–"],
  [0, "0 MB"],
  [310_000_000, "310 MB"],
  [4_600_000_000, "4.6 GB"],
])("bytes %s", (value, shown) => expect(bytes(value)).toBe(shown));

test.each([
  [0.44, "0.4 s"],
  [99.9, "99.9 s"],
  [125, "2:05"],
  [7265, "2:01:05"],
])("duration %s", (value, shown) => expect(duration(value)).toBe(shown));

test.each([
  [null, "–"],
  [0.68, "68 %"],
])("percent %s", (value, shown) => expect(percent(value)).toBe(shown));
