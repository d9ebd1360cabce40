"""The page at `/`: its parts, and its behaviour in a browser where one is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

import pytest

from speculant import AsyncEngine
from speculant.serving import PAGE
from tests.models import Checkpoints, checkpoints
from tests.servers import LiveServer

__all__ = ["checkpoints"]

KEY = "a-key-of-the-page"
PROMPT = "import os\n\n\ndef read_lines(path):\n"

CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const backOf = (element) => {
    const back = rgb(getComputedStyle(element).backgroundColor);
    return back.length < 4 || back[3] === 1 ? back : backOf(element.parentElement);
  };
  const ratios = {};
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data);
    if (!text.join("").trim() || !element.getClientRects().length) continue;
    const both = [getComputedStyle(element).color, backOf(element).join()].map((colour) => luminance(rgb(colour)));
    const name = `${element.tagName} ${element.id} ${element.className} ${text.join("").trim().slice(0, 20)}`;
    ratios[name] = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  }
  return ratios;
}"""
FOCUSED = """() => {
  const active = document.activeElement;
  return active.id || (active.closest("#examples") ? "example" : active.tagName);
}"""


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
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "require-trusted-types-for 'script'" in policy
        texts[path] = response.text
    addresses = [each for text in texts.values() for each in re.findall(r"https?://[^\s'\"]+", text)]
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, "nothing is loaded from elsewhere"
    page, script = Elements(texts["/"]), texts["/page.js"]
    named = {values["id"] for _, values in page.found if "id" in values}
    used = set(re.findall(r'element\("([\w-]+)"\)', script))
    assert used
    assert used <= named
    linked = {str(values.get("src") or values.get("href")) for tag, values in page.found if tag in ("script", "link")}
    loaded = {name for name in linked if not name.startswith("data:")} | set(re.findall(r'from "./([^"]+)"', script))
    assert loaded == {path.removeprefix("/") for path in PAGE if path != "/"}


def test_page_labels_its_controls(demo: LiveServer) -> None:
    page = Elements(demo.http.get("/").text)
    controls = [values for tag, values in page.found if tag in ("input", "select", "textarea") and "id" in values]
    assert len(controls) > 5
    assert all(values["id"] in page.labelled for values in controls)
    assert ("html", {"lang": "en"}) in page.found


def test_models_say_whether_they_chat(
    demo: LiveServer, serve: Callable[..., LiveServer], checkpoints: Checkpoints
) -> None:
    bare = serve(AsyncEngine(checkpoints.target, max_num_seqs=2)).ready()
    assert [server.http.get("/v1/models").json()["data"][0]["chat"] for server in (demo, bare)] == [True, False]


