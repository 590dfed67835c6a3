"use strict";
// Draws the figures that the page carries. Nothing is fetched: plotly.js and the figures are gzipped in the page itself.
const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
const root = document.documentElement;
const hidden = new Set(); // numbers of the runs that the reader has switched off
let figures = {};

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// ---- light and dark ----

// Figures are written in the colors of the light mode; every color has one partner in the dark one.
function toned(value) {
  if (typeof value === "string") return (root.dataset.mode === "dark" && DARK[value]) || value;
  if (Array.isArray(value)) return value.map(toned);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, toned(each)]));
}

// ---- figures ----

function draw(key) {
  const figure = toned(figures[key]);
  for (const trace of figure.data) {
    if ("meta" in trace) trace.visible = !hidden.has(String(trace.meta));
  }
  return Plotly.react(document.getElementById(key), figure.data, figure.layout, config);
}

function showTimeline(number) {
  for (const panel of document.querySelectorAll("[data-timeline]")) {
    panel.hidden = panel.dataset.timeline !== number;
  }
  draw("timeline-" + number);
}

// A click on a strategy in the legend hides or shows its line in all figures.
function toggleRun(button) {
  const run = button.dataset.run;
  if (!hidden.delete(run)) hidden.add(run);
  button.setAttribute("aria-pressed", String(!hidden.has(run)));
  for (const place of document.querySelectorAll(".plot[data-lines]")) draw(place.id);
}

// ---- tables ----

// A table that is wider than its frame says so, and is shaded on the right as long as there is more.
function markScrolling(frame) {
  const more = frame.scrollWidth - frame.clientWidth;
  frame.classList.toggle("wide", more > 1);
  frame.classList.toggle("more-right", more - frame.scrollLeft > 1);
}

for (const frame of document.querySelectorAll(".scroll")) {
  frame.addEventListener("scroll", () => markScrolling(frame), { passive: true });
  new ResizeObserver(() => markScrolling(frame)).observe(frame);
}

// ---- begin ----

const setMode = theme(() => {
  for (const place of document.querySelectorAll(".js-plotly-plot")) draw(place.id);
});

async function begin() {
  figures = JSON.parse(await unpacked("figures"));
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
  for (const place of document.querySelectorAll(".plot:not(.later)")) draw(place.id);
  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", () => toggleRun(button));
  }
  const chooser = document.getElementById("timeline-run");
  if (chooser) chooser.addEventListener("change", () => showTimeline(chooser.value));
  const first = chooser ? chooser.value : document.querySelector("[data-timeline]")?.dataset.timeline;
  if (first !== undefined) showTimeline(first);
  root.dataset.drawn = "true";
}

begin().catch((error) => {
  for (const place of document.querySelectorAll(".plot")) {
    const text = document.createElement("p");
    text.textContent =
      `This browser cannot draw the figures (${error.message}). Chrome 80, Firefox 113, Safari 16.4 or newer can; ` +
      "the tables of this page hold the results either way.";
    place.style.height = "auto";
    place.replaceChildren(text);
  }
});

// Paper is white.
let before = "light";
window.addEventListener("beforeprint", () => { before = root.dataset.mode; setMode("light"); });
window.addEventListener("afterprint", () => setMode(before));
