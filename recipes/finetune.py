"""What a patch costs, and how fast training heals it.

A language model (by default a small GPT-2, trained on the spot) is copied once per variant. Each copy is patched; what
the patch couldn't keep is repaired on a few blocks of the training text (`--calibration`); then each gets the same
further budget: the same batches in the same order, with the same optimizer. One copy stays unpatched: the control.
Held-out loss, perplexity and bits per byte are measured before the patch, right after it and after healing.

    python recipes/finetune.py                                        # nothing to prepare, nothing downloaded
    python recipes/finetune.py recipes/configs/lm.yaml --steps 50     # a YAML file first, flags on top of it
    python recipes/finetune.py --model gpt2 --text notes/*.txt --variants rms+rope control
    accelerate launch --num_cpu_threads_per_process 2 recipes/finetune.py
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 recipes/finetune.py

In the output folder: results.md, results.json, curves.png, one folder per healed model. `--resume` goes on where a
stopped run was, to the bit on one machine.
"""

import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

# Threads that spin while they wait make a step ten times slower as soon as something else wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from data import (
    Causal,
    HeldOutBlocks,
    Masked,
    RecipeError,
    TrainBlocks,
    encode,
    fingerprint,
    read_standard_library,
    read_text_files,
    split_documents,
    train_tokenizer,
)
from report import draw_curves, hardware, report, versions
from settings import FREE_TO_CHANGE, FinetuneConfig, check, parse, parse_variant
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
)

from hfpatch import NotPreservedWarning, PatchError, patch_model, plan_patch


class TrainingError(RuntimeError):
    """Training went wrong; the last good state is on disk."""


class Stopped(Exception):  # noqa: N818
    """Stopped on request, with everything saved."""


Batch = dict[str, torch.Tensor]


