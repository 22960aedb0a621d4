"""TorchPolicy: heads that sample right and cheaply, weights that never tear, arrays of one's own."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from envrunner.errors import PolicyError
from envrunner.policy import AsyncPolicy, Policy, TorchPolicy
from envrunner.types import PolicyOutput

INF = math.inf


class Says(nn.Module):
    """Answers what `answer` makes of the observations."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, obs: Any) -> Any:
        return self.answer(obs)


class ActorCritic(nn.Module):
    def __init__(self, num_outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, num_outputs)
        self.critic = nn.Linear(8, 1)

    def forward(self, obs: torch.Tensor) -> Any:
        hidden = torch.tanh(self.body(obs))
        return self.head(hidden), self.critic(hidden)


class Counter(nn.Module):
    """Recurrent: its state counts steps, from a learned start."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.tensor(10.0))

    def initial_state(self, batch_size: int) -> Any:
        return {"steps": self.start.expand(batch_size)}

    def forward(self, obs: torch.Tensor, state: Any) -> Any:
        steps = state["steps"] + 1
        return (torch.zeros(len(obs), 2), steps), {"steps": steps}


def observations(batch_size: int = 5) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(size=(batch_size, 4)).astype(np.float32)


def logits_policy(*rows: list[float], seed: int = 0) -> tuple[TorchPolicy, np.ndarray[Any, Any]]:
    """A policy whose logits are its observations, and these rows as a batch."""
    return TorchPolicy(Says(lambda obs: obs), "categorical", seed=seed), np.array(rows, np.float32)


# Categorical.


def test_a_torch_policy_is_a_policy() -> None:
    policy = TorchPolicy(ActorCritic(), "categorical")
    assert isinstance(policy, Policy)
    assert AsyncPolicy(policy, 4).policy is policy


def test_categorical_log_prob_is_that_of_torch_distributions() -> None:
    module = ActorCritic()
    output = TorchPolicy(module, "categorical", seed=0).action(observations(), False)
    logits, value = module(torch.from_numpy(observations()))
    expected = torch.distributions.Categorical(logits=logits).log_prob(torch.from_numpy(output.actions))
    np.testing.assert_allclose(output.context["log_prob"], expected.detach(), rtol=1e-6)
    np.testing.assert_array_equal(output.context["value"], value.detach()[:, 0])


def test_categorical_answers_have_the_promised_types() -> None:
    output = TorchPolicy(ActorCritic(), "categorical").action(observations(), False)
    arrays = {"actions": output.actions, **output.context}
    assert {name: (array.shape, array.dtype.name) for name, array in arrays.items()} == {
        "actions": ((5,), "int64"),
        "log_prob": ((5,), "float32"),
        "value": ((5,), "float32"),
    }
    assert output.state is None


def test_without_a_value_there_is_none_in_the_context() -> None:
    policy, obs = logits_policy([0.0, 1.0])
    assert list(policy.action(obs, False).context) == ["log_prob"]


def test_categorical_draws_with_the_right_frequencies() -> None:
    num_draws, probs = 100_000, np.array([0.5, 0.3, 0.15, 0.05])
    policy, row = logits_policy(list(np.log(probs)))
    counts = np.bincount(policy.action(np.repeat(row, num_draws, 0), False).actions, minlength=4)
    chi_square = (((counts - num_draws * probs) ** 2) / (num_draws * probs)).sum()
    assert chi_square < 16.27  # 3 degrees of freedom: passed by 999 of 1000 seeds


@pytest.mark.parametrize(
    ("row", "allowed"),
    [
        ([-INF, 0.0, -INF, 0.0], {1, 3}),
        ([-INF, -INF, 5.0, -INF], {2}),
        ([-INF, -3e38, -INF, -3e38], {1, 3}),
        ([-INF, 3e38, -INF, -3e38], {1}),
        ([-INF, -100.0, -INF, 0.0], {1, 3}),
    ],
)
def test_a_masked_action_is_never_chosen(row: list[float], allowed: set[int]) -> None:
    policy, obs = logits_policy(row)
    output = policy.action(np.repeat(obs, 100_000, 0), False)
    assert set(output.actions.tolist()) <= allowed
    assert np.isfinite(output.context["log_prob"]).all()


def test_a_masked_action_is_not_chosen_even_if_the_noise_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, draws = torch.Tensor.exponential_, []

    def infinite_at_first(self: torch.Tensor, **keywords: Any) -> torch.Tensor:
        draws.append(1)
        return self.fill_(INF) if len(draws) == 1 else draw(self, **keywords)

    monkeypatch.setattr(torch.Tensor, "exponential_", infinite_at_first)
    policy, obs = logits_policy([-INF, 0.0])
    assert policy.action(obs, False).actions.tolist() == [1]
    assert len(draws) == 2


def test_categorical_deterministic_is_the_most_likely() -> None:
    policy, obs = logits_policy([0.0, 2.0, 1.0], [3.0, -INF, 0.0])
    output = policy.action(obs, True)
    assert output.actions.tolist() == [1, 0]
    # log softmax by hand: 2 - log(1 + e^2 + e) and 3 - log(e^3 + 1)
    expected = [2 - math.log(1 + math.e**2 + math.e), 3 - math.log(math.e**3 + 1)]
    np.testing.assert_allclose(output.context["log_prob"], expected, rtol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bad", [[math.nan, 0.0], [INF, 0.0], [-INF, -INF]])
def test_logits_that_give_no_distribution_are_an_error(bad: list[float], deterministic: bool) -> None:
    policy, obs = logits_policy([0.0, 0.0], bad, [1.0, 0.0])
    with pytest.raises(
        PolicyError, match=r"TorchPolicy\(Says\): logits are NaN or infinite in 1 of 3 rows, first in row 1"
    ):
        policy.action(obs, deterministic)


def test_only_categorical_actions_are_indices() -> None:
    assert TorchPolicy.index_actions is False
    assert TorchPolicy(ActorCritic(), "categorical").index_actions is True
    assert TorchPolicy(ActorCritic(), "gaussian").index_actions is False


# Gaussian.


def gaussian(log_std: torch.Tensor, *value: torch.Tensor, seed: int = 0) -> TorchPolicy:
    """A policy whose mean is its observations."""
    return TorchPolicy(Says(lambda obs: (obs, log_std, *value)), "gaussian", seed=seed)


@pytest.mark.parametrize("log_std", [torch.tensor([0.5, -1.0, 0.0, 2.0]), torch.full((5, 4), -0.3), torch.zeros(1, 4)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gaussian_log_prob_is_that_of_torch_distributions(log_std: torch.Tensor, deterministic: bool) -> None:
    output = gaussian(log_std).action(observations(), deterministic)
    normal = torch.distributions.Normal(torch.from_numpy(observations()), log_std.exp())
    expected = normal.log_prob(torch.from_numpy(output.actions)).sum(-1)
    np.testing.assert_allclose(output.context["log_prob"], expected, rtol=1e-5)
    assert output.context["log_prob"].dtype == output.actions.dtype == np.float32
    assert "value" not in output.context


@pytest.mark.parametrize("shape", [(5,), (5, 2, 3)])
def test_gaussian_sums_over_every_action_axis(shape: tuple[int, ...]) -> None:
    mean, log_std = np.zeros(shape, np.float32), torch.zeros(shape[1:])
    output = gaussian(log_std).action(mean, False)
    normal = torch.distributions.Normal(torch.zeros(shape), 1.0)
    expected = normal.log_prob(torch.from_numpy(output.actions)).reshape(5, -1).sum(-1)
    np.testing.assert_allclose(output.context["log_prob"], expected, rtol=1e-5)
    assert output.actions.shape == shape


def test_gaussian_deterministic_is_the_mean() -> None:
    np.testing.assert_array_equal(gaussian(torch.zeros(4)).action(observations(), True).actions, observations())


def test_gaussian_draws_have_the_mean_and_the_spread() -> None:
    num_draws, std = 100_000, np.array([0.1, 3.0])
    mean = np.tile(np.array([-2.0, 7.0], np.float32), (num_draws, 1))
    drawn = gaussian(torch.log(torch.tensor([0.1, 3.0]))).action(mean, False).actions
    error_of_mean = std / math.sqrt(num_draws)
    assert (abs(drawn.mean(0) - [-2, 7]) < 4 * error_of_mean).all()
    assert (abs(drawn.std(0) - std) < 4 * error_of_mean / math.sqrt(2)).all()
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 4 / math.sqrt(num_draws)


@pytest.mark.parametrize("value", [torch.arange(5.0), torch.arange(5.0)[:, None]])
def test_gaussian_hands_on_the_value(value: torch.Tensor) -> None:
    output = gaussian(torch.zeros(4), value).action(observations(), False)
    assert output.context["value"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("log_std", [0.0, math.nan])
def test_gaussian_parameters_that_are_nan_are_an_error(log_std: float, deterministic: bool) -> None:
    mean = observations()
    mean[3:, 2] = math.nan
    first = 3 if log_std == 0.0 else 0
    with pytest.raises(PolicyError, match=f"mean or log_std are NaN or infinite in . of 5 rows, first in row {first}"):
        gaussian(torch.full((4,), log_std)).action(mean, deterministic)


def test_large_finite_actions_are_no_error() -> None:
    mean = np.full((2, 1), 1e30, np.float32)  # its square is infinite in float32
    assert gaussian(torch.zeros(1)).action(mean, True).actions.tolist() == mean.tolist()


# A head of one's own.


def test_act_may_be_a_function() -> None:
    def act(outputs: Any, obs: Any, deterministic: bool, generator: torch.Generator) -> PolicyOutput:
        noise = torch.rand(len(obs), generator=generator)
        return PolicyOutput(
            {"steer": outputs[0].argmax(-1), "gas": noise}, {"flag": torch.full((len(obs),), deterministic)}
        )

    first, again = (TorchPolicy(ActorCritic(), act, seed=3).action(observations(), True) for _ in range(2))
    assert first.actions["gas"].tolist() == again.actions["gas"].tolist()
    assert first.context["flag"].tolist() == [True] * 5
    assert isinstance(first.actions["steer"], np.ndarray)


def test_act_must_return_a_policy_output() -> None:
    policy = TorchPolicy(ActorCritic(), lambda outputs, obs, deterministic, generator: outputs[0])
    with pytest.raises(PolicyError, match=r"act returned a float32 tensor \[5, 3\]; legal is PolicyOutput"):
        policy.action(observations(), False)


@pytest.mark.parametrize("act", ["categorial", ""])
def test_an_unknown_act_is_a_value_error(act: str) -> None:
    with pytest.raises(ValueError, match=f"act '{act}' is unknown; legal is 'categorical', 'gaussian' or f"):
        TorchPolicy(ActorCritic(), act)


def test_an_act_that_is_neither_name_nor_function_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="act must be a name or a function, got 3; legal is 'categorical'"):
        TorchPolicy(ActorCritic(), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [ActorCritic, lambda obs: obs])
def test_what_is_no_module_is_a_type_error(module: Any) -> None:
    with pytest.raises(TypeError, match=r"module must be an instance of torch\.nn\.Module"):
        TorchPolicy(module, "categorical")


@pytest.mark.parametrize(
    ("act", "answer", "got"),
    [
        ("categorical", torch.zeros(3), r"a float32 tensor \[3\]"),
        ("categorical", torch.zeros(5), r"a float32 tensor \[5\]"),
        ("categorical", torch.zeros(4, 3), r"a float32 tensor \[4, 3\]"),
        ("categorical", {"logits": 0}, "dict"),
        ("categorical", (torch.zeros(5, 3), torch.zeros(5), None), r"a tuple of \(.*NoneType\)"),
        ("categorical", (torch.zeros(5, 3), torch.zeros(5, 2)), r"float32 tensor \[5, 2\]\)"),
        ("gaussian", torch.zeros(5, 3), r"a float32 tensor \[5, 3\]"),
        ("gaussian", (torch.zeros(5, 3), torch.zeros(2)), r"float32 tensor \[2\]\)"),
        ("gaussian", (torch.zeros(5, 3), 0.5), r"float\)"),
        ("gaussian", (torch.zeros(3), torch.zeros(3)), r"a tuple of \(a float32 tensor \[3\], .*"),
        ("gaussian", (torch.zeros(5, 3), torch.zeros(3), torch.zeros(3)), r"float32 tensor \[3\]\)"),
    ],
)
def test_outputs_of_the_wrong_structure_are_an_error(act: str, answer: Any, got: str) -> None:
    policy = TorchPolicy(Says(lambda obs: answer), act)
    legal = {"categorical": r"logits \[B, n\]", "gaussian": r"\(mean, log_std\)"}[act]
    with pytest.raises(PolicyError, match=rf"the module returned .*{got} for a batch of 5; .*legal is {legal}"):
        policy.action(observations(), False)


# Observations in, arrays out.


def test_observations_keep_their_dtype_but_for_float64() -> None:
    seen = {}

    def look(obs: Any) -> torch.Tensor:
        seen.update({name: leaf.dtype for name, leaf in obs.items()})
        return torch.zeros(2, 2)

    obs = {name: np.zeros(2, name) for name in ("uint8", "int64", "bool", "float32", "float64")}
    TorchPolicy(Says(look), "categorical").action(obs, False)
    assert {name: str(dtype) for name, dtype in seen.items()} == {
        "uint8": "torch.uint8",
        "int64": "torch.int64",
        "bool": "torch.bool",
        "float32": "torch.float32",
        "float64": "torch.float32",
    }


def test_read_only_and_reversed_observations_are_taken() -> None:
    policy = gaussian(torch.zeros(4))
    locked = observations()
    locked.flags.writeable = False
    np.testing.assert_array_equal(policy.action(locked, True).actions, observations())
    np.testing.assert_array_equal(policy.action(observations()[::-1], True).actions, observations()[::-1])


def test_answers_share_no_memory_with_the_call_the_module_or_the_next_answer() -> None:
    buffer = torch.zeros(5)
    policy = gaussian(torch.zeros(4), buffer)
    obs = observations()
    first = policy.action(obs, True)
    raw = policy.forward(obs)
    obs[:] = 77
    buffer[:] = 77
    policy.action(obs, True)
    np.testing.assert_array_equal(first.actions, observations())
    np.testing.assert_array_equal(raw[0], observations())
    assert first.context["value"].tolist() == raw[2].tolist() == [0] * 5


def test_sampled_answers_do_not_change_later() -> None:
    policy = TorchPolicy(ActorCritic(), "categorical", seed=0)
    first = policy.action(observations(), False)
    kept = copy.deepcopy((first.actions, first.context))
    for _ in range(20):
        policy.action(observations() * 3, False)
    np.testing.assert_equal((first.actions, first.context), kept)


def test_forward_gives_the_modules_outputs() -> None:
    module = ActorCritic()
    logits, value = TorchPolicy(module, "categorical").forward(observations())
    expected = module(torch.from_numpy(observations()))
    np.testing.assert_array_equal(logits, expected[0].detach())
    np.testing.assert_array_equal(value, expected[1].detach())


def test_forward_of_a_gaussian_has_a_row_of_log_std_for_each_observation() -> None:
    mean, log_std = gaussian(torch.tensor([1.0, 2.0, 3.0, 4.0])).forward(observations())
    np.testing.assert_array_equal(mean, observations())
    assert log_std.tolist() == [[1, 2, 3, 4]] * 5


def test_one_agent_may_ask_for_its_distribution() -> None:
    mean, log_std = AsyncPolicy(gaussian(torch.zeros(4)), 1).forward(observations()[2])
    np.testing.assert_array_equal(mean, observations()[2])
    assert log_std.shape == (4,)


def test_half_precision_modules_answer_in_float32() -> None:
    policy = TorchPolicy(Says(lambda obs: (obs.bfloat16(), obs[:, 0].bfloat16())), "categorical")
    output = policy.action(observations(), False)
    assert output.context["log_prob"].dtype == output.context["value"].dtype == np.float32
    assert policy.forward(observations())[0].dtype == np.float32


# Seeds.


@pytest.mark.parametrize("act", ["categorical", "gaussian"])
def test_the_same_seed_gives_the_same_draws(act: str) -> None:
    module = ActorCritic() if act == "categorical" else Says(lambda obs: (obs, torch.zeros(4)))

    def draws(policy: TorchPolicy) -> list[Any]:
        return [policy.action(observations(64), False).actions.tolist() for _ in range(3)]

    first = TorchPolicy(module, act, seed=5)
    expected = draws(first)
    torch.manual_seed(0)  # the global generator has no part in it
    assert draws(TorchPolicy(module, act, seed=5)) == expected
    assert draws(first) != expected
    first.seed(5)
    assert draws(first) == expected
    assert draws(TorchPolicy(module, act, seed=6)) != expected


def test_without_a_seed_every_policy_draws_differently() -> None:
    policy, obs = logits_policy([0.0] * 9)
    batch = np.repeat(obs, 64, 0)
    unseeded = [TorchPolicy(policy._module, "categorical").action(batch, False).actions.tolist() for _ in range(2)]
    assert unseeded[0] != unseeded[1]


# Weights.


def test_the_policy_has_its_own_module_in_eval_mode() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    policy = TorchPolicy(module, "categorical")
    before = policy.forward(observations(64))
    with torch.no_grad():
        module[0].weight.fill_(0)
    np.testing.assert_array_equal(policy.forward(observations(64)), before)
    assert module.training


@pytest.mark.parametrize("as_arrays", [False, True])
def test_update_takes_tensors_and_arrays(as_arrays: bool) -> None:
    policy, new = TorchPolicy(ActorCritic(), "categorical"), ActorCritic()
    weights: dict[str, Any] = new.state_dict()
    if as_arrays:
        weights = {name: value.numpy() for name, value in weights.items()}
        for value in weights.values():
            value.flags.writeable = False
    policy.update(weights)
    np.testing.assert_array_equal(policy.forward(observations())[0], new(torch.from_numpy(observations()))[0].detach())


def test_update_copies_the_weights() -> None:
    policy, new = TorchPolicy(ActorCritic(), "categorical"), ActorCritic()
    policy.update(new.state_dict())
    before = policy.forward(observations())[0]
    with torch.no_grad():
        new.head.weight.fill_(0)
    np.testing.assert_array_equal(policy.forward(observations())[0], before)


def test_state_is_a_copy_that_update_takes_back() -> None:
    policy = TorchPolicy(ActorCritic(), "categorical")
    before, saved = policy.forward(observations())[0], policy.state()
    assert not any(value.requires_grad for value in saved.values())
    policy.update({name: torch.zeros_like(value) for name, value in saved.items()})
    assert not policy.forward(observations())[0].any()
    policy.update(saved)
    np.testing.assert_array_equal(policy.forward(observations())[0], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("critic.bias"), "lacks 'critic.bias'"),
        (lambda w: w.update(extra=torch.zeros(1)), "has 'extra', unknown here"),
        (lambda w: w.update({"critic.bias": torch.zeros(2)}), r"'critic.bias' is a float32 tensor \[2\] instead of a "),
        (lambda w: w.update({"critic.bias": "zero"}), "'critic.bias' is str instead of a float32 tensor"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(change: Any, message: str) -> None:
    policy = AsyncPolicy(TorchPolicy(ActorCritic(), "categorical"), 1)
    before = policy.state()
    weights = {name: torch.zeros_like(value) for name, value in before.items()}
    change(weights)
    with pytest.raises(
        ValueError, match=rf"TorchPolicy\(ActorCritic\)\.update: the state_dict {message}.*still in place"
    ):
        policy.update(weights)
    assert all((policy.state()[name] == value).all() for name, value in before.items())
    assert policy.version == 0


def test_update_refuses_a_module() -> None:
    with pytest.raises(TypeError, match=r"got a module; .* pass module\.state_dict\(\)"):
        TorchPolicy(ActorCritic(), "categorical").update(ActorCritic())  # type: ignore[arg-type]


def test_update_refuses_what_is_no_mapping() -> None:
    with pytest.raises(TypeError, match=r"must be a state_dict, got list; legal"):
        TorchPolicy(ActorCritic(), "categorical").update([])  # type: ignore[arg-type]


def test_an_update_never_tears_weights_in_a_forward() -> None:
    class Twins(nn.Module):
        """Two parameters that every update sets alike; the value is their difference."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(20_000))
            self.second = nn.Parameter(torch.zeros(20_000))

        def forward(self, obs: torch.Tensor) -> Any:
            difference = (self.first - self.second).abs().max()
            return torch.zeros(len(obs), 2), difference.expand(len(obs))

    policy = TorchPolicy(Twins(), "categorical")
    done = threading.Event()
    torn = []

    def act() -> None:
        while not done.is_set():
            torn.append(policy.action(np.zeros((1, 1), np.float32), False).context["value"].any())
            weights = policy.state()
            torn.append(not torch.equal(weights["first"], weights["second"]))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    actor = threading.Thread(target=act, daemon=True)
    actor.start()
    try:
        for k in range(300):
            policy.update({name: torch.full((20_000,), float(k)) for name in ("first", "second")})
    finally:
        done.set()
        actor.join(10)
        sys.setswitchinterval(before)
    assert len(torn) > 10 and not any(torn)


