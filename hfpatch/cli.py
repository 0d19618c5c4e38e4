"""The command line: `hfpatch families`, `hfpatch plan MODEL`, `hfpatch patch MODEL OUT`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoConfig, AutoProcessor

import hfpatch

from .attention import Fused
from .errors import NotPreservedWarning, PatchError
from .patch import patch_model
from .plan import Plan, plan_patch
from .registry import ARCHITECTURES, NORMS, PLACEMENTS, POSITIONS

app = typer.Typer(
    help="Architecture surgery for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# tried in this order where a config doesn't name its own head
_HEADS = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModel",
)

Model = Annotated[str, typer.Argument(help="A Hub id, a folder, or config:FAMILY for random weights (config:gpt2).")]
NormOption = Annotated[
    str | None, typer.Option("--norm", help=f"Norm scheme, with options as dyt:alpha=0.8. One of: {', '.join(NORMS)}.")
]
PosOption = Annotated[
    str | None,
    typer.Option("--pos", help=f"Position scheme, with options as rope:theta=5e5. One of: {', '.join(POSITIONS)}."),
]
PlacementOption = Annotated[
    str | None,
    typer.Option("--placement", help=f"Where norms stand, for training from scratch. One of: {', '.join(PLACEMENTS)}."),
]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", help="Glob over module names; others are kept. Repeatable.")
]
KeepOption = Annotated[
    list[str] | None, typer.Option("--keep", help="Glob over module names that stay as they are. Repeatable.")
]
InitOption = Annotated[str, typer.Option("--init", help="How new parameters start: auto, exact, copy or reset.")]
HeadOption = Annotated[
    str | None,
    typer.Option("--head", help="Auto class to build, such as AutoModel; default: what the checkpoint was saved as."),
]


@contextlib.contextmanager
def _readable_errors() -> Iterator[None]:
    """One line on stderr and exit status 1 for what a user can put right; everything else keeps its traceback."""
    try:
        yield
    except (PatchError, OSError, ValueError) as error:
        message = str(error).strip().splitlines()[0] if not isinstance(error, PatchError) else str(error)
        typer.echo(f"Error: {message}", err=True)
        raise typer.Exit(1) from None


def _version(asked: bool) -> None:
    if asked:
        typer.echo(
            f"hfpatch {hfpatch.__version__} (torch {torch.__version__}, transformers {transformers.__version__})"
        )
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions.")
    ] = False,
) -> None:
    """Swap the norms and positions of pretrained models, and save checkpoints that open again."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@app.command()
def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="The README's support table.")] = False,
) -> None:
    """List the families whose positions can be changed; norms can be changed in any model."""
    lines = [("family", "position-owning class", "table", "queries and keys", "example")]
    for name, record in ARCHITECTURES.items():
        for stack in record.stacks:
            p = stack.projections
            projections = f"{p.name} (fused)" if isinstance(p, Fused) else f"{p.query}, {p.key}"
            lines.append((name, stack.owner, stack.table, projections, record.example))
    if markdown:
        code = [lines[0], ("---",) * len(lines[0]), *(tuple(f"`{cell}`" for cell in line) for line in lines[1:])]
        typer.echo("\n".join(f"| {' | '.join(line)} |" for line in code))
        return
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in (lines[0], tuple("-" * width for width in widths), *lines[1:]):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    typer.echo(f"\n{len(ARCHITECTURES)} families for pos= ({', '.join(POSITIONS)}).")
    typer.echo(f"norm= ({', '.join(NORMS)}) works on every model with LayerNorm-like modules.")


@app.command()
def plan(
    model: Model,
    norm: NormOption = None,
    pos: PosOption = None,
    only: OnlyOption = None,
    keep: KeepOption = None,
    init: InitOption = "auto",
    placement: PlacementOption = None,
    head: HeadOption = None,
) -> None:
    """Show what a patch would change, what it would keep, and why. Reads the config only: no weights are loaded."""
    with _readable_errors():
        with torch.device("meta"):
            built = _build(_config(model), head)
        typer.echo(str(plan_patch(built, norm, pos, only, keep, init, placement=placement)))


