// Numbers as a reader sees them. An unknown value is a dash, never blank.

export const UNKNOWN = "–";

const formats = [0, 1].map(
  (digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
);

export function integer(value: number): string {
  return formats[0]!.format(value);
}

export function decimal(value: number): string {
  return formats[1]!.format(value);
}

/** A count in at most five characters: 9,999, then 12.3k and 1.23M. */
export function count(value: number): string {
  if (value < 10_000) return integer(value);
  const [scale, unit] = value < 999_500 ? [1e3, "k"] : [1e6, "M"];
  const scaled = value / scale;
  const digits = scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0;
  return scaled.toFixed(digits) + unit;
}

/** Tokens a second: a decimal while it says something. */
export function rate(value: number | null): string {
  if (value === null) return UNKNOWN;
  return value >= 1000 ? count(value) : decimal(value);
}

/** Bytes in the unit that keeps them short: 4.6 GB, 310 MB. */
export function bytes(value: number | null): string {
  if (value === null) return UNKNOWN;
  return value >= 1e9 ? `${decimal(value / 1e9)} GB` : `${integer(value / 1e6)} MB`;
}

export function percent(fraction: number | null): string {
  return fraction === null ? UNKNOWN : `${Math.round(fraction * 100)} %`;
}

export function duration(seconds: number): string {
  if (seconds < 100) return `${decimal(seconds)} s`;
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  if (parts[0] === 0) parts.shift();
  return parts.map((part, index) => String(part).padStart(index ? 2 : 1, "0")).join(":");
}
