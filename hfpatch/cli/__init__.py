"""The command line, `hfpatch`: families, plan, patch, verify, verify-model, report, export, push, run."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import hfpatch

from ..checkpoint.auto_classes import auto_classes_of
from ..checkpoint.by_name import config_of, is_config, open_model, opening, random_weights
from ..checkpoint.file_digests import compare, read_digests
from ..checkpoint.sentence_modules import with_modules
from ..core.mapped import unload_after_forward
from ..core.registry import ARCHITECTURES, MLPS, NORMS, POSITIONS
from ..core.results import Table
from ..core.staging import require_free, stage_folder
from ..errors import OptionError
from ..export import export_model
from ..export.runtimes import RUNTIMES
from ..extras.page import default_place, write_page
from ..hub.push import push_patched
from ..measure.batches import LENGTH, SEQUENCES, processor_of, tokenizer_of
from ..patch import patch_model, repair_report
from ..plan import plan_patch
from ..runtime.lens import host_class
from ..runtime.patch_errors import PatchError
from ..runtime.qk_layouts import Fused
from ..runtime.record import KEY, OPENED
from ..schemes.request import Record, Request, budget_in
from ..schemes.verdicts import EXACT, MEASUREMENT_NOTE, outcome_table
from ..verification import verify as verification
from ..verification.verify_report import Report
from . import options
from .launcher import launch
from .options import choices, data_of_repair, one_of, option, require_apart, require_size, texts_of

app = typer.Typer(
    cls=options.Commands,
    help="Architecture surgery for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # it fills paragraphs
)


_NOT_REPAIRED = (
    "What isn't exact was not repaired; {}--calibration FILE (one example a line) repairs it without training."
)
_TO = (
    "What opens the checkpoint. native: transformers alone, as a stock architecture with equal outputs, if there is "
    "one; remote: transformers with trust_remote_code=True; plugin: transformers with hfpatch."
)


def _version(requested: bool) -> None:
    if requested:
        libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
        typer.echo(f"hfpatch {hfpatch.__version__} ({libraries})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, option("Print versions.", "--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Swap the norms, positions and MLPs of pretrained models, and save checkpoints that open again."""
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()


@app.command()
def families() -> None:
    """List the model families whose positions can be swapped. Norms and MLPs can be swapped in any model."""
    lines = [("family", "position-owning class", "table", "queries and keys", "example")]
    for name, family in ARCHITECTURES.items():
        for stack in family.stacks:
            p = stack.projections
            projections = f"{p.name} (fused)" if isinstance(p, Fused) else f"{p.query}, {p.key}"
            lines.append((name, stack.owner, stack.table, projections, family.example))
    typer.echo(str(Table(lines)))
    typer.echo(f"\n{len(ARCHITECTURES)} families for pos= ({', '.join(POSITIONS)}).")
    typer.echo(f"norm= ({', '.join(NORMS)}) works on every model with LayerNorm-like modules.")
    typer.echo(f"mlp= ({', '.join(MLPS)}) works on every model whose MLPs aren't gated yet or mixtures.")


@app.command()
def plan(
    model: options.Model,
    norm: options.Norm = None,
    pos: options.Pos = None,
    mlp: options.Mlp = None,
    only: options.Only = None,
    keep: options.Keep = None,
    init: options.Init = "auto",
    placement: options.Placement = None,
    head: options.Head = None,
    trust_remote_code: options.Trust = False,
) -> None:
    """Show what a patch would change.

    Prints a table of modules: what each module becomes, whether the change is exact, and which modules stay, and why.
    Reads the config only: no weights are loaded.
    """
    config = config_of(model, trust_remote_code)
    with opening(model), torch.device("meta"):
        built = random_weights(config, head, trust_remote_code)
    request = choices(norm=norm, pos=pos, mlp=mlp)
    typer.echo(str(plan_patch(built, **request, placement=placement, only=only, keep=keep, init=init)))


