"""The one file that imports deepspeed: weights, gradients and moments that ranks share (ZeRO, arXiv 1910.02054)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import utils as zero
from torch import Tensor, distributed
from torch.nn import Module, Parameter
from torch.nn.functional import pad

from mempo.config import Optim
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.trainers import Objective
from mempo.trainers.gradient import decay_groups

MOMENTS = ("exp_avg", "exp_avg_sq")


def join(runtime: Runtime, store: Path) -> None:
    """Make this process, under torchrun, one of ``runtime.deepspeed.ranks``, which meet through the file ``store``."""
    ranks = runtime.deepspeed.ranks
    if runtime.device == "cuda":
        if torch.cuda.device_count() < ranks:
            raise ValueError(f"runtime.deepspeed.ranks: {ranks} ranks, {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(runtime.num_threads)
    # A reduction for CPUs that would be compiled at first use, for a minute; gloo does it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if runtime.device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        auto_mpi_discovery=False,
    )


class Shared:
    """A loss module and its AdamW under DeepSpeed; every method is called on all ranks at once."""

    def __init__(self, module: Module, parameters: Mapping[str, Parameter], optim: Optim, runtime: Runtime) -> None:
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        exact = {name: parameter.data for name, parameter in parameters.items()}
        groups = [group for group in decay_groups(parameters, optim) if group["params"]]
        optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2))
        self._engine: Any = deepspeed.initialize(model=module, optimizer=optimizer, config=_config(optim, runtime))[0]
        self._engine.eval()  # no dropout
        self.device: torch.device = self._engine.device
        if runtime.dtype == "bfloat16":
            for name, parameter in parameters.items():
                self.set_full(parameter, exact.pop(name))  # DeepSpeed's float32 went by way of bfloat16

    def backward(self, samples: Sequence[Sample], objective: Objective, *, last: bool, scale: float = 1.0) -> Any:
        """Add the gradient of ``scale`` times the loss, of each rank; its statistics.

        DeepSpeed adds up what comes until the ``last`` pass, and takes the mean over ranks: times ``ranks`` is the sum.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        loss, stats = self._engine(samples, objective)
        self._engine.backward(loss * (self.ranks * scale))
        return stats

    def step(self, rate: float) -> float | None:
        """The gradient's norm before clipping. None where it is not finite: DeepSpeed then drops all but the weights
        and moments of before.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else None

    def gradient_part(self, parameter: Parameter) -> Tensor:
        """After the last pass: this rank's share of the gradient, every ``ranks``-th number of it."""
        return zero.safe_get_full_grad(parameter).flatten()[self.rank :: self.ranks].clone()  # type: ignore[no-any-return]

    def full(self, parameter: Parameter, moment: str | None = None) -> Tensor:
        """The weight in float32, or its moment, gathered; kept on rank 0 alone, in the memory of the CPU."""
        if moment:
            found = zero.safe_get_full_optimizer_state(parameter, moment)
        else:
            found = zero.safe_get_full_fp32_param(parameter)
        kept: Tensor = found.cpu().contiguous() if self.rank == 0 else torch.empty(0)
        return kept

    def set_full(self, parameter: Parameter, value: Tensor, moment: str | None = None) -> None:
        """Give every rank its part of ``value``."""
        key = (moment,) if moment else ()
        if hasattr(parameter, "ds_tensor"):
            # Stage 3 cuts into equal parts, the last one padded, which its own setter of full values forgets.
            size = parameter.ds_tensor.numel()
            value = pad(value.flatten(), (0, size * self.ranks - value.numel()))[self.rank * size :][:size]
            put = zero.safe_set_local_optimizer_state if moment else zero.safe_set_local_fp32_param
        else:
            put = zero.safe_set_full_optimizer_state if moment else zero.safe_set_full_fp32_param
        put(parameter, value, *key)

    def start_moments(self, num_steps: int) -> None:
        """Moments of zero after ``num_steps`` steps. Left to itself, DeepSpeed makes them in the first step and then
        (0.19.8) knows those of the first parameter group alone.
        """
        optimizer = self._engine.optimizer
        in_groups = [part for group in optimizer.optimizer.param_groups for part in group["params"]]
        for part in getattr(optimizer, "fp32_partitioned_groups_flat", in_groups):
            zeros = {moment: torch.zeros_like(part) for moment in MOMENTS}
            optimizer.optimizer.state[part] = {"step": torch.tensor(float(num_steps))} | zeros
        if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
            optimizer._lazy_init_hp_params_optimizer_state()

    def everyone(self, values: Sequence[float]) -> list[list[float]]:
        """[n] of each rank as [ranks, n] on all."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        distributed.all_gather(found, own)
        return torch.stack(found).tolist()


def _config(optim: Optim, runtime: Runtime) -> dict[str, Any]:
    options = runtime.deepspeed
    sharing: dict[str, Any] = {"stage": options.stage}
    if options.offload:
        sharing["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if options.stage == 3:
            sharing["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,  # asked for, and used for its own messages alone
        "gradient_clipping": optim.max_grad_norm,
        "zero_optimization": sharing,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, which needs no compiler and keeps the same moments
        "bf16": {"enabled": runtime.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
