"""Names of modules: matched by only= and keep= globs, with or without the base model's prefix, and names in lists."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import NoMatchError, OptionError
from .plan_table import Kept, Row
from .registry import did_you_mean

AND = " & "  # between globs that must all match; no name holds a space


def both(globs: tuple[str, ...], other: str) -> tuple[str, ...]:
    """Return globs that match a module if `other` and any of `globs` do (no globs: if `other` does)."""
    if other == "*":
        return globs
    return tuple(other if glob == "*" else f"{glob}{AND}{other}" for glob in globs or ("*",))


def as_globs(option: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return `only` or `keep` as a tuple of globs; one string is one glob.

    Raises:
        OptionError: an item isn't a string or is empty, or `only` is an empty list.
    """
    several = isinstance(value, Iterable) and not isinstance(value, str)
    globs: tuple[Any, ...] = () if value is None else tuple(value) if several else (value,)
    for glob in globs:
        if not isinstance(glob, str) or not glob:
            raise OptionError(f"{option} takes globs over module names such as '*.h.[0-5].*', not {glob!r:.80}.")
    if option == "only" and several and not globs:
        raise OptionError("only is an empty list, so nothing would change. Leave it out to change all modules.")
    return globs


@dataclass
class Names:
    """Module names as globs match them: with and without the base model's prefix.

    `transformer.h.0.*` written for GPT2LMHeadModel thus also names the modules of a bare GPT2Model, whose own names
    start at `h`, and the other way round.

    Attributes:
        prefix: transformers' name for the base model inside a model with a head ("transformer"), "" if it has no name.
        has_prefix: whether this model has a base model inside.
        headed: (name of a model with a head, name of its base model) for this model and for all models inside it.
    """

    prefix: str
    has_prefix: bool
    headed: list[tuple[str, str]]

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        prefix = getattr(model, "base_model_prefix", "")
        headed = []
        for name, module in model.named_modules():
            base = getattr(module, "base_model_prefix", "") if isinstance(module, PreTrainedModel) else ""
            if base and base in module._modules:
                here = f"{name}." if name else ""
                headed.append((here, f"{here}{base}."))
        return cls(prefix, bool(prefix) and prefix in model._modules, headed)

    def forms(self, name: str) -> tuple[str, ...]:
        """Return a name unchanged, and with the base model's prefix added or removed."""
        if not self.prefix:
            return (name,)
        return (name, name.removeprefix(f"{self.prefix}.") if self.has_prefix else f"{self.prefix}.{name}")

    def in_head(self, name: str) -> bool:
        """Return whether a module belongs to a head rather than to a base model."""
        return any(name.startswith(model) and not name.startswith(base) for model, base in self.headed)

    def reason_to_keep(self, names: Sequence[str], only: Sequence[str], keep: Sequence[str]) -> str | None:
        """Return why the request's globs keep a module of these names; None if they let it change."""
        if any(self.matches(glob, names) for glob in keep):
            return Kept.BY_KEEP
        if only and not any(self.matches(glob, names) for glob in only):
            return Kept.NOT_IN_ONLY
        return None

    def explicitly_selected(self, only: Sequence[str], special: Mapping[tuple[str, ...], bool]) -> set[tuple[str, ...]]:
        """Return the special modules that a glob of `only` selects; others of them are kept.

        A glob selects them if it matches special modules alone: `*` selects none.

        Args:
            only: globs.
            special: for the names of each module that could change, whether it is special.
        """
        found: set[tuple[str, ...]] = set()
        for glob in only:
            matched = [names for names in special if self.matches(glob, names)]
            if all(special[names] for names in matched):
                found.update(matched)
        return found

    def matches(self, glob: str, names: Iterable[str]) -> bool:
        """Return whether a glob matches a module that has any of these names.

        `*` matches any characters, dots too; "a & b" matches what both of its globs match.
        """
        forms = [form for name in names for form in self.forms(name)]
        return all(any(fnmatch.fnmatchcase(form, one) for form in forms) for one in glob.split(AND))


def require_all_match(names: Names, globs: dict[str, tuple[str, ...]], rows: Sequence[Row]) -> None:
    """Refuse globs that match none of the modules that the request could touch.

    Args:
        names: the model's.
        globs: `only` and `keep`.
        rows: every line of the plan, those of kept modules included.

    Raises:
        NoMatchError: names the glob and some of the modules that it could have matched.
    """
    for option, patterns in globs.items():
        for glob in patterns:
            if not any(names.matches(glob, (row.module, *row.aliases)) for row in rows):
                raise no_match(f"{option}={glob!r}", glob, rows)


def no_match(request: str, glob: str, rows: Sequence[Row]) -> NoMatchError:
    """Return the error for a glob that matches none of the plan's rows, with a similar name and some that exist."""
    shown = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", row.module) for row in rows))
    ends = sorted({f"*.{name.rpartition('.')[2]}" for name in shown})
    return NoMatchError(
        f"{request} matches none of the {len(rows)} modules that this request could change."
        f"{did_you_mean(glob, [*ends, *shown])} Their names look like: {', '.join(shown[:8])}."
    )


def listed_modules(model: nn.Module) -> dict[str, str]:
    """Return the elements of the outermost `nn.ModuleList`s, with the list's name."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{element}.") for element in found):
            found |= {f"{name}.{child}": name for child, element in module._modules.items() if element is not None}
    return found


def same_layer(outer: str, inner: str) -> bool:
    """Return whether another module's name begins with the numbers in a module's, as in h.0.ln and h.0.experts.3."""
    own, others = ([piece for piece in name.split(".") if piece.isdigit()] for name in (outer, inner))
    return others[: len(own)] == own
