"""Starts servers of two small models, lets each client talk to both, and prints a table of its calls.

Usage: python -m tests.clients.run PYTHON NODE_FOLDER. PYTHON has the clients of requirements.txt, NODE_FOLDER those of
package.json in node_modules.

A client prints its failures, and as its last line the results of its calls as JSON.

The embedded model's chat template knows no tools. The other model is random, and its template and its tokenizer have
Qwen's tool calls, whose tags are added tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.models import Shape
from tests.servers import ServerProcess
from tests.tagged import write_tagged

HERE = Path(__file__).parent
PYTHON_CLIENTS = (
    *("openai_client.py", "langchain_client.py", "instructor_client.py", "litellm_client.py"),
    *("anthropic_client.py", "langchain_anthropic_client.py"),
)
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it waits for a list of prices on the web
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = """{%- if tools %}{{ 'Call by <tool_call> and </tool_call>: ' + tools | tojson }}{% endif -%}
{%- for message in messages %}{{ message.role + ': ' + message.content | string + '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}"""


Results = dict[str, dict[str, bool]]  # by client and call


def main(python: str, node_folder: str) -> int:
    """Run every client, and print a table of the calls that work; return how many clients failed with a server."""
    results, failed = Results(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        tagged = write_tagged(Path(folder) / "tagged", TEMPLATE, TAGS, Shape(max_positions=8192))
        models = {"demo": ("demo", ""), "tagged": (tagged, "hermes")}
        for name, (model, calls) in models.items():
            server = ServerProcess(model, "--draft-model", "demo" if name == "demo" else model).ready()
            names = {"CLIENT_URL": f"{server.url}/v1", "CLIENT_MODEL": name, "CLIENT_CALLS": calls, **QUIET}
            try:
                failed += [f"{client} of {name}" for client in _run_all(python, Path(node_folder), names, results)]
            finally:
                server.stop()
    print("\n".join(table(results)))
    print(f"failed: {', '.join(failed)}" if failed else "All clients agree with both servers.")
    return len(failed)


def table(results: Results) -> list[str]:
    """Return a table's lines in Markdown: calls, and the clients whose calls work with both servers."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for call in dict.fromkeys(call for found in results.values() for call in found):
        shown = {client.rpartition(" ")[0]: found[call] for client, found in results.items() if call in found}
        clients = tuple(client if works else f"**not** {client}" for client, works in shown.items())
        groups.setdefault(clients, []).append(call)
    everyone = tuple(client.rpartition(" ")[0] for client in results)
    named = [("; ".join(calls), "all" if who == everyone else ", ".join(who)) for who, calls in groups.items()]
    rows = [("Calls", "Clients"), ("---", "---"), *named]
    return [*(f"| {' | '.join(row)} |" for row in rows), "", ", ".join(results)]


def _run_all(python: str, node_folder: Path, names: dict[str, str], results: Results) -> list[str]:
    """Let all clients talk to one server, and note the calls that work; return the clients that failed."""
    script = shutil.copy(HERE / "ai_sdk_client.mjs", node_folder)  # node looks for packages beside a script
    commands = {client: [python, str(HERE / client)] for client in PYTHON_CLIENTS}
    commands["ai_sdk_client.mjs"] = ["node", script]
    failed = []
    for client, command in commands.items():
        print(f"== {client} with {names['CLIENT_CALLS'] or 'no known'} format of calls", flush=True)
        ended = subprocess.run(
            command, env={**os.environ, **names}, timeout=300, stdout=subprocess.PIPE, text=True, check=False
        )
        if ended.returncode:
            failed.append(client)
        _note(ended.stdout, results)
    return failed


def _note(output: str, results: Results) -> None:
    """Note the results in a client's last line; a call works if it works with every server."""
    last = output.strip().rpartition("\n")[2]
    if not last.startswith("{"):
        return
    made = json.loads(last)
    known = results.setdefault(made["client"], {})
    for call, works in made["results"].items():
        known[call] = works and known.get(call, True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
