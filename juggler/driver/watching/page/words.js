// Words and numbers for people, and elements of the page. Text goes into the page as text alone.

export function el(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return made;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// With about four digits; a dash if there is none.
export function number(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001 || size >= 1e7) return value.toExponential(2);
  if (size < 1) return value.toPrecision(3);
  return size < 100 ? value.toFixed(2) : size < 10000 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

// With three digits and a letter: 950, 12.3k, 1.23M.
export function quantity(value) {
  if (!isNumber(value)) return "–";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size * 0.9995) return Number((value / size).toPrecision(3)) + letter;
  }
  return String(Number(value.toPrecision(3)));
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 9.95) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds); // before it is split: never 1 min 60 s
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(seconds / 60);
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export function bytes(value) {
  return isNumber(value) && value > 0 ? quantity(value).replace(/([kMG]?)$/, " $1B") : "–";
}

export const percent = (share) =>
  share > 0 && share < 0.001 ? "< 0.1 %" : (100 * share).toFixed(share < 0.1 ? 1 : 0) + " %";

export const words = (key) => key.replaceAll("_", " ");

// A table. Columns are [title, "number" or ""]; cells are text or elements.
export function table(caption, columns, rows, className = "") {
  return el(
    "table", { class: className },
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, place) =>
      el(place ? "td" : "th", place ? { class: columns[place][1] } : { scope: "row" }, cell))))),
  );
}