# Recurrent modules.


def test_a_module_without_an_initial_state_makes_no_recurrent_policy() -> None:
    policy = TorchPolicy(ActorCritic(), "categorical")
    assert not hasattr(policy, "initial_state")
    assert not AsyncPolicy(policy, 1).is_recurrent
    with pytest.raises(PolicyError, match=r"has no initial_state\(batch_size\).*legal is state=None"):
        policy.action(observations(), False, state=np.zeros(5))


def test_a_recurrent_module_carries_its_state_on() -> None:
    policy = TorchPolicy(Counter(), "categorical")
    state = policy.initial_state(3)
    assert state["steps"].tolist() == [10, 10, 10]
    for step in (11, 12):
        output = policy.action(np.zeros((3, 1), np.float32), False, state=state)
        state = output.state
        assert isinstance(state["steps"], np.ndarray)
        assert state["steps"].tolist() == output.context["value"].tolist() == [step] * 3


def test_a_recurrent_module_starts_afresh_without_a_state() -> None:
    policy = TorchPolicy(Counter(), "categorical")
    assert policy.action(np.zeros((2, 1)), False).state["steps"].tolist() == [11, 11]  # type: ignore[index]
    assert policy.forward(np.zeros((2, 1)))[1].tolist() == [11, 11]


def test_recurrent_agents_share_a_batch_and_keep_their_own_states() -> None:
    policy = AsyncPolicy(TorchPolicy(Counter(), "categorical"), 1)
    first = policy.action(np.zeros(1))
    assert first.state == {"steps": 11}
    assert policy.action(np.zeros(1), state=first.state).state == {"steps": 12}
    assert policy.action(np.zeros(1)).state == {"steps": 11}


