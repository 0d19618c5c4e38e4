"""`verify`: measures a patched model against its original in float64, output by output and layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.by_name import config_of, opening
from ..checkpoint.patched_classes import patched_model_class
from ..core.bare import is_quantized, require_bare
from ..core.holders import unwrap_holders
from ..errors import OptionError, WrappedModelError
from ..measure.batches import Batch, count_examples, count_tokens, read_batches
from ..measure.inputs import example_inputs, input_embedding
from ..runtime.lens import host_class
from ..runtime.patch_errors import CheckpointError, UnsupportedError
from ..runtime.record import KEY
from ..schemes.request import Record
from .comparison import DTYPES, Comparison, Subject, repeatable_inference
from .module_diff import compare_modules
from .verify_report import Report, title_of

EXAMPLES = 64  # texts and single rows, at most: both models run on them in every dtype


@unwrap_holders
def verify(
    model: Any,
    reference: Any,
    batches: Any = None,
    *,
    dtypes: Iterable[str | torch.dtype] = ("float32", "bfloat16"),
    tokenizer: Any = None,
) -> Report:
    """Compare a patched model with its original: modules, outputs by dtype, and the stream layer by layer.

    The truth t is the original in float64. It is compared with the original in each of `dtypes` (what the dtype costs),
    and with the model in float64 and in each of `dtypes` (what the change costs). Every output has
    `max|y - t| / rms(t)` and `rms(y - t) / rms(t)`. Logits also have top-1 agreement,
    `KL(t || y) = sum p_t (log p_t - log p_y)` in nats, and perplexity if the inputs give targets (the next token for a
    causal model, else the batch's `labels`). Vectors have cosines, one by one and mean-pooled. Positions whose
    attention mask is 0 don't count.

    Copies of both models run in eval mode, with the same random numbers. The models and the random number generators
    stay as they are. Besides the two models, memory holds the original's copy in float64 and one copy of one model at a
    time (12 to 16 bytes a parameter in all), and the outputs of one batch; for a large model compare a few short
    batches, or load both models on the CPU. Forward hooks are copied with the models and run.

    Args:
        model: a transformers model, patched or not, in any dtype and on any device; float64 is computed on the CPU if
            the device lacks it (MPS). Of a SentenceTransformer the model inside is compared, with its tokenizer.
        reference: the original, as an object or as a Hub id or folder. patch_model works in place, so an original in
            memory is a copy made before the patch.
        batches: texts (with `tokenizer`) or inputs, in any form that `read_batches` takes. The first 64 texts or single
            rows are read, and 128 tokens of a text; all batches are read. None makes random inputs from the config:
            enough to see whether two models are the same function; agreement and perplexity then say nothing about
            text.
        dtypes: names of torch dtypes besides float64.
        tokenizer: a tokenizer, or a processor that has a tokenizer, for texts.

    Returns:
        The report: print it, or `save` it.

    Raises:
        WrappedModelError: the model or the reference isn't a bare transformers model.
        OptionError: both models are one object, a dtype is unknown, or the batches are empty or not the model's inputs.
        CheckpointError: the reference's folder doesn't hold this model's weights.
        UnsupportedError: a model has no weights, is quantized, can't be copied or run (a dtype that the reference
            itself doesn't run in is left out, with a note), or the two models differ in vocabulary, or in the names or
            shapes of the tensors that they return.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, bos_token_id=0, eos_token_id=1)
        >>> model = GPT2LMHeadModel(config)
        >>> import copy
        >>> from hfpatch import patch_model, verify
        >>> print(verify(patch_model(copy.deepcopy(model), norm="rms"), model))
        GPT2LMHeadModel (norm=rms) against GPT2LMHeadModel. Inputs: random, from the config (...
    """
    chosen = _dtypes(dtypes)
    _require_runnable("model", model)
    if isinstance(reference, str | PathLike):
        reference = _load(reference, model)
    _require_runnable("reference", reference)
    if model is reference:
        raise OptionError(
            "model and reference are the same object: patch_model works in place. Pass the original's name or folder, "
            "or a copy.deepcopy made before the patch."
        )
    is_random = batches is None
    inputs: list[Batch] = list(
        read_batches(_random(model) if is_random else batches, model, tokenizer, sequences=EXAMPLES)
    )
    _require_common_vocabulary(model, reference, inputs)
    count = f"{len(inputs)} batch{'es' if len(inputs) > 1 else ''} given"
    comparison = Comparison(Subject("model", model), Subject("reference", reference), inputs)
    if is_random:
        comparison.notes.append("random inputs: agreement, divergence and perplexity say nothing of real data.")
    comparison.measure(chosen)
    return Report(
        model=title_of(type(model).__name__, Record.of(model.config)),
        reference=title_of(type(reference).__name__, Record.of(reference.config)),
        inputs="random, from the config" if is_random else count,
        examples=sum(count_examples(batch) for batch in inputs),
        tokens=sum(count_tokens(batch) for batch in inputs),
        modules=compare_modules(model, reference),
        outputs=comparison.output_rows(),
        layers=comparison.layer_rows(),
        notes=comparison.notes,
    )


def _random(model: PreTrainedModel) -> dict[str, Any]:
    """Random inputs.

    Raises:
        OptionError: no random inputs can be made for such a model.
    """
    try:
        return example_inputs(model, seed=0)
    except UnsupportedError as error:
        raise OptionError(f"no random inputs could be made for {type(model).__name__}; pass batches=.") from error


def _require_common_vocabulary(model: PreTrainedModel, reference: PreTrainedModel, inputs: list[Batch]) -> None:
    """Refuse models with different vocabularies, unless vectors are compared and both have all tokens of the inputs.

    Raises:
        UnsupportedError: the message gives both sizes.
    """
    sizes = [table.num_embeddings for one in (model, reference) if (table := input_embedding(one)) is not None]
    used = (batch["input_ids"] for batch in inputs if isinstance(batch.get("input_ids"), torch.Tensor))
    known = all(int(ids.max()) < min(sizes, default=0) for ids in used)
    if len(set(sizes)) > 1 and not (known and model.get_output_embeddings() is None):
        raise UnsupportedError(
            f"the model's vocabulary has {sizes[0]} tokens and the reference's {sizes[1]}, so these aren't two forms "
            "of one model. If tokens were added to one, call resize_token_embeddings on the other as well."
        )


def _dtypes(dtypes: Iterable[str | torch.dtype]) -> list[str]:
    listed = [dtypes] if isinstance(dtypes, str | torch.dtype) else list(dtypes)
    names = [str(dtype).removeprefix("torch.") for dtype in listed]
    for name in names:
        if name not in DTYPES:
            raise OptionError(f"dtypes must be among {', '.join(DTYPES)}, not {name!r:.80}.")
    return [name for name in dict.fromkeys(names) if name != "float64"]


def _require_runnable(role: str, model: Any) -> None:
    kind = type(model).__name__
    try:
        require_bare(model)
    except WrappedModelError as error:
        raise WrappedModelError(
            f"the {role} is {kind}, which isn't (only) a bare transformers model. Pass the model inside: {error}"
        ) from error
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UnsupportedError(f"the {role} ({kind}) has no weights: it is on the meta device. Load it first.")
    if is_quantized(model):
        raise UnsupportedError(f"the {role} ({kind}) is quantized, so it has no float64 truth. Load it in full first.")


def _load(name: str | PathLike[str], model: PreTrainedModel) -> PreTrainedModel:
    """The reference, as the model's own class and on its device.

    Raises:
        CheckpointError: it is of another family, or weights are missing, so that the truth would be partly random.
    """
    host: Any = host_class(type(model))
    with opening(str(name)), repeatable_inference(model):
        config = config_of(str(name), trust=False)
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
