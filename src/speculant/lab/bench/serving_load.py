"""A server under load: its capacity, then requests at multiples of it, with speculation on and off in turn."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from speculant.errors import ConfigError, ServerError
from speculant.lab.bench.measuring import PLAIN, SPECULATIVE, Notify, Spread, interleave, ratios, spreads
from speculant.lab.bench.report import plain_values
from speculant.lab.bench.workloads import poisson_process
from speculant.metrics import TimingMetrics, percentile

if TYPE_CHECKING:
    import httpx


_PERCENTILES = (50, 90, 99)
REFUSED = 429  # the status of a full queue
_PAUSE = 0.05  # seconds before the next request of a client that was refused
_PATIENCE = 600.0  # seconds that a server may send nothing
_EARLY = "the answer ended early"

Fields = Mapping[str, Any]


@dataclass
class Exchange:
    """One request and its answer. Times are readings of `time.perf_counter`, in seconds.

    number: its place in the run. `timing.arrival` is the time when it was due, `sent` when it was sent. A token's time
    is the time of the event with its text. problem: the reason for an incomplete answer. tokens: of the output, by the
    server's count.
    """

    number: int
    timing: TimingMetrics
    sent: float
    ended: float = 0.0
    status: int = 0
    problem: str | None = _EARLY
    tokens: int = 0
    text: str = ""

    @property
    def completed(self) -> bool:
        """Whether the answer is complete."""
        return self.problem is None

    @property
    def refused(self) -> bool:
        """Whether the server's queue was full."""
        return self.status == REFUSED

    def read(self, data: str, now: float) -> None:
        """Read the data of an event. Raises ValueError if it is not a JSON object."""
        if data == "[DONE]":
            self.problem = None if self.problem == _EARLY else self.problem
            self.tokens = self.tokens or self.timing.num_tokens
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError("an event is not an object")
        if "error" in chunk:
            self.problem = _message(chunk)
        self.tokens = (chunk.get("usage") or {}).get("completion_tokens") or self.tokens
        for choice in chunk.get("choices") or ():
            if text := choice.get("text"):
                self.timing.record_tokens(now, 1)
                self.text += text


@dataclass(frozen=True)
class LoadRun:
    """The requests of one run. Rates are taken over the `window` seconds after `started`.

    A request that ends after the window counts by the share of its time inside the window.
    """

    exchanges: Sequence[Exchange]
    started: float
    window: float

    @property
    def completed(self) -> list[Exchange]:
        """The requests with a complete answer."""
        return [exchange for exchange in self.exchanges if exchange.completed]

    @property
    def problems(self) -> list[str]:
        """The reasons why requests failed; refused requests did not fail."""
        return [each.problem for each in self.exchanges if each.problem is not None and not each.refused]

    def figures(self) -> dict[str, float]:
        """Return the reported figures by name: rates per second, times in seconds, of completed requests.

        Latencies start when a request was due. Figures that this run does not define are missing.
        """
        completed, refused = self.completed, sum(exchange.refused for exchange in self.exchanges)
        shares = [self._share(exchange) for exchange in completed]
        latencies = self._latencies()
        figures = {
            "requests": len(self.exchanges),
            "completed": len(completed),
            "refused": refused,
            "failed": len(self.problems),
            "seconds": self.window,
            "requests_per_s": sum(shares) / self.window,
            "tokens_per_s": sum(s * each.tokens for s, each in zip(shares, completed, strict=True)) / self.window,
            **{f"{name}_p{q}_s": percentile(values, q) for name, values in latencies.items() for q in _PERCENTILES},
            "itl_mean_s": statistics.mean(latencies["itl"]) if latencies["itl"] else None,
            "lag_p99_s": percentile([each.sent - each.timing.arrival for each in self.exchanges], 99),
        }
        return {name: value for name, value in figures.items() if value is not None}

    def _latencies(self) -> dict[str, list[float]]:
        """Return the times to the first token, between tokens, and to the end."""
        timings = [exchange.timing for exchange in self.completed]
        return {
            "ttft": [timing.ttft_s for timing in timings if timing.ttft_s is not None],
            "itl": [gap for timing in timings for gap in timing.gaps],
            "e2e": [exchange.ended - exchange.timing.arrival for exchange in self.completed],
        }

    def _share(self, exchange: Exchange) -> float:
        inside = min(exchange.ended, self.started + self.window) - exchange.sent
        return max(0.0, inside / (exchange.ended - exchange.sent))


