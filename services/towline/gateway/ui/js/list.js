// A table whose rows j and k walk. Rows keep their selection by key while what they show changes.
import { h, replace } from "./dom.js";

// columns: [{ name, cell: (row) => node or text, kind: "n" | "wide" | "id", narrow: "full" | "two" | "bare" }]; in a narrow window a
// row is a card of three columns, and `narrow` cells stand there without their name.
export class List {
  constructor({ label, columns, key, open, empty, rowClass = () => "", detail = null }) {
    Object.assign(this, { columns, key, open, empty, rowClass, detail });
    this.rows = [];
    this.selected = null;
    this.opened = new Set();
    this.body = h("tbody", {});
    this.table = h("table", { class: "list cards", "aria-label": label },
      h("thead", {}, h("tr", {}, ...columns.map((one) => h("th", { class: one.kind === "n" ? "n" : null, scope: "col" }, one.name)))), this.body);
    this.none = h("div", { class: "empty-state", hidden: true });
    this.element = h("div", { class: "scroll" }, this.table, this.none);
  }

  set(rows) {
    this.rows = rows;
    const text = JSON.stringify(rows);
    if (text !== this.text) this.draw();
    this.text = text;
  }

  draw() {
    const last = this.columns.length;
    replace(this.body, this.rows.map((row) => {
      const key = String(this.key(row));
      const chosen = key === this.selected;
      const line = h("tr", {
        tabindex: chosen || (this.selected === null && row === this.rows[0]) ? "0" : "-1", "data-key": key, class: this.rowClass(row),
        "aria-selected": chosen ? "true" : "false", "aria-expanded": this.detail ? String(this.opened.has(key)) : null,
        onclick: (event) => {
          if (event.target.closest("a, button") || String(getSelection())) return;
          this.select(key);
          this.activate(row);
        },
        onfocus: () => this.mark(key),
      }, ...this.columns.map((one) => {
        const shown = one.cell(row);
        const blank = shown === null || shown === "";
        return h("td", { class: [one.kind ?? "", one.narrow ?? "", blank ? "blank" : ""].join(" ").trim() || null, "data-label": one.kind === "id" || one.narrow ? null : one.name }, shown);
      }));
      return this.opened.has(key) ? [line, h("tr", { class: "detail-row" }, h("td", { colspan: last, class: "wide" }, this.detail(row)))] : [line];
    }));
    this.none.hidden = this.rows.length > 0;
    this.table.hidden = this.rows.length === 0;
    if (!this.rows.length) replace(this.none, this.empty());
  }

  activate(row) {
    if (!this.detail) return this.open?.(row);
    const key = String(this.key(row));
    if (!this.opened.delete(key)) this.opened.add(key);
    return this.draw();
  }

  mark(key) {
    this.selected = key;
    for (const line of this.body.children) {
      if (line.dataset.key === undefined) continue;
      const mine = line.dataset.key === key;
      line.setAttribute("aria-selected", String(mine));
      line.tabIndex = mine ? 0 : -1;
    }
  }

  select(key) {
    this.mark(key);
    const line = this.body.querySelector(`[data-key="${CSS.escape(key)}"]`);
    line?.focus({ preventScroll: true });
    line?.scrollIntoView({ block: "nearest" });
  }

  key_(event) {
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    const now = this.rows.findIndex((row) => String(this.key(row)) === this.selected);
    if (step && this.rows.length) {
      const inside = this.body.contains(document.activeElement);
      if (event.key.startsWith("Arrow") && !inside) return false;
      const to = now < 0 ? 0 : Math.min(Math.max(now + step, 0), this.rows.length - 1);
      this.select(String(this.key(this.rows[to])));
      return true;
    }
    if (event.key === "Enter" && now >= 0 && !event.target.closest("a, button")) {
      this.activate(this.rows[now]);
      return true;
    }
    return false;
  }
}
