"""The page at `/`: its parts, and its behaviour in a browser where one is installed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from speculant import AsyncEngine
from speculant.serving.app import PAGE
from tests.servers import LiveServer

KEY = "a-key-of-the-page"
PROMPT = "import os\n\n\ndef read_lines(path):\n"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the controls within labels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.labelled: set[str] = set()
        self._in_label = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found.append((tag, values))
        if tag == "label":
            self._in_label = True
            self.labelled.add(values.get("for") or "")
        elif self._in_label and values.get("id"):
            self.labelled.add(str(values["id"]))

    def handle_endtag(self, tag: str) -> None:
        self._in_label = self._in_label and tag != "label"


def test_page_is_complete_and_works_offline(demo: LiveServer) -> None:
    texts = {}
    for path, (_, kind) in PAGE.items():
        response = demo.http.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == kind
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        texts[path] = response.text
    addresses = [each for text in texts.values() for each in re.findall(r"https?://[^\s'\"]+", text)]
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, "nothing is loaded from elsewhere"
    page, script = Elements(texts["/"]), texts["/page.js"]
    named = {values["id"] for _, values in page.found if "id" in values}
    used = set(re.findall(r'element\("([\w-]+)"\)', script))
    assert used
    assert used <= named
    linked = {values.get("src") or values.get("href") for tag, values in page.found if tag in ("script", "link")}
    assert {"page.js", "page.css"} <= linked


def test_page_labels_its_controls(demo: LiveServer) -> None:
    page = Elements(demo.http.get("/").text)
    controls = [values for tag, values in page.found if tag in ("input", "select", "textarea") and "id" in values]
    assert len(controls) > 5
    assert all(values["id"] in page.labelled for values in controls)
    assert ("html", {"lang": "en"}) in page.found


def test_only_the_page_needs_no_key(serve: Callable[..., LiveServer]) -> None:
    server = serve(AsyncEngine("demo", max_num_seqs=2), api_keys=(KEY,)).ready()
    assert [server.http.get(path).status_code for path in PAGE] == [200] * len(PAGE)
    closed = ("/v1/models", "/metrics", "/version", "/openapi.json", "/page.js/x")
    assert [server.http.get(path).status_code for path in closed] == [401] * len(closed)


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium; SPECULANT_CHROMIUM names one that is not on the path."""
    program = os.environ.get("SPECULANT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, demo: LiveServer) -> Iterator[Any]:
    """Open the page; any error in its script fails the test."""
    opened, problems = browser.new_page(viewport={"width": 1280, "height": 1000}), list[str]()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(demo.url)
    expect(opened.locator("#model")).to_have_text("demo")
    yield opened
    opened.close()
    assert not problems


def expect(locator: Any) -> Any:
    """Return a function that waits for a locator's text."""
    from playwright.sync_api import expect as waiting

    return waiting(locator)


def texts(page: Any, kind: str) -> str:
    """Return the text of all tokens of one colour."""
    return "".join(page.locator(f"#output .{kind}").all_text_contents())


def ended(page: Any) -> str:
    """Return the page's message at the end of a run."""
    expect(page.locator("#status")).to_contain_text(" tokens", timeout=60_000)
    return str(page.text_content("#status"))


def test_page_shows_tokens_in_colours(page: Any, demo: LiveServer) -> None:
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Control+Enter")
    said = ended(page)
    assert said.startswith("128 tokens at ")
    assert "accepted from drafts" in said
    drafted = page.locator("#output .accepted").count()
    per_pass = float(re.findall(r"([\d.]+) tokens per pass", said)[0])
    assert per_pass == pytest.approx(128 / (128 - drafted), abs=0.05), "each pass gave one token of its own"
    assert texts(page, "accepted")
    assert texts(page, "plain")
    settings = {"temperature": 0, "max_tokens": 128}
    answer = demo.post("/v1/completions", prompt=PROMPT, **settings)["choices"][0]["text"]
    assert page.text_content("#output").endswith(PROMPT + answer)
    page.wait_for_selector("#positions tbody tr")
    if folder := os.environ.get("SPECULANT_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / "page.png"))


def test_page_turns_speculation_off(page: Any) -> None:
    page.fill("#prompt", PROMPT)
    page.focus("#speculation")
    page.keyboard.press("Space")
    page.click("#run")
    assert "drafts" not in ended(page)
    assert not texts(page, "accepted") + texts(page, "corrected")
    assert texts(page, "plain")
    assert page.text_content("#without").endswith("tokens/s")


def test_page_compares_plain_and_speculative(page: Any) -> None:
    page.fill("#prompt", PROMPT)
    page.fill("#temperature", "0.8")
    page.click("#compare")
    assert ended(page).endswith("The texts are identical.")
    assert page.text_content("#gain").endswith(" times plain")
    speeds = [float(page.text_content(name).split()[0]) for name in ("#with", "#without")]
    assert float(page.text_content("#gain").split()[0]) == pytest.approx(speeds[0] / speeds[1], rel=0.02)
    if folder := os.environ.get("SPECULANT_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / "compare.png"))


def test_page_compares_no_two_prompts(page: Any) -> None:
    """Runs of two different prompts, with and without speculation, are not compared."""
    for prompt, label in ((PROMPT, "with"), ("class Stack:\n", "without")):
        page.fill("#prompt", prompt)
        page.click("#run")
        ended(page)
        assert page.text_content(f"#{label}").endswith("tokens/s")
        assert page.text_content("#gain") == "\N{EN DASH}"
        page.focus("#speculation")
        page.keyboard.press("Space")


def test_page_comparisons_have_the_same_start(page: Any) -> None:
    """Both requests differ only in the switch and the salt: the second can't draft from the text of the first."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.fill("#prompt", PROMPT)
    for _ in range(2):
        page.click("#compare")
        assert ended(page).endswith("The texts are identical.")
    salts = [body.pop("cache_salt") for body in sent]
    assert len(set(salts)) == 4
    assert [body.pop("speculation", None) for body in sent] == [None, False] * 2
    assert sent == sent[:1] * 4


def test_page_chats_with_a_fixed_length(page: Any) -> None:
    page.check("input[value=chat]")
    page.select_option("#length", "4")
    page.fill("#prompt", "def area(radius):")
    page.click("#run")
    ended(page)
    page.fill("#prompt", "def length(radius):")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#run")
    body = sent.value.post_data_json
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["speculation"] == {"num_speculative_tokens": 4}
    ended(page)


def test_page_stops_and_shows_the_error(page: Any) -> None:
    page.route("**/v1/completions", lambda route: None)  # no answer comes
    page.click("#run")
    expect(page.locator("#status")).to_have_text("Running …")
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    page.unroute("**/v1/completions")
    page.fill("#prompt", "word " * 2000)
    page.click("#run")
    expect(page.locator("#problem")).to_contain_text("1024")
    assert page.is_enabled("#run")
