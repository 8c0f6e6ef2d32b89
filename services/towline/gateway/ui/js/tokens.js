// A trajectory's tokens, segment by segment: coloured by version or by how likely each was, with the IDs beside them if wanted.
import { h, replace } from "./dom.js";
import { NONE, integer, many } from "./format.js";
import { visible } from "./pages/trajectories.js";

const FIRST = 3000;
// A token is in the class of the first bound that its probability reaches.
const LIKELY = [[0.9, "over 0.9"], [0.5, "0.5 to 0.9"], [0.2, "0.2 to 0.5"], [0.05, "0.05 to 0.2"], [0.01, "0.01 to 0.05"], [0, "under 0.01"]];
const WHO = { prompt: "prompt", policy: "policy", environment: "environment", tool: "tool" };

export class TokenView {
  constructor(answer, inspector, state = null) {
    this.tokens = answer.tokens;
    this.own = answer.life.trajectory;
    answer.life.total = this.tokens.ids.length;
    this.inspector = inspector;
    this.state = state ?? { mode: "version", ids: false, at: null, most: FIRST };
    this.numbers = [...new Set(this.own.spans.map((span) => span.version))].sort((a, b) => a - b);
    this.spanAt = new Array(this.tokens.ids.length).fill(null);
    for (const span of this.own.spans) this.spanAt.fill(span, span.start, span.end);
    this.modes = h("div", { class: "segmented", role: "group", "aria-label": "Colour tokens by" });
    this.scale = h("div", { class: "scale" });
    this.box = h("div", {});
    this.element = h("section", { class: "card tokens-card", "aria-label": "Tokens" }, h("div", { class: "toolbar" }, h("h2", {}, "Tokens"), this.modes), this.scale, this.box);
    this.box.addEventListener("click", (event) => this.hit(event, true));
    this.box.addEventListener("pointerover", (event) => this.hit(event, false));
    this.box.addEventListener("focusin", (event) => this.hit(event, false));
    this.draw();
    this.inspect(this.state.at);
  }

  draw() {
    const { mode, ids } = this.state;
    const button = (name, text, key) => h("button", { type: "button", "aria-pressed": String(mode === name), onclick: () => this.set({ mode: name }), "data-key": name }, text, key ? [" ", h("kbd", {}, key)] : null);
    replace(this.modes, button("version", "Version", "c"), button("logprob", "Probability"), button("plain", "Plain"),
      h("button", { type: "button", "aria-pressed": String(ids), onclick: () => this.set({ ids: !ids }), "data-key": "ids" }, "IDs ", h("kbd", {}, "i")));
    const swatch = (kind, text) => h("span", {}, h("i", { class: kind }), text);
    this.scale.className = `scale by-${mode}`;
    replace(this.scale, mode === "version" ? this.numbers.map((number, place) => swatch(`v${place % 8}`, `version ${number}`)) : mode === "logprob" ? ["probability", ...LIKELY.map(([, text], place) => swatch(`p${place}`, text))] : null,
      h("span", {}, h("i", {}), "not the policy's: loss mask 0"));
    this.box.className = `by-${mode}`;
    const end = Math.min(this.tokens.ids.length, this.state.most);
    const segments = this.own.segments.filter((segment) => segment.start < end);
    replace(this.box, segments.map((segment) => this.segment(segment, end)),
      end < this.tokens.ids.length ? h("button", { type: "button", "data-key": "more", onclick: () => this.set({ most: this.state.most * 4 }) }, `${integer(this.tokens.ids.length - end)} more tokens`) : null);
    this.mark();
  }

  segment(segment, end) {
    const last = Math.min(segment.end, end);
    const nodes = [];
    for (let place = segment.start; place < last; place += 1) nodes.push(...this.token(place));
    return h("div", { class: "segment" },
      h("div", { class: segment.kind === "policy" ? "who" : "who masked" }, h("b", {}, WHO[segment.kind] ?? segment.kind), many(segment.end - segment.start, "token"), segment.kind === "policy" ? "" : ", masked"),
      h("div", { class: this.state.ids ? "tokens ids" : "tokens" }, nodes));
  }

