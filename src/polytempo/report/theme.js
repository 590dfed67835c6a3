// Light and dark: a reader's choice goes before the system's. `changed` is called after each change of the mode.
function theme(changed) {
  const root = document.documentElement, button = document.getElementById("mode");
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function remembered(mode) { // Storage may be forbidden to a file: then the choice lasts as long as the page.
    try {
      if (mode) localStorage.setItem("polytempo-mode", mode);
      return localStorage.getItem("polytempo-mode");
    } catch {
      return mode || null;
    }
  }

  function set(mode) {
    root.dataset.mode = mode;
    button.textContent = mode === "dark" ? "Light mode" : "Dark mode";
    changed();
  }

  button.addEventListener("click", () => set(remembered(root.dataset.mode === "dark" ? "light" : "dark")));
  system.addEventListener("change", () => remembered() || set(system.matches ? "dark" : "light"));
  set(remembered() || (system.matches ? "dark" : "light"));
  return set;
}
