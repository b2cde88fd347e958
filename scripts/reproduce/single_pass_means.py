"""The part of each kind of module in the error of the mean of a single pass, for small models and a wide posterior.

The mean of a pass is the output at the posterior mean. A module f with the input x has an error of its own,
E[f(x)] - f(E[x]), where f on the right has its mean weights. Linear layers and residual sums have none. So the mean
becomes that of the members if each norm, attention and feed-forward layer adds its own error to its output. Each column
of the table adds the errors of some modules only. "Second order" adds the expectation to second order in the noise.
"All, Gaussian inputs" adds the errors that all modules would have if their inputs were Gaussian, with the mean and the
covariance of the members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.models.single_pass.driver import SinglePass
from scripts.reproduce.report import table
from scripts.reproduce.small_models import FAMILIES, attached, inputs_of

FAMILIES_WITH_UNITS = ("vit", "llama", "gpt2", "mistral", "qwen3")
VARIANCE, DRAWS, PART = 1e-2, 4000, 250

KINDS: dict[str, tuple[str, ...]] = {
    "norms": ("ln_1", "ln_2", "ln_f", "norm", "layernorm"),
    "attention": ("attn", "attention"),
    "feed-forward": ("mlp",),
}
"""Kind -> ends of the names of its modules."""

PASSES = {"pass, 512": 512, "pass, 16": 16}
"""Name -> number of columns of a single pass with ``second_order=True``."""

WAYS = ("none", *KINDS, "norms and feed-forward", "norms, second order", "norms and feed-forward, second order", "all")
GAUSSIAN = "all, Gaussian inputs"


def units(model: nn.Module) -> dict[str, str]:
    """Return {path: kind} of the modules that are not inside another one."""
    found: dict[str, str] = {}
    for path, _ in model.named_modules():
        name = path.rpartition(".")[2]
        kind = next((kind for kind, ends in KINDS.items() if name.startswith("layernorm") or name.endswith(ends)), None)
        if kind is not None and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = kind
    return found


def first_of(output: Any) -> Tensor:
    """Return the hidden states of an output."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


