// The frame of the page: addresses, the stream of events, light and dark, questions and notes.
import { element, setText } from "./format.js";
import { listPage } from "./list.js";
import { runPage } from "./run.js";
import { comparePage } from "./compare.js";
import { theme } from "./theme.js";

const root = document.documentElement;
const main = document.getElementById("main");
let source = null, shown = null;

// The token has done its work when the page is there: it leaves the address bar and the history.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);

document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

// ---- the stream ----

function linked(state, text) {
  const place = document.getElementById("link");
  place.className = state;
  setText(place.lastElementChild, text);
}

// Follow a view: `take` has a function for each part. A new view takes the place of the one before.
export function follow(query, take) {
  source?.close();
  const opened = source = new EventSource(`events?${query}`);
  const parts = { hello: () => {}, problem: () => {}, ...take };
  for (const [name, receive] of Object.entries(parts)) {
    opened.addEventListener(name, (event) => {
      if (opened !== source) return;
      linked("live", "live");
      receive(JSON.parse(event.data));
      if (name !== "hello") root.dataset.drawn = "true";
    });
  }
  opened.onerror = () => {
    if (opened !== source) return;
    if (root.dataset.drawn && !document.getElementById("link").classList.contains("lost")) {
      note("The server of this page has ended, perhaps with the command that started it. “polytempo ui” shows the runs again; this page stays as it was.");
    }
    linked("lost", opened.readyState === EventSource.CLOSED ? "not connected" : "server gone");
  };
}

window.addEventListener("pagehide", () => source?.close());
window.addEventListener("pageshow", (event) => { if (event.persisted) route(); });

// ---- addresses: #/ · #/run/NAME · #/compare?run=A&run=B ----

export function go(address) {
  if (location.hash === address) route(); else location.hash = address;
}

function route() {
  const [path, query] = location.hash.slice(1).split("?");
  source?.close();
  linked("", "connecting");
  delete root.dataset.drawn;
  const parameters = new URLSearchParams(query);
  shown?.leave?.();
  if (path.startsWith("/run/")) shown = runPage(decodeURIComponent(path.slice(5)), parameters);
  else if (path === "/compare") shown = comparePage(parameters.getAll("run"), parameters);
  else shown = listPage(parameters);
  main.replaceChildren(shown.place);
  document.title = `${shown.title} · Polytempo`;
  const crumbs = [element("a", { href: "#/" }, "Runs")];
  if (shown.crumb) crumbs.push(element("span", { "aria-current": "page" }, shown.crumb));
  document.getElementById("crumbs").replaceChildren(...crumbs);
  window.scrollTo(0, 0);
  shown.begin();
}

export function setTitle(text) {
  const title = `${text} · Polytempo`;
  if (document.title !== title) document.title = title;
}

// ---- questions and notes ----

// Resolves to true or false, and with a field to its text or false.
export function ask(title, text, yes, dangerous, field = null) {
  const dialog = document.getElementById("ask");
  return new Promise((resolve) => {
    const close = (answer) => () => { dialog.close(); resolve(answer); };
    const no = element("button", { type: "button", onclick: close(false) }, "Cancel");
    dialog.replaceChildren(
      element("h2", { id: "ask-title" }, title),
      ...text.map((line) => element("p", {}, line)),
      ...(field ? [field] : []),
      element("div", { class: "buttons" }, no, element("button", { type: "button", class: dangerous ? "danger" : "primary", onclick: () => close(field ? { text: field.value } : true)() }, yes)));
    if (field) field.onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); close({ text: field.value })(); } };
    dialog.oncancel = () => resolve(false);
    dialog.showModal();
    (field || no).focus();
  });
}

let fading = 0;
export function note(text) {
  const place = document.getElementById("toast");
  setText(place, text);
  place.classList.add("seen");
  clearTimeout(fading);
  fading = setTimeout(() => place.classList.remove("seen"), 8000);
}

export async function remove(runs, archive) {
  const named = runs.length === 1 ? `“${runs[0]}”` : `${runs.length} runs`;
  const text = archive
    ? [`The folders move to “archived” in the folder of the runs, and leave this list. Nothing is deleted.`]
    : [`The folders with metrics, logs, checkpoints and reports are deleted. This cannot be undone.`];
  if (runs.length > 1) text.push(runs.slice(0, 8).join(", ") + (runs.length > 8 ? `, and ${runs.length - 8} more` : ""));
  if (!(await ask(`${archive ? "Archive" : "Delete"} ${named}?`, text, archive ? "Archive" : "Delete", !archive))) return false;
  const answer = await fetch("remove", {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ runs, archive }),
  });
  if (!answer.ok) { note(await answer.text()); return false; }
  const stayed = Object.values((await answer.json()).stayed);
  const gone = runs.length - stayed.length;
  note([gone ? `${gone} ${gone === 1 ? "run is" : "runs are"} ${archive ? "in the archive" : "deleted"}.` : "", ...stayed.slice(0, 3)].join(" ").trim());
  return gone > 0;
}

// Tags that all these runs have may be changed; a run's other tags stay.
export async function tag(rows) {
  const common = (rows[0].tags || []).filter((each) => rows.every((row) => (row.tags || []).includes(each)));
  const field = element("input", { type: "text", "aria-label": "Tags, separated by commas", spellcheck: "false", value: common.join(", ") });
  const answer = await ask(`Tags of ${rows.length === 1 ? `“${rows[0].id}”` : `${rows.length} runs`}`, ["Words separated by commas, such as baseline, paper."], "Save", false, field);
  if (!answer) return;
  const wanted = answer.text.split(",").map((each) => each.trim()).filter(Boolean);
  const body = { runs: rows.map((row) => row.id), add: wanted.filter((each) => !common.includes(each)), remove: common.filter((each) => !wanted.includes(each)) };
  const found = await fetch("tags", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  if (!found.ok) { note(await found.text()); return; }
  const stayed = Object.values((await found.json()).stayed);
  if (stayed.length) note(stayed.slice(0, 3).join(" "));
}

// ---- keys: / filter, g runs, ? help ----

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  if (event.key === "/") { document.querySelector("input[type=search]")?.focus(); event.preventDefault(); }
  if (event.key === "g") go("#/");
  if (event.key === "?") ask("Keys", ["/  go to the search field", "g  back to all runs", "Tab, Enter, Space  move, open, select", "In a chart: arrow keys read values, + zooms in, − shows all, Esc leaves"], "Close");
});

theme(() => shown?.redraw?.());
window.addEventListener("hashchange", route);
route();
