"""The list of the private names of transformers that the package reads or overrides.

Some are names of methods that our classes override, and stand in these classes, too. All others are read by the
functions of ``compat.transformers``, or are public names without a documented contract.
"""

from __future__ import annotations

from hf_bayes.core.compat import PrivateName

CHECKPOINTING = "gradient_checkpointing"
"""The flag of a module that recomputes its activations in the backward pass."""

CHECKPOINTING_FUNCTION = "_gradient_checkpointing_func"
"""The function that such a module calls: torch's ``checkpoint`` with its keywords bound."""

INPUT_GRAD_HOOKS = "_require_grads_hooks"
"""The handles of the hooks that make embeddings require a gradient, for reentrant checkpointing."""

_BLOCK = "transformers.modeling_layers.GradientCheckpointingLayer"
_LAYER, _CACHE = "transformers.cache_utils.DynamicLayer", "transformers.cache_utils.DynamicCache"
_CONFIG, _MODEL = "transformers.PreTrainedConfig", "transformers.PreTrainedModel"
_GENERATION = "transformers.GenerationMixin"
_JIT = "transformers.trainer_jit_checkpoint"
_MAPPING = "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING"
_PIPELINE = "transformers.Pipeline"
_TRAINER = "transformers.Trainer"

_OF_MODELS = (
    PrivateName(_BLOCK, CHECKPOINTING, None, "replaced"),
    PrivateName(_BLOCK, CHECKPOINTING_FUNCTION, None, "replaced"),
    PrivateName(_MODEL, INPUT_GRAD_HOOKS, None, "replaced"),
    PrivateName(
        _MODEL, "_set_gradient_checkpointing", ("enable", "gradient_checkpointing_func", "every_n_layers"), "called"
    ),
    PrivateName(_MODEL, "enable_input_require_grads", (), "called"),
    PrivateName(_MODEL, "disable_input_require_grads", (), "called"),
    PrivateName(
        _MODEL,
        "_check_and_adjust_attn_implementation",
        ("attn_implementation", "is_init_check", "allow_all_kernels"),
        "overridden",
    ),
    PrivateName(_MODEL, "_check_and_adjust_experts_implementation", ("experts_implementation",), "overridden"),
    PrivateName(_MODEL, "_supports_sdpa", None, "overridden"),
    PrivateName(_MODEL, "_supports_flash_attn", None, "overridden"),
    PrivateName(_MODEL, "_supports_flex_attn", None, "overridden"),
    PrivateName(_MODEL, "_supports_attention_backend", None, "overridden"),
    PrivateName(
        "transformers.Wav2Vec2PreTrainedModel",
        "_get_feat_extract_output_lengths",
        ("input_lengths", "add_adapter"),
        "called",
    ),
    PrivateName(_CONFIG, "_attn_implementation", None, "read"),
    PrivateName(_CONFIG, "_experts_implementation", None, "read"),
    PrivateName(_CONFIG, "_name_or_path", None, "read"),
    PrivateName("transformers.AutoModelForCausalLM", "_model_mapping", None, "read"),
    PrivateName(_MAPPING, "_model_mapping", None, "read"),
    PrivateName(_MAPPING, "_extra_content", None, "read"),
)

_OF_CACHES = (
    PrivateName(_LAYER, "update", ("key_states", "value_states", "args", "kwargs"), "overridden"),
    PrivateName(_LAYER, "lazy_initialization", ("key_states", "value_states"), "called"),
    PrivateName(_LAYER, "reorder_cache", ("beam_idx",), "called"),
    PrivateName(_LAYER, "is_initialized", None, "read"),
    PrivateName(_LAYER, "keys", None, "replaced"),
    PrivateName(_LAYER, "values", None, "replaced"),
    PrivateName(_CACHE, "layers", None, "replaced"),
    PrivateName(_CACHE, "offloading", None, "read"),
)

_TO_PROCESSORS = ("generation_config", "input_ids_seq_length", "encoder_input_ids", "prefix_allowed_tokens_fn",
                  "logits_processor", "device", "model_kwargs", "negative_prompt_ids",
                  "negative_prompt_attention_mask")  # fmt: skip

