// The browser of samples. It stands still while one reads: newer ones are counted, and come when they're asked for.
import { h, replace } from "../dom.js";
import { List } from "../list.js";
import { NONE, environment, fixed, integer, time, versions } from "../format.js";

const STATES = ["trained", "skipped", "missing", "batched", "evaluated", "dropped", "scored", "generated"];
const FINISHES = ["stop", "length", "tool_limit", "deadline"];
const TONES = { trained: "good", evaluated: "info", batched: "info", dropped: "bad", missing: "bad", skipped: "warn" };
const MEANT = {
  skipped: "its step changed nothing", missing: "the bytes that its batch names aren't these", batched: "no version of its batch is committed yet",
  scored: "it waits for its group", generated: "it waits for its score",
};
export const statePill = (state) => h("span", { class: `pill ${TONES[state] ?? ""}`, title: MEANT[state] }, state);

// For the keys j and k of a trajectory's page, and the way back: the list as it was left.
export const lastList = { ids: [], query: "", at: null };

export function trajectoriesPage({ ask, go, run }, { query }) {
  const fields = {};
  let pages = [];
  let before = null;
  let answer = null;
  let frozen = false;
  const field = (name, label, input) => {
    fields[name] = input;
    return h("label", {}, label, input);
  };
  const text = (name, label, hint) => field(name, label, h("input", { name, type: "text", placeholder: hint, autocomplete: "off", spellcheck: "false", value: query.get(name) ?? "" }));
  const choice = (name, label, options) => {
    const select = h("select", { name }, h("option", { value: "" }, "any"), options.map((one) => h("option", { value: one }, one.replaceAll("_", " "))));
    select.value = query.get(name) ?? "";
    return field(name, label, select);
  };
  const filters = h("form", { class: "filters card", role: "search", "aria-label": "Filters", onsubmit: (event) => (event.preventDefault(), apply()), onchange: (event) => event.target.matches("select") && apply() },
    text("id", "ID", "12 or 12.3"), choice("state", "State", STATES), text("step", "Step", "3 or 3:9"), text("version", "Version", "7 or 7:"), text("reward", "Reward", "0.5:1"),
    text("environment", "Environment", "module:Class"), choice("finish", "Finish", FINISHES), choice("lane", "Lane", ["train", "eval", "session", "external"]),
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Filter"), h("button", { type: "button", onclick: () => go("#/trajectories") }, "Clear"), h("button", { type: "button", class: "more", onclick: () => filters.classList.toggle("open") }, "More")));
  const list = new List({
    label: "Trajectories",
    key: (row) => row.id,
    open: (row) => go(`#/trajectory/${row.id}`),
    empty: () => (answer?.next ? [h("b", {}, "None among the newest"), "Older ones may fit: go on with n."] : [h("b", {}, "No trajectory fits"), "Loosen a filter, or clear them all."]),
    columns: [
      { name: "sample", kind: "id", cell: (row) => h("a", { href: `#/trajectory/${row.id}`, tabindex: "-1" }, row.id) },
      { name: "state", kind: "nowrap", narrow: "two", cell: (row) => [statePill(row.state), row.lane === "train" ? null : [" ", h("span", { class: "soft" }, row.lane)]] },
      { name: "reward", kind: "n", cell: (row) => (row.reward === null ? NONE : h("span", { class: "reward" }, h("span", { class: "meter", vars: { "--share": Math.min(Math.max(row.reward, 0), 1) } }, h("i", {})), fixed(row.reward))) },
      { name: "step", kind: "n", cell: (row) => (row.step === null ? "" : integer(row.step)) },
      { name: "versions", kind: "n", cell: (row) => versions(row.version_start, row.version_end) },
      { name: "tokens", kind: "n", cell: (row) => [integer(row.policy_tokens), h("span", { class: "soft" }, ` / ${integer(row.total_tokens)}`)] },
      { name: "finish", cell: (row) => (row.finish ?? "").replaceAll("_", " ") },
      { name: "scored", kind: "nowrap soft", cell: (row) => time(row.at) },
      { name: "text", kind: "wide", narrow: "full", cell: (row) => (row.response === null ? h("span", { class: "soft" }, environment(row.environment)) : h("div", { class: "preview", title: environment(row.environment) }, h("bdi", { class: "prompt" }, visible(row.prompt)), h("bdi", {}, visible(row.response)))) },
    ],
  });
  const pager = h("div", { class: "pager", "aria-live": "polite" });

  function wanted() {
    return Object.fromEntries(Object.entries(fields).map(([name, input]) => [name, input.value.trim()]));
  }
  function apply() {
    const found = new URLSearchParams(Object.entries(wanted()).filter(([, value]) => value));
    const to = `#/trajectories${[...found].length ? `?${found}` : ""}`;
    if (to === location.hash) run(load());
    else go(to);
  }
  async function load() {
    answer = await ask("trajectories", { ...wanted(), before, limit: 50 });
    list.set(answer.rows);
    lastList.ids = answer.rows.map((row) => row.id);
    lastList.query = location.hash;
    if (!frozen && lastList.ids.includes(lastList.at)) list.select(lastList.at);
    frozen = true;
    drawPager(answer.newest);
  }
  function drawPager(newest) {
    const since = newest - answer.newest;
    replace(pager, h("span", {}, answer.total === null ? `${integer(answer.rows.length)} found here` : `${integer(answer.total)} of the newest ${integer(answer.kept)} trajectories fit`),
      since > 0 && before === null ? h("button", { type: "button", onclick: () => run(load()), "data-key": "fresh" }, `${integer(since)} newer `, h("kbd", {}, "r")) : null, h("span", { class: "spring" }),
      h("button", { type: "button", disabled: !pages.length, onclick: () => turn("newer"), "data-key": "newer" }, "Newer ", h("kbd", {}, "p")),
      h("button", { type: "button", disabled: !answer.next, onclick: () => turn("older"), "data-key": "older" }, "Older ", h("kbd", {}, "n")));
  }
  function turn(to) {
    if (to === "older" && answer?.next) {
      pages.push(before);
      before = answer.next;
    } else if (to === "newer" && pages.length) before = pages.pop();
    else return;
    run(load().then(() => list.rows.length && list.select(list.rows[0].id)));
  }
  for (const [name, input] of Object.entries(fields)) input.parentElement.classList.toggle("set", Boolean(query.get(name)));
  return {
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Trajectories")), filters, h("section", { class: "card" }, list.element, pager)),
    async look() {
      if (!frozen) return load();
      if (answer.reading !== null) return load();
      return drawPager((await ask("overview")).trajectories);
    },
    key(event) {
      if (event.key === "/") return fields.id.focus(), fields.id.select(), true;
      if (event.key === "r") return (before = null), (pages = []), run(load()), true;
      if (event.key === "n") return turn("older"), true;
      if (event.key === "p") return turn("newer"), true;
      return list.key_(event);
    },
  };
}

// Control characters as signs: a trajectory's text may hold any.
export const visible = (text) => (text ?? "").replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\u0000-\u001f]/g, (one) => String.fromCharCode(0x2400 + one.charCodeAt(0)));
