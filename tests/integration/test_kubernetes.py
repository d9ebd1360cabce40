"""The manifests of deploy/kubernetes are valid, agree with each other, and fit the server, its image and metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route
from typer.testing import CliRunner

from speculant import AsyncEngine
from speculant.cli import ServerFlags, app
from speculant.config import EngineConfig
from speculant.serving import LAST_EVENTS, ServerOptions, make_app
from tests.endpoint_picker import read_load
from tests.kubernetes_kinds import KINDS
from tests.models import Checkpoints
from tests.servers import LiveServer, ServerProcess, serve, serve_process

__all__ = ["serve", "serve_process"]
DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "kubernetes"
IMAGE = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
LABEL = {"app.kubernetes.io/name": "speculant"}


def manifest(name: str) -> Any:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def pod() -> dict[str, Any]:
    return dict(manifest("deployment")["spec"]["template"]["spec"])


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return dict(only)


def entrypoint() -> list[str]:
    """Return the image's command with the container's arguments, without the name of the program."""
    (command,) = re.findall(r"^ENTRYPOINT (\[.*\])$", IMAGE, re.MULTILINE)
    return [*yaml.safe_load(command)[1:], *container()["args"]]


def drain_timeout() -> float:
    arguments = entrypoint()
    return float(arguments[arguments.index("--drain-timeout") + 1])


def seconds_until(probe: str) -> int:
    """Return how long a probe takes to fail."""
    of = container()[probe]
    return int(of["periodSeconds"] * of["failureThreshold"])


MANIFESTS = {name: manifest(name) for name in (path.stem for path in sorted(FOLDER.glob("*.yaml")))}
OBJECTS = {name: each for name, each in MANIFESTS.items() if "apiVersion" in each and name != "kustomization"}


def test_the_kustomization_has_every_object() -> None:
    listed = manifest("kustomization")["resources"]
    assert sorted(listed) == sorted(f"{name}.yaml" for name in OBJECTS)
    assert set(MANIFESTS) - set(OBJECTS) == {"kustomization", "adapter-values"}
    assert [image["name"] for image in manifest("kustomization")["images"]] == [container()["image"]]


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", [name for name, each in OBJECTS.items() if each["kind"] not in KINDS])
def test_objects_of_kubernetes_are_valid(name: str, version: str) -> None:
    assert kubernetes_validate.validate(OBJECTS[name], version, strict=True) in version
    broken = {**OBJECTS[name], "spec": {**OBJECTS[name]["spec"], "selektor": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="selektor"):
        kubernetes_validate.validate(broken, version, strict=True)


@pytest.mark.parametrize("name", [name for name, each in OBJECTS.items() if each["kind"] in KINDS])
def test_objects_of_other_kinds_are_valid(name: str) -> None:
    schema = KINDS[OBJECTS[name]["kind"]]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(OBJECTS[name])
    broken = {**OBJECTS[name], "spec": {**OBJECTS[name]["spec"], "selektor": {}}}
    with pytest.raises(jsonschema.ValidationError, match="selektor"):
        jsonschema.Draft202012Validator(schema).validate(broken)


def test_selectors_find_the_pods() -> None:
    template = OBJECTS["deployment"]["spec"]["template"]
    selectors = [
        OBJECTS["deployment"]["spec"]["selector"]["matchLabels"],
        OBJECTS["service"]["spec"]["selector"],
        OBJECTS["podmonitor"]["spec"]["selector"]["matchLabels"],
        OBJECTS["inferencepool"]["spec"]["selector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in pod()["topologySpreadConstraints"]),
    ]
    assert selectors == [LABEL] * 5
    assert template["metadata"]["labels"].items() >= LABEL.items()


def test_references_name_each_other() -> None:
    assert {each["metadata"]["name"] for each in OBJECTS.values()} == {"speculant"}
    target = OBJECTS["hpa"]["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (OBJECTS["deployment"]["apiVersion"], "Deployment")
    assert "replicas" not in OBJECTS["deployment"]["spec"], "an apply would reset what the HPA has set"
    (rule,) = OBJECTS["httproute"]["spec"]["rules"]
    pool = OBJECTS["inferencepool"]
    assert rule["backendRefs"] == [
        {"group": pool["apiVersion"].partition("/")[0], "kind": pool["kind"], "name": target["name"]}
    ]
    mounted = {each["name"] for each in container()["volumeMounts"]}
    assert mounted == {each["name"] for each in pod()["volumes"]}


def test_ports_are_the_server_s() -> None:
    arguments = entrypoint()
    port = int(arguments[arguments.index("--port") + 1])
    assert container()["ports"] == [{"name": "http", "containerPort": port}]
    assert re.findall(r"^EXPOSE (\d+)$", IMAGE, re.MULTILINE) == [str(port)]
    assert [each["number"] for each in OBJECTS["inferencepool"]["spec"]["targetPorts"]] == [port]
    named = [container()[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")]
    named += [each["targetPort"] for each in OBJECTS["service"]["spec"]["ports"]]
    named += [each["port"] for each in OBJECTS["podmonitor"]["spec"]["podMetricsEndpoints"]]
    assert named == ["http"] * 5


def test_paths_are_routes() -> None:
    routes = {each.path for each in make_app(lambda: None, ServerOptions()).routes if isinstance(each, Route)}
    probed = {container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probed == {"/health"}
    read = {each["path"] for each in OBJECTS["podmonitor"]["spec"]["podMetricsEndpoints"]}
    assert read == {"/metrics"}
    assert probed | read <= routes
    (match,) = OBJECTS["httproute"]["spec"]["rules"][0]["matches"]
    outside = {path for path in routes if f"{path}/".startswith(match["path"]["value"] + "/")}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"} <= outside
    assert not outside & {"/metrics", "/props", "/load", "/"}


def test_a_pod_ends_after_its_last_answer() -> None:
    pause = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert drain_timeout() == ServerOptions().drain_timeout
    assert pause > seconds_until("readinessProbe")
    assert pod()["terminationGracePeriodSeconds"] > pause + drain_timeout() + LAST_EVENTS
    assert seconds_until("livenessProbe") > drain_timeout() + LAST_EVENTS
    assert seconds_until("startupProbe") >= 600
    assert all(container()[f"{kind}Probe"]["timeoutSeconds"] > 1 for kind in ("startup", "readiness", "liveness"))
    minutes = re.fullmatch(r"(\d+)m", OBJECTS["httproute"]["spec"]["rules"][0]["timeouts"]["request"])
    assert minutes is not None
    assert ServerOptions().request_timeout is not None
    assert 60 * int(minutes[1]) > ServerOptions().request_timeout


def test_the_arguments_are_flags_of_the_server() -> None:
    arguments = entrypoint()
    arguments.remove("/models/target")
    result = CliRunner().invoke(app, arguments, env={"SPECULANT_MODEL": None})
    assert "no model was given" in str(result.exception), result.output
    assert any(each["mountPath"] == "/models" and each["readOnly"] for each in container()["volumeMounts"])


@pytest.mark.slow  # the arguments are checked above, and test_ends.py has a server's process
def test_a_server_runs_as_the_manifest_says(
    serve_process: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the embedded pair, and with a port that is free."""
    monkeypatch.setenv("SPECULANT_API_KEY", "key")
    server = serve_process("demo", *container()["args"][1:], "--draft-model", "demo").ready()
    assert server.http.get("/v1/models").status_code == 401
    assert "vllm:num_requests_waiting" in server.http.get("/metrics").raise_for_status().text
    models = server.http.get("/v1/models", headers={"Authorization": "Bearer key"}).json()["data"]
    assert [model["id"] for model in models] == ["target"]
    server.signal()
    assert server.wait() == 0


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {each["name"]: each["valueFrom"] for each in container()["env"]}
    assert given.keys() == {"OMP_NUM_THREADS", "SPECULANT_API_KEY"}
    assert given["OMP_NUM_THREADS"] == {"resourceFieldRef": {"resource": "limits.cpu"}}
    monkeypatch.setenv("SPECULANT_API_KEY", "from a secret")
    assert ServerFlags(defaultdict(lambda: None)).options().api_keys == ("from a secret",)
    assert pod()["enableServiceLinks"] is False, "links would set other SPECULANT_ variables"


