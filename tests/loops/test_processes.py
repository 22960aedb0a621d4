"""Scripts as users write them, and what is left when they end badly: promises 10 and 12."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from envs import Count, WhatIsLoaded, zeros
from processes import descendants, is_alive, wait_until

from envrunner import MultiAgentEnvLoop, TorchPolicy

P = functools.partial
TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def script(code, *, cwd, stdin=False, **options):
    """Start a Python script of its own, as a file or from stdin."""
    code = textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": TESTS}
    if stdin:
        process = subprocess.Popen(
            [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=cwd, env=environment, **options,
        )  # fmt: skip
        process.stdin.write(code)
        process.stdin.close()
        process.stdin = None
        return process
    path = os.path.join(cwd, "script.py")
    with open(path, "w") as file:
        file.write(code)
    return subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment,
        **options,
    )  # fmt: skip


PLAIN_SCRIPT = """
    import numpy as np
    from envs import Count
    from envrunner import MultiAgentEnvLoop

    assert __name__ == "__main__"
    print("main runs")

    class Mine(Count):
        def step(self, action):
            return helper(super().step(action))

    def helper(result):
        return result

    envs = [lambda i=i: Mine(i, 3) for i in range(3)]
    loop = MultiAgentEnvLoop(envs, lambda obs: np.zeros(len(obs), np.int64))
    print(len(loop.run_steps(50)))
"""


@pytest.mark.parametrize("stdin", [False, True])
def test_a_script_needs_no_main_guard_and_its_main_module_runs_once(tmp_path, stdin):
    process = script(PLAIN_SCRIPT, cwd=str(tmp_path), stdin=stdin)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.split(), err) == (0, ["main", "runs", "50"], "")


def test_workers_have_no_torch_no_main_module_and_the_parents_path_and_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "extra"))
    import torch

    net = torch.nn.Linear(3, 2)
    with MultiAgentEnvLoop(WhatIsLoaded, TorchPolicy(net, "categorical"), 2, num_workers=2) as loop:
        infos = loop.run_steps(4).info
    for info in infos:
        assert not info["torch"] and info["main"] is None
        assert info["cwd"] == str(tmp_path) and str(tmp_path / "extra") in info["path"]
    assert len({info["pid"] for info in infos}) == 2


def test_a_parent_with_threads_and_used_torch_may_start_workers():
    import threading

    import torch

    torch.ones(300, 300) @ torch.ones(300, 300)
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    try:
        with MultiAgentEnvLoop(Count, zeros, 4, num_workers=2) as loop:
            assert len(loop.run_steps(40)) == 40
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_several_loops_live_side_by_side():
    loops = [MultiAgentEnvLoop(P(Count, k), zeros, 3, num_workers=2) for k in range(3)]
    for _ in range(3):
        assert [set(loop.run_steps(9).obs[:, 0].tolist()) for loop in loops] == [{0}, {1}, {2}]
    for loop in loops:
        loop.close()


def test_nothing_is_left_after_many_loops():
    def numbers():
        import threading

        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/dev/shm"))

    kept = []
    for turn in range(8):
        with MultiAgentEnvLoop(Count, zeros, 3, num_workers=2) as loop:
            kept.append((loop, loop.run_steps(5)))  # neither loops nor batches hold a descriptor
        if turn == 1:
            base = numbers()
    assert numbers() == base and descendants(os.getpid()) == []


RUNS_FOR_EVER = """
    import functools, os, signal
    import numpy as np
    from envs import Count
    from processes import descendants
    from envrunner import MultiAgentEnvLoop

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, however the suite was started
    with MultiAgentEnvLoop([functools.partial(Count, i, 9) for i in range(4)],
                           lambda obs: np.zeros(len(obs), np.int64), num_workers=4) as loop:
        loop.run_steps(8)
        print(*descendants(os.getpid()), flush=True)
        loop.run_steps(10**9)
