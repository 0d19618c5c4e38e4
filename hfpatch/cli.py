"""The command line: `hfpatch families`, `plan MODEL`, `patch MODEL OUT`, `verify MODEL REF`, `push DIR REPO`, ..."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

import hfpatch

from .core.plan_table import table
from .core.progress import show_progress
from .core.registry import ARCHITECTURES, MLPS, NORMS, PLACEMENTS, POSITIONS
from .errors import NotPreservedWarning
from .export import FORMS, export_model
from .hub.push import push_patched
from .patch import patch_model, repair_report
from .plan import plan_patch
from .propose import propose_record
from .repairs.sample import generates, sample_batches
from .runtime.attention import Fused
from .runtime.errors import PatchError, first_line
from .schemes.positions import Position
from .verification import verify as verifying
from .verification.report import Report

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
    typer.Option(
        "--pos",
        help="Position scheme, with options as rope:theta=5e5 or rope:max_positions=8192. "
        f"One of: {', '.join(POSITIONS)}.",
    ),
]
MlpOption = Annotated[
    str | None, typer.Option("--mlp", help=f"MLP scheme, with options as swiglu:d_ff=2048. One of: {', '.join(MLPS)}.")
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
        message = first_line(error) if not isinstance(error, PatchError) else str(error)
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
    """Swap the norms, positions and MLPs of pretrained models, and save checkpoints that open again."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@app.command()
def families(
    markdown: Annotated[bool, typer.Option("--markdown", help="The README's support table.")] = False,
) -> None:
    """List the families whose positions can be changed; norms and MLPs can be changed in any model."""
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
    typer.echo(table(lines))
    typer.echo(f"\n{len(ARCHITECTURES)} families for pos= ({', '.join(POSITIONS)}).")
    typer.echo(f"norm= ({', '.join(NORMS)}) works on every model with LayerNorm-like modules.")
    typer.echo(f"mlp= ({', '.join(MLPS)}) works on every model whose MLPs aren't gated yet or mixtures.")


