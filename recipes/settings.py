"""Settings of recipes: flags, YAML, and what is refused before any work. Those of recipes/finetune.py."""

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from accelerate.tracking import is_tensorboard_available
from data import RecipeError
from transformers import HfArgumentParser

from hfpatch import NORMS, POSITIONS

CONTROL = "control"
Config = TypeVar("Config")


@dataclass
class FinetuneConfig:
    """The main job is these defaults; recipes/configs/lm.yaml spells them out."""

    variants: list[str] = field(
        default_factory=lambda: ["rms", "dyt", "rope", "rms+rope", CONTROL],
        metadata={"help": "what to compare: a norm, a position scheme or norm+position, by registered name, with "
                  "options as in dyt:alpha=0.8; 'control' is the unpatched copy"},
    )  # fmt: skip
    text: list[str] | None = field(
        default=None, metadata={"help": "UTF-8 text files; none: source and docstrings of Python's standard library"}
    )
    model: str | None = field(
        default=None, metadata={"help": "a folder or Hub id of a causal or masked LM; none: a small GPT-2 from scratch"}
    )
    output_dir: str = field(default="runs/finetune", metadata={"help": "where results, models and states go"})
    baseline_steps: int | None = field(
        default=None, metadata={"help": "steps before the copies are made; none: 900 from scratch, 0 for --model"}
    )
    steps: int = field(default=150, metadata={"help": "steps of healing, the same for every variant"})
    calibration: int = field(
        default=64, metadata={"help": "training blocks on which what a patch didn't keep is repaired; 0: no repair"}
    )
    batch_size: int = field(default=16, metadata={"help": "blocks in a batch, over all processes"})
    block_size: int = field(default=128, metadata={"help": "tokens in a block"})
    learning_rate: float = field(default=2e-3, metadata={"help": "peak of AdamW's learning rate"})
    warmup_steps: int = field(
        default=10, metadata={"help": "steps of linear warmup; then constant (baseline) or cosine to 0 (healing)"}
    )
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's decay, on matrices only"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm; 0: not at all"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "batches in a step"})
    mixed_precision: Literal["no", "fp16", "bf16"] | None = field(
        default=None, metadata={"help": "none: as accelerate launch says, else no"}
    )
    vocab_size: int = field(default=1024, metadata={"help": "of the BPE and the GPT-2 that are made from scratch"})
    layers: int = field(default=4, metadata={"help": "of the GPT-2 made from scratch"})
    width: int = field(default=128, metadata={"help": "of the GPT-2 made from scratch; a head takes 32 of it"})
    heldout_blocks: int = field(default=384, metadata={"help": "held-out blocks behind the table"})
    curve_blocks: int = field(default=64, metadata={"help": "held-out blocks behind the curves"})
    eval_every: int = field(default=10, metadata={"help": "steps between points of the curves"})
    save_every: int = field(default=50, metadata={"help": "steps between saved states"})
    seed: int = field(default=0, metadata={"help": "of weights and of the order of the data; never of the split"})
    resume: bool = field(default=False, metadata={"help": "go on where a run with the same settings stopped"})
    stop_after: int | None = field(
        default=None, metadata={"help": "save and stop after so many steps, for machines with a time limit"}
    )
    tracker: Literal["none", "tensorboard"] = field(default="none", metadata={"help": "also log to this tracker"})


# Settings that may change between a stopped run and its continuation without making its figures incomparable.
FREE_TO_CHANGE = {"variants", "output_dir", "save_every", "resume", "stop_after", "tracker"}
AT_LEAST = {"block_size": 4, "vocab_size": 257}
AT_LEAST |= dict.fromkeys(("steps", "batch_size", "gradient_accumulation_steps", "layers", "stop_after"), 1)
AT_LEAST |= dict.fromkeys(("heldout_blocks", "curve_blocks", "eval_every", "save_every"), 1)
AT_LEAST |= dict.fromkeys(("baseline_steps", "calibration", "warmup_steps", "weight_decay", "max_grad_norm", "seed"), 0)


