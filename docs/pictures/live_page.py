"""Draw the pictures of the live page: real runs in headless Chromium.

python docs/pictures/live_page.py
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
EARLIER = ("local_sgd(period=8)", "gossip", "diloco(period=16)", "sync_sgd")


def command(*words: str) -> list[str]:
    """A command line of polytempo."""
    return [sys.executable, "-m", "polytempo", *words]


def save(page: Page, name: str) -> None:
    """A picture of the part of the page that is in sight, in 96 colors."""
    path = HERE / f"{name}.png"
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Draw four ended runs and a running one."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as home:
        for strategy in EARLIER:
            words = ("train", "digits", "--workers", "2", "--strategy", strategy, "--epochs", "10")
            subprocess.run(command(*words), cwd=home, check=True, capture_output=True)
        running = command("train", "digits", "--workers", "3", "--strategy", "async_sgd", "--epochs", "2000", "--ui")
        with subprocess.Popen(running, cwd=home, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
            assert run.stderr is not None
            link = next(found[1] for line in run.stderr if (found := re.search(r"live page: (\S+)", line)))
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
                for scheme, suffix in (("light", ""), ("dark", "-dark")):
                    context = chromium.new_context(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
                    page = context.new_page()
                    page.set_default_timeout(120_000)
                    page.goto(link)
                    page.get_by_text(re.compile(r"[\d,]{5,} rows")).wait_for()
                    save(page, f"live-page{suffix}")
                    page.evaluate("location.hash = '#/'")
                    page.wait_for_selector(".runs tbody tr")
                    page.wait_for_timeout(1500)
                    save(page, f"live-runs{suffix}")
                    for name in page.locator(".runs tbody th a").all_inner_texts():
                        if "async" not in name:
                            page.get_by_label(f"Select {name}").check()
                    page.get_by_role("button", name="Compare").click()
                    page.wait_for_selector(".chart canvas")
                    page.wait_for_timeout(2500)
                    save(page, f"live-compare{suffix}")
                chromium.close()
            run.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