def test_the_pod_may_write_nothing_but_its_home() -> None:
    user = int(re.findall(r"^USER (\d+)$", IMAGE, re.MULTILINE)[-1])
    assert pod()["securityContext"]["runAsUser"] == user
    assert pod()["securityContext"]["runAsNonRoot"]
    own = container()["securityContext"]
    assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
    assert own["capabilities"] == {"drop": ["ALL"]}
    (home,) = set(re.findall(r"\bHOME=(\S+)", IMAGE))
    writable = {each["mountPath"] for each in container()["volumeMounts"] if not each.get("readOnly")}
    assert writable == {home, "/tmp"}
    assert f"--home-dir {home}" in IMAGE


def test_a_pod_whose_home_is_lost_keeps_no_packed_weights() -> None:
    """They may be larger than the volume, whose limit the process can't see."""
    (home,) = [each for each in pod()["volumes"] if each["name"] == "home"]
    assert "sizeLimit" in home["emptyDir"]
    arguments = entrypoint()
    assert arguments[arguments.index("--weight-cache") + 1] == "off"


def test_resources_are_whole_processors() -> None:
    resources = container()["resources"]
    assert resources["requests"] == resources["limits"]
    assert int(resources["limits"]["cpu"]) > 0


@pytest.fixture
def page(serve: Callable[..., LiveServer], checkpoints: Checkpoints) -> str:
    """Return the metrics of a server with the manifest's options."""
    arguments = entrypoint()
    prefix = arguments[arguments.index("--metrics-prefix") + 1]
    assert "--metrics-without-key" in arguments
    engine = AsyncEngine(checkpoints.target)
    server = serve(engine, metrics_prefix=prefix, api_keys=("key",), metrics_without_key=True).ready()
    return server.http.get("/metrics").raise_for_status().text


