"""A trainer of one's own beside a Towline fleet: it pushes weights by the store and pulls rollouts by the gateway. No engine's
address, no NCCL group, no RPC: what binds the two is a version number.

    python -m examples.external_trainer.trainer examples/external_trainer/run.toml http://127.0.0.1:8100
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from towline.client.gateway import AsyncGateway
from towline.client.rules import Generated
from towline.config import load_settings
from towline.learner.torch_model import from_raw, published, to_raw
from towline.store.base import fetch_base_folder, seed_base
from towline.store.commit import BroughtEpoch
from towline.store.keys import new_write_id
from towline.store.log import Log
from towline.store.manifest import VersionFacts
from towline.store.materialize import materialize
from towline.store.objects import ObjectStore, open_store
from towline.store.versions import write_version

PROMPTS = [[first, second, 3, 1] for first in (5, 9, 12, 20) for second in (2, 7)]
GROUP, NEW_TOKENS, VOCABULARY = 8, 12, 64
LEARNING_RATE = 1e-2
LONGEST_RATIO = 2.0
"""Of truncated importance sampling: a token that the trainer finds so much likelier than its sampler did counts no more."""


def reward(tokens: list[int]) -> float:
    """The share of even tokens: what the policy is to learn."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


class Policy:
    """The model that is trained, and its versions in the run's store. A restarted trainer goes on from the newest one."""

    def __init__(self, objects: ObjectStore, run: str) -> None:
        self._objects, self._log = objects, Log(objects, run)
        self._log.refresh()
        with tempfile.TemporaryDirectory() as folder:
            if not self._log.next_number:  # entry 0: the model that everybody starts from, a Hugging Face folder in bfloat16
                new_model().to(torch.bfloat16).save_pretrained(folder)
                seed_base(objects, self._log, Path(folder), "made by the trainer", None, None)
            else:
                fetch_base_folder(objects, self._log, Path(folder))
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # An epoch is one trainer's turn: opening it fences whoever pushed before.
        self._epoch = BroughtEpoch(self._log, f"external-{new_write_id()}")
        self._state = materialize(objects, self._log, self.version)
        self.model.load_state_dict({name: from_raw(raw).float() for name, raw in self._state.items()}, strict=False)

    @property
    def version(self) -> int:
        return self._epoch.head

    @property
    def depth(self) -> int:
        """How many versions the newest one stands on."""
        return self._log.lineage.depth(self.version)

    def accepted(self, staleness: int) -> int:
        """The oldest version that is at most so many versions behind the newest."""
        return self._log.lineage.path()[-1 - min(staleness, self.depth)]

    def push(self) -> int:
        """The model as it is now, as a delta on the version before; the new version's number. The fleet follows by itself."""
        began, weights = time.perf_counter(), self.model.state_dict()
        state = {name: to_raw(name, published(weights[name], torch.bfloat16)) for name in self._state}
        facts = VersionFacts(depth=self.depth + 1, step=self.depth + 1, batch_cursor=0)
        manifest = write_version(
            self._objects, self._log.run, epoch=self._epoch.epoch, base=self.version, write_id=new_write_id(),
            base_state=self._state, new_state=state, facts=facts, prove=True,
        )  # fmt: skip
        self._state, entry = state, self._epoch.commit(manifest, time.perf_counter() - began)
        return entry.number


def new_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def loss_of(model: Any, groups: list[list[Generated]]) -> tuple[torch.Tensor, float]:
    """Policy gradient with group-normalised advantages; with it the largest difference between the trainer's logprobs and those
    that the samples came with."""
    samples = [sample for group in groups for sample in group]
    prompts = [prompt for prompt, group in zip(PROMPTS, groups, strict=True) for _ in group]
    tokens = torch.tensor([prompt + sample.tokens for prompt, sample in zip(prompts, samples, strict=True)])
    behaviour = torch.tensor([sample.logprobs for sample in samples])
    rewards = torch.tensor([[reward(sample.tokens) for sample in group] for group in groups])
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    logits = model(input_ids=tokens).logits[:, -NEW_TOKENS - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, -NEW_TOKENS:, None]).squeeze(-1)
    ratio = (logprobs.detach() - behaviour).exp()
    loss = -(ratio.clamp(max=LONGEST_RATIO) * advantages[:, None] * logprobs).mean()
    return loss, float((logprobs.detach() - behaviour).abs().max())


async def train(policy: Policy, gateway: AsyncGateway, steps: int, *, staleness: int = 1) -> list[tuple[int, int, float, float]]:
    """For each step (accepted version, new version, mean reward, largest difference of logprobs)."""
    optimizer, done = torch.optim.Adam(policy.model.parameters(), lr=LEARNING_RATE), []
    sampling = {"n": GROUP, "max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
    for _ in range(steps):
        oldest = policy.accepted(staleness)
        # Waits for a replica that serves such a version, and outlives replicas and gateways that die meanwhile.
        calls = [gateway.generate(prompt, sampling=sampling, min_version=oldest, wait_seconds=60) for prompt in PROMPTS]
        groups = await asyncio.gather(*calls)
        loss, difference = loss_of(policy.model, groups)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = sum(reward(sample.tokens) for group in groups for sample in group) / (len(groups) * GROUP)
        done.append((oldest, policy.push(), mean, difference))
        print("accepted >= {} pushed {} reward {:.3f} logprobs differ by {:.3f}".format(*done[-1]), flush=True)
    return done


def main(
    config: Annotated[Path, typer.Argument(help="The run's TOML file, the same that the fleet has.")],
    gateway: Annotated[str, typer.Argument(help="The gateway's URL.")],
    token: Annotated[str, typer.Option(help="A tenant's, where the gateway has tenants.", envvar="TOWLINE_TOKEN")] = "",
    steps: Annotated[int, typer.Option(help="Versions to push.")] = 20,
    staleness: Annotated[int, typer.Option(help="Samples may come from a policy so many versions old.")] = 1,
) -> None:
    """Train on a Towline fleet from outside."""

    async def run() -> None:
        settings = load_settings(config)
        policy = Policy(open_store(settings.store), settings.run.name)
        async with AsyncGateway(gateway, token=token) as client:
            await train(policy, client, steps, staleness=staleness)

    asyncio.run(run())


if __name__ == "__main__":
    typer.run(main)
