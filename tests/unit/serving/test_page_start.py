"""What the page shows first, with a document of stubs in node: a model that chats is asked in a chat."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")
PAGE = files("speculant") / "assets" / "page"
HARNESS = """
const iterate = [][Symbol.iterator].bind([]);
const stub = (own = {}) => new Proxy(own, { get(known, name) {
  if (name in known) return known[name];
  if (name === Symbol.iterator) return iterate;
  return (known[name] = name === "value" ? "" : stub(() => stub()));
} });
const elements = {};
const radios = ["chat", "completion"];
const element = (id) => elements[id] ??= stub({ value: id === "chat" ? "chat" : "completion", checked: false });
globalThis.document = stub({
  hidden: false, getElementById: element, createElement: () => stub(), addEventListener: () => {},
  querySelector: (text) => text.includes(":checked") ? element(radios.find((id) => element(id).checked)) : stub(),
});
globalThis.Option = function () {};
const asked = [];
globalThis.fetch = async (path) => {
  asked.push(path);
  const model = given.lazy && !asked.includes("props") ? { id: given.model.id, state: "unloaded" } : given.model;
  return { ok: true, json: async () => ({ data: [model] }) };
};
element("completion").checked = true;
await import(given.page);
await new Promise((resolve) => setTimeout(resolve, 20));
"""

SHOWN = "[element('chat').checked, element('tokens').placeholder]"


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("model", "chats", "length"),
    [
        ({"id": "qwen", "chat": True}, True, "what the context has room for"),
        ({"id": "base", "chat": False}, False, 32),
        ({"id": "demo", "chat": True}, False, 32),
    ],
)
def test_page_begins_with_a_chat_if_the_model_does(
    model: dict[str, Any], chats: bool, length: Any, tmp_path: Path
) -> None:
    assert show(tmp_path, SHOWN, {"max_model_len": 64, **model}) == [chats, length]


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_page_has_the_first_of_several_models_loaded(tmp_path: Path) -> None:
    model = {"id": "a", "chat": True, "max_model_len": 64, "state": "loaded"}
    shown = show(tmp_path, "[asked, element('chat').checked]", model, lazy=True)
    assert shown == [["v1/models", "props", "v1/models"], True]


def show(folder: Path, shown: str, model: dict[str, Any], *, lazy: bool = False) -> Any:
    """Return what an expression shows of the page with a model, which may be loaded only when it is asked for."""
    for name in ("page.js", "measure.js"):
        (folder / name).write_text((PAGE / name).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    given = {"page": (folder / "page.js").as_uri(), "model": model, "lazy": lazy}
    script = f"const given = {json.dumps(given)};{HARNESS}console.log(JSON.stringify({shown}))"
    command = [str(NODE), "--input-type=module", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""
    return json.loads(done.stdout)