def test_listed_tokens_come_with_the_answer_s_figures(serve: Callable[..., LiveServer]) -> None:
    server = serve(AsyncEngine("demo", draft_model="demo", max_num_seqs=2)).ready()
    request = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0, "speculation": {"num_speculative_tokens": 4}}
    *others, last = server.chunks("/v1/completions", **request, speculant={"tokens": True})
    tokens = [token for chunk in (*others, last) for token in chunk["speculant_tokens"]]
    accepted = sum(token["drafted"] for token in tokens)
    assert last["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == accepted > 0
    assert not any("metrics" in chunk for chunk in others)
    assert not any("metrics" in chunk for chunk in server.chunks("/v1/completions", **request))


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
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens an address; any error in the page's script fails the test."""
    contexts, problems = [], list[str]()

    def open_page(url: str, width: int = 1280, height: int = 800, **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
        opened = contexts[-1].new_page()
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.goto(url)
        return opened

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture
def page(visit: Callable[..., Any], demo: LiveServer) -> Any:
    """Open the page of the embedded pair."""
    opened = visit(demo.url)
    expect(opened.locator("#model")).to_have_text("Model: demo")
    expect(opened.locator("#speculation")).to_contain_text("Speculation is on: draft_model, 4 tokens")
    return opened


def expect(locator: Any) -> Any:
    """Return a function that waits for a locator's text."""
    from playwright.sync_api import expect as waiting

    return waiting(locator)


def texts(page: Any, side: str, kind: str) -> str:
    """Return the text of all tokens of one colour."""
    return "".join(page.locator(f"#{side}-text .{kind}").all_text_contents())


def answered(page: Any) -> str:
    """Return the page's message at the end of a run."""
    expect(page.locator("#stop")).to_have_attribute("aria-disabled", "true", timeout=60_000)
    return str(page.text_content("#status"))


def sent_by(page: Any) -> list[Any]:
    """Return a list that gets each request's method and path as it is sent."""
    sent: list[Any] = []
    page.on("request", lambda request: sent.append((request.method, urlsplit(request.url).path)))
    return sent


def bodies_of(page: Any) -> list[dict[str, Any]]:
    """Return a list that gets the body of each request as it is sent."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    return sent


def test_page_starts_with_one_click(page: Any, demo: LiveServer) -> None:
    assert page.locator("#examples button").count() == 3
    page.click("#examples button:nth-child(1)")
    said = answered(page)
    prompt = page.input_value("#prompt")
    settings = {"temperature": 0, "max_tokens": 128}
    answer = demo.post("/v1/completions", prompt=prompt, **settings)["choices"][0]["text"]
    assert [page.text_content(f"#{side}-text") for side in ("fast", "slow")] == [prompt + answer] * 2
    assert "The two texts are identical." in said
    assert texts(page, "slow", "plain") == answer


def test_page_s_gain_is_that_of_the_two_times(page: Any) -> None:
    page.click("summary >> nth=0")
    page.select_option("#length", "4")
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Control+Enter")
    gain, fast, slow = re.findall(r"([\d.]+) times as fast.* took ([\d.]+) s instead of ([\d.]+) s", answered(page))[0]
    assert float(gain) == pytest.approx(float(slow) / float(fast), abs=0.06, rel=0.06)
    assert page.text_content("#slow-count") == f"128 tokens in {slow} s"
    assert page.text_content("#slow-guesses") == ""
    figures = page.text_content("#fast-guesses")
    accepted = page.locator("#fast-text .accepted").count()
    per_pass, right, drafted = re.findall(r"([\d.]+) tokens per pass, (\d+) of (\d+) guesses right", figures)[0]
    assert 0 < int(right) == accepted <= int(drafted)
    assert texts(page, "fast", "corrected")
    assert float(per_pass) == pytest.approx(128 / (128 - accepted), abs=0.15)


def test_page_s_two_requests_start_alike(page: Any) -> None:
    """Both requests differ only in the switch and the salt: the second can't draft from the text of the first."""
    sent = bodies_of(page)
    page.fill("#prompt", PROMPT)
    for _ in range(2):
        page.click("#run")
        assert "are identical" in answered(page)
    salts = [body.pop("cache_salt") for body in sent]
    assert len(set(salts)) == 4
    assert [body.pop("speculation", None) for body in sent] == [None, False] * 2
    assert sent == sent[:1] * 4


def test_page_has_no_gain_without_two_answers(page: Any) -> None:
    page.click("summary >> nth=0")
    for side, other in (("fast", "slow"), ("slow", "fast")):
        page.select_option("#what", side)
        page.click("#run")
        said = answered(page)
        assert "128 tokens in " in said
        assert "times as fast" not in said
        assert page.is_hidden(f"#{other}")
        assert page.is_hidden("#replay")
    page.select_option("#what", "both")
    assert page.text_content("#fast-text") == "", "an older answer does not stand beside a newer one"


def test_page_says_when_others_used_the_server(page: Any, demo: LiveServer) -> None:
    page.click("#run")
    assert "Others used" not in answered(page)
    with page.expect_response("**/metrics"):
        page.click("#run")
    demo.post("/v1/completions", prompt="class A:\n", max_tokens=2)
    assert "Others used the server meanwhile" in answered(page)


def test_page_replays_both_answers(page: Any) -> None:
    page.click("#run")
    said, shown = answered(page), [page.text_content(f"#{side}-text") for side in ("fast", "slow")]
    sent = sent_by(page)
    page.click("#replay")
    expect(page.locator("#stop")).to_have_attribute("aria-disabled", "false")
    assert answered(page) == said
    assert [page.text_content(f"#{side}-text") for side in ("fast", "slow")] == shown
    page.click("#replay")
    page.keyboard.press("Escape")
    assert answered(page) == said
    assert [page.text_content(f"#{side}-text") for side in ("fast", "slow")] == shown
    assert sent == []


def test_page_chats_with_a_fixed_length(page: Any) -> None:
    page.check("#chat")
    page.click("summary >> nth=0")
    page.select_option("#length", "4")
    page.fill("#tokens", "40")
    sent = bodies_of(page)
    for question in ("def area(radius):", "def length(radius):"):
        page.fill("#prompt", question)
        page.click("#run")
        answered(page)
    assert [message["role"] for message in sent[2]["messages"]] == ["user", "assistant", "user"]
    assert sent[2]["messages"] == sent[3]["messages"]
    assert sent[2]["speculation"] == {"num_speculative_tokens": 4}
    assert page.locator("#fast-text h4").all_text_contents() == ["You", "Model"] * 2
    hidden = page.eval_on_selector("#fast-text", "text => text.scrollHeight - text.scrollTop - text.clientHeight")
    assert hidden < 40, "the end of the conversation is in sight"


def test_page_s_chat_ends_with_the_context(page: Any) -> None:
    """An answer has the context's room. A full context is named, and a new conversation is the way out."""
    page.check("#chat")
    page.click("summary >> nth=0")
    page.select_option("#what", "fast")
    sent = bodies_of(page)
    page.fill("#prompt", "def area(radius):")
    page.click("#run")
    assert "The conversation fills the context of 1024 tokens. Start over begins" in answered(page)
    assert sent[0]["max_tokens"] is None
    page.fill("#prompt", "go on")
    page.click("#run")
    expect(page.locator("#problem")).to_contain_text("context length is 1024 tokens")
    expect(page.locator("#problem")).to_contain_text("Start over begins a new conversation.")
    page.click("#clear")
    page.click("#run")
    assert "tokens in" in answered(page)
    assert page.text_content("#problem") == ""


def test_page_sends_by_enter_in_a_chat_alone(page: Any) -> None:
    page.fill("#prompt", "a")
    page.press("#prompt", "Enter")
    assert page.input_value("#prompt") == "a\n"
    page.check("#chat")
    page.fill("#prompt", "a")
    page.press("#prompt", "Shift+Enter")
    assert page.input_value("#prompt") == "a\n"
    page.press("#prompt", "Enter")
    expect(page.locator("#stop")).to_have_attribute("aria-disabled", "false")
    page.keyboard.press("Escape")
    answered(page)


def test_page_compares_what_was_written_when_it_was_stopped(visit: Callable[..., Any], demo: LiveServer) -> None:
    """In a small window too, what stops a long answer is in sight. Its text stays in the conversation."""
    page = visit(demo.url, 390, 844)
    page.check("#chat")
    page.fill("#prompt", "def area(radius):")
    page.press("#prompt", "Enter")
    expect(page.locator("#slow-text .plain").first).to_be_attached(timeout=60_000)
    box = page.locator("#stop").bounding_box()
    assert 0 < box["y"] < 844 - box["height"]
    page.click("#stop")
    said = answered(page)
    assert re.search(r"times as fast.*The first \d+ tokens took .* are identical. You stopped the plain answer", said)
    sent = bodies_of(page)
    page.fill("#prompt", "go on")
    page.click("#run")
    answered(page)
    assert [message["role"] for message in sent[0]["messages"]] == ["user", "assistant", "user"]


def test_page_stops_and_shows_the_error(page: Any) -> None:
    page.route("**/v1/completions", lambda route: None)  # no answer comes
    page.click("#run")
    expect(page.locator("#status")).to_contain_text("Writing the answer with guesses")
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    page.unroute("**/v1/completions")
    page.fill("#prompt", "word " * 2000)
    page.click("#run")
    expect(page.locator("#problem")).to_contain_text("1024")
    assert page.is_hidden("#retry")
    page.fill("#prompt", PROMPT)
    page.click("#run")
    assert "are identical" in answered(page)
    assert page.text_content("#problem") == ""


def test_page_shows_a_fault_in_folded_settings(page: Any) -> None:
    page.eval_on_selector("#tokens", "field => { field.value = '0'; }")
    page.click("#examples button:nth-child(2)")
    assert page.evaluate("document.activeElement.id") == "tokens"
    assert page.is_visible("#tokens")
    assert page.get_attribute("#stop", "aria-disabled") == "true"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (320, 640)])
