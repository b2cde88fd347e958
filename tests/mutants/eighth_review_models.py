"""Planted faults: scalings of adapters, copies of models, widened models, and changes of the model inside."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
EIGHTH_REVIEW_MODELS = (
    Fault("eighth: a scaling that was set is saved as the first alpha", "models/loading/lora_layers.py",
          "return float(scaling * divisor)", "return own",
          ("models/loading/test_lora_layers.py::test_a_scaling_that_was_set_comes_back",)),
    Fault("eighth: the alpha of rsLoRA is taken from the rank", "models/loading/lora_layers.py",
          "math.sqrt(layer.r[adapter]) if config.use_rslora else layer.r[adapter]", "layer.r[adapter]",
          ("models/loading/test_lora_layers.py::test_a_scaling_that_was_set_comes_back",)),
    Fault("eighth: OLoRA is saved with another scaling than it began with", "models/loading/lora_layers.py",
          "if config.init_lora_weights in lora_config.REPEATABLE:", "if False:",
          ("models/loading/test_lora_layers.py::test_scalings_that_no_alpha_gives_are_refused",)),
    Fault("eighth: a copy of a single pass computes with the norms of the original", "models/single_pass/installed.py",
          "return partial(_through, _FAMILY_RMS_NORM, module)",
          "return lambda x: _through(_FAMILY_RMS_NORM, module, x)",
          ("models/single_pass/test_installed.py::test_a_copy_computes_with_its_own_modules",)),
    Fault("eighth: the variances of a bias keep the dtype of the posterior", "models/single_pass/weight_laws.py",
          "offset = moved(offset, mean)", "offset = offset",
          ("models/single_pass/test_weight_laws.py::test_a_law_has_the_dtype_of_its_mean",)),
    Fault("eighth: a method of transformers changes the model inside", "models/host_methods.py",
          "setattr(HostMethods, _name, refusal_of(_name))", "pass",
          ("models/test_host_methods.py::test_a_change_of_the_model_inside_is_refused",)),
)
# fmt: on
