// Several runs in the same charts, and their settings side by side with the differences marked.
import { AXES, AXIS_FORMS, QUANTITIES, chip, element, number, percent, plural, seconds, table, compact } from "./format.js";
import { Chart, look, swatch } from "./chart.js";
import { follow } from "./app.js";

export function axisChooser(chosen, choose) {
  const place = element("div", { class: "group", role: "group", "aria-label": "Draw against" });
  return {
    place,
    show(axes, axis) {
      const buttons = axes.map((name) => element("button", { type: "button", class: "toggle", "aria-pressed": String(name === axis), onclick: () => choose(name) }, AXES[name] || name));
      if (place.dataset.shown === axes.join() + axis) return;
      place.dataset.shown = axes.join() + axis;
      const focused = place.contains(document.activeElement) ? document.activeElement.textContent : null;
      place.replaceChildren(...buttons);
      buttons.find((button) => button.textContent === focused)?.focus();
    },
  };
}

// The charts of a page, one for each quantity; they share the zoom.
export class Charts {
  constructor(zoom) {
    this.zoom = zoom;
    this.place = element("div", { class: "grid charts" });
    this.charts = new Map();
  }

  chart(quantity) {
    if (!this.charts.has(quantity)) {
      const [title, form] = QUANTITIES[quantity] || [quantity, number];
      const made = new Chart({ title, form, onzoom: this.zoom, fromZero: true, falls: quantity === "loss" });
      this.charts.set(quantity, made);
      this.place.append(made.place);
    }
    return this.charts.get(quantity);
  }

  redraw() {
    for (const chart of this.charts.values()) chart.draw();
  }
}

export function comparePage(ids, parameters) {
  let axis = parameters.get("axis") || "seconds", span = [null, null], runs = [], last = null;
  const hidden = new Set();
  const charts = new Charts((begin, end) => { span = [begin, end]; open(); });
  const chooser = axisChooser(axis, (name) => { axis = name; span = [null, null]; open(); });
  const legend = element("ul", { class: "legend shared", "aria-label": "Runs" });
  const settings = element("div"), outcome = element("div");
  const place = element("div", {}, element("h1", {}, "Compare runs"), element("h2", { class: "first" }, "Curves"), element("div", { class: "tools" }, chooser.place),
    legend, charts.place, element("h2", {}, "Where they differ"), settings, element("h2", {}, "How they stand"), outcome);

  function draw() {
    if (!last || !runs.length) return;
    chooser.show(last.axes, last.axis);
    const names = shortNames(runs);
    for (const [quantity, curves] of Object.entries(last.curves)) {
      const tested = quantity === "loss" && curves.some((curve) => curve.kind === "test") && curves.every((curve) => curve.kind !== "test" || curve.x.length >= 6);
      const lines = curves.filter((curve) => !hidden.has(curve.run) && !(quantity === "loss" && curve.kind === (tested ? "train" : "test"))).map((curve) => ({
        ...curve, name: names[curve.run], look: look(curve.run), dots: curve.kind === "test" && curve.x.length < 40 }));
      const chart = charts.chart(quantity);
      chart.heading.textContent = quantity === "loss" ? `Loss ${tested ? "on the test set" : "of training"}` : (QUANTITIES[quantity] || [quantity])[0];
      chart.show(lines, [], span, AXIS_FORMS[last.axis]);
    }
  }

  function legends() {
    const names = shortNames(runs);
    legend.replaceChildren(...runs.map((row, at) => element("li", {}, element("button", { type: "button", "aria-pressed": String(!hidden.has(at)), title: row.strategy,
      onclick: (event) => { hidden.has(at) ? hidden.delete(at) : hidden.add(at); event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(at))); draw(); } },
      swatch(look(at)), names[at]))));
  }

  function open() {
    const query = new URLSearchParams([["kind", "compare"], ["axis", axis], ["pixels", "500"], ...ids.map((id) => ["run", id])]);
    span.forEach((value, at) => { if (value !== null) query.set(at ? "end" : "begin", String(value)); });
    follow(query, {
      compared(told) {
        const before = runs.map((row) => row.id).join();
        runs = told.runs;
        if (before !== runs.map((row) => row.id).join()) legends();
        const heads = [{ name: "Setting", text: true }, ...shortNames(runs).map((name) => ({ name, text: true }))];
        const cells = told.settings.filter(([, differs]) => differs).map(([name, , ...values]) => [name, ...values.map((value) => element("mark", {}, text(value)))]);
        const same = told.settings.filter(([, differs]) => !differs).map(([name, , value]) => `${name} ${text(value)}`);
        settings.replaceChildren(table(heads, cells, { empty: "These runs have the same settings, as far as they recorded them.", label: "Settings that differ" }), element("p", { class: "quiet" }, same.length ? `The same for all: ${same.join(", ")}.` : ""));
        outcome.replaceChildren(table([{ name: "Run", text: true }, { name: "State", text: true }, "Loss", "Accuracy", "Samples/s", "Time"],
          runs.map((row) => [element("a", { href: `#/run/${encodeURIComponent(row.id)}` }, row.id), chip(row.state), number(row.loss), percent(row.accuracy), compact(row.samples_per_s), seconds(row.seconds)]), { label: "Runs" }));
        draw();
      },
      curves(told) { last = told; draw(); },
      problem(told) { settings.replaceChildren(element("p", { class: "remark" }, told.text)); },
    });
  }

  return { place, title: `${plural(ids.length, "run")} compared`, crumb: "Compare", begin: open, redraw() { legends(); charts.redraw(); } };
}

const text = (value) => (value === null || value === undefined ? "–" : String(value));

// The last parts of names that tell them apart.
export function shortNames(rows) {
  const last = rows.map((row) => row.id.split("/").pop());
  return last.map((name, at) => (last.indexOf(name) === last.lastIndexOf(name) ? name : rows[at].id));
}
