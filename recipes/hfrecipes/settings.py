"""Settings of recipes, from flags and YAML files, checked before any work."""

import argparse
import difflib
import importlib.util
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser

from hfpatch.core.registry import MLPS, NORMS, POSITIONS

from .corpus import RecipeError
from .tasks import TASKS, find_task

CONTROL = "control"


@dataclass
class RunConfig:
    """Settings of training in general; a task adds its own."""

    task: Literal["lm", "classify", "embed", "image"] = field(
        default="lm", metadata={"help": "what is learnt; each task has flags of its own: --task classify --help"}
    )
    variants: list[str] = field(
        default_factory=lambda: ["rms", "dyt", "rope", "rms+rope", CONTROL],
        metadata={"help": "what to compare: a norm, a position scheme or norm+position, by registered name, with "
                  "options as in dyt:alpha=0.8; 'control' is the unpatched copy"},
    )  # fmt: skip
    output_dir: str = field(default="runs/finetune", metadata={"help": "where results, models and states go"})
    baseline_steps: int | None = field(
        default=None, metadata={"help": "steps before the copies are made; none: 900 from scratch, 0 for --model"}
    )
    steps: int = field(default=150, metadata={"help": "steps after the patch, the same for every variant"})
    start: Literal["repaired", "self", "auto", "copied", "reset"] = field(
        default="repaired",
        metadata={"help": "how a patched copy begins: repaired on --calibration training inputs, or on sequences that "
                  "the model draws itself; auto: the closest that takes no data; copied: gains and shifts as they "
                  "were, nothing else touched; reset: fresh, for training from scratch"},
    )  # fmt: skip
    calibration: int = field(default=64, metadata={"help": "training items, or own sequences, that a repair takes"})
    batch_size: int = field(default=16, metadata={"help": "items in a batch, over all processes"})
    learning_rate: float = field(default=2e-3, metadata={"help": "peak of AdamW's learning rate"})
    warmup_steps: int = field(
        default=10,
        metadata={"help": "steps of linear warmup; then constant (baseline) or cosine to 0 (after the patch)"},
    )
    keep_dropout: bool = field(
        default=False,
        metadata={"help": "train given models and patched copies with their dropout, the control too; repaired "
                  "weights lose by it (measured). What is trained from scratch always has the task's"},
    )  # fmt: skip
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's decay, on matrices only"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm; 0: not at all"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "batches in a step"})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "keep fewer activations and compute them again: less memory, more time"}
    )
    compile: bool = field(
        default=False,
        metadata={"help": "train and measure through torch.compile: the block that the model repeats, compiled once; "
                  "then --resume agrees to rounding, not to the bit"},
    )  # fmt: skip
    mixed_precision: Literal["no", "fp16", "bf16"] | None = field(
        default=None, metadata={"help": "none: as accelerate launch says, else no"}
    )
    eval_every: int = field(default=10, metadata={"help": "steps between points of the curves"})
    save_every: int = field(default=50, metadata={"help": "steps between saved states"})
    patience: int | None = field(
        default=None,
        metadata={
            "help": "stop a model after so many points of its curve without a better one, and go back to the best"
        },
    )
    seed: int = field(default=0, metadata={"help": "of weights and of the order of the data; never of the split"})
    resume: bool = field(default=False, metadata={"help": "go on where a run with the same settings stopped"})
    stop_after: int | None = field(
        default=None, metadata={"help": "save and stop after so many steps, for machines with a time limit"}
    )
    tracker: Literal["tensorboard", "wandb", "trackio", "none"] = field(
        default="tensorboard", metadata={"help": "log to this tracker of accelerate's"}
    )


# Settings that may change between a stopped run and its continuation without making its figures incomparable.
FREE_TO_CHANGE = {"variants", "output_dir", "save_every", "resume", "stop_after", "tracker"}
AT_LEAST = dict.fromkeys(("steps", "batch_size", "gradient_accumulation_steps", "stop_after", "patience"), 1)
AT_LEAST |= dict.fromkeys(("eval_every", "save_every"), 1)
AT_LEAST |= dict.fromkeys(("baseline_steps", "calibration", "warmup_steps", "weight_decay", "max_grad_norm", "seed"), 0)


def spell_out(argv: list[str]) -> list[str]:
    """Flags alone: those of a YAML file that comes first, then the others, which win."""
    if not (argv and argv[0].endswith((".yaml", ".yml"))):
        return argv
    path, argv = argv[0], argv[1:]
    try:
        settings = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"can't read the settings in {path}: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise RecipeError(f"{path} must hold 'name: value' lines, not a {type(settings).__name__}")
    flags = []
    for name, value in settings.items():  # through the parser, so that YAML and flags are checked alike
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *map(str, values)] if value is not None else []
    return flags + argv


