"""What docs/hooks.py makes of pages: printed tables as HTML's, and cells that may wrap."""

from __future__ import annotations

import importlib.util
import re
from html import escape, unescape
from types import ModuleType
from typing import Any

import pytest
from blocks import PAGES, ROOT, blocks

TEXT = '<div class="language-text highlight"><pre><span></span><code>{}</code></pre></div>'


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec: Any = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells_of(html: str) -> list[list[str]]:
    """Texts of a page's table cells, row after row."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [
        [unescape(re.sub(r"<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows
    ]


def test_a_printed_table_is_one_of_html(hooks: ModuleType) -> None:
    printed = """\
what it cost <all>:
module                    before  note
------------------------  ------  ----
transformer.h.{0-3}  x4     8.76  alpha=1.05; a note longer than its heading
transformer.ln_f           12.00
...
Repair on 32 sequences: kept."""
    html = hooks.on_page_content(TEXT.format(escape(printed)))
    assert cells_of(html) == [
        ["module", "before", "note"],
        ["transformer.h.{0-3}  x4", "8.76", "alpha=1.05; a note longer than its heading"],
        ["transformer.ln_f", "12.00", ""],
        ["...", "", ""],
    ]
    assert '<td class="right" data-head="before">12.00</td>' in html
    assert "<p>what it cost &lt;all&gt;:</p>" in html
    assert html.endswith("<p>Repair on 32 sequences: kept.</p>\n</div>")
    plain = TEXT.format(escape(printed.replace("---  ---", "--- ---")))
    assert hooks.on_page_content(plain) == plain


def test_no_word_of_the_pages_is_lost(hooks: ModuleType) -> None:
    tables = 0
    for block in (block for page in PAGES for block in blocks(page) if block.language == "text"):
        html = hooks.on_page_content(TEXT.format(escape(block.code)))
        tables += "<table" in html
        shown = re.sub(r"<.*?>", " ", re.sub(r"<wbr>|</?span.*?>", "", html))
        assert unescape(shown).split() == [word for word in block.code.split() if not re.fullmatch("-{3,}", word)]
    assert tables > 10


@pytest.mark.parametrize(
    ("cell", "becomes"),
    [
        ("<td>audio_model_type</td>", "<td>audio_<wbr>model_<wbr>type</td>"),
        (
            '<td style="text-align: right;">1 → 2 → 3</td>',
            '<td class="steps" style="text-align: right;">1&nbsp;→ 2&nbsp;→ 3</td>',
        ),
        ("<td>-1.5e-07</td>", '<td class="figure">-1.5e-07</td>'),
        (f"<td>{'why not ' * 9}</td>", f'<td class="sentence">{"why not " * 9}</td>'),
        ("<td>ok <code>a_b</code></td>", "<td>ok <code>a_b</code></td>"),
        ("<td><code>a:b_cde</code> --f</td>", '<td class="phrase"><code>a:<wbr>b_<wbr>cde</code> --f</td>'),
        ("<code>a --b-c</code>", '<code>a <span class="whole">--b-c</span></code>'),
        ('<img alt="" src="a.png" />', '<a href="a.png"><img alt="" src="a.png" /></a>'),
    ],
)
def test_cells_wrap_between_figures_and_in_names(hooks: ModuleType, cell: str, becomes: str) -> None:
    assert hooks.on_page_content(cell) == becomes


@pytest.mark.parametrize(
    "sentence", ["short.", "GPT2Model: 23.", "GPT2Model: 2 go.", "GPT2LMHeadModel: 23 modules change."]
)
def test_the_sentence_behind_a_table_is_no_row(hooks: ModuleType, sentence: str) -> None:
    """However long it is: shorter than the first column, as long, or longer."""
    table = "module            now\n----------------  ------\nh.{0-1}.ln_1  x2  Linear\nh.attn            Conv1D\n"
    printed = table + sentence
    html = hooks.on_page_content(TEXT.format(escape(printed)))
    assert html.count("<tr>") == 3
    assert f"<p>{sentence}</p>" in html