def test_page_fits_small_windows(visit: Callable[..., Any], demo: LiveServer, width: int, height: int) -> None:
    """The coloured answer is in sight at once, and nothing is wider than the window, however long a word is."""
    page = visit(demo.url, width, height)
    page.click("#examples button:nth-child(1)")
    answered(page)
    box = page.locator("#fast-text").bounding_box()
    assert page.evaluate("scrollY") == 0
    assert height < 800 or box["y"] + box["height"] < height
    page.fill("#prompt", "x" * 300)
    for summary in page.locator("summary").all():
        summary.click()
    page.click("#run")
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_page_works_by_keyboard_alone(page: Any) -> None:
    expected = [
        "skip", "example", "example", "example", "fast-text", "slow-text", "completion", "prompt", "run", "stop",
        "clear", "SUMMARY", "SUMMARY",
    ]  # fmt: skip
    order = []
    for _ in expected:
        page.keyboard.press("Tab")
        order.append(page.evaluate(FOCUSED))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert order == expected
    page.focus("#examples button")
    page.keyboard.press("Enter")
    assert "are identical" in answered(page)
    assert page.evaluate(FOCUSED) == "example", "the button keeps the focus"


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_page_s_texts_contrast(visit: Callable[..., Any], demo: LiveServer, colours: str) -> None:
    page = visit(demo.url, color_scheme=colours)
    page.click("#examples button:nth-child(1)")
    answered(page)
    for summary in page.locator("summary").all():
        summary.click()
    page.eval_on_selector("#problem", "element => { element.textContent = 'An error.'; }")
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) > 20
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_page_asks_for_the_key_first(visit: Callable[..., Any], serve: Callable[..., LiveServer]) -> None:
    server = serve(AsyncEngine("demo", draft_model="demo", max_num_seqs=2), api_keys=(KEY,)).ready()
    page = visit("about:blank")
    sent = sent_by(page)
    page.goto(server.url)
    expect(page.locator("#key-form")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "api-key"
    assert page.is_hidden("#work")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") in ("BODY", "HTML"), "nothing else takes the focus"
    page.wait_for_timeout(3000)
    assert [path for _, path in sent if path not in PAGE] == ["/v1/models"], "nothing is asked for again and again"
    for wrong in ("wrong", "ключ"):
        page.fill("#api-key", wrong)
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).not_to_be_empty()
        assert page.is_hidden("#work")
    page.fill("#api-key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#work")).to_be_visible()
    assert page.is_hidden("#key-form")
    assert page.evaluate("document.activeElement.closest('#examples') !== null")
    page.keyboard.press("Enter")
    assert "are identical" in answered(page)


