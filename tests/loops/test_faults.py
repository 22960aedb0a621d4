"""What goes wrong, and how it is told: environments, processes, callers and arguments."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import gymnasium
import numpy as np
import pytest
from envs import Breaks, Count, Spaces, zeros
from gymnasium import spaces
from processes import descendants, is_alive, wait_until

from envrunner import (
    AgentEnvBaseLoop,
    AsyncAgentEnvLoop,
    AsyncAgentEnvLoopConfig,
    AsyncPolicy,
    ClosedError,
    EnvError,
    EnvRunnerError,
    EventProcessor,
    MultiAgentEnvLoop,
    SpaceError,
)

P = functools.partial


def with_one_broken(how, num_workers=3, **options):
    return MultiAgentEnvLoop(
        [P(Count, 0, 50), P(Breaks, 1, how=how), P(Count, 2, 50)], zeros, num_workers=num_workers, **options
    )


# -- environments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("how", ["raise", "unpicklable"])
def test_an_exception_arrives_with_its_traceback(how, num_workers):
    with with_one_broken(how, num_workers) as loop:
        with pytest.raises(EnvError, match="environment 1 raised .*boom-7421 in step 3 of episode 0") as caught:
            loop.run_steps(500)
        error = caught.value
        assert (error.env_id, error.episode_id, error.step, error.phase) == (1, 0, 3, "step")
        assert error.last_action == 0
        assert "boom-7421" in str(error.__cause__) and "envs.py" in str(error.__cause__)
        assert not isinstance(error, SpaceError)
        assert {row.env_id for row in error.rows} <= {0, 1, 2}
        with pytest.raises(EnvError, match="has been broken since: environment 1 raised"):
            loop.run_steps(1)


@pytest.mark.parametrize(
    ("how", "message"),
    [("system exit", "SystemExit: 3"), ("keyboard interrupt", "KeyboardInterrupt")],
)
def test_exceptions_that_end_programs_are_faults_like_any_other(how, message):
    with with_one_broken(how) as loop:
        with pytest.raises(EnvError, match=message):
            loop.run_steps(500)


@pytest.mark.parametrize(("how", "name"), [("sigkill", "SIGKILL"), ("os._exit", "exit code 7")])
def test_a_dead_process_is_noticed_at_once_and_named(how, name):
    with with_one_broken(how) as loop:
        with pytest.raises(EnvError, match=f"environment 1 died in step 3 of episode 0 .{name}") as caught:
            loop.run_steps(10**6)
        assert caught.value.lost_env_ids == (1,)
        assert caught.value.signal == ("SIGKILL" if how == "sigkill" else None)
        assert caught.value.exit_code == (7 if how == "os._exit" else None)


def test_the_environments_that_died_with_it_are_named():
    with with_one_broken("sigkill", num_workers=1) as loop:
        with pytest.raises(EnvError, match="and with it environments 0 to 2 of the same process") as caught:
            loop.run_steps(10**6)
        assert caught.value.env_id == 1 and caught.value.lost_env_ids == (0, 1, 2)


def test_a_process_killed_between_two_calls_is_noticed_by_the_next():
    with MultiAgentEnvLoop([P(Count, i, 50) for i in range(2)], zeros, num_workers=2) as loop:
        loop.run_steps(10)
        pid = sorted(set(descendants(os.getpid())))[-1]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        with pytest.raises(EnvError, match="SIGKILL"):
            loop.run_steps(10**6)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", r"observation has shape \(2,\); legal is \(3,\)"),
        ("broadcast", r"observation has shape \(\); legal is \(3,\)"),
        ("dtype", "observation has dtype complex64, which float32 cannot hold"),
        ("none", "observation has"),
        ("reward array", r"reward an array of shape \(2,\); legal is one number"),
        ("reward nan", "reward NaN"),
        ("reward none", "reward None"),
        ("flag none", "terminated=None; legal is True or False"),
        ("info none", "info NoneType None; legal is a dict"),
        ("four", "a tuple of 4 values .*legal is .observation, reward, terminated, truncated, info"),
    ],
)
def test_what_breaks_the_spaces_is_a_space_error_and_never_a_broadcast(how, message):
    with with_one_broken(how) as loop:
        with pytest.raises(SpaceError, match=f"environment 1 in step 3 of episode 0: .*{message}"):
            loop.run_steps(500)


@pytest.mark.parametrize(
    ("how", "message", "phase"),
    [
        ("constructor", "raised ValueError: boom-7421 in the constructor in its constructor", "constructor"),
        ("reset", "raised ValueError: boom-7421 in reset in its first reset", "reset"),
        (
            "reset without info",
            r"in its first reset: reset returned ndarray .*legal is .observation, info dict",
            "reset",
        ),
    ],
)
def test_a_loop_that_cannot_start_says_why_and_leaves_nothing(how, message, phase):
    with pytest.raises(EnvError, match=f"environment 1 ?{message}") as caught:
        with_one_broken(how)
    assert caught.value.phase == phase and caught.value.env_id == 1
    assert descendants(os.getpid()) == []


def test_start_timeout_names_the_environments_that_are_late(tmp_path):
    class Late(Count):
        def __init__(self, gate):
            super().__init__()
            while not os.path.exists(gate):
                time.sleep(0.001)

    with pytest.raises(EnvError, match="still not constructed after 0.7 s; legal is within start_timeout"):
        MultiAgentEnvLoop(P(Late, str(tmp_path / "never")), zeros, 1, start_timeout=0.7)
    assert descendants(os.getpid()) == []


@pytest.mark.parametrize("Loop", [AgentEnvBaseLoop, AsyncAgentEnvLoop])
def test_loops_of_one_environment_tell_the_same(Loop):
    with Loop(P(Breaks, 0, how="raise"), zeros) as loop:
        with pytest.raises(EnvError, match="environment 0 raised ValueError: boom-7421 in step 3 of episode 0"):
            loop.run_steps(500)
    with pytest.raises(EnvError, match="in its constructor"):
        Loop(P(Breaks, 0, how="constructor"), zeros)


def test_rows_that_were_taken_before_the_fault_are_in_the_error():
    with MultiAgentEnvLoop([P(Count, 0, 50), P(Breaks, 1, how="raise", at=20)], zeros, ordered=True) as loop:
        with pytest.raises(EnvError) as caught:
            loop.run_steps(500)
    rows = caught.value.rows
    for env_id in (0, 1):
        assert rows.obs[rows.env_id == env_id][:, 1].tolist() == list(range(19))


# -- ends ------------------------------------------------------------------------------------------------


def test_close_calls_env_close_where_the_environment_lives_and_may_be_repeated(tmp_path):
    logs = [str(tmp_path / str(i)) for i in range(5)]
    loop = MultiAgentEnvLoop([P(Count, i, 5, log=log) for i, log in enumerate(logs)], zeros, num_workers=2)
    loop.run_steps(10)
    began = time.monotonic()
    loop.close()
    loop.close()
    assert time.monotonic() - began < 5
    assert all(os.path.exists(log + ".closed") for log in logs)
    assert descendants(os.getpid()) == [] and loop.closed
    for use in (lambda: loop.run_steps(1), lambda: loop.run_episodes(0), lambda: loop.update_policy(1), loop.__enter__):
        with pytest.raises(ClosedError, match="this loop is closed; build a new one"):
            use()


def test_close_does_not_wait_for_an_environment_that_hangs(tmp_path):
    loop = MultiAgentEnvLoop(P(Count, 0, 5, gate=str(tmp_path)), zeros, 1)
    loop.run_steps(0)
    began = time.monotonic()
    loop.close()
    assert time.monotonic() - began < 5
    assert descendants(os.getpid()) == []


def test_a_loop_that_is_forgotten_ends_its_processes():
    loop = MultiAgentEnvLoop(P(Count, 0, 5), zeros, 2)
    loop.run_steps(3)
    assert descendants(os.getpid()) != []
    del loop
    import gc

    gc.collect()
    assert descendants(os.getpid()) == []


def test_close_from_another_thread_ends_a_call_with_closed_error(tmp_path):
    loop = MultiAgentEnvLoop(P(Count, 0, 5, gate=str(tmp_path)), zeros, 1)
    caught = []

    def run():
        try:
            loop.run_steps(5)
        except EnvRunnerError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: loop._running is not None)
    loop.close()
    thread.join(5)
    assert [type(error) for error in caught] == [ClosedError]


def test_two_threads_in_one_loop_are_an_error_that_says_so(tmp_path):
    with MultiAgentEnvLoop(P(Count, 0, 5, gate=str(tmp_path)), zeros, 1) as loop:
        thread = threading.Thread(target=loop.run_steps, args=(2,))
        thread.start()
        wait_until(lambda: loop._running is not None)
        with pytest.raises(EnvRunnerError, match="another thread is inside run_steps of this loop"):
            loop.run_episodes(1)
        (tmp_path / "0").touch()
        thread.join()


def test_a_call_from_inside_an_event_processor_is_an_error_that_says_so():
    class Nested(EventProcessor):
        def process_train(self, event):
            loop.run_steps(1)

    with MultiAgentEnvLoop(P(Count, 0, 5), zeros, 1) as loop:
        with pytest.raises(EnvRunnerError, match="this very thread"):
            loop.run_steps(2, processor=Nested())


# -- arguments ----------------------------------------------------------------------------------------------

BAD_ARGUMENTS = {
    "unknown id": (dict(env="CartPol-v1", num_envs=2), ValueError, "env is 'CartPol-v1', which Gymnasium cannot find"),
    "unknown module": (dict(env="no_such_module:X-v0", num_envs=2), ValueError, "Gymnasium cannot find"),
    "no environments": (dict(env="CartPole-v1", num_envs=0), ValueError, "num_envs is 0; legal is an int >= 1"),
    "number missing": (dict(env="CartPole-v1"), ValueError, "num_envs is missing"),
    "not a number": (dict(env="CartPole-v1", num_envs="4"), ValueError, "num_envs is '4'"),
    "empty sequence": (dict(env=[]), ValueError, "empty sequence"),
    "wrong number": (dict(env=["CartPole-v1"] * 2, num_envs=3), ValueError, "a sequence of 2; leave num_envs out"),
    "no factory": (dict(env=7, num_envs=2), TypeError, "env is int 7"),
    "a policy that is none": (dict(env="CartPole-v1", num_envs=2, policy=None), TypeError, "policy"),
    "batch sizes": (dict(env="CartPole-v1", num_envs=2, min_batch_size=3), ValueError, "at most max_batch_size, 2"),
    "batch of none": (dict(env="CartPole-v1", num_envs=2, max_batch_size=0), ValueError, "max_batch_size is 0"),
    "batch sizes twice": (
        dict(env="CartPole-v1", num_envs=2, policy=AsyncPolicy(zeros, 2), max_batch_size=2),
        ValueError,
        "belong to the AsyncPolicy",
    ),
    "workers": (dict(env="CartPole-v1", num_envs=2, num_workers=3), ValueError, "num_workers is 3 for 2 environments"),
    "workers contradict": (
        dict(env="CartPole-v1", num_envs=4, num_workers=3, envs_per_worker=4),
        ValueError,
        "envs_per_worker=4 makes 1 of 4",
    ),
    "steps ahead": (dict(env="CartPole-v1", num_envs=2, steps_ahead=2), ValueError, "steps_ahead is 2; legal is 0"),
    "seed": (dict(env="CartPole-v1", num_envs=2, seed=-1), ValueError, "seed is -1; legal is an int >= 0"),
    "seed type": (dict(env="CartPole-v1", num_envs=2, seed=1.5), TypeError, "seed is 1.5; legal is an int >= 0"),
    "start timeout": (dict(env="CartPole-v1", num_envs=2, start_timeout=0), ValueError, "start_timeout is 0"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_is_named_with_what_is_legal(name):
    arguments, kind, message = BAD_ARGUMENTS[name]
    with pytest.raises(kind, match=message):
        MultiAgentEnvLoop(**{"policy": zeros, **arguments})


def test_a_live_environment_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match="live environment .* Write `lambda: ...`"):
        MultiAgentEnvLoop(Count(), zeros, 2)
    with pytest.raises(TypeError, match=r"env\[1\] is a live environment"):
        MultiAgentEnvLoop([Count, Count()], zeros)


def test_one_object_from_two_factories_is_refused_or_copied():
    env = Count()
    with MultiAgentEnvLoop([lambda: env] * 2, zeros, num_workers=1) as loop:  # it travels once for each
        assert loop.run_rollout(5).obs[:, :, 1].tolist() == [[t, t] for t in range(5)]
    with pytest.raises(EnvError, match="the very object that is environment 0 already"):
        MultiAgentEnvLoop([_the_same_env] * 2, zeros, num_workers=1)


_ONE = []


def _the_same_env():
    if not _ONE:
        _ONE.append(Count())
    return _ONE[0]


def test_a_factory_that_cannot_travel_is_named():
    lock = threading.Lock()
    with pytest.raises(EnvError, match="environment 1 raised TypeError.*create locks, sockets and open files inside"):
        MultiAgentEnvLoop([Count, lambda: (lock, Count())[1]], zeros)


def test_environments_of_one_loop_share_their_spaces():
    box = spaces.Box(0, 1, (2,))
    for other in (P(Spaces, spaces.Box(0, 1, (3,)), spaces.Discrete(2)), P(Spaces, box, spaces.Discrete(3))):
        for num_workers in (1, 2):
            with pytest.raises(
                EnvError, match="environment 1 has the .* space .*, environment 0 has .*; legal is the same"
            ):
                MultiAgentEnvLoop([P(Spaces, box, spaces.Discrete(2)), other], zeros, num_workers=num_workers)


def test_a_space_without_a_fixed_record_says_what_is_legal():
    with pytest.raises(EnvError, match="observation is Text; legal are Box, Discrete"):
        MultiAgentEnvLoop(P(Spaces, spaces.Text(5), spaces.Discrete(2)), zeros, 1)


def test_a_vector_environment_is_no_environment():
    with pytest.raises(EnvError, match="VectorEnv .*legal is one gymnasium.Env"):
        MultiAgentEnvLoop(lambda: gymnasium.make_vec("CartPole-v1", 2), zeros, 1)


@pytest.mark.parametrize(
    ("use", "kind", "message"),
    [
        (lambda loop: loop.run_steps(-1), ValueError, "run_steps: num_steps is -1; legal is an int >= 0"),
        (lambda loop: loop.run_steps(2.0), TypeError, "run_steps: num_steps is 2.0"),
        (lambda loop: loop.run_rollout(True), TypeError, "run_rollout: num_steps is True"),
        (lambda loop: loop.run_episodes(-3), ValueError, "run_episodes: num_episodes is -3"),
        (lambda loop: loop.run_episodes(2, seeds=[1]), ValueError, "seeds has 1 entries for 2 episodes"),
        (lambda loop: loop.run_episodes(1, seeds=[-1]), ValueError, "seeds holds -1"),
        (lambda loop: loop.run_steps(1, processor=print), TypeError, "processor is .*legal is EventProcessor or None"),
        (lambda loop: loop.run_steps(1, interrupter=1), TypeError, "legal is Interrupter or None"),
        (lambda loop: loop.run_steps(1, progress=1), TypeError, "legal is Progress or None"),
        (lambda loop: loop.run_steps(1, timeout=-1), ValueError, "timeout is -1; legal is seconds >= 0"),
    ],
)
def test_a_bad_argument_of_a_call_is_named_and_the_loop_stays_usable(use, kind, message):
    with AgentEnvBaseLoop(Count, zeros) as loop:
        with pytest.raises(kind, match=message):
            use(loop)
        assert len(loop.run_steps(3)) == 3


def test_config_of_the_async_loop_names_its_environment():
    with AsyncAgentEnvLoop(Count, zeros, AsyncAgentEnvLoopConfig(id=7)) as loop:
        rows = loop.run_steps(7)
        assert (rows.env_id == 7).all()
        assert [episode.summary.env_id for episode in loop.run_episodes(2)] == [7, 7]
        assert (loop.run_rollout(3).env_id == 7).all()
    with pytest.raises(TypeError, match="legal is an AsyncAgentEnvLoopConfig"):
        AsyncAgentEnvLoop(Count, zeros, {"id": 7})
    with (
        pytest.raises(EnvError, match="environment 7 raised"),
        AsyncAgentEnvLoop(P(Breaks, how="raise"), zeros, AsyncAgentEnvLoopConfig(id=7)) as loop,
    ):
        loop.run_steps(9)


def test_safe_values_are_taken_as_the_space_says():
    class Loose(Count):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            odd = [
                observation.tolist(),
                observation.astype(">f8"),
                np.repeat(observation, 2)[::2],
                observation.astype(int),
            ]
            return odd[self.t % 4], np.int32(1), np.bool_(terminated), np.array([0]), info

    with MultiAgentEnvLoop(P(Loose, 0, 9), zeros, 1) as loop:
        rows = loop.run_steps(18)
    assert rows.obs[:, 1].tolist() == list(range(9)) * 2 and rows.obs.dtype == np.float32
    assert (rows.reward == 1).all() and rows.terminated.sum() == 2 and not rows.truncated.any()
