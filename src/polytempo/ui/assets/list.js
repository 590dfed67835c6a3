// The list of runs: filter, sort by any field, select, compare, archive, delete.
import { ago, bytes, chip, compact, element, number, percent, plural, seconds, setText, table, whole } from "./format.js";
import { follow, go, remove, tag } from "./app.js";
import { planPicture, trialsPicture } from "./pictures.js";

const COLUMNS = [
  { key: "id", name: "Run", text: true },
  { key: "state", name: "State", text: true },
  { key: "loss", name: "Loss", show: (row) => number(row.loss) },
  { key: "accuracy", name: "Accuracy", show: (row) => percent(row.accuracy), high: true },
  { key: "samples_per_s", name: "Samples/s", show: (row) => compact(row.samples_per_s), high: true },
  { key: "step", name: "Step", show: (row) => whole(row.step), high: true },
  { key: "epoch", name: "Epochs", show: (row) => number(row.epoch, 3), high: true },
  { key: "seconds", name: "Time", show: (row) => seconds(row.seconds) },
  { key: "workers", name: "Workers", show: (row) => whole(row.workers) },
  { key: "changed_s", name: "Changed", show: (row) => ago(row.changed_s), high: true },
  { key: "bytes_sent_per_rank", name: "Sent", show: (row) => bytes(row.bytes_sent_per_rank) },
  { key: "staleness", name: "Staleness", show: (row) => number(row.staleness, 3) },
  { key: "faults", name: "Faults", show: (row) => (row.faults ? whole(row.faults) : "–"), high: true },
  { key: "batch_size", name: "Batch", show: (row) => whole(row.batch_size) },
  { key: "seed", name: "Seed", show: (row) => whole(row.seed) },
];
const ORDER = { running: 0, failed: 1, gone: 2, preempted: 3, unknown: 4, finished: 5 };
const CHIPS = ["all", "running", "finished", "failed"];
const OPERATORS = { ">": (one, two) => one > two, "<": (one, two) => one < two, ">=": (one, two) => one >= two, "<=": (one, two) => one <= two, "=": (one, two) => one === two };

// A field of a row, or one of the settings of its run, as a number where it is one.
function valueOf(row, name) {
  if (Object.hasOwn(row, name)) return row[name];
  const value = Object.hasOwn(row.settings || {}, name) ? row.settings[name] : undefined;
  return typeof value === "string" && value !== "" && Number.isFinite(Number(value)) ? Number(value) : value;
}

// "gossip workers>2 tag:paper lr<0.1": words anywhere; field:text in that field or setting; field>number.
export function matches(row, text) {
  return text.toLowerCase().split(/\s+/).filter(Boolean).every((word) => {
    const found = word.match(/^([a-z_]+)(:|>=|<=|>|<|=)(.+)$/);
    if (found && found[2] === ":" && ["tag", "tags"].includes(found[1])) return (row.tags || []).some((each) => each.toLowerCase().includes(found[3]));
    const value = found && valueOf(row, found[1]);
    if (found && found[2] !== ":") return typeof value === "number" && OPERATORS[found[2]](value, Number(found[3]));
    if (found && (found[1] in row || value !== undefined)) return String(value ?? "").toLowerCase().includes(found[3]);
    return [row.id, row.job, row.strategy, row.state, row.world, row.why, ...(row.tags || [])].some((value) => String(value ?? "").toLowerCase().includes(word));
  });
}