@app.command()
def patch(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder for the patched checkpoint.")],
    norm: NormOption = None,
    pos: PosOption = None,
    only: OnlyOption = None,
    keep: KeepOption = None,
    init: InitOption = "auto",
    placement: PlacementOption = None,
    head: HeadOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights of config:FAMILY.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Write into OUT although it isn't empty.")] = False,
) -> None:
    """Patch a model and save it, with its tokenizer or processor, as a checkpoint."""
    with _readable_errors():
        if out.is_file():
            raise PatchError(f"{out} is a file; OUT must be a folder.")
        if out.is_dir() and any(out.iterdir()) and not overwrite:
            raise PatchError(f"{out} isn't empty. Choose another folder, or pass --overwrite.")
        config = _config(model)
        torch.manual_seed(seed)
        built = _build(config, head) if _is_config(model) else _load(model, config, head)
        request: dict[str, Any] = {"norm": norm, "pos": pos, "only": only, "keep": keep, "init": init}
        request["placement"] = placement
        planned = plan_patch(built, **request)
        typer.echo(str(planned))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotPreservedWarning)  # said below, in the words of a command line
            patch_model(built, **request)
        built.save_pretrained(out)
        typer.echo(f"\nSaved to {out}{_carry_processor(model, out)}.")
        typer.echo(f"Open it with: import hfpatch; transformers.{_auto_class(built)}.from_pretrained({str(out)!r})")
        _say_losses(planned)


def _say_losses(planned: Plan) -> None:
    if planned.losses():
        typer.echo(f"Not preserved: {'; '.join(planned.losses())}. Fine-tune before use (recipes/finetune.py).")


def _is_config(model: str) -> bool:
    return model.startswith("config:")


def _config(model: str) -> Any:
    if not _is_config(model):
        return AutoConfig.from_pretrained(model)
    family = model.removeprefix("config:")
    try:
        return AutoConfig.for_model(family)
    except ValueError:
        raise PatchError(f"transformers {transformers.__version__} has no family {family!r}.") from None


def _auto_class(model: Any) -> str:
    """The first Auto class that opens a saved model as what it is."""
    for name in _HEADS:
        mapped = getattr(transformers, name)._model_mapping.get(type(model.config), None)
        if mapped is type(model):
            return name
    return "AutoModel"


def _model_class(config: Any, head: str | None) -> Any:
    """What to build: the named Auto class, the checkpoint's own architecture, or the family's usual head."""
    if head is not None:
        found = getattr(transformers, head, None)
        if found is None or not hasattr(found, "from_config"):
            raise PatchError(f"transformers has no Auto class {head!r}; try one of {', '.join(_HEADS)}.")
        return found
    for auto in _HEADS:
        mapped = getattr(transformers, auto)._model_mapping.get(type(config), None)
        if mapped is not None and mapped.__name__ in (config.architectures or []):
            return getattr(transformers, auto)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    usual = (getattr(transformers, name) for name in _HEADS)
    return named or next((auto for auto in usual if type(config) in auto._model_mapping), transformers.AutoModel)


def _build(config: Any, head: str | None) -> Any:
    cls = _model_class(config, head)
    return (cls.from_config if hasattr(cls, "from_config") else cls._from_config)(config).eval()


def _load(model: str, config: Any, head: str | None) -> Any:
    return _model_class(config, head).from_pretrained(model, config=config, dtype="auto")


def _carry_processor(model: str, out: Path) -> str:
    if _is_config(model):
        return ""
    try:
        AutoProcessor.from_pretrained(model).save_pretrained(out)
    except Exception as error:  # tokenizers fail in many ways (missing files, missing packages); none spoils the model
        return f" (no tokenizer or processor carried along: {str(error).strip().splitlines()[0]:.100})"
    return " with its tokenizer or processor"


if __name__ == "__main__":
    sys.exit(app())
