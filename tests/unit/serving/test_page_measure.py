"""The page's measurements, `measure.js`, run by node: figures of one answer, and when two answers are compared."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

NODE = shutil.which("node")
SOURCE = (files("speculant") / "assets" / "page" / "measure.js").read_text(encoding="utf-8")
HARNESS = """
const page = await import("data:text/javascript," + encodeURIComponent(given.source));
const stream = (text) => new Response(text).body;
async function read(text) {
  const run = new page.Run();
  let time = 0;
  for await (const chunk of page.events(stream(text))) run.read(chunk, (time += 10));
  return run;
}
"""

pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


def evaluate(expression: str, **given: Any) -> Any:
    """Return the value of an expression of JavaScript, which may use the module as `page` and the data as `given`."""
    script = (
        f"const given = {json.dumps({'source': SOURCE, **given})};{HARNESS}console.log(JSON.stringify({expression}))"
    )
    command = [str(NODE), "--input-type=module", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run(
    tokens: int = 10, milliseconds: float = 100.0, text: str = "same", end: str | None = "length"
) -> dict[str, Any]:
    return {"tokens": tokens, "milliseconds": milliseconds, "text": text, "end": end}


def stream(*chunks: Any, last: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + last


def token(text: str, reason: str | None = None, drafted: bool = False, corrected: bool = False) -> dict[str, Any]:
    entry = {"text": text, "drafted": drafted, "corrected": corrected}
    return {"choices": [{"text": text, "finish_reason": reason}], "speculant_tokens": [entry]}


def test_page_reads_a_completion() -> None:
    figures = {"tokens_per_pass": 1.5, "num_draft_tokens": 4, "num_accepted_draft_tokens": 1}
    last = token("c", "stop", corrected=True) | {"metrics": {"speculative_decoding": figures}}
    made = evaluate("await read(given.text)", text=stream(token("a"), token("<b>", drafted=True), last))
    assert (made["text"], made["tokens"], made["milliseconds"], made["end"]) == ("a<b>c", 3, 30, "stop")
    assert [piece["kind"] for piece in made["pieces"]] == ["plain", "accepted", "corrected"]
    shown = evaluate("[page.timeOf(given.run), page.guessesOf(given.run), page.guessesOf({figures: null})]", run=made)
    assert shown == ["3 tokens in 0.03 s", "1.5 tokens per pass, 1 of 4 guesses right", ""]


def test_page_reads_a_chat_with_reasoning() -> None:
    """The next turn gets the text without reasoning; a delta may have both."""
    deltas = [
        {"content": ""},
        {"reasoning_content": "h"},
        {"reasoning_content": "m", "content": "y"},
        {"content": "es"},
    ]
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    made = evaluate("await read(given.text)", text=stream(*chunks))
    assert (made["text"], made["content"], made["end"]) == ("hmyes", "yes", "stop")
    assert ["reasoning" in piece["kind"] for piece in made["pieces"]] == [True, False, False]


@pytest.mark.parametrize(
    ("last", "message"),
    [("", "The answer broke off"), ('data: {"error": {"message": "The engine failed."}}\n\n', "The engine failed.")],
    ids=["cut", "error"],
)
def test_page_reports_a_broken_stream(last: str, message: str) -> None:
    call = "await read(given.text).then(() => 'read', (error) => error.message)"
    assert evaluate(call, text=stream(token("a"), last=last)).startswith(message)


def test_page_compares_whole_answers() -> None:
    """There is no gain if an answer was stopped or is too short; unequal lengths are compared per token."""
    pairs = [
        (run(), run(milliseconds=160)),
        (run(), run(milliseconds=80)),
        (run(tokens=20), run()),
        (run(end=None), run()),
        (run(), run(end=None)),
        (run(tokens=1), run(tokens=1)),
    ]
    gains = evaluate("given.pairs.map(([fast, slow]) => page.gainOf(fast, slow))", pairs=pairs)
    assert gains == [pytest.approx(1.6), pytest.approx(0.8), pytest.approx(2), None, None, None]


def test_page_says_what_it_compared() -> None:
    pairs = [
        (run(), run(milliseconds=160)),
        (run(end="stop"), run(milliseconds=80, text="other", end="stop")),
        (run(tokens=20), run()),
        (run(), run(milliseconds=102)),
        (run(tokens=1), run(tokens=1)),
    ]
    said = evaluate("given.pairs.map(([fast, slow]) => page.comparison(fast, slow))", pairs=pairs)
    assert [f"{each['title']} {each['text']}".strip() for each in said] == [
        "1.6 times as fast. The first 10 tokens took 0.10 s instead of 0.16 s. The two texts are identical.",
        "0.8 times as fast: slower than plain here. All 10 tokens took 0.10 s instead of 0.08 s. The two texts differ.",
        "2.0 times as fast. A token took 5.0 ms instead of 10.0 ms (of 20 and 10 tokens). The two texts are identical.",
        "As fast as plain. The first 10 tokens took 0.10 s instead of 0.10 s. The two texts are identical.",
        "An answer is too short to compare, or did not end.",
    ]


def test_page_compares_the_beginning_of_a_run() -> None:
    text = stream(token("a"), token("b"), token("c", "stop") | {"usage": {"total_tokens": 9}})
    made = evaluate("await read(given.text).then((run) => [run.first(2), run.total])", text=text)
    assert [made[0][key] for key in ("text", "tokens", "milliseconds", "end")] == ["ab", 2, 20, "length"]
    assert made[1] == 9


def test_page_knows_a_full_context() -> None:
    runs = [{"end": end, "total": total} for end, total in (("length", 64), ("length", 63), ("stop", 64), (None, 64))]
    assert evaluate("given.runs.map((run) => page.fills(run, 64))", runs=runs) == [True, False, False, False]


def test_page_reads_the_count_of_tokens() -> None:
    line = '# HELP speculant:generation_tokens_total x\nspeculant:generation_tokens_total{model_name="m"} 384.0\n'
    assert evaluate("[page.generatedTokens(given.page), page.generatedTokens('')]", page=line) == [384, None]