def test_a_recurrent_module_must_return_its_new_state() -> None:
    module = Says(None)
    module.initial_state = lambda batch_size: torch.zeros(batch_size, 1)
    module.forward = lambda obs, state: torch.zeros(5, 2)  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match=r"returned a float32 tensor \[5, 2\]; legal is \(outputs, new_state\)"):
        TorchPolicy(module, "categorical").action(observations(), False)


def test_a_state_without_the_batch_axis_in_front_is_an_error() -> None:
    module = Says(None)
    module.initial_state = lambda batch_size: torch.zeros(1, batch_size, 8)
    with pytest.raises(
        PolicyError, match=r"initial_state\(\) has a leaf a float32 tensor \[1, 5, 8\] .*transpose\(0, 1\)"
    ):
        TorchPolicy(module, "categorical").initial_state(5)


# Copies.


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copy_goes_on_where_the_policy_was(remake: Any) -> None:
    policy = TorchPolicy(Counter(), "categorical", seed=1)
    policy.action(np.zeros((64, 1)), False)
    twin = remake(policy)
    assert (
        twin.action(np.zeros((64, 1)), False).actions.tolist()
        == policy.action(np.zeros((64, 1)), False).actions.tolist()
    )
    twin.update({"start": np.float32(50)})
    assert (twin.initial_state(1)["steps"], policy.initial_state(1)["steps"]) == (50, 10)


def test_a_forward_pass_takes_one_thread_unless_told_otherwise_and_leaves_the_setting_alone():
    class Asks(nn.Module):
        def forward(self, obs):
            seen.append(torch.get_num_threads())
            return obs

    seen: list[int] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for num_threads in (1, 2, None):
            TorchPolicy(Asks(), "categorical", num_threads=num_threads).action(np.zeros((2, 2), np.float32))
            TorchPolicy(Asks(), "categorical", num_threads=num_threads).forward(np.zeros((2, 2), np.float32))
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="num_threads must be an int >= 1 or None, got 0"):
        TorchPolicy(Asks(), "categorical", num_threads=0)