class Hidden:
    """The inputs and outputs of modules over draws, [draws, rows, ...]."""

    def __init__(self, model: nn.Module, paths: Mapping[str, str], num_rows: int) -> None:
        self.modules = {path: model.get_submodule(path) for path in paths}
        self.num_rows = num_rows
        self.inputs: dict[str, list[Tensor]] = {path: [] for path in paths}
        self.outputs: dict[str, list[Tensor]] = {path: [] for path in paths}

    def reading(self) -> ExitStack:
        """Return a context in which all inputs and outputs are kept."""

        def reader(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
                given = args[0] if args else kwargs["hidden_states"]
                for kept, value in ((self.inputs, given), (self.outputs, first_of(output))):
                    kept[path].append(value.detach().unflatten(0, (-1, self.num_rows)))

            return hook

        return self._with(lambda path, module: module.register_forward_hook(reader(path), with_kwargs=True))

    def replacing(self, inputs: Mapping[str, Tensor]) -> ExitStack:
        """Return a context in which the modules read these inputs."""

        def changer(path: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
                if args:
                    return (inputs[path], *args[1:]), kwargs
                return args, kwargs | {"hidden_states": inputs[path]}

            return hook

        return self._with(lambda path, module: module.register_forward_pre_hook(changer(path), with_kwargs=True))

    def adding(self, errors: Mapping[str, Tensor]) -> ExitStack:
        """Return a context in which the modules add these errors to their outputs."""

        def adder(path: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, output: Any) -> Any:
                if path not in errors:
                    return output
                changed = first_of(output) + errors[path]
                return (changed, *output[1:]) if isinstance(output, tuple) else changed

            return hook

        return self._with(lambda path, module: module.register_forward_hook(adder(path)))

    def _with(self, register: Callable[[str, nn.Module], Any]) -> ExitStack:
        stack = ExitStack()
        for path, module in self.modules.items():
            stack.callback(register(path, module).remove)
        return stack


def mean_of_draws(parts: list[Tensor]) -> Tensor:
    """Return the mean [rows, ...]. The blocks before the first random one have one draw."""
    return torch.cat(parts).mean(0)


def norm_error(draws: Tensor, module: Any, *, centred: bool) -> Tensor:
    """Return the error E[y] - y(E x) of a norm by the expectations to second order in s^2 - E[s^2].

    With the notation of ``hf_bayes.models.single_pass.wide_norms``, E[x / s] = m E[1 / s] - V m E[s^-3] / D (Stein).
    """
    gain = module.weight.detach()
    eps = getattr(module, "eps", None) or module.variance_epsilon
    draws = draws - draws.mean(-1, keepdim=True) if centred else draws
    mean, width = draws.mean(0), draws.shape[-1]
    noise = draws - mean
    covariance = torch.einsum("n...k,n...l->...kl", noise, noise) / max(1, len(draws) - 1)
    along = torch.einsum("...kl,...l->...k", covariance, mean)
    second = (mean.square().sum(-1) + covariance.diagonal(dim1=-2, dim2=-1).sum(-1)) / width + eps
    spread = 4 * (along * mean).sum(-1) + 2 * covariance.square().sum((-2, -1))
    relative = spread / (width * second).square()
    first = (second**-0.5 * (1 + 3 / 8 * relative))[..., None]
    third = (second**-1.5 * (1 + 15 / 8 * relative))[..., None]
    at_mean = mean / (mean.square().mean(-1, keepdim=True) + eps).sqrt()
    return gain * (mean * first - along * third / width - at_mean)


def curvature(draws: Tensor, module: nn.Module, step: float = 1e-3) -> Tensor:
    """Return half the mean second derivative of a module at the mean, along the noise of its input."""
    mean = draws.mean(0)
    noise = step * (draws - mean)
    ahead, behind, here = (
        module(value.flatten(0, 1)).unflatten(0, value.shape[:2]) for value in (mean + noise, mean - noise, mean[None])
    )
    found: Tensor = (ahead + behind - 2 * here).mean(0) / (2 * step**2)
    return found


def gaussian_like(draws: Tensor) -> Tensor:
    """Return draws [N, ...] of a Gaussian with the mean and the covariance of these draws."""
    mean, count = draws.mean(0), len(draws)
    mixing = torch.randn((count, count), generator=torch.Generator().manual_seed(1), dtype=draws.dtype)
    return mean + ((mixing / (count - 1) ** 0.5) @ (draws - mean).flatten(1)).view_as(draws)


def outputs_of_gaussian_inputs(
    bayesian: Any, theta: Tensor, hidden: Hidden, kinds: Mapping[str, str], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the mean output of each module whose input is Gaussian and independent of the module's own weights."""
    drawn = {path: torch.cat(parts) for path, parts in hidden.inputs.items()}
    drawn = {path: gaussian_like(values) for path, values in drawn.items() if len(values) == len(theta)}
    found = Hidden(bayesian.model, kinds, hidden.num_rows)
    for start in range(0, len(theta), PART):
        given = {path: values[start : start + PART].flatten(0, 1) for path, values in drawn.items()}
        replaced = Hidden(bayesian.model, {path: kinds[path] for path in given}, hidden.num_rows)
        with bayesian.members.bind(theta[start : start + PART]), replaced.replacing(given), found.reading():
            bayesian.members.logits(inputs)
    return {path: mean_of_draws(parts) for path, parts in found.outputs.items()}


@torch.no_grad()
def errors_of(family: str) -> dict[str, float]:
    """Return the error of the mean of the logits, relative to its norm, if some modules add their own error.

    The passes of ``PASSES`` also have the total variance of the logits over that of the members.
    """
    build, subspace = FAMILIES[family]
    model = build()
    inputs = inputs_of(model)
    rows = len(next(iter(inputs.values())))
    with attached(model, subspace, VARIANCE) as bayesian:
        kinds = units(bayesian.model)
        hidden = Hidden(bayesian.model, kinds, rows)
        theta = bayesian.posterior.approximation.sample(DRAWS, torch.Generator().manual_seed(0))
        logits = []
        for some in theta.split(PART):
            with bayesian.members.bind(some), hidden.reading():
                logits.append(bayesian.members.logits(inputs))
        wanted, variance = torch.cat(logits).mean(0), torch.cat(logits).var(0)
        mean = bayesian.posterior.approximation.means
        at_means = Hidden(bayesian.model, kinds, rows)
        given = {path: mean_of_draws(parts) for path, parts in hidden.inputs.items()}
        with bayesian.members.bind(mean), at_means.replacing(given), at_means.reading():
            bayesian.members.logits(inputs)
        own = {path: mean_of_draws(parts) - at_means.outputs[path][0][0] for path, parts in hidden.outputs.items()}
        normal = outputs_of_gaussian_inputs(bayesian, theta, hidden, kinds, inputs)
        curved: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        for path, kind in kinds.items():
            draws, module = torch.cat(hidden.inputs[path]), hidden.modules[path]
            if kind == "norms":
                curved[kind][path] = norm_error(draws, module, centred=isinstance(module, nn.LayerNorm))
            elif kind == "feed-forward":
                with bayesian.members.bind(mean):
                    curved[kind][path] = curvature(draws, module)
        parts = {kind: {path: error for path, error in own.items() if kinds[path] == kind} for kind in KINDS}
        chosen = parts | {
            "none": {},
            "norms and feed-forward": parts["norms"] | parts["feed-forward"],
            "norms, second order": curved["norms"],
            "norms and feed-forward, second order": curved["norms"] | curved["feed-forward"],
            "all": own,
            GAUSSIAN: {path: output - at_means.outputs[path][0][0] for path, output in normal.items()},
        }
        found = {}
        for way in (*WAYS, GAUSSIAN):
            with bayesian.members.bind(mean), hidden.adding(chosen[way]):
                logits_at_mean = bayesian.members.logits(inputs)[0]
            found[way] = round(float((logits_at_mean - wanted).norm() / wanted.norm()), 3)
        for name, rank in PASSES.items():
            covariance = bayesian.posterior.approximation.covariances[0]
            one = SinglePass(bayesian.members, mean[0], covariance, rank=rank, second_order=True)
            with one.open():
                outputs = bayesian.members.forward(inputs).logits
            found[name] = round(float((one.mean(outputs) - wanted).norm() / wanted.norm()), 3)
            found[f"{name}: variance"] = round(float(outputs.spread.variance.sum() / variance.sum()), 3)
    return found


def means() -> dict[str, Any]:
    """Return the errors of each family."""
    return {family: errors_of(family) for family in FAMILIES_WITH_UNITS}


def means_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of errors."""
    shown = (*WAYS, GAUSSIAN, *PASSES, *(f"{name}: variance" for name in PASSES))
    return table(["model", *shown], [[family, *(f"{row[way]:.2f}" for way in shown)] for family, row in found.items()])