export function listPage(parameters) {
  const selected = new Set();
  const known = new Map();
  let rows = [], state = "all", sort = parameters.get("sort") || "", down = parameters.get("down") === "1";

  const search = element("input", { type: "search", placeholder: "Filter: gossip workers>2 tag:paper", "aria-label": "Filter runs", spellcheck: "false", value: parameters.get("q") || "", oninput: () => draw() });
  const chips = CHIPS.map((name) => element("button", { type: "button", class: "toggle", "aria-pressed": String(name === state), onclick: () => { state = name; draw(); } }, name));
  const count = element("p", { class: "quiet", role: "status" });
  const all = element("input", { type: "checkbox", "aria-label": "Select all shown runs", onchange: () => { for (const row of visible()) all.checked ? selected.add(row.id) : selected.delete(row.id); draw(); } });
  const heads = COLUMNS.map((column) => element("th", { scope: "col", class: column.text ? "text" : false, "aria-sort": "none" },
    element("button", { type: "button", onclick: () => { down = sort === column.key ? !down : Boolean(column.high); sort = column.key; draw(); } }, column.name)));
  const body = element("tbody");
  const frame = element("div", { class: "scroll runs", tabindex: "0", role: "region", "aria-label": "Runs" },
    element("table", { class: "cards" }, element("thead", {}, element("tr", {}, element("th", { scope: "col", class: "check" }, all), heads)), body));
  const sorter = element("select", { "aria-label": "Sort by", onchange: () => { sort = sorter.value; down = Boolean(COLUMNS.find((column) => column.key === sort)?.high); draw(); } },
    element("option", { value: "" }, "Sort: newest"), COLUMNS.map((column) => element("option", { value: column.key }, `Sort: ${column.name.toLowerCase()}`)));
  const bySetting = element("optgroup", { label: "Settings that differ" });
  const chosen = element("span");
  const compare = element("button", { type: "button", class: "primary", onclick: () => go(`#/compare?${new URLSearchParams([...selected].map((id) => ["run", id]))}`) }, "Compare");
  const actions = element("div", { class: "actions", hidden: true, role: "toolbar", "aria-label": "Selected runs" }, chosen, compare,
    element("button", { type: "button", onclick: () => tag(rows.filter((row) => selected.has(row.id))) }, "Tag"),
    element("button", { type: "button", onclick: () => drop(true) }, "Archive"),
    element("button", { type: "button", class: "danger", onclick: () => drop(false) }, "Delete"),
    element("button", { type: "button", class: "plain", onclick: () => { selected.clear(); draw(); } }, "Clear"));
  const empty = element("div", { class: "empty", hidden: true });
  const plans = element("section", { hidden: true, class: "part" });
  const sweeps = element("section", { hidden: true, class: "part" });
  const heading = element("h1", {}, "Runs");
  const where = element("p", { class: "quiet path" });
  const place = element("div", {}, heading, where,
    element("div", { class: "tools" }, search, element("div", { class: "group", role: "group", "aria-label": "State" }, chips), sorter),
    count, frame, empty, actions, sweeps, plans);

  async function drop(archive) {
    if (await remove([...selected], archive)) selected.clear();
    draw();
  }

  function visible() {
    const found = rows.filter((row) => (state === "all" || row.state === state || (state === "failed" && ["gone", "preempted"].includes(row.state))) && matches(row, search.value));
    if (!sort) return found;
    const value = (row) => (sort === "state" ? ORDER[row.state] ?? 9 : valueOf(row, sort));
    const missing = (one) => one === null || one === undefined || one === "";
    return found.sort((one, two) => {
      const [first, second] = [value(one), value(two)];
      if (missing(first) || missing(second)) return missing(first) - missing(second);
      const order = typeof first === "number" && typeof second === "number" ? first - second : String(first).localeCompare(String(second), "en", { numeric: true });
      return down ? -order : order;
    });
  }

  // A row of the table is made once and then only its texts change, so that focus and selection stay.
  function made(row) {
    const check = element("input", { type: "checkbox", "aria-label": `Select ${row.id}`, onchange: () => { check.checked ? selected.add(row.id) : selected.delete(row.id); draw(); } });
    const name = element("a", { href: `#/run/${encodeURIComponent(row.id)}` });
    const call = element("small"), tags = element("span", { class: "tags" });
    const bar = element("i"), left = element("small");
    const chipPlace = element("span");
    const cells = COLUMNS.slice(2).map((column) => element("td", { data: { name: column.name } }));
    const line = element("tr", {}, element("td", { class: "check" }, check), element("th", { scope: "row" }, name, call, tags),
      element("td", { class: "text state", data: { name: "State" } }, chipPlace, element("span", { class: "progress", "aria-hidden": "true" }, bar), left), cells);
    return { line, check, name, call, tags, bar, left, chipPlace, cells, state: "" };
  }

  function fill(found, row) {
    setText(found.name, row.id === "." ? row.name : row.id);
    setText(found.call, [row.strategy, row.world === "virtual" ? "simulated" : ""].filter(Boolean).join(" · ") || row.why || "");
    found.call.title = row.strategy || "";
    const tagged = JSON.stringify(row.tags || []);
    if (found.tagged !== tagged) found.tags.replaceChildren(...(row.tags || []).map((each) => element("span", { class: "tag" }, each)));
    found.tagged = tagged;
    if (found.state !== row.state) { found.chipPlace.replaceChildren(chip(row.state)); found.state = row.state; }
    const running = row.state === "running" && typeof row.done === "number";
    found.bar.parentElement.hidden = !running;
    found.bar.style.width = `${Math.round(100 * (row.done || 0))}%`;
    setText(found.left, running ? `${Math.round(100 * row.done)} %${typeof row.eta_s === "number" ? `, ${seconds(Math.max(1, Math.round(row.eta_s)))} left` : ""}` : row.state === "failed" ? row.why || "" : "");
    found.left.title = row.why || "";
    found.check.checked = selected.has(row.id);
    COLUMNS.slice(2).forEach((column, at) => setText(found.cells[at], column.show(row)));
    found.line.classList.toggle("chosen", selected.has(row.id));
  }

  // The settings that differ between the runs can be sorted by, too.
  function sortedBy() {
    const known = new Set(COLUMNS.map((column) => column.key));
    const names = [...new Set(rows.flatMap((row) => Object.keys(row.settings || {})))].filter((name) => !known.has(name) && name !== "tags" && new Set(rows.map((row) => row.settings?.[name])).size > 1).sort();
    if ([...bySetting.children].map((each) => each.value).join() !== names.join()) {
      bySetting.replaceChildren(...names.map((name) => element("option", { value: name }, `Sort: ${name.replaceAll("_", " ")}`)));
      names.length ? sorter.append(bySetting) : bySetting.remove();
    }
    sorter.value = sort;
  }

  function draw() {
    const ids = new Set(rows.map((row) => row.id));
    for (const id of known.keys()) if (!ids.has(id)) { known.get(id).line.remove(); known.delete(id); selected.delete(id); }
    const shown = visible();
    shown.forEach((row, at) => {
      if (!known.has(row.id)) known.set(row.id, made(row));
      const found = known.get(row.id);
      fill(found, row);
      if (body.children[at] !== found.line) body.insertBefore(found.line, body.children[at] || null);
    });
    while (body.children.length > shown.length) body.lastElementChild.remove();
    COLUMNS.forEach((column, at) => {
      heads[at].setAttribute("aria-sort", sort !== column.key ? "none" : down ? "descending" : "ascending");
      const told = column.key === "id" || column.key === "state" || rows.some((row) => row[column.key] !== null && row[column.key] !== undefined && row[column.key] !== 0);
      frame.classList.toggle(`without-${at}`, !told);
    });
    chips.forEach((button, at) => button.setAttribute("aria-pressed", String(CHIPS[at] === state)));
    sortedBy();
    const running = rows.filter((row) => row.state === "running").length;
    setText(count, rows.length ? `${plural(shown.length, "run")}${shown.length < rows.length ? ` of ${whole(rows.length)}` : ""}${running ? `, ${running} running` : ""}` : "");
    frame.hidden = !rows.length;
    empty.hidden = Boolean(rows.length);
    all.checked = shown.length > 0 && shown.every((row) => selected.has(row.id));
    all.indeterminate = !all.checked && shown.some((row) => selected.has(row.id));
    actions.hidden = !selected.size;
    setText(chosen, `${selected.size} selected`);
    compare.disabled = selected.size < 2 || selected.size > 40;
    compare.title = selected.size > 40 ? "At most 40 runs are compared" : selected.size < 2 ? "Select two runs or more" : "";
  }

  return {
    place, title: "Runs", crumb: "",
    begin() {
      follow("kind=runs", {
        hello: (told) => setText(where, told.root),
        plans: (told) => {
          plans.hidden = !told.length;
          plans.replaceChildren(element("h2", {}, "Plans"), element("div", { class: "grid" }, told.map(planCard)));
        },
        sweeps: (told) => {
          sweeps.hidden = !told.length;
          sweeps.replaceChildren(element("h2", {}, "Sweeps and tunings"), element("div", { class: "grid" }, told.map(sweepCard)));
        },
        runs: (told) => {
          rows = told;
          empty.replaceChildren(element("h2", {}, "No run yet"), element("p", {}, "Runs appear here as soon as they begin. Start one in another terminal:"), element("pre", {}, element("code", {}, "polytempo train digits --workers 2")));
          draw();
        },
      });
    },
  };
}

