"""Two models on the same batches, dtype after dtype: running sums of what they return against the truth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..measure.batches import Batch
from .deviation import AgreementSum, CosineSum, ErrorSum, aligned, centred, pooled
from .report import LayerRow, OutputRow
from .subject import Outputs, Subject, mask_of, side_of

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class _Sums:
    """All sums of one run."""

    errors: dict[str, ErrorSum] = field(default_factory=dict)
    agreement: dict[str, AgreementSum] = field(default_factory=dict)
    cosine: dict[str, CosineSum] = field(default_factory=dict)
    pooled: dict[str, CosineSum] = field(default_factory=dict)
    layers: dict[tuple[str, int], tuple[ErrorSum, ErrorSum]] = field(default_factory=dict)


class Comparison:
    """Runs both models on all batches, one dtype after another, and keeps sums."""

    def __init__(self, model: Subject, reference: Subject, batches: list[Batch]):
        self.model, self.reference, self.batches = model, reference, batches
        self.encoder_decoder = bool(getattr(reference.model.config, "is_encoder_decoder", False))
        self.runs: dict[tuple[str, str], _Sums] = {}
        self.names: list[str] = []
        self.streams: list[str] = []
        self.notes: list[str] = []
        self._last_truth: tuple[int, Outputs] | None = None
        self._causal: bool | None = None

    def measure(self, dtypes: list[str]) -> None:
        exact = self.reference.copy(torch.float64)
        self._measure_run(self.model, "float64", exact)  # first, since it tells whether the two can be compared
        self._measure_run(self.reference, "float64", exact)
        for dtype in dtypes:
            try:
                self._measure_run(self.reference, dtype, exact)
            except UnsupportedError as error:  # nothing that the change could be blamed for
                del self.runs["reference", dtype]
                self.notes.append(f"{dtype} is left out: {error}")
                continue
            self._measure_run(self.model, dtype, exact)
        order = {("reference", "float64"): 0, ("model", "float64"): 1}
        self.runs = dict(sorted(self.runs.items(), key=lambda item: order.get(item[0], 2)))

    def _measure_run(self, subject: Subject, dtype: str, exact: Any) -> None:
        sums = self.runs[subject.role, dtype] = _Sums()
        is_truth = subject is self.reference and dtype == "float64"
        copied = None if is_truth else subject.copy(DTYPES[dtype])
        for number, batch in enumerate(self.batches):
            truth = self._truth(exact, batch, number)
            outputs = truth if copied is None else subject.run(copied, batch, DTYPES[dtype], number)
            if not self.names:
                self._match(truth, outputs)
            targets = self._targets(exact, truth, batch)
            for name in self.names:
                self._add(sums, name, truth.tensors[name], outputs.tensors[name], batch, targets.get(name))
            for stream in self.streams:
                for i, pair in enumerate(zip(truth.layers[stream], outputs.layers[stream], strict=True)):
                    mask = mask_of(stream, pair[0].shape, batch, self.encoder_decoder)
                    raw, without_mean = sums.layers.setdefault((stream, i), (ErrorSum(), ErrorSum()))
                    t, y = (_channels_last(x, mask) for x in aligned(*pair))
                    raw.add(t, y, mask)
                    without_mean.add(centred(t), centred(y), mask)

    def _truth(self, exact: Any, batch: Batch, number: int) -> Outputs:
        """The truth of one batch; the last one is remembered, so that a single batch is run once."""
        if self._last_truth is None or self._last_truth[0] != number:
            self._last_truth = None
            self._last_truth = number, self.reference.run(exact, batch, torch.float64, number)
        return self._last_truth[1]

    def _match(self, truth: Outputs, outputs: Outputs) -> None:
        """What both return; says what only one does.

        Raises:
            UnsupportedError: nothing, or tensors of other shapes.
        """
        kinds = type(self.model.model).__name__, type(self.reference.model).__name__
        self.names = [name for name in truth.tensors if name in outputs.tensors]
        if not self.names:
            raise UnsupportedError(
                f"nothing to compare: the model ({kinds[0]}) returns {', '.join(outputs.tensors)}, the reference "
                f"({kinds[1]}) {', '.join(truth.tensors)}. Load both with the same head."
            )
        for name in self.names:
            shapes = tuple(outputs.tensors[name].shape), tuple(truth.tensors[name].shape)
            if shapes[0] != shapes[1]:
                raise UnsupportedError(
                    f"{name} has shape {shapes[0]} in the model ({kinds[0]}) and {shapes[1]} in the reference "
                    f"({kinds[1]}): these aren't two forms of one model."
                )
        only = sorted(truth.tensors.keys() ^ outputs.tensors.keys())
        if only:
            self.notes.append(f"returned by one of the two alone, and not compared: {', '.join(only)}.")
        for stream, layers in truth.layers.items():
            if [x.shape for x in layers] == [x.shape for x in outputs.layers.get(stream, [])]:
                self.streams.append(stream)
            else:
                self.notes.append(f"{stream} of the two differ in number or shape, and aren't compared.")

    def _add(self, sums: _Sums, name: str, truth: Tensor, output: Tensor, batch: Batch, targets: Tensor | None) -> None:
        mask = mask_of(name, truth.shape, batch, self.encoder_decoder)
        self._note_unused_mask(name, truth, mask, batch)
        sums.errors.setdefault(name, ErrorSum()).add(truth, output, mask)
        last = name.rpartition(".")[2]
        if "logits" in last:
            t, y = _distributions(truth, mask), _distributions(output, mask)
            if t.shape[-1] > 1:
                rows = mask if t.dim() == truth.dim() > 2 else None
                sums.agreement.setdefault(name, AgreementSum()).add(t, y, rows, targets)
        elif truth.dim() > 1 and truth.shape[-1] > 1:
            t, y = (_channels_last(x, mask) for x in aligned(truth, output))
            if t.dim() > 3 and mask is None:
                t, y = t.flatten(1, -2), y.flatten(1, -2)
            sums.cosine.setdefault(name, CosineSum()).add(t, y, mask)
            if t.dim() == 3 and t.shape[1] > 1:
                sums.pooled.setdefault(name, CosineSum()).add(pooled(t, mask), pooled(y, mask))

    def _note_unused_mask(self, name: str, truth: Tensor, mask: Tensor | None, batch: Batch) -> None:
        given = batch.get(side_of(name, self.encoder_decoder))
        if mask is not None or truth.dim() < 3 or not isinstance(given, Tensor) or bool(given.all()):
            return
        note = f"no attention mask fits {name} {tuple(truth.shape[1:])}, so its padding counts too."
        if not any(f"fits {name} " in one for one in self.notes):
            self.notes.append(note)

    def _targets(self, exact: Any, truth: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Classes that a language model's logits should have predicted, (B, T) with -100 for none."""
        tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
        logits, labels = truth.tensors.get("logits"), batch.get("labels")
        if self.encoder_decoder:
            tokens, mask = batch.get("decoder_input_ids"), batch.get("decoder_attention_mask")
        if logits is None or logits.dim() != 3 or not _is_language_model(self.reference.model, logits):
            return {}
        if self._causal is None:
            self._causal = self.encoder_decoder or self._is_causal(exact, batch, logits)
            self._say_targets(labels is not None)
        shifts = self._causal and not (self.encoder_decoder and labels is not None)
        source = labels if labels is not None else tokens if self._causal else None
        if not isinstance(source, Tensor) or source.shape != logits.shape[:2] or source.is_floating_point():
            return {}
        targets = source.to(logits.device).clone()
        if isinstance(mask, Tensor) and mask.shape == targets.shape:
            targets[mask.to(targets.device) == 0] = -100
            if shifts:  # a real token after padding is predicted from nothing
                targets[:, 1:][mask[:, :-1].to(targets.device) == 0] = -100
        if shifts:
            targets = torch.cat((targets[:, 1:], torch.full_like(targets[:, :1], -100)), dim=1)
        return {"logits": targets}

    def _is_causal(self, exact: Any, batch: Batch, logits: Tensor) -> bool:
        """Whether another last token leaves all earlier logits as they are, and changes its own."""
        tokens = batch.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.shape != logits.shape[:2] or tokens.shape[1] < 2:
            return False
        other = tokens.clone()
        other[:, -1] = (other[:, -1] + 1) % logits.shape[-1]
        again = self.reference.run(exact, {**batch, "input_ids": other}, torch.float64, 0).tensors["logits"]
        change = (again - logits).abs().amax(-1).amax(0)
        return float(change[:-1].max()) < 1e-5 * float(change[-1])

    def _say_targets(self, labeled: bool) -> None:
        given = "the batch's labels" if labeled else "decoder_input_ids" if self.encoder_decoder else "input_ids"
        if self._causal:
            shifted = "t" if labeled and self.encoder_decoder else "t + 1"
            self.notes.append(f"perplexity: logits at position t against {given} at {shifted}, padding aside.")
        elif labeled:
            self.notes.append("perplexity: logits at position t against the batch's labels at t, -100 aside.")
        else:
            self.notes.append("no perplexity: the model isn't causal and the batches have no labels.")

    def output_rows(self, name: str) -> Iterator[OutputRow]:
        for (role, dtype), sums in self.runs.items():
            error = sums.errors[name]
            row = OutputRow(name, role, dtype, error.max_error, error.rms_error, error.nonfinite)
            if name in sums.agreement:
                agreement = sums.agreement[name]
                row.top1, row.kl, row.perplexity = agreement.top1, agreement.kl, agreement.perplexity
            if name in sums.cosine:
                row.cosine_mean, row.cosine_min = sums.cosine[name].mean, sums.cosine[name].smallest
            if name in sums.pooled:
                row.pooled_mean, row.pooled_min = sums.pooled[name].mean, sums.pooled[name].smallest
            yield row

    def layer_rows(self) -> list[LayerRow]:
        return [
            LayerRow(stream, i, role, dtype, raw.rms_error, without_mean.rms_error)
            for (role, dtype), sums in self.runs.items()
            for (stream, i), (raw, without_mean) in sums.layers.items()
            if (role, dtype) != ("reference", "float64")
        ]


def _channels_last(x: Tensor, mask: Tensor | None) -> Tensor:
    """Images (B, C, H, W) as (B, H, W, C); streams of tokens and (B, H, H, C) have their channels last already."""
    if x.dim() != 4 or mask is not None or x.shape[1] == x.shape[2] != x.shape[3]:
        return x
    return x.movedim(1, -1)


def _distributions(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits with the classes last: over channels for images, over the positions that count for spans."""
    logits = _channels_last(logits, mask)
    if logits.dim() == 2 and mask is not None:
        return logits.masked_fill(~mask.to(logits.device), -torch.inf)
    return logits


def _is_language_model(model: PreTrainedModel, logits: Tensor) -> bool:
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    return model.get_output_embeddings() is not None or logits.shape[-1] == vocabulary