def token_nats(model: torch.nn.Module, batch: Batch, masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Per block: the summed negative log-likelihood in nats, and the number of tokens it is over. Both (B,)."""
    logits = model(input_ids=batch["input_ids"], **({} if masked else {"use_cache": False})).logits.float()
    labels = batch["labels"]
    if not masked:
        logits, labels = logits[:, :-1], labels[:, 1:]
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return nats.view_as(labels).sum(1), (labels != -100).sum(1)


@contextmanager
def stop_requests() -> Iterator[list[float]]:
    """Collects Ctrl-C and SIGTERM, so that a step is never cut in two; Ctrl-C two seconds later interrupts at once."""
    received: list[float] = []

    def note(number: int, frame: Any) -> None:
        received.append(time.monotonic())
        if received[-1] - received[0] > 2:  # sooner, it is a launcher that passes the first one on
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Finetune:
    """One run: a baseline and its variants, each a stage that can be stopped and resumed."""

    def __init__(self, config: FinetuneConfig) -> None:
        self.config = config
        self.out = Path(config.output_dir)
        self.started = time.perf_counter()
        self.steps_taken = 0
        try:
            self.accelerator = Accelerator(
                mixed_precision=config.mixed_precision,
                gradient_accumulation_steps=config.gradient_accumulation_steps,
                log_with=None if config.tracker == "none" else config.tracker,
                project_dir=self.out,
                dataloader_config=DataLoaderConfiguration(split_batches=True),  # a batch is shared, not multiplied
            )
        except ValueError as error:  # a precision that the device lacks, for one
            raise RecipeError(f"accelerate refuses: {error}") from None
        if config.batch_size % self.accelerator.num_processes:
            raise RecipeError(
                f"--batch_size {config.batch_size} can't be shared by {self.accelerator.num_processes} processes"
            )
        if config.tracker != "none":
            self.accelerator.init_trackers("finetune", {k: str(v) for k, v in asdict(config).items()})

    def run(self) -> None:
        self.prepare_text()
        self.prepare_model()
        self.open_results()
        with stop_requests() as self.requests:
            self.stage("baseline", lambda: self.model, self.baseline_steps, first=0, schedule="constant_with_warmup")
            del self.model
            for name in self.config.variants:  # they go on in the data where the baseline stopped
                build = partial(self.patched, name)
                self.stage(name, build, self.config.steps, first=self.baseline_steps, schedule="cosine")
        self.write_results()
        if self.accelerator.is_main_process:
            text = report(self.results)
            (self.out / "results.md").write_text(text, "utf-8")
            draw_curves(self.results, self.out / "curves.png")
            print(f"\n{text}\nin {self.out}: results.md, results.json, curves.png, and a folder per healed model")
        self.accelerator.end_training()

    # -- what is trained, on what

    def prepare_text(self) -> None:
        c = self.config
        documents = read_text_files(c.text) if c.text else read_standard_library()
        train, heldout = split_documents(documents)
        if c.model is None:
            with self.accelerator.main_process_first():
                self.tokenizer = train_tokenizer(train, c.vocab_size, self.out / "tokenizer")
        else:
            self.tokenizer = load(AutoTokenizer, c.model)
        self.masked = c.model is not None and is_masked(load(AutoConfig, c.model))
        self.task = Masked(self.tokenizer, c.block_size) if self.masked else Causal(c.block_size)
        self.train_tokens, _ = encode(train, self.tokenizer)
        heldout_tokens, sizes = encode(heldout, self.tokenizer)
        for name, tokens in {"training": self.train_tokens, "held-out": heldout_tokens}.items():
            if len(tokens) < self.task.content:
                raise RecipeError(
                    f"the {name} text has {len(tokens)} tokens, less than one block of {c.block_size}: "
                    "give more text, or a smaller --block_size"
                )
        self.heldout = HeldOutBlocks(heldout_tokens, sizes, self.task, c.heldout_blocks)
        self.curve_blocks = HeldOutBlocks(heldout_tokens, sizes, self.task, c.curve_blocks)
        python = f"standard library of Python {platform.python_version()}"
        self.data = {
            "source": ", ".join(d.name for d in documents) if c.text else python,
            "sha256": fingerprint(documents),
            "files": {"train": len(train), "heldout": len(heldout)},
            "tokens": {"train": len(self.train_tokens), "heldout": len(heldout_tokens)},
            "heldout_tokens_evaluated": len(self.heldout) * self.task.content,
            "vocab_size": len(self.tokenizer),
        }

    def prepare_model(self) -> None:
        """The baseline, and every patch tried out on paper: hfpatch refuses here what it can't do later."""
        c = self.config
        self.model_class = AutoModelForMaskedLM if self.masked else AutoModelForCausalLM
        self.baseline_steps = c.baseline_steps if c.baseline_steps is not None else 0 if c.model else 900
        self.baseline_folder = self.out / "baseline" if self.baseline_steps else Path(c.model)
        set_seed(c.seed)
        if c.model:
            self.model = load(self.model_class, c.model, dtype=torch.float32)
        else:
            end = self.tokenizer.eos_token_id
            sizes = {"n_positions": c.block_size, "n_embd": c.width, "n_layer": c.layers, "n_head": c.width // 32}
            no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # short runs only underfit
            spread = c.width**-0.5  # GPT-2's 0.02 suits a width of 768 and is slow to begin with at 128
            gpt2 = transformers.GPT2Config(
                vocab_size=len(self.tokenizer),
                **sizes,
                **no_dropout,
                initializer_range=spread,
                bos_token_id=end,
                eos_token_id=end,
            )
            self.model = transformers.GPT2LMHeadModel(gpt2)
        longest = min(getattr(self.model.config, "max_position_embeddings", math.inf), self.tokenizer.model_max_length)
        if c.block_size > longest:
            raise RecipeError(
                f"--block_size {c.block_size} is beyond the {longest} positions of the model; "
                "the figures before the patch, and the control, need them"
            )
        if len(self.tokenizer) > self.model.config.get_text_config().vocab_size:
            raise RecipeError(f"the tokenizer of {c.model} has more tokens ({len(self.tokenizer)}) than the model")
        for variant in c.variants:
            if request := parse_variant(variant):
                plan_patch(self.model, **request)

    def patched(self, variant: str) -> transformers.PreTrainedModel:
        """A fresh copy of the baseline, patched, and repaired on some of the text that it was trained on."""
        c = self.config
        model = load(self.model_class, str(self.baseline_folder), dtype=torch.float32)
        request: dict[str, Any] = dict(parse_variant(variant))
        if request:
            if c.calibration:
                blocks = TrainBlocks(self.train_tokens, self.task, c.seed, 0, c.calibration)
                request["calibration"] = list(DataLoader(blocks, c.batch_size))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotPreservedWarning)  # what isn't preserved is what the table shows
                patch_model(model, **request)
        return model

    # -- training and measuring

    def stage(self, name: str, build: Callable[[], Any], steps: int, first: int, schedule: str) -> None:
        """Measure a model, train it, measure it again; a finished stage is skipped and a stopped one goes on."""
        if name in self.results["stages"]:
            self.accelerator.print(f"{name}: done before")
            return
        c = self.config
        set_seed(c.seed)  # what a patch draws doesn't depend on the variants before it
        self.mark = time.perf_counter()
        model = build()
        record, state = self.find_state(name)
        blocks = c.batch_size * self.accelerator.gradient_accumulation_steps  # in a step
        left = steps - record["step"]
        text = TrainBlocks(self.train_tokens, self.task, c.seed, (first + record["step"]) * blocks, left * blocks)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]  # gains, shifts, DyT's alpha: not decayed
        groups = [{"params": matrices, "weight_decay": c.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=c.learning_rate)
        scheduler = transformers.get_scheduler(schedule, optimizer, c.warmup_steps, max(steps, 1))
        training = self.accelerator.prepare(model, optimizer, scheduler)
        model = training[0]
        self.table_loader, self.curve_loader = self.loader(self.heldout), self.loader(self.curve_blocks)
        if state:
            self.accelerator.load_state(state)
        else:
            record["start"] = self.evaluate(model, self.table_loader)
            record["curve"] = [{"step": 0, **self.evaluate(model, self.curve_loader)}]
        if left:
            self.train(name, *training, self.loader(text), record, steps)
        record["end"] = self.evaluate(model, self.table_loader) if steps else record["start"]
        self.finish(name, self.accelerator.unwrap_model(model), record)
        self.accelerator.free_memory()

    def train(self, name: str, model, optimizer, scheduler, loader: DataLoader, record: dict, steps: int) -> None:
        """Steps of training up to `steps`, with points of the curve and saved states on the way."""
        c, main = self.config, self.accelerator.is_main_process
        batches, tokens, spent = iter(loader), 0, 0.0
        bar = tqdm(total=steps, initial=record["step"], desc=name, unit="step", disable=not main, dynamic_ncols=True)
        with bar:
            for step in range(record["step"] + 1, steps + 1):
                self.steps_taken += 1
                stop = bool(self.requests) or self.steps_taken == c.stop_after
                begun = time.perf_counter()
                loss, stop = self.train_step(f"step {step} of {name}", model, optimizer, scheduler, batches, stop)
                spent += time.perf_counter() - begun
                record["step"] = step
                record["train_loss"].append(loss)
                self.accelerator.log({f"{name}/loss": loss}, step=step)
                if step in (1, 2, 5) or step % c.eval_every == 0 or step == steps:
                    record["curve"].append({"step": step, **self.evaluate(model, self.curve_loader)})
                    self.accelerator.log({f"{name}/heldout_loss": record["curve"][-1]["loss"]}, step=step)
                tokens += self.accelerator.gradient_accumulation_steps * c.batch_size * c.block_size
                record["tokens_per_second"] = round(tokens / spent)
                bar.set_postfix_str(f"loss {loss:.3f}, {record['tokens_per_second']:,} tokens/s", refresh=False)
                bar.update()
                if stop or step % c.save_every == 0 or step == steps:
                    self.save_state(name, record)
                if stop:
                    raise Stopped(f"stopped after step {step} of {steps} of {name!r}; everything is saved")

    def train_step(self, where: str, model, optimizer, scheduler, batches: Iterator, stop: bool) -> tuple[float, bool]:
        """One optimizer step. Returns the loss over all processes, and whether any of them was asked to stop."""
        accelerator = self.accelerator
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for _ in range(accelerator.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(model):
                nats, counts = token_nats(model, batch, self.masked)
                loss = nats.sum() / counts.sum()
                accelerator.backward(loss)
                total += loss.detach() / accelerator.gradient_accumulation_steps
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), self.config.max_grad_norm or math.inf)
                    seen = accelerator.reduce(torch.stack([total, total.new_tensor(float(stop))]), "mean").tolist()
                    # fp16 meets infinite gradients now and then; its scaler skips such steps by itself.
                    if not math.isfinite(seen[0]) or (accelerator.mixed_precision != "fp16" and not norm.isfinite()):
                        raise TrainingError(f"loss {seen[0]:g}, gradient norm {float(norm):g} in {where}")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return seen[0], seen[1] > 0

    def loader(self, blocks: TrainBlocks | HeldOutBlocks) -> DataLoader:
        # A generator of its own: opening a loader must not draw from the one that dropout uses.
        loader = DataLoader(blocks, batch_size=self.config.batch_size, generator=torch.Generator())
        return self.accelerator.prepare(loader)

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module, loader: DataLoader) -> dict[str, float | None]:
        """Held-out loss in nats a token, perplexity and, for causal models, bits a byte of the text predicted."""
        model.eval()
        seen = [self.accelerator.gather_for_metrics(token_nats(model, batch, self.masked)) for batch in loader]
        nats = sum(n.double().sum().item() for n, _ in seen)
        loss = nats / sum(count.sum().item() for _, count in seen)
        size = loader.dataset.sizes.sum()
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700)),
            "bits_per_byte": None if self.masked else nats / math.log(2) / size,
        }

    # -- what is kept on disk

    def open_results(self) -> None:
        """results.json, begun or taken up again; what it doesn't know of is stale."""
        settings = {k: v for k, v in asdict(self.config).items() if k != "resume"}
        path = self.out / "results.json"
        if self.config.resume and path.exists():
            self.results = json.loads(path.read_text("utf-8"))
            before = self.results["config"]
            changed = [k for k in settings if k not in FREE_TO_CHANGE and before.get(k) != settings[k]]
            if self.results["data"]["sha256"] != self.data["sha256"]:
                changed.append("text (its content)")
            if changed:
                raise RecipeError(f"can't resume {self.out} with other settings: {', '.join(changed)} changed")
            self.results["config"] = settings
        else:
            if self.accelerator.is_main_process:
                shutil.rmtree(self.out / "state", ignore_errors=True)
            self.results = {
                "config": settings,
                "data": self.data,
                "objective": "masked" if self.masked else "causal",
                "hardware": hardware(self.accelerator),
                "versions": versions(),
                "wall_seconds": 0.0,
                "stages": {},
            }
        self.earlier = self.results["wall_seconds"]
        self.write_results()

    def write_results(self) -> None:
        self.results["wall_seconds"] = self.earlier + time.perf_counter() - self.started
        if self.accelerator.is_main_process:
            write_json(self.out / "results.json", self.results)
        self.accelerator.wait_for_everyone()

    def find_state(self, name: str) -> tuple[dict[str, Any], str | None]:
        """The stage's record and the folder of its newest state, or a new record and None."""
        for path in sorted(self.out.glob("state/*/stage.json"), reverse=True):
            record = json.loads(path.read_text("utf-8"))
            if record["name"] == name:
                return record, str(path.parent)
        return {"name": name, "step": 0, "seconds": 0.0, "train_loss": []}, None

    def save_state(self, name: str, record: dict[str, Any]) -> None:
        """A state counts once its stage.json is there, which is written last; then the older ones go."""
        folder = self.out / "state" / f"{record['step']:07d}-{folder_name(name)}"
        self.accelerator.save_state(str(folder))
        self.count_seconds(record)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_json(folder / "stage.json", record)
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other)
        self.write_results()

    def finish(self, name: str, model: transformers.PreTrainedModel, record: dict[str, Any]) -> None:
        self.count_seconds(record)
        record["parameters"] = model.num_parameters()
        if self.accelerator.is_main_process and record["step"]:
            model.save_pretrained(self.out / folder_name(name))
            self.tokenizer.save_pretrained(self.out / folder_name(name))
        self.results["stages"][name] = record
        self.write_results()
        if self.accelerator.is_main_process:
            shutil.rmtree(self.out / "state", ignore_errors=True)

    def count_seconds(self, record: dict[str, Any]) -> None:
        now = time.perf_counter()
        record["seconds"], self.mark = record["seconds"] + now - self.mark, now


