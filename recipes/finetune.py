"""What a patch costs, and how fast training heals it.

A model (by default a small GPT-2, trained on the spot) is copied once per variant. Each copy is patched and repaired
(`--start`); then each gets the same further budget: the same batches in the same order, with the same optimizer. One
copy stays unpatched: the control. Held-out figures are measured before the patch, right after it and after healing.

    python recipes/finetune.py                                        # nothing to prepare, nothing downloaded
    python recipes/finetune.py recipes/configs/lm.yaml --steps 50     # a YAML file first, flags on top of it
    python recipes/finetune.py --model gpt2 --text notes/*.txt --variants rms+rope control
    accelerate launch --config_file recipes/configs/accelerate/fsdp2.yaml --num_processes 8 recipes/finetune.py
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 -- recipes/finetune.py    # -- or it takes flags for its own

In the output folder: results.md, results.json, curves.png, one folder per trained model. `--resume` goes on where a
stopped run was, to the bit on one machine.
"""

import os
import sys
from functools import partial

# Threads that spin while they wait make a step ten times slower as soon as something else wants a core. Those that
# don't spin at all make it 1.6 times slower, on an idle machine and on a busy one: they spin for some microseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from hfrecipes.methods import Method
from hfrecipes.report import draw_curves, report
from hfrecipes.start import Baseline, measure_copies
from hfrecipes.training import Run, run_training


def finetune(run: Run) -> None:
    """A baseline and its variants, each a stage that can be stopped and resumed."""
    c = run.config
    baseline, method = Baseline(run.task, c, c.seed, c.variants), Method(run.task, c)
    run.begin()
    baseline.train(run)
    for name in c.variants:  # they go on in the data where the baseline stopped
        build = partial(baseline.patched, name)
        run.stage(name, build, c.steps, seed=c.seed, first=baseline.steps, method=method)
    measure_copies(run, baseline, c.variants)
    run.report(report, draw_curves)
    run.accelerator.end_training()


def main(argv: list[str] | None = None) -> int:
    return run_training("finetune.py", argv, __doc__, finetune)


if __name__ == "__main__":
    sys.exit(main())