def test_page_asks_nothing_while_it_waits(page: Any) -> None:
    sent = sent_by(page)
    page.wait_for_timeout(3000)
    assert sent == []


def test_page_waits_for_the_model(visit: Callable[..., Any], serve: Callable[..., LiveServer]) -> None:
    loaded = threading.Event()

    def load() -> AsyncEngine:
        loaded.wait(60)
        return AsyncEngine("demo", max_num_seqs=2)

    server = serve(load)
    try:
        page = visit(server.url)
        expect(page.locator("#connection")).to_contain_text("is being loaded")
        assert page.is_hidden("#work")
    finally:
        loaded.set()
    expect(page.locator("#work")).to_be_visible(timeout=60_000)


def test_page_asks_nothing_while_it_is_hidden(visit: Callable[..., Any], demo: LiveServer) -> None:
    error = {"error": {"message": "The model is being loaded.", "code": "loading"}}
    page = visit("about:blank")
    page.add_init_script("Object.defineProperty(document, 'hidden', { value: true, writable: true });")
    page.route("**/v1/models", lambda route: route.fulfill(status=503, json=error))
    sent = sent_by(page)
    page.goto(demo.url)
    expect(page.locator("#connection")).to_contain_text("is being loaded")
    page.wait_for_timeout(3000)
    assert [path for _, path in sent if path not in PAGE] == ["/v1/models"]
    page.unroute("**/v1/models")
    page.evaluate("document.hidden = false; document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#work")).to_be_visible()


