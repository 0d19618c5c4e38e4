"""Learning curves as pictures: what is drawn can be seen."""

from pathlib import Path

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from harness.curves import COLOURS, Panel, draw_panels, turns_of

FALL = np.linspace(3.6, 3.4, 20)


def panel(**curves: np.ndarray) -> Panel:
    lines = {name: pd.DataFrame({0: values}) for name, values in curves.items()}
    return Panel("After the patch", "loss", lines, lines.pop("control", None))


def shares(panels: list[Panel], path: Path) -> list[float]:
    """How much of what is in colour or black, above the legend, has each line's colour; black, the text's too, last."""
    draw_panels(panels, path)
    picture = plt.imread(path)[..., :3]
    picture = picture[: int(0.8 * len(picture))]
    found = [(abs(picture - matplotlib.colors.to_rgb(one)).max(-1) < 0.05).sum() for one in (*COLOURS, "black")]
    return [count / sum(found) for count in found]


@pytest.mark.slow
def test_lines_that_coincide_are_all_seen(tmp_path: Path) -> None:
    """The first with the control, the third with the fourth: half of what one line alone would be."""
    tiny = 2e-4
    alone = shares([panel(rms=FALL, dyt=FALL + 0.1, rope=FALL - 0.05, control=FALL + 0.05)], tmp_path / "a.png")
    curves = {"rms": FALL, "dyt": FALL + 0.1, "rope": FALL - 0.05, "both": FALL - 0.05 + tiny, "control": FALL + tiny}
    blue, orange, green, pink, *_, black = shares([panel(**curves)], tmp_path / "b.png")
    assert min(blue, green, pink) > 0.35 * min(alone[:3])
    assert orange == pytest.approx(alone[1], rel=0.2)
    assert black > 0.35 * alone[-1]


def test_lines_that_part_in_one_panel_are_whole() -> None:
    same, other = panel(rms=FALL, rope=FALL), panel(rms=FALL, rope=FALL - 0.1)
    assert set(turns_of([same])) == {"rms", "rope"}
    assert turns_of([same, other]) == {}
    assert set(turns_of([same, panel(dyt=FALL)])) == {"rms", "rope"}  # a panel that lacks them says nothing


def test_without_a_control_no_half_is_empty(tmp_path: Path) -> None:
    draw_panels([panel(healed=FALL)], tmp_path / "alone.png")
    picture = plt.imread(tmp_path / "alone.png")[..., :3]
    inked = (picture < 0.9).any(axis=(0, 2)).nonzero()[0]  # columns of the picture in which something is drawn
    assert inked.max() > 0.9 * picture.shape[1]
