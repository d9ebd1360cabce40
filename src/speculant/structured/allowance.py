"""The processor time that clients' forms may take while tokens are generated.

Masks are computed in the step of all sequences, so a slow one delays every other sequence of the batch. The library
bounds the work of one call; this bounds the sum of calls. It counts processor time of the calling thread, so that a
busy machine ends no request. But the time for which a hypervisor stops the machine counts too. So before a form is
refused, its longest call is excused, once per client in `REFUSED_S`. A form takes at most, beyond `FREE_S` per call,

    SPARE_S                         (a fifth of that while its client is over its share)
    + the call that exceeds it
    + one call, for one form of the client in REFUSED_S
"""

from __future__ import annotations

import time
from collections.abc import Callable

from speculant.errors import ConstraintError

FREE_S = 5e-4  # of each call; masks over 120,000 tokens usually take 0.1 ms
SPARE_S = 0.05  # that all calls for one form may take beyond that
SLOW_S = 1e-3  # a call that takes longer counts among its client's slow calls
CLIENT_SPARE_S = 0.05  # of slow calls in a row
CLIENT_SHARE = 0.1  # of the time that passes, for slow calls
REFUSED_S = 600.0  # for which a form that took too long is refused; in which one call of a client is excused

Clock = Callable[[], float]


class ClientTime:
    """The processor time of one client's slow calls, for all of its forms."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._spent_s, self._at = clock, 0.0, clock()
        self._excused_until = self._at

    def spend(self, seconds: float) -> None:
        """Count one call."""
        if seconds > SLOW_S:
            self._spent_s, self._at = self._left() + seconds, self._clock()

    def excuse(self, seconds: float) -> bool:
        """Take back one call, which `spend` has counted. Return False if another one was excused lately."""
        if self._clock() < self._excused_until:
            return False
        self._excused_until = self._clock() + REFUSED_S
        if seconds > SLOW_S:
            self._spent_s, self._at = max(0.0, self._left() - seconds), self._clock()
        return True

    @property
    def is_over(self) -> bool:
        """Whether the client's slow calls took more than their share of the last seconds."""
        return self._left() > CLIENT_SPARE_S

    def _left(self) -> float:
        return max(0.0, self._spent_s - CLIENT_SHARE * (self._clock() - self._at))


class Allowance:
    """The processor time of one client's form, for all sequences of that client that have the form.

    A call beyond `FREE_S` uses up spare time, and a shorter one gives some back. Without spare time the form is
    refused, sooner if its client has other slow forms. Before that, its longest call is excused, once for all forms of
    the client.
    """

    def __init__(self, client: ClientTime, clock: Clock = time.monotonic) -> None:
        self._client, self._clock, self._over_s = client, clock, 0.0
        self._longest_s = 0.0  # of the calls that used up spare time
        self._until: float | None = None

    def spend(self, seconds: float) -> None:
        """Count one call."""
        self._over_s = max(0.0, self._over_s + seconds - FREE_S)
        self._longest_s = max(self._longest_s, seconds) if self._over_s else 0.0
        self._client.spend(seconds)
        if self._is_over and self._client.excuse(self._longest_s):
            self._over_s, self._longest_s = max(0.0, self._over_s + FREE_S - self._longest_s), 0.0
        if self._is_over:
            self._until = self._clock() + REFUSED_S

    @property
    def _is_over(self) -> bool:
        return self._over_s > SPARE_S or (self._over_s > SPARE_S / 5 and self._client.is_over)

    @property
    def refusal(self) -> ConstraintError | None:
        """The error of the form's requests if it took too long; None = it may be used."""
        if self._until is None:
            return None
        if self._clock() > self._until:
            self._over_s, self._longest_s, self._until = 0.0, 0.0, None
            return None
        return ConstraintError(
            f"the form of this request is slow: finding the tokens that may come next took {1000 * SPARE_S:.0f} ms of "
            f"processor time in excess of {1000 * FREE_S:.1f} ms each",
            "simplify it: fewer alternatives that begin alike, shorter repetitions, smaller bounds.",
        )
