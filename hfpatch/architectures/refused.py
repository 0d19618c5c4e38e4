"""Classes that own a table of positions and can't be served, with the reason that a plan gives. Data, no behaviour."""

REFUSED: dict[str, str] = {
    "AutoformerDecoder": "its attention correlates whole series, not one token with another",
    "AutoformerEncoder": "its attention correlates whole series, not one token with another",
    "ClvpConditioningEncoder": "its text's positions are added in front of another module's attentions",
    "ConvBertModel": "its convolutions are made of the queries too, and would see them rotated",
    "FNetModel": "it has no attention: Fourier transforms mix its tokens",
    "IBertModel": "it computes with integers and their scales, which a rotation leaves",
    "MraModel": "its attention is a CUDA kernel of its own, which returns zeros elsewhere",
    "PegasusXEncoder": "its global tokens have no position, so what they attend to would depend on absolute ones",
    "ProphetNetDecoder": "its table also hands out the positions of its n-gram streams and of their relative biases",
    "ProphetNetEncoder": "its table also hands out the positions of the decoder's n-gram streams",
    "ReformerModel": "its queries are its keys and are sorted into buckets, which a rotation would change",
    "SeamlessM4Tv2TextToUnitDecoder": "its positions are those of characters and units whose number it predicts",
}
