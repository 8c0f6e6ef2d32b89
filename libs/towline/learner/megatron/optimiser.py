"""Megatron-Core's AdamW around a rank's model: a step that is taken or left alone whole, and its state parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from towline.config import TrainerSettings
from towline.learner.megatron.architecture import DTYPES
from towline.learner.megatron.model import RankModel

MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
"""Names of a parameter's fp32 tensors."""


class Optimiser:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); matrices alone decay, norms and biases don't.

    `wrapped` is the model to run a training pass on: its gradients are summed, never averaged, over the data parallel ranks.
    """

    def __init__(self, model: RankModel, trainer: TrainerSettings) -> None:
        self._model = model
        self._trainer = trainer
        split = trainer.distributed_optimizer and trainer.dp > 1
        self.wrapped: Any = DistributedDataParallel(
            config=model.config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=split),
            module=model.module,
        )
        dtype = DTYPES[trainer.dtype]
        config = OptimizerConfig(
            optimizer="adam",
            lr=trainer.learning_rate,
            min_lr=0.0,
            weight_decay=trainer.weight_decay,
            adam_beta1=trainer.adam_betas[0],
            adam_beta2=trainer.adam_betas[1],
            adam_eps=1e-8,
            clip_grad=trainer.max_gradient_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=split,
        )
        self._optimiser: Any = get_megatron_optimizer(config, [self.wrapped], use_gloo_process_groups=torch.cuda.is_available())
        self._each: list[Any] = list(getattr(self._optimiser, "chained_optimizers", [self._optimiser]))
        self._split = split
        model.config.grad_scale_func = self._optimiser.scale_loss
        model.config.no_sync_func = self.wrapped.no_sync
        model.config.finalize_model_grads_func = _finalize

    def reload(self) -> None:
        """Take the masters from the model's parameters, after they were loaded."""
        for each in self._each:
            each.reload_model_params()

    def zero(self) -> None:
        self.wrapped.zero_grad_buffer()
        self._optimiser.zero_grad()

    def gradient_norm(self) -> float:
        """The whole model's, before clipping; the same on every rank. After the backward pass."""
        if self._optimiser.prepare_grads():
            return math.inf
        return float(self._optimiser.get_grad_norm())

    def step(self, rate: float, norm: float) -> None:
        """Clip by `norm` and take the step."""
        for group in self._optimiser.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self._trainer.weight_decay * group["wd_mult"]
        for each in self._each:
            if parameters := each.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, self._trainer.max_gradient_norm, norm)
        self._optimiser.step_with_ready_grads()

    def read(self, name: str, field: str) -> Tensor:
        """f32, shaped like the rank's parameter: MASTER, or one of MOMENTS (0 before the first step). All data ranks call."""
        parameter = self._model.parameters[name]
        found = self._own(parameter, field)
        if not self._split:
            return (
                torch.zeros_like(parameter, dtype=torch.float32)
                if found is None
                else found.detach().float().view(parameter.shape)
            )
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if found is not None:
            start, end = self._range(parameter)
            whole[start:end] = found.detach().view(-1)
        dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
        return whole.view(parameter.shape)

    def write(self, name: str, field: str, value: Tensor) -> None:
        """The opposite of `read`; writing MASTER sets the parameter too."""
        parameter = self._model.parameters[name]
        with torch.no_grad():
            if field == MASTER:
                parameter.copy_(value)
            main = self._main(parameter)
            if main is None:
                return
            part = value.reshape(-1)
            if self._split:
                start, end = self._range(parameter)
                part = part[start:end]
            if field == MASTER:
                main.copy_(part.view(main.shape))
            else:
                self._state_of(parameter)[field] = part.to(torch.float32).view(main.shape).clone()

    @property
    def steps(self) -> int:
        """That AdamW has taken, for its bias correction."""
        for each in self._each:
            if not USING_PYTORCH_OPTIMIZER:
                return int(each.optimizer.param_groups[0].get("step", 0))
            for state in each.optimizer.state.values():
                return int(state["step"])
        return 0

    def set_steps(self, steps: int) -> None:
        """After the moments were written."""
        for each in self._each:
            for group in each.optimizer.param_groups:
                if not USING_PYTORCH_OPTIMIZER:
                    group["step"] = steps
                    continue
                for main in group["params"]:
                    if main in each.optimizer.state:
                        each.optimizer.state[main]["step"] = torch.tensor(float(steps))

    def reset(self) -> None:
        """As before the first step."""
        for each in self._each:
            each.optimizer.state.clear()

    def _own(self, parameter: Any, field: str) -> Tensor | None:
        """What this rank has of it; None where it has nothing (yet)."""
        main = self._main(parameter)
        if main is None or field == MASTER:
            return main
        found: Tensor | None = self._state_of(parameter).get(field)
        return found

    def _main(self, parameter: Any) -> Any:
        if self._split:
            for each in self._each:
                if parameter in each.model_param_group_index_map:
                    group, order = each.model_param_group_index_map[parameter]
                    return each.optimizer.param_groups[group]["params"][order]
            return None
        return getattr(parameter, "main_param", parameter)

    def _state_of(self, parameter: Any) -> Any:
        main = self._main(parameter)
        for each in self._each:
            if any(main is other for group in each.optimizer.param_groups for other in group["params"]):
                return each.optimizer.state[main]
        raise KeyError("a parameter that no optimiser has")

    def _range(self, parameter: Any) -> tuple[int, int]:
        for each in self._each:
            if parameter in each.model_param_group_index_map:
                found = each._get_model_param_range_map(parameter)["param"]
                return int(found.start), int(found.end)
        raise KeyError("a parameter that no optimiser has")


def _finalize(model: list[Any], _: Any = None, **others: Any) -> None:
    """Megatron-Core's reductions without its division by a number of tokens: the loss has its weights already."""
    finalize: Callable[..., None] = finalize_model_grads
    finalize(model, None, **others)
