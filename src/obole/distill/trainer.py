"""The steps of a training: a batch, its gradients, an update. Everything that is on disk or on a screen is elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from obole.distill.data import Rows
from obole.distill.layout import Layout, reaching
from obole.distill.losses import Losses, kept_regions, prefix_slots, step_losses
from obole.distill.model import Decoder
from obole.distill.parallel import World, accumulating, placed
from obole.distill.plan import places, span_and_roll
from obole.distill.recipe import Pace, Recipe
from obole.distill.state import State
from obole.distill.watch import Diverged, Watch
from obole.errors import ConfigError

ADVICE = "try a lower --lr, a longer --warmup or a smaller --clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step came to. `loss`: what was minimised; `cross_entropy`: nats a prediction, against the targets.

    `accepted`: tokens of a region that ConfAdapt would emit at a threshold of 0.9; `agreed`: tokens until the first that
    is not its target, at least 1; both of at most `k`, means over the regions that count. `slots`: computed, in all rows.
    """

    step: int
    k: int
    roll: int
    loss: float
    cross_entropy: float
    accepted: float
    agreed: float
    predictions: int
    slots: int
    learning_rate: float
    gradient_norm: float
    seconds: float


class Trainer:
    """Trains `student` in place. `teacher`: not changed; None: the student without its adapters.

    Raises `ConfigError` for a batch that the processes of `world` can't share equally, and for rows longer than the model's
    context.
    """

    def __init__(
        self, student: Decoder, teacher: Decoder | None, rows: Rows, recipe: Recipe, pace: Pace, mask_id: int, world: World
    ) -> None:
        if recipe.batch % world.size:
            raise ConfigError(f"--batch must be a multiple of the {world.size} processes, and is {recipe.batch}.")
        if recipe.slots > student.rope_full.shape[1]:
            raise ConfigError(f"--slots must be at most {student.rope_full.shape[1]}, the model's context, not {recipe.slots}.")
        student.checkpointing = pace.checkpointing
        self._student = placed(world, student, list(student.layers))
        self._teacher = self._student if teacher is None else placed(world, teacher.requires_grad_(False), list(teacher.layers))
        self._rows, self._recipe, self._pace, self._mask_id, self._world = rows, recipe, pace, mask_id, world
        self._parameters = [p for p in self._student.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(_groups(self._parameters, pace), betas=pace.betas, fused=True)
        self._bfloat16 = multiplies_bfloat16(world.device) if pace.precision == "auto" else pace.precision == "bfloat16"
        self._watch = Watch()
        self.steps = 0
        self.seconds = 0.0
        self.slots = 0

    @property
    def is_well(self) -> bool:
        """Whether the present state is worth keeping in place of an earlier one."""
        return self._watch.is_well

    def step(self) -> Step:
        """One step. Raises `Diverged`, before the weights are touched, if the loss or the gradient are no numbers."""
        started = time.perf_counter()
        k, roll = span_and_roll(self._recipe, self.steps)
        chosen = places(self._recipe, len(self._rows), self.steps)
        longest, prefix = int(self._rows.lengths[chosen].max()), self._recipe.objective.prefix > 0
        made = reaching(self._recipe.slots, self._recipe.regions, k, roll, longest, prefix=prefix)
        losses = self._backward(made, chosen)
        norm = self._norm()
        total, nll, accepted, agreed, predictions, regions = self._world.sums([float(value) for value in losses])
        self._watch = self._judged(total, norm)
        rate = self._pace.rate(self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        seconds, slots = time.perf_counter() - started, self._recipe.batch * len(made.source)
        self.steps, self.seconds, self.slots = self.steps + 1, self.seconds + seconds, self.slots + slots
        return Step(
            step=self.steps,
            k=k,
            roll=roll,
            loss=total,
            cross_entropy=nll / max(predictions, 1),
            accepted=accepted / max(regions, 1),
            agreed=agreed / max(regions, 1),
            predictions=int(predictions),
            slots=slots,
            learning_rate=rate,
            gradient_norm=norm,
            seconds=seconds,
        )

    def _judged(self, loss: float, norm: float) -> Watch:
        try:
            return self._watch.after(loss, norm)
        except Diverged as error:
            raise Diverged(f"The training diverged in step {self.steps + 1}: {error}; {ADVICE}.") from None

    def _backward(self, made: Layout, chosen: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of this process's share of the rows `chosen`; the sums of `Losses` over it."""
        world = self._world
        counted = self._rows.lengths[chosen]
        predictions = int(kept_regions(counted, made).sum()) * made.predict.shape[1]
        divisors = (predictions, int(prefix_slots(counted, made).sum()))
        made = made.to(world.device)
        parts = torch.split(chosen[world.rank :: world.size], self._pace.micro_batch)
        sums: list[torch.Tensor] = []
        for part in parts:
            with accumulating(self._student, last=part is parts[-1]):
                losses = self._losses(part, made, divisors)
                torch.autograd.backward(losses.total * world.size)
            values = [losses.total.detach(), *(getattr(losses, name) for name in Losses.__slots__[1:])]
            sums = [a + b for a, b in zip(sums, values, strict=True)] if sums else values
        return sums

    def _losses(self, part: torch.Tensor, made: Layout, divisors: tuple[float, float]) -> Losses:
        device = self._world.device
        rows, lengths = self._rows.ids[part].long().to(device), self._rows.lengths[part].to(device)
        objective = self._recipe.objective.at(self.steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bfloat16):
            return step_losses(self._student, self._teacher, rows, lengths, made, self._mask_id, objective, divisors)

    def _norm(self) -> float:
        """The norm of all gradients, which are cut to the most that is allowed."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._pace.clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def state(self, facts: dict[str, Any]) -> State:
        """All there is to save. Every process must call it; the first gets it, the others get no tensors."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights: dict[str, Any] = get_model_state_dict(self._student, options=options)
        return State(
            step=self.steps,
            facts=facts,
            weights=weights,
            optimizer=get_optimizer_state_dict(self._student, self._optimizer, options=options),
            watch=self._watch,
            seconds=self.seconds,
            slots=self.slots,
        )

    def restore(self, state: State) -> None:
        """Go on from `state`, which every process must have read."""
        options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)
        set_model_state_dict(self._student, dict(state.weights), options=options)
        set_optimizer_state_dict(self._student, self._optimizer, dict(state.optimizer), options=options)
        for group, fresh in zip(self._optimizer.param_groups, _groups(self._parameters, self._pace), strict=True):
            group |= {"weight_decay": fresh["weight_decay"], "betas": self._pace.betas}
        self._watch, self.steps, self.seconds, self.slots = state.watch, state.step, state.seconds, state.slots


def _groups(parameters: list[torch.nn.Parameter], pace: Pace) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not."""
    matrices, others = ([p for p in parameters if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": pace.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices are faster there than those of float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))
