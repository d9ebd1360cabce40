"""The table of the methods' roles: every name in it has a file, and a role whose file is missing stays empty."""

from __future__ import annotations

import pytest

from speculant import plugins
from speculant.config import EngineConfig
from speculant.drafting import methods
from speculant.engine import method_name
from speculant.errors import ConfigError

NAMED = (methods.DEFAULT, methods.WITH_MODEL, methods.PREDICTION, *methods.LOOKUPS)


def chosen(installed: set[str], monkeypatch: pytest.MonkeyPatch, model: str | None = None, **given: object) -> str:
    """Return the method that an engine uses where these are installed."""
    monkeypatch.setattr(plugins, "names", lambda kind: sorted(installed))
    spec = EngineConfig("target", model, speculative_config=given or None).speculative()
    assert spec is not None
    return method_name(spec)


@pytest.mark.parametrize("name", NAMED)
def test_every_name_is_that_of_a_method(name: str) -> None:
    assert methods.installed(name) == [name]
    assert methods.method_facts(name).default_length > 0


def test_every_lookup_needs_no_model() -> None:
    assert not any(methods.takes_model(name) for name in (*methods.LOOKUPS, methods.PREDICTION))
    assert methods.method_facts(methods.WITH_MODEL).uses_model
    assert methods.method_facts(methods.DEFAULT).accepts_model


@pytest.mark.parametrize("missing", NAMED)
def test_the_default_stands_in_for_a_method_that_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {*NAMED} - {missing}
    alone, pair = chosen(left, monkeypatch), chosen(left, monkeypatch, "draft")
    assert alone == ("suffix" if missing == methods.DEFAULT else methods.DEFAULT)
    assert pair == (methods.WITH_MODEL if missing == methods.DEFAULT else methods.DEFAULT)


def test_without_any_usual_method_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="none of the usual drafting methods"):
        chosen({"ngram"}, monkeypatch)
    assert chosen({"ngram"}, monkeypatch, method="ngram") == "ngram"


@pytest.mark.parametrize("name", methods.REFUSED)
def test_drafters_of_other_programs_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* is not supported"):
        methods.method_facts(name)