def load(auto: Any, source: str, **options: Any) -> Any:
    """`auto.from_pretrained(source)`, whose many ways to fail become one line."""
    try:
        return auto.from_pretrained(source, **options)
    except PatchError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RecipeError(f"{auto.__name__} can't load {source}: {reason}") from None


def is_masked(config: transformers.PreTrainedConfig) -> bool:
    """Whether a checkpoint is a masked language model, by the class that it was saved from."""
    architecture = (config.architectures or [""])[0]
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not architecture.endswith(("ForCausalLM", "LMHeadModel"))


def folder_name(variant: str) -> str:
    return re.sub(r"[^\w+.=,-]", "-", variant)


def write_json(path: Path, value: Any) -> None:
    """Replaced as a whole, never left half-written."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1), "utf-8")
    os.replace(partial, path)


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 1 (training failed), 2 (bad input) or 130 (stopped)."""
    argv = sys.argv[1:] if argv is None else argv
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tied weights are saved once: as they should
    try:
        config = parse(argv, __doc__.split("\n\n")[1])
        check(config)
        Finetune(config).run()
    except (RecipeError, PatchError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        states = f"the last good state, if any, is in {config.output_dir}/state"
        print(f"{type(error).__name__}: {error}. Lower --learning_rate and start again; {states}", file=sys.stderr)
        return 1
    except (Stopped, KeyboardInterrupt) as stop:
        command = shlex.join(["python", "recipes/finetune.py", *argv, *["--resume"][: "--resume" not in argv]])
        print(f"{str(stop) or 'interrupted'}\nto go on: {command}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
