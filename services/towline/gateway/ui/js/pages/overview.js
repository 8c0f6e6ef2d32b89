// The run on one page.
import { Chart } from "../charts.js";
import { append, h, replace } from "../dom.js";
import { NONE, ago, bytes, compact, duration, environment, fixed, integer, many, moment, seconds, share } from "../format.js";

export function overviewPage({ ask }) {
  const head = h("div", { class: "head" });
  const tiles = h("div", { class: "tiles" });
  const samples = h("section", { class: "card", "aria-label": "Samples" });
  const lost = h("section", { class: "card", "aria-label": "What was lost" });
  const services = h("section", { class: "card", "aria-label": "Services" });
  const streams = h("section", { class: "card", "aria-label": "Streams" });
  const reward = new Chart({ title: "Reward", note: "Per batch as trained, and the held-out evaluations.", height: 250 });
  const staleness = new Chart({ title: "Staleness", note: "Depths between a batch and the oldest version in each of its rows.", floor: 0 });
  const histogram = new Chart({ title: "Staleness of trained rows", xLabel: "depths", floor: 0 });
  const converging = new Chart({ title: "From commit to served", note: "Until the first, and until the last replica that acknowledged the version.", format: seconds, floor: 0 });
  const delta = new Chart({ title: "Bytes of a version", note: "On the wire, of a version against the one before it.", format: bytes, floor: 0 });
  const lengths = new Chart({ title: "Length", note: "Policy tokens of a trained sample, on average.", floor: 0 });
  const phases = new Chart({ title: "Making a version", format: seconds, floor: 0 });
  const element = h("div", {}, head, tiles, h("div", { class: "stack" }, reward.element, h("div", { class: "grid" }, samples, lost)),
    h("div", { class: "grid" }, staleness.element, histogram.element, converging.element, delta.element, lengths.element, phases.element),
    h("div", { class: "grid" }, services, streams));

  return {
    element,
    async look() {
      const [run, curves] = await Promise.all([ask("overview"), ask("curves")]);
      drawHead(head, run);
      drawTiles(tiles, run, curves);
      drawSamples(samples, run);
      drawLost(lost, run);
      drawServices(services, run);
      drawStreams(streams, run);
      const thinned = curves.depth.length >= 400;
      reward.set([
        { name: "train", x: curves.depth, y: curves.reward, low: thinned ? curves.reward_low : null, high: curves.reward_high, faint: true },
        { name: "held-out", x: curves.eval_depth, y: curves.eval_mean, dots: true },
      ]);
      staleness.set([
        { name: "mean", x: curves.depth, y: curves.staleness_mean },
        { name: "max", x: curves.depth, y: curves.staleness_max, kind: "step", faint: true },
      ], { name: "allowed", value: curves.max_staleness });
      histogram.set([{ name: "rows", x: Object.keys(run.staleness).map(Number), y: Object.values(run.staleness), kind: "bars" }]);
      converging.set([
        { name: "first replica", x: curves.version_depth, y: curves.first_ack_seconds, tone: 2 },
        { name: "last replica", x: curves.version_depth, y: curves.last_ack_seconds, tone: 1 },
      ]);
      delta.set([{ name: "wire bytes", x: curves.version_depth, y: curves.wire_bytes, tone: 4 }]);
      lengths.set([{ name: "policy tokens", x: curves.depth, y: curves.tokens_mean, tone: 6 }]);
      phases.set([
        { name: "encode", x: curves.version_depth, y: curves.encode_seconds },
        { name: "upload", x: curves.version_depth, y: curves.upload_seconds },
        { name: "verify", x: curves.version_depth, y: curves.verify_seconds },
      ]);
    },
  };
}

function drawHead(head, run) {
  const [text, tone] = run.ended === "steps" || (run.ended === null && run.depth >= run.steps) ? ["finished", "good"]
    : run.ended !== null ? [`ended: ${run.ended.replaceAll("_", " ")}`, run.ended === "end_of_data" ? "good" : "warn"] : run.live ? [run.state || "running", run.state ? "warn" : "info"] : ["not running", ""];
  const took = run.began_at && run.last_at ? duration((run.live && run.ended === null ? run.at : run.last_at) - run.began_at) : NONE;
  replace(head, h("h1", {}, run.run), h("span", { class: `pill ${tone}` }, text),
    h("div", { class: "progress", vars: { "--share": Math.min(run.depth / Math.max(run.steps, 1), 1) }, role: "progressbar", "aria-label": "Steps", "aria-valuemin": 0, "aria-valuemax": run.steps, "aria-valuenow": run.depth }, h("i", {})),
    h("span", { class: "num soft" }, `step ${integer(run.depth)} of ${integer(run.steps)}`),
    h("p", { class: "lead" }, [`${run.engine} engine`, environment(run.environment), `began ${moment(run.began_at)}`, took, run.epochs > 1 ? `${run.epochs - 1} trainer restarts` : null].filter(Boolean).join("  ·  ")));
}

const tile = (name, value, more = "", href = null, unit = "") =>
  h(href ? "a" : "div", { class: "tile", href }, h("div", { class: "name" }, name), h("div", { class: "value" }, value, unit && h("small", {}, ` ${unit}`)), h("div", { class: "more" }, more));

