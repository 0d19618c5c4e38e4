"""What the runs behind docs/results share: settings, tasks, training, grids and reports.

Texts, methods and the statistics of pairs are the recipes', which are put on the path here.
"""

import site
from pathlib import Path

site.addsitedir(str(Path(__file__).resolve().parents[3] / "recipes"))
