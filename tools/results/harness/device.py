"""What a device can do, and what some work has it do: bandwidth, kernels, memory; and the tests that need a GPU."""

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from .timing import clock

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("triton", "liger-kernel", "kernels")
# what is counted of one run of some work
KERNELS, LAUNCHES, PEAK, KEPT = "kernels", "launches", "peak", "kept"
_OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_PROGRESS = re.compile(r"\[ *\d+%\]")


def describe_device(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Name, memory, driver and versions, and how fast tensors are copied and matrices multiplied in bfloat16."""
    found: dict[str, Any] = {name: version_of(name) for name in PACKAGES}
    found["torch's CUDA"] = torch.version.cuda or "none"
    if device.type == "cuda":
        told = torch.cuda.get_device_properties(device)
        found |= {"GPU": told.name, "GPU memory": f"{told.total_memory / 2**30:.0f} GiB", "driver": driver_version()}
        found["compute capability"] = f"{told.major}.{told.minor}"
    if not tiny:  # starts the compiler's processes, whose time isn't that of what is compiled first
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    found["copy"] = f"{copy_bandwidth(device, 8 if tiny else 1024) / 1e9:,.0f} GB/s, read and written"
    found["matrix product"] = f"{matrix_rate(device, 64 if tiny else 8192) / 1e12:,.3g} TFLOP/s"
    return found


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        return told.partition("\n")[0] or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def copy_bandwidth(device: torch.device, mebibytes: int) -> float:
    """Bytes per second, read and written, of a copy of a tensor in bfloat16."""
    x = torch.randn(mebibytes * 2**19, device=device).bfloat16()
    y = torch.empty_like(x)
    return 2 * x.nbytes / median_seconds(lambda: y.copy_(x))


def matrix_rate(device: torch.device, size: int) -> float:
    """Operations per second of a product of random square matrices in bfloat16."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b)


def median_seconds(once: Callable[[], Any]) -> float:
    clock(once, 3)
    return statistics.median(clock(once, 5) for _ in range(7))


# -- what one run of some work does


def count_work(once: Callable[[], Any], model: nn.Module, device: torch.device, trains: bool) -> dict[str, int]:
    """Kernels and their launches; bytes of the peak above what was held, and of what is kept for the backward."""
    found = {}
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once()
        torch.cuda.synchronize()
        found[PEAK] = torch.cuda.max_memory_allocated() - before
    if trains:
        found[KEPT] = kept_for_backward(once, model)
    return found | launches(once, device)


def launches(once: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """Kernels that ran on a GPU, and calls that launched them: one for all of a CUDA graph. None on a CPU."""
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as trace:
        once()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8", errors="replace"))["traceEvents"]
    kinds = [(str(event.get("cat", "")).lower(), str(event.get("name", ""))) for event in events]
    kernels = sum(kind == "kernel" for kind, _ in kinds)
    calls = sum(kind in ("cuda_runtime", "cuda_driver") and "Launch" in name for kind, name in kinds)
    return {KERNELS: kernels, LAUNCHES: calls} if on_gpu else {}


def kept_for_backward(once: Callable[[], Any], model: nn.Module) -> int:
    """Bytes of the tensors that a forward keeps for its backward, without the model's parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        once()
    return sum(kept.values())


# -- tests


def run_gpu_tests(log: Path, seconds: float, workers: int) -> dict[str, Any]:
    """`pytest -m gpu` in a process of its own, stopped when its time is over: how many passed, what failed.

    Args:
        log: where its output goes.
        workers: processes among which tests are shared, where pytest-xdist is installed.
    """
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    if not files:
        return {"summary": "no tests here: run it from a clone of the repository", "failed": [], "stopped": False}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
    if workers > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    settings |= (
        {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if workers > 1 else {}
    )  # else each has as many as there are cores
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *map(str, files)],
            cwd=ROOT,
            env=os.environ | settings,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            stopped = process.wait(seconds) is None
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return read_test_log(log.read_text("utf-8", errors="replace")) | {"stopped": stopped}


def read_test_log(text: str) -> dict[str, Any]:
    """Of pytest's verbose output: its last line, or what was counted until it was stopped; the tests that failed."""
    ended: Counter[str] = Counter()
    failed = []
    for line in text.splitlines():
        if _PROGRESS.search(line) and (outcome := _OUTCOME.search(line)):
            ended[outcome[1]] += 1
            if outcome[1] in ("FAILED", "ERROR"):
                failed.append(next((word for word in line.split() if "::" in word), line))
    closing = re.findall(r"(?m)^=+ (.* in [\d.]+s.*?) =+$", text)
    counted = ", ".join(f"{number} {kind.lower()}" for kind, number in sorted(ended.items())) or "none ended"
    return {"summary": closing[-1] if closing else counted, "failed": failed}
