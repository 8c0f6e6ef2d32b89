// Numbers and times for people.
const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
export const NONE = "–";

export const integer = (value) => (value === null || value === undefined ? NONE : whole.format(value));
export const fixed = (value, digits = 3) => (value === null || value === undefined ? NONE : value.toFixed(digits));
export const share = (value, digits = 0) => (value === null || value === undefined ? NONE : `${(100 * value).toFixed(digits)}%`);

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${Math.round(value)} B`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return duration(value);
}

export function duration(value) {
  const total = Math.max(Math.round(value), 0);
  const [d, hours, minutes] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60];
  if (d) return `${d} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
}

export const many = (count, unit) => `${integer(count)} ${unit}${count === 1 ? "" : "s"}`;
export const time = (at) => (at ? clock.format(at * 1000) : NONE);
export const moment = (at) => (at ? day.format(at * 1000) : NONE);
export const ago = (at, now = Date.now() / 1000) => (at ? `${duration(now - at)} ago` : NONE);
export const compact = (value) => (Math.abs(value) >= 1e4 ? `${+(value / 1000).toPrecision(3)}k` : `${+value.toPrecision(3)}`);
export const environment = (name) => (name ? name.split(/[:.]/).pop() : NONE);
export const versions = (first, last) => (first === null ? NONE : first === last ? `${first}` : `${first}–${last}`);
