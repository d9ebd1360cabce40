"""Visits the page in Chromium, by mouse and by keys, and saves a picture of each view.

Usage: python -m tests.clients.page_shots FOLDER [AXE]. It needs playwright (from PyPI) and Chromium: on the path, or
named by SPECULANT_CHROMIUM. AXE is axe.min.js of npm's axe-core: with it each view is checked for accessibility, too.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.models import write_checkpoint
from tests.servers import ServerProcess

KEY = "a-key-of-the-page"
WINDOWS = {"wide": (1280, 800), "narrow": (390, 844), "zoomed": (640, 400)}  # zoomed: 1280 x 800 at 200 %
COLOURS = ("light", "dark")
EXAMPLE = "#examples button:nth-child(3)"


class Visits:
    """Pages of one server in one kind of window. faults: all that was wrong with any view."""

    def __init__(self, browser: Any, folder: Path, axe: str) -> None:
        self._browser, self._folder, self._axe = browser, folder, axe
        self.faults: list[str] = []

    def open(self, url: str, window: str, colours: str, **options: Any) -> Any:
        """Open an address in a new window."""
        width, height = WINDOWS[window]
        size = {"width": width, "height": height}
        context = self._browser.new_context(viewport=size, color_scheme=colours, bypass_csp=bool(self._axe), **options)
        page = context.new_page()
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.goto(url)
        return page

    def save(self, page: Any, name: str, whole: bool = False) -> None:
        """Save a picture of a view, and check the view."""
        path = self._folder / f"{name}.png"
        page.screenshot(path=str(path), full_page=whole)
        too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        faults = [f"{too_wide} pixels too wide"] if too_wide > 0 else []
        if self._axe:
            page.evaluate(self._axe)
            found = page.evaluate("axe.run().then(({violations}) => violations)")
            faults += [f"{each['id']}: {each['nodes'][0]['html'][:90]}" for each in found]
        self.faults += [f"{name}: {fault}" for fault in faults]
        print(path, *faults, sep="\n    ", flush=True)


def main(folder: str, axe: str = "") -> int:
    """Save all pictures; return how many faults were found."""
    from playwright.sync_api import sync_playwright

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    program = os.environ.get("SPECULANT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        visits = Visits(browser, target, Path(axe).read_text(encoding="utf-8") if axe else "")
        for visit, model, flags in (
            (visit_demo, "demo", ("--draft-model", "demo")),
            (visit_with_key, "demo", ("--draft-model", "demo", "--api-key", KEY)),
            (visit_plain, "", ("--no-use-speculative-decoding",)),
        ):
            server = ServerProcess(model or _write_model(target / "model"), *flags)
            try:
                visit(visits, server)
            finally:
                server.stop()
        browser.close()
    print(f"{len(visits.faults)} faults")
    return len(visits.faults)


def visit_demo(visits: Visits, server: ServerProcess) -> None:
    """Run an example in each window and colour; then chat, stop, fail, and lose the server."""
    server.ready()
    for window in WINDOWS:
        for colours in COLOURS:
            page = visits.open(server.url, window, colours)
            page.wait_for_selector(EXAMPLE)
            visits.save(page, f"{window}-{colours}-1-start")
            page.click(EXAMPLE)
            page.wait_for_selector("#slow-text .plain", state="attached")
            visits.save(page, f"{window}-{colours}-2-running")
            _end(page)
            visits.save(page, f"{window}-{colours}-3-compared")
            for summary in page.locator("summary").all():
                summary.click()
            visits.save(page, f"{window}-{colours}-4-whole", whole=True)
            page.context.close()
    page = visits.open(server.url, "wide", "light", reduced_motion="reduce")
    page.wait_for_selector(EXAMPLE)
    _by_keys(visits, page)
    _chat_and_fail(visits, page)
    server.stop()
    page.click("#run")
    page.wait_for_selector("#retry:visible")
    visits.save(page, "gone")


def _by_keys(visits: Visits, page: Any) -> None:
    """Start, stop and start again with the keyboard alone."""
    for _ in range(3):
        page.keyboard.press("Tab")
    visits.save(page, "keys-1-focus")
    page.keyboard.press("Enter")
    page.wait_for_selector("#fast-text .plain", state="attached")
    page.keyboard.press("Escape")
    _end(page)
    visits.save(page, "keys-2-stopped")
    while page.evaluate("document.activeElement.id") != "prompt":
        page.keyboard.press("Tab")
    page.keyboard.press("Control+Enter")
    _end(page)
    visits.save(page, "keys-3-compared")
    page.click("#replay")
    page.wait_for_selector("#slow-text .plain", state="attached")
    visits.save(page, "replayed")
    _end(page)


def _chat_and_fail(visits: Visits, page: Any) -> None:
    page.check("#chat")
    page.click("summary >> nth=0")
    page.fill("#tokens", "64")  # the demo goes on to the end of its context
    page.click("summary >> nth=0")
    for question in ("def area(radius):", "def length(radius):"):
        page.fill("#prompt", question)
        page.click("#run")
        _end(page)
    visits.save(page, "chat")
    page.fill("#prompt", "word " * 2000)
    page.click("#run")
    page.wait_for_selector("#problem:visible")
    visits.save(page, "refused")
    page.fill("#prompt", "go on")


def visit_with_key(visits: Visits, server: ServerProcess) -> None:
    """Give a wrong key, then the right one."""
    server.ready()
    for window in WINDOWS:
        for colours in COLOURS:
            page = visits.open(server.url, window, colours)
            page.wait_for_selector("#key-form:visible")
            visits.save(page, f"{window}-{colours}-key-1")
            page.keyboard.type("wrong")
            page.keyboard.press("Enter")
            page.wait_for_selector("#problem:visible")
            visits.save(page, f"{window}-{colours}-key-2-wrong")
            page.keyboard.type(KEY)
            page.keyboard.press("Enter")
            page.wait_for_selector(EXAMPLE)
            page.keyboard.press("Enter")
            _end(page)
            visits.save(page, f"{window}-{colours}-key-3-right")
            page.context.close()


def visit_plain(visits: Visits, server: ServerProcess) -> None:
    """See a model that neither speculates nor chats."""
    server.ready()
    for window in WINDOWS:
        page = visits.open(server.url, window, "light")
        page.click(EXAMPLE)
        _end(page)
        visits.save(page, f"{window}-plain", whole=True)


def _end(page: Any) -> None:
    """Wait until nothing runs."""
    page.wait_for_selector('#stop[aria-disabled="true"]', timeout=120_000)


def _write_model(folder: Path) -> str:
    """Write a random model without a chat template."""
    shutil.rmtree(folder, ignore_errors=True)
    return write_checkpoint(folder)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
