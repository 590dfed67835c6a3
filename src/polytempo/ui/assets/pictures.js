// The timeline of the last steps, the workers' last rows, and who sends to whom: drawn as SVG.
import { bytes, element, number, percent, seconds, svg } from "./format.js";
import { color } from "./chart.js";

const tall = 30;

function labelled(rows, width, names) {
  return rows.map((rank, at) => svg("text", { x: 6, y: at * tall + tall / 2 + 4, class: "label" }, names[at]));
}

export function timelinePicture(told) {
  const width = 1000, left = 70, height = told.ranks.length * tall + 24;
  const end = Math.max(...told.bars.map((bar) => bar[3])) || 1;
  const x = (at) => left + (at / end) * (width - left - 10);
  const bars = told.bars.map(([rank, op, from, to, step, sent, peer]) => {
    const row = told.ranks.indexOf(rank), lane = told.ops[op].lane, high = (tall - 6) / told.lanes;
    const text = `${told.ops[op].name}, step ${step}, ${seconds(to - from)}${sent ? `, ${bytes(sent)}` : ""}${peer >= 0 ? `, with rank ${peer}` : ""}`;
    const bar = svg("rect", { x: x(from), y: row * tall + 3 + lane * high, width: Math.max(0.6, x(to) - x(from)), height: high - 1 }, svg("title", {}, text));
    bar.style.fill = `var(--c${told.ops[op].color.slice(1).toLowerCase()})`;
    return bar;
  });
  const lines = told.ranks.map((rank, row) => svg("line", { x1: left, x2: width, y1: (row + 1) * tall, y2: (row + 1) * tall, class: "row" }));
  const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => svg("text", { x: x(end * part), y: height - 6, class: "axis", "text-anchor": part === 1 ? "end" : part ? "middle" : "start" }, seconds(end * part)));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "timeline", "aria-label": `Steps ${told.steps[0]} to ${told.steps[1]}: ${told.bars.length} operations of ${told.ranks.length} ranks` },
    lines, labelled(told.ranks, width, told.ranks.map((rank) => `rank ${rank}`)), bars, marks);
  const legend = element("ul", { class: "legend" }, told.ops.map((op) => {
    const square = element("span", { class: "square" });
    square.style.background = `var(--c${op.color.slice(1).toLowerCase()})`;
    return element("li", {}, square, op.name);
  }));
  return element("div", {}, element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Timeline" }, picture), legend);
}

// Each worker's last rows: the time of a row, with the part that the worker waited in another color.
export function recentPicture(recent) {
  const workers = [...new Set(recent.map(([worker]) => worker))].sort((one, two) => one - two).slice(0, 32);
  const shown = recent.filter(([worker, from, to]) => workers.includes(worker) && to > from);
  if (!shown.length) return null;
  const last = Math.max(...shown.map((row) => row[2]));
  const first = Math.max(Math.min(...shown.map((row) => row[1])), last - 12 * median(shown.map((row) => row[2] - row[1])) * Math.max(1, workers.length / 2));
  const width = 1000, left = 84, x = (at) => left + (Math.max(0, at - first) / (last - first || 1)) * (width - left - 10);
  const bars = shown.filter((row) => row[2] > first).flatMap(([worker, from, to, idle]) => {
    const row = workers.indexOf(worker), busy = to - (to - from) * (idle || 0), told = `${seconds(to - from)}${idle === null ? "" : `, ${percent(idle)} of it waiting`}`;
    const bar = (begin, end, kind) => svg("rect", { x: x(begin), y: row * tall + 5, width: Math.max(0.6, x(end) - x(begin) - 1), height: tall - 10, class: kind }, svg("title", {}, told));
    return [bar(from, busy, "busy"), ...(idle ? [bar(busy, to, "waits")] : [])];
  });
  const lines = workers.map((worker, row) => svg("line", { x1: left, x2: width, y1: (row + 1) * tall, y2: (row + 1) * tall, class: "row" }));
  const height = workers.length * tall + 24;
  const ends = [svg("text", { x: left, y: height - 6, class: "axis" }, seconds(first)), svg("text", { x: width - 10, y: height - 6, class: "axis", "text-anchor": "end" }, seconds(last))];
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Last rows of each worker" },
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "timeline", "aria-label": "The last rows of each worker: computing and waiting" },
      lines, labelled(workers, width, workers.map((worker) => `worker ${worker}`)), bars, ends));
}

