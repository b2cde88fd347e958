"""Mistakes in the data, in the settings of a method, and in its target."""

from __future__ import annotations

import math

from datasets import Dataset

from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.bad_input.making import (
    NAN,
    Refused,
    Stream,
    built_before,
    config,
    custom_none,
    images,
    labelled,
    launched,
    run,
    training,
)
from tests.tiny_models import (
    tiny_bert,
    tiny_vit,
)

METHOD_AND_DATA = [
    # NaN in the data: the step is named; training/test_not_finite.py has more
    Refused(
        "not finite",
        "a label that is NaN",
        lambda out: run(
            out,
            model=tiny_bert(num_labels=1),
            subspace="last_layer",
            train=labelled(NAN),
            noise_std=1.0,
            per_device_train_batch_size=4,
        ),
        ("row 1 of train_dataset", "outside the finite numbers", "nan"),
    ),
    Refused(
        "not finite",
        "a pixel that is NaN",
        training(model=tiny_vit, subspace="last_layer", train=images(NAN), per_device_train_batch_size=4),
        ("non-finite", "at step 1 (chains 0, 1", "check the data"),
        FloatingPointError,
    ),
    # the data set
    Refused("data", "empty data", training(train=Dataset.from_list([])), ("train_dataset has 0 rows", "N is needed")),
    Refused("data", "no data", lambda out: custom_none(out), ("training needs a train_dataset", "got None")),
    Refused("data", "a stream", training(train=Stream(), max_steps=-1), ("is a stream", "cannot infer N", "num_data=")),
    Refused(
        "data",
        "a stream, chain by chain",
        training(train=Stream(), num_data=7.0),
        ("is a stream", "minibatch='shared'"),
    ),
    Refused(
        "data",
        "a stream without end",
        training(train=Stream(), num_data=7.0, minibatch="shared", max_steps=-1),
        ("is a stream", "set max_steps"),
    ),
    Refused(
        "data",
        "a stream for an exact kernel",
        training(method=HMCConfig(num_chains=1), train=Stream(), num_data=7.0, minibatch="shared"),
        ("is a stream", "hmc needs all rows", "materialise it"),
    ),
    Refused(
        "data",
        "a stream for a second look",
        training(method=LaplaceConfig(), train=Stream(), num_data=7.0, minibatch="shared"),
        ("is a stream", "laplace passes over all rows once more", "materialise it"),
    ),
    Refused("data", "no labels", training(train=[{"input_ids": [5, 6, 7]}] * 4), ("no labels", "input_ids")),
    # counts
    *[
        Refused(
            "counts",
            f"num_chains={value}",
            config(num_chains=value),
            ("num_chains must be an integer >= 1", f"got {value!r}"),
        )
        for value in (0, -1, 1.5, True, "4")
    ],
    Refused(
        "counts", "draws_per_chain=0", config(draws_per_chain=0), ("draws_per_chain must be an integer >= 1, got 0",)
    ),
    Refused("counts", "thin=0", config(thin=0), ("thin must be an integer >= 1, got 0",)),
    Refused("counts", "members_per_pass=0", training(members_per_pass=0), ("members_per_pass must be >= 1, got 0",)),
    # temperature
    *[
        Refused(
            "temperature", f"temperature={value}", config(temperature=value), ("temperature must be", f"got {value!r}")
        )
        for value in (-1.0, NAN, math.inf, "1")
    ],
    Refused("temperature", "map at T = 1", config("map", temperature=1.0), ("map: temperature must be 0, got 1.0",)),
    Refused(
        "temperature", "hmc at T = 0", config("hmc", temperature=0.0), ("hmc: temperature must be > 0", 'method="map"')
    ),
    Refused(
        "temperature",
        "unknown tempering",
        config(temper="both"),
        ("temper must be one of posterior, likelihood", "'both'"),
    ),
    # step sizes and schedules
    *[
        Refused(
            "schedule",
            f"learning_rate={value}",
            training(learning_rate=value),
            ("learning_rate must be", "> 0", f"{value!r}"),
        )
        for value in (0.0, -0.1, NAN)
    ],
    Refused(
        "schedule",
        "a schedule below 0",
        training(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": -0.01}, max_steps=20),
        ("learning rate of -", "at step", "within 0 and learning_rate=0.01", "lr_scheduler_kwargs"),
    ),
    Refused(
        "schedule",
        "a schedule above its peak",
        training(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.02}, max_steps=20),
        ("at step 2", "within 0 and learning_rate=0.01", "frictions"),
    ),
    # friction
    Refused("friction", "momentum=1", config(momentum=1.0), ("momentum must be", "< 1, got 1.0")),
    Refused("friction", "momentum=-0.1", config(momentum=-0.1), ("momentum must be", ">= 0", "got -0.1")),
    # draws
    Refused(
        "draws",
        "more draws than updates",
        training(SGHMCConfig(draws_per_chain=9)),
        ("cannot give 9 draws", "train longer"),
    ),
    Refused(
        "draws",
        "burn-in of the whole run",
        training(SGHMCConfig(burn_in=6)),
        ("6 updates with burn_in=6", "would collect 0"),
    ),
    # Trainer takes 0 for the number of updates, and would stop after one
    Refused("draws", "no updates", training(max_steps=0), ("0 updates", "cannot give 1 draws", "train longer")),
    Refused(
        "draws",
        "thinning past the run",
        training(SGHMCConfig(draws_per_chain=2, thin=50)),
        ("thin=50", "cannot give 2"),
    ),
    Refused(
        "draws",
        "a warm start as long as the run",
        training(SGHMCConfig(warm_start_steps=6)),
        ("would collect 0", "6 updates"),
    ),
    # what would change the law
    Refused(
        "target",
        "weight decay",
        training(weight_decay=0.01),
        ("weight_decay=0 (got 0.01)", "counted twice", "prior_std"),
    ),
    Refused("target", "clipping", training(max_grad_norm=1.0), ("max_grad_norm=0 (got 1.0)", "stationary")),
    Refused(
        "target", "another optimizer", training(optim="adafactor"), ("optim of the arguments", "sghmc is the optimizer")
    ),
    Refused("target", "its betas", training(adam_beta1=0.5), ("adam_beta1", "fields of the method's config")),
    Refused("target", "label smoothing", training(label_smoothing_factor=0.1), ("label_smoothing_factor must be 0",)),
    Refused("target", "compiling", training(torch_compile=True), ("torch_compile", "block.compile()")),
    Refused("target", "noise on embeddings", training(neftune_noise_alpha=5.0), ("neftune_noise_alpha", "likelihood")),
    Refused("target", "fp16", training(fp16=True), ("fp16 is refused", "bf16")),
    Refused(
        "target",
        "steps that follow evaluations",
        training(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1),
        ("would follow held-out rows", "'cosine'"),
    ),
    Refused("target", "rounding at evaluations", training(bf16_full_eval=True), ("would round", "Set bf16=True")),
    Refused(
        "target",
        "fp16 of the launcher",
        launched("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("fp16 is refused", "--mixed_precision bf16"),
    ),
    Refused(
        "target",
        "fp8 of the launcher",
        launched("ACCELERATE_MIXED_PRECISION", "fp8"),
        ("fp8 is refused", "bf16) or float32"),
    ),
    Refused(
        "target",
        "fp16 of the accelerator",
        lambda out: built_before(out, mixed_precision="fp16"),
        ("mixed precision fp16 is refused", "expected one of no, bf16"),
    ),
    # the prior
    *[
        Refused("prior", f"prior_std={value}", config(prior_std=value), ("prior_std must be", "> 0", f"got {value!r}"))
        for value in (0.0, -1.0, NAN)
    ],
    Refused("prior", "one std of several", config(prior_std={"a": 1.0, "b": 0.0}), ("prior_std must be", "got 0.0")),
    Refused(
        "prior",
        "a parameter without a prior",
        training(SGHMCConfig(prior_std={"q_proj": 1.0})),
        ("no expression that matches", "v_proj.lora_A", "['q_proj']"),
    ),
    Refused(
        "prior", "unknown prior mean", config(prior_mean="map"), ("prior_mean must be one of zero, initial", "'map'")
    ),
    # the subspace
]
