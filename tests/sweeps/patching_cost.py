"""What planning and patching take, without a repair: seconds, and how they grow with the layers. Random weights.

    python tests/sweeps/patching_cost.py            # a minute; writes docs/support/patching_cost.md

One thread, CPU seconds, medians of five.
"""

from __future__ import annotations

import argparse
import functools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from repair_cost import quiet_on_one_thread
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from hfpatch.exact import search as find
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch

OUT = Path(__file__).resolve().parents[2] / "docs/support/patching_cost.md"
REPEATS = 5
COPY = {"norm": "rms", "init": "copy", "pos": "rope"}
EXACT = {"norm": "rms", "pos": "rope"}


def gpt2(**sizes: int) -> Any:
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).eval()


def opt_on_meta() -> Any:
    sizes = {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32}
    with torch.device("meta"):
        return OPTForCausalLM(OPTConfig(word_embed_proj_dim=4096, **sizes))


def seconds(make: Callable[[], Any], work: Callable[[Any], Any], again: bool = False) -> float:
    """Of a model whose architecture hasn't been seen in this process, or has `again`."""
    found = []
    for _ in range(REPEATS):
        model = make()
        if not again:
            find._CACHE.clear()
        start = time.process_time()
        work(model)
        found.append(time.process_time() - start)
    return median(found)


def rows() -> list[tuple[str, str, float]]:
    wide = {"n_embd": 64, "n_head": 4, "vocab_size": 99}
    models = {"GPT-2, 124M": gpt2, "OPT, 6.7B, on meta": opt_on_meta}
    models |= {f"GPT-2, {n} layers of 64": lambda n=n: gpt2(n_layer=n, **wide) for n in (12, 24, 48, 96)}
    found = []
    for name, make in models.items():
        plan = functools.partial(plan_patch, **EXACT)
        found.append((name, 'plan, norm="rms", pos="rope"', seconds(make, plan)))
        found.append((name, "plan, another model of this architecture", seconds(make, plan, again=True)))
        found.append((name, 'patch, the same with init="copy"', seconds(make, lambda m: patch_model(m, **COPY))))
        if "meta" not in name:
            exact = seconds(make, lambda m: patch_model(m, **EXACT))
            found.append((name, "patch, exact, and measured on the model", exact))
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    quiet_on_one_thread()
    patch_model(gpt2(n_layer=1, n_embd=64, n_head=4, vocab_size=99), **EXACT)  # imports
    lines = ["# Cost of patching", "", "Look up here how long a plan and a patch take, without a repair.", ""]
    lines += ["| model | work | seconds |", "|---|---|---:|"]
    lines += [f"| {name} | {work} | {value:.2f} |" for name, work, value in rows()]
    lines += ["", f"CPU seconds of one thread, medians of {REPEATS}; Python {platform.python_version()}, "
              f"torch {torch.__version__}, transformers {transformers.__version__}."]  # fmt: skip
    OUT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
