"""The LoRA configurations of posteriors: allowed fields with types and ranges, and modules by their full names.

A general ``adapter_config.json`` of peft can import modules, copy layers, decompose weights and match regular
expressions. A posterior only holds a LoRA on named modules:

* each field is one of ``FIELDS``, with a value in its range, or one of ``NEUTRAL``, with a value that does nothing;
* ``target_modules``, ``modules_to_save``, ``rank_pattern`` and ``alpha_pattern`` hold full module names. They come from
  the names and shapes of the tensors. Nothing is matched by a regular expression.

peft is not needed here. ``models.loading.lora_layers`` builds the layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hf_bayes.posteriors.file_formats import ADAPTER_CONFIG, MODEL_PREFIX, SAVED_MODULES
from hf_bayes.posteriors.storage.json_types import as_list, is_texts
from hf_bayes.posteriors.storage.json_values import json_value

FILE = ADAPTER_CONFIG
REPEATABLE = ("pissa", "olora")
"""Values of ``init_lora_weights`` that subtract the same part from the base model's weights each time."""
HARMLESS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` that leave the base model's weights unchanged."""

_TASK_TYPES = ("CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION")
_MAX_NAMES = 50_000
_MAX_NAME = 500
_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*")  # linear time: a part holds no dot
_FACTOR = re.compile(r"\.lora_(?:embedding_)?([AB])(?=\.|$)")


class Field(NamedTuple):
    """A field that a posterior's LoRA may have.

    Attributes:
        fits: a test of whether a value is allowed.
        expected: the allowed values in words.
    """

    fits: Callable[[Any], bool]
    expected: str


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e9


def _is_text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= 4096)


def _is_start(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str))


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_names(value: Any) -> bool:
    fits = is_texts(value) and len(value) <= _MAX_NAMES and all(len(name) <= _MAX_NAME for name in value)
    return value is None or fits


def _is_pattern(value: Any) -> bool:
    """Return whether a value is a list of names or a text. ``explicit`` refuses a text as a regular expression."""
    return _is_names(value) or isinstance(value, str)


def _is_indices(value: Any) -> bool:
    return value is None or all(type(index) is int and 0 <= index < 10**6 for index in as_list(value))


def _maps_to(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        value is None or (isinstance(value, dict) and _is_names(list(value)) and all(map(fits, value.values())))
    )


FIELDS = {
    "peft_type": Field(lambda value: value == "LORA", "LORA"),
    "task_type": Field(lambda value: value is None or value in _TASK_TYPES, f"null or one of {', '.join(_TASK_TYPES)}"),
    "base_model_name_or_path": Field(_is_text, "a text or null"),
    "revision": Field(_is_text, "a text or null"),
    "peft_version": Field(_is_text, "a text or null"),
    "inference_mode": Field(_is_boolean, "true or false"),
    "r": Field(_is_rank, "an integer >= 1"),
    "lora_alpha": Field(_is_scale, "a number > 0"),
    "lora_dropout": Field(lambda value: type(value) in (int, float) and 0 <= value < 1, "a number from 0 to below 1"),
    "bias": Field(lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only"),
    "fan_in_fan_out": Field(_is_boolean, "true or false"),
    "use_rslora": Field(_is_boolean, "true or false"),
    "init_lora_weights": Field(_is_start, "true, false or a name"),
    "target_modules": Field(_is_pattern, "a list of module names"),
    "exclude_modules": Field(_is_pattern, "a list of module names, or null"),
    "modules_to_save": Field(_is_names, "a list of names"),
    "layers_to_transform": Field(_is_indices, "null, an integer or a list of integers"),
    "layers_pattern": Field(_is_pattern, "a list of names, or null"),
    "rank_pattern": Field(_maps_to(_is_rank), "an object of module names and integers >= 1"),
    "alpha_pattern": Field(_maps_to(_is_scale), "an object of module names and numbers > 0"),
}
"""The fields with a meaning for a posterior."""

NEUTRAL = frozenset({
    "use_dora", "use_qalora", "lora_bias", "ensure_weight_tying", "layer_replication", "megatron_config",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "monteclora_config", "arrow_config", "kasa_config",
    "use_bdlora", "runtime_config",
})  # fmt: skip
"""Fields of peft that must be null, false or empty."""

IGNORED = frozenset({"auto_mapping", "megatron_core", "qalora_group_size"})
"""Fields that peft always writes. They name modules to import, and are never passed on."""

_ONLY_FOR_START = frozenset({"eva_config"})
"""Fields of ``NEUTRAL`` that only affect the initial values of the factors."""


def checked(values: Mapping[str, Any], where: str = FILE) -> dict[str, Any]:
    """Return the configuration of a LoRA after a check that posteriors support its fields.

    Args:
        values: plain values, as peft writes them.
        where: the name of the configuration in an error.
    Raises:
        ValueError: naming the field that is unknown, not supported, or out of range.
    """
    if values.get("peft_type") != "LORA":
        raise ValueError(f"{where}: peft_type must be LORA, got {values.get('peft_type')!r:.200}")
    for name, value in values.items():
        if name in FIELDS:
            if not FIELDS[name].fits(value):
                raise ValueError(f"{where}: {name} must be {FIELDS[name].expected}, got {value!r:.200}")
        elif name in NEUTRAL:
            if value and name not in _ONLY_FOR_START:
                raise ValueError(
                    f"{where}: {name}={value!r:.200} is not supported: a posterior holds a plain LoRA. Leave it out"
                )
        elif name not in IGNORED:
            raise ValueError(f"{where}: {name!r:.200} is not a field of a LoRA that hf_bayes supports")
    check_start(values.get("init_lora_weights"), where)
    return {name: value for name, value in values.items() if name not in _ONLY_FOR_START | IGNORED}


def for_inference(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``: plain values of supported fields, ready for inference.

    Raises:
        ValueError: if it is not a LoRA that posteriors support, naming the field.
    """
    return {**checked(json_value(values, FILE)), "inference_mode": True}


def check_start(start: Any, where: str = FILE) -> None:
    """Check that a posterior can hold a LoRA with this ``init_lora_weights``.

    Raises:
        ValueError: if it changes the base model's weights in a way that the posterior cannot repeat.
    """
    if start in HARMLESS or start in REPEATABLE:
        return
    raise ValueError(
        f"{where}: init_lora_weights={start!r:.200} changes the base model's weights in a way that cannot be repeated "
        "from the posterior alone. Use 'pissa' or a LoRA that leaves them as they are"
    )


def explicit(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str = FILE) -> dict[str, Any]:
    """Return the same LoRA with every module by its full name in the tensors. A second call changes nothing.

    Args:
        config: the result of ``checked``.
        shapes: parameter name (as in peft, with the adapter's name) -> shape of each tensor.
        where: the name of ``config`` in an error.
    Raises:
        ValueError: if a field holds a regular expression, or the tensors and the configuration disagree.
    """
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        if isinstance(config.get(name), str):
            raise ValueError(
                f"{where}: {name}={config[name]!r:.200} is a regular expression. A posterior lists modules by name, so "
                "that loading matches no expression: save it again with this version of hf_bayes"
            )
    _refuse_expressions(config, ("modules_to_save", "rank_pattern", "alpha_pattern"), where)
    ranks, targets = dict(_ranks(shapes)), set(config.get("target_modules") or ())
    expected = _values(ranks, config.get("rank_pattern"), config.get("r", 8))
    _require_named(ranks, targets, where)
    for module, rank in ranks.items():
        if expected[module] != rank:
            raise ValueError(f"{where}: r is {expected[module]} for {module}, whose tensors have rank {rank}")
    return _by_name(config, shapes, ranks)


def from_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str = FILE) -> dict[str, Any]:
    """Return ``explicit`` of an adapter that peft saved. The modules are read from the names of its tensors.

    Raises:
        ValueError: if ``alpha_pattern`` holds a regular expression, which the tensors cannot resolve, a list of modules
            lacks one that has tensors, or a rank is neither ``r`` nor in ``rank_pattern``.
    """
    _refuse_expressions(config, ("alpha_pattern",), where)
    ranks = dict(_ranks(shapes))
    if isinstance(config.get("target_modules"), list):
        _require_named(ranks, set(config["target_modules"]), where)
    known = {config.get("r", 8), *(config.get("rank_pattern") or {}).values()}
    if odd := next((module for module, rank in ranks.items() if rank not in known), None):
        raise ValueError(f"{where}: the tensors of {odd} have rank {ranks[odd]}, expected one of {sorted(known)[:5]}")
    return _by_name({**config, "exclude_modules": None}, shapes, ranks)


def shadowed(targets: Collection[str], modules: Iterable[str]) -> list[str]:
    """Return the modules that peft would also match, because their names end in ``.`` and the name of a target."""
    targets = set(targets)
    return [name for name in modules if name not in targets and next(_endings(name, targets), None) is not None]


def patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Return a ``rank_pattern`` or ``alpha_pattern`` of peft that gives each module its value.

    peft uses the first key that a module's name ends in. Therefore long names come first, and a module has its own
    entry if it would otherwise match a shorter key.
    """
    special = {module for module, value in values.items() if value != default}
    needed = [module for module in values if module in special or next(_endings(module, special), None) is not None]
    return {module: values[module] for module in sorted(needed, key=lambda name: (-len(name), name))}


def _by_name(config: Mapping[str, Any], shapes: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    alphas = _values(ranks, config.get("alpha_pattern"), config.get("lora_alpha", 8))
    marker = f".{SAVED_MODULES}."
    saved = {name.removeprefix(MODEL_PREFIX).partition(marker)[0] for name in shapes if marker in name}
    start = config.get("init_lora_weights")
    return {
        **config,
        "target_modules": sorted(ranks),
        "exclude_modules": config.get("exclude_modules") or None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": sorted(saved) or None,
        "rank_pattern": patterns(ranks, config.get("r", 8)),
        "alpha_pattern": patterns(alphas, config.get("lora_alpha", 8)),
        "init_lora_weights": start if start in REPEATABLE else True,
    }


def _ranks(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Yield (module, rank) for each factor A. The rank of the factor B must agree."""
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        factor = _FACTOR.search(name)
        if factor is None or name.endswith(".bias"):
            continue
        if not name.startswith(MODEL_PREFIX) or len(shape) < 2:
            raise ValueError(f"{name} of shape {list(shape)} is not a factor of a LoRA as peft names them")
        module, rank = name[len(MODEL_PREFIX) : factor.start()], shape[0] if factor[1] == "A" else shape[1]
        if found.setdefault(module, rank) != rank:
            raise ValueError(f"the factors of {module} have ranks {found[module]} and {rank}")
    yield from found.items()


def _endings(module: str, names: Collection[str]) -> Iterator[str]:
    """Yield the ``names`` that equal the module's name or its end after a dot, the longest first."""
    start = 0
    while True:
        if module[start:] in names:
            yield module[start:]
        start = module.find(".", start) + 1
        if not start:
            return


def _values(modules: Iterable[str], pattern: Mapping[str, Any] | None, default: Any) -> dict[str, Any]:
    """Return the value that peft finds for each module: the value of the first key in the pattern that matches."""
    order = {key: index for index, key in enumerate(pattern or {})}
    found = {}
    for module in modules:
        key = min(_endings(module, order), key=order.__getitem__, default=None)
        found[module] = default if key is None or pattern is None else pattern[key]
    return found


def _require_named(modules: Iterable[str], targets: Collection[str], where: str) -> None:
    for module in modules:
        if next(_endings(module, targets), None) is None:
            raise ValueError(f"{where}: the tensors hold factors of {module}, which target_modules does not name")


def _refuse_expressions(config: Mapping[str, Any], fields: Iterable[str], where: str) -> None:
    for field in fields:
        odd = next((name for name in config.get(field) or () if not _NAME.fullmatch(name)), None)
        if odd is not None:
            raise ValueError(
                f"{where}: {field} holds {odd!r:.200}, which is a regular expression and not a module's name: name "
                "each module"
            )
