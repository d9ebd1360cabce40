"""HTTPS, certificates of clients, and the prefix of paths that a proxy leaves."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from speculant import AsyncEngine
from speculant.errors import ConfigError
from speculant.serving import ServerOptions, tls_context
from tests.servers import LiveServer


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    names = str(folder / "cert.pem"), str(folder / "key.pem")
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    places = ["-out", names[0], "-keyout", names[1], "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *options.split(), *places], check=True, capture_output=True)
    return names


@pytest.mark.parametrize("needed", [False, True])
def test_https(needed: bool, certificate: tuple[str, str]) -> None:
    more = {"ssl_ca_certs": certificate[0], "ssl_cert_reqs": 2} if needed else {}
    server = LiveServer(lambda: AsyncEngine("demo"), ssl_certfile=certificate[0], ssl_keyfile=certificate[1], **more)
    trusting = ssl.create_default_context(cafile=certificate[0])
    if needed:
        with pytest.raises(httpx.HTTPError), httpx.Client(verify=trusting, trust_env=False) as client:
            client.get(f"{server.url}/health").raise_for_status()
        trusting.load_cert_chain(*certificate)
    try:
        assert server.url.startswith("https://")
        server.http = httpx.Client(base_url=server.url, verify=trusting, trust_env=False, timeout=30)
        made = server.ready().post("/v1/completions", prompt="import os", max_tokens=4, temperature=0)
        assert made["usage"]["completion_tokens"] == 4
        assert server.chunks("/v1/completions", prompt="import os", max_tokens=4)
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health", trust_env=False)
        assert server.http.get("/health").status_code == 200
    finally:
        server.stop()


def test_a_prefix_of_paths_is_left_out() -> None:
    server = LiveServer(lambda: AsyncEngine("demo"), root_path="/llm", api_keys=("secret",))
    try:
        assert server.url.endswith("/llm")
        root = server.url.removesuffix("/llm")
        for prefix in (root, server.url):
            get = lambda path, prefix=prefix, **named: httpx.get(prefix + path, trust_env=False, **named)  # noqa: E731
            assert get("/version", headers={"authorization": "Bearer secret"}).status_code == 200
            assert get("/version").status_code == 401
            assert get("/ping").status_code in (200, 503)
        assert httpx.get(f"{root}/llmx/ping", trust_env=False).status_code == 401
    finally:
        server.stop()


@pytest.mark.parametrize("given", ["missing.pem", __file__])
def test_files_that_are_no_certificate_are_refused(given: str, certificate: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"HTTPS can't use {given}"):
        tls_context(ServerOptions(ssl_certfile=given, ssl_keyfile=certificate[1]))
    with pytest.raises(ConfigError, match="HTTPS can't use"):
        tls_context(ServerOptions(ssl_certfile=certificate[0], ssl_keyfile=str(Path(given))))
