"""A notebook in a real JupyterLab in Chromium: a run below its cell with a bar and a chart, live, in light and dark.

POLYTEMPO_SCREENSHOTS=folder keeps pictures of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from waiting import soon

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
pytestmark = [pytest.mark.process, pytest.mark.browser, pytest.mark.timeout(600)]
TOKEN, NOTEBOOK, KERNEL = "of-this-test-alone", "cells.ipynb", "here"
expect.set_options(timeout=1000 * DEADLINE_S)

HELD = """\
from pathlib import Path
from threading import Event
import polytempo as pt

class Held(pt.callbacks.Callback):
    \"\"\"Holds the run at its second score, until the test has seen it.\"\"\"
    scores = 0

    def on_evaluation(self, facts):
        self.scores += 1
        while self.scores == 2 and not Path("seen").exists():
            Event().wait(0.05)
"""
CELLS = [
    HELD,
    "result = pt.run('digits', 'local_sgd(period=8)', 2, epochs=4, threads=1, callbacks=[Held()])",
    "result",
    "pt.compare('digits', ['sync_sgd()', 'local_sgd(period=8)'], 2, epochs=1)",
]


class Lab(NamedTuple):
    """A JupyterLab on loopback, with a folder and settings of its own."""

    address: str
    folder: Path

    def asked(self, path: str, method: str = "GET") -> Any:
        """The answer to a request."""
        request = urllib.request.Request(f"{self.address}/api/{path}?token={TOKEN}", method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def answers(self) -> bool:
        """True if the server is there."""
        try:
            return bool(self.asked("status"))
        except OSError:
            return False


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab with the notebook and its kernel."""
    folder = tmp_path_factory.mktemp("lab")
    spec = folder / "data" / "kernels" / KERNEL
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": KERNEL, "language": "python"}))
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.metadata["kernelspec"] = {"name": KERNEL, "display_name": KERNEL, "language": "python"}
    nbformat.write(notebook, folder / NOTEBOOK)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "spaces")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    environment = os.environ | own | {"PYTHONPATH": str(ROOT / "src"), "IPYTHONDIR": str(folder / "ipython")}
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    found = Lab(f"http://127.0.0.1:{port}", folder)
    try:
        assert soon(found.answers, DEADLINE_S), (folder / "lab.log").read_text()
        yield found
    finally:
        if found.answers():
            for kernel in found.asked("kernels"):
                found.asked(f"kernels/{kernel['id']}", "DELETE")
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def chosen(dialog: Locator) -> None:
    """Accept the notebook's own kernel, where JupyterLab asks for it."""
    dialog.locator("button.jp-mod-accept").click()


def kept(page: Page, name: str) -> None:
    """Keep a picture of the page, where one is wanted."""
    if folder := os.environ.get("POLYTEMPO_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/jupyterlab-{name}.png")


def test_a_run_is_shown_while_it_goes_on_and_its_result_as_a_table(browser: Any, lab: Lab) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(1000 * DEADLINE_S)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_locator_handler(page.locator(".jp-Dialog", has_text="Select Kernel"), chosen)
    page.goto(f"{lab.address}/lab/tree/{NOTEBOOK}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    expect(page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")).to_be_attached()
    assert soon(lambda: [each["execution_state"] for each in lab.asked("kernels")] == ["idle"], DEADLINE_S)
    page.get_by_text("Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    bar = page.locator(".jp-OutputArea [role=progressbar]").first
    expect(bar).to_be_visible()
    expect(page.locator(".jp-OutputArea svg polyline").first).to_be_attached()
    expect(bar).to_have_attribute("aria-valuenow", re.compile(r"^[1-9]\d?$"))
    kept(page, "running")
    (lab.folder / "seen").touch()
    expect(bar).to_have_attribute("aria-valuenow", "100")
    table = page.locator(".jp-OutputArea-executeResult table")
    expect(table).to_have_count(2)
    expect(table.first).to_contain_text("accuracy")
    expect(table.nth(1).locator("tr")).to_have_count(3)
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    narrow = "each => each.scrollWidth <= each.parentElement.clientWidth + 1"
    assert page.locator(".jp-OutputArea svg").first.evaluate(narrow)
    page.locator(".jp-Cell").first.scroll_into_view_if_needed()
    kept(page, "light")
    page.get_by_text("Settings", exact=True).first.click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    expect(page.locator("body[data-jp-theme-name='JupyterLab Dark']")).to_be_attached()
    kept(page, "dark")
    assert errors == []
    context.close()
