"""How many agents share one forward pass, and when the weights may change.

Decided here: which of the waiting agents run together (when a batch is due is the one rule in
`_core/batcher.py`). Not here: what counts as a policy (`_as_policy.py`), networks
(`_torch_policy.py`), and whether an answer fits the action space (the loops).

The rule that must hold: whoever runs the policy holds its lock, and takes the waiting agents only
then. So an answer and its version come from the same weights, and an update finds everybody who
asked before it still waiting.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

from envrunner._as_policy import Policy, Tree, accepted_keywords, as_policy, name_of, optional_method
from envrunner._core.batcher import due
from envrunner._tree import first_leaf, map_tree, stack
from envrunner.errors import PolicyError
from envrunner.types import PolicyOutput

if TYPE_CHECKING:
    from envrunner._torch_policy import TorchPolicy

__all__ = ["AsyncPolicy", "Policy", "TorchPolicy", "as_policy"]


def __getattr__(name: str) -> Any:
    if name == "TorchPolicy":  # on first use: importing this module must not load torch
        from envrunner._torch_policy import TorchPolicy

        return TorchPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")


class _Stage(Enum):
    """Where an agent's request is. WAITING -> TAKEN into a batch -> ANSWERED.

    TAKEN -> WAITING if the thread that ran the batch was interrupted.
    """

    WAITING = auto()
    TAKEN = auto()
    ANSWERED = auto()


@dataclass(slots=True, eq=False)
class _Request:
    """What one agent asks, and, once ANSWERED, its answer or its error."""

    kind: str  # "action" or "forward"
    obs: Tree
    deterministic: bool
    state: Tree
    since_s: float
    stage: _Stage = _Stage.WAITING
    answer: Any = None
    error: PolicyError | None = None


class AsyncPolicy:
    """Batches the forward passes of whichever agents wait, and guards the weights (autobatching).

    An agent is a thread that calls `action` or `forward`; a loop is none, it has its own batcher and
    calls `run_batch`. A batch is due when `min_batch_size` agents wait, when no other live agent can
    join them, or when the longest-waiting has waited `max_wait`. There is no thread in here: the
    agent that finds a batch due runs it, for the others too.

    Args:
        policy: a Policy or a callable, see `as_policy`.
        max_batch_size: the most agents in one batch, longest-waiting first.
        min_batch_size: enough to run without asking who else may come; None: `max_batch_size`.
        max_wait: seconds after which an agent waits for no others; None: no limit.
    """

    def __init__(
        self,
        policy: Any,
        max_batch_size: int,
        min_batch_size: int | None = None,
        max_wait: float | None = None,
    ) -> None:
        self._policy = as_policy(policy, "AsyncPolicy")
        self._max_batch = _at_least(1, max_batch_size, "AsyncPolicy: max_batch_size")
        wanted = self._max_batch if min_batch_size is None else min_batch_size
        self._min_batch = _at_least(1, wanted, "AsyncPolicy: min_batch_size")
        if self._min_batch > self._max_batch:
            raise ValueError(
                f"AsyncPolicy: min_batch_size must be at most max_batch_size, got {self._min_batch} > "
                f"{self._max_batch}; legal is 1 .. {self._max_batch}."
            )
        if max_wait is not None and not max_wait >= 0:
            raise ValueError(f"AsyncPolicy: max_wait must be seconds >= 0, or None for no limit; got {max_wait!r}.")
        self._max_wait_s = max_wait
        names = accepted_keywords(self._policy.action, 2, "AsyncPolicy", "(obs, deterministic)")
        self._takes_state, self._takes_env_ids = "state" in names, "env_ids" in names
        self._initial_state = optional_method(self._policy, "initial_state")

        self._policy_lock = threading.Lock()  # held around every use of the policy; taken before _changed
        self._version = 0  # written under _policy_lock
        self._changed = threading.Condition()  # guards the three below, and the stages of requests
        self._waiting: list[_Request] = []  # longest-waiting first
        self._server: _Request | None = None  # the request whose thread is about to run a batch
        self._live_agents = 0

    @property
    def policy(self) -> Policy:
        """The policy inside: the one that was given, or the wrapper around a callable."""
        return self._policy

    @property
    def max_batch_size(self) -> int:
        """The most agents in one batch."""
        return self._max_batch

    @property
    def min_batch_size(self) -> int:
        """Enough agents to run without asking who else may come."""
        return self._min_batch

    @property
    def max_wait(self) -> float | None:
        """Seconds after which an agent waits for no others, or None."""
        return self._max_wait_s

    @property
    def version(self) -> int:
        """How many updates the weights have had."""
        return self._version

    @property
    def waiting(self) -> int:
        """How many agents wait for a batch now."""
        return len(self._waiting)

    @property
    def live_agents(self) -> int:
        """How many agents are registered."""
        return self._live_agents

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has an `initial_state`."""
        return self._initial_state is not None

    def action(self, obs: Tree, deterministic: bool = False, state: Tree = None) -> PolicyOutput:
        """One agent's action: waits until its batch has run.

        Args:
            obs: `[*O]`, no batch axis; dicts and tuples of arrays too.
            deterministic: as asked by this agent; a batch with both kinds is split.
            state: the agent's recurrent state, no batch axis; None: a fresh one, if there is such.

        Returns:
            The agent's row of actions, context and state, its own memory.

        Raises:
            PolicyError: the policy failed on this batch. The next batch is tried anew.
        """
        state = state if self._takes_state else None
        request = _Request("action", obs, bool(deterministic), state, time.monotonic())
        answer: PolicyOutput = self._ask(request)
        return answer

    def forward(self, obs: Tree) -> Tree:
        """One agent's distribution parameters, no batch axis; waits like `action`."""
        return self._ask(_Request("forward", obs, False, None, time.monotonic()))

    def run_batch(
        self, obs: Tree, deterministic: bool = False, *, state: Tree = None, env_ids: Any = None
    ) -> tuple[PolicyOutput, int]:
        """For loops: actions for rows that are gathered already, and the version that chose them.

        Args:
            obs: `[B, *O]`, dicts and tuples of arrays too.
            deterministic: for the whole batch.
            state: `[B, ...]` recurrent state, or None.
            env_ids: `[B]` int, which environment each row belongs to.

        Raises:
            PolicyError: the policy raised; its own exception is the `__cause__`.
        """
        with self._policy_lock:
            return self._act(obs, deterministic, state, env_ids), self._version

    def increment_agents(self, n: int = 1) -> None:
        """`n` more agents will ask: a batch is held back for them."""
        n = _at_least(0, n, "AsyncPolicy.increment_agents: n")
        with self._changed:
            self._live_agents += n

    def decrement_agents(self, n: int = 1) -> None:
        """`n` agents leave: nobody waits for them any longer."""
        n = _at_least(0, n, "AsyncPolicy.decrement_agents: n")
        with self._changed:
            if n > self._live_agents:
                raise ValueError(
                    f"AsyncPolicy.decrement_agents: n must be at most the number of live agents, got {n}; "
                    f"legal is 0 .. {self._live_agents}. Call increment_agents when an agent starts."
                )
            self._live_agents -= n
            self._changed.notify_all()

    def update(self, state: Any) -> None:
        """Serve the agents that wait, with the old weights; then take over new ones: `version` + 1.

        What the policy raises about `state` passes through, and the version stays.
        """
        with self._policy_lock:
            num_waiting = self.waiting  # these, and not who asks again meanwhile: that would never end
            for served in range(0, num_waiting, self._max_batch):
                self._serve(min(self._max_batch, num_waiting - served))
            self._policy.update(state)
            self._version += 1

    def state(self) -> Any:
        """The policy's present weights; never half of an update."""
        with self._policy_lock:
            return self._policy.state()

    def seed(self, seed: int) -> None:
        """Seed the policy, if it has a `seed`."""
        if (method := optional_method(self._policy, "seed")) is not None:
            with self._policy_lock:
                method(seed)

    def initial_state(self, batch_size: int) -> Tree:
        """A fresh recurrent state `[B, ...]`, or None if the policy is not recurrent."""
        if self._initial_state is None:
            return None
        with self._policy_lock:
            return self._call(self._initial_state, batch_size)

    # Agents: ask, wait for one's turn, and perhaps run the batch for everybody.

    def _ask(self, request: _Request) -> Any:
        try:
            with self._changed:
                self._waiting.append(request)
            while self._is_to_serve(request):
                with self._policy_lock:
                    self._serve()
                self._pass_on(request)
        except BaseException:  # a KeyboardInterrupt, anywhere above: this agent asks no longer
            with self._changed:
                if request in self._waiting:
                    self._waiting.remove(request)
            self._pass_on(request)
            raise
        if request.error is not None:  # one exception each: threads must not share a traceback
            raise PolicyError(str(request.error)) from (request.error.__cause__ or request.error)
        return request.answer

    def _is_to_serve(self, request: _Request) -> bool:
        """Wait until a batch is due that this thread is to run (True), or `request` is answered."""
        with self._changed:
            while request.stage is not _Stage.ANSWERED:
                if self._server is not None or request.stage is _Stage.TAKEN:
                    self._changed.wait()
                elif self._num_due():
                    self._server = request
                    return True
                else:
                    self._changed.wait(self._until_expired_s(request))
            return False

    def _pass_on(self, request: _Request) -> None:
        """Let another thread serve, and look whether there is something to serve."""
        with self._changed:
            if self._server is request:
                self._server = None
            self._changed.notify_all()

    def _num_due(self) -> int:
        waiting = len(self._waiting)
        return due(
            waiting,
            self._live_agents - waiting,
            min_batch=self._min_batch,
            max_batch=self._max_batch,
            expired=waiting > 0 and self._until_expired_s(self._waiting[0]) == 0.0,
        )

    def _until_expired_s(self, request: _Request) -> float | None:
        """Seconds until `request` has waited `max_wait`, or None without one."""
        if self._max_wait_s is None:
            return None
        return max(0.0, request.since_s + self._max_wait_s - time.monotonic())

    # Under the policy lock.

    def _serve(self, num_agents: int | None = None) -> None:
        """Answer the `num_agents` that have waited longest; None: as many as are due."""
        batch: list[_Request] = []
        try:
            with self._changed:
                num_taken = self._num_due() if num_agents is None else num_agents
                batch = self._waiting[:num_taken]
                del self._waiting[:num_taken]
                for request in batch:
                    request.stage = _Stage.TAKEN
            alike: dict[Any, list[_Request]] = {}
            for request in batch:
                has_no_state = request.state is None and not self.is_recurrent
                alike.setdefault((request.kind, request.deterministic, has_no_state), []).append(request)
            for requests in alike.values():
                self._answer(requests)
        finally:
            with self._changed:
                left = [request for request in batch if request.stage is _Stage.TAKEN]  # if interrupted
                for request in left:
                    request.stage = _Stage.WAITING
                self._waiting[:0] = left
                self._changed.notify_all()

    def _answer(self, requests: Sequence[_Request]) -> None:
        """One forward pass for requests of one kind; each gets its row, or all get the error."""
        try:
            rows = self._forward_rows(requests) if requests[0].kind == "forward" else self._action_rows(requests)
        except PolicyError as error:
            for request in requests:
                request.error = error
        else:
            for request, row in zip(requests, rows, strict=True):
                request.answer = row
        for request in requests:
            request.stage = _Stage.ANSWERED

    def _forward_rows(self, requests: Sequence[_Request]) -> list[Tree]:
        outputs = self._call(self._policy.forward, _stacked([r.obs for r in requests], "observations"))
        return _rows(outputs, len(requests), f"policy {name_of(self._policy)}: forward()")

    def _action_rows(self, requests: Sequence[_Request]) -> list[PolicyOutput]:
        obs = _stacked([r.obs for r in requests], "observations")
        states = [r.state for r in requests]
        if self._initial_state is not None and any(state is None for state in states):
            [fresh] = _rows(self._call(self._initial_state, 1), 1, f"policy {name_of(self._policy)}: initial_state(1)")
            states = [fresh if state is None else state for state in states]
        state = None if states[0] is None else _stacked(states, "states")
        output = self._act(obs, requests[0].deterministic, state, None)
        parts = {"actions": output.actions, "context": output.context, "state": output.state}
        who = f"policy {name_of(self._policy)}: "
        columns = [
            [None] * len(requests) if part is None else _rows(part, len(requests), who + name)
            for name, part in parts.items()
        ]
        return [PolicyOutput(*row) for row in zip(*columns, strict=True)]

    def _act(self, obs: Tree, deterministic: bool, state: Tree, env_ids: Any) -> PolicyOutput:
        keywords = {}
        if self._takes_state:
            keywords["state"] = state
        if self._takes_env_ids:
            keywords["env_ids"] = env_ids
        answer = self._call(self._policy.action, obs, deterministic, **keywords)
        if answer is None:
            raise PolicyError(
                f"policy {name_of(self._policy)} answered None to a batch of {_batch_size(obs)}; legal is "
                "PolicyOutput(actions) or the actions themselves, [B, *A]. Is a return missing?"
            )
        output = answer if isinstance(answer, PolicyOutput) else PolicyOutput(answer)
        if self._initial_state is not None and output.state is None:
            raise PolicyError(
                f"policy {name_of(self._policy)} has initial_state(), but its answer to a batch of "
                f"{_batch_size(obs)} carries no state; legal is PolicyOutput(actions, context, state)."
            )
        return output

    def _call(self, method: Callable[..., Any], given: Any, *more: Any, **keywords: Any) -> Any:
        try:
            return method(given, *more, **keywords)
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(
                f"policy {name_of(self._policy)} raised {type(error).__name__} in {method.__name__}() on a batch of "
                f"{_batch_size(given)}: {error}. Its traceback is the cause of this error; legal is "
                "an answer with a row for each observation. Try the policy on one such batch by itself."
            ) from error