// Clients and rounds: a fuller color is a larger part of the rounds. `ClientRounds.plain` has the numbers.
export function clientsPicture(told, said) {
  const rows = told.parts.length, columns = told.parts[0].length, left = 84, most = Math.max(...told.parts.flat()) || 1;
  const wide = 900 / columns, high = Math.max(5, Math.min(14, 300 / rows)), width = left + 900, height = rows * high;
  const first = (row) => Math.ceil(row * told.clients / rows);
  const cells = told.parts.flatMap((line, row) => line.map((part, column) => {
    if (!part) return null;
    const begin = column * told.width, last = Math.min(told.rounds, begin + told.width) - 1, end = first(row + 1) - 1;
    const who = end === first(row) ? `client ${end}` : `clients ${first(row)} to ${end}`, when = last === begin ? `round ${begin}` : `rounds ${begin} to ${last}`;
    return svg("rect", { x: left + column * wide, y: row * high, width: Math.max(1, wide - 1), height: high - 1, class: "busy", "fill-opacity": 0.15 + 0.85 * part / most }, svg("title", {}, `${who}, ${when}: ${number(100 * part)} %`));
  })).filter(Boolean);
  const text = (x, y, anchor, said) => svg("text", { x, y, class: "axis", "text-anchor": anchor }, said);
  const ends = [text(left - 6, 10, "end", "client 0"), text(left - 6, height, "end", String(told.clients - 1)), text(left, height + 16, "start", "round 0"), text(width, height + 16, "end", String(told.rounds - 1))];
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Clients and rounds" },
    svg("svg", { viewBox: `0 0 ${width} ${height + 24}`, role: "img", class: "timeline", "aria-label": said }, cells, ends));
}

function median(values) {
  return values.slice().sort((one, two) => one - two)[Math.floor(values.length / 2)];
}

// Workers on a circle, servers inside; an edge is as wide as its bytes.
export function topologyPicture(told) {
  const size = 420, middle = size / 2, workers = told.nodes.filter((node) => node.worker), others = told.nodes.filter((node) => !node.worker);
  const places = new Map();
  const circle = (nodes, radius, turn) => nodes.forEach((node, at) => {
    const angle = (2 * Math.PI * at) / nodes.length + turn;
    places.set(node.rank, [middle + radius * Math.cos(angle), middle + radius * Math.sin(angle)]);
  });
  circle(workers, workers.length === 1 && !others.length ? 0 : 150, -Math.PI / 2);
  circle(others, others.length > 1 ? 62 : 0, others.length === 2 ? 0 : -Math.PI / 2);
  const together = told.together.reduce((sum, [, sent]) => sum + sent, 0) / Math.max(1, workers.length);
  const most = Math.max(...told.edges.map((edge) => edge[2]), together, 1), total = told.edges.reduce((sum, edge) => sum + edge[2], 0);
  const named = Object.fromEntries(told.nodes.map((node) => [node.rank, node.name]));
  const edges = told.edges.map(([from, to, sent]) => {
    const [x1, y1] = places.get(from), [x2, y2] = places.get(to), long = Math.hypot(x2 - x1, y2 - y1) || 1;
    const bend = 12, cx = (x1 + x2) / 2 - ((y2 - y1) / long) * bend, cy = (y1 + y2) / 2 + ((x2 - x1) / long) * bend;
    return svg("path", { d: `M${x1} ${y1}Q${cx} ${cy} ${x2} ${y2}`, class: "edge", "stroke-width": (0.8 + 5 * Math.sqrt(sent / most)).toFixed(2) },
      svg("title", {}, `${named[from]} to ${named[to]}: ${bytes(sent)}`));
  });
  if (together && workers.length > 1) edges.unshift(svg("circle", { cx: middle, cy: middle, r: 150, class: "together" }, svg("title", {}, told.together.map(([op, sent]) => `${op} among all: ${bytes(sent)}`).join(", "))));
  const small = told.nodes.length > 20;
  const nodes = told.nodes.flatMap((node) => {
    const [x, y] = places.get(node.rank), right = x >= middle - 1;
    const shape = node.worker ? svg("circle", { cx: x, cy: y, r: small ? 5 : 9, class: "worker" }, svg("title", {}, node.name)) : svg("rect", { x: x - 9, y: y - 9, width: 18, height: 18, rx: 4, class: "server" }, svg("title", {}, node.name));
    if (small && node.worker) return [shape];
    return [shape, svg("text", { x: x + (node.worker && Math.abs(x - middle) < 5 ? 0 : right ? 14 : -14), y: y + (!node.worker || Math.abs(x - middle) >= 5 ? 4 : y < middle ? -16 : 26), "text-anchor": node.worker && Math.abs(x - middle) < 5 ? "middle" : right ? "start" : "end", class: "label" }, node.name)];
  });
  const picture = svg("svg", { viewBox: `-70 0 ${size + 140} ${size}`, role: "img", class: "topology", "aria-label": `${told.nodes.length} nodes, ${told.edges.length} edges, ${bytes(total)}` }, edges, nodes);
  return { picture, total };
}

export { color };

