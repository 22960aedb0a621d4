"""When an inference batch is due. Pure, and written once: agents of an AsyncPolicy and the
environments of a loop are served by the same rule (DESIGN promise 7)."""

from __future__ import annotations


def due(waiting: int, joiners: int, *, min_batch: int, max_batch: int, expired: bool = False) -> int:
    """How many of those who wait to take into a batch now, longest-waiting first; 0: wait on.

    Args:
        waiting: agents that wait for an action.
        joiners: live agents that do not wait yet and could still join this batch.
        min_batch: enough to start without asking who else may come.
        max_batch: the most that one batch takes.
        expired: the longest-waiting agent has waited `max_wait`.
    """
    if waiting and (waiting >= min_batch or joiners <= 0 or expired):
        return min(waiting, max_batch)
    return 0