// A sweep or a tuning: the best trial so far, the score of each trial, the best ones, and the command of the best.
function sweepCard(sweep) {
  const sign = sweep.better === "less" ? 1 : -1, ended = sweep.trials.filter((each) => each.state !== "running");
  const best = sweep.trials.find((each) => each.number === sweep.best), names = Object.keys(sweep.trials[0]?.settings || {});
  const told = (value) => (typeof value === "number" ? number(value) : String(value ?? "-"));
  const ordered = sweep.trials.filter((each) => typeof each.value === "number").sort((a, b) => sign * (a.value - b.value)).slice(0, 8);
  const rows = ordered.map((each) => [String(each.number), ...names.map((name) => told(each.settings[name])), number(each.value), each.state]);
  const failed = sweep.trials.filter((each) => each.state === "failed");
  return element("section", { class: "card" },
    element("h3", {}, sweep.title),
    element("p", { class: "quiet" }, `${sweep.id} · ${whole(ended.length)} of ${plural(sweep.num_trials, "trial")} · ${ago(sweep.changed_s)}`),
    best ? element("p", {}, `Best ${sweep.metric} so far: ${number(best.value)}, trial ${best.number}.`) : element("p", {}, "No trial has finished yet."),
    failed.length ? element("p", { class: "quiet" }, `${plural(failed.length, "trial")} failed: ${failed[0].why}`) : null,
    trialsPicture(sweep),
    table([{ name: "Trial", text: true }, ...names, sweep.metric, "State"], rows, { empty: "No trial has a score yet.", label: `The best trials of ${sweep.id}` }),
    sweep.command ? element("pre", { class: "command", tabindex: "0", "aria-label": "Command" }, element("code", {}, sweep.command)) : null);
}

// A plan: the choice, time against money, the front, and the command of the choice.
function planCard(plan) {
  const goal = Object.entries(plan.until).map(([measure, value]) => `${measure} ${number(value)}`).join(", ");
  const rows = plan.front.map((each) => [each.strategy, whole(each.workers), whole(each.batch_size), seconds(each.seconds), number(each.money, 3)]);
  return element("section", { class: "card" },
    element("h3", {}, `${plan.job} to ${goal}`),
    element("p", { class: "quiet" }, `${plan.id} · ${plan.cluster} · ${plural(plan.forecasts.length, "run")} compared · ${ago(plan.changed_s)}`),
    plan.sentences.length ? element("p", {}, plan.sentences[0]) : null,
    plan.forecasts.length ? planPicture(plan) : null,
    table([{ name: "Front", text: true }, "Workers", "Batch", "Time", plan.unit], rows, { empty: "No run reaches the target within the limits.", label: `The front of ${plan.id}` }),
    plan.commands.length ? element("pre", { class: "command", tabindex: "0", "aria-label": "Command" }, element("code", {}, plan.commands[0])) : null);
}
