"""A slow player and a slow world run in parallel: `python examples/speculative_execution.py`."""

import time
from functools import partial
from math import exp

from speculant import speculate

Place = tuple[int, int]
MOVES, GOAL, SLOW = [(1, 0), (0, 1), (-1, 0), (0, -1)], (7, 5), 0.03


def habit(place: Place, caution: float = 0.7) -> list[float]:
    """Weigh the four moves quickly: the nearer to the goal, the likelier."""
    places = [(place[0] + dx, place[1] + dy) for dx, dy in MOVES]
    return [exp(-caution * (abs(x - GOAL[0]) + abs(y - GOAL[1]))) for x, y in places]


def player(place: Place) -> list[float]:
    """Weigh them accurately: this stands for a large model elsewhere."""
    time.sleep(SLOW)
    return habit(place, caution=2.0)


def world(place: Place, move: int) -> Place:
    """Simulate the result of a move."""
    time.sleep(SLOW)
    return place[0] + MOVES[move][0], place[1] + MOVES[move][1]


if __name__ == "__main__":
    place, kept, started = (0, 0), 0, time.perf_counter()
    for _ in range(12):
        done = speculate(player, partial(world, place), habit, place)
        place, kept = done.result, kept + done.accepted
        print("+" if done.accepted else ".", place)
    print(f"{kept} of 12 moves were predicted: {time.perf_counter() - started:.2f} s")
    print(f"Without speculation: {12 * 2 * SLOW:.2f} s, with the same distribution.")
