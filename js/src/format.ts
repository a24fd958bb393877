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

/** Tokens a second: a decimal while it says something. */
export function rate(value: number | null): string {
  if (value === null) return UNKNOWN;
  return value >= 1000 ? integer(value) : decimal(value);
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
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes} m ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} m`;
}
