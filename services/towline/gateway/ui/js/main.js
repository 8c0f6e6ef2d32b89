// Which page stands there, what is asked for again and when, and the keys that all pages share.
import { Refused, ask, setToken } from "./api.js";
import { byId, h, s } from "./dom.js";
import { ago, time } from "./format.js";
import { deadPage } from "./pages/dead.js";
import { overviewPage } from "./pages/overview.js";
import { replicasPage } from "./pages/replicas.js";
import { trajectoriesPage } from "./pages/trajectories.js";
import { trajectoryPage } from "./pages/trajectory.js";
import { versionsPage } from "./pages/versions.js";

const EVERY_MS = 2000;
const PAGES = {
  overview: { title: "Overview", key: "1", make: overviewPage, icon: "M3 12l9-8 9 8M5 10v10h14V10" },
  versions: { title: "Versions", key: "2", make: versionsPage, icon: "M6 4v16M6 8h7a4 4 0 0 1 0 8H6M18 4v3" },
  replicas: { title: "Replicas", key: "3", make: replicasPage, icon: "M4 5h16v6H4zM4 13h16v6H4zM8 8h.01M8 16h.01" },
  trajectories: { title: "Trajectories", key: "4", make: trajectoriesPage, icon: "M4 6h16M4 12h10M4 18h13" },
  dead: { title: "Dead letters", short: "Dead", key: "5", make: deadPage, icon: "M4 6h16v12H4zM4 7l8 6 8-6" },
};
const HIDDEN = { trajectory: { title: "Trajectory", make: trajectoryPage, under: "trajectories" } };
const KEYS = [
  ["1 … 5", "overview, versions, replicas, trajectories, dead letters"],
  ["j  k", "next, previous: in a list, and of the list that a trajectory was opened from"],
  ["[  ]", "previous, next of a trajectory's group"],
  ["Enter", "open what is selected"],
  ["/", "to the filters; Esc leaves them"],
  ["n  p", "older, newer page of a list"],
  ["r", "ask again, from the newest"],
  ["← →", "token by token; along a chart that has the focus"],
  ["c", "tokens by version, by probability, plain"],
  ["i", "token IDs and logprobs beside the text"],
  ["u", "back to the list"],
  ["t", "theme: the system's, light, dark"],
  ["?", "this list"],
];

let page = null;
let asking = new AbortController();
let timer = 0;
let opened = null;
let lastAnswer = 0;

const context = {
  // What a page that has been left still asks for is never answered.
  ask: (path, query) => ask(path, query, asking.signal).catch((error) => (error.name === "AbortError" ? new Promise(() => {}) : Promise.reject(error))),
  go: (where) => {
    location.hash = where;
    if (location.hash !== opened) open();
  },
  // For what a page does by itself, between two looks.
  run: (promise) => promise.catch(failed),
  title: (text) => {
    document.title = `${text} · ${byId("run-name").textContent || "towline"}`;
  },
};

function where() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { name: PAGES[name] || HIDDEN[name] ? name : "overview", rest: rest.map(decodeURIComponent), query: new URLSearchParams(query ?? "") };
}

