"""A torch module that acts: observations in, sampled actions, `log_prob` and `value` out.

Decided here: how a module's outputs become actions, and how its weights are replaced. Not here:
batching (`policy.py`), and whether an action fits its space (the loops).

The heads make no distribution objects: at a batch of 64 those cost as much as a small network
does. The rule that must hold: forward, sampling and loading happen under the policy's own lock,
so no action comes from half of an update.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from envrunner._as_policy import Tree, optional_method
from envrunner._tree import first_leaf, leaves, map_tree
from envrunner.errors import PolicyError
from envrunner.types import PolicyOutput

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LEGAL_ACTS = "legal is 'categorical', 'gaussian' or f(outputs, obs, deterministic, generator) -> PolicyOutput"
_LEGAL_OUTPUTS = {
    "categorical": "logits [B, n] or (logits, value)",
    "gaussian": "(mean, log_std) or (mean, log_std, value), with mean [B, *A] and log_std [*A] or [B, *A]",
}


class TorchPolicy:
    """Acts with its own copy of a torch module, in inference mode.

    The module is called with observations as tensors (float64 becomes float32, the rest keeps its
    dtype), which may share memory with the caller's arrays: it must not write into them. A module
    with `initial_state(batch_size)` is recurrent: it is called as `module(obs, state)` and returns
    `(outputs, new_state)`, states being trees of `[B, ...]` tensors.

    Args:
        module: copied here, put into eval mode; later changes to the original do not reach it.
        act: "categorical": the module returns logits `[B, n]`, or `(logits, value)`; a logit of -inf
            is never chosen. "gaussian": `(mean, log_std)` or `(mean, log_std, value)`. Or
            `f(outputs, obs, deterministic, generator) -> PolicyOutput`, given and giving tensors.
        device: where it runs; None: where the module is.
        seed: of its own random generator; None: from the operating system.
        num_threads: CPU threads of one forward pass; None: what `torch.set_num_threads` says. The
            default is 1, because environments keep the other cores busy: with two threads on two
            busy cores a small network took 200 times as long here (40 ms instead of 0.2), each
            thread waiting at every layer for one that is not scheduled.

    Both built-in heads give `log_prob` `[B] float32`, and `value` `[B] float32` if the module does.
    """

    #: True if its actions are the indices 0 .. n-1, to which a loop adds the start of a Discrete space.
    index_actions: bool = False

    initial_state: Callable[[int], Tree]  # set on an instance whose module is recurrent, and only there

    def __init__(
        self,
        module: torch.nn.Module,
        act: str | Callable[..., PolicyOutput],
        device: str | torch.device | None = None,
        seed: int | None = None,
        *,
        num_threads: int | None = 1,
    ) -> None:
        if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
            raise ValueError(f"TorchPolicy: num_threads must be an int >= 1 or None, got {num_threads!r}.")
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"TorchPolicy: module must be an instance of torch.nn.Module, got {module!r}; legal is "
                "TorchPolicy(MyNetwork(...), act='categorical'). Functions that act need no TorchPolicy."
            )
        if isinstance(act, str) and act not in _LEGAL_OUTPUTS:
            raise ValueError(f"TorchPolicy: act {act!r} is unknown; {_LEGAL_ACTS}.")
        if not isinstance(act, str) and not callable(act):
            raise TypeError(f"TorchPolicy: act must be a name or a function, got {act!r}; {_LEGAL_ACTS}.")
        if device is None:
            tensors = itertools.chain(module.parameters(), module.buffers(), [torch.empty(0)])
            somewhere = next(tensors).device
        else:
            somewhere = torch.device(device)
        self._module = copy.deepcopy(module).to(somewhere).eval().requires_grad_(False)
        self._device = somewhere
        self._act = act
        self._num_threads = num_threads if somewhere.type == "cpu" else None
        self._lock = threading.Lock()
        self._generator = torch.Generator(device=somewhere)
        if seed is None:
            self._generator.seed()
        else:
            self.seed(seed)
        self.index_actions = act == "categorical"
        self._module_initial_state = optional_method(self._module, "initial_state")
        if self._module_initial_state is not None:
            self.initial_state = self._initial_state

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def action(
        self, obs: Tree, deterministic: bool = False, *, state: Tree = None, env_ids: Any = None
    ) -> PolicyOutput:
        """Actions for `obs` `[B, *O]`; NumPy arrays in and out, the answer its own memory.

        Args:
            obs: `[B, *O]`, dicts and tuples of arrays too.
            deterministic: the most likely action instead of a sample.
            state: `[B, ...]` state of a recurrent module; None: a fresh one.
            env_ids: not used.

        Raises:
            PolicyError: the module's outputs are not what `act` needs, or are NaN.
        """
        batch_size = len(first_leaf(obs))
        with self._lock, _torch_threads(self._num_threads), torch.inference_mode():
            inputs = map_tree(self._tensor, obs)
            outputs, new_state = self._outputs(inputs, state, batch_size)
            if self._act == "categorical":
                output = self._categorical(outputs, batch_size, deterministic)
            elif self._act == "gaussian":
                output = self._gaussian(outputs, batch_size, deterministic)
            else:
                output = self._custom(outputs, inputs, deterministic)
            if new_state is not None:
                output = PolicyOutput(output.actions, output.context, map_tree(_own_array, new_state))
            return output

    def forward(self, obs: Tree, *, state: Tree = None) -> Tree:
        """What the module returns for `obs` `[B, *O]`, as NumPy; a Gaussian's log_std as `[B, *A]`."""
        batch_size = len(first_leaf(obs))
        with self._lock, _torch_threads(self._num_threads), torch.inference_mode():
            outputs, _ = self._outputs(map_tree(self._tensor, obs), state, batch_size)
            if self._act == "gaussian":
                mean, log_std, value = self._gaussian_parts(outputs, batch_size)
                outputs = (mean, log_std) if value is None else (mean, log_std, value)
            return map_tree(_own_array, tuple(outputs) if isinstance(outputs, list) else outputs)

    def update(self, state: Mapping[str, Any]) -> None:
        """Load a state_dict of tensors or arrays. One that does not fit changes nothing.

        Raises:
            TypeError: it is no state_dict.
            ValueError: its keys or shapes are not the module's.
        """
        if isinstance(state, torch.nn.Module):
            raise TypeError("TorchPolicy.update: got a module; legal is its state_dict: pass module.state_dict().")
        if not isinstance(state, Mapping):
            raise TypeError(
                f"TorchPolicy.update: state must be a state_dict, got {type(state).__name__}; "
                "legal is a mapping from names to tensors or arrays: pass module.state_dict()."
            )
        weights = {name: _loadable(value) for name, value in state.items()}
        with self._lock:
            self._check_fits(weights)  # torch loads what fits before it complains about the rest
            self._module.load_state_dict(weights)

    def state(self) -> dict[str, Any]:
        """A copy of the module's state_dict, on the CPU."""
        with self._lock:
            return {
                name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for name, value in self._module.state_dict().items()
            }

    def seed(self, seed: int) -> None:
        """Start the random generator anew: the same seed and calls give the same actions."""
        with self._lock:
            self._generator.manual_seed(int(seed))

    def _initial_state(self, batch_size: int) -> Tree:
        """A fresh recurrent state, `[B, ...]` NumPy arrays."""
        with self._lock, torch.inference_mode():
            return map_tree(_own_array, self._fresh_state(batch_size))

    # Under the lock, in inference mode.

    def _fresh_state(self, batch_size: int) -> Tree:
        assert self._module_initial_state is not None
        return self._checked_state(self._module_initial_state(batch_size), "initial_state()", batch_size)

    def _outputs(self, inputs: Tree, state: Tree, batch_size: int) -> tuple[Any, Tree]:
        """The module's outputs, and its new state (None if it is not recurrent)."""
        if self._module_initial_state is None:
            if state is not None:
                raise PolicyError(
                    f"{self._who} was given a recurrent state, but has no initial_state(batch_size), so it is "
                    "called as module(obs); legal is state=None. Add initial_state to the module."
                )
            return self._module(inputs), None
        given = self._fresh_state(batch_size) if state is None else map_tree(self._tensor, state)
        answer = self._module(inputs, given)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise PolicyError(
                f"{self._who} is recurrent (it has initial_state) but returned {_shown(answer)}; "
                "legal is (outputs, new_state)."
            )
        return answer[0], self._checked_state(answer[1], "the new state", batch_size)

    def _categorical(self, outputs: Any, batch_size: int, deterministic: bool) -> PolicyOutput:
        """a = argmax(log p - log q) with q ~ Exp(1): exact samples, an exponential race."""
        logits, value = outputs if isinstance(outputs, (tuple, list)) and len(outputs) == 2 else (outputs, None)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) != batch_size:
            raise self._wrong_outputs(outputs, batch_size)
        log_probs = logits.float().log_softmax(-1)
        while True:
            if deterministic:
                chosen = log_probs.argmax(-1, keepdim=True)
            else:
                race = torch.empty_like(log_probs).exponential_(generator=self._generator).log_()
                chosen = torch.sub(log_probs, race, out=race).argmax(-1, keepdim=True)
            log_prob = log_probs.gather(1, chosen).cpu().numpy()[:, 0]
            if math.isfinite(np.vdot(log_prob, log_prob)):  # the cheapest look at all of them: 1 us
                break
            if np.isnan(log_prob).any():
                raise self._not_finite("logits", np.isnan(log_prob), "finite, or -inf for some of a row's actions")
            if np.isfinite(log_prob).all():
                break
            # A q that rounded to infinity let an action of probability 0 win: draw again.
        context = {"log_prob": log_prob}
        if value is not None:
            context["value"] = self._value(value, outputs, batch_size)
        return PolicyOutput(chosen.cpu().numpy()[:, 0], context)

    def _gaussian(self, outputs: Any, batch_size: int, deterministic: bool) -> PolicyOutput:
        """a = mean + std * eps; log p = -sum(eps^2 / 2 + log_std + log(2 pi) / 2) over action axes."""
        mean, log_std, value = self._gaussian_parts(outputs, batch_size)
        if deterministic:
            actions, half_squares = _own_array(mean), log_std
        else:
            eps = torch.empty_like(mean).normal_(generator=self._generator)
            actions = torch.addcmul(mean, log_std.exp(), eps).cpu().numpy()
            half_squares = torch.addcmul(log_std, eps, eps, value=0.5)
        num_dims = math.prod(mean.shape[1:])
        log_prob = -num_dims * _HALF_LOG_2PI - half_squares.reshape(batch_size, num_dims).sum(-1).cpu().numpy()
        if not math.isfinite(np.vdot(actions, actions) + np.vdot(log_prob, log_prob)):
            bad = ~np.isfinite(log_prob) | ~np.isfinite(actions).reshape(batch_size, num_dims).all(-1)
            if bad.any():
                raise self._not_finite("mean or log_std", bad, "finite")
        context = {"log_prob": log_prob}
        if value is not None:
            context["value"] = self._value(value, outputs, batch_size)
        return PolicyOutput(actions, context)

    def _gaussian_parts(self, outputs: Any, batch_size: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """mean and log_std, both `[B, *A] float32`, and the value as it came, or None."""
        if not isinstance(outputs, (tuple, list)) or len(outputs) not in (2, 3):
            raise self._wrong_outputs(outputs, batch_size)
        mean, log_std, value = (*outputs, None)[:3]
        try:
            if mean.shape[0] != batch_size:
                raise self._wrong_outputs(outputs, batch_size)
            return mean.float(), log_std.expand_as(mean).float(), value
        except (AttributeError, IndexError, RuntimeError):  # no tensors, or shapes that do not go together
            raise self._wrong_outputs(outputs, batch_size) from None

    def _custom(self, outputs: Any, inputs: Tree, deterministic: bool) -> PolicyOutput:
        assert callable(self._act)
        answer = self._act(outputs, inputs, deterministic, self._generator)
        if not isinstance(answer, PolicyOutput):
            raise PolicyError(
                f"{self._who}: act returned {_shown(answer)}; legal is PolicyOutput(actions, context), "
                "with tensors or arrays [B, ...] in it."
            )
        state = None if answer.state is None else map_tree(_own_array, answer.state)
        return PolicyOutput(map_tree(_own_array, answer.actions), map_tree(_own_array, answer.context), state)

    def _value(self, value: Any, outputs: Any, batch_size: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape not in ((batch_size,), (batch_size, 1)):
            raise self._wrong_outputs(outputs, batch_size)
        return _own_array(value.float()).reshape(batch_size)

    def _tensor(self, leaf: Any) -> torch.Tensor:
        array = np.ascontiguousarray(leaf)
        if not array.flags.writeable:  # torch has no read-only tensors, and warns
            array = array.copy()
        tensor = torch.from_numpy(array)
        if tensor.dtype is torch.float64:
            tensor = tensor.float()
        return tensor.to(self._device)

    def _checked_state(self, state: Tree, what: str, batch_size: int) -> Tree:
        for leaf in leaves(state):
            if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (batch_size,):
                raise PolicyError(
                    f"{self._who}: {what} has a leaf {_shown(leaf)} for a batch of {batch_size}; legal are "
                    f"tensors [{batch_size}, ...], in dicts and tuples. An nn.LSTM's [layers, B, H] state "
                    "needs transpose(0, 1) on its way in and out."
                )
        return state

    def _check_fits(self, weights: Mapping[str, Any]) -> None:
        own = self._module.state_dict()
        faults = [f"lacks {name!r}" for name in own if name not in weights]
        faults += [f"has {name!r}, unknown here" for name in weights if name not in own]
        faults += [
            f"{name!r} is {_shown(weights[name])} instead of {_shown(value)}"
            for name, value in own.items()
            if name in weights and isinstance(value, torch.Tensor)
            if getattr(weights[name], "shape", None) != value.shape
        ]
        if faults:
            raise ValueError(
                f"{self._who}.update: the state_dict {'; '.join(faults[:4])}"
                f"{f'; and {len(faults) - 4} faults more' if len(faults) > 4 else ''}. Legal is exactly the "
                "state_dict of a module built like this one; the old weights are still in place."
            )

    @property
    def _who(self) -> str:
        return f"TorchPolicy({type(self._module).__name__})"

    def _wrong_outputs(self, outputs: Any, batch_size: int) -> PolicyError:
        return PolicyError(
            f"{self._who}: the module returned {_shown(outputs)} for a batch of {batch_size}; with "
            f"act={self._act!r} legal is {_LEGAL_OUTPUTS[str(self._act)]}, value being [B] or [B, 1]. "
            "For other outputs pass act a function."
        )

    def _not_finite(self, what: str, bad: Any, legal: str) -> PolicyError:
        return PolicyError(
            f"{self._who}: {what} are NaN or infinite in {int(bad.sum())} of {len(bad)} rows, first in row "
            f"{int(bad.argmax())}; legal are numbers that are {legal}. "
            "Look for NaN in the observations and in the weights of the last update."
        )


class _torch_threads:
    """Inside, torch uses so many CPU threads; None changes nothing. A class: it costs 1 us, a generator 3."""

    __slots__ = ("_before", "_inside")

    def __init__(self, inside: int | None) -> None:
        self._inside = inside

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._inside is not None and self._inside != self._before:
            torch.set_num_threads(self._inside)

    def __exit__(self, *error: object) -> None:
        if self._inside is not None and self._inside != self._before:
            torch.set_num_threads(self._before)


def _own_array(leaf: Any) -> Any:
    """A NumPy copy: a module may return its input or a buffer, which the next call changes."""
    if not isinstance(leaf, torch.Tensor):
        return np.array(leaf)
    if leaf.dtype is torch.bfloat16:  # NumPy has none
        leaf = leaf.float()
    return leaf.detach().cpu().numpy().copy()


def _loadable(value: Any) -> Any:
    """Arrays as tensors; a tensor, and what a module keeps as extra state, as it is."""
    return torch.from_numpy(np.array(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def _shown(value: Any) -> str:
    """The structure of a module's answer, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of ({', '.join(_shown(item) for item in value)})"
    return type(value).__name__