"""


def test_workers_are_gone_when_the_parent_is_killed(tmp_path):
    process = script(RUNS_FOR_EVER, cwd=str(tmp_path))
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 5  # a zygote and four workers
    process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), seconds=3)
    process.communicate()


def test_ctrl_c_is_one_keyboard_interrupt_and_no_worker_says_anything(tmp_path):
    process = script(RUNS_FOR_EVER, cwd=str(tmp_path), start_new_session=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert err.count("Traceback (most recent call last)") == 1 and err.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode != 0
    wait_until(lambda: not any(is_alive(pid) for pid in pids), seconds=3)


def test_ctrl_c_during_a_call_loses_no_rows(ctrl_c):
    class Presses:
        calls = 0

        def action(self, obs, deterministic):
            self.calls += 1
            if self.calls == 10:
                signal.raise_signal(signal.SIGINT)
            return np.zeros(len(obs), np.int64)

        def forward(self, obs):
            return obs

        def update(self, state):
            pass

        def state(self):
            return None

    before = signal.getsignal(signal.SIGINT)
    with MultiAgentEnvLoop([P(Count, i, 7) for i in range(3)], Presses(), ordered=True) as loop:
        with pytest.raises(KeyboardInterrupt):
            loop.run_steps(10**6)
        rows = loop.run_steps(60)
    for tag in range(3):
        mine = rows.obs[rows.env_id == tag]
        assert mine[:, 1].tolist() == [k % 7 for k in range(len(mine))]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_script_that_raises_without_closing_ends_and_leaves_nothing(tmp_path):
    process = script(
        """
        import functools, os
        from envs import Count, zeros
        from processes import descendants
        from envrunner import MultiAgentEnvLoop

        loop = MultiAgentEnvLoop(functools.partial(Count, 0, 9), zeros, 3, num_workers=3)
        loop.run_steps(8)
        print(*descendants(os.getpid()), flush=True)
        raise RuntimeError("the trainer failed")
        """,
        cwd=str(tmp_path),
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    _, err = process.communicate(timeout=10)
    assert err.rstrip().endswith("RuntimeError: the trainer failed") and len(pids) == 4
    assert not any(is_alive(pid) for pid in pids)


def test_a_fork_of_the_users_process_closes_nothing():
    loop = MultiAgentEnvLoop(P(Count, 0, 9), zeros, 3, num_workers=2)
    loop.run_steps(5)
    pid = os.fork()
    if pid == 0:
        try:
            loop.close()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(loop.run_steps(50)) == 50
    loop.close()


def test_environments_may_print_and_change_directory_without_effect_elsewhere(tmp_path, capfd):
    class Noisy(Count):
        def step(self, action):
            os.chdir(self.where)
            print("x" * 1000)
            np.random.seed(0)
            return super().step(action)

        where = str(tmp_path)

    here = os.getcwd()
    with MultiAgentEnvLoop(P(Noisy, 0, 9), zeros, 2) as loop:
        assert len(loop.run_steps(500)) == 500
    assert os.getcwd() == here
    assert capfd.readouterr().out.count("x" * 1000) >= 500


@pytest.mark.slow
def test_sixty_four_environments_in_processes_of_their_own_are_ready():
    with MultiAgentEnvLoop("CartPole-v1", zeros, 64, num_workers=64) as loop:
        assert len(loop.run_rollout(3).flatten()) == 192


@pytest.mark.parametrize("num_workers", [1, 2])
def test_fresh_interpreters_serve_where_there_is_no_zygote(monkeypatch, num_workers):
    monkeypatch.setenv("ENVRUNNER_START_METHOD", "spawn")
    with MultiAgentEnvLoop(
        [lambda i=i: Count(i, 3, info=True) for i in range(4)], zeros, num_workers=num_workers
    ) as loop:
        block = loop.run_rollout(10)
        assert block.obs[:, 2, 1].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
        assert len(loop.run_episodes(5)) == 5
        pids = descendants(os.getpid())
        assert len(pids) == num_workers
        os.kill(pids[-1], signal.SIGKILL)
        wait_until(lambda: not is_alive(pids[-1]))
        from envrunner import EnvError

        with pytest.raises(EnvError, match="SIGKILL"):
            loop.run_steps(10**6)


def test_a_start_method_that_does_not_exist_is_named(monkeypatch):
    from envrunner import EnvRunnerError

    monkeypatch.setenv("ENVRUNNER_START_METHOD", "thread")
    with pytest.raises(EnvRunnerError, match="ENVRUNNER_START_METHOD is 'thread'; legal is"):
        MultiAgentEnvLoop(Count, zeros, 1)