def test_page_offers_another_try_when_the_server_is_gone(page: Any) -> None:
    page.route("**/v1/*", lambda route: route.abort())
    page.click("#run")
    expect(page.locator("#problem")).to_contain_text("can't be reached")
    sent = sent_by(page)
    page.wait_for_timeout(3000)
    assert sent == []
    page.click("#retry")
    expect(page.locator("#problem")).to_contain_text("can't be reached")
    page.unroute("**/v1/*")
    page.click("#retry")
    expect(page.locator("#problem")).to_be_empty()
    page.click("#run")
    assert "are identical" in answered(page)


def test_page_of_a_plain_model_that_cannot_chat(
    visit: Callable[..., Any], serve: Callable[..., LiveServer], checkpoints: Checkpoints
) -> None:
    engine = AsyncEngine(checkpoints.target, use_speculative_decoding=False, max_num_seqs=2)
    page = visit(serve(engine).ready().url)
    expect(page.locator("#no-chat")).to_be_visible()
    assert page.is_hidden("#modes")
    expect(page.locator("#off")).to_contain_text(engine.speculation)
    assert page.is_hidden("#fast")
    assert page.text_content("#slow-title") == "Plain"
    page.click("#examples button:nth-child(1)")
    said = answered(page)
    assert "The plain answer: " in said
    assert "times as fast" not in said


def test_page_shows_hostile_texts_as_texts(page: Any) -> None:
    """Texts of the server, which a model, a user or an operator chose, never become elements or scripts."""
    hostile = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script><b>&lt;"
    chunk = {"choices": [{"text": hostile, "finish_reason": "stop"}], "speculant_tokens": [{"text": hostile}]}
    stream = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    model = {"id": hostile, "max_model_len": 64, "chat": True, "speculation": {"on": True, "detail": hostile}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
    page.route("**/v1/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    page.reload()
    expect(page.locator("#model")).to_have_text(f"Model: {hostile}")
    page.check("#completion")
    page.fill("#prompt", hostile)
    page.click("#run")
    answered(page)
    assert page.text_content("#fast-text") == hostile * 2
    assert hostile in page.text_content("#method")
    page.route("**/v1/completions", lambda route: route.fulfill(status=400, json={"error": {"message": hostile}}))
    page.click("#run")
    expect(page.locator("#problem")).to_have_text(hostile)
    assert page.locator("main img, main script, main b").count() == 0
    assert "broken" not in page.title()
    write = "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
    assert page.evaluate(write) == "TypeError", "the policy forbids HTML from texts"


def test_page_s_elements_have_names(page: Any) -> None:
    """Every control, group and landmark of the accessibility tree has a name."""
    page.click("summary >> nth=0")
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "textbox", "combobox", "spinbutton", "radio", "group", "region", "form", "heading"}
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    shown = [each for each in found if each[0] in named]
    assert named <= {role for role, _ in shown}
    assert [each for each in shown if not each[1]] == []
    assert {"banner", "main", "status"} <= {role for role, _ in found}
