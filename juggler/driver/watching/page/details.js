// All about one run but its curves, as panels.

import { colour } from "./charts.js";
import { askForFile } from "./server.js";
import { bytes, duration, el, number, percent, quantity, table, words } from "./words.js";

// Each makes the content of a panel, or null: the run has none.
const PANELS = {
  books: ["Where the steps went", books],
  time: ["Where the time goes", time],
  workers: ["Workers", workers],
  events: ["What happened", events],
  modules: ["Modules", (told) => named(told.newest.by_module, "module")],
  agents: ["Agents", (told) => named(told.newest.by_agent, "agent")],
  league: ["Players of the league", league],
  evaluations: ["Evaluations", evaluations],
  videos: ["Videos", videos],
  config: ["Configuration", configuration],
};

export class Details {
  constructor(element) {
    this.element = element;
    this.panels = {};
  }

  show(told, run) {
    for (const [name, [title, make]] of Object.entries(PANELS)) {
      this.panels[name] ??= this.panel(name, title);
      const content = make(told, run);
      const panel = this.panels[name];
      panel.hidden = content === null;
      // What has not changed stays, with its focus, what is scrolled, and a video that plays.
      if (content === null || content.mark === panel.mark) continue;
      panel.mark = content.mark;
      const scrolled = panel.body.scrollTop;
      panel.body.replaceChildren(...content.elements);
      panel.body.scrollTop = scrolled;
    }
  }

  panel(name, title) {
    const id = `panel-${name}`;
    const body = el("div", { class: "body" });
    const panel = el("section", { class: `panel panel-${name}`, "aria-labelledby": id, hidden: true }, el("h3", { id }, title), body);
    panel.body = body;
    this.element.append(panel);
    return panel;
  }
}

// Each activity has the same colour in all runs, in any order: its place is fixed.
const ACTIVITIES = ["update", "inference", "environment", "connectors", "receive", "collate", "waiting", "publish", "frames", "messages", "gathering"];

export function placeOf(activity) {
  const place = ACTIVITIES.indexOf(activity);
  return place >= 0 ? place : ACTIVITIES.length + [...activity].reduce((sum, letter) => sum + letter.codePointAt(0), 0) % 3;
}