@app.command()
def plan(
    model: Model,
    norm: NormOption = None,
    pos: PosOption = None,
    mlp: MlpOption = None,
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
        typer.echo(str(plan_patch(built, norm, pos, only, keep, init, mlp=mlp, placement=placement)))


@app.command("inspect")
def inspect_record(
    model: Model,
    head: HeadOption = None,
) -> None:
    """Propose an architecture record for a family that has none, as Python to paste, and say what its proof showed.

    Reads the config only: everything is measured on a small random model of the same class.
    """
    with _readable_errors():
        built = _small_or_empty(_config(model), head)
        typer.echo(str(propose_record(built)))


def _small_or_empty(config: Any, head: str | None) -> Any:
    """The model without weights; some can't be built on the meta device."""
    try:
        with torch.device("meta"):
            return _build(config, head)
    except NotImplementedError:
        return _build(config, head)


@app.command()
def patch(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder for the patched checkpoint.")],
    norm: NormOption = None,
    pos: PosOption = None,
    mlp: MlpOption = None,
    only: OnlyOption = None,
    keep: KeepOption = None,
    init: InitOption = "auto",
    placement: PlacementOption = None,
    head: HeadOption = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="What repairs a lossy swap: 'self' (sequences drawn from the model: the default where it generates "
            "and has weights), a text file with one example a line, or 'none'."
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="How many sequences a repair takes.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Where longer sequences are cut.")] = 128,
    fit: Annotated[
        str,
        typer.Option(
            help="What a repair of positions fits to the original's attention maps: 'qk', weights and biases of "
            "queries and keys, or 'bias', their biases alone."
        ),
    ] = "qk",
    report: Annotated[Path | None, typer.Option(help="Save what the repair did as this .json file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights (config:FAMILY) and of samples.")] = 0,
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
        request: dict[str, Any] = {"norm": norm, "pos": pos, "mlp": mlp, "only": only, "keep": keep, "init": init}
        request["placement"] = placement
        planned = plan_patch(built, **request)
        typer.echo(str(planned))
        with show_progress(), warnings.catch_warnings():
            if planned.losses() and init != "reset":
                request["calibration"] = _calibration(calibration, model, built, sequences, tokens, seed)
            warnings.simplefilter("ignore", NotPreservedWarning)  # said below, in the words of a command line
            patch_model(built, **request, fit=fit)
        repaired = repair_report(built)
        if repaired is not None:
            typer.echo(f"\n{repaired}")
            if report is not None:
                repaired.save(report)
        built.save_pretrained(out)
        scheme = Position.resolve(pos)
        longest = scheme.max_positions if scheme else None
        typer.echo(f"\nSaved to {out}{_carry_processor(model, out, longest)}.")
        typer.echo(f"Open it with: import hfpatch; transformers.{_auto_class(built)}.from_pretrained({str(out)!r})")
        if planned.losses() and not (repaired and repaired.kept):
            typer.echo(
                f"Not preserved: {'; '.join(planned.losses())}. Repair it (--calibration FILE), or train before use."
            )


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="The patched checkpoint: a Hub id or a folder.")],
    reference: Annotated[str, typer.Argument(help="The original's Hub id or folder.")],
    text: Annotated[
        Path | None, typer.Option(help="Text file, one example a line; without it the inputs are random.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Save the report as this .json file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the error layer by layer into this .png file.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="How many lines of the text are used, from its start.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Where longer lines are cut.")] = 128,
    head: HeadOption = None,
) -> None:
    """Measure what a patch changed: modules, outputs by dtype and layers, against the original in float64."""
    with _readable_errors():
        if json is not None and json.suffix != ".json":
            raise PatchError(f"--json {json}: the name must end in .json.")
        if _is_config(model) or _is_config(reference):
            raise PatchError("verify compares two checkpoints; random weights (config:FAMILY) have no original.")
        built = _load(model, _config(model), head)
        batches = None if text is None else _text_batches(text, built, (model, reference), examples, tokens)
        report = verifying.verify(built, reference, batches)
        typer.echo(str(report))
        if json is not None:
            report.save(json)
            typer.echo(f"\nSaved to {json}.")
        if plot is not None:
            report.plot(plot)
            typer.echo(f"\nPlotted to {plot}.")


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="The patched checkpoint: a Hub id or a folder.")],
    out: Annotated[Path, typer.Argument(help="Folder for what is written.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="What opens it: 'native' transformers alone, as a stock architecture of equal outputs, where there is "
            "one; 'remote' trust_remote_code=True; 'plugin' import hfpatch.",
        ),
    ] = "native",
    architecture: Annotated[
        str | None,
        typer.Option(
            help="Of --to native: the only architecture to try, such as gpt_neox; default: the first equal one."
        ),
    ] = None,
    head: HeadOption = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT although it isn't empty.")] = False,
) -> None:
    """Write a patched checkpoint for whoever is to open it, with its tokenizer or processor.

    A native export is measured before it is saved: the stock architecture's outputs against the patched model's, on
    random inputs. Where no architecture is equal, nothing is written, and the reason is given for each.
    """
    with _readable_errors():
        if to not in FORMS:
            raise PatchError(f"--to {to}: choose one of {', '.join(FORMS)}.")
        if _is_config(model):
            raise PatchError("export writes a checkpoint for others; random weights (config:FAMILY) are none.")
        built = _load(model, _config(model), head)
        carried = _processor(model)
        written = export_model(built, out, to, tokenizer=carried, architecture=architecture, overwrite=overwrite)
        typer.echo(str(written))
        if carried is None:
            typer.echo("No tokenizer or processor was found to carry along.")


