"""envrunner: run agents in their environments, one step ahead, and hand what happened to any trainer.

Public names are resolved on first use, so that `import envrunner` loads no torch: worker
processes import this package too, and must stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from envrunner.buffer import TransitionBuffer as TransitionBuffer
    from envrunner.errors import ClosedError as ClosedError
    from envrunner.errors import EnvError as EnvError
    from envrunner.errors import EnvRunnerError as EnvRunnerError
    from envrunner.errors import PolicyError as PolicyError
    from envrunner.errors import SpaceError as SpaceError
    from envrunner.events import EventProcessor as EventProcessor
    from envrunner.events import Interrupter as Interrupter
    from envrunner.events import Progress as Progress
    from envrunner.loops.async_loop import AsyncAgentEnvLoop as AsyncAgentEnvLoop
    from envrunner.loops.async_loop import AsyncAgentEnvLoopConfig as AsyncAgentEnvLoopConfig
    from envrunner.loops.base import AgentEnvBaseLoop as AgentEnvBaseLoop
    from envrunner.loops.base import AgentEnvLoop as AgentEnvLoop
    from envrunner.loops.multi_loop import MultiAgentEnvLoop as MultiAgentEnvLoop
    from envrunner.policy import AsyncPolicy as AsyncPolicy
    from envrunner.policy import Policy as Policy
    from envrunner.policy import TorchPolicy as TorchPolicy
    from envrunner.types import EpisodeSummary as EpisodeSummary
    from envrunner.types import PolicyOutput as PolicyOutput
    from envrunner.types import RolloutBatch as RolloutBatch
    from envrunner.types import StepBatch as StepBatch
    from envrunner.types import TimeStep as TimeStep
    from envrunner.types import Trajectory as Trajectory

_HOME = {
    "TransitionBuffer": "buffer",
    "ClosedError": "errors",
    "EnvError": "errors",
    "EnvRunnerError": "errors",
    "PolicyError": "errors",
    "SpaceError": "errors",
    "EventProcessor": "events",
    "Interrupter": "events",
    "Progress": "events",
    "AsyncAgentEnvLoop": "loops.async_loop",
    "AsyncAgentEnvLoopConfig": "loops.async_loop",
    "AgentEnvBaseLoop": "loops.base",
    "AgentEnvLoop": "loops.base",
    "MultiAgentEnvLoop": "loops.multi_loop",
    "AsyncPolicy": "policy",
    "Policy": "policy",
    "TorchPolicy": "policy",
    "EpisodeSummary": "types",
    "PolicyOutput": "types",
    "RolloutBatch": "types",
    "StepBatch": "types",
    "TimeStep": "types",
    "Trajectory": "types",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'envrunner' has no attribute {name!r}; it has: {', '.join(sorted(_HOME))}")
    value = getattr(importlib.import_module(f"envrunner.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
