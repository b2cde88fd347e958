"""Planted faults: small mistakes that are easy to make, each with the tests that must fail on it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A slip in one place of the package.

    Attributes:
        name: what it is, in words.
        file: within ``hf_bayes``.
        found: a text that stands in the file once.
        put: what is put in its place.
        tests: node ids within ``tests``; each must fail (of a parametrised one without brackets, one of its cases).
    """

    name: str
    file: str
    found: str
    put: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: if the text is not there, or there more than once.
        """
        count = source.count(self.found)
        if count != 1:
            raise ValueError(
                f"fault {self.name!r}: hf_bayes/{self.file} holds its text {count} times, expected once. The code has "
                "moved on: write the fault anew in tests/mutants/faults.py"
            )
        return source.replace(self.found, self.put)


def law(sampler: str) -> str:
    """The stationary moments of a sampler, solved from its update."""
    return f"methods/sgmcmc/test_laws.py::test_stationary_moments_are_those_of_the_docstring[0.3-0.0-{sampler}]"


SGD = "methods/sgmcmc/test_sghmc.py::test_zero_temperature_is_torch_sgd_with_momentum"
CYCLES = "methods/sgmcmc/test_sghmc.py::TestCyclicalSchedule::test_keeps_the_kinetic_temperature_at_its_law"
FOLDED = "members/test_engine.py::test_folded_members_equal_separate_models[torch.float32-llama-lora-every-linear]"

# fmt: off
FAULTS = (
    # -- samplers
    Fault("sghmc: noise without sqrt(2)", "methods/sgmcmc/sghmc.py",
          "injected = 2 * friction * h * temperature", "injected = friction * h * temperature", (law("sghmc"),)),
    Fault("sghmc: N is 1 in the step size", "methods/sgmcmc/sghmc.py",
          "h = math.sqrt(lr / problem.num_data)", "h = math.sqrt(lr)", (SGD,)),
    Fault("sghmc: T is 0.8 T", "methods/sgmcmc/sghmc.py",
          "temperature = self.problem, self.config, self.friction, self.config.temperature",
          "temperature = self.problem, self.config, self.friction, 0.8 * self.config.temperature", (law("sghmc"),)),
    Fault("sghmc: the friction's sign", "methods/sgmcmc/sghmc.py",
          "decay = 1 - h * friction", "decay = 1 + h * friction", (SGD,)),
    Fault("sghmc: theta moves with the old momentum", "methods/sgmcmc/sghmc.py",
          "theta = state.theta + step_size * momentum", "theta = state.theta + step_size * state.momentum",
          (law("sghmc"), SGD)),
    Fault("sghmc: SGD's buffer is kept while the learning rate falls", "methods/sgmcmc/sghmc.py",
          """\
        momentum = decay * state.momentum - step_size * gradient + noise_std * randn(rngs, state.theta)
        theta = state.theta + step_size * momentum
        moved = state._replace(theta=theta, momentum=momentum, step=state.step + 1, noise_statistics=noise_statistics)
""",
          """\
        h0 = math.sqrt(problem.learning_rate / problem.num_data)  # the buffer is h0 times the momentum of the state
        fresh = noise_std * math.sqrt(h / h0) * randn(rngs, state.theta) - step_size * gradient
        momentum = config.momentum * state.momentum + h / h0 * fresh
        theta = state.theta + h0 * momentum
        moved = state._replace(theta=theta, momentum=momentum, step=state.step + 1, noise_statistics=noise_statistics)
        momentum = h0 / h * momentum
