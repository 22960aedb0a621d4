"""Environments in one process: what is published, in which order, and what a fault leaves of the others."""

from __future__ import annotations

import functools

import numpy as np
from envs import Breaks, Count
from gymnasium import spaces

from envrunner._transport.host import NO_SEED, EnvHost
from envrunner._transport.slots import INFO_BYTES, Command, InfoOf, Phase, SlotPlan

P = functools.partial


class Stage:
    """A host over plain memory, and a diary of what it said."""

    def __init__(self, factories, first=0, num_envs=None):
        self.diary = []
        self.host = EnvHost(
            first,
            factories,
            seed=None,
            report=lambda fault: self.diary.append(("fault", fault.env_id, fault.phase)),
            send_info=lambda env_id, which, data: self.diary.append(("info", env_id, which, len(data))),
            publish=self.note,
            stamp=lambda env_id, phase: None,
        )
        self.slots = None
        built = self.host.build()
        if built is not None:
            plan = SlotPlan(num_envs or first + len(factories), 1, *built)
            self.slots = plan.lay_over(bytearray(plan.num_bytes()))
            self.slots.seed[:] = NO_SEED
            self.host.attach(self.slots)

    def note(self, wake):
        self.diary.append(("published", self.slots.stepped.tolist(), self.slots.observed.tolist(), wake))

    def command(self, ids, command):
        self.slots.command[ids] = command
        self.slots.sent[ids] += 1
        self.host.obey(self.host.pending(self.host.ids))


def test_a_row_is_published_before_the_reset_that_follows_it():
    class SlowReset(Count):
        def reset(self, *, seed=None, options=None):
            if self.episode >= 0:
                seen.append(stage.slots.stepped.tolist())
            return super().reset(seed=seed)

    seen = []
    stage = Stage([P(SlowReset, 0, 1), P(Count, 1, 9)])
    stage.command([0, 1], Command.RESET)
    stage.diary.clear()
    stage.command([0, 1], Command.STEP)
    assert seen == [[2, 2]], "both rows were complete before environment 0 reset"
    assert stage.diary[0][1:3] == ([2, 2], [1, 1]) and stage.diary[-1] == ("published", [2, 2], [2, 1], True)
    assert stage.slots.final[0][0].tolist() == [0, 1, 0] and stage.slots.obs[0][0].tolist() == [0, 0, 1]


def test_only_commanded_environments_move():
    stage = Stage([P(Count, i) for i in range(3)])
    stage.command([0, 1, 2], Command.RESET)
    stage.command([1], Command.STEP)
    assert stage.slots.obs[0][:, 1].tolist() == [0, 1, 0] and stage.host.pending(range(3)) == []


def test_a_fault_stops_one_environment_and_its_reply_is_never_published():
    stage = Stage([P(Count, 0, 99), P(Breaks, 1, how="raise", at=1), P(Count, 2, 99)])
    stage.command([0, 1, 2], Command.RESET)
    stage.command([0, 1, 2], Command.STEP)
    assert ("fault", 1, Phase.STEP) in stage.diary
    assert stage.slots.stepped.tolist() == [2, 0, 2] and stage.slots.obs[0][:, 1].tolist() == [1, 0, 1]
    stage.command([0, 2], Command.STEP)
    assert stage.slots.stepped.tolist() == [3, 0, 3]
    stage.host.close()


def test_a_constructor_that_raises_is_reported_and_the_ones_before_it_are_closed(tmp_path):
    log = str(tmp_path / "log")
    stage = Stage([P(Count, 0, log=log), P(Breaks, 1, how="constructor")])
    assert stage.slots is None and stage.diary == [("fault", 1, Phase.CONSTRUCTOR)]
    stage.host.close()
    assert (tmp_path / "log.closed").exists()


def test_a_close_that_raises_does_not_keep_the_others_open(tmp_path):
    class Clings(Count):
        def close(self):
            raise RuntimeError("no")

    log = str(tmp_path / "log")
    stage = Stage([Clings, P(Count, 1, log=log)])
    stage.host.close()
    assert stage.diary == [("fault", 0, Phase.CLOSE)] and (tmp_path / "log.closed").exists()


def test_an_info_too_large_for_its_slot_is_sent_after_the_row_was_published():
    class Talks(Count):
        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            return observation, reward, terminated, truncated, {"bytes": bytes(INFO_BYTES * self.t)}

    stage = Stage([Talks])
    stage.command([0], Command.RESET)
    stage.diary.clear()
    stage.command([0], Command.STEP)
    kinds = [entry[0] for entry in stage.diary]
    assert kinds == ["published", "info"] and stage.diary[1][1:3] == (0, InfoOf.STEP)
    assert stage.slots.info_size[0].tolist() == [-1, 0]


def test_every_environment_samples_from_a_space_of_its_own():
    shared = spaces.Discrete(10**6)

    class Shares(Count):
        def __init__(self):
            super().__init__()
            self.action_space = shared

    stage = Stage([Shares, Shares, Shares])
    own = [env.action_space for env in stage.host._envs] + [env.observation_space for env in stage.host._envs]
    assert len({id(space) for space in own}) == 6
    stage.slots.seed[:] = 7
    stage.command([0, 1, 2], Command.RESET)
    first, second = (env.action_space.sample() for env in stage.host._envs[:2])
    assert first == second, "equal seeds, equal samples: nobody else drew from it"


def test_hosts_write_only_their_own_rows():
    stage = Stage([P(Count, 5), P(Count, 6)], first=2, num_envs=6)
    stage.command([2, 3], Command.RESET)
    assert stage.slots.obs[0][:, 0].tolist() == [0, 0, 5, 6, 0, 0]
    np.testing.assert_array_equal(stage.slots.observed, [0, 0, 1, 1, 0, 0])
