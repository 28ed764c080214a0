// The page: which runs there are, the curves of those that are chosen, and all about one of them.

import { Chart, colour, dash, swatch } from "./charts.js";
import { Curves, inOrder, STEPS, TIME } from "./curves.js";
import { Details } from "./details.js";
import { BadAnswer, NotAdmitted, ask, keepToken } from "./server.js";
import { duration, el, number, quantity, table, words } from "./words.js";

const MOST_CHOSEN = 12;
const LOSSES = ["policy_loss", "value_loss", "entropy", "kl", "explained_variance", "clip_fraction", "grad_norm", "lr"];
const STATES = { running: "▶", solved: "✓", stopped: "■", failed: "✗", killed: "✗" };

const at = (id) => document.getElementById(id);
const details = new Details(at("panels"));
const charts = new Map();
const curves = new Map(); // by id of a run
const places = new Map(); // of the colours of runs
let runs = [];
let chosen = location.hash.slice(1).split(",").filter(Boolean);
let detailed = null; // the id of the run in the details
let told = null; // about it
let heard = 0; // when the server answered last
let shownTable = "";
let isPressed = false; // a mouse or a finger, on the table of runs
let shownCharts = "";

async function look() {
  const found = await ask("/api/runs");
  runs = found.runs;
  chosen = chosen.filter((id) => runs.some((run) => run.id === id));
  if (!chosen.length) // one at least is drawn
    chosen = (found.named ? runs.slice(0, MOST_CHOSEN) : runs.slice(0, 1)).map((run) => run.id);
  if (!chosen.includes(detailed)) [detailed, told] = [chosen[0] ?? null, null];
  for (const id of chosen) places.has(id) || places.set(id, freePlace());
  await Promise.all(chosen.map(follow));
  at("login").hidden = true;
  at("main").hidden = false;
  say(found);
}

async function follow(id) {
  const known = curves.get(id) ?? new Curves();
  curves.set(id, known);
  let answer;
  try {
    answer = await ask("/api/run", { id, seen: known.seen, ...(id === detailed ? { detail: 1 } : {}) });
  } catch (error) {
    if (!(error instanceof BadAnswer)) throw error;
    known.problem = error.message;
    return; // the other runs go on
  }
  known.take(answer.curves);
  known.broken = answer.broken;
  known.problem = answer.problem;
  if (id === detailed && answer.state) told = answer;
}

function freePlace() {
  const taken = chosen.map((id) => places.get(id));
  return Array.from({ length: MOST_CHOSEN }, (_, place) => place).find((place) => !taken.includes(place)) ?? 0;
}

function say({ problem, directories }) {
  const problems = [problem];
  if (!runs.length && !problem) problems.push(`There are no runs in ${directories.join(", ")} yet. The page shows the first one as soon as it begins.`);
  for (const run of runs.filter(({ id }) => chosen.includes(id))) {
    const { broken, problem: own } = curves.get(run.id) ?? {};
    if (own || run.problem) problems.push(`${run.name}: ${[...new Set([own, run.problem])].filter(Boolean).join("; ")}`);
    if (broken) problems.push(`${run.name}: ${broken === 1 ? "1 line" : `${broken} lines`} of metrics.jsonl cannot be read, and ${broken === 1 ? "is" : "are"} left out.`);
  }
  const said = problems.filter(Boolean).join("\n");
  at("problem").hidden = !said;
  if (at("problem").textContent !== said) at("problem").textContent = said;
  at("runs").hidden = !runs.length;
  showRuns();
  showCharts();
  showDetail();
}

function showRuns() {
  const mark = JSON.stringify([runs, chosen, detailed]);
  // What is pressed has to be there when it is let go, or it is no click.
  if (mark === shownTable || isPressed) return;
  shownTable = mark;
  const focused = document.activeElement?.dataset?.focus;
  const rows = runs.map((run) => {
    const isChosen = chosen.includes(run.id);
    const box = el("input", {
      type: "checkbox", checked: isChosen, "data-focus": `box-${run.id}`, "aria-label": `draw ${run.name}`,
      disabled: !isChosen && chosen.length >= MOST_CHOSEN, onchange: () => choose(run.id, !isChosen) });
    const name = el("button", {
      class: "name", "data-focus": `name-${run.id}`, "aria-pressed": String(run.id === detailed),
      title: `all about ${run.directory}`, onclick: () => detail(run.id) }, run.name);
    const place = places.get(run.id);
    return [
      el("span", { class: "pick" }, box, isChosen ? swatch(colour(place), dash(Math.floor(place / 7))) : null, name),
      el("span", { class: `state ${run.state}` }, `${STATES[run.state]} ${run.state}`),
      number(run.return_last), number(run.return_best), run.env.split(":").at(-1), run.algorithm,
      quantity(run.env_steps), duration(run.wall_time), String(run.checkpoints.length),
    ];
  });
  const columns = [["run", ""], ["state", ""], ["return", "number"], ["best", "number"], ["environment", "spare"], ["algorithm", "spare"],
    ["steps", "number spare"], ["time", "number spare"], ["checkpoints", "number spare"]];
  at("runs-table").replaceChildren(table(`${runs.length === 1 ? "1 run" : `${runs.length} runs, the newest first`}. Those with a tick are drawn; a name shows all about that run.`, columns, rows, "runs"));
  if (focused) document.querySelector(`[data-focus="${focused}"]`)?.focus();
}

