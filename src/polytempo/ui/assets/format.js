// Numbers in words, and elements made of text only: nothing of a run's files is ever read as markup.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else if (key === "data") Object.assign(made.dataset, value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children.flat());
  return made;
}

export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!isNumber(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e15)) return value.toExponential(2);
  return value.toLocaleString("en", Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

export function whole(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function percent(value) {
  return isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–";
}

export function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0 s";
  if (Math.abs(value) < 1e-3) return `${number(value * 1e6, 3)} µs`;
  if (Math.abs(value) < 0.9995) return `${number(value * 1e3, 3)} ms`;
  if (value < 99.95) return `${number(value, 3)} s`;
  const minutes = Math.floor(Math.round(value) / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(value) % 60).padStart(2, "0")} s`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} days ${Math.floor((minutes % 1440) / 60)} h`;
}

export function bytes(value) {
  if (!isNumber(value)) return "–";
  let rest = value;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (rest < 999.5) return `${unit === "B" ? Math.round(rest) : number(rest, 3)} ${unit}`;
    rest /= 1000;
  }
  return `${number(rest, 3)} PB`;
}

export function compact(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${number(value / 1e9, 3)}G`;
  if (size >= 1e6) return `${number(value / 1e6, 3)}M`;
  if (size >= 1e4) return `${number(value / 1e3, 3)}k`;
  return number(value, 4);
}

export function ago(since_s) {
  if (!isNumber(since_s)) return "–";
  const passed = Date.now() / 1000 - since_s;
  if (passed < 5) return "now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

export const AXES = { seconds: "time", step: "steps", epoch: "epochs", samples: "samples", bytes: "bytes sent per rank" };
export const AXIS_FORMS = { seconds, step: whole, epoch: (value) => number(value, 3), samples: compact, bytes };
export const QUANTITIES = {
  loss: ["Loss", number], accuracy: ["Accuracy", percent], samples_per_s: ["Samples per second", compact],
  idle_share: ["Waiting", percent], staleness: ["Staleness (updates)", number], noise_scale: ["Noise scale (samples)", compact], lr: ["Learning rate", number],
};
export const STATES = {
  running: "running", finished: "finished", preempted: "preempted", failed: "failed", gone: "launcher gone", unknown: "unknown",
};

export function chip(state) {
  const known = state in STATES ? state : "unknown";
  return element("span", { class: `chip ${known}` }, element("i", { "aria-hidden": "true" }), STATES[known]);
}

export function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function table(heads, rows, { empty = "", label = "" } = {}) {
  if (!rows.length && empty) return element("p", { class: "quiet" }, empty);
  const header = heads.map((head) => element("th", { scope: "col", class: head.text ? "text" : false }, head.name ?? head));
  const body = rows.map((cells) => element("tr", {}, cells.map((cell, column) =>
    element(column ? "td" : "th", { scope: column ? false : "row", class: heads[column].text ? "text" : false }, cell))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label || "Table" },
    element("table", {}, element("thead", {}, element("tr", {}, header)), element("tbody", {}, body)));
}