def parse(argv: list[str], about: str = "") -> FinetuneConfig:
    """Settings of recipes/finetune.py; see `read_settings`."""
    return read_settings(FinetuneConfig, "finetune.py", argv, about)


def read_settings(kind: type[Config], recipe: str, argv: list[str], about: str = "") -> Config:
    """Settings from flags, or from a YAML file followed by flags, which win."""
    parser = HfArgumentParser(
        kind,
        prog=recipe,
        usage="%(prog)s [CONFIG.yaml] [--flag value ...]",
        description=about,
        epilog="CONFIG.yaml holds the same names; flags override it.",
        allow_abbrev=False,
    )
    flags = []
    if argv and argv[0].endswith((".yaml", ".yml")):
        path, argv = argv[0], argv[1:]
        try:
            settings = yaml.safe_load(Path(path).read_text("utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RecipeError(f"can't read the settings in {path}: {' '.join(str(error).split())}") from None
        if not isinstance(settings, dict):
            raise RecipeError(f"{path} must hold 'name: value' lines, not a {type(settings).__name__}")
        for name, value in settings.items():  # through the parser, so that YAML and flags are checked alike
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *map(str, values)] if value is not None else []
    return kind(**vars(parser.parse_args(flags + argv)))


def parse_variant(name: str) -> dict[str, str]:
    """The keyword arguments of `patch_model` that a variant stands for: "rms+rope" is norm="rms", pos="rope".

    Raises:
        UnknownNameError: hfpatch knows no such scheme.
        RecipeError: two norms or two position schemes.
    """
    request: dict[str, str] = {}
    for part in re.split(r"\+(?=[A-Za-z_])", name) if name != CONTROL else ():
        scheme = part.partition(":")[0]
        if scheme not in NORMS and scheme not in POSITIONS:
            near = difflib.get_close_matches(scheme, [*NORMS, *POSITIONS], n=1, cutoff=0.0)
            (POSITIONS if near and near[0] in POSITIONS else NORMS)[scheme]  # raises, with a suggestion
        kind = "norm" if scheme in NORMS else "pos"
        if kind in request:
            raise RecipeError(f"variant {name!r} asks for two schemes of one kind: {request[kind]!r} and {part!r}")
        request[kind] = part
    return request


def check(config: FinetuneConfig) -> None:
    """Refuse what can't work before anything is read, trained or written."""
    check_numbers(config, AT_LEAST)
    if config.model is None and config.baseline_steps == 0:
        raise RecipeError("--baseline_steps 0 leaves a GPT-2 from scratch untrained: there is nothing to heal back to")
    if config.model is None and (config.width < 32 or config.width % 32):
        raise RecipeError(f"--width must be a multiple of 32, not {config.width}")
    if len(set(config.variants)) < len(config.variants):
        raise RecipeError(f"a variant is named twice in --variants {' '.join(config.variants)}")
    for variant in config.variants:
        parse_variant(variant)
    if config.tracker == "tensorboard" and not is_tensorboard_available():
        raise RecipeError("--tracker tensorboard needs the package: pip install tensorboard")
    if config.model and (config.model[0] in "./~\\" or config.model.count("/") > 1) and not Path(config.model).is_dir():
        raise RecipeError(f"there is no model folder {config.model}")
    check_output_folder(config.output_dir)


def check_numbers(config: Any, at_least: dict[str, int]) -> None:
    """Refuse settings, or items of settings that are lists, below their bound, and a learning rate that is none."""
    for name, least in at_least.items():
        value = getattr(config, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not number >= least:
                raise RecipeError(f"--{name} must be at least {least}, not {number}")
    rate = getattr(config, "learning_rate", None)
    if rate is not None and not rate > 0:
        raise RecipeError(f"--learning_rate must be positive, not {rate}")


def check_output_folder(path: str) -> None:
    """Make it, or refuse one that can't be written to."""
    try:
        out = Path(path)
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink(missing_ok=True)
    except OSError as error:
        raise RecipeError(f"can't write to the output folder {path}: {error.strerror}") from None