def read_settings(
    kinds: type | tuple[type, ...], recipe: str, argv: list[str], about: str = "", unused: Iterable[str] = ()
) -> Any:
    """Settings from flags, or from a YAML file followed by flags, which win.

    Several dataclasses make one flat object; where two have a field of the same name, the first one's default holds.

    Args:
        unused: settings that --help doesn't speak of.

    Raises:
        RecipeError: a flag, or a name in the YAML file, that isn't known, or the file can't be read.
    """
    if isinstance(kinds, tuple):
        kinds = dataclass(type("Settings", kinds, {}))
    parser = HfArgumentParser(
        kinds,
        prog=recipe,
        usage="%(prog)s [CONFIG.yaml] [--flag value ...]",
        description=about,
        epilog="CONFIG.yaml holds the same names; flags override it.",
        allow_abbrev=False,
    )
    for action in parser._actions:
        if action.dest in unused:
            action.help = argparse.SUPPRESS
    found, unknown = parser.parse_known_args(spell_out(argv))
    if unknown:
        raise RecipeError(unknown_setting(unknown[0], [name for name in vars(found) if name not in unused], recipe))
    return kinds(**vars(found))


def unknown_setting(flag: str, known: list[str], recipe: str) -> str:
    """What to say of a flag that isn't known: the nearest one, or the tasks that have it."""
    if not flag.startswith("-"):
        return f"{recipe} can't make sense of {flag!r}: a YAML file comes first, then --name value; see --help"
    name = flag.partition("=")[0].lstrip("-").replace("-", "_")
    tasks = [task for task in TASKS if name in {f.name for f in fields(find_task(task).Config)}]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean --{near[0]}?" if near else ""
    hint = f" It is one of --task {' or '.join(tasks)}." if tasks else hint
    return f"{recipe} has no setting --{name} here.{hint} See --help"


def read_run(argv: list[str], recipe: str, about: str = "", *more: type) -> Any:
    """Settings of a recipe that trains: its own (`more`), the task's and training's.

    Raises:
        RecipeError: there is no such task, or the YAML file can't be read.
    """
    flags = spell_out(argv)
    return read_settings((*more, chosen_task(flags).Config, RunConfig), recipe, flags, about)


def chosen_task(flags: list[str]) -> Any:
    """The class of the task that the flags name last; its own flags aren't known before.

    Raises:
        RecipeError: there is no such task.
    """
    named = [b for a, b in pairwise(flags) if a == "--task"]
    named += [flag.removeprefix("--task=") for flag in flags if flag.startswith("--task=")]
    return find_task(named[-1] if named else "lm")


def parse_variant(name: str) -> dict[str, str]:
    """The keyword arguments of `patch_model` that a variant stands for: "rms+rope" is norm="rms", pos="rope".

    Raises:
        UnknownNameError: hfpatch knows no such scheme.
        RecipeError: two schemes of one kind.
    """
    request: dict[str, str] = {}
    kinds = {"norm": NORMS, "pos": POSITIONS, "mlp": MLPS}
    for part in re.split(r"\+(?=[A-Za-z_])", name) if name != CONTROL else ():
        scheme = part.partition(":")[0]
        kind = next((kind for kind, registry in kinds.items() if scheme in registry), None)
        if kind is None:
            every = {name: registry for registry in kinds.values() for name in registry}
            near = difflib.get_close_matches(scheme, every, n=1, cutoff=0.0)
            every.get(near[0] if near else "", NORMS)[scheme]  # raises, with a suggestion
        elif kind in request:
            raise RecipeError(f"variant {name!r} asks for two schemes of one kind: {request[kind]!r} and {part!r}")
        else:
            request[kind] = part
    return request


def check(config: Any) -> None:
    """Refuse what can't work before anything is read, trained or written; a recipe's own settings may have a say."""
    if hasattr(config, "check"):
        config.check()
    task = find_task(config.task)
    check_numbers(config, AT_LEAST | task.at_least)
    task.check(config)
    if config.model is None and config.baseline_steps == 0 and config.start != "reset":
        raise RecipeError(
            "--baseline_steps 0 leaves a model from scratch untrained: there is nothing to heal back to "
            "(--start reset compares models that are all trained from scratch)"
        )
    if len(set(config.variants)) < len(config.variants):
        raise RecipeError(f"a variant is named twice in --variants {' '.join(config.variants)}")
    for variant in config.variants:
        parse_variant(variant)
    if config.tracker != "none" and importlib.util.find_spec(config.tracker) is None:
        raise RecipeError(f"--tracker {config.tracker} needs the package: pip install {config.tracker}")
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
    if rate is not None and not 0 < rate < math.inf:
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
