// A chart on a canvas: mean lines with the band between least and greatest value, marks, a cross hair, zoom by dragging.
import { COLORS, DASHES, MARKS } from "./palette.js";
import { element, number } from "./format.js";

const LEFT = 58, RIGHT = 12, TOP = 14, BOTTOM = 26, NEAR = 6, HEIGHT = 220;

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--c${name.slice(1).toLowerCase()}`).trim() || name;
}

export function ticks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough) || 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9 && found.length < 50; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : Number(at.toPrecision(12)));
  }
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of high / low > 200 ? [1] : [1, 2, 5]) {
      const at = factor * 10 ** power;
      if (at >= low && at <= high) found.push(at);
    }
  }
  return found;
}

export class Chart {
  // options: { title, form, axisForm, onzoom(begin, end) }
  constructor(options) {
    this.options = options;
    this.lines = [];
    this.marks = [];
    this.span = [null, null];
    this.at = null;
    this.drag = null;
    this.log = null;
    this.canvas = element("canvas", { class: "plot", role: "img", tabindex: "0", height: String(HEIGHT) });
    this.tip = element("div", { class: "tip", hidden: true });
    this.scale = element("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => this.toggleLog() }, "log");
    this.whole = element("button", { type: "button", class: "small", hidden: true, onclick: () => options.onzoom?.(null, null) }, "all");
    this.heading = element("h3", {}, options.title);
    this.caption = element("p", { class: "caption" });
    this.place = element("section", { class: "card chart" },
      element("div", { class: "head" }, this.heading, this.whole, this.scale), this.caption,
      element("div", { class: "frame" }, this.canvas, this.tip));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerleave", () => { if (!this.drag) this.point(null); });
    this.canvas.addEventListener("pointerdown", (event) => this.down(event));
    this.canvas.addEventListener("pointerup", (event) => this.up(event));
    this.canvas.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    this.canvas.addEventListener("dblclick", () => options.onzoom?.(null, null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  // lines: [{ name, x, y, low, high, look, faint }]; marks: [{ kind, x, text }]
  show(lines, marks, span, axisForm) {
    this.lines = lines.filter((line) => line.x.length);
    this.marks = marks;
    this.span = span;
    this.axisForm = axisForm;
    this.whole.hidden = span[0] === null && span[1] === null;
    const positive = this.lines.every((line) => (line.low || line.y).every((value) => value === null || value > 0));
    this.scale.hidden = !positive;
    this.canvas.setAttribute("aria-label", this.told());
    this.draw();
  }

  told() {
    const ends = this.lines.map((line) => `${line.name}: ${this.options.form(line.y[line.y.length - 1])} at the end`);
    const faults = this.marks.length ? `; ${this.marks.length} marks` : "";
    return `${this.options.title}. ${ends.slice(0, 8).join("; ")}${faults}. Arrow keys read the values, plus and minus zoom.`;
  }

  toggleLog() {
    this.log = !this.isLog;
    this.draw();
  }

  bounds() {
    let [left, right] = this.span, low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    for (const line of this.lines) {
      first = Math.min(first, line.x[0]);
      last = Math.max(last, line.x[line.x.length - 1]);
      for (const values of line.low ? [line.low, line.high] : [line.y]) {
        for (const value of values) if (value !== null) { if (value < low) low = value; if (value > high) high = value; }
      }
    }
    left ??= Math.min(first, this.options.fromZero ? 0 : first);
    right ??= last;
    if (!(right > left)) { right = left + (Math.abs(left) || 1) * 0.1; }
    // A loss that falls far is drawn on a logarithmic scale, as in the report, until the reader chooses.
    const log = this.isLog = low > 0 && (this.log ?? (Boolean(this.options.falls) && high > 20 * low));
    this.scale.setAttribute("aria-pressed", String(log));
    if (log) {
      const room = (Math.log10(high) - Math.log10(low)) * 0.05 || 0.1;
      return { left, right, low: 10 ** (Math.log10(low) - room), high: 10 ** (Math.log10(high) + room), log };
    }
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return { left, right, low: low >= 0 ? Math.max(0, low - room) : low - room, high: high + room, log };
  }

  draw() {
    const width = this.canvas.clientWidth, height = HEIGHT, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11.5px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
    if (!this.lines.length) {
      pen.fillStyle = color("#52606D");
      pen.fillText("No point yet", LEFT, height / 2);
      this.view = null;
      return;
    }
    const view = this.view = this.bounds();
    const inner = width - LEFT - RIGHT, tall = height - TOP - BOTTOM;
    view.x = (value) => LEFT + ((value - view.left) / (view.right - view.left)) * inner;
    view.back = (pixel) => view.left + ((pixel - LEFT) / inner) * (view.right - view.left);
    const share = (value) => view.log ? (Math.log(value) - Math.log(view.low)) / (Math.log(view.high) - Math.log(view.low)) : (value - view.low) / (view.high - view.low);
    view.y = (value) => TOP + (1 - share(value)) * tall;
    this.grid(pen, view, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP - 4, inner + 1, tall + 8);
    pen.clip();
    this.drawMarks(pen, view, height);
    for (const line of this.lines) this.band(pen, view, line);
    for (const line of this.lines) this.line(pen, view, line);
    if (this.drag) this.shade(pen, height);
    pen.restore();
    if (this.at !== null) this.cross(pen, view, height);
  }

  grid(pen, view, width, height) {
    const form = this.options.form;
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const value of view.log ? logTicks(view.low, view.high) : ticks(view.low, view.high, 5)) {
      const y = Math.round(view.y(value)) + 0.5;
      if (y < TOP - 1 || y > height - BOTTOM + 1) continue;
      pen.strokeStyle = color("#E6E9EE");
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(width - RIGHT, y);
      pen.stroke();
      pen.fillStyle = color("#52606D");
      pen.fillText(form(value), LEFT - 7, y);
    }
    pen.textBaseline = "top";
    pen.textAlign = "center";
    for (const value of ticks(view.left, view.right, Math.max(2, Math.min(7, width / 95)))) {
      const x = view.x(value);
      if (x < LEFT - 1 || x > width - RIGHT + 1) continue;
      pen.strokeStyle = color("#9AA5B1");
      pen.beginPath();
      pen.moveTo(Math.round(x) + 0.5, height - BOTTOM);
      pen.lineTo(Math.round(x) + 0.5, height - BOTTOM + 4);
      pen.stroke();
      const text = this.axisForm(value), half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(x, width - half - 1), height - BOTTOM + 8);
    }
    pen.strokeStyle = color("#9AA5B1");
    pen.beginPath();
    pen.moveTo(LEFT, height - BOTTOM + 0.5);
    pen.lineTo(width - RIGHT, height - BOTTOM + 0.5);
    pen.stroke();
  }

  band(pen, view, line) {
    if (!line.low) return;
    pen.globalAlpha = 0.18;
    pen.fillStyle = color(line.look.color);
    pen.beginPath();
    line.x.forEach((x, at) => pen[at ? "lineTo" : "moveTo"](view.x(x), view.y(line.high[at])));
    for (let at = line.x.length - 1; at >= 0; at -= 1) pen.lineTo(view.x(line.x[at]), view.y(line.low[at]));
    pen.fill();
    pen.globalAlpha = 1;
  }

  line(pen, view, line) {
    pen.strokeStyle = pen.fillStyle = color(line.look.color);
    pen.lineWidth = line.faint ? 1.4 : 2;
    pen.globalAlpha = line.faint ? 0.6 : 1;
    pen.lineJoin = "round";
    pen.setLineDash(line.look.dash);
    pen.beginPath();
    let drawing = false;
    line.x.forEach((x, at) => {
      if (line.y[at] === null) { drawing = false; return; }
      pen[drawing ? "lineTo" : "moveTo"](view.x(x), view.y(line.y[at]));
      drawing = true;
    });
    pen.stroke();
    pen.setLineDash([]);
    if (line.x.length === 1 || line.dots) {
      for (let at = 0; at < line.x.length; at += 1) {
        if (line.y[at] === null) continue;
        pen.beginPath();
        pen.arc(view.x(line.x[at]), view.y(line.y[at]), 2.6, 0, 7);
        pen.fill();
      }
    }
    pen.globalAlpha = 1;
  }

  drawMarks(pen, view, height) {
    pen.lineWidth = 1;
    for (const mark of this.marks) {
      const [name, sign] = MARKS[mark.kind] || MARKS.diagnosis;
      const x = Math.round(view.x(mark.x)) + 0.5;
      pen.strokeStyle = pen.fillStyle = color(name);
      if (mark.kind !== "checkpoint") {
        pen.setLineDash([3, 3]);
        pen.beginPath();
        pen.moveTo(x, TOP);
        pen.lineTo(x, height - BOTTOM);
        pen.stroke();
        pen.setLineDash([]);
      }
      if (mark.kind === "checkpoint") { pen.fillRect(x - 1, height - BOTTOM - 6, 2, 6); continue; }
      pen.textAlign = "center";
      pen.textBaseline = "alphabetic";
      pen.fillText(sign, x, TOP + 5);
    }
  }

  shade(pen, height) {
    const [from, to] = this.drag;
    pen.fillStyle = color("#0072B3");
    pen.globalAlpha = 0.15;
    pen.fillRect(Math.min(from, to), TOP, Math.abs(to - from), height - TOP - BOTTOM);
    pen.globalAlpha = 1;
  }

  cross(pen, view, height) {
    const x = view.x(this.at);
    pen.strokeStyle = color("#9AA5B1");
    pen.beginPath();
    pen.moveTo(x, TOP);
    pen.lineTo(x, height - BOTTOM);
    pen.stroke();
    const told = [];
    for (const line of this.lines) {
      const at = nearest(line.x, this.at);
      if (line.y[at] === null || Math.abs(view.x(line.x[at]) - x) > Math.max(24, this.canvas.clientWidth / 20)) continue;
      pen.fillStyle = color(line.look.color);
      pen.beginPath();
      pen.arc(view.x(line.x[at]), view.y(line.y[at]), 3.5, 0, 7);
      pen.fill();
      told.push([line, at]);
    }
    this.tell(told, x);
  }

  tell(told, x) {
    const form = this.options.form;
    const rows = told.slice(0, 14).map(([line, at]) => {
      const range = line.low && line.high[at] > line.low[at] ? ` (${form(line.low[at])} to ${form(line.high[at])})` : "";
      return element("div", {}, swatch(line.look), element("b", {}, form(line.y[at])), range, element("span", {}, line.name));
    });
    const near = this.marks.filter((mark) => Math.abs(this.view.x(mark.x) - x) < NEAR);
    const marks = near.slice(0, 3).map((mark) => element("div", { class: "mark" }, `${(MARKS[mark.kind] || MARKS.diagnosis)[1]} ${mark.text}`));
    this.tip.replaceChildren(element("small", {}, this.axisForm(this.at)), ...rows, ...marks);
    this.tip.hidden = false;
    const room = this.canvas.clientWidth, left = x + 14;
    this.tip.style.left = `${left + this.tip.offsetWidth > room ? Math.max(0, x - 14 - this.tip.offsetWidth) : left}px`;
  }

  point(at) {
    this.at = at;
    if (at === null) this.tip.hidden = true;
    this.draw();
    this.options.onpoint?.(at, this);
  }

  move(event) {
    if (!this.view) return;
    const x = event.offsetX;
    if (this.drag) { this.drag[1] = x; this.draw(); return; }
    if (x < LEFT - 4 || x > this.canvas.clientWidth - RIGHT + 4) return this.point(null);
    const xs = this.lines.map((line) => line.x[nearest(line.x, this.view.back(x))]);
    const best = xs.reduce((one, two) => (Math.abs(this.view.x(two) - x) < Math.abs(this.view.x(one) - x) ? two : one));
    this.point(best);
  }

  down(event) {
    if (!this.view || event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = [event.offsetX, event.offsetX];
  }

  up() {
    if (!this.drag) return;
    const [from, to] = this.drag.slice().sort((one, two) => one - two);
    this.drag = null;
    if (this.view && to - from > NEAR) this.options.onzoom?.(Math.max(this.view.left, this.view.back(from)), Math.min(this.view.right, this.view.back(to)));
    this.draw();
  }

  key(event) {
    if (!this.view || event.ctrlKey || event.metaKey) return;
    const line = this.lines[0], at = this.at === null ? line.x.length - 1 : nearest(line.x, this.at);
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: line.x.length - 1, PageUp: at - 10, PageDown: at + 10 };
    if (event.key in moves) this.point(line.x[Math.max(0, Math.min(line.x.length - 1, moves[event.key]))]);
    else if (event.key === "Escape") this.point(null);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.options.onzoom?.(null, null);
    else return;
    event.preventDefault();
  }

  zoom(factor) {
    const middle = this.at ?? (this.view.left + this.view.right) / 2, half = ((this.view.right - this.view.left) * factor) / 2;
    this.options.onzoom?.(Math.max(this.view.left, middle - half), Math.min(this.view.right, middle + half));
  }
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

export function look(at, dashed = false) {
  return { color: COLORS[at % COLORS.length], dash: dashed ? [5, 4] : DASHES[Math.floor(at / COLORS.length) % DASHES.length] };
}

export function swatch(style) {
  const canvas = element("canvas", { class: "swatch", width: "44", height: "20", "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  pen.scale(2, 2);
  pen.strokeStyle = color(style.color);
  pen.lineWidth = 2.5;
  pen.setLineDash(style.dash);
  pen.beginPath();
  pen.moveTo(0, 5);
  pen.lineTo(22, 5);
  pen.stroke();
  return canvas;
}

export const markSign = (kind) => (MARKS[kind] || MARKS.diagnosis)[1];
export const plain = number;
