"""A notebook in a real JupyterLab in Chromium: a run below its cell with a bar and a chart, live, in light and dark.

POLYTEMPO_SCREENSHOTS=folder keeps pictures of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Page, expect

from waiting import soon

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
pytestmark = [pytest.mark.process, pytest.mark.browser, pytest.mark.timeout(600)]
TOKEN = "of-this-test-alone"
expect.set_options(timeout=1000 * DEADLINE_S)

CELLS = [
    "import polytempo as pt",
    "result = pt.run('digits', 'local_sgd(period=8)', 2, epochs=40, threads=1)",
    "result",
    "pt.compare('digits', ['sync_sgd()', 'local_sgd(period=8)'], 2, epochs=1)",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of JupyterLab on loopback, with a folder and settings of its own."""
    folder = tmp_path_factory.mktemp("lab")
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "cells.ipynb")
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
    address = f"http://127.0.0.1:{port}"
    try:
        assert soon(lambda: answers(f"{address}/api/status?token={TOKEN}")), (folder / "lab.log").read_text()
        yield address
    finally:
        for kernel in asked(f"{address}/api/kernels?token={TOKEN}"):
            request = urllib.request.Request(f"{address}/api/kernels/{kernel['id']}?token={TOKEN}", method="DELETE")
            urllib.request.urlopen(request, timeout=60).close()
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def asked(address: str) -> Any:
    """The answer of JupyterLab."""
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)


def answers(address: str) -> bool:
    """True if the server is there."""
    try:
        return bool(asked(address))
    except OSError:
        return False


def kept(page: Page, name: str) -> None:
    """Keep a picture of the page, where one is wanted."""
    if folder := os.environ.get("POLYTEMPO_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/jupyterlab-{name}.png")


def test_a_run_is_shown_while_it_goes_on_and_its_result_as_a_table(browser: Any, lab: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(1000 * DEADLINE_S)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{lab}/lab/tree/cells.ipynb?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    expect(page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")).to_be_attached()
    page.get_by_text("Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    bar = page.locator(".jp-OutputArea [role=progressbar]").first
    expect(bar).to_be_visible()
    expect(page.locator(".jp-OutputArea svg polyline").first).to_be_attached()
    seen = int(bar.get_attribute("aria-valuenow") or 0)
    kept(page, "running")
    expect(bar).to_have_attribute("aria-valuenow", "100")
    assert seen < 100, "the bar was seen before the end of the run"
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
