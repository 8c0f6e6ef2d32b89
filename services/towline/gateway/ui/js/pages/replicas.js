// Who serves which version, how far behind, and how each came to it.
import { Chart, spark } from "../charts.js";
import { h } from "../dom.js";
import { List } from "../list.js";
import { NONE, ago, bytes, integer, moment, seconds } from "../format.js";

const TONES = { serving: "good", failed: "bad", gone: "", draining: "warn" };

export function replicasPage({ ask }) {
  let latest = null;
  const list = new List({
    label: "Replicas",
    key: (row) => row.replica,
    empty: () => [h("b", {}, "No replica yet"), "A rollout worker shows here from its first sign of life."],
    detail: (row) => details(row),
    columns: [
      { name: "replica", kind: "id", cell: (row) => [h("b", {}, row.replica), row.host ? [" ", h("span", { class: "soft" }, row.host)] : null] },
      { name: "state", narrow: "two", cell: (row) => [h("span", { class: `pill ${TONES[row.state] ?? "info"}` }, row.state), row.detail ? h("div", { class: "soft" }, row.detail) : null] },
      { name: "version", kind: "n", cell: (row) => [row.version ?? NONE, row.version !== null && row.version === latest ? null : h("div", { class: "soft" }, row.behind_seconds ? `${seconds(row.behind_seconds)} behind` : "")] },
      { name: "engine", cell: (row) => row.engine },
      { name: "slots", kind: "n", cell: (row) => (row.slots ? [h("span", { class: "meter", vars: { "--share": row.busy / row.slots } }, h("i", {})), ` ${integer(row.busy)}/${integer(row.slots)}`] : "") },
      { name: "prepare", kind: "n", cell: (row) => seconds(row.prepare_seconds) },
      { name: "pause", kind: "n", cell: (row) => seconds(row.pause_seconds) },
      { name: "probe", kind: "n", cell: (row) => (row.probe_max_abs_diff === null ? NONE : h("span", { class: row.probe_max_abs_diff > row.probe_tolerance ? "bad" : "" }, row.probe_max_abs_diff.toExponential(1))) },
      { name: "weights", cell: (row) => (row.engine_digest === null ? h("span", { class: "soft" }, "not told") : h("span", { class: row.engine_digest === "equal" ? "good" : "bad" }, row.engine_digest === "equal" ? "proved equal" : "differ")) },
      { name: "published to served", cell: (row) => (row.history.length > 1 ? spark(row.history.map(([, took]) => took), `seconds for the last ${row.history.length} versions`) : "") },
    ],
  });
  const converging = new Chart({ title: "From commit to served", note: "By the step of the version: until the first, and until the last replica that acknowledged it.", format: seconds, floor: 0 });
  return {
    element: h("div", { class: "replicas" }, h("div", { class: "head" }, h("h1", {}, "Replicas"), h("p", { class: "lead" }, "Who serves which version, and what proves it: the weights' digest as the engine computes it, and its logprobs on fixed tokens.")), h("div", { class: "stack" }, h("section", { class: "card" }, list.element), converging.element)),
    async look() {
      const [answer, curves] = await Promise.all([ask("replicas"), ask("curves")]);
      converging.set([
        { name: "first replica", x: curves.version_depth, y: curves.first_ack_seconds, tone: 2 },
        { name: "last replica", x: curves.version_depth, y: curves.last_ack_seconds, tone: 1 },
      ]);
      latest = answer.latest;
      list.set(answer.rows);
    },
    key: (event) => list.key_(event),
  };
}

function details(row) {
  const fact = (name, value) => (value ? [h("dt", {}, name), h("dd", {}, value)] : []);
  const failed = Object.entries(row.failed);
  return h("div", { class: "detail" },
    h("dl", { class: "facts" }, fact("subscription", row.subscription), fact("last seen", row.seen_at ? ago(row.seen_at) : "not in the registry any more"), fact("last ack", row.ack_at ? moment(row.ack_at) : ""), fact("activated by", row.mode),
      fact("delta", row.wire_bytes ? bytes(row.wire_bytes) : ""), fact("probe's tolerance", row.probe_tolerance === null ? "" : String(row.probe_tolerance)),
      failed.flatMap(([version, why]) => fact(`couldn't serve ${version}`, h("span", { class: "bad" }, why)))),
    h("div", {}, h("h3", {}, "Versions it served, the newest first"), h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, row.history.slice(-8).reverse().map(([version, took]) => h("tr", {}, h("td", {}, h("a", { href: `#/trajectories?version=${version}` }, `version ${version}`)), h("td", { class: "n" }, version ? `${seconds(took)} after its publication` : "the base model"))))))));
}
