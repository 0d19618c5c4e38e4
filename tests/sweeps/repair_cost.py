"""Time of a repair: GPT-2 of some depth, random weights, on random tokens.

    python tests/sweeps/repair_cost.py                          # DyT, 124M parameters, 65,536 tokens: minutes
    python tests/sweeps/repair_cost.py --pos rope --batches 4   # positions alone; --norm dyt --pos rope for both
    python tests/sweeps/repair_cost.py --layers 2 --batches 3   # a quick look

Prints what the repair gained, and its seconds, by the clock and of the processor, in a process that has repaired a tiny
model already.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from hfpatch.patch import patch_model, repair_report


def jittered(config: GPT2Config) -> GPT2LMHeadModel:
    """A random model whose norms and biases aren't ones and zeros."""
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def gpt2_options(description: str | None) -> argparse.ArgumentParser:
    """A parser of the size and dtype of a GPT-2."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    return parser


def quiet_on_one_thread() -> None:
    """No warnings and no progress bars; one thread, and the same random numbers in every run."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)


def main() -> None:
    parser = gpt2_options(__doc__)
    parser.add_argument("--batches", type=int, default=32, help="of 4 sequences of 512 tokens")
    parser.add_argument("--norm", help="default: dyt, unless --pos is given")
    parser.add_argument("--pos")
    options = parser.parse_args()
    request = {"norm": options.norm or (None if options.pos else "dyt"), "pos": options.pos}
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    tiny = jittered(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=99, bos_token_id=0, eos_token_id=0))
    patch_model(tiny, **request, calibration=[torch.zeros(2, 16, dtype=torch.long)] * 2)
    model = jittered(GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.heads))
    model = model.to(getattr(torch, options.dtype))
    batches = [torch.randint(model.config.vocab_size, (4, 512)) for _ in range(options.batches)]
    start, worked = time.monotonic(), time.process_time()
    patch_model(model, **request, calibration=batches)
    seconds, worked = time.monotonic() - start, time.process_time() - worked
    report = repair_report(model)
    print(report.summary() if report else "nothing to repair")
    print(f"{seconds:.0f} seconds, {worked:.0f} of the processor; {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
