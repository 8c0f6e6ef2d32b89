// One sample's life: its tokens, who chose each under which version and how surely, and what became of it.
import { h, replace } from "../dom.js";
import { NONE, environment, fixed, integer, many, seconds, time } from "../format.js";
import { TokenView } from "../tokens.js";
import { lastList, statePill } from "./trajectories.js";

export function trajectoryPage({ ask, go, title }, { rest }) {
  const [id] = rest;
  const element = h("div", {}, h("p", { class: "soft" }, "…"));
  let shown = "";
  let tokens = null;
  let neighbours = [];
  lastList.at = id;
  const walk = (ids, step) => {
    const to = ids.includes(id) ? ids[ids.indexOf(id) + step] : undefined;
    if (to) go(`#/trajectory/${to}`);
    return true;
  };
  const back = () => go(lastList.query || "#/trajectories");

  function draw(answer) {
    const { life } = answer;
    neighbours = answer.neighbours;
    const kept = tokens?.state;
    const inspector = h("section", { class: "card inspector", "aria-label": "The token" });
    tokens = answer.tokens ? new TokenView(answer, inspector, kept) : null;
    replace(element,
      h("div", { class: "head" }, h("h1", {}, h("span", { class: "mono" }, answer.id)), statePill(life.fate), life.score ? h("span", { class: "pill" }, `reward ${fixed(life.score.reward)}`) : null,
        h("span", { class: "soft" }, life.lane), h("span", { class: "spring" }), h("button", { type: "button", class: "quiet", onclick: back }, "Back to the list ", h("kbd", {}, "u")),
        h("p", { class: "lead fate" }, `${life.explanation[0]?.toUpperCase() ?? ""}${life.explanation.slice(1)}.`)),
      h("div", { class: "life" },
        h("div", { class: "stack" }, tokens?.element ?? missing(life), outcome(life), history(life)),
        h("div", { class: "stack" }, tokens ? inspector : null, facts(life), group(answer))));
  }
  return {
    element,
    async look() {
      const answer = await ask(`trajectories/${encodeURIComponent(id)}`);
      const text = JSON.stringify(answer);
      if (text === shown) return;
      shown = text;
      draw(answer);
      title(answer.id);
    },
    key(event) {
      if (event.key === "u") return back(), true;
      if ("jk".includes(event.key)) return walk(lastList.ids, event.key === "j" ? 1 : -1);
      if ("[]".includes(event.key)) return walk(neighbours, event.key === "]" ? 1 : -1);
      return tokens?.key(event) ?? false;
    },
  };
}

function missing(life) {
  return h("section", { class: "card" }, h("h2", {}, "Tokens"), h("p", { class: life.malformed ? "bad" : "soft" }, life.malformed ? `Its trajectory can't be decoded: ${life.malformed}` : "No trajectory of it is in the stream."));
}

const fact = (name, value) => (value === null || value === undefined || value === "" ? [] : [h("dt", {}, name), h("dd", {}, value)]);

function facts(life) {
  const own = life.trajectory;
  const batch = life.batch;
  return h("section", { class: "card" }, h("h2", {}, "Facts"), h("dl", { class: "facts" },
    fact("prompt", life.prompt ? `${life.prompt.source}, row ${integer(life.prompt.index)}, pass ${life.prompt.epoch}` : null), fact("environment", life.prompt?.environment ? environment(life.prompt.environment) : null),
    fact("reference", life.prompt?.reference && Object.keys(life.prompt.reference).length ? h("code", {}, JSON.stringify(life.prompt.reference)) : null),
    fact("finish", own?.finish.replaceAll("_", " ")), fact("tokens", own ? `${integer(own.policy_tokens)} of the policy, ${integer(life.total)} in all` : null),
    fact("sampled by", own ? `replica ${own.replica}, ${own.engine}` : null), fact("temperature", own?.temperature), fact("seed", own?.seed ? h("code", {}, own.seed) : null),
    fact("generating", own ? `${seconds(own.generate_seconds)}, ${seconds(own.queue_seconds)} queued` : null), fact("in TRAJECTORY", own ? `${integer(own.sequence)}` : null),
    fact("batch", batch ? [h("a", { href: `#/trajectories?step=${batch.for_depth}` }, `step ${batch.for_depth}`), `, ${many(life.staleness, "depth")} old, ${many(batch.rows, "row")}`] : null),
    fact("trained into", life.version ? [h("a", { href: `#/trajectories?version=${life.version.number}` }, `version ${life.version.number}`), life.version.on_line ? "" : " (off the line)"] : null),
    fact("digest", own ? h("code", {}, own.digest) : null)));
}

function group(answer) {
  const rewards = answer.life.group_rewards;
  const high = Math.max(1, ...Object.values(rewards).map(Math.abs));
  if (answer.neighbours.length < 2) return null;
  return h("section", { class: "card" }, h("h2", {}, "Its group ", h("kbd", {}, "["), " ", h("kbd", {}, "]")), h("nav", { class: "siblings", "aria-label": "Samples of the group" }, answer.neighbours.map((id, sample) =>
    h("a", { href: `#/trajectory/${id}`, "aria-current": id === answer.id ? "page" : null }, h("span", { class: "mono" }, id),
      h("span", { class: "meter", vars: { "--share": Math.max(rewards[sample] ?? 0, 0) / high } }, h("i", {})), h("span", { class: "num right" }, sample in rewards ? fixed(rewards[sample]) : NONE)))));
}

function outcome(life) {
  const components = Object.entries(life.score?.components ?? {});
  const rows = [
    ...(life.score ? [["reward", fixed(life.score.reward, 4), `${life.score.verifier}${life.score.same_bytes ? "" : "; of other bytes than these"}`], ...components.map(([name, value]) => [name, fixed(value, 4), "component"])] : []),
  ];
  if (!rows.length && !life.failures.length && !life.dead.length) return null;
  return h("section", { class: "card" }, h("h2", {}, "Reward"),
    rows.length ? h("table", {}, h("tbody", {}, rows.map(([name, value, note], place) => h("tr", {}, h("td", {}, place ? name : h("b", {}, name)), h("td", { class: "n" }, place ? value : h("b", {}, value)), h("td", { class: "soft" }, note))))) : h("p", { class: "soft" }, "It has no score."),
    life.failures.map((one) => h("p", { class: "bad" }, `${one.stage}${one.final ? ", for good" : ""}: ${one.reason} `, h("span", { class: "soft" }, `(${one.replica}, ${time(one.at)})`))),
    life.dead.map((reason) => h("p", { class: "bad" }, "Dead letter: ", reason)));
}

function history(life) {
  return h("section", { class: "card" }, h("h2", {}, "What happened when"), h("ol", { class: "timeline" }, life.timeline.map(([name, at], place) =>
    h("li", {}, h("time", {}, time(at)), h("span", { class: "gap" }, place ? `+${seconds(Math.max(at - life.timeline[place - 1][1], 0))}` : ""), h("span", {}, name)))),
    life.replicas.length ? h("div", { class: "scroll", vars: { "margin-top": ".9rem" } }, h("table", {}, h("thead", {}, h("tr", {}, ["replica", "now", "version"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, life.replicas.map((one) => h("tr", {}, h("td", {}, one.replica), h("td", {}, one.relation), h("td", { class: "num" }, one.version)))))) : null);
}
