"""Memory of patching in Python: the largest resident set of a process, over what a forward of the model takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status"),
]
MEASURE = """
import ctypes, gc, json, sys, warnings
import torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel
from hfpatch.measure.inputs import example_inputs
from hfpatch.patch import patch_model
warnings.simplefilter("ignore")
torch.set_num_threads(1)
request, layers = json.loads(sys.argv[1]), int(sys.argv[2])

def field(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

def reset():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")

def run(model):
    patch_model(model, **request)

def made(**sizes):
    torch.set_default_dtype(torch.bfloat16)
    model = GPT2LMHeadModel(GPT2Config(n_positions=128, bos_token_id=0, eos_token_id=0, **sizes)).eval()
    torch.set_default_dtype(torch.float32)
    return model

run(made(n_layer=2, n_embd=64, n_head=2, vocab_size=99))
reset()
libraries = field("VmRSS")
model = made(n_layer=layers, n_embd=1024, n_head=16, vocab_size=5000)
size = sum(p.nbytes for p in model.parameters())
reset()
with torch.no_grad():
    model(**example_inputs(model))
forward = field("VmHWM") - libraries
reset()
run(model)
print(json.dumps([size, forward, field("VmHWM") - libraries, sum(p.nbytes for p in model.parameters()) - size]))
"""


def measured(request: dict[str, Any], layers: int) -> tuple[int, int]:
    """Bytes of the model, and what its patch takes over a forward and over the Parameters that it adds."""
    told = subprocess.check_output([sys.executable, "-c", MEASURE, json.dumps(request), str(layers)], text=True)
    size, forward, peak, added = json.loads(told.splitlines()[-1])
    return size, peak - forward - added


@pytest.mark.sweep
@pytest.mark.parametrize("request_", [{"norm": "rms", "pos": "rope"}, {"mlp": "swiglu"}], ids=str)
def test_a_patch_adds_a_twentieth_at_most(request_: dict[str, Any]) -> None:
    size, more = measured(request_, layers=36)
    assert more < 0.05 * size


@pytest.mark.sweep
def test_old_values_that_stay_in_memory_show() -> None:
    """Control: with reversible=True the old values are kept, and the measurement sees them."""
    size, more = measured({"norm": "rms", "reversible": True}, layers=36)
    assert more > 0.3 * size


FIT = """
import json, sys
import torch
from hfpatch.repairs.least_squares import Ridge
torch.set_num_threads(1)
width, copies = int(sys.argv[1]), int(sys.argv[2])

def field(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

def fit():
    ridge = Ridge(width, width, True, torch.device("cpu"))
    for start in range(0, 512, 64):
        x = torch.randn(64, width)
        ridge.add(x, x.roll(1, 1) + torch.randn(64, width), torch.arange(start, start + 64) % 8 == 7)
    held = [ridge.xx.clone() for _ in range(copies)]
    assert ridge.solve() is not None

fit()  # the work space that BLAS keeps at this width, more on some processors than on others, isn't the fit's
open("/proc/self/clear_refs", "w").write("5")
before = field("VmRSS")
fit()
print(json.dumps((field("VmHWM") - before) / (2 * 8 * width**2)))
"""


def memory_of_a_fit(copies: int = 0) -> float:
    """Peak of a fit of width 2,500, as a multiple of X'X and R'X in float64."""
    # what is freed goes back to the system at once: malloc keeps 10 to 30 MB otherwise, differently in each run
    malloc = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "0"}
    fit = [sys.executable, "-c", FIT, "2500", str(copies)]
    return float(json.loads(subprocess.check_output(fit, env=os.environ | malloc, text=True)))


def test_a_fit_holds_its_sums_once() -> None:
    """X'X and R'X in float64: their copies, the factor and the solutions lie on disk or in their places."""
    assert memory_of_a_fit() < 1.3


def test_a_copy_of_a_sum_shows() -> None:
    """Control: with one more X'X in memory the measurement sees it."""
    assert memory_of_a_fit(copies=1) > 1.4
