// Numbers as people read them.

const PREFIXES = ["", "k", "M", "G", "T"];

export function scaled(value, unit) {
  if (!Number.isFinite(value)) return "–";
  let step = 0;
  let size = Math.abs(value);
  while (size >= 999.5 && step < PREFIXES.length - 1) {
    size /= 1000;
    step += 1;
  }
  const digits = size >= 100 || (step === 0 && Number.isInteger(size)) ? 0 : size >= 10 ? 1 : 2;
  return `${value < 0 ? "−" : ""}${size.toFixed(digits)} ${PREFIXES[step]}${unit}`.trim();
}

export const bytes = (value) => scaled(value, "B");
export const rate = (value) => (value === null || value === undefined ? "–" : scaled(value, "B/s"));
// Of whole things; means of few of them have a decimal.
export const count = (value) => (value === null || value === undefined ? "–" : Number(value.toFixed(value < 10 ? 1 : 0)).toLocaleString("en"));
export const tokens = count;
export const percent = (share, digits = 0) => (Number.isFinite(share) ? `${(100 * share).toFixed(digits)} %` : "–");

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.01) return `${(1000 * value).toFixed(0)} ms`;
  return value ? `${(1000 * value).toFixed(2)} ms` : "0";
}

export function clock(epochS) {
  return new Date(1000 * epochS).toLocaleTimeString("en-GB");
}

// Two times of about one size, the unit said once where it is the same.
export function pair(a, b) {
  const [first, second] = [seconds(a), seconds(b)];
  const [number, unit] = first.split(" ");
  return unit && second.endsWith(` ${unit}`) ? `${number} / ${second}` : `${first} / ${second}`;
}
