"use strict";
// Draws the figures that the page carries as JSON. Nothing is fetched.
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

function draw(key) {
  const place = document.getElementById(key);
  if (!place.classList.contains("js-plotly-plot")) {
    Plotly.newPlot(place, figures[key].data, figures[key].layout, config);
  }
}

function showTimeline(number) {
  for (const panel of document.querySelectorAll("[data-timeline]")) {
    panel.hidden = panel.dataset.timeline !== number;
  }
  draw("timeline-" + number);
}

// A click on a strategy in any legend hides or shows its line in all figures.
function toggleRun(run) {
  const buttons = document.querySelectorAll(`button[data-run="${run}"]`);
  const shown = buttons[0].getAttribute("aria-pressed") !== "true";
  for (const button of buttons) {
    button.setAttribute("aria-pressed", String(shown));
  }
  for (const place of document.querySelectorAll(".plot[data-lines]")) {
    const lines = place.data.map((line, i) => i).filter((i) => String(place.data[i].meta) === run);
    Plotly.restyle(place, { visible: shown }, lines);
  }
}

for (const place of document.querySelectorAll(".plot:not(.later)")) {
  draw(place.id);
}
for (const button of document.querySelectorAll("button[data-run]")) {
  button.addEventListener("click", () => toggleRun(button.dataset.run));
}
const chooser = document.getElementById("timeline-run");
if (chooser) {
  chooser.addEventListener("change", () => showTimeline(chooser.value));
  showTimeline(chooser.value);
}
document.documentElement.dataset.drawn = "true";
