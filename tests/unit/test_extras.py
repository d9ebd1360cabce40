"""Packages of extras are imported where they are used."""

from __future__ import annotations

import subprocess
import sys


def test_a_plain_server_imports_no_package_of_an_extra() -> None:
    program = (
        "import sys, speculant, speculant.cli.serve, speculant.ray; from speculant.serving.app import make_app\n"
        "from speculant.serving.options import ServerOptions\n"
        "make_app(lambda: None, ServerOptions(access_log='json'))\n"
        "print([name for name in sys.modules if name == 'ray' or name.startswith('opentelemetry.sdk')])"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"
