"""What counts as a policy, and how a plain callable becomes one.

Decided here: which arguments a policy is called with (its signature is read once, at construction)
and which objects are refused, with what to do instead. Not here: batching (`policy.py`), networks
(`_torch_policy.py`), and whether an answer fits the action space (the loops).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from envrunner.errors import PolicyError
from envrunner.types import PolicyOutput

Tree: TypeAlias = Any  # a NumPy array, or dicts and tuples of arrays


@runtime_checkable
class Policy(Protocol):
    """Chooses actions for a batch of observations, and can be given new weights.

    Two more methods are used where a policy has them: `seed(s)`, and `initial_state(batch_size)`,
    which makes it recurrent: a tree of `[B, ...]` arrays that `action` gets as `state`.
    """

    def action(self, obs: Tree, deterministic: bool, *, state: Tree = None, env_ids: Any = None) -> PolicyOutput:
        """Actions for `obs` `[B, *O]`; `state` and `env_ids` `[B]` may be left out of the signature."""
        ...

    def forward(self, obs: Tree) -> Tree:
        """Parameters of the action distribution for `obs` `[B, *O]`, every leaf `[B, ...]`."""
        ...

    def update(self, state: Any) -> None:
        """Take over new weights, in the form that `state` gives them."""
        ...

    def state(self) -> Any:
        """The present weights."""
        ...


def as_policy(policy: Any, who: str) -> Policy:
    """`policy` itself, or a plain callable wrapped so that it has the interface of a Policy.

    Args:
        policy: a Policy, `f(obs) -> actions` or `f(obs) -> PolicyOutput`. A callable is also given
            `deterministic`, `state` and `env_ids` by keyword, where its signature names them.
        who: whose argument it is, for the message.

    Raises:
        TypeError: it is neither, or does not take what it will be called with.
    """
    legal = "legal is a Policy (action, forward, update, state) or a callable f(obs) -> actions"
    if isinstance(policy, type):
        raise TypeError(
            f"{who}: policy must be an instance, got the class {policy.__name__}; {legal}. Pass {policy.__name__}(...)."
        )
    if hasattr(policy, "run_batch"):
        raise TypeError(
            f"{who}: policy is an AsyncPolicy already, and its agents cannot be batched twice; {legal}. "
            "Use that AsyncPolicy itself, or wrap its .policy."
        )
    if isinstance(policy, Policy):
        names = accepted_keywords(policy.action, 2, f"{who}: {name_of(policy)}.action", "(obs, deterministic)")
        _check_recurrence(policy, names, who)
        return policy
    torch = sys.modules.get("torch")  # without torch loaded, nobody can hold one of its modules
    if torch is not None and isinstance(policy, torch.nn.Module):
        raise TypeError(
            f"{who}: policy is a bare torch module, {name_of(policy)}, which does not say how its outputs "
            "become actions; wrap it in TorchPolicy(module, act='categorical') or act='gaussian'."
        )
    if hasattr(policy, "action"):
        lacks = [name for name in ("action", "forward", "update", "state") if not hasattr(policy, name)]
        raise TypeError(
            f"{who}: policy {name_of(policy)} has action() but lacks {', '.join(lacks)}; {legal}. "
            "Add what is missing, or pass its action as a callable."
        )
    if callable(policy):
        return _CallablePolicy(policy, who)
    raise TypeError(
        f"{who}: policy must be a Policy or a callable, got {policy!r} ({type(policy).__name__}); {legal}. "
        "A torch module goes into TorchPolicy(module, act='categorical')."
    )


class _CallablePolicy:
    """`f(obs) -> actions` with the interface of a Policy; it has no weights."""

    def __init__(self, function: Callable[..., Any], who: str) -> None:
        self._function = function
        self._names = accepted_keywords(function, 1, f"{who}: the callable policy {name_of(function)}", "(obs)")
        _check_recurrence(function, self._names, who)
        for name in ("seed", "initial_state"):
            if (method := optional_method(function, name)) is not None:
                setattr(self, name, method)
        self.__qualname__ = name_of(function)  # what messages call it

    def action(self, obs: Tree, deterministic: bool, *, state: Tree = None, env_ids: Any = None) -> Any:
        if not self._names:
            return self._function(obs)
        offered = {"deterministic": deterministic, "state": state, "env_ids": env_ids}
        return self._function(obs, **{name: offered[name] for name in self._names})

    def forward(self, obs: Tree) -> Tree:
        raise PolicyError(
            f"policy {name_of(self)} is a plain callable: it gives actions, but no distribution parameters "
            "for forward(). Wrap the model in a Policy or a TorchPolicy."
        )

    def update(self, state: Any) -> None:
        raise PolicyError(
            f"policy {name_of(self)} is a plain callable: it has no weights that update() could replace. "
            "Wrap the model in a Policy or a TorchPolicy, or change what the callable reads yourself."
        )

    def state(self) -> None:
        return None


def name_of(policy: Any) -> str:
    """What messages call a policy: a function's own name, or the name of an object's class."""
    return str(getattr(policy, "__qualname__", type(policy).__name__))


def optional_method(policy: Any, name: str) -> Callable[..., Any] | None:
    """The optional method `name` of a policy; an attribute that cannot be called is not it."""
    method = getattr(policy, name, None)
    return method if callable(method) else None


def accepted_keywords(function: Callable[..., Any], num_positional: int, who: str, call: str) -> tuple[str, ...]:
    """Which of `deterministic`, `state` and `env_ids` to pass to `function` by keyword.

    The first `num_positional` parameters are given by position, whatever they are called: in
    reinforcement learning `def policy(state)` often names the observation so.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins show none
        return ()
    parameters = list(signature.parameters.values())
    given, rest = parameters[:num_positional], parameters[num_positional:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    offered = ("deterministic", "state", "env_ids")[num_positional - 1 :]
    names = tuple(n for n in offered if n in named or (takes_any and n not in {p.name for p in given}))
    try:
        signature.bind(*[None] * num_positional, **dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(
            f"{who}{signature} cannot be called as {call}: {error}. Legal besides are state and env_ids"
            f"{' and deterministic' if num_positional == 1 else ''}, by keyword; bind anything else "
            "with functools.partial."
        ) from None
    return names


def _check_recurrence(policy: Any, names: tuple[str, ...], who: str) -> None:
    if optional_method(policy, "initial_state") is not None and "state" not in names:
        raise TypeError(
            f"{who}: policy {name_of(policy)} has initial_state(), but its signature does not take state; "
            "legal is action(obs, deterministic, *, state). Add the parameter, or remove initial_state."
        )
