// Messages that nobody could act on, whole, with the reason.
import { h, replace } from "../dom.js";
import { List } from "../list.js";
import { bytes, integer, moment, time } from "../format.js";

export function deadPage({ ask, go, run }, { query }) {
  let pages = [];
  let before = null;
  let next = null;
  const stage = query.get("stage") ?? "";
  const contents = new Map();
  const stages = h("div", { class: "segmented", role: "group", "aria-label": "Stage" });
  const pager = h("div", { class: "pager" });
  const list = new List({
    label: "Dead letters",
    key: (row) => row.sequence,
    empty: () => [h("b", {}, "No dead letters"), "Every message could be acted on."],
    detail: (row) => details(row),
    columns: [
      { name: "letter", kind: "id", cell: (row) => h("b", {}, row.sequence) },
      { name: "stage", narrow: "two", cell: (row) => h("span", { class: "pill warn" }, row.stage) },
      { name: "sample", cell: (row) => (row.sample ? h("a", { class: "mono", href: `#/trajectory/${row.sample}`, tabindex: "-1" }, row.sample) : "") },
      { name: "reason", kind: "wide grow", narrow: "full", cell: (row) => row.reason },
      { name: "bytes", kind: "n", cell: (row) => bytes(row.nbytes) },
      { name: "at", kind: "nowrap soft", cell: (row) => time(row.at) },
    ],
  });
  function details(row) {
    const box = h("pre", { class: "content", tabindex: "0", "aria-label": "The message's content" }, contents.get(row.sequence) ?? "…");
    if (!contents.has(row.sequence)) {
      contents.set(row.sequence, "…");
      ask(`dead/${row.sequence}`).then((answer) => {
        contents.set(row.sequence, written(answer.content));
        list.draw();
      }, (error) => {
        contents.delete(row.sequence);
        box.textContent = error.message;
      });
    }
    return h("div", { class: "detail" }, h("div", {}, h("dl", { class: "facts" }, h("dt", {}, "when"), h("dd", {}, moment(row.at)), Object.entries(row.context).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "string" ? value : JSON.stringify(value))])),
      h("p", { class: "soft", vars: { "margin-top": ".8rem" } }, "Put right what was wrong, then ", h("code", {}, `towline dead requeue RUN ${row.sequence}`), " has the prompt admitted again.")), box);
  }
  function turn(to) {
    if (to === "older" && next !== null) {
      pages.push(before);
      before = next;
    } else if (to === "newer" && pages.length) before = pages.pop();
    else return;
    run(look());
  }
  async function look() {
    const answer = await ask("dead", { before, stage, limit: 50 });
    next = answer.next;
    list.set(answer.rows);
    const all = Object.values(answer.stages).reduce((sum, one) => sum + one, 0);
    replace(stages, [["", all], ...Object.entries(answer.stages)].map(([name, count]) => h("button", { type: "button", "aria-pressed": String(name === stage), "data-key": name || "all", onclick: () => go(`#/dead${name ? `?stage=${encodeURIComponent(name)}` : ""}`) }, `${name || "all"} ${integer(count)}`)));
    stages.hidden = !all;
    replace(pager, h("button", { type: "button", disabled: !pages.length, onclick: () => turn("newer"), "data-key": "newer" }, "Newer ", h("kbd", {}, "p")), h("button", { type: "button", disabled: next === null, onclick: () => turn("older"), "data-key": "older" }, "Older ", h("kbd", {}, "n")));
    pager.hidden = !pages.length && next === null;
  }
  return {
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Dead letters"), stages, h("p", { class: "lead" }, "Messages that nobody could act on, whole, with the reason and where they came from. Enter opens one.")), h("section", { class: "card" }, list.element, pager)),
    look,
    key(event) {
      if (event.key === "n") return turn("older"), true;
      if (event.key === "p") return turn("newer"), true;
      return list.key_(event);
    },
  };
}

// As JSON, a list of plain values on one line.
function written(content) {
  return JSON.stringify(content, null, 2).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, inside) => `[${inside.replace(/\s*\n\s*/g, " ")}]`);
}