_OF_GENERATION = (
    PrivateName(_GENERATION, "_reorder_cache", None, "provided"),
    PrivateName(
        _GENERATION,
        "_prepare_generated_length",
        (
            "generation_config",
            "has_default_max_length",
            "has_default_min_length",
            "model_input_name",
            "input_ids_length",
            "inputs_tensor",
        ),
        "overridden",
    ),
    PrivateName(
        _GENERATION,
        "_prepare_cache_for_generation",
        ("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"),
        "overridden",
    ),
    PrivateName(
        _GENERATION,
        "_prepare_attention_mask_for_generation",
        ("inputs_tensor", "generation_config", "model_kwargs"),
        "overridden",
    ),
    PrivateName(_GENERATION, "_prepare_position_ids_for_generation", ("inputs_tensor", "model_kwargs"), "overridden"),
    PrivateName(
        _GENERATION,
        "_update_model_kwargs_for_generation",
        ("outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"),
        "overridden",
    ),
    PrivateName(
        _GENERATION,
        "_expand_inputs_for_generation",
        ("expand_size", "is_encoder_decoder", "input_ids", "model_kwargs"),
        "overridden",
    ),
    PrivateName(
        _GENERATION,
        "_expand_multimodal_outputs",
        ("input_ids", "mm_encoder_output", "expand_size", "inputs_embeds"),
        "accepted",
    ),
    PrivateName(_GENERATION, "_get_logits_processor", _TO_PROCESSORS, "overridden"),
    PrivateName(
        _GENERATION, "_get_stopping_criteria", ("generation_config", "stopping_criteria", "tokenizer"), "overridden"
    ),
    PrivateName(_GENERATION, "_valid_auto_compile_criteria", ("model_kwargs", "generation_config"), "overridden"),
    PrivateName(_GENERATION, "_validate_model_kwargs", ("model_kwargs",), "overridden"),
)

_OF_PIPELINES = (
    PrivateName(_PIPELINE, "_sanitize_parameters", ("pipeline_parameters",), "overridden"),
    PrivateName(_PIPELINE, "_forward", ("input_tensors", "forward_parameters"), "overridden"),
    PrivateName(_PIPELINE, "_prepare_generate_kwargs", ("generate_kwargs", "overrides"), "overridden"),
    PrivateName(_PIPELINE, "_load_tokenizer", None, "overridden"),
    PrivateName(_PIPELINE, "_load_image_processor", None, "overridden"),
    PrivateName(_PIPELINE, "_load_feature_extractor", None, "overridden"),
    PrivateName(_PIPELINE, "_load_video_processor", None, "overridden"),
    PrivateName(_PIPELINE, "_load_processor", None, "overridden"),
    PrivateName(_PIPELINE, "_batch_size", None, "read"),
    PrivateName(_PIPELINE, "_preprocess_params", None, "read"),
    PrivateName("transformers.pipelines.pipeline", "_from_pipeline", None, "argument"),  # of from_pretrained
)

_OF_TRAINERS = (
    PrivateName(_TRAINER, "_save_checkpoint", ("model", "trial"), "overridden"),
    PrivateName(_TRAINER, "_save_optimizer_and_scheduler", ("output_dir",), "overridden"),
    PrivateName(_TRAINER, "_load_from_checkpoint", ("resume_from_checkpoint", "model"), "overridden"),
    PrivateName(_TRAINER, "_load_optimizer_and_scheduler", ("checkpoint",), "overridden"),
    PrivateName(_TRAINER, "_load_rng_state", ("checkpoint",), "overridden"),
    PrivateName(_TRAINER, "_get_grad_norm", ("model", "grad_norm"), "overridden"),
    PrivateName(_TRAINER, "_prepare_inputs", ("inputs",), "called"),
    PrivateName(_TRAINER, "_remove_unused_columns", ("dataset", "description"), "called"),
    PrivateName(_TRAINER, "_get_collator_with_removed_columns", ("data_collator", "description"), "called"),
    PrivateName(_TRAINER, "_set_signature_columns_if_needed", (), "called"),
    PrivateName(_TRAINER, "_signature_columns", None, "replaced"),
    PrivateName(_TRAINER, "_get_output_dir", ("trial",), "called"),
    PrivateName(_TRAINER, "compute_loss_context_manager", (), "called"),
    PrivateName(f"{_JIT}.JITCheckpointCallback", "jit_manager", None, "read"),
    PrivateName(f"{_JIT}.CheckpointManager", "is_checkpoint_requested", None, "replaced"),
    PrivateName(f"{_JIT}.CheckpointManager", "setup_signal_handler", (), "called"),
    PrivateName(_TRAINER, "_get_train_sampler", ("train_dataset",), "refused"),  # see checks.host_trainers
)

NAMES = (*_OF_MODELS, *_OF_CACHES, *_OF_GENERATION, *_OF_PIPELINES, *_OF_TRAINERS)
"""The private names of transformers."""
