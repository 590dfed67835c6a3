// One run: its state, curves with marks, workers, timeline, topology, events, logs, settings.
import { AXIS_FORMS, QUANTITIES, ago, bytes, chip, compact, element, number, percent, seconds, setText, table, whole } from "./format.js";
import { look, markSign } from "./chart.js";
import { Charts, axisChooser } from "./compare.js";
import { clientsPicture, recentPicture, timelinePicture, topologyPicture } from "./pictures.js";
import { follow, go, note, remove, setTitle } from "./app.js";

const KINDS = { train: "training", test: "test set", log: "logged" };
const TRAIN = { color: "#0072B2", dash: [] }, TEST = { color: "#D55E00", dash: [] }, OWN = { color: "#008A63", dash: [] };
const LOOKS = { train: TRAIN, test: TEST, log: OWN };

export function runPage(id, parameters) {
  let axis = parameters.get("axis") || "seconds", span = [null, null], told = null, curves = null, prediction = null, activity = null;
  const heading = element("h1", {}, id.split("/").pop());
  const state = element("span"), call = element("p", { class: "quiet call" });
  const bar = element("i"), left = element("span", { class: "quiet" });
  const progress = element("div", { class: "long progress", role: "progressbar", "aria-label": "Finished part of the run", "aria-valuemin": "0", "aria-valuemax": "100", hidden: true }, bar);
  const remark = element("p", { class: "remark", hidden: true });
  const said = element("ul", { class: "said", "aria-label": "Diagnosis", hidden: true });
  const report = element("a", { class: "button", target: "_blank", rel: "noopener", href: `report?${new URLSearchParams({ run: id })}`, hidden: true }, "Report");
  const archive = element("button", { type: "button", hidden: true, onclick: () => drop(true) }, "Archive");
  const erase = element("button", { type: "button", class: "danger", hidden: true, onclick: () => drop(false) }, "Delete");
  const tiles = element("dl", { class: "tiles numbers" });
  const charts = new Charts((begin, end) => { span = [begin, end]; open(); });
  const chooser = axisChooser(axis, (name) => { axis = name; span = [null, null]; open(); });
  const reading = element("p", { class: "quiet", role: "status" });
  const predicted = element("div"), workers = element("div"), exchanges = element("div"), events = element("div"), timeline = element("div"), topology = element("div"), clients = element("div"), settings = element("div"), logged = element("div");
  const log = logPanel(id);
  const sections = [
    ["Predicted beside measured", predicted], ["Workers and servers", workers], ["Clients", clients], ["Exchanges", exchanges], ["Timeline", timeline], ["Topology", topology], ["Events", events], ["Logged", logged], ["Logs", log.place], ["Settings", settings],
  ].map(([title, content]) => element("section", { hidden: true, class: "part" }, element("h2", {}, title), content));
  const showSection = (content, there) => { content.parentElement.hidden = !there; };
  const place = element("div", { class: "run" },
    element("div", { class: "title" }, element("div", {}, heading, call), element("div", { class: "buttons" }, state, report, archive, erase)),
    progress, left, remark, said, tiles, element("h2", { class: "first" }, "Curves"), element("div", { class: "tools" }, chooser.place, reading), charts.place, sections);

  async function drop(kept) {
    if (await remove([id], kept)) go("#/");
  }

  function drawHead() {
    const { row, facts } = told;
    const running = row.state === "running";
    state.replaceChildren(chip(row.state));
    setText(call, [row.strategy, row.workers ? `${whole(row.workers)} ${row.world === "virtual" ? "virtual " : ""}worker${row.workers === 1 ? "" : "s"}` : "", row.hosts > 1 ? `${row.hosts} hosts` : "", row.began_s ? `began ${ago(row.began_s)}` : ""].filter(Boolean).join(" · "));
    const done = typeof row.done === "number" ? Math.round(100 * row.done) : null;
    progress.hidden = !running || done === null;
    bar.style.width = `${done || 0}%`;
    progress.setAttribute("aria-valuenow", String(done || 0));
    setText(left, running && done !== null ? `${done} %${typeof row.eta_s === "number" ? `, about ${seconds(Math.max(1, Math.round(row.eta_s)))} left` : ""}` : "");
    setTitle(`${running && done !== null ? `${done} % ` : ""}${id.split("/").pop()}`);
    remark.hidden = !row.why;
    setText(remark, row.why || "");
    report.hidden = !row.ended;
    archive.hidden = erase.hidden = running || id === ".";
    const virtual = row.world === "virtual";
    const numbers = [
      ["Loss", number(row.loss)], ["Accuracy", typeof row.accuracy === "number" ? percent(row.accuracy) : null],
      ["Samples/s", compact(row.samples_per_s), virtual ? "virtual clock" : ""],
      ["Step", whole(row.step), row.steps ? `of ${whole(row.steps)}` : ""], ["Epoch", number(row.epoch, 3), row.epochs ? `of ${number(row.epochs)}` : ""],
      [virtual ? "Virtual time" : "Training time", seconds(row.seconds), virtual && row.began_s ? `${seconds(Math.round((running ? Date.now() / 1000 : row.written_s ?? row.changed_s) - row.began_s))} on the real clock` : ""],
      ["Sent per rank", row.bytes_sent_per_rank === undefined ? null : bytes(row.bytes_sent_per_rank)],
      ["Communication", row.communication_share === undefined ? null : percent(row.communication_share), "of the time"],
      ["Staleness", typeof row.staleness === "number" ? number(row.staleness, 3) : null, "updates"],
    ].filter(([, value]) => value !== null && value !== "–");
    fillTiles(numbers);
    drawSaid();
    drawProcesses();
    drawSettings(facts);
    log.show(told.logs);
    showSection(log.place, told.logs.length > 0);
  }

  // The culprit and the bound, by the result, or by the rows so far.
  function drawSaid() {
    const sentences = told?.facts.said.length ? told.facts.said : curves?.said || [];
    said.hidden = !sentences.length;
    if (said.dataset.shown === sentences.join("\n")) return;
    said.dataset.shown = sentences.join("\n");
    said.replaceChildren(...sentences.map((sentence) => element("li", {}, sentence)));
  }

  function fillTiles(numbers) {
    while (tiles.children.length > numbers.length) tiles.lastElementChild.remove();
    numbers.forEach(([name, value, more], at) => {
      if (!tiles.children[at]) tiles.append(element("div", {}, element("dt"), element("dd", {}, element("strong"), element("small"))));
      const [term, text] = tiles.children[at].children;
      setText(term, name);
      setText(text.children[0], value);
      setText(text.children[1], more || "");
    });
  }

  function drawProcesses() {
    const rows = told.processes, has = (key) => rows.some((each) => each[key] !== null && each[key] !== undefined);
    showSection(workers, rows.length > 0);
    const hosts = new Set(rows.map((each) => each.host).filter(Boolean));
    const heads = [{ name: "Process", text: true }, { name: "Kind", text: true }, ...(hosts.size ? [{ name: "Host", text: true }] : []), { name: "State", text: true },
      ...(has("samples_per_s") ? ["Samples/s"] : []), ...(has("idle_share") ? ["Waits"] : []), ...(has("staleness") ? ["Staleness"] : []), ...(has("memory_bytes") ? ["Memory"] : [])];
    const known = { running: "running", ended: "finished", failed: "failed", killed: "failed", stopped: "preempted" };
    const cells = rows.slice(0, 256).map((each) => [each.who, each.kind, ...(hosts.size ? [each.host] : []),
      element("span", { class: `chip ${known[each.state] || "unknown"}` }, element("i", { "aria-hidden": "true" }), each.state),
      ...(has("samples_per_s") ? [compact(each.samples_per_s)] : []), ...(has("idle_share") ? [meter(each.idle_share)] : []), ...(has("staleness") ? [number(each.staleness, 3)] : []), ...(has("memory_bytes") ? [bytes(each.memory_bytes)] : [])]);
    workers.replaceChildren(table(heads, cells, { label: "Workers and servers" }), element("p", { class: "quiet" }, rows.length > 256 ? `and ${whole(rows.length - 256)} more` : ""));
  }

  function drawSettings(facts) {
    showSection(settings, true);
    const version = JSON.stringify(facts);
    if (settings.dataset.version === version) return;
    settings.dataset.version = version;
    const pairs = (values) => element("dl", { class: "facts" }, Object.entries(values || {}).filter(([, value]) => value !== null && value !== undefined).map(([name, value]) =>
      element("div", {}, element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? number(value, 6) : String(value)))));
    const copy = element("button", { type: "button", class: "small", onclick: () => copyText(facts.command) }, "Copy");
    settings.replaceChildren(element("div", { class: "grid" },
      element("section", { class: "card" }, element("h3", {}, "Options"), pairs(facts.settings)),
      Object.keys(facts.outcome).length ? element("section", { class: "card" }, element("h3", {}, "Outcome"), pairs({ ...facts.outcome, ...facts.server })) : null,
      Object.keys(facts.environment).length ? element("section", { class: "card" }, element("h3", {}, "Environment"), pairs(facts.environment)) : null,
      element("section", { class: "card" }, element("h3", {}, "Folder and hashes"), pairs({ folder: facts.folder, ...facts.hashes })),
      facts.command ? element("section", { class: "card" }, element("div", { class: "head" }, element("h3", {}, "The command that repeats it"), copy), element("pre", { class: "command", tabindex: "0", "aria-label": "Command" }, element("code", {}, ...facts.command.split(/( )/).map((word) => word === " " ? word : element("span", {}, word))))) : null));
  }

  // The exchanges of rank 0, or of the first worker of a server, between its last two rows.
  function drawExchanges(found) {
    showSection(exchanges, Boolean(found));
    if (!found) return;
    const steps = Math.max(1, found.step - found.since_step), ops = Object.entries(found.ops);
    const rows = ops.map(([op, each]) => [op.replaceAll("_", "-"), number(each.count / steps, 3), bytes(each.bytes / steps), seconds(each.seconds / steps)]);
    exchanges.replaceChildren(element("p", { class: "quiet" }, `${found.worker === null ? "The rank that writes the rows" : `Worker ${found.worker}`}, steps ${whole(found.since_step)} to ${whole(found.step)}: it waited ${seconds(found.waited_s / steps)} a step. An exchange lasts from its start to its end, and computing goes on meanwhile where it can.`),
      table([{ name: "Kind", text: true }, "A step", "Sent a step", "Lasts a step"], rows, { label: "Exchanges" }));
  }

  // The turns of clients in rounds. The spread of their accuracies is among the curves.
  function drawClients(found) {
    showSection(clients, Boolean(found));
    const version = JSON.stringify(found || null);
    if (!found || clients.dataset.version === version) return;
    clients.dataset.version = version;
    const of = `of ${whole(found.clients)} clients took part in`, rounds = `${whole(found.rounds)} rounds`;
    const undrawn = found.undrawn ? ` ${whole(found.undrawn)} rounds had too many clients to draw.` : "";
    const said = found.took_part === null
      ? `${found.a_round === null ? "?" : whole(Math.round(found.a_round))} ${of} each of ${rounds}, in the mean.${undrawn}`
      : `${whole(found.took_part)} ${of} ${rounds}: ${whole(found.least)} times at least, ${number(found.median)} in the middle, ${whole(found.most)} at most.`;
    const full = `${said} A fuller color is a larger part of the rounds.`;
    replaceKept(clients, element("div", { class: "card" }, element("p", { class: "caption" }, full), clientsPicture(found, said)));
  }

  function drawCurves() {
    drawSaid();
    drawExchanges(curves.exchanged);
    drawClients(curves.clients);
    chooser.show(curves.axes, curves.axis);
    setText(reading, curves.problem ? curves.problem : curves.rows ? `${whole(curves.rows)} rows${curves.behind ? ", reading more" : ""}` : "No row of metrics yet");
    const marks = curves.marks.filter((mark) => mark.x !== null);
    for (const [quantity, found] of Object.entries(curves.curves)) {
      const lines = found.map((curve) => ({ ...curve, name: KINDS[curve.kind], look: LOOKS[curve.kind], dots: curve.kind === "test" && curve.x.length < 60 }));
      const chart = charts.chart(quantity);
      chart.show(lines, marks, span, AXIS_FORMS[curves.axis]);
      const form = (QUANTITIES[quantity] || [0, number])[1];
      chart.caption.replaceChildren(...lines.map((line) => element("span", { class: "key" }, keySquare(line.look), `${line.name} ${form(line.y[line.y.length - 1])}`)));
    }
    showSection(events, curves.marks.length > 0);
    const newest = JSON.stringify(curves.marks.at(-1) || null) + curves.marks.length;
    if (events.dataset.newest !== newest) {
      events.dataset.newest = newest;
      const saved = curves.marks.filter((mark) => mark.kind === "checkpoint").slice(0, -5);
      const rows = curves.marks.filter((mark) => !saved.includes(mark)).reverse().map((mark) => [`${markSign(mark.kind)} ${mark.at_s === null ? "" : seconds(mark.at_s)}`, mark.step === null ? "–" : whole(Math.round(mark.step)), mark.kind, mark.text]);
      events.replaceChildren(element("div", { class: "card tall" }, table([{ name: "Time", text: true }, "Step", { name: "Kind", text: true }, { name: "What happened", text: true }], rows, { label: "Events" }), saved.length ? element("p", { class: "caption" }, `and ${whole(saved.length)} checkpoints before`) : null));
    }
    showSection(logged, (curves.logged || []).length > 0);
    const version = JSON.stringify(curves.logged || []);
    if (logged.dataset.version !== version) {
      logged.dataset.version = version;
      logged.className = "grid";
      logged.replaceChildren(...(curves.logged || []).slice(-12).reverse().map((each) => element("section", { class: "card" }, element("h3", {}, `${each.name || ""}, step ${whole(each.step)}`),
        each.kind === "image" ? element("img", { class: "logged", alt: `${each.name}, step ${each.step}`, src: `picture?${new URLSearchParams({ run: id, path: each.path })}` }) : element("pre", {}, each.text || ""))));
    }
  }

  function drawActivity() {
    const recent = activity.timeline ? null : recentPicture(activity.recent), latest = activity.goes_on ? "The last operations so far. " : "";
    showSection(timeline, Boolean(activity.timeline || recent));
    if (activity.timeline) {
      replaceKept(timeline, element("div", { class: "card" }, element("p", { class: "caption" }, `${latest}Steps ${whole(activity.timeline.steps[0])} to ${whole(activity.timeline.steps[1])}. A row is a rank: computation above, communication below it. Point at a bar for its duration and bytes.`), timelinePicture(activity.timeline)));
    } else if (recent) {
      replaceKept(timeline, element("div", { class: "card" }, element("p", { class: "caption" }, "The last rows of each worker, as they come: blue is computing, orange is waiting. Single operations follow."), recent));
    }
    showSection(topology, Boolean(activity.topology));
    if (activity.topology) {
      const { picture, total } = topologyPicture(activity.topology);
      const names = Object.fromEntries(activity.topology.nodes.map((node) => [node.rank, node.name]));
      const rows = activity.topology.edges.slice(0, 60).map(([from, to, sent]) => [names[from], names[to], bytes(sent)]);
      const together = activity.topology.together.map(([op, sent]) => `${op} among all: ${bytes(sent)}`).join(", ");
      const traced = activity.goes_on ? `the last ${seconds(activity.topology.seconds)} of the trace` : "the traced steps";
      replaceKept(topology, element("div", { class: "grid" },
        element("section", { class: "card" }, element("p", { class: "caption" }, [rows.length ? `${bytes(total)} between nodes in ${traced}; a wider line is more bytes. ` : "", together ? `${together}${rows.length ? "" : ` in ${traced}`}.` : ""].join("")), picture),
        rows.length ? element("section", { class: "card" }, table([{ name: "From", text: true }, { name: "To", text: true }, "Bytes"], rows, { label: "Bytes between nodes" })) : null));
    }
  }

  // A run that goes on draws its pictures again and again: the reader's place in them stays.
  function replaceKept(place, content) {
    const region = () => place.querySelector("[role=region]"), old = region(), at = old?.scrollLeft, held = old && old === document.activeElement;
    place.replaceChildren(content);
    if (old && region()) { region().scrollLeft = at; if (held) region().focus({ preventScroll: true }); }
  }

  function drawPrediction() {
    showSection(predicted, Boolean(prediction));
    if (!prediction) return;
    const link = element("a", { href: `#/run/${encodeURIComponent(prediction.run)}` }, prediction.run);
    const times = prediction.times;
    const error = (one, two) => (two ? `${one >= two ? "+" : "−"}${Math.abs(100 * (one / two - 1)).toFixed(1)} %` : "–");
    const rows = times ? [["median step", ...times.step], ...times.components].map(([name, one, two]) => [name.replaceAll("_", "-"), seconds(one), seconds(two), error(one, two)]) : [];
    const measured = told?.row, other = prediction.row;
    if (measured && other) rows.push(["final loss", number(other.loss), number(measured.loss), error(other.loss, measured.loss)]);
    predicted.replaceChildren(element("p", { class: "quiet" }, "The simulation ", link, " has the same job, strategy and number of workers."),
      table([{ name: "Component", text: true }, "Predicted", "Measured", "Difference"], rows, { empty: "The two have no traced step in common yet.", label: "Predicted beside measured" }));
  }

  function open() {
    // A chart has half of the width: a point for two pixels. Few widths, so that many browsers share one view.
    const width = Math.max(200, Math.min(600, Math.round((charts.place.clientWidth || 1200) / 4 / 100) * 100));
    const query = new URLSearchParams({ kind: "run", run: id, axis, pixels: String(width) });
    span.forEach((value, at) => { if (value !== null) query.set(at ? "end" : "begin", String(value)); });
    follow(query, {
      run(found) { told = found; drawHead(); drawPrediction(); },
      curves(found) { curves = found; drawCurves(); },
      activity(found) { activity = found; drawActivity(); },
      prediction(found) { prediction = found; drawPrediction(); },
      problem(found) { setText(reading, `${found.text[0].toUpperCase()}${found.text.slice(1)}.`); },
    });
  }

  return { place, title: id.split("/").pop(), crumb: id, begin: open, leave: log.leave, redraw() { charts.redraw(); if (curves) drawCurves(); } };
}

