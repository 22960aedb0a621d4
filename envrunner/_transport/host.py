"""Environments in one process: built, stepped and reset as the slots command.

Done here, for a worker process and for the in-process loop alike: calling the environment, checking
and storing what it hands over, the row published before the reset that follows it. Not here: when
to do what (the commands in the slots), and how the other side is woken (`publish`).
The rule that must hold: whatever an environment does, the others of the same process go on.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import numpy as np
from gymnasium import Space

from envrunner._transport.slots import IN_PIPE, INFO_BYTES, Command, InfoOf, Phase, SlotPlan, Slots, cells
from envrunner.spaces import Layout, Mismatch

NO_SEED = -1
_SLOW_RESET_S = 200e-6  # a reset that takes longer does not hold back the rows of its group
_MOST_TRACEBACK_LINES = 18

_fence = threading.Lock()  # taken between writing data and writing its step number: orders the two


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong in an environment, in words, since exceptions do not always travel."""

    env_id: int
    phase: Phase
    is_space: bool  # it broke its own spaces; otherwise it raised
    summary: str  # "ValueError: no such body"
    traceback: str


class EnvHost:
    """The environments `first .. first + len(factories) - 1` of a loop, living in this process.

    Args:
        first: index of the first environment.
        factories: one per environment, each returning a new `gymnasium.Env`.
        seed: the loop's seed or None; decides this process's global random generators.
        report: called with every `Fault`; the environment is not touched again.
        send_info: called with (env id, which, pickle) where an info does not fit its slot.
        publish: called when something was published; with False where more is about to follow.
    """

    def __init__(
        self,
        first: int,
        factories: Sequence[Callable[[], gymnasium.Env]],
        *,
        seed: int | None,
        report: Callable[[Fault], None],
        send_info: Callable[[int, InfoOf, bytes], None],
        publish: Callable[[bool], None],
        stamp: Callable[[int, Phase], None] = lambda env_id, phase: None,
    ) -> None:
        self._first = first
        self._factories = factories
        self._seed = seed
        self._report = report
        self._send_info = send_info
        self._publish = publish
        self._stamp = stamp
        self._envs: list[gymnasium.Env | None] = [None] * len(factories)
        self._reset_s = 0.0
        self._torch_seed: int | None = None  # still to be given to torch

    @property
    def ids(self) -> range:
        return range(self._first, self._first + len(self._factories))

    def seed_globals(self) -> None:
        """Seed `random`, `numpy.random` and torch (once it is loaded) from (seed, first environment id)."""
        if self._seed is None:
            entropy = np.random.SeedSequence()
        else:
            entropy = np.random.SeedSequence((self._seed, self._first))
        words = entropy.generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(words[1])
        self._torch_seed = int(words[2])
        self._seed_torch()

    def _seed_torch(self) -> None:
        """Torch begins with the same stream in every process: seed it before anybody draws, or once it appears."""
        if self._torch_seed is not None and "torch" in sys.modules:
            sys.modules["torch"].manual_seed(self._torch_seed)
            self._torch_seed = None

    def build(self) -> tuple[Space[Any], Space[Any]] | None:
        """Call the factories; the spaces of the first environment, or None after a reported fault."""
        spaces: tuple[Space[Any], Space[Any]] | None = None
        for env_id in self.ids:
            self._stamp(env_id, Phase.CONSTRUCTOR)
            try:
                env = self._check_env(env_id, self._factories[env_id - self._first]())
                self._seed_torch()
                self._own_spaces(env)
                self._envs[env_id - self._first] = env
                mine = (env.observation_space, env.action_space)
                Layout(mine[0], "observation"), Layout(mine[1], "action")
                check_same_spaces(spaces or mine, mine, self._first, env_id)
                spaces = spaces or mine
            except BaseException as error:
                self._fault(env_id, Phase.CONSTRUCTOR, error)
                return None
        self._stamp(self._first, Phase.NOTHING)
        return spaces

    def _check_env(self, env_id: int, env: Any) -> gymnasium.Env:
        if isinstance(env, gymnasium.vector.VectorEnv):
            raise Mismatch(f"the factory returned a VectorEnv ({env}); legal is one gymnasium.Env")
        missing = [
            name for name in ("reset", "step", "observation_space", "action_space") if getattr(env, name, None) is None
        ]
        if missing:
            raise Mismatch(
                f"the factory returned {type(env).__name__}, which has no {' and no '.join(missing)}; "
                "legal is a new gymnasium.Env with both spaces set"
            )
        for other_id, other in zip(self.ids, self._envs, strict=True):
            if other is not None and (other is env or other.unwrapped is getattr(env, "unwrapped", env)):
                raise Mismatch(
                    f"the factory returned the very object that is environment {other_id} already; "
                    "legal is a new environment from every call"
                )
        return env  # type: ignore[no-any-return]

    def _own_spaces(self, env: gymnasium.Env) -> None:
        """Give an environment its own copy of a space that it shares (one set in the class body, say).

        A space has a random stream; environments that sample from one stream would not repeat under a seed.
        """
        inner = env.unwrapped
        others = [other.unwrapped for other in self._envs if other is not None]
        for name in ("observation_space", "action_space"):
            space = getattr(inner, name)
            if name not in vars(inner) or any(getattr(other, name) is space for other in others):
                try:
                    setattr(inner, name, copy.deepcopy(space))
                except AttributeError:
                    pass  # a property: the environment makes its spaces itself

    def attach(self, slots: Slots) -> None:
        """Work on these slots from now on."""
        plan: SlotPlan = slots.plan
        observation, action = Layout(plan.observation_space, "observation"), Layout(plan.action_space, "action")
        self._slots = slots
        self._write_obs = observation.writer(slots.obs)
        self._write_final = observation.writer(slots.final)
        self._read_action = action.reader(slots.action)
        self._acked = [0] * plan.num_envs
        self._command = cells(slots.command)
        self._sent = cells(slots.sent)
        self._seeds = cells(slots.seed)
        self._stepped = cells(slots.stepped)
        self._observed = cells(slots.observed)
        self._reward = cells(slots.reward)
        self._terminated = cells(slots.terminated)
        self._truncated = cells(slots.truncated)
        self._info_size = cells(slots.info_size.reshape(-1))
        self._info = cells(slots.info.reshape(-1))

    def number(self, env_id: int) -> int:
        """Of the command that this environment obeyed last."""
        return self._acked[env_id]

    def pending(self, group: Iterable[int]) -> list[int]:
        """Those of the group that have a command they have not obeyed yet."""
        sent, acked = self._sent, self._acked
        return [env_id for env_id in group if sent[env_id] != acked[env_id]]

    def obey(self, ids: list[int]) -> None:
        """Step and reset these environments as commanded, publish, and say so."""
        acked, sent, command = self._acked, self._sent, self._command
        done: list[int] = []
        resets: list[int] = []
        overflow: list[tuple[int, InfoOf, bytes]] = []
        ended = 0
        for env_id in ids:
            acked[env_id] = sent[env_id]
            if command[env_id] != Command.STEP:
                resets.append(env_id)
                continue
            try:
                over = self._step(env_id, overflow)
            except BaseException as error:
                self._fault(env_id, Phase.STEP, error)
                continue
            done.append(env_id)
            if over:
                resets.append(env_id)
                ended += 1
        if done:
            stepped = self._stepped
            with _fence:
                pass
            for env_id in done:
                stepped[env_id] = acked[env_id]
        if resets:
            if done and (overflow or self._reset_s * len(resets) > _SLOW_RESET_S):
                self._publish(True)
            elif done:
                self._publish(False)  # a quick reset follows: one ring for both
            self._send_overflow(overflow)
            self._reset_all(resets, overflow)
        self._stamp(self._first, Phase.NOTHING)
        self._publish(True)
        self._send_overflow(overflow)

    def _step(self, env_id: int, overflow: list[tuple[int, InfoOf, bytes]]) -> bool:
        env = self._envs[env_id - self._first]
        assert env is not None, f"environment {env_id} was commanded after its fault"
        self._stamp(env_id, Phase.STEP)
        result: Any = env.step(self._read_action(env_id))
        if type(result) is not tuple or len(result) != 5:
            raise Mismatch(
                f"step returned {_describe_result(result)}; legal is (observation, reward, terminated, truncated, info)"
            )
        obs, reward, terminated, truncated, info = result
        if terminated is not True and terminated is not False:
            terminated = _flag("terminated", terminated)
        if truncated is not True and truncated is not False:
            truncated = _flag("truncated", truncated)
        over = terminated or truncated
        (self._write_final if over else self._write_obs)(env_id, obs)
        self._reward[env_id] = reward if type(reward) is float and reward == reward else _number(reward)
        self._terminated[env_id] = terminated
        self._truncated[env_id] = truncated
        if info == {}:
            self._info_size[2 * env_id] = 0
        else:
            self._write_info(env_id, InfoOf.STEP, info, overflow)
        return over

    def _reset_all(self, ids: list[int], overflow: list[tuple[int, InfoOf, bytes]]) -> None:
        began = time.perf_counter()
        done: list[int] = []
        for env_id in ids:
            try:
                self._reset(env_id, overflow)
            except BaseException as error:
                self._fault(env_id, Phase.RESET, error)
                continue
            done.append(env_id)
        self._reset_s = max(0.5 * self._reset_s, (time.perf_counter() - began) / len(ids))
        with _fence:
            pass
        for env_id in done:
            self._observed[env_id] = self._acked[env_id]

    def _reset(self, env_id: int, overflow: list[tuple[int, InfoOf, bytes]]) -> None:
        env = self._envs[env_id - self._first]
        assert env is not None, f"environment {env_id} was commanded after its fault"
        self._stamp(env_id, Phase.RESET)
        seed = self._seeds[env_id]
        if seed == NO_SEED:
            result = env.reset()
        else:
            env.action_space.seed(seed)  # before, since a reset may sample from them
            env.observation_space.seed(seed)
            result = env.reset(seed=seed)
        if type(result) is not tuple or len(result) != 2 or not isinstance(result[1], dict):
            raise Mismatch(f"reset returned {_describe_result(result)}; legal is (observation, info dict)")
        self._write_obs(env_id, result[0])
        self._write_info(env_id, InfoOf.RESET, result[1], overflow)

    def _write_info(self, env_id: int, which: InfoOf, info: Any, overflow: list[tuple[int, InfoOf, bytes]]) -> None:
        if not isinstance(info, dict):
            raise Mismatch(f"step returned as info {type(info).__name__} {info!r:.60}; legal is a dict")
        place = len(InfoOf) * env_id + which
        if not info:
            self._info_size[place] = 0
            return
        try:
            data = pickle.dumps(info, pickle.HIGHEST_PROTOCOL)
        except Exception:  # lambdas, classes of the user's main module: by value then
            data = cloudpickle.dumps(info, pickle.HIGHEST_PROTOCOL)
        if len(data) <= INFO_BYTES:
            self._info[place * INFO_BYTES : place * INFO_BYTES + len(data)] = data
            self._info_size[place] = len(data)
        else:
            self._info_size[place] = IN_PIPE
            overflow.append((env_id, which, data))

    def _send_overflow(self, overflow: list[tuple[int, InfoOf, bytes]]) -> None:
        """After the rows were published and rung: the other side reads while this one writes."""
        for env_id, which, data in overflow:
            self._send_info(env_id, which, data)
        overflow.clear()

    def close(self) -> None:
        """Close every environment, also after one of them fails to."""
        for env_id in self.ids:
            env, self._envs[env_id - self._first] = self._envs[env_id - self._first], None
            if env is None:
                continue
            self._stamp(env_id, Phase.CLOSE)
            try:
                env.close()
            except BaseException as error:
                self._fault(env_id, Phase.CLOSE, error)

    def _fault(self, env_id: int, phase: Phase, error: BaseException) -> None:
        self._envs[env_id - self._first] = None
        self._report(describe_fault(env_id, phase, error))