function choose(id, isChosen) {
  chosen = isChosen ? [...chosen, id] : chosen.filter((each) => each !== id);
  if (isChosen) places.set(id, freePlace());
  else places.delete(id);
  history.replaceState(null, "", `#${chosen.join(",")}`);
  again();
}

function detail(id) {
  if (!chosen.includes(id)) {
    if (chosen.length >= MOST_CHOSEN) places.delete(chosen.pop());
    choose(id, true);
  }
  [detailed, told] = [id, null];
  again();
}

// The curves of several runs are told apart by colours, and parts of a run by dashes; those of one
// run by both.
function showCharts() {
  const axis = document.querySelector("input[name=axis]:checked").value;
  const shown = chosen.map((id) => ({ run: runs.find((run) => run.id === id), curves: curves.get(id), place: places.get(id) }))
    .filter((each) => each.run && each.curves);
  const mark = JSON.stringify([axis, shown.map(({ run, curves: of, place }) => [run.id, run.name, run.goal, of.seen, place])]);
  if (mark === shownCharts) return;
  shownCharts = mark;
  const alone = shown.length === 1;
  const over = axis === TIME ? timeUnit(shown) : { name: "steps", scale: 1 };
  const scaled = (points) => (over.scale === 1 ? points : points.map(([x, y]) => [x / over.scale, y]));
  const rounds = Math.floor(Math.max(0, ...shown.map(({ place }) => place)) / 7) + 1; // of the colours
  const draw = (group, title, makeSeries, options = {}) => {
    const series = shown.flatMap(({ run, curves: of, place }) => makeSeries(of).map((each, part) => ({
      ...each, points: scaled(each.points), name: alone ? each.name : `${run.name}${each.name === title ? "" : ` ${each.name}`}`,
      colour: colour(alone ? (each.part ?? part) : place), dash: dash(alone ? Math.floor((each.part ?? part) / 7) + (each.dashed ?? 0) : (each.part ?? each.dashed ?? 0) * rounds + Math.floor(place / 7)) })));
    chart(group, title, { help: options.help, height: group ? 150 : 210 }).show(series, { xName: over.name, ...options });
  };
  const wanted = new Set();
  const chart = (group, title, looks) => {
    const name = `${group}/${title}`;
    wanted.add(name);
    if (!charts.has(name)) {
      charts.set(name, new Chart(title, looks));
      groupOf(group).append(charts.get(name).element);
    }
    return charts.get(name);
  };
  if (shown.length) drawAll(draw, shown, axis);
  for (const [name, { element }] of charts) element.hidden = !wanted.has(name);
  for (const group of at("charts").children) group.hidden = [...group.querySelectorAll(".chart")].every((each) => each.hidden);
}

// Which charts there are: some only of runs with several modules, agents or players.
function drawAll(draw, shown, axis) {
  draw("", "Mean return", (of) => [
    { name: "training", points: of.points(axis, "episode_return_mean") },
    { name: "evaluation", part: 1, dots: true, points: of.changes(axis, "evaluation_return_mean") },
  ], { goal: goal(shown), help: "of the last 100 episodes" });
  draw("", "Throughput in steps/s", (of) => [
    { name: "trained", points: of.rate(axis, "env_steps_trained") },
    { name: "sampled", part: 1, dashed: 1, points: of.rate(axis, STEPS) },
  ], { fromZero: true });
  draw("", "Staleness in updates", (of) => [
    { name: "mean", points: of.points(axis, "staleness_mean") },
    { name: "max", part: 1, dashed: 2, points: of.points(axis, "staleness_max") },
  ], { fromZero: true, help: "of the batches that were trained on" });
  for (const [kind, title] of [["by_module", "Return of each module"], ["by_agent", "Return of each agent"]])
    if (shown.some((each) => Object.keys(each.curves.tables(kind)).length > 1))
      draw("", title, (of) => parts(of, axis, kind, "episode_return_mean"));
  if (shown.some((each) => Object.keys(each.curves.tables("league")).length))
    draw("", "Elo of the players that learn", (of) => parts(of, axis, "league", "elo"));
  for (const key of keysOf(shown, "modules")) draw("Losses and updates", words(key), (of) => parts(of, axis, "modules", key, words(key)));
  const infos = new Set(shown.flatMap((each) => each.curves.numbers().map(({ title }) => title)));
  for (const title of infos) draw("Numbers of the environment", title, (of) => of.numbers()
    .filter((each) => each.title === title)
    .map(({ key, agent, part }) => ({ name: agent ?? title, part, points: of.points(axis, `info/${key}/mean`) })));
  const recorded = new Set(shown.flatMap((each) => each.curves.keys.filter((key) => key.startsWith("custom/"))));
  for (const key of recorded) {
    const title = key.slice("custom/".length);
    draw("Numbers of callbacks", title, (of) => [{ name: title, points: of.points(axis, key) }]);
  }
}