""", (CYCLES,)),
    Fault("sghmc: beta is kept while the learning rate falls", "methods/sgmcmc/sghmc.py",
          "decay = 1 - h * friction", "decay = self.config.momentum", (CYCLES,)),
    Fault("sghmc: momenta start at N(0, I), whatever T", "methods/sgmcmc/sghmc.py",
          "SGHMCState(theta, math.sqrt(temperature) * randn(rngs, theta), step, noise_statistics)",
          "SGHMCState(theta, randn(rngs, theta), step, noise_statistics)",
          ("methods/sgmcmc/test_laws.py::test_momenta_start_at_their_stationary_law[sghmc]",)),
    Fault("sgld: noise without sqrt(2)", "methods/sgmcmc/sgld.py",
          "math.sqrt(2 * step_size * self.temperature) * randn", "math.sqrt(step_size * self.temperature) * randn",
          (law("sgld"),)),
    Fault("baoab: O with 1 - c in place of 1 - c^2", "methods/sgmcmc/baoab.py",
          "noise = math.sqrt((1 - decay**2) * temperature)", "noise = math.sqrt((1 - decay) * temperature)",
          (law("baoab"), law("baoa"))),
    Fault("baoab: the friction follows the learning rate", "methods/sgmcmc/baoab.py",
          "self.momentum ** math.sqrt(lr / peak)", "self.momentum",
          ("methods/sgmcmc/test_baoab.py::test_friction_stays_fixed_under_a_schedule",)),
    Fault("baoab: a whole kick where half of one is left", "methods/sgmcmc/baoab.py",
          'if self.scheme == "baoab" else 1.0', 'if self.scheme == "baoa" else 1.0',
          ("methods/sgmcmc/test_baoab.py::test_both_schemes_give_the_same_positions_half_a_kick_apart",)),
    Fault("sgnht: the thermostat's sign", "methods/sgmcmc/sgnht.py",
          "(kinetic - temperature)", "(temperature - kinetic)",
          ("methods/sgmcmc/test_sgnht.py::"
           "test_a_thermostat_returns_to_balance_without_swinging",)),
    Fault("sghmc_euler: theta moves with the new momentum", "methods/sgmcmc/sghmc_euler.py",
          "return SGHMCEulerState(theta, momentum,", "return SGHMCEulerState(state.theta + h * momentum, momentum,",
          (law("sghmc_euler"),)),
    Fault("gradient noise is added to the injected noise, not taken off", "methods/sgmcmc/gradient_noise.py",
          "injected - from_gradient", "injected + from_gradient",
          ("methods/sgmcmc/test_gradient_noise.py::test_corrected_euler_is_the_noise_of_posteriors_beta",)),
    Fault("preconditioner: the most sensitive tensor has mass 1", "methods/sgmcmc/preconditioner.py",
          "sigma / sigma.amin(1, keepdim=True)", "sigma / sigma.amax(1, keepdim=True)",
          ("methods/sgmcmc/test_preconditioner.py::test_masses_are_estimated_per_tensor_while_nothing_moves",)),
    Fault("agps: the cap is on the variance", "methods/sgmcmc/agps.py",
          "variance.sqrt().clamp(max=max_std)", "variance.clamp(max=max_std).sqrt()",
          ("methods/sgmcmc/test_agps.py::test_the_cap_is_the_learning_rate_unless_given",)),
    # -- schedules and draws
    Fault("cyclical: l = l0 C in place of l0 C^2", "core/schedules.py",
          "exponent: float = 2.0", "exponent: float = 1.0",
          ("core/test_schedules.py::test_thirty_cycles_with_three_of_burn_in_match_the_paper",)),
    Fault("draws are taken an update early", "chains/run.py",
          "if self.num_updates in self.problem.draw_steps:", "if self.num_updates + 1 in self.problem.draw_steps:",
          ("chains/test_run.py::test_draws_are_taken_at_their_steps_and_stay",)),
    Fault("all chains have the stream of the first", "core/rng.py",
          'return [generator(seed, "chain", chain, device=device)',
          'return [generator(seed, "chain", 0, device=device)',
          ("methods/test_registry.py::test_chains_are_independent[sghmc]",)),
    # -- energy, rows and N
    Fault("the prior counts twice", "distributions/energy.py",
          "return -evaluation.grad_log_lik - prior_weight * prior.grad(theta)",
          "return -evaluation.grad_log_lik - 2 * prior_weight * prior.grad(theta)",
          (SGD,
           "training/test_trainer_law.py::test_variance_is_that_of_the_law_with_minibatch_noise[192rows-batch8x2]")),
    Fault("the prior's std stands for its variance", "distributions/energy.py",
          "return (self.mean - theta) / self.std.square()", "return (self.mean - theta) / self.std",
          (SGD, "distributions/test_energy.py::test_density_and_gradient_are_those_of_torch_distributions")),
    Fault("likelihood tempering tempers the prior, too", "core/config.py",
          'return self.temperature if self.temper == "likelihood" else 1.0', "return 1.0",
          ("methods/variational/test_mean_field.py::test_temper_says_whether_the_prior_is_tempered",)),
    Fault("of several micro-batches the last one counts", "objectives/model_objective.py",
          "grad[members] -= part", "grad[members] = -part",
          ("objectives/test_model_objective.py::test_an_evaluation_is_the_scaled_sum_of_its_micro_batches[None]",)),
    Fault("the gradient is that of the update's rows, not of N", "objectives/model_objective.py",
          "grad *= scale.to(grad.dtype)", "grad *= 1.0",
          ("objectives/test_model_objective.py::test_an_evaluation_is_the_scaled_sum_of_its_micro_batches[None]",
           "training/test_trainer_law.py::test_variance_is_that_of_the_law_with_minibatch_noise[192rows-batch8x2]")),
    Fault("N counts labels before the causal shift", "objectives/likelihood_terms.py",
          'next_tokens(labels, batch.get("attention_mask")) if shift else labels', "labels",
          ("objectives/test_likelihood_terms.py::test_language_model_terms_are_loss_tokens_after_the_shift",)),
    # -- kernels
    Fault("hmc: the kinetic energy is forgotten", "methods/mcmc/hmc.py",
          "error = end - start + kinetic", "error = end - start",
          ("methods/mcmc/test_hmc.py::test_moments_are_exact_at_a_large_step",)),
    Fault("leapfrog without its last half step", "methods/mcmc/hmc.py",
          "        value, gradient = potential(theta)\n        momentum = momentum - step_size / 2 * gradient\n",
          "        value, gradient = potential(theta)\n", ("methods/mcmc/test_hmc.py::test_leapfrog_is_reversible",)),
    Fault("metropolis: the energy follows refused proposals", "methods/mcmc/metropolis.py",
          "energy=torch.where(accepted, proposed, state.energy)", "energy=proposed",
          ("methods/mcmc/test_metropolis.py::test_one_energy_is_asked_for_per_update_and_no_gradient",)),
    Fault("metropolis: T is left out", "methods/mcmc/metropolis.py",
          "(state.energy - proposed) / self.temperature", "state.energy - proposed",
          ("methods/mcmc/test_metropolis.py::test_moments_are_exact_at_every_temperature[gaussian-2.0]",)),
    Fault("gps: the reverse proposal is forgotten", "methods/mcmc/gps.py",
          "(family.log_prob(state.theta, backward) - family.log_prob(proposal, forward)).sum(1)",
          "0", ("methods/mcmc/test_gps.py::test_exact_draws_are_left_as_they_are",)),
    Fault("gps: a chain never stops exploring", "methods/mcmc/gps.py",
          "state.step < explored_steps\n", "state.step >= 0\n",
          ("methods/mcmc/test_gps.py::test_the_reference_is_frozen_after_half_of_burn_in",)),
    Fault("penalty: the penalty is dropped", "methods/mcmc/penalty.py",
          "log_ratio = log_density_ratio - difference.mean(1) - penalty",
          "log_ratio = log_density_ratio - difference.mean(1)",
          ("methods/mcmc/test_penalty.py::test_langevin_acceptance_uses_both_proposal_densities",)),
    Fault("penalty: chi^2 divides by K^2", "methods/mcmc/penalty.py",
          "return difference.var(1) / difference.shape[1]",
          "return difference.var(1, correction=0) / difference.shape[1]",
          ("methods/mcmc/test_penalty.py::test_the_penalty_is_the_series_of_ceperley_and_dewing",)),
    Fault("penalty: the proposal's density is forgotten", "methods/mcmc/penalty.py",
          "return proposal, -0.5 * ((end - momentum) * (end + momentum)).sum(1)",
          "return proposal, torch.zeros_like(state.log_step)",
          ("methods/mcmc/test_penalty.py::test_langevin_acceptance_uses_both_proposal_densities",)),
    # -- Gaussians
    Fault("mean_field: the prior counts twice", "methods/variational/mean_field.py",
          "torch.add(grad_log_lik, grad_log_prior, alpha=self.prior_weight)",
          "torch.add(grad_log_lik, grad_log_prior, alpha=2 * self.prior_weight)",
          ("methods/variational/test_mean_field.py::test_temper_says_whether_the_prior_is_tempered",)),
    Fault("mean_field: the entropy without T", "methods/variational/mean_field.py",
          "mul_(std).div_(self.temperature).sub_(1)", "mul_(std).sub_(1).div_(self.temperature)",
          ("methods/variational/test_mean_field.py::test_a_diagonal_gaussian_is_recovered_to_one_percent[0.5]",)),
    Fault("mean_field: the slope is learnt with the wrong sign", "methods/variational/mean_field.py",
          "slope.sub(correlated", "slope.add(correlated",
          ("methods/variational/test_mean_field.py::test_a_diagonal_gaussian_is_recovered_to_one_percent[1.0]",)),
    Fault("mean_field: q is the last iterate", "methods/variational/mean_field.py",
          "weight = 1 / max(1, count - first_averaged)", "weight = 1 / min(1, count)",
          ("methods/variational/test_mean_field.py::test_q_is_the_average_of_the_second_half_of_the_iterates",)),
    Fault("laplace: the covariance without T", "methods/laplace/curvature.py",
          "variances = temperature / require_positive(self.values + precision, hessian=self.hessian)",
          "variances = 1 / require_positive(self.values + precision, hessian=self.hessian)",
          ("methods/laplace/test_curvature.py::test_covariances_are_tempered_as_documented[0.3-model-diagonal]",)),
    Fault("laplace: S label draws are summed, not averaged", "methods/laplace/estimators.py",
          "return likelihood.score(terms.logits, labels) / math.sqrt(self.num_draws)",
          "return likelihood.score(terms.logits, labels)",
          ("methods/laplace/test_estimators.py::test_random_signs_and_labels_average_to_the_exact_curvature",)),
    Fault("laplace: the evidence's determinant has the wrong sign", "methods/laplace/evidence.py",
          "log_prior - 0.5 * self.curvature.log_det", "log_prior + 0.5 * self.curvature.log_det",
          ("methods/laplace/test_curvature.py::test_evidence_is_that_of_the_dense_formula",)),
    Fault("swag: the half is forgotten", "methods/averaging/swag.py",
          "self.squares / (2 * max(1, count))", "self.squares / max(1, count)",
          ("methods/averaging/test_swag.py::test_moments_are_those_of_the_iterates_of_torch_sgd[4]",)),
    # -- a posterior as prior
    Fault("continual: a posterior as prior keeps no mean", "distributions/priors.py",
          "return inherited.to(start)",
          "return Gaussian(torch.zeros_like(inherited.means), inherited.covariances).to(start)",
          ("models/test_inherited_prior.py::test_two_episodes_are_the_joint_posterior",)),
    Fault("continual: lambda multiplies the inherited precision, too", "methods/laplace/laplace.py",
          "covariance = temper(curvature, precision, temperature=self.temperature, what=self.temper)",
          "covariance = temper(curvature, precision, temperature=self.temperature / self.strength, what=self.temper)",
          ("models/test_inherited_prior.py::test_each_structure_adds_lambda_times_the_curvature[diagonal]",)),
    # -- the member axis and what is made of it
    Fault("folding: row b * M + m in place of m * B + b", "members/inputs.py",
          "return value.repeat(num_members, *[1] * (value.ndim - 1))",
          "return value.repeat_interleave(num_members, dim=0)", (FOLDED,)),
    Fault("folding: every member has the adapter of the first", "members/stacked.py",
          'a, b = self.tensor("lora_A"), self.tensor("lora_B")',
          'a, b = self.tensor("lora_A"), self.tensor("lora_B")[:1].expand(context.num_members, -1, -1)', (FOLDED,)),
    Fault("LoRA's scaling is left out", "members/stacked.py",
          "y.baddbmm_(low, b.mT, alpha=scaling)", "y.baddbmm_(low, b.mT)", (FOLDED,)),
    Fault("an input of another width is taken for other rows", "members/small_batches.py",
          " or input.shape[-1] != inputs", "",
          ("members/test_small_batches.py::test_inputs_of_another_width_are_refused_as_by_the_layer",)),
    Fault("of pairs of texts the second is left out", "cli/labels.py",
          "texts = [batch[text_column], *([] if pair_column is None else [batch[pair_column]])]",
          "texts = [batch[text_column]]",
          ("cli/test_labels.py::test_text_pairs_are_encoded_together_with_token_types",)),
    Fault("members' logits are averaged, not their probabilities", "uncertainty/member_block.py",
          "self.mean = probs.mul_(self.log_scale.exp2() / (len(block) * self.norm)).sum(0)",
          "self.mean = probs.div_(self.norm).log().mean(0).softmax(-1) * self.log_scale.exp2()",
          ("uncertainty/test_decomposition.py::test_the_mixture_is_the_log_of_the_mean_probability[torch.float64]",)),
    Fault("entropies are in bits", "uncertainty/member_block.py",
          "return (mass.log2() - log_mean / mass) * LN2",
          "return mass.log2() - log_mean / mass",
          ("uncertainty/test_decomposition.py::test_members_sure_of_different_classes_reach_the_bound",)),
    Fault("epistemic uncertainty is a sum over members", "uncertainty/member_block.py",
          "result = divergence.mean(0).mul_(mean).sum(-1).clamp_(min=0)",
          "result = divergence.sum(0).mul_(mean).sum(-1).clamp_(min=0)",
          ("uncertainty/test_member_block.py::test_small_epistemic_uncertainty_keeps_three_digits",)),
    Fault("what a pass of a stream has left over goes into the next update", "objectives/batches.py",
          "while len(update := list(itertools.islice(batches, self.accumulation))) == self.accumulation:",
          "while update := list(itertools.islice(batches, self.accumulation)):",
          ("training/test_streams.py::test_each_stream_update_is_scaled_by_its_own_micro_batches",)),
    Fault("a disabled adapter goes on adapting", "members/stacked.py",
          "return base if single is None else context.repeat(base)", "pass",
          ("members/test_stacked.py::test_a_disabled_adapter_leaves_the_base_model",)),
    Fault("threads do not wait for each other", "models/prediction_mode.py",
          "with self.lock, nullcontext() if not self.training else evaluating(self):",
          "with nullcontext() if not self.training else evaluating(self):",
          ("models/test_prediction_mode.py::test_threads_that_ask_one_model_take_turns",)),
    Fault("views of members are kept by the name of theta alone", "members/engine.py",
          "if self._viewed is None or self._viewed[0] is not theta or self._viewed[1] != kind:",
          "if self._viewed is None or self._viewed[0] is not theta:",
          ("members/test_engine.py::test_member_views_are_built_once_and_show_current_values",)),
    # -- what is saved, loaded, pushed and resumed
    Fault("sidecars are not written", "posteriors/posterior.py",
          "files |= self.sidecars.files", "files |= {}",
          ("posteriors/test_sidecars.py::test_a_loaded_posterior_keeps_its_tokenizer",)),
    Fault("sidecars may name code of any repository", "models/loading.py",
          "code_from=base_name", "code_from=None",
          ("posteriors/test_sidecars.py::test_code_beside_a_posterior_never_runs",)),
    Fault("sidecars are not downloaded", "posteriors/hub.py",
          'FILES = ("*.json", "*.safetensors", "*.md", *sidecars.NAMES)', 'FILES = ("*.json", "*.safetensors", "*.md")',
          ("posteriors/test_hub_roundtrip.py::test_a_push_to_a_branch_is_loaded_from_there",)),
    Fault("endless chat templates are kept", "posteriors/sidecars.py",
          "check_chat_template(template)", "str(template)",
          ("posteriors/test_sidecars.py::test_an_endless_chat_template_is_refused",)),
    Fault("unknown fields of a LoRA are accepted", "posteriors/lora_config.py",
          "if value and name not in _ONLY_FOR_START:", "if False:",
          ("posteriors/test_lora_config.py::test_a_field_that_no_posterior_supports_is_refused_by_name",)),
    Fault("a rank that the tensors do not have is accepted", "posteriors/lora_config.py",
          "if expected[module] != rank:", "if rank is None:",
          ("posteriors/test_lora_config.py::test_expressions_and_ranks_that_no_tensor_has_are_refused",)),
    Fault("the base model may lie in the posterior's own folder", "models/base_location.py",
          "return Path(os.path.realpath(name)).is_relative_to(repository if is_whole_repository else own)",
          "return False", ("models/test_base_location.py::test_the_posteriors_own_folder_is_no_base_model",)),
    # -- attaching, training and words
    Fault("a whole base model is sampled by default", "core/layout.py",
          "if fixed or not trainable:", "if trainable or fixed:",
          ("core/test_layout.py::test_a_base_with_nothing_frozen_needs_an_explicit_all",)),
    Fault("a host trainer's own loss is accepted", "training/host_trainers.py",
          "if own and not _minimises_likelihood(host):", "if own and host is None:",
          ("training/test_host_trainers.py::test_a_host_with_a_loss_of_its_own_is_refused_by_name",)),
    Fault("packed documents are not looked at", "models/packing.py",
          "torch.where(first, (ids + 1) % model.num_outputs, ids)", "ids",
          ("models/test_packing.py::test_a_model_that_mixes_packed_documents_is_refused",)),
    Fault("the first id that is too large is accepted", "models/input_check.py",
          "largest >= self.num_tokens:", "largest > self.num_tokens:",
          ("models/test_input_check.py::test_bad_inputs_are_refused_at_every_entrance",)),
    Fault("chains that left every plausible place pass", "diagnostics/plausibility.py",
          "return ratio is None or ratio > MAX_STRAYED", "return ratio is None",
          ("diagnostics/test_plausibility.py::test_a_rate_that_destroys_the_model_is_no_silence",)),
    Fault("errors that others follow from keep their control characters", "core/text_safety.py",
          "for each in _chain(error):", "for each in [error]:",
          ("core/test_text_safety.py::test_errors_are_readable_with_those_they_follow_from",)),
    # -- what people see
    Fault("the heat map is scaled to its largest token", "uncertainty/colour_scale.py",
          "end = REFERENCES[measure] if vmax is None else vmax",
          'end = vmax or max(token[measure] for record in records for token in record["tokens"])',
          ("pipelines/test_rendering.py::test_a_small_uncertainty_is_pale_whatever_stands_beside",)),
    Fault("the model card escapes nothing", "posteriors/model_card.py",
          "finalize=markdown,", "finalize=lambda value: value,",
          ("posteriors/test_model_card.py::test_values_cannot_break_the_card",)),
    Fault("the comparison with the MAP estimate ignores its error", "training/map_comparison.py",
          "abs(nll - map_nll) <= 2 * std_error", "abs(nll - map_nll) <= 0 * std_error",
          ("training/test_map_comparison.py::test_a_difference_within_two_standard_errors_is_not_told",)),
    Fault("a printed step holds every chain", "training/step_lines.py",
          "(.+)/chain_", "(.+)/member_",
          ("training/test_step_lines.py::test_a_line_holds_means_over_chains",)),
    # -- tasks
    Fault("a head of another kind is a classifier of sequences", "models/recognition.py",
          "        if found:\n            break\n    loaders",
          '        if found:\n            return TASKS["sequence_classification"]\n    loaders',
          ("models/test_recognition.py::test_another_head_is_refused_by_name_and_left_as_it_was",)),
    Fault("images belong to rows only where there are as many", "members/inputs.py",
          "if value.shape[0] == num_rows or name in PICTURES:", "if value.shape[0] == num_rows:",
          ("models/test_image_text.py::test_the_first_image_of_another_row_is_caught",)),
    Fault("a registered pipeline takes the tokenizer of the base", "pipelines/registration.py",
          "_load_tokenizer: ClassVar[bool] = False", "_load_tokenizer: ClassVar[bool] = True",
          ("pipelines/test_registration.py::test_a_directory_answers_as_our_own_pipeline_does",)),
    # -- checkpoints
    Fault("a checkpoint is not bound to the training rows", "training/run_identity.py",
          '        "data": data,', '        "data": {},',
          ("training/test_run_identity.py::test_a_changed_run_is_refused_by_name[rows of equal number]",)),
    Fault("files of a checkpoint are not checked", "training/checkpoints.py",
          "    _check_files(Path(checkpoint))\n", "",
          ("training/test_checkpoints.py::test_an_exchanged_file_is_refused_before_it_is_read[scheduler.pt]",)),
    Fault("a detached model counts as attached", "members/engine.py",
          "        self.attached = False\n        for item", "        for item",
          ("models/test_detached.py::test_a_detached_language_model_refuses[forward]",)),
    # -- Gaussians, Hamiltonian Monte Carlo, energies of users
    Fault("factor copied for every row", "distributions/covariance/full.py",
          "vectors.reshape(-1, self.dim)", "vectors",
          ("distributions/test_covariance.py::test_leading_dimensions_do_not_multiply_the_factors",)),
    Fault("centred variance without its factor", "uncertainty/gaussian_links.py",
          "(size / (size - 1)) ** 2 * centred", "centred",
          ("uncertainty/test_gaussian_links.py::test_probit_of_two_classes_is_mackays",)),
    Fault("one exception rejects all chains", "chains/energy_objective.py",
          "outside = outside | self._find_outside(theta, ~outside, chosen, gradient)", "outside = ~outside",
          ("chains/test_energy_objective.py::test_an_energy_that_raises_rejects_one_chain_as_nan_does",)),
    Fault("step size gain too large", "methods/mcmc/hmc.py",
          "2.5 * (t + 10) ** -0.75", "25 * (t + 10) ** -0.75",
          ("methods/mcmc/test_hmc.py::test_acceptance_after_burn_in_is_the_target[stretched]",)),
)
# fmt: on
