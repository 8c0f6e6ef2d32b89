// Charts as SVG, drawn anew as the figure's width changes. Pointer or arrow keys show the values at one place.
import { h, s } from "./dom.js";
import { compact } from "./format.js";

const HEIGHT = 210;
const EDGE = { top: 10, right: 14, bottom: 24 };
const CHARACTER = 6.4;

function ticks(low, high, most) {
  const rough = (high - low) / Math.max(most, 1) || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 2.5, 5, 10].find((factor) => size * factor >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

// series: [{ name, x: [], y: [], kind: "line" | "points" | "step" | "bars", low, high, tone }]; a null in y is a gap.
export class Chart {
  constructor({ title, note = "", xLabel = "step", format = compact, floor, ceiling, height = HEIGHT, wholeY = false }) {
    this.options = { title, xLabel, format, floor, ceiling, height, wholeY };
    this.series = [];
    this.bound = null;
    this.at = null;
    this.legend = h("ul", { class: "legend" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img" }, this.tip);
    this.element = h("figure", { class: "chart card" }, h("figcaption", {}, h("h3", {}, title), this.legend), this.plot, note && h("p", { class: "note" }, note));
    this.plot.addEventListener("pointermove", (event) => this.point(event.clientX - this.plot.getBoundingClientRect().left));
    this.plot.addEventListener("pointerleave", () => this.hide());
    this.plot.addEventListener("blur", () => this.hide());
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  set(series, bound = null) {
    this.series = series.filter((one) => one.x.length);
    this.bound = bound;
    this.legend.replaceChildren(
      ...this.series.map((one, place) => h("li", { class: `tone-${one.tone ?? place}` }, one.name)),
      ...(bound ? [h("li", { class: "bound" }, bound.name)] : []),
    );
    this.plot.setAttribute("aria-label", this.summary());
    this.draw();
  }

  summary() {
    const said = this.series.map((one) => {
      const known = one.y.filter((value) => value !== null);
      return known.length ? `${one.name} from ${this.options.format(known[0])} to ${this.options.format(known.at(-1))}` : `${one.name}: none yet`;
    });
    return `${this.options.title}: ${said.join("; ") || "nothing yet"}. Arrow keys read values.`;
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.plot.querySelector("svg")?.remove();
    const values = this.series.flatMap((one) => [...one.y, ...(one.low ?? []), ...(one.high ?? [])]).filter((value) => value !== null);
    const xs = this.series.flatMap((one) => one.x);
    const { height, format, xLabel } = this.options;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    this.plot.prepend(svg);
    if (!values.length) {
      svg.append(s("text", { x: width / 2, y: height / 2, class: "empty", "text-anchor": "middle" }, "nothing yet"));
      return;
    }
    const bars = this.series.some((one) => one.kind === "bars");
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    if (bars) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    if (x0 === x1) x1 = x0 + 1;
    let [y0, y1] = [this.options.floor ?? Math.min(...values), this.options.ceiling ?? Math.max(...values, this.bound?.value ?? -Infinity)];
    if (y0 === y1) y1 = y0 + (Math.abs(y0) || 1);
    if (this.options.floor === undefined) y0 -= (y1 - y0) * 0.04;
    if (this.options.ceiling === undefined) y1 += (y1 - y0) * 0.06;
    const yTicks = ticks(y0, y1, 5).filter((value) => !this.options.wholeY || Number.isInteger(value));
    const left = Math.max(...yTicks.map((value) => format(value).length), xLabel.length) * CHARACTER + 12;
    const right = width - EDGE.right;
    const bottom = height - EDGE.bottom;
    const X = (value) => left + ((value - x0) / (x1 - x0)) * (right - left);
    const Y = (value) => bottom - ((value - y0) / (y1 - y0)) * (bottom - EDGE.top);
    this.scale = { X, x0, x1, right, bottom };
    for (const value of yTicks) {
      svg.append(s("line", { x1: left, x2: right, y1: Y(value), y2: Y(value), class: "gridline" }));
      svg.append(s("text", { x: left - 8, y: Y(value) + 3.5, class: "tick", "text-anchor": "end" }, format(value)));
    }
    for (const value of ticks(x0, x1, Math.min(8, width / 70))) {
      if (!Number.isInteger(value)) continue;
      svg.append(s("text", { x: X(value), y: bottom + 16, class: "tick", "text-anchor": "middle" }, compact(value)));
    }
    svg.append(s("text", { x: left - 8, y: bottom + 16, class: "axis", "text-anchor": "end" }, xLabel));
    this.series.forEach((one, place) => svg.append(this.mark(one, one.tone ?? place, X, Y, bottom, (right - left) / (x1 - x0))));
    if (this.bound && this.bound.value <= y1) svg.append(s("line", { x1: left, x2: right, y1: Y(this.bound.value), y2: Y(this.bound.value), class: "bound" }));
    this.cross = s("line", { class: "cross", y1: EDGE.top, y2: bottom, visibility: "hidden" });
    svg.append(this.cross);
    if (this.at !== null) this.show(this.at);
  }

  mark(one, tone, X, Y, bottom, unit) {
    const group = s("g", { class: `tone-${tone}` });
    if (one.kind === "bars") {
      const wide = Math.max(Math.min(unit * 0.7, 46), 1.5);
      one.x.forEach((x, i) => {
        if (one.y[i]) group.append(s("rect", { x: X(x) - wide / 2, y: Y(one.y[i]), width: wide, height: Math.max(bottom - Y(one.y[i]), 0), rx: Math.min(3, wide / 4), class: "fill" }));
      });
      return group;
    }
    if (one.low && one.x.length > 1) {
      const there = one.x.map((x, i) => `${X(x).toFixed(1)},${Y(one.high[i]).toFixed(1)}`);
      const back = one.x.map((x, i) => `${X(x).toFixed(1)},${Y(one.low[i]).toFixed(1)}`).reverse();
      group.append(s("polygon", { points: [...there, ...back].join(" "), class: "band" }));
    }
    if (one.kind !== "points") {
      let path = "";
      let open = false;
      one.x.forEach((x, i) => {
        if (one.y[i] === null) {
          open = false;
          return;
        }
        const [px, py] = [X(x).toFixed(1), Y(one.y[i]).toFixed(1)];
        path += open ? (one.kind === "step" ? `H${px}V${py}` : `L${px} ${py}`) : `M${px} ${py}`;
        open = true;
      });
      group.append(s("path", { d: path, class: one.faint ? "line faint" : "line" }));
    }
    if (one.kind === "points" || one.dots || one.x.length === 1) {
      one.x.forEach((x, i) => {
        if (one.y[i] !== null) group.append(s("circle", { cx: X(x), cy: Y(one.y[i]), r: 3.4, class: "dot" }));
      });
    }
    return group;
  }

  places() {
    return [...new Set(this.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  }

  point(px) {
    if (!this.scale || !this.series.length) return;
    const { X } = this.scale;
    this.show(this.places().reduce((best, x) => (Math.abs(X(x) - px) < Math.abs(X(best) - px) ? x : best)));
  }

  show(x) {
    if (!this.scale || !this.cross) return;
    this.at = x;
    const px = this.scale.X(x);
    this.cross.setAttribute("x1", px);
    this.cross.setAttribute("x2", px);
    this.cross.setAttribute("visibility", "visible");
    const rows = this.series.flatMap((one, place) => {
      const i = one.x.indexOf(x);
      return i < 0 || one.y[i] === null ? [] : [h("div", { class: `tone-${one.tone ?? place}` }, h("span", {}, one.name), h("b", {}, this.options.format(one.y[i])))];
    });
    this.tip.replaceChildren(h("small", {}, `${this.options.xLabel} ${compact(x)}`), ...rows);
    this.tip.hidden = false;
    const left = px > this.scale.right / 2 ? px - this.tip.offsetWidth - 12 : px + 12;
    this.tip.style.setProperty("transform", `translate(${Math.max(left, 0)}px, 8px)`);
  }

  hide() {
    this.at = null;
    this.tip.hidden = true;
    this.cross?.setAttribute("visibility", "hidden");
  }

  key(event) {
    const places = this.places();
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.hide();
    if (!step || !places.length) return;
    event.preventDefault();
    const now = this.at === null ? (step > 0 ? -1 : places.length) : places.indexOf(this.at);
    this.show(places[Math.min(Math.max(now + step, 0), places.length - 1)]);
  }
}

// A line without axes, as high as a word.
export function spark(values, label, width = 110, height = 22) {
  const high = Math.max(...values, 1e-9);
  const points = values.map((value, i) => `${((i / Math.max(values.length - 1, 1)) * (width - 4) + 2).toFixed(1)},${(height - 2 - (value / high) * (height - 4)).toFixed(1)}`);
  return s("svg", { class: "spark tone-0", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, s("polyline", { points: points.join(" "), class: "line" }));
}
