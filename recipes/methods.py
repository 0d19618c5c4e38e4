"""What the recipes share about patches and training: patches by name, losses, and how near two models are.

A loss takes a model, the unpatched teacher and a batch, and returns what is minimised. One of your own is a function
of this kind; heal.py calls it in one line.
"""

import ctypes
import re
import sys
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from texts import RecipeError, refusing
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hfpatch import patch_model
from hfpatch.core.registry import MLPS, NORMS, POSITIONS, did_you_mean
from hfpatch.errors import NotPreservedWarning

CONTROL = "control"  # an unpatched copy
STARTS = ("repaired", "auto", "copied", "reset")
INIT = {"copied": {"init": "copy"}, "reset": {"init": "reset"}}  # patch_model's, if it isn't its default
Batch = dict[str, Tensor]
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # glibc's names for mallopt(3): M_TRIM_THRESHOLD, M_MMAP_MAX


# -- models


class Opened(NamedTuple):
    """A saved model in float32, its tokenizer, and what it is: "causal", "masked" or "headless"."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: str


def open_model(source: str) -> Opened:
    """Open a folder or Hub id by the class that it was saved from, without its head if the files lack that.

    Raises:
        RecipeError: there is no model that can be opened, or no tokenizer.
    """
    with refusing(f"can't open {source}"):
        config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
        saved_as = (config.architectures or [""])[0]
        masked, causal = saved_as.endswith("ForMaskedLM"), saved_as.endswith(("LMHeadModel", "ForCausalLM"))
        auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM if causal else AutoModel
        model, found = auto.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        if found["missing_keys"] and auto is not AutoModel:  # a random head would say nothing
            model, masked, causal = AutoModel.from_pretrained(source, dtype=torch.float32), False, False
    return Opened(model, tokenizer, "masked" if masked else "causal" if causal else "headless")


# -- patches


def request_of(name: str) -> dict[str, str]:
    """The arguments of `patch_model` that a patch's name stands for: "rms+rope" is norm="rms", pos="rope".

    Raises:
        RecipeError: no scheme is called so, or two are of one kind.
    """
    request: dict[str, str] = {}
    for part in re.split(r"\+(?=[A-Za-z_])", name) if name != CONTROL else ():
        scheme = part.partition(":")[0]
        kinds = {"norm": NORMS, "pos": POSITIONS, "mlp": MLPS}
        kind = next((kind for kind, registry in kinds.items() if scheme in registry), None)
        if kind is None:
            near = did_you_mean(scheme, [*NORMS, *POSITIONS, *MLPS])
            raise RecipeError(f"no norm, position scheme or MLP is called {scheme!r}.{near}")
        if kind in request:
            raise RecipeError(f"variant {name!r} asks for two schemes of one kind: {request[kind]!r} and {part!r}")
        request[kind] = part
    return request


def patched(model: PreTrainedModel, name: str, start: str, calibration: list[Batch], **more: Any) -> PreTrainedModel:
    """The model, patched in place, and repaired on `calibration` if `start` is "repaired"; the control as it is."""
    if name == CONTROL:
        return model
    options = INIT.get(start, {}) | ({"calibration": calibration} if start == "repaired" else {}) | more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)  # what isn't preserved is what a recipe measures
        return patch_model(model, **request_of(name), **options)


def small_gpt2(
    tokenizer: PreTrainedTokenizerBase, block_size: int, layers: int = 4, width: int = 128
) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, small enough for a CPU; a head takes 32 of the width."""
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=block_size,
        n_embd=width,
        n_layer=layers,
        n_head=width // 32,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),  # short runs only underfit
        initializer_range=width**-0.5,  # GPT-2's 0.02 suits a width of 768 and is slow to begin with at 128
        bos_token_id=end,
        eos_token_id=end,
    )
    return GPT2LMHeadModel(config)