class Load:
    """Sends prompts in turn, each run with a cache salt of its own, so that runs share no prefixes.

    In a closed loop a number of clients send requests, each as soon as its last one is answered: the server is never
    idle, and its rate of answers is its capacity. In an open loop requests come at their own times, whether or not
    others were answered, like those of many users, so that a queue shows in the latencies.

    connect: makes a client whose base address is the server's. Each request has a client of its own, as the time in
    which httpx chooses among connections grows with the square of their number.
    """

    def __init__(self, connect: Callable[[], httpx.AsyncClient], prompts: Sequence[str | Sequence[int]]) -> None:
        self._connect, self._prompts = connect, prompts

    def closed_loop(self, fields: Fields, clients: int, seconds: float) -> LoadRun:
        """Let clients send requests for a time in seconds, and wait for their last answers."""
        return asyncio.run(self._closed_loop(_of_one_run(fields), clients, seconds))

    def open_loop(self, fields: Fields, arrivals: Sequence[float]) -> LoadRun:
        """Send a request at each of these times, in seconds from the start, and wait for all answers."""
        return asyncio.run(self._open_loop(_of_one_run(fields), arrivals))

    async def _closed_loop(self, fields: Fields, clients: int, seconds: float) -> LoadRun:
        numbers, started = itertools.count(), time.perf_counter()

        async def ask_again() -> list[Exchange]:
            exchanges: list[Exchange] = []
            while (now := time.perf_counter()) < started + seconds:
                exchanges.append(await self._send(fields, next(numbers), now))
                if not exchanges[-1].completed:
                    await asyncio.sleep(_PAUSE)
            return exchanges

        every = await asyncio.gather(*(ask_again() for _ in range(clients)))
        return LoadRun(sorted(itertools.chain(*every), key=lambda each: each.number), started, seconds)

    async def _open_loop(self, fields: Fields, arrivals: Sequence[float]) -> LoadRun:
        sending, started = list[asyncio.Task[Exchange]](), time.perf_counter()
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(started + arrival - time.perf_counter())
            sending.append(asyncio.create_task(self._send(fields, number, started + arrival)))
        exchanges = await asyncio.gather(*sending)
        return LoadRun(exchanges, started, max(exchange.ended for exchange in exchanges) - started)

    async def _send(self, fields: Fields, number: int, due: float) -> Exchange:
        """Send a request and read its answer."""
        import httpx

        exchange = Exchange(number, TimingMetrics(due), time.perf_counter())
        body = {**fields, "prompt": self._prompts[number % len(self._prompts)]}
        try:
            async with self._connect() as client, client.stream("POST", "/v1/completions", json=body) as response:
                exchange.status = response.status_code
                if response.is_success:
                    async for line in response.aiter_lines():
                        if line.startswith("data:"):
                            exchange.read(line.removeprefix("data:").strip(), time.perf_counter())
                else:
                    exchange.problem = f"{_message(_parsed(await response.aread()))} ({exchange.status})"
        except (httpx.HTTPError, ValueError) as error:
            exchange.problem = f"{type(error).__name__}: {error}"
        exchange.ended = time.perf_counter()
        return exchange


def _of_one_run(fields: Fields) -> Fields:
    return {**fields, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": uuid.uuid4().hex}


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or "no reason given")


