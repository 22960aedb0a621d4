"""What a newcomer pastes must work: the README's code, the docstrings' examples, the example scripts."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envrunner

ROOT = Path(__file__).parent.parent
MODULES = sorted(module.name for module in pkgutil.walk_packages(envrunner.__path__, "envrunner."))


def run(*arguments, cwd, timeout=100):
    """A script in a process of its own; its output, or a failure that shows it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name))) > 15


def test_the_code_of_the_readme_works_when_pasted(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script = tmp_path / "pasted.py"
    script.write_text(blocks[0])
    assert re.search(r"update \d\d: mean return", run(script, cwd=tmp_path))
    for fragment in blocks[1:]:
        compile(fragment, "README.md", "exec")


def test_the_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.slow
def test_quickstart_runs(tmp_path):
    run(ROOT / "examples" / "quickstart.py", cwd=tmp_path)


@pytest.mark.slow
def test_custom_env_learns_and_never_takes_a_masked_action(tmp_path):
    run(ROOT / "examples" / "custom_env.py", cwd=tmp_path)


@pytest.mark.parametrize("env_id", ["CartPole-v1", pytest.param("Acrobot-v1", marks=pytest.mark.slow), "Pendulum-v1"])
def test_ppo_runs_on_discrete_and_continuous_actions_and_draws_its_curve(tmp_path, env_id):
    out = run(
        ROOT / "examples" / "ppo.py", "--env-id", env_id, "--total-steps", 4096, "--eval-episodes", 2,
        "--num-envs", 4, "--curve", "curve.png", "--csv", "episodes.csv", cwd=tmp_path,
    )  # fmt: skip
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert (tmp_path / "episodes.csv").read_text().startswith("step,return,length")
    assert "evaluation: mean return" in out


def test_dqn_goes_on_from_its_checkpoint(tmp_path):
    arguments = [
        ROOT / "examples" / "dqn.py", "--total-steps", 2000, "--learning-starts", 500, "--eval-every", 1000,
        "--eval-episodes", 2, "--checkpoint", "dqn.pt",
    ]  # fmt: skip
    run(*arguments, cwd=tmp_path)
    arguments[2] = 3000
    out = run(*arguments, "--resume", "--csv", "episodes.csv", cwd=tmp_path)
    assert "3000 steps: evaluation" in out and "2000 steps: evaluation" not in out
    steps = [int(line.split(",")[0]) for line in (tmp_path / "episodes.csv").read_text().split()[1:]]
    assert min(steps) < 2000 < max(steps) <= 3000


def test_the_benchmark_prints_its_table(tmp_path):
    out = run(
        ROOT / "benchmarks" / "throughput.py", "--num-envs", 4, "--rounds", 1, "--seconds", 0.1, "--json", "out.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert "x plain loop" in out and (tmp_path / "out.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "steps", "target"), [("ppo.py", 200_000, 475), ("dqn.py", 150_000, 400)])
def test_the_example_learns_cartpole(tmp_path, script, steps, target):
    stop = ["--stop-at", target] if script == "dqn.py" else []
    out = run(ROOT / "examples" / script, "--total-steps", steps, "--seed", 1, *stop, cwd=tmp_path, timeout=900)
    reached = float(re.search(r"training: +mean return ([\d.]+) over the last 100", out)[1])
    assert reached >= target