def _at_least(minimum: int, value: Any, who: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{who} must be an int, got {value!r} ({type(value).__name__}).") from None
    if number < minimum:
        raise ValueError(f"{who} must be at least {minimum}, got {number}; legal is {minimum}, {minimum + 1}, ...")
    return number


def _batch_size(given: Any) -> Any:
    """Rows of a batch, for messages; `initial_state` is given the number itself."""
    shape = np.shape(first_leaf(given))
    return shape[0] if shape else given


def _stacked(rows: Sequence[Tree], what: str) -> Tree:
    try:
        return stack(rows, np.stack)
    except (TypeError, ValueError, LookupError) as error:
        raise PolicyError(
            f"AsyncPolicy: the {what} of {len(rows)} agents do not form a batch: {error}; legal are the same "
            "keys and shapes for all. Give agents of another kind an AsyncPolicy of their own."
        ) from error


def _rows(batch: Tree, batch_size: int, who: str) -> list[Tree]:
    """The rows of a batch, without the batch axis, each its own memory."""

    def column(leaf: Any) -> Any:
        try:
            array = np.asarray(leaf)
        except Exception as error:
            raise PolicyError(
                f"{who} is a {type(leaf).__name__} that NumPy cannot read: {error}; legal are arrays."
            ) from error
        if array.shape[:1] != (batch_size,):
            raise PolicyError(
                f"{who} has shape {array.shape} for a batch of {batch_size}; legal is [{batch_size}, ...], "
                "a row for each observation. Does the policy keep the batch axis?"
            )
        return array

    columns = map_tree(column, batch)

    def row(i: int) -> Tree:
        return map_tree(lambda array: copy(array[i]), columns)

    return [row(i) for i in range(batch_size)]
