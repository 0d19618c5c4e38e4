"""Classes that own tables of positions which hfpatch leaves alone, and why: said by the plan, and by the error where
nothing else in the model can be changed.
"""

from __future__ import annotations

_POOLED = "queries are pooled, so they stand on a coarser grid than keys"
_ADDED = "positions are added to queries and keys in every attention of the decoder, which is no table to remove"

REFUSED: dict[str, str] = {
    "BridgeTowerVisionTransformer": "its attentions are torch's own, which project queries and keys in one call",
    "ConditionalDetrModel": _ADDED,
    "DetrModel": _ADDED,
    "EdgeTamVideoModel": _ADDED,
    "HieraModel": _POOLED,
    "Mask2FormerModel": _ADDED,
    "MaskFormerModel": _ADDED,
    "OneFormerModel": _ADDED,
    "PerceiverModel": "positions are joined to the inputs' channels, not added",
    "PvtModel": "keys are pooled, so they stand on a coarser grid than queries",
    "Sam2HieraDetModel": _POOLED,
    "TableTransformerModel": _ADDED,
    "TvpModel": "prompts of a fixed image size, text and images stand in one line, each with tables of its own",
    "VideoMAEForPreTraining": "its decoder adds sines to tokens that it puts in another order, hidden ones last",
    "ViltModel": "it puts an image's patches in random order, and its attentions aren't told which",
}
