"""Starts servers of two small models and lets each client talk to both.

Usage: python -m tests.clients.run PYTHON NODE_FOLDER. PYTHON has the clients of requirements.txt, NODE_FOLDER those of
package.json in node_modules.

The embedded model's chat template knows no tools. The other model is random, and its template and its tokenizer have
Qwen's tool calls, whose tags are added tokens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.models import Shape, write_checkpoint
from tests.servers import ServerProcess

HERE = Path(__file__).parent
PYTHON_CLIENTS = ("openai_client.py", "langchain_client.py", "instructor_client.py", "litellm_client.py")
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it waits for a list of prices on the web
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = """{%- if tools %}{{ 'Call by <tool_call> and </tool_call>: ' + tools | tojson }}{% endif -%}
{%- for message in messages %}{{ message.role + ': ' + message.content | string + '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}"""


def main(python: str, node_folder: str) -> int:
    """Run every client; return how many failed."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": ("demo", ""), "tagged": (_write_model(Path(folder) / "tagged"), "hermes")}
        for name, (model, calls) in models.items():
            server = ServerProcess(model, "--draft-model", "demo" if name == "demo" else model).ready()
            names = {"CLIENT_URL": f"{server.url}/v1", "CLIENT_MODEL": name, "CLIENT_CALLS": calls, **QUIET}
            try:
                failed += [f"{client} of {name}" for client in _run_all(python, Path(node_folder), names)]
            finally:
                server.stop()
    print(f"failed: {', '.join(failed)}" if failed else "All clients agree with both servers.")
    return len(failed)


def _run_all(python: str, node_folder: Path, names: dict[str, str]) -> list[str]:
    """Return the clients that failed with one server."""
    script = shutil.copy(HERE / "ai_sdk_client.mjs", node_folder)  # node looks for packages beside a script
    commands = {client: [python, str(HERE / client)] for client in PYTHON_CLIENTS}
    commands["ai_sdk_client.mjs"] = ["node", script]
    failed = []
    for client, command in commands.items():
        print(f"== {client} with {names['CLIENT_CALLS'] or 'no known'} format of calls", flush=True)
        if subprocess.run(command, env={**os.environ, **names}, timeout=300, check=False).returncode:
            failed.append(client)
    return failed


def _write_model(folder: Path) -> str:
    """Write a random model whose tokenizer has the tags as added tokens."""
    path = write_checkpoint(folder, Shape(max_positions=8192))
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