function drawTiles(tiles, run, curves) {
  const took = curves.last_ack_seconds.filter((one) => one !== null).sort((a, b) => a - b);
  const [version, count] = run.serving[0] ?? [run.version, null];
  const rows = Object.values(run.staleness).reduce((sum, one) => sum + one, 0);
  const mean = Object.entries(run.staleness).reduce((sum, [depth, one]) => sum + depth * one, 0) / Math.max(rows, 1);
  const dead = Object.values(run.dead).reduce((sum, one) => sum + one, 0);
  replace(tiles,
    tile("Reward, held-out", fixed(run.reward_held_out), run.reward_held_out === null ? "no evaluation yet" : `${fixed(run.reward_held_out_first)} at first; step ${run.held_out_depth}`),
    tile("Reward, train", fixed(run.reward_train), "of the last batch"),
    tile("Version", version ?? NONE, run.replicas ? `served by ${count} of ${run.replicas} replicas` : `${integer(run.versions)} committed`, "#/versions"),
    run.publish_to_all_p50_seconds === null
      ? tile("Commit to served", took.length ? seconds(took[Math.floor(took.length / 2)]) : NONE, "median, the last replica to acknowledge", "#/replicas")
      : tile("Published to all", seconds(run.publish_to_all_p50_seconds), `median; p99 ${seconds(run.publish_to_all_p99_seconds)}`, "#/replicas"),
    tile("Staleness", rows ? fixed(mean, 2) : NONE, `mean; at most ${Math.max(0, ...Object.keys(run.staleness))} of ${run.max_staleness} allowed`),
    run.trajectories_per_s === null
      ? tile("Trained", compact(run.trained_samples), `samples in ${integer(run.batches)} batches`, "#/trajectories?state=trained")
      : tile("Rollout", compact(run.trajectories_per_s), `${compact(run.tokens_per_s)} tokens/s`, null, "trajectories/s"),
    tile("Delta", bytes(run.delta_bytes_mean), run.delta_share_mean === null ? "a version" : `a version, ${share(run.delta_share_mean, 1)} of the model`, "#/versions"),
    tile("Dead letters", integer(dead), Object.keys(run.dead).join(", ") || "none", "#/dead"));
}

function drawSamples(card, run) {
  const states = Object.entries(run.states).sort((a, b) => b[1] - a[1]);
  replace(card, h("h2", {}, "Samples"),
    states.length ? [
      h("div", { class: "states", role: "img", "aria-label": states.map(([name, count]) => `${name}: ${count}`).join(", ") }, states.map(([name, count]) => h("i", { class: `state-${name}`, vars: { "--share": count / run.kept } }))),
      h("div", { class: "states-legend" }, states.map(([name, count]) => h("a", { class: `state-${name}`, href: `#/trajectories?state=${name}` }, name, h("span", { class: "soft num" }, integer(count))))),
    ] : h("p", { class: "soft" }, "None is scored yet."),
    h("p", { class: "soft", vars: { "margin-top": ".6rem" } }, run.kept < run.trajectories ? `The newest ${integer(run.kept)} that were scored, of ${integer(run.trajectories)} trajectories.` : `${integer(run.trajectories)} trajectories; ${integer(run.trained_tokens)} policy tokens trained.`));
}

function counts(title, values, unit) {
  const rows = Object.entries(values).sort((a, b) => b[1] - a[1]);
  return rows.length ? [h("div", {}, h("h3", {}, title), h("dl", { class: "facts" }, rows.flatMap(([name, count]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, many(count, unit))])))] : [];
}

function drawLost(card, run) {
  const found = [...counts("Dropped", run.dropped, "sample"), ...counts("Failed attempts", run.failures, "attempt")];
  replace(card, h("h2", {}, "What was lost"), found.length ? h("div", { class: "lost" }, found) : h("p", { class: "soft" }, "Nothing was dropped, no attempt failed."));
}

function drawServices(card, run) {
  replace(card, h("h2", {}, "Services"), run.services.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["service", "ready", "seen"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, run.services.map((one) => h("tr", {}, h("td", {}, `${one.service.replaceAll("_", " ")} `, h("span", { class: "soft" }, one.replica)),
      h("td", {}, h("span", { class: `pill ${one.ready ? "good" : "warn"}` }, one.ready ? "ready" : "not ready"), one.reason && h("div", { class: "soft" }, one.reason)), h("td", { class: "soft nowrap" }, ago(one.seen_at, run.at)))))))
    : h("p", { class: "soft" }, run.where.startsWith("bundle") ? "A bundle has no services." : "None has spoken in the last seconds: the run isn't up."));
}

function drawStreams(card, run) {
  card.hidden = !run.streams.length;
  replace(card, h("h2", {}, "Streams"));
  append(card, [h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "stream"), ["messages", "bytes", "full"].map((name) => h("th", { class: "n", scope: "col" }, name)))),
    h("tbody", {}, run.streams.map((one) => {
      const full = one.max_bytes > 0 ? one.bytes / one.max_bytes : 0;
      return h("tr", {}, h("td", {}, one.name), h("td", { class: "n" }, integer(one.messages)), h("td", { class: "n" }, bytes(one.bytes)),
        h("td", { class: "n" }, h("span", { class: full > 0.8 ? "meter bad" : "meter", vars: { "--share": full } }, h("i", {})), ` ${share(full)}`));
    }))))]);
}