const made = (mark, ...elements) => ({ mark: JSON.stringify(mark), elements: elements.flat().filter(Boolean) });
const scrolling = (...content) => el("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "table" }, ...content);

// Parts of a whole, as a bar and as words: [name, size, place of its colour].
function bar(parts, total) {
  return el("div", { class: "bar", "aria-hidden": "true" }, parts.filter(([, size]) => size > 0).map(([name, size, place]) => {
    const part = el("span", { title: `${name}: ${percent(size / total)}`, class: place >= 7 ? "second" : "" });
    part.style.flexGrow = size / total;
    part.style.backgroundColor = colour(place);
    return part;
  }));
}

function key(name, value, place) {
  const box = el("span", { class: place >= 7 ? "box second" : "box", "aria-hidden": "true" });
  box.style.backgroundColor = colour(place);
  return el("li", {}, box, `${name} `, el("b", {}, value));
}

function books({ newest }) {
  const sampled = newest.env_steps_sampled;
  if (!sampled) return null;
  const dropped = Object.entries(newest.env_steps_dropped ?? {}).filter(([, steps]) => steps > 0);
  const parts = [
    ["trained", newest.env_steps_trained, 0],
    ["in flight", newest.env_steps_in_flight, 4],
    ...dropped.map(([reason, steps], place) => [`dropped: ${words(reason)}`, steps, [1, 3, 5, 2, 6][place % 5]]),
  ];
  const sum = parts.reduce((before, [, steps]) => before + steps, 0);
  const balance = sum === sampled ? "" : ` The books do not balance: these are ${sum.toLocaleString("en")} steps.`;
  return made(
    parts,
    el("p", {}, `${sampled.toLocaleString("en")} steps sampled, each of which was trained on, dropped, or is in flight.${balance}`),
    bar(parts, sum),
    el("ul", { class: "keys" }, parts.map(([name, steps, place]) => key(name, `${quantity(steps)} (${percent(steps / sum)})`, place))),
  );
}

function time({ newest, status }) {
  const processes = status?.workers?.some((each) => total(each.seconds))
    ? status.workers.map((each) => [each.worker_id, each.seconds])
    : Object.entries(newest.seconds ?? {}).map(([role, spent]) => [`${role}s, together`, spent]);
  const found = processes.filter(([, spent]) => total(spent)).slice(0, 64);
  if (!found.length) return null;
  const activities = [...new Set(found.flatMap(([, spent]) => Object.keys(spent)))];
  return made(
    found,
    el("ul", { class: "keys" }, activities.map((each) => key(words(each), "", placeOf(each)))),
    el("ul", { class: "spent" }, found.map(([name, spent]) => {
      const all = total(spent);
      const most = Object.entries(spent).sort(([, a], [, b]) => b - a).slice(0, 3);
      return el("li", {},
        el("span", { class: "name" }, name),
        bar(activities.map((each) => [words(each), spent[each] ?? 0, placeOf(each)]), all),
        el("span", { class: "said" }, most.map(([each, seconds]) => `${words(each)} ${percent(seconds / all)}`).join(", ")));
    })),
  );
}

const total = (spent) => Object.values(spent ?? {}).reduce((before, seconds) => before + seconds, 0);

function workers({ newest, status, state }) {
  if (!status?.workers?.length) {
    if (state !== "running") return made(state, el("p", {}, "The run does not go on: it has no workers now."));
    const { num_env_runners: runners = 0, num_learners: learners = 0, restarts = 0 } = newest;
    return made([runners, learners, restarts], el("p", {},
      `EnvRunners: ${runners}. Learners: ${learners}. Restarts: ${restarts}. The driver does not answer on this host, so this is from the metrics.`));
  }
  const rows = status.workers.map((each) => [
    each.worker_id,
    el("span", { class: `state ${each.state}` }, each.state),
    each.device || "–",
    quantity(each.steps_per_second),
    duration(each.seconds_silent),
    bytes(each.resources?.resident_bytes),
    String(each.restarts),
    each.last_error ? `${each.last_error} (${duration(each.seconds_since_error)} ago)` : "",
  ]);
  const { requests_in_flight: requests, updates_in_flight: updates, queued_batches: batches } = status.queues;
  const columns = [["worker", ""], ["state", ""], ["device", ""], ["steps/s", "number"], ["silent", "number"], ["memory", "number"], ["restarts", "number"], ["last error", "error"]];
  return made(
    [rows.map((row) => row.map((cell) => cell.textContent ?? cell)), requests, updates, batches],
    el("p", {}, `Sample requests in flight: ${requests}. Updates in flight: ${updates}. Batches that wait at learners: ${batches}.`),
    scrolling(table("Workers, and those that left", columns, rows)),
  );
}

function events({ events: all }) {
  if (!all.length) return made(0, el("p", {}, "The run has not reported anything yet."));
  const items = all.toReversed().map(({ time: when, level, message }) => el("li", { class: level },
    el("time", { datetime: when }, local(when)), " ",
    level === "info" ? null : el("strong", {}, level), " ", message));
  return made(all, el("ol", { class: "events", tabindex: 0, "aria-label": "Messages, the newest first" }, items));
}

function local(when) {
  const date = new Date(when);
  return Number.isNaN(date.getTime()) ? when : date.toLocaleString("sv"); // 2026-01-31 12:00:00
}

function named(tables, kind) {
  const found = Object.entries(tables ?? {});
  if (!found.length) return null;
  const rows = found.map(([name, told]) => kind === "agent"
    ? [name, number(told.episode_return_mean), number(told.evaluation_return_mean), quantity(told.episodes)]
    : [name, number(told.episode_return_mean), number(told.evaluation_return_mean), quantity(told.episodes),
      told.env_steps_played === undefined ? quantity(told.env_steps_trained) : "not trained",
      quantity(told.env_steps_sampled ?? told.env_steps_played), number(told.staleness_mean), quantity(told.updates)]);
  const columns = [[kind, ""], ["return", "number"], ["evaluation", "number"], ["episodes", "number"],
    ["trained", "number"], ["sampled", "number"], ["staleness", "number"], ["updates", "number"]];
  return made(rows, scrolling(table(`Each ${kind}`, columns.slice(0, rows[0].length), rows)));
}

function league({ newest, league: matrix }) {
  const told = newest.league;
  if (!told) return null;
  const learning = Object.entries(told.learning).map(([name, each]) => [
    name, number(each.elo), each.win_rate == null ? "–" : percent(each.win_rate),
    quantity(each.steps), String(each.copies), String(each.resets)]);
  const columns = [["player", ""], ["Elo", "number"], ["wins", "number"], ["steps", "number"], ["copies", "number"], ["resets", "number"]];
  return made(
    [learning, matrix],
    el("p", {}, `Players that can play: ${told.players}. Frozen copies among them: ${told.historical}.`),
    scrolling(table("Players that learn", columns, learning)),
    matrix.players ? winRates(matrix) : el("p", {}, "The win rates appear with the first checkpoint."),
  );
}

function winRates({ players, win_rates: rates, games, min_games: sure, left_out: more, checkpoint }) {
  const head = [["", ""], ["Elo", "number"], ...players.map(({ id }) => [el("span", { class: "turned" }, id), "rate"])];
  const rows = players.map(({ id, elo }, row) => [id, number(elo), ...players.map((other, column) => {
    const rate = rates[row][column];
    if (rate === null) return row === column ? "" : "·";
    const few = games[row][column] < sure;
    const cell = el("span", { class: "rate", title: `${id} won ${percent(rate)} against ${other.id}, of ${games[row][column]} games` },
      (few ? "~" : "") + Math.round(100 * rate));
    cell.style.setProperty("--strength", `${Math.round(Math.abs(rate - 0.5) * 120)}%`);
    cell.style.setProperty("--towards", rate > 0.5 ? "var(--win)" : "var(--lose)");
    return cell;
  })]);
  return el("div", {},
    scrolling(table("How often, in percent, the row beats the column; a draw is half a win", head, rows, "matrix")),
    el("p", { class: "note" }, `As checkpoint ${Number(checkpoint)} has it. ~: of fewer than ${sure} games.${more ? ` ${more} older copies are left out.` : ""}`));
}

function evaluations({ newest, summary }) {
  const { best, confirmation } = summary;
  const last = newest.evaluation_return_mean;
  const said = [];
  if (typeof last === "number") said.push(`The newest evaluation has a mean return of ${number(last)}.`);
  if (best) said.push(`The best one, of update ${best.update}, has ${number(best.return_mean)} ± ${number(best.return_deviation)} over ${best.episodes} episodes: ${best.checkpoint}`);
  if (typeof confirmation?.return_mean === "number") said.push(`${confirmation.episodes} episodes confirmed the return: ${number(confirmation.return_mean)} ± ${number(confirmation.return_deviation)}.`);
  else if (confirmation?.why_not) said.push(`The return is not confirmed: ${confirmation.why_not}`);
  return said.length ? made(said, said.map((each) => el("p", {}, each))) : null;
}

const items = new Map(); // of videos, by what they are: one that plays goes on when others come

function videos({ videos: found }, run) {
  const known = new Map(found.map((video) => [JSON.stringify([run.id, video]), video]));
  for (const [mark, item] of items) {
    if (known.has(mark)) continue;
    URL.revokeObjectURL(item.querySelector("video")?.src);
    items.delete(mark);
  }
  for (const [mark, video] of known) items.has(mark) || items.set(mark, videoItem(run.id, video));
  if (!found.length) return null;
  return made([...known.keys()], el("ul", { class: "videos" }, [...known.keys()].map((mark) => items.get(mark))));
}

function videoItem(id, video) {
  const shown = el("div", {});
  const play = async () => {
    shown.textContent = "loading";
    try {
      const source = await askForFile("/api/video", { id, video: video.name });
      const player = el("video", { controls: true, src: source, "aria-label": video.name });
      shown.replaceChildren(player);
      player.focus();
    } catch (error) {
      shown.textContent = error.message;
    }
  };
  return el("li", {}, el("button", { onclick: play }, `Play ${video.name}`), ` ${bytes(video.size)}`, shown);
}

function configuration({ config }) {
  const flat = (value, before = "") => Object.entries(value).flatMap(([key, each]) =>
    each !== null && typeof each === "object" && !Array.isArray(each) && Object.keys(each).length
      ? flat(each, `${before}${key}.`)
      : [[before + key, typeof each === "string" ? each : JSON.stringify(each)]]);
  const rows = flat(config);
  if (!rows.length) return null;
  return made(rows, el("details", {}, el("summary", {}, `${rows.length} keys`), scrolling(table("config.toml", [["key", ""], ["value", ""]], rows))));
}
