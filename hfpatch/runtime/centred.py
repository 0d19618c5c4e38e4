"""The lens on a model that centres embeddings which are passed in place of tokens, as its own embeddings are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from .lens import Arguments, centred


@dataclass(frozen=True)
class CentredArgument:
    """Subtracts the mean over channels, x - mean(x), from an argument (B, T, d): `inputs_embeds`.

    An exact RMSNorm needs a residual stream of mean zero. Embeddings of a user (soft prompts, PEFT's prompt tuning)
    don't pass the table whose weights or outputs the patch centres.
    """

    name: str
    hfpatch_note: ClassVar[str] = "embeddings passed in place of tokens are centred"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        embeddings = arguments.get(self.name)
        return {}, {} if embeddings is None else {self.name: centred(embeddings, -1)}