function groupOf(name) {
  const id = `group-${name.replaceAll(" ", "-")}`;
  if (!at(id)) {
    const grid = el("div", { class: name ? "grid small" : "grid", id });
    at("charts").append(name
      ? el("details", { class: "group", open: true }, el("summary", {}, name), grid)
      : el("div", { class: "group" }, grid));
  }
  return at(id);
}

// A curve for each module, agent or player, which has the same colour in every chart.
function parts(of, axis, kind, key, alone = key) {
  const told = of.tables(kind);
  const names = Object.keys(told).filter((name) => told[name].includes(key)).sort(inOrder);
  const all = kind === "by_agent" ? names : ["by_module", "modules", "league"].flatMap((each) => Object.keys(of.tables(each)));
  const places = [...new Set(all)].sort(inOrder);
  return names.map((name) => ({
    name: names.length > 1 ? name : alone, part: places.indexOf(name), points: of.points(axis, `${kind}/${name}/${key}`) }));
}

function keysOf(shown, kind) {
  const found = new Set(shown.flatMap((each) => Object.values(each.curves.tables(kind)).flat()));
  if (!shown.some((each) => each.curves.isEverAboveZero("skipped"))) found.delete("skipped");
  return [...LOSSES.filter((key) => found.has(key)), ...[...found].filter((key) => !LOSSES.includes(key)).sort()];
}

function timeUnit(shown) {
  const longest = Math.max(...shown.map((each) => each.run.wall_time));
  return [{ name: "hours", scale: 3600 }, { name: "minutes", scale: 60 }].find((each) => longest >= 2 * each.scale) ?? { name: "seconds", scale: 1 };
}

// The one goal of those runs that have any.
function goal(shown) {
  const goals = new Set(shown.map((each) => each.run.goal).filter((each) => each !== null));
  return goals.size === 1 ? [...goals][0] : null;
}

function showDetail() {
  const run = runs.find((each) => each.id === detailed);
  at("detail").hidden = !run || !told;
  if (!run || !told) return;
  at("detail-title").textContent = run.name;
  const { summary, newest, status } = told;
  const version = newest.weights_version ? `, update ${newest.updates}, weights ${newest.weights_version.join(".")}` : "";
  const phase = status && status.phase !== "training" ? words(status.phase) : "";
  const end = summary.failure || (summary.reason_for_stop ? `reason: ${words(summary.reason_for_stop)}` : phase);
  at("detail-lead").textContent = `${run.env} with ${run.algorithm}, ${run.state}${end ? ` (${end})` : ""}${version}. ${run.directory}`;
  details.show(told, run);
}

let timer = 0;
let busy = false;
let asked = false; // for another look while one is under way

async function again() {
  asked = busy;
  if (busy) return;
  busy = true;
  clearTimeout(timer);
  try {
    if (!document.hidden) {
      await look();
      heard = Date.now();
    }
  } catch (error) {
    if (error instanceof NotAdmitted) {
      at("login").hidden = false;
      at("main").hidden = true;
      at("refused").textContent = error.message;
      connection("waiting for the token", "");
      busy = false;
      return; // until there is one
    }
    connection(`no answer from the server${heard ? ` since ${new Date(heard).toLocaleTimeString()}` : ""}`, "lost");
  }
  if (Date.now() - heard < 4000) connection(runs.some((run) => run.state === "running") ? "live" : "no run is going on", "");
  busy = false;
  const isLive = runs.some((run) => run.state === "running" && chosen.includes(run.id));
  timer = setTimeout(again, asked ? 0 : isLive ? 1000 : 3000);
}

function connection(text, state) {
  if (at("connection").textContent !== text) at("connection").textContent = text;
  at("connection").className = state;
}

at("axis").addEventListener("change", showCharts);
at("runs-table").addEventListener("pointerdown", () => (isPressed = true));
for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => (isPressed = false));
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(at("token").value.trim());
  again();
});
document.addEventListener("visibilitychange", () => document.hidden || again());
again();