def _processor(model: str) -> Any:
    """A checkpoint's tokenizer or processor, None where it has none that opens."""
    try:
        return AutoProcessor.from_pretrained(model)
    except Exception:  # they fail in many ways (missing files, missing packages); none spoils the model
        return None


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="The patched checkpoint's folder.")],
    repo: Annotated[str, typer.Argument(help="The Hub id of the repository: user/name, or name for one's own.")],
    base: Annotated[
        str | None, typer.Option("--base", help="The model that was patched: its Hub id or folder, for the card.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="The licence's id on the Hub; default: the base's, where its card can be read.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="A .json file that verify saved, for the card.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Hub id or folder of the tokenizer or processor, where the folder has none.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="What it is exported as first: 'native', 'remote' or 'plugin', as in export; default: as it is."
        ),
    ] = None,
    native: Annotated[bool, typer.Option("--native", help="The folder is a native export, without a record.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A repository that is made is public, not private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; it is made where it doesn't exist.")] = None,
    subfolder: Annotated[str, typer.Option(help="The folder in the repository.")] = "",
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, typer.Option(help="The commit's first line.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; list what would be uploaded.")] = False,
) -> None:
    """Push a patched checkpoint to the Hub, with a model card, as one commit; resumed where it broke off."""
    with _readable_errors():
        push = push_patched(
            folder,
            repo,
            form=form,
            native=native,
            tokenizer=tokenizer,
            base_model=base,
            license=license,
            report=None if report is None else Report.load(report),
            private=not public,
            revision=revision,
            subfolder=subfolder,
            create_pr=create_pr,
            commit_message=message,
            dry_run=dry_run,
        )
        typer.echo(str(push))


def _text_batches(
    text: Path, model: Any, names: tuple[str, ...], examples: int, tokens: int
) -> list[dict[str, torch.Tensor]]:
    """The first lines of a file that aren't empty, in batches of eight, padded."""
    tokenizer = _tokenizer(names)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    size = 8 if tokenizer.pad_token is not None else 1
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
    cut = min(tokens, longest, tokenizer.model_max_length)
    if not text.is_file():
        raise PatchError(f"there is no text file {text}.")
    lines = [line for line in text.read_text(encoding="utf-8").splitlines() if line.strip()][:examples]
    if not lines:
        raise PatchError(f"{text} holds no line of text.")
    takes = inspect.signature(model.forward).parameters
    batches = []
    for i in range(0, len(lines), size):
        few = lines[i : i + size]
        try:
            encoded = tokenizer(few, return_tensors="pt", truncation=True, max_length=cut, padding=size > 1)
        except Exception as error:  # whatever a tokenizer raises about text that isn't its own kind
            raise PatchError(f"the tokenizer takes no such text ({first_line(error):.200}): {few[0]:.60}") from error
        batches.append({name: value for name, value in encoded.items() if name in takes})
    return batches


def _tokenizer(names: tuple[str, ...]) -> Any:
    reason = "no vocabulary"  # transformers opens a folder without tokenizer files as an empty one
    for name in names:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            if len(tokenizer.get_vocab()) > len(tokenizer.all_special_ids):
                return tokenizer
        except Exception as error:  # tokenizers fail in many ways; the other checkpoint may have one
            reason = first_line(error)
    raise PatchError(f"no tokenizer for the text in {' or '.join(names)} ({reason:.200}).")


def _calibration(
    asked: str | None, model: str, built: Any, sequences: int, tokens: int, seed: int
) -> list[dict[str, torch.Tensor]] | None:
    """Batches for a repair: as asked, else drawn from a model that has weights and generates."""
    if asked is None:
        asked = "self" if not _is_config(model) and generates(built) else "none"
    if asked == "none":
        return None
    if asked == "self":
        return sample_batches(built, sequences, tokens, seed)
    return _text_batches(Path(asked), built, (model,), sequences, tokens)


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


def _carry_processor(model: str, out: Path, longest: int | None) -> str:
    if _is_config(model):
        return ""
    try:
        processor = AutoProcessor.from_pretrained(model)
        tokenizer = getattr(processor, "tokenizer", processor)
        if longest is not None and hasattr(tokenizer, "model_max_length"):
            tokenizer.model_max_length = longest
        processor.save_pretrained(out)
    except Exception as error:  # tokenizers fail in many ways (missing files, missing packages); none spoils the model
        return f" (no tokenizer or processor carried along: {first_line(error):.100})"
    return " with its tokenizer or processor"


if __name__ == "__main__":
    sys.exit(app())