  token(place) {
    const span = this.spanAt[place];
    const logprob = this.tokens.logprobs[place];
    const id = this.tokens.ids[place];
    const classes = ["tok"];
    if (span) classes.push(`v${this.numbers.indexOf(span.version) % 8}`, `p${likely(logprob)}`);
    else classes.push("off");
    const nodes = span && span.start === place && span.cut !== "start" ? [h("span", { class: "cut", title: `version ${span.version} goes on here` }, `${span.cut.replaceAll("_", " ")} → v${span.version}`)] : [];
    nodes.push(h("span", { class: classes.join(" "), tabindex: "-1", "data-place": place, "data-key": `t${place}` }, this.glyphs(place),
      this.state.ids ? [h("small", {}, id), h("small", {}, logprob === null ? NONE : logprob.toFixed(3))] : null));
    if (!this.state.ids && /\n$/.test(this.tokens.texts?.[place] ?? "")) nodes.push("\n");
    return nodes;
  }

  glyphs(place) {
    const text = this.tokens.texts?.[place];
    if (text === undefined) return String(this.tokens.ids[place]);
    if (text === "") return h("span", { class: "ghost" }, "∅");
    return visible(text).split(/([⏎⇥\u2400-\u241f]+)/).filter(Boolean).map((part) => (/^[⏎⇥\u2400-\u241f]/.test(part) ? h("span", { class: "ghost" }, part) : part));
  }

  set(changes) {
    Object.assign(this.state, changes);
    this.draw();
  }

  hit(event, keep) {
    const place = event.target.closest?.("[data-place]")?.dataset.place;
    if (place === undefined) return;
    if (keep || event.type === "focusin") this.choose(Number(place), keep);
    else if (this.state.at === null) this.inspect(Number(place));
  }

  choose(place, focus = true) {
    this.state.at = place;
    this.mark();
    this.inspect(place);
    const node = this.box.querySelector(`[data-place="${place}"]`);
    if (focus && node !== document.activeElement) node?.focus();
  }

  mark() {
    for (const node of this.box.querySelectorAll('[aria-selected="true"]')) node.removeAttribute("aria-selected");
    const first = this.state.at ?? this.own.spans[0]?.start ?? 0;
    for (const node of this.box.querySelectorAll('.tok[tabindex="0"]')) node.tabIndex = -1;
    const node = this.box.querySelector(`[data-place="${first}"]`);
    if (node) node.tabIndex = 0;
    if (this.state.at !== null) node?.setAttribute("aria-selected", "true");
  }

  inspect(place) {
    const at = place ?? this.own.spans[0]?.start ?? 0;
    const span = this.spanAt[at];
    const logprob = this.tokens.logprobs[at];
    const kind = this.own.segments.find((segment) => segment.start <= at && at < segment.end)?.kind ?? "";
    const fact = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
    replace(this.inspector, h("h2", {}, "Token ", h("span", { class: "num" }, integer(at)), " ", h("span", { class: "soft" }, `of ${integer(this.tokens.ids.length)}`)), h("div", { class: "glyph" }, this.glyphs(at)),
      h("dl", { class: "facts", "aria-live": "polite" }, fact("ID", h("code", {}, this.tokens.ids[at])), fact("chosen by", WHO[kind] ?? kind), fact("loss mask", span ? "1" : "0"),
        fact("logprob", logprob === null ? NONE : h("code", {}, logprob.toPrecision(6))), fact("probability", logprob === null ? NONE : Math.exp(logprob).toPrecision(3)),
        fact("version", span ? `${span.version}${span.depth === null ? ", unknown to the LOG" : `, depth ${span.depth}`}${span.on_line ? "" : ", off the line"}` : NONE),
        fact("span", span ? `[${span.start}, ${span.end})${span.cut === "start" ? "" : ` after ${span.cut.replaceAll("_", " ")}`}` : NONE)),
      h("p", { class: "soft hint", vars: { "margin-top": ".7rem" } }, h("kbd", {}, "←"), " ", h("kbd", {}, "→"), " walk, a click keeps one"));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step && !event.target.closest(".plot")) {
      const end = Math.min(this.tokens.ids.length, this.state.most) - 1;
      this.choose(this.state.at === null ? this.own.spans[0]?.start ?? 0 : Math.min(Math.max(this.state.at + step, 0), end));
      return true;
    }
    if (event.key === "Escape") return (this.state.at = null), this.mark(), true;
    if (event.key === "c") return this.set({ mode: { version: "logprob", logprob: "plain", plain: "version" }[this.state.mode] }), true;
    if (event.key === "i") return this.set({ ids: !this.state.ids }), true;
    return false;
  }
}

function likely(logprob) {
  const probability = Math.exp(logprob);
  return LIKELY.findIndex(([bound]) => probability >= bound);
}