function keySquare(style) {
  const square = element("span", { class: "square" });
  square.style.background = `var(--c${style.color.slice(1).toLowerCase()})`;
  return square;
}

function meter(share) {
  const inner = element("i");
  inner.style.width = `${Math.round(100 * (share || 0))}%`;
  return element("span", { class: "meter" }, element("span", { class: "progress", "aria-hidden": "true" }, inner), percent(share));
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    note("Copied.");
  } catch {
    note("This browser does not let the page copy; mark the text instead.");
  }
}

// The log of one process, followed by a stream of its own, with a search in the last 4 MiB.
function logPanel(id) {
  let source = null, names = "", waiting = 0;
  const chooser = element("select", { "aria-label": "Log", onchange: open });
  const search = element("input", { type: "search", placeholder: "Search this log", "aria-label": "Search this log", spellcheck: "false", oninput: () => { clearTimeout(waiting); waiting = setTimeout(open, 250); } });
  const count = element("span", { class: "quiet", role: "status" });
  const lines = element("pre", { class: "log", tabindex: "0", "aria-label": "Lines of the log" });
  const place = element("div", { class: "card" }, element("div", { class: "tools" }, chooser, search, count), lines);

  function open() {
    source?.close();
    if (!chooser.value) return;
    source = new EventSource(`events?${new URLSearchParams({ kind: "log", run: id, log: chooser.value, search: search.value })}`);
    source.addEventListener("log", (event) => fill(JSON.parse(event.data)));
  }

  function fill(told) {
    setText(count, `${bytes(told.bytes)}${search.value ? `, ${whole(told.found)} lines found` : `, ${whole(told.found)} lines`}`);
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    lines.replaceChildren(...told.lines.map(([at, text]) => element("div", {}, at === null ? null : element("span", { class: "at", "aria-hidden": "true" }, String(at)), ...marked(text, search.value))));
    if (!told.lines.length) lines.replaceChildren(element("span", { class: "quiet" }, search.value ? "No line holds this text." : "This log is empty."));
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  }

  function show(logs) {
    const told = logs.map((log) => log.name).join("\n");
    if (told === names) return;
    names = told;
    const chosen = chooser.value;
    chooser.replaceChildren(...logs.map((log) => element("option", { value: log.name }, log.name)));
    const first = logs.find((log) => log.name === chosen) || logs.find((log) => log.bytes > 0) || logs[0];
    if (first) { chooser.value = first.name; open(); }
  }

  return { place, show, leave() { source?.close(); } };
}

function marked(text, search) {
  if (!search) return [text];
  const found = [];
  const low = text.toLowerCase(), wanted = search.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) {
    found.push(text.slice(from, at), element("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...found, text.slice(from)];
}

export { look };
