"""Look-ups in transformers' Auto classes: which Auto classes open a model class, which class a config selects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import transformers

from ..runtime.patch_errors import PatchError
from ..runtime.record import saved_from

# the heads to look at first; the others follow in transformers' own order, and AutoModel comes last
USUAL = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
)


def auto_classes() -> Iterator[Any]:
    """Yield every Auto class of transformers that opens models."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    for value in vars(modeling_auto).values():
        if isinstance(value, type) and issubclass(value, _BaseAutoModelClass):
            auto: Any = value
            if auto._model_mapping is not None:
                yield auto


def model_classes_of(auto: Any, config_class: type) -> tuple[Any, ...]:
    """Return the model classes that an Auto class opens for a config's class."""
    try:
        found = auto._model_mapping.get(config_class, ())
    except ValueError:  # transformers names a class there that it doesn't have
        return ()
    return _several(found)


def _several(found: Any) -> tuple[Any, ...]:
    """The model classes, one or several, that a mapping of transformers has for a model type."""
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def opening(config_class: type) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield every Auto class that opens a config's class, with the model classes that it opens for it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_types = [one for one, name in CONFIG_MAPPING_NAMES.items() if name == config_class.__name__]
    for auto in auto_classes():
        mapping = auto._model_mapping  # its own look-up goes through all model types if it knows none
        known = config_class in mapping._extra_content or any(one in mapping._model_mapping for one in model_types)
        models = model_classes_of(auto, config_class) if known else ()
        if models:
            yield auto, models


def model_types_of(class_name: str) -> set[str]:
    """Return the model types for which an Auto class opens a class of this name."""
    found = set()
    for auto in auto_classes():
        mapping = auto._model_mapping
        named = dict(mapping._model_mapping)
        for config, models in mapping._extra_content.items():
            named[config.model_type] = tuple(one.__name__ for one in _several(models))
        found |= {one for one, names in named.items() if class_name in _several(names)}
    return found


def auto_classes_of(model_class: type, config_class: type, order: Iterable[str] = USUAL) -> list[str]:
    """Return the public Auto classes that open a class, in this order: those in `order`, others, AutoModel last."""
    first = list(order)
    found = [
        auto.__name__
        for auto, models in opening(config_class)
        if getattr(transformers, auto.__name__, None) == auto and model_class in models
    ]
    ranks = {name: rank for rank, name in enumerate(first)} | {"AutoModel": len(first) + len(found)}
    return sorted(found, key=lambda name: ranks.get(name, len(first)))


def class_to_build(config: Any, head: str | None = None) -> Any:
    """Return the Auto class `head`, else the class that the config was saved from, else the family's usual head.

    Raises:
        PatchError: transformers has no Auto class of that name.
    """
    if head is not None:
        named = getattr(transformers, head, None)
        if named is None or not hasattr(named, "from_config"):
            raise PatchError(f"transformers has no Auto class {head!r}; try AutoModel or one of {', '.join(USUAL)}.")
        return named
    usual: list[Any] = [getattr(transformers, name) for name in (*USUAL, "AutoModel")]
    architectures = saved_from(config)
    for auto in usual:
        if any(one.__name__ in architectures for one in model_classes_of(auto, type(config))):
            return auto
    mapped = getattr(config, "auto_map", None) or {}  # code of the repository
    if remote := next((auto for auto in usual if auto.__name__ in mapped), None):
        return remote
    saved = getattr(transformers, architectures[0], None) if architectures else None
    return saved or next((auto for auto in usual if type(config) in auto._model_mapping), transformers.AutoModel)
