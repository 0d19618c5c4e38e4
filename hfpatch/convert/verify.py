"""What a change of a model did, measured: each output and each layer against the original in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ..checkpoint import patched_model_class
from ..errors import CheckpointError, OptionError, UnsupportedError, WrappedModelError
from ..plan import require_bare
from ..record import KEY, Record
from ..view import host_class
from .deviation import AgreementSum, CosineSum, ErrorSum, aligned, centred, pooled
from .inputs import example_inputs
from .modules import compare_modules
from .report import LayerRow, OutputRow, Report
from .subject import Outputs, Subject, isolated, mask_of, side_of

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Batch = Mapping[str, Any]
RANDOM = "random, from the config"


def verify(
    model: PreTrainedModel,
    reference: PreTrainedModel | str | PathLike[str],
    batches: Iterable[Batch | Tensor] | Batch | Tensor | None = None,
    *,
    dtypes: Iterable[str | torch.dtype] = ("float32", "bfloat16"),
) -> Report:
    """Compare a patched model with its original: modules, outputs by dtype, and the stream layer by layer.

    The truth t is the original in float64. Against it stand the original in each of `dtypes` (what the dtype costs) and
    the model in float64 and each of `dtypes` (what the change costs): max|y - t| / rms(t) and rms(y - t) / rms(t) for
    every output; for logits also top-1 agreement, KL(t || y) = sum p_t (log p_t - log p_y) in nats, and perplexity
    where the inputs give targets (of a causal model the next token, of others the batch's `labels`); for vectors their
    cosines, one by one and mean-pooled. Positions whose attention mask is 0 don't count.

    Both models run in copies in eval mode, with the same random numbers: they stay as they are, and so do the random
    streams. Besides the two models, memory holds the original's copy in float64 and one copy of one model at a time
    (12 to 16 bytes a parameter in all), and the outputs of one batch; of a large model compare a few short batches, or
    load both on the CPU. Forward hooks are copied with the models and run.

    Args:
        model: a transformers model, patched or not, in any dtype and on any device that has float64.
        reference: the original, as an object or as what `from_pretrained` takes. patch_model works in place, so an
            original in memory is a copy made before.
        batches: dicts of inputs, or tensors of the model's main input (input_ids (B, T), pixel_values (B, C, H, W));
            one of them or several. An encoder-decoder that is given input_ids alone reads them, shifted by one, in its
            decoder too. None makes random inputs from the config: enough to see whether two models are the same
            function, but agreement and perplexity then say nothing of real text.
        dtypes: names of torch dtypes besides float64.

    Returns:
        The report: print it, `save` it, `plot` it.

    Raises:
        WrappedModelError: one of the two is no bare transformers model.
        OptionError: both are one object, a dtype is unknown, or the batches are empty or not the model's inputs.
        CheckpointError: the reference's folder doesn't hold this model's weights.
        UnsupportedError: a model has no weights, is quantized, can't be copied or run (a dtype that the reference
            itself doesn't run in is left out, with a note), or the two return tensors of other names or shapes.
    """
    wanted = _dtypes(dtypes)
    _require_runnable("model", model)
    if isinstance(reference, str | PathLike):
        reference = _load(reference, model)
    _require_runnable("reference", reference)
    if model is reference:
        raise OptionError(
            "model and reference are the same object: patch_model works in place. Pass the original's name or folder, "
            "or a copy.deepcopy made before the patch."
        )
    inputs, how = _batches(batches, model)
    comparison = _Comparison(Subject("model", model), Subject("reference", reference), inputs)
    if how == RANDOM:
        comparison.notes.append("random inputs: agreement, divergence and perplexity say nothing of real data.")
    comparison.measure(wanted)
    return Report(
        model=_titled(model),
        reference=_titled(reference),
        inputs=how,
        examples=sum(_examples(batch) for batch in inputs),
        tokens=sum(_tokens(batch) for batch in inputs),
        modules=compare_modules(model, reference),
        outputs=[row for name in comparison.names for row in comparison.output_rows(name)],
        layers=comparison.layer_rows(),
        notes=comparison.notes,
    )


@dataclass
class _Sums:
    """All sums of one run."""

    errors: dict[str, ErrorSum] = field(default_factory=dict)
    agreement: dict[str, AgreementSum] = field(default_factory=dict)
    cosine: dict[str, CosineSum] = field(default_factory=dict)
    pooled: dict[str, CosineSum] = field(default_factory=dict)
    layers: dict[tuple[str, int], tuple[ErrorSum, ErrorSum]] = field(default_factory=dict)


class _Comparison:
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
        copied = None if is_truth else subject.copy(_DTYPES[dtype])
        for number, batch in enumerate(self.batches):
            truth = self._truth(exact, batch, number)
            outputs = truth if copied is None else subject.run(copied, batch, _DTYPES[dtype], number)
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


def _dtypes(dtypes: Iterable[str | torch.dtype]) -> list[str]:
    listed = [dtypes] if isinstance(dtypes, str | torch.dtype) else list(dtypes)
    names = [str(dtype).removeprefix("torch.") for dtype in listed]
    for name in names:
        if name not in _DTYPES:
            raise OptionError(f"dtypes must be among {', '.join(_DTYPES)}, not {name!r:.80}.")
    return [name for name in dict.fromkeys(names) if name != "float64"]


def _require_runnable(role: str, model: Any) -> None:
    kind = type(model).__name__
    try:
        require_bare(model)
    except WrappedModelError as error:
        raise WrappedModelError(
            f"the {role} is {kind}, which isn't (only) a bare transformers model. verify takes the one inside: "
            "model._orig_mod of torch.compile, model.module of DDP, model.merge_and_unload() of PEFT; "
            "accelerate.hooks.remove_hook_from_module takes off hooks."
        ) from error
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UnsupportedError(f"the {role} ({kind}) has no weights: it is on the meta device. Load it first.")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise UnsupportedError(f"the {role} ({kind}) is quantized, so it has no float64 truth. Load it in full first.")


def _load(name: str | PathLike[str], model: PreTrainedModel) -> PreTrainedModel:
    """The reference, as the model's own class and on its device.

    Raises:
        CheckpointError: it is of another family, or weights are missing, so that the truth would be partly random.
    """
    host: Any = host_class(type(model))
    with isolated(model):
        config = AutoConfig.from_pretrained(name)
        if config.model_type != model.config.model_type:
            raise CheckpointError(
                f"{name} is a {config.model_type} model, and {host.__name__} a {model.config.model_type}."
            )
        cls = patched_model_class(host) if getattr(config, KEY, None) else host
        loaded, info = cls.from_pretrained(name, config=config, dtype="auto", output_loading_info=True)
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        raise CheckpointError(
            f"{name} lacks {len(missing)} weights of {host.__name__} ({', '.join(missing[:3])}, ...), which would be "
            "random. Load both with the class that the original was saved as."
        )
    return loaded.to(model.device)


def _batches(batches: Any, model: PreTrainedModel) -> tuple[list[Batch], str]:
    """The batches as dicts, and what they are in words.

    Raises:
        OptionError: they are empty, or not inputs of the model.
    """
    if batches is None:
        try:
            return [_completed(example_inputs(model, seed=0), model)], RANDOM
        except UnsupportedError as error:
            raise OptionError(f"no random inputs could be made for {type(model).__name__}; pass batches=.") from error
    single = isinstance(batches, Mapping | Tensor)
    if not single and (isinstance(batches, str) or not isinstance(batches, Iterable)):
        raise OptionError(f"batches must be dicts of tensors, or tensors, not {type(batches).__name__}.")
    listed = [batches] if single else list(batches)
    if not listed:
        raise OptionError("batches is empty; an iterator that was used up before is, too.")
    found: list[Batch] = [_completed(_checked(batch, number, model), model) for number, batch in enumerate(listed)]
    return found, f"{len(found)} batch{'es' if len(found) > 1 else ''} given"


def _checked(batch: Any, number: int, model: PreTrainedModel) -> dict[str, Any]:
    if isinstance(batch, Tensor):
        batch = {model.main_input_name: batch}
    if not isinstance(batch, Mapping):
        raise OptionError(
            f"batch {number} is {type(batch).__name__}, not a dict of tensors; run text through the tokenizer first."
        )
    takes = signature(model.forward).parameters
    for name, value in batch.items():
        if name not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            raise OptionError(f"batch {number} has {name!r}, which {type(model).__name__}.forward doesn't take.")
        if isinstance(value, list) and not all(isinstance(item, Tensor) for item in value):
            raise OptionError(f"batch {number}: {name} is a list; call the tokenizer with return_tensors='pt'.")
        if isinstance(value, Tensor) and not value.numel():
            raise OptionError(f"batch {number}: {name} is empty, shape {tuple(value.shape)}.")
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.any()):
            raise OptionError(f"batch {number}: {name} is zero everywhere, so no position counts.")
    if not any(isinstance(value, Tensor) for value in batch.values()):
        raise OptionError(f"batch {number} holds no tensor.")
    return dict(batch)


def _completed(batch: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """An encoder-decoder given input_ids alone reads them in its decoder too, shifted by one."""
    tokens, start = batch.get("input_ids"), getattr(model.config, "decoder_start_token_id", None)
    has_decoder = {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & batch.keys()
    takes = signature(model.forward).parameters
    if tokens is None or has_decoder or "decoder_input_ids" not in takes or not model.config.is_encoder_decoder:
        return batch
    start = start if start is not None else getattr(model.config, "pad_token_id", None) or 0
    shifted = torch.cat((torch.full_like(tokens[:, :1], start), tokens[:, :-1]), dim=1)
    batch = {**batch, "decoder_input_ids": shifted}
    if "attention_mask" in batch and "decoder_attention_mask" in takes:
        batch["decoder_attention_mask"] = batch["attention_mask"]
    return batch


def _examples(batch: Batch) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim())


def _tokens(batch: Batch) -> int:
    tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(tokens, Tensor):
        return 0
    fits = isinstance(mask, Tensor) and mask.shape == tokens.shape
    return int((mask != 0).sum()) if fits else tokens.numel()  # type: ignore[union-attr]


def _titled(model: PreTrainedModel) -> str:
    stored = getattr(model.config, KEY, None)
    if not stored:
        return type(model).__name__
    parts = Record.from_json(stored).to_json()
    schemes = (
        f"{kind}={part['scheme']['name']}"
        for kind, listed in parts.items()
        if isinstance(listed, list)
        for part in listed
    )
    return f"{type(model).__name__} ({', '.join(schemes)})"
