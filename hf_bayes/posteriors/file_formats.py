"""File names and keys of the formats in which peft and transformers write and read their files.

``tests/posteriors/test_file_formats.py`` compares them with the installed libraries. peft and transformers are not
imported here, so that the files of a posterior can be checked without them.
"""

from __future__ import annotations

# -- peft ------------------------------------------------------------------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_NAME = "default"
"""The name that peft gives to an adapter that is loaded without a name."""
MODEL_PREFIX = "base_model.model."
"""The text that peft puts before the name of each module of its base model."""
LORA_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""The modules and parameters of a peft layer that hold the factors of a LoRA."""
SAVED_MODULES = "modules_to_save"
"""The attribute of peft's wrapper around a module that is trained whole."""

# -- transformers ----------------------------------------------------------------------------------------------------

GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Two files and a folder in which transformers looks for chat templates."""
CODE_REFERENCES = "auto_map"
"""The key of a config whose values name code to import, as "repository--module.Class"."""
FURTHER_FILES = ("fast_tokenizer_files",)
"""Keys of a tokenizer's config that name further files to read."""
VOCABULARY_FILES = ("vocab", "merges", "gguf_file")
"""Keys of a tokenizer's config whose value is the path of a file to read, if it is a text."""
CHECKPOINT_FOLDERS = "checkpoint-*"
"""The folders of the Trainer's checkpoints."""
SAFETENSORS_METADATA = {"format": "pt"}
"""The header entry that transformers requires of a safetensors file."""