def check_same_spaces(
    first: tuple[Space[Any], Space[Any]], other: tuple[Space[Any], Space[Any]], first_id: int, other_id: int
) -> None:
    """All environments of a loop share one record.

    Raises:
        Mismatch: naming both environments and what differs.
    """
    for what, mine, theirs in zip(("observation", "action"), first, other, strict=True):
        if Layout(mine, what).signature != Layout(theirs, what).signature or (what == "action" and mine != theirs):
            raise Mismatch(
                f"environment {other_id} has the {what} space {theirs}, environment {first_id} has {mine}; "
                "legal is the same for all environments of a loop"
            )


def describe_fault(env_id: int, phase: Phase, error: BaseException) -> Fault:
    """A Fault whose traceback begins where the environment's own code does."""
    try:
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except BaseException:  # an exception that cannot even be printed
        summary = f"{type(error).__name__} (it cannot be printed)"
    is_space = isinstance(error, Mismatch)
    try:
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        lines = "".join(traceback.format_exception(type(error), error, tb)).splitlines()
    except BaseException:
        lines = [summary]
    if len(lines) > _MOST_TRACEBACK_LINES:
        half = _MOST_TRACEBACK_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return Fault(env_id, phase, is_space, str(error) if is_space else summary, "\n".join(lines))


def _flag(name: str, value: Any) -> bool:
    """Any bool or number of size 1 is a flag."""
    if isinstance(value, (bool, np.bool_, int, float, np.generic)) or (
        isinstance(value, np.ndarray) and value.size == 1
    ):
        number = np.asarray(value).reshape(-1)[0]
        if number.dtype.kind in "biuf" and number == number:
            return bool(number)
    raise Mismatch(f"step returned {name}={value!r:.60}; legal is True or False")


def _number(value: Any) -> float:
    """Any real number or bool of size 1, but NaN, is a reward."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        what = f"an array of shape {array.shape}" if array.shape else f"{value!r:.60}"
        raise Mismatch(f"step returned as reward {what}; legal is one number")
    number = float(array.reshape(-1)[0])
    if number != number:
        raise Mismatch("step returned the reward NaN; legal is a number")
    return number


def _describe_result(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)} values ({', '.join(type(value).__name__ for value in result)})"
    return f"{type(result).__name__} {result!r:.60}"
