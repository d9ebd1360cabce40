"""Decides when drafting that did not pay is tried again, and whether a drafter that finds little is worth a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculant.lengths.acceptance import HIGHEST
from speculant.lengths.joint import Seconds, chain_offers, choose_jointly

LEAST_GAIN = 0.01  # drafts that gain less are not worth the risk that the estimates are wrong
PROBE = 2  # nodes of a trial
FIRST_WAIT, LONGEST_WAIT = 16, 1024  # steps without drafts between two trials
TRIALS_SHARE = 0.005  # of the time that failing trials may take: cheap trials need not become rarer
MOST_REPEATS = 3
FIRST_DOUBT = 256  # the same where, by the measured costs, even fully accepted drafts would not pay
FIRST_LONGER = 256  # steps with drafts until longer ones are tried
LOOKUP_PAUSE = 8  # steps between two drafts of a method with scores that gains too little
MOST_KEPT, KEPT_MEMORY = 8.0, 0.95  # verified nodes at first, and the weight that each draft leaves to earlier ones
LOOKUP_MEMORY = 0.05  # weight of the newest step


@dataclass
class Trials:
    """When a method that does not pay is tried again."""

    wait: int = FIRST_WAIT
    backoff: int = FIRST_WAIT  # the last wait after a failure
    longest: int = LONGEST_WAIT
    costly: bool = False  # whether a trial takes too long to be repeated at once
    repeats: int = 0  # trials in a row that were accepted and did not make drafts pay
    doubt: int = 0
    since: int = 0
    probing: bool = False
    doubting: bool = False  # whether the trial is one of costs alone

    def due(self, steps: int = 1) -> bool:
        """Count steps without drafts and return whether a trial is due."""
        self.since += steps
        return self.since >= self.wait

    def start(self, most: Sequence[int], nodes: int = PROBE) -> list[int]:
        """Begin a trial of `nodes` nodes and return those of each sequence; most: the limits of the sequences.

        Only the newer half of the sequences is tried, as a draft model first processes their backlogs.
        """
        self.since, self.probing = 0, True
        return [min(nodes, longest) if place >= len(most) // 2 else 0 for place, longest in enumerate(most)]

    def probe(self, most: int) -> int:
        """Count a step without drafts; return the nodes of a trial, 0 if none is due."""
        return self.start([most])[0] if self.due() else 0

    def end(self, accepted: bool) -> None:
        """Wait longer, or try again at once if the whole trial was accepted: the estimates rise slowly."""
        self.probing = False
        if accepted and not (self.doubting or self.costly) and self.repeats < MOST_REPEATS:
            self.wait, self.repeats = 1, self.repeats + 1
            return
        self.backoff = self.wait = min(self.longest, 2 * self.backoff)
        self.doubting, self.repeats = False, 0

    def costs(self, share: float) -> None:
        """Bound the steps between trials; one trial costs this share of a step without drafts."""
        steps = int(share / TRIALS_SHARE)
        self.longest, self.costly = min(LONGEST_WAIT, max(FIRST_WAIT, steps)), steps > LONGEST_WAIT

    def pays(self) -> None:
        """Note that drafts pay, so that trials begin again once they do not."""
        self.wait = self.backoff = max(FIRST_WAIT, self.backoff // 2)
        self.doubt, self.repeats = self.doubt or FIRST_DOUBT, 0

    def may_pay(self, most: Sequence[int], seconds: Seconds, least_gain: float, is_cheap: bool) -> bool:
        """Whether a trial is due: drafts would pay if everything were accepted, or their costs must be measured again.

        most: nodes of each sequence. seconds, least_gain: see `choose_jointly`. is_cheap: see `doubts`.
        """
        hopes = [[HIGHEST ** (1 + place) for place in range(longest)] for longest in most]
        pays = any(choose_jointly(chain_offers(hopes), len(most), len(most), seconds, least_gain))
        return self.hopes() if pays else self.doubts(is_cheap)

    def hopes(self) -> bool:
        """Whether to begin a trial that may show that drafts pay; the first one comes at once."""
        is_first, self.doubt = not self.doubt, self.doubt or FIRST_DOUBT
        return is_first or self.due(0)

    def doubts(self, is_cheap: bool) -> bool:
        """Whether to begin a trial that can only show that costs were measured wrong, as on a busy machine.

        The first one comes at once. is_cheap: whether it costs little; if not, it is not repeated.
        """
        self.doubting = self.since >= self.doubt and (is_cheap or not self.doubt)
        if self.doubting:
            self.doubt = min(LONGEST_WAIT, max(FIRST_DOUBT, 2 * self.doubt))
        return self.doubting


@dataclass
class Longer:
    """When a method that pays is tried with longer drafts: their costs may have been measured wrong.

    before: the nodes without the trial that was just made; 0 = there was none.
    """

    wait: int = FIRST_LONGER
    since: int = 0
    before: int = 0

    def due(self, steps: int, nodes: int) -> bool:
        """Count steps with drafts of a number of nodes and return whether a trial is due."""
        if self.before:
            self.wait = FIRST_WAIT if nodes > self.before else min(LONGEST_WAIT, 2 * self.wait)
            self.before = 0
        self.since += steps
        if self.since < self.wait:
            return False
        self.since, self.before = 0, nodes
        return True


@dataclass
class Lookups:
    """The worth of calling a method with scores, which drafts nothing in most steps of an unfamiliar text.

    gain: tokens accepted per step in which it is called. seconds: the time of a call. kept: how many nodes of its
    largest draft were verified, where older steps count less; nodes that would be cut need not be drafted.
    """

    gain: float = 1.0
    seconds: float = 0.0
    kept: float = MOST_KEPT
    paused: bool = False

    @property
    def reach(self) -> int:
        """The most nodes that the method may draft."""
        return 2 * int(self.kept) + 2

    def keep(self, count: int) -> bool:
        """Note how many nodes of a draft are verified; return whether there could have been more."""
        grows = count >= self.reach
        self.kept = max(float(count), KEPT_MEMORY * self.kept)
        return grows

    def pause(self) -> int:
        """Return the steps of a pause where the method does not pay; every other call returns 0, so that it drafts."""
        self.paused = not self.paused
        return LOOKUP_PAUSE if self.paused else 0

    def observe(self, accepted: int, seconds: float) -> None:
        """Count a step in which the method was called."""
        self.gain += LOOKUP_MEMORY * (accepted - self.gain)
        self.seconds += LOOKUP_MEMORY * (seconds - self.seconds)
