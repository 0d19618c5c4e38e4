"""What the checks of a checkpoint see of one flipped bit: GPT-2 of some size, random weights, on one thread.

    python tests/sweeps/flipped_bits.py                              # 124M parameters, 120 corruptions: some minutes
    python tests/sweeps/flipped_bits.py --dtype bfloat16

Each corruption flips a random bit of a random entry of a random tensor in the file. It is *refused* with a
CheckpointError, or opens with outputs that differ from the model's own in at least one bit (*changed*), or with the
same ones (*same*: such as an embedding that the input doesn't use).
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from repair_cost import gpt2_options, jittered, quiet_on_one_thread
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from hfpatch.patch import patch_model
from hfpatch.runtime.errors import CheckpointError

CHECKS: tuple[Any, ...] = (False, True, "full")


def logits(folder: Path, check: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, check_fingerprint=check)
    with torch.no_grad():
        return model(input_ids=torch.arange(64)[None] * 37 % model.config.vocab_size).logits


def tensors(file: Path) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's bytes start, and its header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    del header["__metadata__"]
    return 8 + length, header


def flip(file: Path, place: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << bit]))


def seen(folder: Path, corruptions: int) -> dict[Any, Counter]:
    """How many corruptions are refused, opened with changed outputs, and with the same ones; by check."""
    draw, file, expected = random.Random(0), folder / "model.safetensors", logits(folder, False)
    start, header = tensors(file)
    found: dict[Any, Counter] = {check: Counter() for check in CHECKS}
    for _ in range(corruptions):
        begin, end = draw.choice(sorted(header.items()))[1]["data_offsets"]
        place, bit = start + draw.randrange(begin, end), draw.randrange(8)
        flip(file, place, bit)
        opened = "same" if torch.equal(logits(folder, False), expected) else "changed"
        for check in CHECKS:
            try:
                AutoModelForCausalLM.from_pretrained(folder, check_fingerprint=check)
                found[check][opened] += 1
            except CheckpointError:
                found[check]["refused"] += 1
        flip(file, place, bit)
    assert torch.equal(logits(folder, "full"), expected)
    return found


def main() -> None:
    parser = gpt2_options(__doc__)
    parser.add_argument("--corruptions", type=int, default=120)
    options = parser.parse_args()
    quiet_on_one_thread()
    model = jittered(GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.heads))
    patch_model(model, norm="rms", pos="rope", init="copy")
    with tempfile.TemporaryDirectory() as scratch:
        model.to(getattr(torch, options.dtype)).save_pretrained(scratch)
        found = seen(Path(scratch), options.corruptions)
    print(f"{model.num_parameters():,} parameters of {options.dtype}, {options.corruptions} corruptions\n")
    print("| check_fingerprint | refused | opened, outputs changed | opened, outputs the same |\n|---|---:|---:|---:|")
    for check, kinds in found.items():
        print(f"| {check} | {kinds['refused']} | {kinds['changed']} | {kinds['same']} |")


if __name__ == "__main__":
    main()