def connector(api_key: str | None) -> Callable[[str], httpx.AsyncClient]:
    """Return a function that makes a client of the server at an address; it connects without a proxy.

    Raises ConfigError if httpx is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise ConfigError("httpx is not installed", 'pip install -c constraints.txt "speculant[bench]"') from error
    trusted = httpx.create_ssl_context()  # once: it reads all certificates
    return lambda url: httpx.AsyncClient(
        base_url=url,
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        verify=trusted,
        timeout=_PATIENCE,
        trust_env=False,
    )


LATE = 0.05  # seconds; one request in a hundred may be sent this late
_WARM_UP = 1.0  # seconds
_MOST_PROBLEMS = 3  # that are listed

Runs = Mapping[str, Sequence[LoadRun]]  # by mode, one per round


@dataclass(frozen=True)
class LoadPlan:
    """The loads to measure.

    loads: arrivals per second, as multiples of the capacity. seconds: of arrivals, in each run. clients: of the closed
    loops, at least the number of requests that the server runs at a time; further ones wait. seed: of arrival times.
    """

    clients: int
    loads: Sequence[float] = (0.5, 1.0, 2.0)
    seconds: float = 10.0
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        named = [("load", load) for load in self.loads]
        for name, value in (*named, *((name, getattr(self, name)) for name in ("clients", "seconds", "rounds"))):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} is no number above 0", f"set {name} above 0, or leave it out.")
        if len(set(self.loads)) < len(self.loads):
            raise ConfigError(f"a load occurs twice in {list(self.loads)}", "name each once.")

    def num_runs(self, modes: int) -> int:
        """Return the number of runs for a number of modes."""
        return self.rounds * modes * (1 + len(self.loads))

    def arrivals(self, rate: float, load: float, number: int) -> list[float]:
        """Return the arrival times of a round at `rate` arrivals per second: the same in every mode."""
        times = poisson_process(rate, f"{self.seed}, load {load:g}, round {number}")
        return list(itertools.takewhile(lambda time: time < self.seconds, times))


@dataclass(frozen=True)
class Level:
    """The runs at one load. rate: arrivals per second."""

    load: float
    rate: float
    runs: Runs

    def identical(self) -> tuple[int, int]:
        """Count the requests that every mode completed, and those whose texts are the same in all modes."""
        same = total = 0
        for runs in zip(*self.runs.values(), strict=True):
            for exchanges in zip(*(run.exchanges for run in runs), strict=True):
                if all(exchange.completed for exchange in exchanges):
                    total += 1
                    same += len({exchange.text for exchange in exchanges}) == 1
        return total, same


@dataclass(frozen=True)
class Measured:
    """The closed loops, and the open ones at each load."""

    capacity: Runs
    levels: Sequence[Level]


def measure_serving(load: Load, modes: Mapping[str, Fields], plan: LoadPlan, notify: Notify) -> Measured:
    """Measure a server in each mode, which is given by fields of its requests.

    The capacity is that of the first mode, in requests per second, as the median of the rounds. So all modes get the
    same requests at the same times. Raises ServerError for a run that completes no request.
    """
    for fields in modes.values():
        _checked(load.closed_loop(fields, plan.clients, min(_WARM_UP, plan.seconds)))

    def closed(fields: Fields) -> LoadRun:
        return _checked(load.closed_loop(fields, plan.clients, plan.seconds))

    def opened(fields: Fields, multiple: float) -> Callable[[], LoadRun]:
        rounds = (plan.arrivals(multiple * rate, multiple, number) for number in itertools.count())
        return lambda: _checked(load.open_loop(fields, next(rounds)))

    loops = {mode: partial(closed, fields) for mode, fields in modes.items()}
    capacity = interleave(loops, plan.rounds, lambda mode: notify(f"{mode}, the capacity"))
    rate = Spread.of([run.figures()["requests_per_s"] for run in next(iter(capacity.values()))]).median
    arriving = {(each, mode): opened(fields, each) for each in plan.loads for mode, fields in modes.items()}
    found = interleave(arriving, plan.rounds, lambda key: notify(f"{key[1]}, {key[0]:g} x capacity"))
    levels = [Level(each, each * rate, {mode: found[each, mode] for mode in modes}) for each in plan.loads]
    return Measured(capacity, levels)


def _checked(run: LoadRun) -> LoadRun:
    if not run.completed:
        reason = run.problems[0] if run.problems else "its queue was full all the time"
        raise ServerError(f"the server completed no request: {reason}", "correct the request, or see the server's log.")
    return run


def serving_document(measured: Measured, plan: LoadPlan, comparable: bool) -> dict[str, Any]:
    """Return all measurements, as `--json` prints them. comparable: all modes must give the same texts."""
    return {
        "plan": asdict(plan),
        "capacity": _figures(measured.capacity),
        "loads": [_level(level, comparable) for level in measured.levels],
        "notes": list(_notes(measured)),
    }


def _figures(runs: Runs) -> dict[str, Any]:
    figures = {mode: [run.figures() for run in own] for mode, own in runs.items()}
    both = PLAIN in figures and SPECULATIVE in figures
    compared = {f"{SPECULATIVE}/{PLAIN}": ratios(figures[SPECULATIVE], figures[PLAIN])} if both else {}
    return {
        "runs": {mode: plain_values(spreads(own)) for mode, own in figures.items()},
        "ratios": {name: plain_values(each) for name, each in compared.items()},
    }


def _level(level: Level, comparable: bool) -> dict[str, Any]:
    total, same = level.identical()
    compared = comparable and SPECULATIVE in level.runs
    outputs = {"compared": compared, "outputs": total, "identical": {SPECULATIVE: same} if compared else {}}
    return {"load": level.load, "request_rate": level.rate, **_figures(level.runs), "outputs": outputs}


def _notes(measured: Measured) -> Iterator[str]:
    runs = [run for level in measured.levels for own in level.runs.values() for run in own]
    problems = Counter(problem for run in runs for problem in run.problems)
    for problem, count in problems.most_common(_MOST_PROBLEMS):
        yield f"{count} requests failed: {problem}"
    if (late := max(run.figures()["lag_p99_s"] for run in runs)) > LATE:
        yield f"one request in a hundred was sent {late * 1e3:.0f} ms late or later, as this process had no more time"
