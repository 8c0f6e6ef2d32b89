// The LOG's versions: what each weighs, how long it took, and who serves it.
import { h, replace } from "../dom.js";
import { List } from "../list.js";
import { NONE, bytes, fixed, integer, moment, seconds, share, time } from "../format.js";

export function versionsPage({ ask, run }) {
  let before = null;
  let pages = [];
  let next = null;
  let replicas = 0;
  const head = h("div", { class: "head" }, h("h1", {}, "Versions"), h("p", { class: "lead" }, "Every committed policy version, the newest first. Enter shows its acknowledgements and where it lies."));
  const pager = h("div", { class: "pager" });
  const list = new List({
    label: "Versions",
    key: (row) => row.number,
    rowClass: (row) => (row.on_line ? "" : "off-line"),
    empty: () => [h("b", {}, "No version yet"), "The first is the base model, as entry 0 of the LOG."],
    detail: (row) => details(row),
    columns: [
      { name: "version", kind: "id", narrow: "full", cell: (row) => [h("b", {}, row.number), " ", row.quarantined ? h("span", { class: "pill bad" }, "quarantined") : !row.on_line ? h("span", { class: "pill warn" }, "off the line") : row.kind === "base" ? h("span", { class: "pill" }, "base model") : null] },
      { name: "step", kind: "n", cell: (row) => integer(row.depth) },
      { name: "committed", kind: "nowrap", cell: (row) => time(row.at) },
      { name: "wire", kind: "n", cell: (row) => (row.wire_bytes === null ? "" : [bytes(row.wire_bytes), " ", h("span", { class: "soft" }, share(row.wire_bytes / row.model_bytes, 1))]) },
      { name: "changed", kind: "n", cell: (row) => share(row.density, 1) },
      { name: "encode", kind: "n", cell: (row) => seconds(row.encode_seconds) },
      { name: "upload", kind: "n", cell: (row) => seconds(row.upload_seconds) },
      { name: "verify", kind: "n", cell: (row) => seconds(row.verify_seconds) },
      { name: "held-out", kind: "n", cell: (row) => (row.eval_mean === null ? "" : fixed(row.eval_mean)) },
      { name: "acknowledged", kind: "ack", cell: (row) => acknowledged(row, replicas) },
    ],
  });
  const turn = (to) => {
    if (to === "older" && next !== null) pages.push(before);
    if (to === "older" && next !== null) before = next;
    else if (to === "newer" && pages.length) before = pages.pop();
    else return;
    run(look());
  };
  async function look() {
    const answer = await ask("versions", { before, limit: 50 });
    ({ next, replicas } = answer);
    list.set(answer.rows);
    replace(pager, h("button", { type: "button", disabled: !pages.length, onclick: () => turn("newer"), "data-key": "newer" }, "Newer ", h("kbd", {}, "p")),
      h("button", { type: "button", disabled: next === null, onclick: () => turn("older"), "data-key": "older" }, "Older ", h("kbd", {}, "n")));
    pager.hidden = !pages.length && next === null;
  }
  return {
    element: h("div", {}, head, h("section", { class: "card" }, list.element, pager)),
    look,
    key: (event) => {
      if (event.key === "n") return turn("older"), true;
      if (event.key === "p") return turn("newer"), true;
      return list.key_(event);
    },
  };
}

function acknowledged(row, replicas) {
  if (!row.acks.length) return h("span", { class: "soft" }, "by none");
  const last = row.acks.at(-1).after_seconds;
  return h("span", { class: "nowrap" }, replicas <= 12 ? h("span", { class: "dots", "aria-hidden": "true" }, Array.from({ length: replicas }, (_, place) => h("i", { class: place < row.serving ? "on" : place < row.acks.length ? "had" : "" }))) : null,
    ` ${row.acks.length} of ${replicas} `, h("span", { class: "soft" }, row.kind === "base" ? "" : `in ${seconds(last)}`));
}

function details(row) {
  const fact = (name, value) => (value === null || value === "" || value === NONE ? [] : [h("dt", {}, name), h("dd", {}, value)]);
  return h("div", { class: "detail" },
    h("dl", { class: "facts" },
      fact("committed", moment(row.at)), fact("base", row.base === null ? "" : `version ${row.base}, epoch ${row.epoch}`),
      fact("kind", row.kind === "base" ? "base model" : `${row.representation}, codec ${row.codec}`), fact("model bytes", bytes(row.model_bytes)),
      fact("optimiser step", row.step === null ? "" : integer(row.step)), fact("checkpoint", row.checkpoint ?? ""),
      fact("skipped steps", row.skipped.length ? row.skipped.join(", ") : ""), fact("missing rows", row.missing_rows ? integer(row.missing_rows) : ""),
      fact("model digest", h("code", {}, row.model_digest)), fact("folder", h("code", {}, row.folder)),
      fact("samples", [h("a", { href: `#/trajectories?version=${row.number}` }, "sampled by it"), row.kind === "base" ? null : [" · ", h("a", { href: `#/trajectories?step=${row.depth - 1}` }, "trained into it")]])),
    h("div", {}, h("h3", {}, "Acknowledgements"), row.acks.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["replica", "after", "how", "prepare", "pause", "probe", "engine"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, row.acks.map((one) => h("tr", {}, h("td", {}, one.replica, one.now ? [" ", h("span", { class: "pill good" }, "serves it")] : null), h("td", { class: "nowrap" }, row.kind === "base" ? NONE : seconds(one.after_seconds)), h("td", {}, one.mode ?? NONE),
        h("td", { class: "nowrap" }, seconds(one.prepare_seconds)), h("td", { class: "nowrap" }, seconds(one.pause_seconds)), h("td", { class: "nowrap" }, one.probe_max_abs_diff === null ? NONE : one.probe_max_abs_diff.toExponential(1)), h("td", {}, one.engine ?? NONE))))))
      : h("p", { class: "soft" }, "No replica has served it, or its ack is long overwritten.")));
}
