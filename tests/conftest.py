"""Settings of every test: no network, a limit of time, and a reason for each skipped GPU test."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from speculant import files
from speculant.files import cache_folder
from tests.covering import add_option, leave_combinations_out

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("SPECULANT_REAL_MODELS", str(cache_folder("models")))  # the user's: the next line hides it
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / "speculant-tests")  # measured costs are kept there
os.environ["SPECULANT_FIND_DRAFTS"] = "false"  # in processes of tests; `same_engines_each_time` does it in this one
files.STEADY = float("inf")  # although the tests keep the machine busy
gc.disable()  # until all tests are collected: they live to the end
TESTS = Path(__file__).parent
STATM, MOST_GARBAGE = Path("/proc/self/statm"), 2**28
_after_collection = [0]  # the memory of this process
SLOW_TIMEOUT_S = 3600  # the limit of every other test stands in pyproject.toml
settings.register_profile("full", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("full"), max_examples=6)
settings.load_profile("quick")  # `make test-all` asks for the other


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this project's tests."""
    add_option(parser)


@pytest.hookimpl(trylast=True)  # when all parameters are known, those of fixtures too
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Keep a covering selection of a test's combinations of parameters."""
    leave_combinations_out(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the tests in reverse order in every second process, so that processes share the work of compiling."""
    if session.config.args == ["tests"] and int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2:
        for path in sorted(TESTS.rglob("test_*.py"), reverse=True):
            with suppress(pytest.skip.Exception):
                import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests time, and skip what needs a device that is not there."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or _has_cuda():
        return
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave modules and tests, which live to the end, out of garbage collection."""
    gc.unfreeze()  # of an earlier run in this process
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a test makes much that a count of references frees
    gc.enable()
    _let_messages_rise()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Collect garbage where a process has grown: an engine is much memory in few objects, which start no collection."""
    if (held := _resident_bytes()) > _after_collection[0] + MOST_GARBAGE:
        gc.collect()
        gc.freeze()  # modules and what fixtures share: the next collection need not look at them
        _after_collection[0] = min(held, _resident_bytes())


def _let_messages_rise() -> None:
    """Let loggers of torch and ray pass messages on: pytest adds handlers to each that does not, in every test."""
    for name, each in logging.root.manager.loggerDict.items():
        if name.startswith(("torch.", "ray.")) and isinstance(each, logging.Logger):
            each.propagate = True


def _resident_bytes() -> int:
    """Return the memory of this process; 0 where the system does not tell."""
    pages = STATM.read_text().split()[1] if STATM.exists() else "0"
    return int(pages) * mmap.PAGESIZE


def _has_cuda() -> bool:
    import torch  # here and below: the process that only distributes tests does without

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def same_engines_each_time() -> Iterator[None]:
    """Give engines without a seed the same one, so that a test samples the same texts, and measure costs briefly."""
    from speculant.engine import build
    from speculant.lengths import measuring

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "secrets", SimpleNamespace(randbits=lambda bits: 0))
        patch.setattr("speculant.engine.nearby.SEARCH_S", -1.0)  # models of this machine, or of other tests
        patch.setattr(measuring, "BUDGET_S", 0.005)  # for each curve: no test depends on the costs of a step
        patch.setattr("speculant.engine.precision.TEXT_SECONDS", 0.0)  # nor on a head's acceptance in each type
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
