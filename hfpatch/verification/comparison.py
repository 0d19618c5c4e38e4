"""Runs copies of two models on the same batches in several dtypes and accumulates the errors of their outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..measure.batches import Batch
from ..measure.copies import copy_of
from ..measure.inputs import text_config
from ..measure.outputs import Outputs, mask_of, padding_mask
from ..measure.quiet_forward import cast
from ..measure.randomness import seed_everything
from ..runtime.float64 import float64_device
from ..runtime.patch_errors import UnsupportedError, describe_error
from .sums import NO_TARGET, Sums
from .verify_report import LayerRow, OutputRow

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Run = tuple[str, str]  # role and dtype
Place = tuple[str, int | None]  # an output and None, or a stream and the index of a layer
TRUTH: Run = ("reference", "float64")
_OPTIONS = {"output_hidden_states": True, "return_dict": True, "use_cache": False}  # settings of a copy's config


@dataclass
class Subject:
    """A model that is compared: only copies of it are run.

    Attributes:
        role: "model" or "reference".
        model: the model.
    """

    role: str
    model: PreTrainedModel

    def __str__(self) -> str:
        return f"the {self.role} ({type(self.model).__name__})"

    def copy(self, dtype: torch.dtype) -> nn.Module:
        """Return a copy in a dtype that returns hidden states and no cache; tensors in that dtype are shared.

        A copy in float64 is on the CPU if the model's device has no float64.

        Raises:
            UnsupportedError: something in the model can't be copied.
        """

        try:
            place = float64_device(self.model.device)
            device = place if dtype == torch.float64 and place != self.model.device else None
            copied = copy_of(self.model, dtype=dtype, device=device, share=True)
            for module in copied.modules():
                if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                    vars(config).update(_OPTIONS)
            return copied
        except Exception as error:
            raise UnsupportedError(
                f"{self} can't be copied, and only copies of it are run: {describe_error(error, 300)}"
            ) from error

    def run(self, model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype, number: int) -> Outputs:
        """Run one forward of a copy; `number` is the batch's number, for the message.

        Raises:
            UnsupportedError: the forward fails, or returns nothing to compare.
        """
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            with repeatable_inference(model), torch.autocast(device.type, enabled=False):
                outputs = Outputs.of(model(**cast(batch, device, dtype)))
        except Exception as error:
            shapes = [f"{name} {tuple(value.shape)}" for name, value in batch.items() if isinstance(value, Tensor)]
            raise UnsupportedError(
                f"{self} doesn't run in {str(dtype).removeprefix('torch.')} on batch {number} ({', '.join(shapes)}): "
                f"{describe_error(error, 300)}"
            ) from error
        outputs.tensors = outputs.floats
        if not outputs.tensors:
            raise UnsupportedError(f"{self} returns no floating-point tensor.")
        return outputs


@contextmanager
def repeatable_inference(model: nn.Module) -> Iterator[None]:
    """Context without gradients and with fixed random numbers; the random state is restored."""
    with torch.no_grad(), seed_everything(0, {p.device for p in model.parameters()}):
        yield


class Comparison:
    """Comparison of two models on batches: errors of outputs, and notes on what couldn't be compared.

    Args:
        model, reference: both are run in copies; the reference in float64 is the truth.
        batches: all inputs.
    """

    def __init__(self, model: Subject, reference: Subject, batches: list[Batch]):
        self.model, self.reference, self.batches = model, reference, batches
        self.encoder_decoder = bool(getattr(reference.model.config, "is_encoder_decoder", False))
        self.runs: dict[Run, dict[Place, Sums]] = {}
        self.names: list[str] = []
        self.streams: list[str] = []
        self.notes: list[str] = []
        self._last_truth: tuple[int, Outputs] | None = None
        self._causal: bool | None = None

    def measure(self, dtypes: list[str]) -> None:
        """Run all dtypes; float64 first, which shows whether the models can be compared."""
        truth_model = self.reference.copy(torch.float64)
        model = self._measure_run(self.model, "float64", truth_model)
        self.runs = {TRUTH: self._measure_run(self.reference, "float64", truth_model), ("model", "float64"): model}
        for dtype in dtypes:
            try:
                self.runs["reference", dtype] = self._measure_run(self.reference, dtype, truth_model)
            except UnsupportedError as error:  # the change can't be the cause
                self.notes.append(f"{dtype} is left out: {error}")
                continue
            self.runs["model", dtype] = self._measure_run(self.model, dtype, truth_model)

    def output_rows(self) -> list[OutputRow]:
        """Return every output of every run."""
        return [sums[name, None].output_row(name, *run) for name in self.names for run, sums in self.runs.items()]

    def layer_rows(self) -> list[LayerRow]:
        """Yield every layer of every run except the reference's."""
        return [
            LayerRow(stream, index, *run, layer.deviation.rms_error, layer.centred.rms_error)
            for run, sums in self.runs.items()
            for (stream, index), layer in sums.items()
            if run != TRUTH and index is not None
        ]

    def _measure_run(self, subject: Subject, dtype: str, truth_model: nn.Module) -> dict[Place, Sums]:
        sums: dict[Place, Sums] = defaultdict(Sums)
        copied = None if (subject.role, dtype) == TRUTH else subject.copy(DTYPES[dtype])
        for number, batch in enumerate(self.batches):
            truth = self._truth(truth_model, batch, number)
            outputs = truth if copied is None else subject.run(copied, batch, DTYPES[dtype], number)
            if not self.names:
                self._match(truth, outputs)
            targets = self._targets(truth_model, truth, batch)
            for name in self.names:
                t = truth.tensors[name]
                mask = mask_of(name, t.shape, batch, self.encoder_decoder)
                self._note_unused_mask(name, t, mask, batch)
                sums[name, None].add_output(name, t, outputs.tensors[name], mask, targets if name == "logits" else None)
            for stream in self.streams:
                for i, (t, y) in enumerate(zip(truth.streams[stream], outputs.streams[stream], strict=True)):
                    sums[stream, i].add_layer(t, y, mask_of(stream, t.shape, batch, self.encoder_decoder))
        return sums

    def _truth(self, truth_model: nn.Module, batch: Batch, number: int) -> Outputs:
        """The truth for one batch; the latest truth is cached, so that a single batch is run once."""
        if self._last_truth is None or self._last_truth[0] != number:
            self._last_truth = None
            self._last_truth = number, self.reference.run(truth_model, batch, torch.float64, number)
        return self._last_truth[1]

    def _match(self, truth: Outputs, outputs: Outputs) -> None:
        """Outputs that both models return; notes outputs that only one model returns.

        Raises:
            UnsupportedError: no output is common, or tensors have other shapes.
        """
        self.names = [name for name in truth.tensors if name in outputs.tensors]
        if not self.names:
            raise UnsupportedError(
                f"nothing to compare: {self.model} returns {', '.join(outputs.tensors)}, {self.reference} "
                f"{', '.join(truth.tensors)}. Load both with the same head."
            )
        for name in self.names:
            shapes = tuple(outputs.tensors[name].shape), tuple(truth.tensors[name].shape)
            if shapes[0] != shapes[1]:
                raise UnsupportedError(
                    f"{name} has shape {shapes[0]} in {self.model} and {shapes[1]} in {self.reference}: these aren't "
                    "two forms of one model."
                )
        only = sorted(truth.tensors.keys() ^ outputs.tensors.keys())
        if only:
            self.notes.append(f"returned by only one of the two models, and not compared: {', '.join(only)}.")
        for stream, layers in truth.streams.items():
            if [x.shape for x in layers] == [x.shape for x in outputs.streams.get(stream, [])]:
                self.streams.append(stream)
            else:
                self.notes.append(f"{stream} of the two differ in number or shape, and aren't compared.")

    def _note_unused_mask(self, name: str, truth: Tensor, mask: Tensor | None, batch: Batch) -> None:
        unused = padding_mask(name, batch, self.encoder_decoder)
        if mask is not None or truth.dim() < 3 or unused is None or bool(unused.all()):
            return
        self._note(f"no attention mask fits {name}, so its padding counts too.")

    def _targets(self, truth_model: nn.Module, truth: Outputs, batch: Batch) -> Tensor | None:
        """Classes that a language model's logits should predict, (B, T), with -100 for none."""
        side, logits = "decoder_" if self.encoder_decoder else "", truth.tensors.get("logits")
        if logits is None or logits.dim() != 3 or not _is_language_model(self.reference.model, logits):
            return None
        if self._causal is None:
            self._causal = self.encoder_decoder or self._is_causal(truth_model, batch, logits)
        name = "labels" if batch.get("labels") is not None else f"{side}input_ids"
        shifts = self._causal and not (self.encoder_decoder and name == "labels")
        if self._causal or name == "labels":
            place = "t + 1" if shifts else "t"
            self._note(f"perplexity: logits at position t against {name} at {place}, padding aside.")
        else:
            self._note("no perplexity: the model isn't causal and the batches have no labels.")
            return None
        source, mask = batch.get(name), batch.get(f"{side}attention_mask")
        if not isinstance(source, Tensor) or source.shape != logits.shape[:2] or source.is_floating_point():
            return None
        targets = source.to(logits.device).clone()
        if isinstance(mask, Tensor) and mask.shape == targets.shape:
            padding = mask.to(targets.device) == 0
            targets[padding] = NO_TARGET
            if shifts:  # a real token after padding is predicted from nothing
                targets[:, 1:][padding[:, :-1]] = NO_TARGET
        if shifts:
            targets = torch.cat((targets[:, 1:], torch.full_like(targets[:, :1], NO_TARGET)), dim=1)
        return targets

    def _is_causal(self, truth_model: nn.Module, batch: Batch, logits: Tensor) -> bool:
        """Whether changing the last token changes the last logits and no earlier ones."""
        tokens = batch.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.shape != logits.shape[:2] or tokens.shape[1] < 2:
            return False
        other = tokens.clone()
        other[:, -1] = (other[:, -1] + 1) % logits.shape[-1]
        again = self.reference.run(truth_model, {**batch, "input_ids": other}, torch.float64, 0).tensors["logits"]
        change = (again - logits).abs().amax(-1).amax(0)
        return float(change[:-1].max()) < 1e-5 * float(change[-1])

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _is_language_model(model: Any, logits: Tensor) -> bool:
    vocabulary = getattr(text_config(model.config), "vocab_size", None)
    return model.get_output_embeddings() is not None or logits.shape[-1] == vocabulary
