"""What counts as a policy, and the AsyncPolicy: who runs together, and when weights may change."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from envrunner.errors import PolicyError
from envrunner.policy import AsyncPolicy, Policy, as_policy
from envrunner.types import PolicyOutput


class Doubler:
    """Answers twice the observation, with its weight and the flag it was asked with; keeps a diary."""

    def __init__(self) -> None:
        self.weight = 0
        self.batches: list[list[float]] = []
        self.flags: list[bool] = []

    def action(self, obs: Any, deterministic: bool) -> PolicyOutput:
        self.batches.append([float(x) for x in obs])
        self.flags.append(deterministic)
        context = {"weight": np.full(len(obs), self.weight), "flag": np.full(len(obs), deterministic)}
        return PolicyOutput(2 * obs, context)

    def forward(self, obs: Any) -> Any:
        self.batches.append([float(x) for x in obs])
        return -obs, 3 * obs

    def update(self, state: int) -> None:
        self.weight = state

    def state(self) -> int:
        return self.weight

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


class Held(Doubler):
    """Stops inside some of its batches (0, 1, ...) until it is told to go on."""

    def __init__(self, *held_batches: int) -> None:
        super().__init__()
        self.held_batches = held_batches
        self.busy, self.go = threading.Event(), threading.Event()

    def action(self, obs: Any, deterministic: bool) -> PolicyOutput:
        if len(self.batches) in self.held_batches:
            self.busy.set()
            assert self.go.wait(60)
            self.busy.clear()
            self.go.clear()
        return super().action(obs, deterministic)


class Agent(threading.Thread):
    """One thread that asks once."""

    def __init__(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: ask(*args, **kwargs)
        self.answer: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._call()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.join(60)
        assert not self.is_alive(), "the agent still waits"
        if self.error is not None:
            raise self.error
        return self.answer


def give_way() -> None:
    """Let another thread run now: unlike `os.sched_yield` in older Pythons, this releases the GIL."""
    time.sleep(0)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        give_way()


def waiting_agents(policy: AsyncPolicy, num_agents: int, deterministic: bool = False) -> list[Agent]:
    """Agents 0, 1, ... that ask one after the other, each about its own number."""
    agents = []
    for i in range(num_agents):
        before = policy.waiting
        agents.append(Agent(policy.action, np.float64(i), deterministic))
        until(lambda before=before: policy.waiting == before + 1)  # type: ignore[misc]
    return agents


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads change places as often as CPython can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# What counts as a policy.


def test_importing_policies_loads_no_torch() -> None:
    code = (
        "import sys; from envrunner.policy import AsyncPolicy; "
        "AsyncPolicy(lambda obs: obs, 4).run_batch([1]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_torch_policy_is_found_on_first_use() -> None:
    from envrunner.policy import TorchPolicy

    assert TorchPolicy.__name__ == "TorchPolicy"


def test_an_unknown_name_of_the_module_is_an_attribute_error() -> None:
    import envrunner.policy

    with pytest.raises(AttributeError, match="no attribute 'Polizei'; it has: AsyncPolicy"):
        _ = envrunner.policy.Polizei


def test_a_policy_is_taken_as_it_is() -> None:
    policy = Doubler()
    assert isinstance(policy, Policy)
    assert as_policy(policy, "me") is policy
    assert AsyncPolicy(policy, 1).policy is policy


def test_a_callable_gets_the_observations_and_nothing_else() -> None:
    output, version = AsyncPolicy(lambda obs: obs + 1, 1).run_batch(np.arange(3), env_ids=np.arange(3))
    assert output.actions.tolist() == [1, 2, 3]
    assert (output.context, output.state, version) == ({}, None, 0)


def test_a_callable_may_answer_with_a_policy_output() -> None:
    answer = PolicyOutput(np.zeros(2), {"q": np.ones(2)})
    assert AsyncPolicy(lambda obs: answer, 1).run_batch(np.zeros(2))[0] is answer


def test_a_callable_gets_what_its_signature_names() -> None:
    def act(obs: Any, env_ids: Any, *, deterministic: bool) -> Any:
        return env_ids * 10 + deterministic

    output, _ = AsyncPolicy(act, 1).run_batch(np.zeros(2), True, env_ids=np.array([4, 7]))
    assert output.actions.tolist() == [41, 71]


def test_a_callable_with_keywords_gets_everything() -> None:
    seen = {}

    def act(obs: Any, **keywords: Any) -> Any:
        seen.update(keywords)
        return obs

    AsyncPolicy(act, 1).run_batch(np.zeros(2), env_ids=np.arange(2))
    assert sorted(seen) == ["deterministic", "env_ids", "state"]


def test_a_callable_may_call_its_observation_state() -> None:
    output, _ = AsyncPolicy(lambda state, **keywords: state + 1, 1).run_batch(np.arange(2))
    assert output.actions.tolist() == [1, 2]


def test_a_policy_gets_state_and_env_ids_only_where_its_signature_names_them() -> None:
    class NamesEnvIds(Doubler):
        def action(self, obs: Any, deterministic: bool, env_ids: Any = None) -> PolicyOutput:  # type: ignore[override]
            return PolicyOutput(env_ids)

    assert AsyncPolicy(Doubler(), 1).run_batch(np.zeros(1), env_ids=np.array([5]))[0].actions.tolist() == [0]
    assert AsyncPolicy(NamesEnvIds(), 1).run_batch(np.zeros(1), env_ids=np.array([5]))[0].actions.tolist() == [5]


def test_a_callable_has_no_weights() -> None:
    policy = AsyncPolicy(lambda obs: obs, 1)
    assert policy.state() is None
    with pytest.raises(PolicyError, match=r"no weights that update\(\) could replace.*TorchPolicy"):
        policy.update({})
    assert policy.version == 0
    with pytest.raises(PolicyError, match=r"no distribution parameters for forward\(\)"):
        policy.forward(np.zeros(1))


def test_a_bare_torch_module_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"my loop: .*bare torch module, Linear,.*TorchPolicy\(module, act='categ"):
        as_policy(torch.nn.Linear(2, 2), "my loop")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Doubler, r"must be an instance, got the class Doubler; legal is .* Pass Doubler\(\.\.\.\)"),
        (None, r"got None \(NoneType\); legal is a Policy"),
        ("ppo", r"got 'ppo' \(str\); legal is a Policy"),
        (lambda: 0, r"cannot be called as \(obs\): too many positional arguments"),
        (lambda obs, rng: 0, r"cannot be called as \(obs\): missing a required argument: 'rng'"),
        (lambda obs, deterministic, /: 0, r"cannot be called as \(obs\): missing"),
    ],
)
def test_what_is_no_policy_is_a_type_error(policy: Any, message: str) -> None:
    with pytest.raises(TypeError, match=r"^my loop: .*" + message):
        as_policy(policy, "my loop")


def test_half_a_policy_is_told_what_it_lacks() -> None:
    class Half:
        def action(self, obs: Any, deterministic: bool) -> Any: ...

        def state(self) -> Any: ...

    with pytest.raises(TypeError, match=r"Half has action\(\) but lacks forward, update; legal"):
        as_policy(Half(), "my loop")


def test_a_policy_that_takes_no_flag_is_refused() -> None:
    class NoFlag(Doubler):
        def action(self, obs: Any) -> Any:  # type: ignore[override]
            return obs

    with pytest.raises(TypeError, match=r"NoFlag.action\(obs: .*cannot be called as \(obs, deterministic\)"):
        AsyncPolicy(NoFlag(), 1)


def test_a_recurrent_policy_must_take_a_state() -> None:
    class Forgetful(Doubler):
        def initial_state(self, batch_size: int) -> Any:
            return np.zeros(batch_size)

    with pytest.raises(TypeError, match=r"Forgetful has initial_state\(\), but its signature does not take state"):
        AsyncPolicy(Forgetful(), 1)


def test_an_async_policy_is_not_wrapped_twice() -> None:
    with pytest.raises(TypeError, match=r"AsyncPolicy already.* wrap its \.policy"):
        AsyncPolicy(AsyncPolicy(Doubler(), 1), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch_size": 0}, "AsyncPolicy: max_batch_size must be at least 1, got 0; legal is 1, 2, ..."),
        ({"max_batch_size": 4, "min_batch_size": 0}, "AsyncPolicy: min_batch_size must be at least 1, got 0"),
        ({"max_batch_size": 4, "min_batch_size": 5}, "min_batch_size must be at most max_batch_size, got 5 > 4"),
        ({"max_batch_size": 4, "max_wait": -1}, "max_wait must be seconds >= 0, or None for no limit; got -1"),
        ({"max_batch_size": 4, "max_wait": float("nan")}, "got nan"),
    ],
)
def test_bad_batch_sizes_are_value_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncPolicy(Doubler(), **arguments)


def test_a_batch_size_that_is_no_int_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"max_batch_size must be an int, got 4\.0 \(float\)"):
        AsyncPolicy(Doubler(), 4.0)  # type: ignore[arg-type]


# Batching the agents.


def test_agents_wait_for_a_full_batch() -> None:
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size=8)
    policy.increment_agents(1000)
    agents = waiting_agents(policy, 7)
    assert inner.sizes == []
    agents.append(Agent(policy.action, np.float64(7)))
    assert [agent.result().actions for agent in agents] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert inner.sizes == [8]
    assert policy.waiting == 0


def test_fewer_agents_than_a_batch_wait_for_one_another_only() -> None:
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size=8)
    policy.increment_agents(3)
    agents = waiting_agents(policy, 2)
    agents.append(Agent(policy.action, np.float64(2)))
    assert [agent.result().actions for agent in agents] == [0, 2, 4]
    assert inner.sizes == [3]


def test_an_agent_that_leaves_is_waited_for_no_longer() -> None:
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size=8)
    policy.increment_agents(3)
    agents = waiting_agents(policy, 2)
    assert inner.sizes == []
    policy.decrement_agents()
    assert [agent.result().actions for agent in agents] == [0, 2]
    assert inner.sizes == [2]


def test_a_minimum_below_the_maximum_is_enough() -> None:
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size=8, min_batch_size=2)
    policy.increment_agents(8)
    agents = [*waiting_agents(policy, 1), Agent(policy.action, np.float64(1))]
    assert [agent.result().actions for agent in agents] == [0, 2]
    assert inner.sizes == [2]


def test_an_agent_that_nobody_registered_runs_at_once() -> None:
    policy = AsyncPolicy(Doubler(), max_batch_size=8)
    assert Agent(policy.action, np.float64(3)).result().actions == 6


def test_more_agents_than_are_registered_do_not_hang() -> None:
    policy = AsyncPolicy(Doubler(), max_batch_size=8)
    policy.increment_agents(2)
    agents = [Agent(policy.action, np.float64(i)) for i in range(4)]
    assert [agent.result().actions for agent in agents] == [0, 2, 4, 6]


def test_max_wait_serves_an_agent_whose_company_never_comes() -> None:
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size=8, max_wait=0.01)
    policy.increment_agents(8)
    assert Agent(policy.action, np.float64(1)).result().actions == 2
    assert inner.sizes == [1]


def test_the_longest_waiting_go_first() -> None:
    inner = Held(0)
    policy = AsyncPolicy(inner, max_batch_size=2)
    policy.increment_agents(5)
    loop = Agent(policy.run_batch, np.array([9.0]))
    assert inner.busy.wait(60)
    agents = waiting_agents(policy, 5)
    inner.go.set()
    loop.result()
    for agent in agents[:4]:
        agent.result()
    policy.decrement_agents(4)
    agents[4].result()
    assert inner.batches == [[9], [0, 1], [2, 3], [4]]


def test_an_answered_agent_does_not_sit_through_the_batches_of_others() -> None:
    inner = Held(0, 3)
    policy = AsyncPolicy(inner, max_batch_size=2)
    policy.increment_agents(6)
    loop = Agent(policy.run_batch, np.array([9.0]))
    assert inner.busy.wait(60)
    agents = waiting_agents(policy, 6)
    inner.go.set()
    loop.result()
    assert [agent.result().actions for agent in agents[:4]] == [0, 2, 4, 6]
    assert inner.busy.wait(60)  # agents 4 and 5 are still inside
    inner.go.set()
    assert [agent.result().actions for agent in agents[4:]] == [8, 10]


def test_a_batch_with_both_kinds_of_agents_is_split() -> None:
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size=4)
    policy.increment_agents(4)
    flags = [True, False, True, False]
    agents = [Agent(policy.action, np.float64(i), flag) for i, flag in enumerate(flags)]
    answers = [agent.result() for agent in agents]
    assert [answer.context["flag"] for answer in answers] == flags
    assert [answer.actions for answer in answers] == [0, 2, 4, 6]
    assert sorted(inner.flags) == [False, True]
    assert inner.sizes == [2, 2]


def test_actions_and_forwards_wait_together_and_run_apart() -> None:
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size=2)
    policy.increment_agents(2)
    acting, looking = Agent(policy.action, np.float64(1)), Agent(policy.forward, np.float64(2))
    assert acting.result().actions == 2
    assert looking.result() == (-2, 6)
    assert inner.sizes == [1, 1]


def test_nested_observations_and_actions_are_stacked_and_split() -> None:
    def act(obs: Any) -> Any:
        assert obs["image"].shape == (2, 3, 4) and obs["pair"][1].shape == (2,)
        return {"move": obs["image"].sum((1, 2)), "say": (obs["pair"][0],)}

    policy = AsyncPolicy(act, max_batch_size=2)
    policy.increment_agents(2)
    agents = [Agent(policy.action, {"image": np.full((3, 4), i), "pair": (i, 5)}) for i in range(2)]
    assert [agent.result().actions for agent in agents] == [{"move": 0, "say": (0,)}, {"move": 12, "say": (1,)}]


def test_an_agents_answer_is_its_own_memory() -> None:
    buffer = np.zeros((1, 2))
    policy = AsyncPolicy(lambda obs: buffer, 1)
    answer = policy.action(np.float64(0)).actions
    buffer[:] = 7
    assert answer.tolist() == [0, 0]


def test_leaving_more_often_than_coming_is_an_error() -> None:
    policy = AsyncPolicy(Doubler(), 1)
    policy.increment_agents(2)
    with pytest.raises(ValueError, match=r"got 3; legal is 0 \.\. 2\. Call increment_agents"):
        policy.decrement_agents(3)
    assert policy.live_agents == 2
    with pytest.raises(ValueError, match="increment_agents: n must be at least 0, got -1"):
        policy.increment_agents(-1)


# Versions and updates.


def test_update_serves_who_waits_with_the_old_weights() -> None:
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size=8)
    policy.increment_agents(8)
    agents = waiting_agents(policy, 3)
    policy.update(5)
    assert [agent.result().context["weight"] for agent in agents] == [0, 0, 0]
    assert (policy.version, policy.state(), inner.sizes) == (1, 5, [3])


def test_update_serves_at_most_a_full_batch_at_a_time() -> None:
    inner = Held(0)
    policy = AsyncPolicy(inner, max_batch_size=3)
    policy.increment_agents(100)
    loop = Agent(policy.run_batch, np.array([9.0]))
    assert inner.busy.wait(60)
    agents = waiting_agents(policy, 5)
    updater = Agent(policy.update, 1)
    inner.go.set()
    for thread in (loop, updater, *agents):
        thread.result()
    assert inner.batches == [[9], [0, 1, 2], [3, 4]]


def test_run_batch_tells_the_version_that_acted() -> None:
    policy = AsyncPolicy(Doubler(), 8)
    for weight in range(4):
        output, version = policy.run_batch(np.zeros(2))
        assert version == weight
        assert output.context["weight"].tolist() == [weight, weight]
        policy.update(weight + 1)


def test_a_failed_update_passes_through_and_keeps_the_version() -> None:
    class Picky(Doubler):
        def update(self, state: int) -> None:
            raise ValueError("no such weights")

    policy = AsyncPolicy(Picky(), 8)
    with pytest.raises(ValueError, match="no such weights"):
        policy.update(1)
    assert policy.version == 0
    assert policy.run_batch(np.ones(1))[1] == 0


class TwoPart(Doubler):
    """Two weights that are set one after the other; an action reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.other = 0

    def action(self, obs: Any, deterministic: bool) -> PolicyOutput:
        first = self.weight
        give_way()
        return PolicyOutput(np.full(len(obs), first - self.other))

    def update(self, state: int) -> None:
        self.weight = state
        give_way()
        self.other = state

    def state(self) -> Any:
        first = self.weight
        give_way()
        return first - self.other


