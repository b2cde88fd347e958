"""Where rules meet a live model: Trainer's ``train()``, ``step()`` and ``eval()`` become locate, update and show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.layout import per_tensor_mean
from hf_bayes.core.types import Evaluate, Evaluation, Info, Kernel, Rule
from hf_bayes.diagnostics.temperatures import share_within_interval
from hf_bayes.distributed.member_sums import SpreadMembers
from hf_bayes.models.base import BayesianModel

NOISE_PERIOD = 97
"""Updates from one estimate of V by halves of a micro-batch to the next. It takes half a gradient, 0.5 % of them all;
a prime number, so that no cycle of a schedule or of a preconditioner hides the same phase from all estimates."""

NOISE_INFO = ("noise_ratio", "noise_temperature")
"""What methods tell of ``Evaluation.grad_variance``, which not every update knows."""


RECIPROCALS = ("noise_ratio",)
"""Of which the reciprocals are averaged: a chain is 1 + 1 / r times as hot, and one estimate of V that happens to be
near 0 would else count for more than all others."""


class Look(NamedTuple):
    """What a probe finds of the chains.

    Attributes:
        log_lik: [M, n] float64 log-probabilities of the labels of n terms.
        logits: [M, q] float32 of their outputs, q = 0 where these are nobody's business.
    """

    log_lik: Tensor
    logits: Tensor


class ChainOptimizer(torch.optim.Optimizer):
    """The chains of one process, behind the interface of a torch optimizer with one group, theta.

    Attributes:
        state_of_chains: the method's State, None before the first update.
        num_updates: updates done.
        draws: the draws taken so far, [M, d] each, on the CPU.
        info: what the last update told, name -> [M].
        noise_info: what the last update told that knew the gradient's variance (``NOISE_INFO``).
    """

    def __init__(
        self,
        model: BayesianModel,
        method: Rule | Kernel,
        rngs: Sequence[torch.Generator],
        *,
        lr: float,
        draw_steps: range,
        chains: range,
        burn_in: int = 0,
        warm_start: int = 0,
        measure_noise: bool = False,
        halve: bool = False,
        probe: Callable[[Tensor], Look] | None = None,
        probe_steps: int = 0,
    ) -> None:
        super().__init__([model.theta], {"lr": lr})
        self.model, self.method, self.rngs, self.chains = model, method, list(rngs), chains
        self.draw_steps = draw_steps
        self.warm_start = warm_start
        self.state_of_chains: Any = None
        self._pending: tuple[Any, Info] | None = None
        self.located = False
        self.num_updates = 0
        self.draws: list[Tensor] = []
        self.info: Info = {}
        self.noise_info: Info = {}
        self.held: dict[str, Tensor] = {}
        """name -> [M], what the trainer holds on to from update to update; checkpoints have it."""
        self.burn_in = burn_in
        self.sums: dict[str, Tensor] = {}
        """Of ``info`` over the updates after burn-in, name -> [M, 2]: the sum, or that of reciprocals, and how
        many updates told it."""
        self.totals: dict[str, Tensor] = {}
        """name -> [M], of those of a rule's updates after its warm start that move theta: ``rates``, the sum of their
        learning rates; ``unmoved``, the share of the numbers that the first of them left bitwise as they were. Of those
        after burn-in: ``kinetic_of_tensors`` [M, S] and ``kinetic_law``, the sums of each tensor's kinetic temperature
        and of what it is in expectation; ``kinetic_inside`` [M, 2], the sum of the share of tensors that are inside
        their interval, and how many updates it is of."""
        self.origin = model.theta.detach().clone()
        """[M, d]: where the method itself began, after its warm start. What AdamW moved is no sampler's distance."""
        self.probe, self.probe_steps = probe, probe_steps
        self.probes: list[Tensor] = []
        """[M, n] each, on the CPU: the log-probabilities that ``probe`` found after every ``probe_steps`` updates."""
        self.probe_logits: list[Tensor] = []
        """[M, q] each, likewise."""
        self.finished: Tensor | None = None
        """[M', d]: the posterior's members, once training is over."""
        self.spread: SpreadMembers | None = None
        """Where the other chains are, if these are not all."""
        self._grad: Tensor | None = None
        self._loss: Tensor | None = None
        self.measure_noise = measure_noise
        self._squares: Tensor | None = None
        """[M, S]: sum over micro-batches of the mean squared gradient of each tensor."""
        self._micro_batches: Tensor | None = None
        """[M]: how many."""
        self._halve = halve
        self._of_halves: Tensor | None = None
        """[M, S]: what the halves of a micro-batch tell of the variance of its gradient."""

    # -- gradients ----------------------------------------------------------------------------------------------

    def leaf(self, members: slice) -> Tensor:
        """[m, d]: some rows of theta as a leaf, so that a pass over few members costs the gradient of few members."""
        return self.model.theta[members].detach().requires_grad_()

    def accumulate(self, members: slice, loss: Tensor, grad: Tensor) -> None:
        """Add minus the log-likelihood [m] of a micro-batch, and its gradient [m, d]."""
        theta = self.model.theta
        if self._grad is None or self._loss is None:
            self._grad = torch.zeros_like(theta)
            self._loss = torch.zeros(len(theta), dtype=torch.float64, device=theta.device)
        self._grad[members] += grad
        self._loss[members] += loss
        if self.measure_noise:
            sizes = self.model.layout.sizes
            if self._squares is None or self._micro_batches is None:
                self._squares = theta.new_zeros(len(theta), len(sizes))
                self._micro_batches = theta.new_zeros(len(theta))
            self._squares[members] += per_tensor_mean(grad.square(), sizes)
            self._micro_batches[members] += 1

    @property
    def wants_halves(self) -> bool:
        """Whether V of this update is to be estimated from the halves of its one micro-batch.

        Beside every ``NOISE_PERIOD``-th from the end of burn-in on (and before it) the last one is: a run may be short,
        and updates that estimate a preconditioner, which begin with a cycle, tell nothing of noise.
        """
        if not self._halve or self.num_updates < self.warm_start:
            return False
        return (self.num_updates - self.burn_in) % NOISE_PERIOD == 0 or self.num_updates + 1 == self.draw_steps[-1]

    def observe_halves(self, members: slice, halves: Sequence[Tensor], rows: tuple[int, int]) -> None:
        """V of a micro-batch's gradient, from those of its halves; after ``accumulate``.

        Gradients are sums over rows. With b and c of them in the halves, g / b - g' / c has 1 / b + 1 / c times the
        variance of a row's, and the sum over all b + c rows has b + c times that: V = b c E (g / b - g' / c)^2.

        Args:
            halves: [m, d] of the first b rows and, unless it is what the first has left of the whole, of the other c.
                They are used up.
            rows: b and c.
        """
        assert self._grad is not None
        first, *others = halves
        b, c = rows
        if self._of_halves is None:
            self._of_halves = self._grad.new_zeros(len(self._grad), len(self.model.layout.sizes))
        if others:
            difference = first.div_(b).sub_(others[0], alpha=1 / c)
        else:  # g / b - (whole - g) / c
            difference = first.mul_(1 / b + 1 / c).sub_(self._grad[members], alpha=1 / c)
        self._of_halves[members] = b * c * per_tensor_mean(difference.square_(), self.model.layout.sizes)

    @property
    def loss(self) -> Tensor:
        """[M]: minus the log-likelihood accumulated so far."""
        assert self._loss is not None
        return self._loss

    @property
    def begins_update(self) -> bool:
        """Whether nothing has been accumulated yet."""
        return self._loss is None

    def complete(self, total: Callable[[Tensor], Tensor], scale: float | Tensor) -> None:
        """After the last micro-batch of an update.

        Args:
            total: sums a tensor, in place, over the processes that share these chains.
            scale: of the update's log-likelihood to that of all data; one number, or [M].
        """
        assert self._grad is not None
        assert self._loss is not None
        total(self._grad)
        total(self._loss)
        if self._squares is not None and self._micro_batches is not None:
            total(self._squares)
            total(self._micro_batches)
        self._scale = scale

    def _take_evaluation(self) -> Evaluation:
        """What has been accumulated, on the scale of all data; it is forgotten."""
        assert self._grad is not None
        assert self._loss is not None
        scale = torch.as_tensor(self._scale, dtype=torch.float64, device=self._grad.device)
        variance = self._grad_variance(scale)
        grad = self._grad.mul_(-scale.to(self._grad.dtype).view(-1, 1))
        evaluation = Evaluation((-scale * self._loss).to(grad.dtype), grad, variance)
        self._grad = self._loss = self._squares = self._micro_batches = self._of_halves = None
        return evaluation

    def _grad_variance(self, scale: Tensor) -> Tensor | None:
        """[M, S]: of the sum of k micro-batches' gradients g_i, k / (k - 1) sum (g_i - mean g)^2; as if rows were drawn
        with replacement, 1 / (1 - share of the data in an update) too large for an epoch's. Of a single micro-batch
        what ``observe_halves`` has found."""
        if self._of_halves is not None:
            return scale.to(self._of_halves).view(-1, 1) ** 2 * self._of_halves
        if self._squares is None or self._micro_batches is None:
            return None
        assert self._grad is not None
        count = self._micro_batches[:, None]
        if bool((count < 2).any()):  # what the end of a stream has left
            return None
        of_sum = per_tensor_mean(self._grad.square(), self.model.layout.sizes)
        of_batches = count / (count - 1) * (self._squares - of_sum / count)
        return scale.to(of_sum).view(-1, 1) ** 2 * of_batches.clamp_min(0)

    _scale: float | Tensor = 1.0

    # -- what Trainer calls -------------------------------------------------------------------------------------

    @torch.no_grad()
    def train(self) -> None:
        """Before every micro-batch; locates at the first one of an update."""
        self.model.show(None)
        if self.located or isinstance(self.method, Kernel):
            return
        if self.state_of_chains is None:
            self.state_of_chains = self.method.init(self.model.theta.detach().clone(), self.rngs)
        where, self.state_of_chains = self.method.locate(self.state_of_chains, self.rngs)
        self.model.theta.data = where.clone() if where is self.state_of_chains.theta else where
        self.located = True

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        """One update of all chains.

        Raises:
            FloatingPointError: naming step, chain and parameter, before a non-finite number enters the state.
        """
        if isinstance(self.method, Kernel):
            assert self._pending is not None, "a kernel moves before step()"
            (state, self.info), self._pending = self._pending, None
        else:
            evaluation = self._take_evaluation()
            assert evaluation.grad_log_lik is not None
            self._require_finite(
                {"gradient of the log-likelihood": evaluation.grad_log_lik, "log-likelihood": evaluation.log_lik}
            )
            lr = float(self.param_groups[0]["lr"])
            if not 0 <= lr < math.inf:
                raise ValueError(
                    f"the learning rate of step {self.num_updates + 1} is {lr}, it must be a finite number >= 0: check "
                    "the schedule and callbacks"
                )
            before = self.state_of_chains.theta
            state, self.info = self.method.update(self.state_of_chains, evaluation, lr, self.rngs)
            if self.num_updates >= self.warm_start:
                # an update that hands back the very theta, as estimates of a preconditioner do, is no move
                moved = lr > 0 and state.theta is not before
                if moved and "unmoved" not in self.totals:
                    self.totals["unmoved"] = (state.theta == before).double().mean(1)
                if moved:
                    self._add("rates", torch.full_like(evaluation.log_lik, lr, dtype=torch.float64))
                if moved and self.num_updates >= self.burn_in:
                    self._add_kinetic(state)
        self.noise_info |= {name: self.info[name] for name in NOISE_INFO if name in self.info}
        self._require_finite({f"{name} after the update": value for name, value in state._asdict().items()})
        self.state_of_chains, self.located = state, False
        self.model.theta.data = state.theta.clone()
        self.num_updates += 1
        if self.num_updates == self.warm_start:
            self.origin = state.theta.clone()
        if self.num_updates > self.burn_in:
            for name, value in self.info.items():
                told = 1 / value.double() if name in RECIPROCALS else value.double()
                self.sums[name] = self.sums.get(name, 0.0) + torch.stack([told, torch.ones_like(told)], 1)
        if self.num_updates in self.draw_steps:
            self.draws.append(state.theta.detach().cpu().clone())
        if self.probe is not None and self.probe_steps and self.num_updates % self.probe_steps == 0:
            look = self.probe(state.theta)
            self.probes.append(look.log_lik.cpu())
            self.probe_logits.append(look.logits.cpu())

    def _add(self, name: str, value: Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value

    def _add_kinetic(self, state: Any) -> None:
        """Of a state with a momentum of unit mass whose law the update told."""
        law = self.info.get("kinetic_temperature_law")
        if law is None or not hasattr(state, "momentum"):
            return
        parts = state.momentum.split(self.model.layout.sizes, dim=1)
        # norms read the momentum once; its squares would be written first, which takes five times as long
        kinetic = torch.stack([part.norm(dim=1).double().square() / part.shape[1] for part in parts], 1)
        self._add("kinetic_of_tensors", kinetic)
        self._add("kinetic_law", law.double())
        if bool((law > 0).all()):
            inside = share_within_interval(kinetic, self.model.layout.sizes, law.double())
            self._add("kinetic_inside", torch.stack([inside, torch.ones_like(inside)], 1))

    @torch.no_grad()
    def move(self, evaluate: Evaluate) -> Tensor:
        """Let a Kernel move; ``step`` makes the move the state. Returns [M]: which chains stay where they are."""
        assert isinstance(self.method, Kernel)
        if self.state_of_chains is None:
            self.state_of_chains = self.method.init(self.model.theta.detach().clone(), evaluate, self.rngs)
        self._pending = self.method.step(self.state_of_chains, evaluate, self.rngs)
        return (self._pending[0].theta == self.state_of_chains.theta).all(1)

    def mean_info(self) -> dict[str, Tensor]:
        """Means of ``info`` over the updates after burn-in that told it, name -> [M]."""
        means = {name: value[:, 0] / value[:, 1] for name, value in self.sums.items()}
        return {name: 1 / mean if name in RECIPROCALS else mean for name, mean in means.items()}

    def eval(self) -> None:
        """Before evaluation: show where the chains are, or the finished posterior."""
        if self.finished is not None:
            self.model.show(self.finished, self.spread)
        else:
            theta = self.model.theta.detach() if self.state_of_chains is None else self.state_of_chains.theta
            self.model.show(theta, self.spread)

    def state_dict(self) -> dict[str, Any]:
        """Groups only: the chains' tensors go to files of their own (``chain_tensors``)."""
        return {**super().state_dict(), "state": {}}

    # -- checkpoints --------------------------------------------------------------------------------------------

    def chain_tensors(self) -> dict[int, dict[str, Tensor]]:
        """{chain: all that it needs to go on}, between two updates."""
        assert not self.located, "a checkpoint is taken between updates"
        assert self._grad is None, "a checkpoint is taken between updates"
        if self.state_of_chains is None:
            return {}
        fields = self.state_of_chains._asdict()
        dim = self.model.layout.dim
        return {
            chain: {
                **{f"state.{name}": value[row].detach().cpu().contiguous() for name, value in fields.items()},
                "generator": self.rngs[row].get_state(),
                "draws": torch.stack([d[row] for d in self.draws]) if self.draws else torch.zeros(0, dim),
                "probes": torch.stack([p[row] for p in self.probes]) if self.probes else torch.zeros(0, 0),
                "probe_logits": torch.stack([p[row] for p in self.probe_logits]) if self.probes else torch.zeros(0, 0),
                "origin": self.origin[row].cpu(),
                **{f"noise.{name}": value[row].cpu() for name, value in self.noise_info.items()},
                **{f"sum.{name}": value[row].cpu() for name, value in self.sums.items()},
                **{f"total.{name}": value[row].cpu() for name, value in self.totals.items()},
                **{f"held.{name}": value[row].cpu() for name, value in self.held.items()},
            }
            for row, chain in enumerate(self.chains)
        }

    def load_chain_tensors(self, tensors: dict[int, dict[str, Tensor]], num_updates: int) -> None:
        """Go on where ``chain_tensors`` was taken.

        Raises:
            ValueError: naming the first tensor that is missing or unknown: another method wrote it.
        """
        device = self.model.theta.device
        rows = [tensors[chain] for chain in self.chains]
        template = self._template_state()
        wanted = {f"state.{name}" for name in template._fields}
        wanted |= {"generator", "draws", "probes", "probe_logits", "origin"}
        for chain, row in zip(self.chains, rows, strict=True):
            if {name for name in row if not name.startswith(("sum.", "total.", "noise.", "held."))} != wanted:
                raise ValueError(
                    f"chain {chain} of the checkpoint has tensors {sorted(row)}, expected {sorted(wanted)}: it was "
                    "written by another method"
                )
        self.state_of_chains = type(template)(
            **{name: torch.stack([row[f"state.{name}"] for row in rows]).to(device) for name in template._fields}
        )
        for rng, row in zip(self.rngs, rows, strict=True):
            rng.set_state(row["generator"])
        self.origin = torch.stack([row["origin"] for row in rows]).to(device)
        self.draws = list(torch.stack([row["draws"] for row in rows], 1))
        self.probes = list(torch.stack([row["probes"] for row in rows], 1))
        self.probe_logits = list(torch.stack([row["probe_logits"] for row in rows], 1))
        # sorted: safetensors hands tensors out in any order, and processes compare their sums one after the other
        self.sums, self.totals, self.noise_info, self.held = (
            {
                name.removeprefix(kind): torch.stack([row[name] for row in rows]).to(device)
                for name in sorted(rows[0])
                if name.startswith(kind)
            }
            for kind in ("sum.", "total.", "noise.", "held.")
        )
        self.model.theta.data = self.state_of_chains.theta.clone()
        self.num_updates, self.located = num_updates, False

    def template_fields(self) -> dict[str, Tensor]:
        """Fields of the state, for their sizes."""
        return self._template_state()._asdict()

    def _template_state(self) -> Any:
        """A State of this method, for its fields; drawn from throwaway generators."""
        theta = self.model.theta.detach().clone()
        rngs = [torch.Generator(device=rng.device) for rng in self.rngs]
        if isinstance(self.method, Rule):
            return self.method.init(theta, rngs)
        zeros = Evaluation(torch.zeros(len(theta), dtype=theta.dtype, device=theta.device), torch.zeros_like(theta))
        return self.method.init(theta, lambda theta, *, gradient=True, batches=None: zeros, rngs)

    def _require_finite(self, values: dict[str, Tensor]) -> None:
        """One pass over memory when all is well; the name of the culprit when not.

        Args:
            values: what it is -> [M], or [M, ..., d].
        """
        values = {what: value for what, value in values.items() if value.is_floating_point()}
        if bool(torch.stack([value.sum() for value in values.values()]).isfinite().all()):
            return
        for what, value in values.items():
            bad = ~value.isfinite()
            if not bool(bad.any()):  # the sum of large numbers overflows, too
                continue
            row = int(bad.nonzero()[0, 0])
            culprit = f"chain {self.chains[row]}"
            if value.ndim > 1 and value.shape[1] == self.model.layout.dim:
                tensors = self.model.layout.unflatten(value[row])
                culprit += ", " + next(name for name, part in tensors.items() if not bool(part.isfinite().all()))
            raise FloatingPointError(
                f"non-finite {what} at step {self.num_updates + 1} ({culprit}): nothing of this step is kept. Lower "
                "learning_rate, check the data and the model's weights for NaN, or resume from the last checkpoint"
            )