def test_metrics_of_the_autoscaler_are_served(page: str) -> None:
    """The rule of the adapter finds them, for each pod, and gives them the names that the HPA uses."""
    gauges = {family.name for family in text_string_to_metric_families(page) if family.type == "gauge"}
    (rule,) = MANIFESTS["adapter-values"]["rules"]["custom"]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    found = {name for name in gauges if re.fullmatch(pattern, name)}
    renamed = {re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), name) for name in found}
    metrics = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in OBJECTS["hpa"]["spec"]["metrics"]}
    assert metrics.keys() == renamed
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    assert int(metrics["vllm_num_requests_running"]["averageValue"]) < EngineConfig(model="demo").max_num_seqs


def test_metrics_that_the_picker_s_manifest_names_are_served(page: str) -> None:
    text = (FOLDER / "inferencepool.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"vllm:(\w+)", text))
    assert len(named) == 5
    assert {f"vllm:{name}" for name in named} <= {family.name for family in text_string_to_metric_families(page)}
    assert read_load(page).num_blocks > 0


def test_fewer_servers_do_not_end_answers() -> None:
    """A server that leaves has drained before the next one does."""
    (policy,) = OBJECTS["hpa"]["spec"]["behavior"]["scaleDown"]["policies"]
    assert policy["value"] == 1
    assert policy["periodSeconds"] > pod()["terminationGracePeriodSeconds"]
    assert OBJECTS["deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert OBJECTS["hpa"]["spec"]["minReplicas"] > 1
