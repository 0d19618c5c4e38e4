"""Classes with positions that hfpatch doesn't change, with reasons for plans, and for the error if nothing changes."""

from __future__ import annotations

_POOLED = "queries are pooled, so they stand on a coarser grid than keys"
_ADDED = "positions are added to queries and keys in every attention of the decoder, which is no table to remove"

REFUSED: dict[str, str] = {
    "AutoformerDecoder": "its attention correlates whole series, not one token with another",
    "AutoformerEncoder": "its attention correlates whole series, not one token with another",
    "BridgeTowerVisionTransformer": "its attentions are torch's own, which project queries and keys in one call",
    "ConditionalDetrModel": _ADDED,
    "ConvBertModel": "its convolutions are made of the queries too, and would see them rotated",
    "DetrModel": _ADDED,
    "EdgeTamVideoModel": _ADDED,
    "FNetModel": "it has no attention: Fourier transforms mix its tokens",
    "Florence2MultiModalProjector": "its tables are of an image's features, in front of another model's attentions",
    "HieraModel": _POOLED,
    "IBertModel": "it computes with integers and their scales, which a rotation leaves",
    "Mask2FormerModel": _ADDED,
    "MaskFormerModel": _ADDED,
    "MraModel": "its attention is a CUDA kernel of its own, which returns zeros elsewhere",
    "MusicFlamingoModel": "it rotates an audio's features themselves, by their times",
    "OneFormerModel": _ADDED,
    "PegasusXEncoder": "its global tokens have no position, so what they attend to would depend on absolute ones",
    "PerceiverModel": "positions are joined to the inputs' channels, not added",
    "ProphetNetDecoder": "its table also hands out the positions of its n-gram streams and of their relative biases",
    "PvtModel": "keys are pooled, so they stand on a coarser grid than queries",
    "ReformerModel": "its queries are its keys and are sorted into buckets, which a rotation would change",
    "Sam2HieraDetModel": _POOLED,
    "ClvpConditioningEncoder": "its text's positions are added in front of another module's attentions",
    "TableTransformerModel": _ADDED,
    "VideoMAEForPreTraining": "its decoder adds sines to tokens that it puts in another order, hidden ones last",
    "ViltModel": "it puts an image's patches in random order, and its attentions aren't told which",
}
