"""Do the examples learn? Several seeds of one script, their curves in one picture.

Question: on how many seeds does the mean return of the last 100 episodes reach the target?

    python benchmarks/learning_curves.py ppo.py --target 475
    python benchmarks/learning_curves.py dqn.py --target 400
    python benchmarks/learning_curves.py ppo.py --target -200 -- --env-id Pendulum-v1 --gamma 0.9 --normalize-obs

Flags after `--` go to the script. Seeds whose CSV is there already are not run again.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_seed(script: str, seed: int, path: Path, flags: list[str]) -> Path:
    """The CSV of one run: step, return and length of every episode."""
    if not path.exists():
        command = [sys.executable, str(EXAMPLES / script), "--seed", str(seed), "--csv", str(path), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"seed {seed} is done", flush=True)
    return path


def read_curve(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(steps, mean return of the last 100 episodes), from the hundredth episode on."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    steps = np.array([int(row["step"]) for row in rows])
    returns = np.array([float(row["return"]) for row in rows])
    means = np.convolve(returns, np.full(100, 0.01), "valid")
    return steps[99:], means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("script", help="of examples/: ppo.py or dqn.py")
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--tag", default=None, help="names the files; default the script's name")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("flags", nargs="*", help="for the script, after --")
    args = parser.parse_args()
    tag = args.tag or Path(args.script).stem
    args.out.mkdir(parents=True, exist_ok=True)

    seeds = range(args.seeds)
    with ThreadPoolExecutor(args.jobs) as pool:
        paths = list(
            pool.map(lambda seed: run_seed(args.script, seed, args.out / f"{tag}_seed{seed}.csv", args.flags), seeds)
        )

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    num_reached = 0
    for seed, path in zip(seeds, paths, strict=True):
        steps, means = read_curve(path)
        axes.plot(steps, means, linewidth=1.5, label=f"seed {seed}")
        reached = np.flatnonzero(means >= args.target)
        num_reached += bool(reached.size)
        when = f"reached at step {steps[reached[0]]:,}" if reached.size else "not reached"
        print(f"seed {seed}: {args.target:g} {when}; best {means.max():.1f}, at the end {means[-1]:.1f}")
    axes.axhline(args.target, color="black", linestyle="--", linewidth=1, label=f"target {args.target:g}")
    title = " ".join([args.script, *args.flags])
    axes.set(title=title, xlabel="environment steps", ylabel="mean return of the last 100 episodes")
    axes.legend(loc="best")
    picture = args.out / f"{tag}_seeds.png"
    figure.savefig(picture, dpi=150)
    print(f"{num_reached} of {args.seeds} seeds reached {args.target:g}; curves: {picture}")


if __name__ == "__main__":
    main()
