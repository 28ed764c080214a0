// The metrics of one run, as they come, and what is worked out of them.

export const STEPS = "env_steps_sampled";
export const TIME = "training_time";
export const inOrder = new Intl.Collator("en", { numeric: true }).compare;

export class Curves {
  constructor() {
    this.seen = "";
    this.keys = [];
    this.rows = [];
  }

  take({ seen, all, keys, rows }) {
    this.rows = all ? rows : this.rows.concat(rows);
    this.seen = seen;
    this.keys = keys;
  }

  has(key) {
    const place = this.keys.indexOf(key);
    return place >= 0 && this.rows.some((row) => row[place] != null);
  }

  // Whether any column of this name is.
  isEverAboveZero(name) {
    const places = this.keys.flatMap((key, place) => (key.endsWith("/" + name) ? [place] : []));
    return this.rows.some((row) => places.some((place) => row[place] > 0));
  }

  // [[x, y], ...] where both are there.
  points(axis, key) {
    const x = this.keys.indexOf(axis);
    const y = this.keys.indexOf(key);
    if (x < 0 || y < 0) return [];
    return this.rows.filter((row) => row[x] != null && row[y] != null).map((row) => [row[x], row[y]]);
  }

  // Where a value is another than before: a line of metrics repeats the last evaluation.
  changes(axis, key) {
    const found = this.points(axis, key);
    return found.filter(([, y], place) => place === 0 || y !== found[place - 1][1]);
  }

  // How fast a count grows, per second.
  rate(axis, key) {
    const [x, y, t] = [axis, key, TIME].map((each) => this.keys.indexOf(each));
    if (x < 0 || y < 0 || t < 0) return [];
    const found = [];
    for (let i = 1; i < this.rows.length; i++) {
      const [before, now] = [this.rows[i - 1], this.rows[i]];
      const seconds = now[t] - before[t];
      if (seconds > 0 && now[y] != null && before[y] != null && now[x] != null)
        found.push([now[x], Math.max(0, (now[y] - before[y]) / seconds)]);
    }
    return found;
  }

  // Keys such as modules/NAME/policy_loss, as {NAME: [policy_loss, ...]}.
  tables(kind) {
    const found = {};
    for (const key of this.keys) {
      if (!key.startsWith(kind + "/") || !this.has(key)) continue;
      const rest = key.slice(kind.length + 1);
      const cut = rest.lastIndexOf("/");
      (found[rest.slice(0, cut)] ??= []).push(rest.slice(cut + 1));
    }
    return found;
  }

  // The numbers of the environment. An agent's own has the place that the agent has among all.
  numbers() {
    const agents = Object.keys(this.tables("by_agent")).sort(inOrder);
    return Object.keys(this.tables("info")).map((key) => {
      // The longest one: of the agents "a" and "a/b", a/b/x is of "a/b".
      const part = agents.findLastIndex((agent) => key.startsWith(`${agent}/`));
      return part < 0 ? { key, title: key } : { key, title: key.slice(agents[part].length + 1), agent: agents[part], part };
    });
  }
}