@pytest.mark.usefixtures("eager_switching")
def test_an_update_never_falls_into_a_forward() -> None:
    policy = AsyncPolicy(TwoPart(), 8)
    trainer = Agent(lambda: [policy.update(weight) for weight in range(500)])

    def torn(look: Callable[[], Any]) -> bool:
        return any(look() != 0 for _ in iter(trainer.is_alive, False))

    lookers = [
        Agent(torn, lambda: policy.run_batch(np.zeros(1))[0].actions[0]),
        Agent(torn, lambda: policy.action(np.float64(0)).actions),
        Agent(torn, policy.state),
    ]
    assert [looker.result() for looker in lookers] == [False, False, False]
    trainer.result()
    assert policy.version == 500


# Failures.


class Fragile(Doubler):
    def action(self, obs: Any, deterministic: bool) -> PolicyOutput:
        if (obs < 0).any():
            raise ZeroDivisionError("negative")
        return super().action(obs, deterministic)


def test_a_policy_that_raises_is_named_with_its_cause() -> None:
    policy = AsyncPolicy(Fragile(), 8)
    with pytest.raises(
        PolicyError, match=r"policy Fragile raised ZeroDivisionError in action\(\) on a batch of 3: neg"
    ) as caught:
        policy.run_batch(np.full(3, -1.0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert policy.run_batch(np.ones(1))[0].actions.tolist() == [2]


def test_a_failure_reaches_every_agent_of_the_batch_and_only_it() -> None:
    policy = AsyncPolicy(Fragile(), max_batch_size=3)
    policy.increment_agents(3)
    agents = [Agent(policy.action, np.float64(x)) for x in (-1, 1, 2)]
    errors = []
    for agent in agents:
        with pytest.raises(PolicyError, match="ZeroDivisionError") as caught:
            agent.result()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3
    agents = [Agent(policy.action, np.float64(x)) for x in (3, 1, 2)]
    assert [agent.result().actions for agent in agents] == [6, 2, 4]


def test_observations_that_do_not_stack_are_an_error_for_all() -> None:
    policy = AsyncPolicy(lambda obs: obs, max_batch_size=2)
    policy.increment_agents(2)
    agents = [Agent(policy.action, np.zeros(n)) for n in (2, 3)]
    for agent in agents:
        with pytest.raises(PolicyError, match="the observations of 2 agents do not form a batch"):
            agent.result()


@pytest.mark.parametrize("answer", [np.float64(3), np.zeros(5), PolicyOutput(np.zeros(1), {"value": np.zeros(())})])
def test_an_answer_without_a_row_for_each_agent_is_an_error(answer: Any) -> None:
    policy = AsyncPolicy(lambda obs: answer, 1)
    with pytest.raises(PolicyError, match=r"for a batch of 1; legal is \[1, \.\.\.\], a row for each"):
        policy.action(np.zeros(2))


def test_an_answer_that_numpy_cannot_read_is_an_error() -> None:
    torch = pytest.importorskip("torch")
    policy = AsyncPolicy(lambda obs: torch.zeros(1, requires_grad=True), 1)
    with pytest.raises(PolicyError, match="actions is a Tensor that NumPy cannot read"):
        policy.action(np.zeros(2))


def test_a_forgotten_return_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"answered None to a batch of 2; legal is .* Is a return missing\?"):
        AsyncPolicy(lambda obs: None, 1).run_batch(np.zeros(2))


def test_a_keyboard_interrupt_passes_through_and_leaves_the_others_waiting() -> None:
    class Interrupted(Doubler):
        hit = False

        def action(self, obs: Any, deterministic: bool) -> PolicyOutput:
            if not self.hit:
                self.hit = True
                raise KeyboardInterrupt
            return super().action(obs, deterministic)

    policy = AsyncPolicy(Interrupted(), max_batch_size=2)
    policy.increment_agents(2)
    [other] = waiting_agents(policy, 1)
    with pytest.raises(KeyboardInterrupt):
        policy.action(np.float64(5))
    assert policy.waiting == 1
    policy.decrement_agents()
    assert other.result().actions == 0
    assert policy.run_batch(np.ones(1))[0].actions.tolist() == [2]


# Optional methods.


class Counter(Doubler):
    """Recurrent: counts its steps from 100, in a nested state."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    def initial_state(self, batch_size: int) -> Any:
        return {"steps": np.full(batch_size, 100)}

    def action(self, obs: Any, deterministic: bool, *, state: Any = None) -> PolicyOutput:  # type: ignore[override]
        steps = state["steps"] + 1
        return PolicyOutput(steps, {}, {"steps": steps})

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)


def test_a_policy_without_an_initial_state_is_not_recurrent() -> None:
    policy = AsyncPolicy(Doubler(), 1)
    assert not policy.is_recurrent
    assert policy.initial_state(3) is None


def test_an_initial_state_makes_a_policy_recurrent() -> None:
    policy = AsyncPolicy(Counter(), 1)
    assert policy.is_recurrent
    assert policy.initial_state(2)["steps"].tolist() == [100, 100]


def test_agents_of_a_recurrent_policy_start_with_a_fresh_state_and_carry_it_on() -> None:
    policy = AsyncPolicy(Counter(), max_batch_size=2)
    policy.increment_agents(2)
    old, new = Agent(policy.action, np.zeros(2), state={"steps": 6}), Agent(policy.action, np.zeros(2))
    assert (old.result().actions, new.result().actions) == (7, 101)
    assert new.result().state == {"steps": 101}


def test_a_recurrent_policy_that_answers_no_state_is_an_error() -> None:
    class Amnesic(Counter):
        def action(self, obs: Any, deterministic: bool, *, state: Any = None) -> PolicyOutput:  # type: ignore[override]
            return PolicyOutput(obs)

    with pytest.raises(PolicyError, match=r"Amnesic has initial_state\(\), but its answer .* carries no state"):
        AsyncPolicy(Amnesic(), 1).run_batch(np.zeros(1), state={"steps": np.zeros(1)})


def test_a_callable_object_keeps_its_seed_and_its_initial_state() -> None:
    class Walker:
        seeded = None

        def __call__(self, obs: Any, state: Any) -> PolicyOutput:
            return PolicyOutput(state, {}, state + 1)

        def initial_state(self, batch_size: int) -> Any:
            return np.zeros(batch_size)

        def seed(self, seed: int) -> None:
            self.seeded = seed

    walker = Walker()
    policy = AsyncPolicy(walker, 1)
    policy.seed(4)
    assert walker.seeded == 4
    assert policy.action(np.zeros(1)).state == 1


def test_seed_reaches_a_policy_that_has_one_and_no_other() -> None:
    counter = Counter()
    AsyncPolicy(counter, 1).seed(3)
    assert counter.seeds == [3]
    AsyncPolicy(Doubler(), 1).seed(3)


# All at once.


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("max_wait", [None, 0.0005])
@pytest.mark.parametrize(("max_batch_size", "min_batch_size"), [(8, None), (3, 2), (1, 1)])
def test_under_stress_everybody_gets_the_answer_to_its_own_question(
    max_batch_size: int, min_batch_size: int | None, max_wait: float | None
) -> None:
    num_agents, num_requests = 8, 200
    inner = Doubler()
    policy = AsyncPolicy(inner, max_batch_size, min_batch_size, max_wait)

    def agent(index: int) -> None:
        dice = random.Random(index)
        policy.increment_agents()
        for k in range(num_requests):
            obs, flag = np.float64(1000 * index + k), dice.random() < 0.3
            away = dice.random() < 0.1  # asks without being registered
            if away:
                policy.decrement_agents()
            if dice.random() < 0.1:
                assert policy.forward(obs) == (-obs, 3 * obs)
            else:
                oldest = policy.version
                answer = policy.action(obs, flag)
                assert (answer.actions, answer.context["flag"]) == (2 * obs, flag)
                assert oldest <= answer.context["weight"] <= policy.version
            if away:
                policy.increment_agents()
        policy.decrement_agents()

    agents = [Agent(agent, index) for index in range(num_agents)]

    def busy() -> bool:
        return any(thread.is_alive() for thread in agents)

    def loop() -> None:
        while busy():
            output, version = policy.run_batch(np.array([-1.0, -2.0]))
            assert output.context["weight"].tolist() == [version, version]

    def trainer() -> None:
        while busy():
            policy.update(policy.version + 1)

    def crowd() -> None:
        dice = random.Random(99)
        while busy():
            ghosts = dice.randrange(1, 10)
            policy.increment_agents(ghosts)
            give_way()
            policy.decrement_agents(ghosts)

    helpers = [Agent(job) for job in (loop, trainer, crowd)]
    for thread in (*agents, *helpers):
        thread.join(60)
        assert not thread.is_alive(), "somebody hangs"
        thread.result()
    assert (policy.waiting, policy.live_agents) == (0, 0)
    from_agents = [batch for batch in inner.batches if batch[0] >= 0]
    assert max(len(batch) for batch in from_agents) <= max_batch_size
    expected = [1000 * index + k for index in range(num_agents) for k in range(num_requests)]
    assert sorted(obs for batch in from_agents for obs in batch) == expected