// The score of each trial by its number, with a line along the best so far and a ring around the best.
export function trialsPicture(sweep) {
  const width = 520, height = 200, left = 62, low = 30, top = 12, there = sweep.trials.filter((each) => typeof each.value === "number");
  if (there.length < 2) return null;
  const values = there.map((each) => each.value), least = Math.min(...values), span = Math.max(...values) - least || 1;
  const last = Math.max(1, sweep.num_trials - 1), x = (trial) => left + 12 + (trial / last) * (width - left - 24);
  const y = (value) => height - low - 12 - ((value - least) / span) * (height - low - top - 24);
  let best = null;
  const so = there.map((each) => { if (each.state === "finished" && (best === null || (sweep.better === "less" ? each.value < best : each.value > best))) best = each.value; return [each.number, best]; }).filter(([, value]) => value !== null);
  const line = svg("polyline", { class: "front", points: so.map(([at, value]) => `${x(at)},${y(value)}`).join(" ") });
  const dots = there.map((each) => svg("circle", { cx: x(each.number), cy: y(each.value), r: each.number === sweep.best ? 5 : 3.5, class: each.state === "finished" ? "front" : "other" },
    svg("title", {}, `trial ${each.number}, ${each.state}: ${sweep.metric} ${number(each.value)}`)));
  const chosen = there.find((each) => each.number === sweep.best);
  const ring = chosen ? [svg("circle", { cx: x(chosen.number), cy: y(chosen.value), r: 9, class: "choice" })] : [];
  const ends = [
    svg("text", { x: left - 8, y: y(least) + 4, class: "axis", "text-anchor": "end" }, number(least, 3)),
    ...(span > 0 && Math.max(...values) > least ? [svg("text", { x: left - 8, y: y(Math.max(...values)) + 4, class: "axis", "text-anchor": "end" }, number(Math.max(...values), 3))] : []),
    svg("text", { x: (left + width) / 2, y: height - 8, class: "axis", "text-anchor": "middle" }, "trial →"),
  ];
  const frame = svg("path", { class: "frame", d: `M${left} ${top}V${height - low}H${width}` });
  return element("figure", { class: "plan" }, svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${sweep.metric} of ${there.length} trials` }, frame, line, dots, ring, ends),
    element("figcaption", { class: "caption" }, `Up: ${sweep.metric}, right: trials. The line is the best so far.`));
}

// Time against money of the runs that a plan compared, both logarithmic: a line along the front, a ring around the choice.
export function planPicture(plan) {
  const width = 520, height = 250, left = 62, low = 30, top = 12, runs = plan.forecasts.filter((each) => each.seconds > 0 && each.money > 0);
  if (!runs.length) return null;
  const scale = (values, from, to) => {
    const logs = values.map(Math.log10), least = Math.min(...logs), span = Math.max(...logs) - least || 1;
    const begin = from + 12 * Math.sign(to - from), room = to - from - 24 * Math.sign(to - from);
    return (value) => begin + ((Math.log10(value) - least) / span) * room;
  };
  const x = scale(runs.map((each) => each.seconds), left, width), y = scale(runs.map((each) => each.money), height - low, top);
  const fastest = Math.min(...runs.map((each) => each.seconds)), slowest = Math.max(...runs.map((each) => each.seconds));
  const cheapest = Math.min(...runs.map((each) => each.money)), dearest = Math.max(...runs.map((each) => each.money));
  const onFront = new Set(plan.front.map((each) => JSON.stringify(each)));
  const told = (each) => `${each.strategy}, ${each.workers} workers, batch ${each.batch_size}: ${seconds(each.seconds)}, ${number(each.money, 3)} ${plan.unit}`;
  const dots = runs.map((each) => svg("circle", { cx: x(each.seconds), cy: y(each.money), r: onFront.has(JSON.stringify(each)) ? 5 : 3.5, class: onFront.has(JSON.stringify(each)) ? "front" : "other" }, svg("title", {}, told(each))));
  const front = plan.front.filter((each) => each.seconds > 0 && each.money > 0);
  const line = svg("polyline", { class: "front", points: front.map((each) => `${x(each.seconds)},${y(each.money)}`).join(" ") });
  const ring = plan.winner && plan.winner.seconds > 0 && plan.winner.money > 0 ? [svg("circle", { cx: x(plan.winner.seconds), cy: y(plan.winner.money), r: 9, class: "choice" })] : [];
  const ends = [
    svg("text", { x: x(fastest), y: height - 8, class: "axis", "text-anchor": "middle" }, seconds(fastest)),
    ...(slowest > fastest ? [svg("text", { x: width - 6, y: height - 8, class: "axis", "text-anchor": "end" }, seconds(slowest))] : []),
    svg("text", { x: left - 8, y: y(cheapest) + 4, class: "axis", "text-anchor": "end" }, number(cheapest, 2)),
    ...(dearest > cheapest ? [svg("text", { x: left - 8, y: y(dearest) + 4, class: "axis", "text-anchor": "end" }, number(dearest, 2))] : []),
    svg("text", { x: (left + width) / 2, y: height - 8, class: "axis", "text-anchor": "middle" }, "time →"),
  ];
  const frame = svg("path", { class: "frame", d: `M${left} ${top}V${height - low}H${width}` });
  return element("figure", { class: "plan" }, svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Time against ${plan.unit} of ${runs.length} runs; ${front.length} are on the front` }, frame, line, dots, ring, ends),
    element("figcaption", { class: "caption" }, `Up: ${plan.unit}, right: time, both logarithmic. The line is the front, the ring is the choice.`));
}
