"""A fresh Python interpreter that finds what this one finds, and does not run the user's main module."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def command_line(code: str, *arguments: str) -> list[str]:
    """Arguments for `subprocess.Popen`: run `code` with this process's `sys.path`; it sees `sys.argv[1:]`."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    start = f"import sys, json; sys.path[:] = json.loads(sys.argv.pop()); {code}"
    return [sys.executable, *flags, "-c", start, *arguments, path]


def worker_environment() -> dict[str, str]:
    """One BLAS thread a process unless the user says otherwise: there are as many processes as cores."""
    environment = dict(os.environ)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, "1")
    return environment