@app.command()
def patch(
    model: options.Model,
    out: Annotated[Path, typer.Argument(help="Folder for the patched checkpoint.")],
    norm: options.Norm = None,
    pos: options.Pos = None,
    mlp: options.Mlp = None,
    only: options.Only = None,
    keep: options.Keep = None,
    init: options.Init = "auto",
    placement: options.Placement = None,
    head: options.Head = None,
    calibration: options.Calibration = None,
    sequences: options.Sequences = SEQUENCES,
    length: options.Length = LENGTH,
    fit: options.Fit = "qk",
    seed: Annotated[int, option("Seed of random weights (config:FAMILY) and of --calibration self.")] = 0,
    max_shard_size: options.Shard = "50GB",
    trust_remote_code: options.Trust = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Patch a model and save it as a checkpoint.

    Prints the plan, measures the patched model against the original, and saves it with its tokenizer or processor. What
    isn't exact is repaired if --calibration is passed, and otherwise left as it is; OUT holds the report of the repair.
    """
    require_apart(out, model, calibration)
    require_free(out, overwrite)
    require_size(max_shard_size)
    kinds: dict[str, Any] = {**choices(norm=norm, pos=pos, mlp=mlp), "placement": placement}
    torch.manual_seed(seed)
    built = open_model(model, head, trust_remote_code, stored=True)
    request: dict[str, Any] = {**kinds, "only": only, "keep": keep, "init": init}
    globs, budget = budget_in(tuple(keep or ()))
    with unload_after_forward(built):
        planned = plan_patch(built, **request | {"keep": globs})
    typer.echo(str(planned))
    if budget is not None:
        typer.echo("Of these norms as many change as the budget in --keep allows, which is measured first.")
    processor = None if is_config(model) else processor_of(model, trust_remote_code)
    data = data_of_repair(calibration, built, processor, sequences, length, seed)
    longest = Request.of(kinds, only, globs, init).length
    saved = built if is_config(model) else with_modules(built, model, longest)
    tokenizer = None if longest is None else tokenizer_of(processor)
    with unload_after_forward(built):
        patch_model(built, **request, calibration=data, fit=fit, tokenizer=tokenizer)
    repaired = repair_report(built)
    if repaired is not None:
        typer.echo(f"\n{repaired}")
    outcomes = Record.of(built.config).outcomes()
    lines = "\n".join(f"{request}: {outcome.result}" for request, outcome in outcomes.items())
    typer.echo(f"\n{outcome_table(outcomes)}\n{MEASUREMENT_NOTE}\n\n{lines}")
    if data is None and init != "reset" and any(outcome.verdict != EXACT for outcome in outcomes.values()):
        own = "--calibration self (its own sequences) or " if planned.generates else ""
        typer.echo(_NOT_REPAIRED.format(own))
    with stage_folder(out, overwrite) as folder:
        saved.save_pretrained(folder, max_shard_size=max_shard_size)
        if processor is not None:
            processor.save_pretrained(folder)
    carried = "with its tokenizer or processor" if processor else "(no tokenizer or processor to carry along)"
    summary = ", ".join(f"{request} is {outcome.verdict}" for request, outcome in outcomes.items())
    typer.echo(f"\nSaved to {out} {carried}: {summary}.")
    auto = [*auto_classes_of(host_class(type(built)), host_class(type(built.config))), "AutoModel"][0]
    typer.echo(f"Open it with: import hfpatch; transformers.{auto}.from_pretrained({str(out)!r})")


@app.command()
def verify(
    model: options.Patched,
    reference: options.Reference = None,
    text: options.Text = None,
    json: Annotated[Path | None, option("Save the report as this .json file.", "--json")] = None,
    examples: options.Examples = 64,
    length: options.Length = LENGTH,
    head: options.Head = None,
    trust_remote_code: options.Trust = False,
) -> None:
    """Compare a patched model with its original, or check its files.

    With REFERENCE, the original: compares modules, outputs by dtype, and layers with the original in float64. Without
    REFERENCE: compares every byte of MODEL's weights, and its config.json, with what was saved.
    """
    if reference is None:
        if text is not None or json is not None:
            raise OptionError("--text and --json go with a REFERENCE, the original to compare with.")
        _verify_files(model, head, trust_remote_code)
        return
    if json is not None and json.suffix != ".json":
        raise PatchError(f"--json {json}: the name must end in .json.")
    if is_config(model) or is_config(reference):
        raise PatchError("verify compares two checkpoints; random weights (config:FAMILY) have no original.")
    require_apart(json, model, reference, text)
    built = open_model(model, head, trust_remote_code)
    report = _compare(built, model, reference, text, examples, length, head, trust_remote_code)
    typer.echo(str(report))
    if json is not None:
        report.save(json)
        typer.echo(f"\nSaved to {json}.")


@app.command()
def verify_model(
    model: Annotated[str, typer.Argument(help="The original model: Hub id or folder.")],
    text: Annotated[Path, option("Held-out text, one example a line. No example of it may be in the calibration.")],
    norm: options.Norm = None,
    pos: options.Pos = None,
    mlp: options.Mlp = None,
    only: options.Only = None,
    keep: options.Keep = None,
    init: options.Init = "auto",
    calibration: options.Calibration = None,
    sequences: options.Sequences = SEQUENCES,
    examples: options.Examples = 64,
    length: options.Length = LENGTH,
    head: options.Head = None,
    trust_remote_code: options.Trust = False,
) -> None:
    """Patch a model in memory, measure it on held-out text, and print a row for the register of real models.

    The last line is the row, as JSON: model and commit, request, outcomes, figures, versions, hardware, CPU seconds.
    Paste it into an issue of the form "Verify this model". Nothing is saved.
    """
    if calibration is not None and Path(calibration).exists() and text.samefile(calibration):
        raise OptionError("--text is what the repair hasn't seen: pass another file than --calibration.")
    built, schemes = open_model(model, head, trust_remote_code), choices(norm=norm, pos=pos, mlp=mlp)
    processor = processor_of(model, trust_remote_code)
    held_out = texts_of(text, built, processor, examples, length)
    data = data_of_repair(calibration, built, processor, sequences, length, 0)
    start = time.process_time()
    patch_model(built, **schemes, only=only, keep=keep, init=init, calibration=data)
    seconds, repaired = time.process_time() - start, repair_report(built)
    measured = verification.verify(built, open_model(model, head, trust_remote_code), held_out)
    row: dict[str, Any] = {
        "model": model,
        "commit": getattr(built.config, "_commit_hash", None),
        "patch": "+".join(str(scheme) for scheme in schemes.values() if scheme),
        "settings": {"only": only or [], "keep": keep or [], "init": init},
        "calibration": "none" if repaired is None else f"{repaired.sequences} x {length}",
        "judged": f"{measured.examples} texts of {measured.tokens} tokens",
        "copied" if repaired is None else "repaired": measured.figures(),
        "said": dict(hfpatch.outcomes(built)),
        "cpu_seconds": round(seconds, 1),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.platform(),
        "hfpatch": hfpatch.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": str(datetime.date.today()),
    }
    typer.echo(f"{measured}\n\n{dumps(row)}")


@app.command()
def report(
    model: options.Patched,
    reference: options.Reference = None,
    out: Annotated[Path | None, option("The .html file. Default: hfpatch_report.html in MODEL's folder.")] = None,
    json: Annotated[Path | None, option("Report (.json) that verify saved, instead of measuring.", "--json")] = None,
    text: options.Text = None,
    examples: options.Examples = 64,
    length: options.Length = LENGTH,
    head: options.Head = None,
    trust_remote_code: options.Trust = False,
) -> None:
    """Write an HTML page about a patched checkpoint.

    It shows the block before and after, the measured errors, and how to open the checkpoint and make it again. With
    REFERENCE, the original, the errors are measured as by verify; --json takes a report that verify saved. A push
    uploads hfpatch_report.html too, and the model card links to it.
    """
    if is_config(model):
        raise PatchError("report takes a patched checkpoint, not config:FAMILY (random weights).")
    if (json is not None or reference is None) and text is not None:
        raise OptionError("--text is what a REFERENCE is compared on, and --json is a comparison already.")
    place = default_place(model) if out is None else out
    if out is not None:
        require_apart(out, model, reference, text, json)
    saved = None if json is None else Report.load(json)
    built = open_model(model, head, trust_remote_code)
    if saved is None and reference is not None:
        saved = _compare(built, model, reference, text, examples, length, head, trust_remote_code)
    write_page(built, place, checkpoint=model, reference=reference, report=saved, repair=repair_report(built))
    typer.echo(f"Saved to {place}.")


@app.command()
def export(
    model: options.Patched,
    out: Annotated[Path, typer.Argument(help="Folder for the exported checkpoint.")],
    to: Annotated[options.Form, option(_TO)] = "native",
    architecture: Annotated[str | None, option("With --to native: the only architecture to try (gpt_neox).")] = None,
    serve: Annotated[str | None, option(f"With --to native: the runtime that must load it. {one_of(RUNTIMES)}")] = None,
    head: options.Head = None,
    max_shard_size: options.Shard = "50GB",
    trust_remote_code: options.Trust = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Save a patched checkpoint so that it opens without hfpatch.

    A native export is measured before it is saved: the stock architecture's outputs against the patched model's, on
    random inputs. If no architecture is equal, nothing is written, and the reason is given for each. The tokenizer or
    processor is saved too.
    """
    if is_config(model):
        raise PatchError("export takes a patched checkpoint, not config:FAMILY (random weights).")
    require_apart(out, model)
    require_size(max_shard_size)
    built = open_model(model, head, trust_remote_code, strongest=True)
    processor = processor_of(model, trust_remote_code)
    how: dict[str, Any] = {"tokenizer": processor, "overwrite": overwrite, "max_shard_size": max_shard_size}
    typer.echo(str(export_model(with_modules(built, model), out, to, architecture=architecture, serve=serve, **how)))
    if processor is None:
        typer.echo("No tokenizer or processor was found to save with it.")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="The patched checkpoint's folder.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub: user/name, or name alone for your own.")],
    base: Annotated[str | None, option("The original model, for the card: Hub id or folder.")] = None,
    license: Annotated[str | None, option("Id of the licence on the Hub. Default: the original's, if known.")] = None,
    report: Annotated[Path | None, option("A report (.json) that verify saved, for the card.")] = None,
    tokenizer: Annotated[str | None, option("Tokenizer to upload if FOLDER has none: Hub id or folder.")] = None,
    native: Annotated[bool, option("FOLDER is a native export.", "--native")] = False,
    public: Annotated[bool, option("Create the repository as public. Default: private.", "--public")] = False,
    revision: Annotated[str | None, option("Branch to upload to; created if it doesn't exist.")] = None,
    create_pr: Annotated[bool, option("Open a pull request instead of committing.", "--create-pr")] = False,
    message: Annotated[str | None, option("First line of the commit message.")] = None,
    trust_remote_code: options.Trust = False,
    dry_run: Annotated[bool, option("Send nothing; list what would be uploaded.", "--dry-run")] = False,
) -> None:
    """Upload a patched checkpoint to the Hub, with a model card.

    The upload is one commit. After a failed push run the same command again.
    """
    push = push_patched(
        folder,
        repo,
        form="native" if native else None,
        tokenizer=tokenizer,
        base_model=base,
        license=license,
        report=None if report is None else Report.load(report),
        private=not public,
        revision=revision,
        create_pr=create_pr,
        commit_message=message,
        trust_remote_code=trust_remote_code,
        dry_run=dry_run,
    )
    typer.echo(str(push))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="A program, a .py file, or -m MODULE; then arguments.")
    ] = None,
) -> None:
    """Run another program so that it can open patched checkpoints.

    For example: hfpatch run -- lm_eval --model hf ... Every Python process that the program starts imports hfpatch. The
    program is looked for next to this Python first, then in PATH, and its exit status is passed on. A Python without
    hfpatch says so on stderr.
    """
    launch(command or [])


def _compare(
    built: Any, model: str, reference: str, text: Path | None, examples: int, length: int, head: str | None, trust: bool
) -> Report:
    """What `verify` measures of an opened model, on random inputs or on a text."""
    original = open_model(reference, head, trust) if trust else reference
    batches = None
    if text is not None:
        processor = processor_of(model, trust) or processor_of(reference, trust)
        batches = texts_of(text, built, processor, examples, length)
    return verification.verify(built, original, batches)


def _verify_files(model: str, head: str | None, trust: bool) -> None:
    """Compare all of a patched checkpoint's files with what was saved, open it, and say what was compared."""
    config = config_of(model, trust)
    if not hasattr(config, KEY):
        raise PatchError(f"{model} isn't a patched checkpoint. To compare two models: hfpatch verify MODEL REFERENCE.")
    saved = read_digests(model, {})
    found = compare(model, {}, saved)
    vars(config)[OPENED].require_unchanged(model, saved and saved.config, refuse=True)
    typer.echo(f"{found.tensors} tensors ({found.size:,} bytes) are those that were saved, byte by byte.")
    built = open_model(model, head, trust, **found.same)
    typer.echo(f"{type(built).__name__} opens, and config.json is the one that was saved.")
