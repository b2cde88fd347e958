"""Planted faults: the memory of an update."""

from __future__ import annotations

from tests.mutants.fault import Fault

UPDATE = "methods/sgmcmc/test_whitening.py::test_an_update_takes_little_memory_beside_the_state"

# fmt: off
SIXTH_REVIEW_MEMORY = (
    Fault("memory: a pair of minibatches is kept beside the next one", "methods/sgmcmc/laplace_trial.py",
          "torch.zeros_like(trial.previous[:, :, :1])", "torch.stack(gradients, 1)", (UPDATE,)),
    Fault("memory: a trial takes the changes of all chains at once", "methods/sgmcmc/laplace_trial.py",
          "    pairs = torch.stack(",
          "    changes = torch.stack(gradients, 1) - trial.previous\n    assert len(changes)\n    pairs = torch.stack(",
          (UPDATE,)),
    Fault("memory: what is not known yet takes memory", "methods/sgmcmc/whitening.py",
          "zeros = number.expand_as(theta)", "zeros = torch.zeros_like(theta)", (UPDATE,)),
    Fault("memory: the draw on trial is kept for the rest of the run", "methods/sgmcmc/whitening.py",
          "torch.zeros_like(state.direction[:, :1])", "state.direction", (UPDATE,)),
    Fault("memory: the noise of an update of mean_field is kept", "methods/variational/mean_field.py",
          "torch.zeros_like(state.noise[..., :1])", "state.noise",
          ("methods/variational/test_mean_field.py::test_the_noise_of_an_update_is_not_kept",)),
)
# fmt: on
