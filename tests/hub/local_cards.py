"""What the Hub has against the metadata of a model card."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

LICENSES = {
    "apache-2.0",
    "mit",
    "bsd-3-clause",
    "cc-by-4.0",
    "cc-by-sa-4.0",
    "gpl-3.0",
    "llama3",
    "gemma",
    "other",
    "unknown",
}
RELATIONS = ("adapter", "finetune", "merge", "quantized")


def metadata(card: str) -> tuple[dict[str, Any] | None, str | None]:
    """The metadata of a card, or what is wrong with its YAML."""
    match = re.match(r"\s*---\r?\n(.*?)\r?\n---\s*(\n|$)", card, re.DOTALL)
    if not match:
        return None, None
    try:
        return yaml.safe_load(match[1]), None
    except yaml.YAMLError as error:
        return None, str(error)


def problems(card: str) -> tuple[list[str], list[str]]:
    """Errors and warnings, by the rules of the Hub's card validation that concern models."""
    data, broken = metadata(card)
    if broken:
        return [broken], []
    if not data:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(data, dict):
        return ["YAML metadata is no mapping"], []
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "license": (lambda value: set(_listed(value)) <= LICENSES, "must be a known licence"),
        "base_model": (lambda value: all(map(_is_id, _listed(value))), "must be ids of models"),
        "base_model_relation": (lambda value: value in RELATIONS, f"must be one of {', '.join(RELATIONS)}"),
        "tags": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "must be a list of texts"),
        "pipeline_tag": (_is_text, "must be a text"),
        "library_name": (_is_text, "must be a text"),
        "model-index": (_is_index, "must be a list of models with results"),
    }
    return [f'"{name}" {what}' for name, (good, what) in rules.items() if name in data and not good(data[name])], []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_id(value: Any) -> bool:
    return _is_text(value) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value) is not None


def _is_index(index: Any) -> bool:
    try:
        results = [result for model in index if isinstance(model["name"], str) for result in model["results"]]
        return bool(results) and all(
            isinstance(result["task"]["type"], str)
            and isinstance(result["dataset"]["type"], str)
            and isinstance(result["dataset"]["name"], str)
            and all(isinstance(metric["type"], str) and "value" in metric for metric in result["metrics"])
            for result in results
        )
    except (KeyError, TypeError):
        return False
