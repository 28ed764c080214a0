// Line charts in SVG: a crosshair follows the mouse, a finger, or the arrow keys.

import { el, number, quantity } from "./words.js";

const LEFT = 52;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 26;
const ROOM = 56; // between the middles of two numbers
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

export const colour = (place) => `var(--c${place % 7})`;
export const dash = (place) => DASHES[place % DASHES.length];

export class Chart {
  constructor(title, { help = "", height = 210 } = {}) {
    this.height = height;
    this.svg = el("svg:svg", { role: "img", tabindex: 0, height });
    this.legend = el("p", { class: "legend" });
    this.readout = el("p", { class: "readout", role: "status" });
    this.element = el("figure", { class: "chart" },
      this.caption = el("figcaption", { title: help }, title), this.legend, this.svg, this.readout);
    this.title = title;
    this.at = null; // x of the crosshair
    this.series = [];
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.moveTo(null));
    this.svg.addEventListener("blur", () => this.moveTo(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    this.width = 0;
    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width === this.width) return;
      this.width = contentRect.width;
      this.draw();
    }).observe(this.element);
  }

  // Series are {name, colour, dash, points, dots}.
  show(series, { xName, goal = null, fromZero = false }) {
    Object.assign(this, { series: series.filter((each) => each.points.length), xName, goal, fromZero });
    this.caption.dataset.over = xName;
    const names = this.series.length > 1 || this.series.some((each) => each.dots);
    this.legend.replaceChildren(...(names ? this.series.map(key) : []));
    this.legend.hidden = !names;
    this.draw();
  }

  draw() {
    const width = Math.max(180, Math.floor(this.width));
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren();
    const points = this.series.flatMap((each) => each.points);
    if (!points.length) {
      this.svg.setAttribute("aria-label", `${this.title}: nothing yet`);
      this.svg.append(text(width / 2, this.height / 2, "nothing yet", "middle"));
      this.x = null;
      return;
    }
    const xs = range(points.map(([x]) => x));
    const ys = range([
      ...points.map(([, y]) => y),
      ...(this.goal === null ? [] : [this.goal]),
      ...(this.fromZero ? [0] : []),
    ]);
    const margin = (ys[1] - ys[0]) * 0.04;
    const low = this.fromZero ? 0 : ys[0] - margin;
    this.x = scale(xs, [LEFT, width - RIGHT]);
    this.y = scale([low, ys[1] + margin], [this.height - BOTTOM, TOP]);
    this.axes(width, xs, [low, ys[1] + margin]);
    if (this.goal !== null) {
      const y = this.y(this.goal);
      this.svg.append(
        el("svg:line", { class: "goal", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        text(LEFT + 4, y < TOP + 16 ? y + 13 : y - 4, `solved at ${number(this.goal)}`, "start", "goal-name"),
      );
    }
    for (const each of this.series) this.line(each);
    this.cross = el("svg:g", {});
    this.svg.append(this.cross);
    this.svg.setAttribute("aria-label", this.inWords());
    this.moveTo(this.at);
  }

  axes(width, xs, ys) {
    for (const y of ticks(ys, 4)) {
      const place = this.y(y);
      this.svg.append(
        el("svg:line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: place, y2: place }),
        text(LEFT - 6, place + 4, short(y), "end"),
      );
    }
    for (const [x, content, anchor] of labels(xs, this.x, width > 420 ? 6 : 3)) this.svg.append(text(x, this.height - 8, content, anchor));
    this.svg.append(
      el("svg:line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: this.height - BOTTOM, y2: this.height - BOTTOM }),
    );
  }

  line({ points, colour: stroke, dash: dashes, dots }) {
    const places = points.map(([x, y]) => [this.x(x), this.y(y)]);
    const drawn = el("svg:g", {});
    drawn.style.color = stroke;
    if (!dots && places.length > 1) {
      const path = places.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      drawn.append(el("svg:path", { class: "curve", d: path, "stroke-dasharray": dashes || null }));
    } else {
      for (const [cx, cy] of places) drawn.append(el("svg:circle", { class: "dot", cx, cy, r: 3.5 }));
    }
    this.svg.append(drawn);
  }

  point(event) {
    if (!this.x) return;
    this.moveTo(this.x.back(event.clientX - this.svg.getBoundingClientRect().left));
  }

  press(event) {
    const xs = [...new Set(this.series.flatMap((each) => each.points.map(([x]) => x)))].sort((a, b) => a - b);
    if (!xs.length) return;
    const here = this.at === null ? xs.length - 1 : nearest(xs, this.at);
    const by = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (by !== undefined) this.moveTo(xs[Math.min(Math.max(by, 0), xs.length - 1)]);
    else if (event.key === "Escape") this.moveTo(null);
    else return;
    event.preventDefault();
  }

  moveTo(x) {
    this.at = x;
    if (!this.cross) return;
    this.cross.replaceChildren();
    if (x === null) {
      this.readout.textContent = "";
      return;
    }
    const place = Math.min(Math.max(this.x(x), LEFT), this.width - RIGHT);
    this.cross.append(el("svg:line", { class: "cross", x1: place, x2: place, y1: TOP, y2: this.height - BOTTOM }));
    // Not of a run that had not begun there, or was over.
    const here = this.series.filter(({ points }) => points[0][0] <= x && x <= points.at(-1)[0]);
    const said = here.map((each) => {
      const [px, py] = each.points[nearest(each.points.map(([found]) => found), x)];
      const dot = el("svg:circle", { class: "dot", cx: this.x(px), cy: this.y(py), r: 4 });
      dot.style.color = each.colour;
      this.cross.append(dot);
      return `${each.name} ${number(py)}`;
    });
    this.readout.textContent = `at ${short(x)} ${this.xName}: ${said.join(", ") || "nothing"}`;
  }

  inWords() {
    const said = this.series.map(({ name, points }) => {
      const values = points.map(([, y]) => y);
      return `${name}: last ${number(values.at(-1))}, min ${number(Math.min(...values))}, max ${number(Math.max(...values))}`;
    });
    return `${this.title} over ${this.xName}. ${said.join(". ")}. Arrow keys move a crosshair.`;
  }
}

export function swatch(stroke, dashes, dots = false) {
  const drawn = el("svg:svg", { class: "swatch", width: 26, height: 10, "aria-hidden": "true" },
    dots ? el("svg:circle", { class: "dot", cx: 13, cy: 5, r: 3.5 })
      : el("svg:path", { class: "curve", d: "M1 5H25", "stroke-dasharray": dashes || null }));
  drawn.style.color = stroke;
  return drawn;
}

const key = ({ name, colour: stroke, dash: dashes, dots }) =>
  el("span", { class: "key" }, swatch(stroke, dashes, dots), name);

const text = (x, y, content, anchor, className = "label") =>
  el("svg:text", { x, y, "text-anchor": anchor, class: className }, content);

function short(value) {
  const size = Math.abs(value);
  if (size >= 1000) return quantity(value);
  return size > 0 && size < 0.001 ? value.toExponential(1).replace(".0e", "e") : String(Number(value.toPrecision(4)));
}

function range(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) [least, most] = [Math.min(least, value), Math.max(most, value)];
  return least < most ? [least, most] : [least - (Math.abs(least) * 0.1 || 1), most + (Math.abs(most) * 0.1 || 1)];
}

function scale([from, to], [start, end]) {
  const factor = (end - start) / (to - from);
  const scaled = (value) => start + (value - from) * factor;
  scaled.back = (place) => Math.min(Math.max(from + (place - start) / factor, from), to);
  return scaled;
}

// Labels below a chart, as [place, text, anchor]. The first and last numbers are always shown,
// and numbers in between if they have room.
export function labels(xs, place, count) {
  const [first, last] = xs.map(place);
  const between = ticks(xs, count).filter((x) => place(x) > first + ROOM && place(x) < last - ROOM);
  return [[first, short(xs[0]), "start"], ...between.map((x) => [place(x), short(x), "middle"]), [last, short(xs[1]), "end"]];
}

function ticks([from, to], count) {
  const rough = (to - from) / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * ([1, 2, 5, 10].find((each) => each * size >= rough) ?? 10);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function nearest(sorted, x) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
}
