from __future__ import annotations

import asyncio
import sys
import threading
import time
import types

import numpy as np
import pytest

from contract import samples
from towline.errors import UsageError, VerifierError
from towline.verifiers.base import Reward, Verifier, check_reward, check_rewards, load_verifier, sample_of
from towline.verifiers.runner import Runner
from towline.verifiers.tokenizer import LazyTokenizer


@pytest.fixture
def user_module(monkeypatch):
    """A module of the user's own, as it lies beside the run's TOML file."""
    module = types.ModuleType("my_rewards")

    class Scaled:
        def __init__(self, scale=1.0):
            self.scale = scale

        def __call__(self, sample):
            return self.scale

    async def asynchronous(sample):
        return 0.5

    module.Scaled = Scaled
    module.NoCall = type("NoCall", (), {})
    module.plain = lambda sample, *, bonus=0.0: 1.0 + bonus
    module.asynchronous = asynchronous
    module.constant = 3
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module


def test_functions_classes_and_coroutines_load_by_import_path(user_module):
    assert load_verifier("my_rewards:plain").call(None) == 1.0
    assert load_verifier("my_rewards:plain", {"bonus": 0.5}).call(None) == 1.5
    assert load_verifier("my_rewards:Scaled", {"scale": 4.0}).call(None) == 4.0
    assert load_verifier("my_rewards:asynchronous").is_async
    assert not load_verifier("my_rewards:Scaled").is_async


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("my_rewards:missing", {}, "has no 'missing'"),
        ("no_such_module:f", {}, "no module 'no_such_module'"),
        ("my_rewards:constant", {}, "isn't callable"),
        ("my_rewards:NoCall", {}, "__call__"),
        ("my_rewards:plain", {"bonsu": 1}, "bonsu"),
        ("my_rewards:Scaled", {"scael": 1}, "scael"),
    ],
)
def test_a_wrong_path_or_argument_is_one_line_that_names_the_setting(user_module, path, arguments, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_verifier(path, arguments)
    assert caught.value.message.startswith("reward.function")
    assert "\n" not in caught.value.message


def test_a_sample_is_cut_where_the_policy_begins():
    trajectory = samples.trajectory()
    sample = sample_of(trajectory, LazyTokenizer(lambda: pytest.fail("nobody asked for text")))
    assert sample.prompt_tokens.tolist() == [5, 6, 7]
    assert sample.response_tokens.tolist() == [8, 9, 10, 2]
    assert sample.policy_mask.tolist() == [1, 1, 0, 1]
    assert (sample.policy_tokens, sample.finish, sample.reference) == (3, "stop", {"answer": "12"})


def test_a_reward_is_a_finite_number():
    assert check_reward(np.float32(0.5), "f") == Reward(0.5)
    assert check_reward(True, "f") == Reward(1.0)
    assert check_reward(Reward(1, {"a": np.float64(2)}), "f") == Reward(1.0, {"a": 2.0})
    for bad in (float("nan"), float("inf"), None, "1", Reward(1.0, {"a": float("nan")}), Reward("x")):  # type: ignore[arg-type]
        with pytest.raises(VerifierError, match="f"):
            check_reward(bad, "f")


def test_a_group_has_as_many_rewards_as_samples():
    assert check_rewards([1, 0.5], 2, "f") == [Reward(1.0), Reward(0.5)]
    assert check_rewards(np.array([1.0, 2.0]), 2, "f") == [Reward(1.0), Reward(2.0)]
    for bad in ([1.0], 1.0, "ab", [1.0, None]):
        with pytest.raises(VerifierError):
            check_rewards(bad, 2, "f")


def runner(call, *, is_async=False, timeout_seconds=5.0, concurrency=8):
    return Runner(Verifier("mine", call, is_async), timeout_seconds=timeout_seconds, concurrency=concurrency)


async def test_calls_run_beside_each_other_and_no_more_than_allowed():
    running, most, lock = 0, 0, threading.Lock()

    def call(value):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.03)
        with lock:
            running -= 1
        return value

    pool = runner(call, concurrency=4)
    assert await asyncio.gather(*[pool.run(i) for i in range(12)]) == list(range(12))
    assert most == 4
    pool.close()


async def test_a_call_over_its_time_fails_alone_and_its_thread_is_replaced():
    release = threading.Event()

    def call(value):
        if value == "stuck":
            release.wait(10)
        return value

    pool = runner(call, timeout_seconds=0.1, concurrency=1)
    with pytest.raises(VerifierError, match=r"ran over its 0\.1 s") as caught:
        await pool.run("stuck")
    assert caught.value.code == "verifier_timeout"
    assert pool.stuck == 1
    assert await pool.run("next") == "next"
    release.set()
    for _ in range(100):
        if pool.stuck == 0:
            break
        await asyncio.sleep(0.01)
    assert pool.stuck == 0
    pool.close()


async def test_an_async_call_over_its_time_fails():
    async def call(value):
        await asyncio.sleep(value)
        return value

    pool = runner(call, is_async=True, timeout_seconds=0.05)
    with pytest.raises(VerifierError, match="ran over"):
        await pool.run(5)
    assert await pool.run(0) == 0


@pytest.mark.parametrize("error", [ValueError("bad\nnews"), TimeoutError("its own"), SystemExit(3), StopIteration()])
async def test_what_a_verifier_raises_becomes_one_line(error):
    def call(_):
        raise error

    pool = runner(call)
    with pytest.raises(
        VerifierError, match=f"mine raised .*{type(error).__name__ if isinstance(error, Exception) else ''}"
    ) as caught:
        await pool.run(None)
    assert "\n" not in caught.value.message
    assert "ran over" not in caught.value.message
    assert pool.stuck == 0
    pool.close()


def test_a_lazy_tokenizer_loads_once():
    loads = []

    class Plain:
        vocabulary = 7

        def decode(self, token_ids, *, skip_special_tokens=False):
            return f"{list(token_ids)}{skip_special_tokens}"

    lazy = LazyTokenizer(lambda: loads.append(1) or Plain())
    assert loads == []
    assert lazy.decode([1], skip_special_tokens=True) == "[1]True"
    assert lazy.vocabulary == 7
    assert loads == [1]


class Versioned:
    version = 3

    def __call__(self, sample: object) -> float:
        return 0.0


def test_a_verifiers_version_is_part_of_its_name() -> None:
    assert load_verifier("unit.verifiers.test_base:Versioned").name == "unit.verifiers.test_base:Versioned@3"
