"""The one flush rule: when a batch is due, and how many it takes."""

from __future__ import annotations

import itertools

import pytest

from envrunner._core.batcher import due

# waiting, joiners, min_batch, max_batch, expired -> taken
CASES = {
    "nobody waits": (0, 0, 1, 8, False, 0),
    "nobody waits, though time is up": (0, 3, 1, 8, True, 0),
    "enough wait, more may come": (4, 9, 4, 8, False, 4),
    "one too few wait": (3, 9, 4, 8, False, 0),
    "too few wait, but nobody else lives": (3, 0, 4, 8, False, 3),
    "too few wait, one may still come": (3, 1, 4, 8, False, 0),
    "too few wait, but one has waited long enough": (3, 1, 4, 8, True, 3),
    "more wait than are known to live": (3, -3, 4, 8, False, 3),
    "more wait than one batch takes": (11, 5, 4, 8, False, 8),
    "more wait than one batch takes, and time is up": (11, 0, 4, 8, True, 8),
    "a minimum of one serves whoever waits": (1, 63, 1, 64, False, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_batch_takes(case: str) -> None:
    waiting, joiners, min_batch, max_batch, expired, taken = CASES[case]
    assert due(waiting, joiners, min_batch=min_batch, max_batch=max_batch, expired=expired) == taken


def test_whoever_waits_with_nobody_left_to_come_is_served() -> None:
    for waiting, min_batch, max_batch in itertools.product(range(1, 9), range(1, 9), range(1, 9)):
        assert due(waiting, 0, min_batch=min_batch, max_batch=max_batch) == min(waiting, max_batch)


def test_a_joiner_more_never_makes_a_batch_due() -> None:
    for waiting, joiners, min_batch in itertools.product(range(9), range(9), range(1, 9)):
        fewer = due(waiting, joiners, min_batch=min_batch, max_batch=8)
        more = due(waiting, joiners + 1, min_batch=min_batch, max_batch=8)
        assert more in (0, fewer)