def switch_off_dropout(model: nn.Module) -> None:
    """In this instance; its config stays as it is, and so does what is saved. Repaired weights lose by dropout."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" if isinstance(module, nn.Dropout) else "drop" in name):
                vars(module)[name] = 0.0


def with_adapters(model: PreTrainedModel, rank: int, alpha: float) -> nn.Module:
    """W + (alpha / rank) B A for linear maps, A and B trained, and so are all vectors: gains, shifts, biases.

    The output's map is left alone. Hu et al. 2022, arXiv:2106.09685, by peft. `merge_and_unload()` leaves a plain
    patched model.
    """
    from peft import LoraConfig, get_peft_model

    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft finds out what GPT-2's maps need
        adapted = get_peft_model(model, lora)
    for vector in vectors:
        vector.requires_grad_(True)
    return adapted


def parameter_groups(model: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay; vectors (gains, shifts, DyT's alpha) don't."""
    learnt = [p for p in model.parameters() if p.requires_grad]
    groups = (weight_decay, [p for p in learnt if p.ndim >= 2]), (0.0, [p for p in learnt if p.ndim < 2])
    return [{"params": own, "lr": learning_rate, "weight_decay": decay} for decay, own in groups]


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed for what is allocated next. Returns whether it was done.

    By default glibc returns a tensor of more than 32 MiB to the system when it is freed; the next one gets new pages,
    each of which costs a page fault and is cleared. On a virtual machine with two cores a training step of GPT-2 small
    (2 x 128 tokens) takes 2.3 s, and 1.6 s if memory is kept; the process holds 5 % more.
    """
    if torch.accelerator.is_available() or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return bool(mallopt and mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, -1))


# -- losses


def inputs_of(batch: Batch) -> Batch:
    """What a model's forward takes, without labels."""
    return {name: value for name, value in batch.items() if name != "labels"}


def task_loss(model: nn.Module, teacher: nn.Module | None, batch: Batch) -> Tensor:
    """The model's own loss, of its head: the next token's, or that of the hidden ones."""
    return model(**batch).loss


def distance(model: nn.Module, teacher: nn.Module, batch: Batch, output: Any = None) -> Tensor:
    """KL(teacher || model) in nats, the mean over tokens; of an encoder without a head, 1 - cosine of its states.

    `output` is the model's, if it ran before.
    """
    with torch.no_grad():
        theirs = teacher(**inputs_of(batch))
    sums, counts = sum_items(apart(output or model(**inputs_of(batch)), theirs), batch.get("attention_mask"))
    return sums.sum() / counts.sum()


def distil(model: nn.Module, teacher: nn.Module, batch: Batch, share: float = 0.5) -> Tensor:
    """(1 - share) own loss + share KL(teacher || model) (Hinton et al. 2015, arXiv:1503.02531); share 1: no labels."""
    if share == 1:
        return distance(model, teacher, batch)
    output = model(**batch)
    return (1 - share) * output.loss + share * distance(model, teacher, batch, output)


@torch.no_grad()
def nats_of(model: nn.Module, batch: Batch, masked: bool = False) -> tuple[Tensor, Tensor]:
    """Of each block the negative log-likelihood in nats, (B,), and the tokens that it is over, (B,)."""
    logits, labels = model(**inputs_of(batch)).logits.float(), batch["labels"]
    if not masked:
        logits, labels = logits[:, :-1], labels[:, 1:]
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return nats.view_as(labels).sum(1), (labels != -100).sum(1)


# -- how far a model's outputs are from another's on the same inputs


def apart(ours: Any, theirs: Any) -> Tensor:
    """The distance of each token's outputs, (B, T)."""
    if "logits" in ours:
        return divergence(ours.logits, theirs.logits)
    return 1 - F.cosine_similarity(ours.last_hidden_state.float(), theirs.last_hidden_state.float(), dim=-1)


@torch.no_grad()
def agreement(teacher: nn.Module, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """Means over the tokens that aren't padding: KL(teacher || model) in nats, and how often both prefer one token.

    Of encoders without a head: the mean cosine of their states.
    """
    totals: dict[str, Tensor] = {}
    for batch in batches:
        theirs, ours = (one(**inputs_of(batch)) for one in (teacher, model))
        if "logits" in ours:
            same = theirs.logits.argmax(-1) == ours.logits.argmax(-1)
            found = {"divergence": apart(ours, theirs), "same answer": same.float()}
        else:
            found = {"cosine": 1 - apart(ours, theirs)}
        for name, terms in found.items():
            pair = torch.stack([part.double().sum() for part in sum_items(terms, batch.get("attention_mask"))])
            totals[name] = totals.get(name, 0) + pair
    return {name: (total / count).item() for name, (total, count) in totals.items()}


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) in nats of each row of logits."""
    s, t = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return F.kl_div(s, t, reduction="none", log_target=True).sum(-1)


def sum_items(terms: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of each item's terms (B, ...) and their number, (B,) each; of terms (B, T) where a mask isn't 0."""
    weights = mask.to(terms.dtype) if mask is not None and mask.shape == terms.shape else torch.ones_like(terms)
    return (terms * weights).reshape(len(terms), -1).sum(1), weights.reshape(len(terms), -1).sum(1)