function drawNav(current, dead = 0) {
  const under = HIDDEN[current]?.under ?? current;
  const links = Object.entries(PAGES).map(([name, one]) =>
    h("li", {}, h("a", { href: `#/${name}`, "aria-current": name === under ? "page" : null, "aria-keyshortcuts": one.key },
      s("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, s("path", { d: one.icon })), one.short ?? one.title,
      name === "dead" && dead ? h("span", { class: "badge", "aria-label": `${dead} dead letters` }, dead) : null, h("kbd", { "aria-hidden": "true" }, one.key))));
  byId("nav").replaceChildren(h("ul", {}, ...links));
}

async function open() {
  opened = location.hash;
  clearTimeout(timer);
  asking.abort();
  asking = new AbortController();
  const to = where();
  const kind = PAGES[to.name] ?? HIDDEN[to.name];
  page = kind.make(context, to);
  byId("page").replaceChildren(page.element);
  drawNav(to.name, drawNav.dead);
  context.title(kind.title);
  scrollTo(0, 0);
  await look();
}

async function look() {
  clearTimeout(timer);
  const mine = page;
  try {
    const [overview] = await Promise.all([ask("overview", {}, asking.signal), mine.look()]);
    if (mine !== page) return;
    tell(overview);
  } catch (error) {
    if (error.name === "AbortError" || mine !== page) return;
    failed(error);
    if (byId("sign-in").open) return;
  }
  if (!document.hidden) timer = setTimeout(look, EVERY_MS);
}

function failed(error) {
  if (error instanceof Refused && error.status === 401) return signIn(error.message);
  if (!(error instanceof Refused)) console.error(error);
  complain(error.message);
  if (error.status !== 0) return;
  byId("pulse").className = "pulse away";
  byId("pulse").textContent = lastAnswer ? `last answer ${ago(lastAnswer)}` : "no answer";
}

function tell(overview) {
  lastAnswer = Date.now() / 1000;
  byId("run-name").textContent = overview.run;
  drawNav.dead = Object.values(overview.dead).reduce((sum, one) => sum + one, 0);
  drawNav(where().name, drawNav.dead);
  const pulse = byId("pulse");
  pulse.className = overview.live ? "pulse live" : "pulse";
  pulse.textContent = overview.live ? `live, ${time(overview.at)}` : overview.where.startsWith("bundle") ? "a bundle" : "not running";
  complain(overview.problem || (overview.reading === null ? "" : `Reading the run: ${Math.floor(100 * overview.reading)}%. What you see grows.`));
}

function complain(text) {
  byId("banner").textContent = text;
  byId("banner").hidden = !text;
}

function signIn(problem) {
  const dialog = byId("sign-in");
  byId("sign-in-problem").textContent = signIn.tried ? problem : "";
  signIn.tried = true;
  if (!dialog.open) dialog.showModal();
  byId("token").focus();
}

byId("sign-in").addEventListener("cancel", (event) => event.preventDefault());
byId("sign-in").querySelector("form").addEventListener("submit", () => {
  setToken(byId("token").value.trim());
  byId("token").value = "";
  setTimeout(look, 0);
});

function drawTheme() {
  const name = window.towlineTheme.get();
  byId("theme").textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[name];
  byId("theme").setAttribute("aria-label", `Theme: ${name}. Change it`);
}

function nextTheme() {
  window.towlineTheme.next();
  drawTheme();
}

function showKeys() {
  const dialog = byId("keys");
  dialog.replaceChildren(h("div", { class: "body" }, h("h2", { id: "keys-title" }, "Keys"),
    h("dl", { class: "keys-list" }, ...KEYS.flatMap(([key, text]) => [h("dt", {}, ...key.split(/\s+/).flatMap((one) => [h("kbd", {}, one), " "])), h("dd", {}, text)])),
    h("form", { method: "dialog" }, h("button", { type: "submit", class: "primary", autofocus: true }, "Close"))));
  dialog.showModal();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const field = event.target.closest("input, select, textarea");
  if (field) {
    if (event.key === "Escape") field.blur();
    return;
  }
  const jump = Object.entries(PAGES).find(([, one]) => one.key === event.key);
  if (jump) context.go(`#/${jump[0]}`);
  else if (event.key === "?") showKeys();
  else if (event.key === "t") nextTheme();
  else if (event.key === "r" && !page?.key?.(event)) look();
  else if (event.key !== "r" && !page?.key?.(event)) return;
  event.preventDefault();
});

addEventListener("hashchange", () => location.hash !== opened && open());
document.addEventListener("visibilitychange", () => !document.hidden && look());
byId("theme").addEventListener("click", nextTheme);
byId("help").addEventListener("click", showKeys);
drawTheme();
open();
