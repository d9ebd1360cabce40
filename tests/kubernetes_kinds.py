"""JSON schemas of the kinds that operators and gateways add to Kubernetes, with the fields that deploy/ uses.

Other fields are errors, so that a wrong name is found.
"""

from __future__ import annotations

from typing import Any

NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string", "maxLength": 63}}


def fields(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _items(schema: dict[str, Any], most: int = 16) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": most}


def _kind(group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = fields({"name": NAME, "labels": LABELS})
    return fields({"apiVersion": {"const": group}, "kind": {"const": kind}, "metadata": metadata, "spec": spec})


_SELECTOR = fields({"matchLabels": LABELS})
_DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}  # of the Gateway API
KINDS = {
    "PodMonitor": _kind(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        fields(
            {
                "selector": _SELECTOR,
                "podMetricsEndpoints": _items(
                    fields(
                        {
                            "port": NAME,
                            "path": {"type": "string", "pattern": "^/"},
                            "interval": {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"},
                        }
                    )
                ),
            }
        ),
    ),
    "InferencePool": _kind(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        fields(
            {
                "selector": _SELECTOR,
                "targetPorts": _items(fields({"number": PORT}), most=1),  # later versions allow eight
                "endpointPickerRef": fields(
                    {
                        "name": NAME,
                        "port": fields({"number": PORT}),
                        "failureMode": {"enum": ["FailOpen", "FailClose"]},
                    }
                ),
            }
        ),
    ),
    "HTTPRoute": _kind(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        fields(
            {
                "parentRefs": _items(fields({"name": NAME})),
                "rules": _items(
                    fields(
                        {
                            "matches": _items(
                                fields(
                                    {
                                        "path": fields(
                                            {
                                                "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                                "value": {"type": "string", "pattern": "^/"},
                                            }
                                        )
                                    }
                                )
                            ),
                            "backendRefs": _items(
                                fields({"group": {"type": "string"}, "kind": {"type": "string"}, "name": NAME})
                            ),
                            "timeouts": fields({"request": _DURATION}),
                        }
                    )
                ),
            }
        ),
    ),
}
