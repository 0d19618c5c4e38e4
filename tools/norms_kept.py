"""How a model gets worse as norms are taken out, the cheapest first: a table, and a figure.

    python tools/norms_kept.py FOLDER --model smollm2 --norm fixed:bound=1.2 --text WIKITEXT2 --out norms_kept

Each norm is priced alone, as `patch_model(keep="auto:...")` does: a constant in its place, nothing refitted. Then the k
cheapest are replaced together, for several k, and the model is judged as in the register (real_judges.py), on text that
nobody measured on. OUT.json has the prices and the figures, OUT.png draws them; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import transformers
from real_judges import JUDGES
from real_weights import SOURCES, make

from hfpatch import plan_patch
from hfpatch.repairs.calibration import Calibration
from hfpatch.repairs.prices import norm_prices

MAIN = {"language": "KL mean", "speech": "word error", "sentence": "cosine mean"}
Found = dict[str, Any]


def measure(judge: Any, norm: str, only: list[str] | None, points: int, out: Path) -> Found:
    """Prices by norm, the figures of the original, and those with the k cheapest norms replaced, by k."""
    found: Found = json.loads(out.read_text()) if out.exists() else {"norm": norm, "figures": {}}
    original = judge.open()
    inputs = judge.calibration(judge.SEQUENCES, judge.TOKENS)
    with norm_prices(judge.open(), plan_patch(original, norm=norm, only=only), Calibration(inputs)) as prices:
        if "prices" not in found:
            found["prices"] = prices.alone()
            out.write_text(json.dumps(found, indent=1))
        cheapest = sorted(found["prices"], key=found["prices"].__getitem__)
        for k in sorted({round(len(cheapest) * i / points) for i in range(points + 1)}):
            if str(k) not in found["figures"]:
                with prices.replaced(cheapest[:k]):
                    found["figures"][str(k)] = judge.figures(original, prices.old.model)
                out.write_text(json.dumps(found, indent=1))
                print(k, found["figures"][str(k)], flush=True)
    return found


def draw(found: Found, kind: str, picture: Path) -> None:
    """The main figure over the number of norms that are replaced; beside it the price of each, cheapest first."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    prices = sorted(found["prices"].values())
    left.semilogy(range(1, len(prices) + 1), [max(price, 1e-6) for price in prices], ".", color="C0")
    left.set(xlabel="norm, the cheapest first", ylabel="KL alone (nats)", title="What each norm costs")
    points = {int(k): figures for k, figures in found["figures"].items()}
    name = MAIN[kind]
    right.plot([*points], [one[name] for one in points.values()], "o-", color="C0", label=f"{name}: {found['norm']}")
    if kind == "speech":
        right.axhline(points[0]["word error of the original"], color="C7", linestyle="--", label="the original")
    right.set(xlabel=f"norms replaced, of {len(prices)}", ylabel=name, title="Together, nothing refitted")
    if kind == "language":
        right.plot([*points], [one["KL median"] for one in points.values()], "s--", color="C1", label="KL median")
        right.set_yscale("symlog", linthresh=0.01)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    right.legend()
    figure.savefig(picture, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models are, or will be")
    parser.add_argument("--model", choices=SOURCES, default="smollm2")
    parser.add_argument("--norm", default="fixed:bound=1.2", help="what a norm becomes")
    parser.add_argument("--only", nargs="+", help="patterns of the norms")
    parser.add_argument("--text", type=Path, help="folder with WikiText-2's valid.txt and test.txt; none: from the Hub")
    parser.add_argument("--points", type=int, default=10, help="numbers of norms at which the model is judged")
    parser.add_argument("--out", type=Path, default=Path("norms_kept"), help="of the .json and the .png")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    make(given.model, given.folder)
    kind = SOURCES[given.model].kind
    judge = JUDGES[kind](given.folder / given.model, given.text, None)
    found = measure(judge, given.norm, given.only, given.points, given.out.with_suffix(".json"))
    draw(found, kind, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
