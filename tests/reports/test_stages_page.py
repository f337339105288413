"""The page and the table of stage schedules: whole, deaf to hostile names, bounded in size."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from dovetail.errors import UnwritableError
from dovetail.reports import schedules as drawing
from dovetail.reports import schedules_table
from dovetail.reports.kit import Page as PageContent
from dovetail.reports.kit import render_page, save_page
from dovetail.reports.schedules import answer
from dovetail.reports.stages_page import drawable, render_stages
from dovetail.schedulers.results import Schedules, SearchEffort
from tests.support.page_checks import check_self_contained
from tests.support.schedule_samples import make_scheduled, make_schedules

EVIL = "</script></svg><script>alert(1)</script>&\"'"
SECTIONS = (
    "The answer", "Stages", "Latency of all schedules", "Speed-up of each block",
    "Work and memory", "Search",
)  # fmt: skip


class Page(HTMLParser):
    """Every tag, the text, and the boxes of each picture."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.pictures, self._in_kernel = [], "", [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if attrs.get("class") == "stages":
            self.pictures.append([])
        if tag == "rect" and self._in_kernel:
            self.pictures[-1].append([int(attrs[k]) for k in ("x", "y", "width", "height")])
        self._in_kernel = self._in_kernel or tag == "g"

    def handle_endtag(self, tag):
        self._in_kernel = self._in_kernel and tag != "g"

    def handle_data(self, data):
        self.text += data


def text_of(renderable):
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def drawn(result, scheduler):
    """The pictures of a schedule, without a page around them."""
    parts = drawing.draw_schedule(result, result.candidate(scheduler))
    return render_page(PageContent("drawn", [], parts)).partition("<main>")[2]


def headings(page):
    return re.findall(r"<h3>(.*?)</h3>", page)


def test_the_page_fetches_nothing_and_allows_no_script():
    page = render_stages(make_schedules(), made="dovetail schedule")
    tags = Page(page).tags
    check_self_contained(page, tags)


def named_schedules(name):
    """Schedules that have the name wherever a foreign one may stand."""
    result = make_scheduled(name=name, depth=1)
    renamed = [replace(c, scheduler=f"{name}{i}") for i, c in enumerate(result.candidates[1:])]
    candidates = (result.candidates[0], replace(renamed[0], pruning=name), renamed[1])
    result = replace(result, candidates=candidates, chosen=f"{name}0")
    return Schedules(name, name, name, (result, replace(result, batch=8)))


@pytest.mark.parametrize("name", [EVIL, "a&amp;b\u2028<!--<b>", "@@style@@", "x\ud800y"])
def test_foreign_names_stay_text_everywhere(name, tmp_path):
    save_page(render_stages(named_schedules(name), made=name), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    found = Page(page)
    assert [t for t, _ in found.tags] == [
        t for t, _ in Page(render_stages(named_schedules("plain"), made="a")).tags
    ]
    assert "<script" not in page
    assert name.encode("utf-8", "replace").decode() in found.text
    assert "\x1b" not in text_of(schedules_table(named_schedules("a\x1b[2J[red]")))


def test_all_sections_stand_there_with_their_figures():
    page = render_stages(make_schedules(make_scheduled(depth=1), make_scheduled(8)))
    assert set(SECTIONS) <= set(headings(page))
    text = Page(page).text
    for words in ("12 ms (0.4 %)", "1.333 x", "9,504", "659", "321", "4.5 s", "3.25 s",
                  "a window of 8 ops", "3 MiB", "merged into one kernel", "2 streams",
                  "batch 8: ios"):  # fmt: skip
        assert words in text, words


def test_what_is_not_known_is_left_out():
    result = make_scheduled(measured=(None, None, None))
    candidates = tuple(
        replace(c, block_seconds=(), effort=SearchEffort()) for c in result.candidates
    )
    bare = replace(result, candidates=candidates, peak_bytes=0)
    page = render_stages(make_schedules(bare, costs="analytic, within 30 %"))
    assert headings(page) == ["The answer", "Stages", "Latency of all schedules", "Work and memory"]
    assert "Peak of" not in page
    text = Page(page).text
    assert "Predicted only, from costs that are analytic, within 30 %" in text
    assert "(predicted)" in text
    assert "nan" not in page.partition("<main>")[2]
    assert "Nothing was scheduled" in render_stages(Schedules("m", "cpu", "measured", ()))


@pytest.mark.parametrize(
    ("measured", "chosen", "words"),
    [
        ((16e-3, 12e-3, 13e-3), "ios", "ios is fastest: 12 ms (0.4 %) measured, 1.333 x "
         "sequential's speed (16.1 ms). That it is not slower than sequential was measured, by 9 "
         "and 9 rounds."),
        ((16e-3, 15.99e-3, 17e-3), "ios", "but the difference is within their spread"),
        ((16e-3, 17e-3, 18e-3), "sequential", "No other schedule was measured to be faster. The "
         "next is ios: 17.1 ms"),
        ((16e-3, 15e-3, 12e-3), "ios", "ios was chosen: 15.1 ms"),
        ((16e-3, 17e-3, None), "ios", "It is slower than sequential"),
        ((None, 12e-3, 13e-3), "ios", "whether this is slower is not known"),
        ((16e-3, None, None), "ios", "Predicted only"),
    ],
)  # fmt: skip
def test_the_answer_says_how_it_is_known(measured, chosen, words):
    assert words in answer(make_scheduled(measured=measured, chosen=chosen), "measured")


@pytest.mark.parametrize(
    ("stages_ms", "streams_ms", "chosen", "words"),
    [
        ((16, 11), 13, "ios", "ios is predicted to be fastest: 11 ms"),
        ((16, 11), 11, "ios", "ios is predicted to be fastest: 11 ms"),
        ((16, 11), 8, "ios", "ios is predicted to be the fastest in stages: 11 ms, 1.455 x "
         "sequential's speed (16 ms). The 8 ms of dataflow counts every kernel as if no other "
         "slowed it down, so it does not show that dataflow is faster."),
        ((10, 11), 13, "ios", "ios was chosen: 11 ms, 0.909 x sequential's speed (10 ms). The 10 "
         "ms of sequential is less."),
        ((10, 11), 8, "ios", "ios was chosen: 11 ms"),
        ((10, 11), 8, "sequential", "sequential is predicted to be the fastest in stages: 10 ms. "
         "The 8 ms of dataflow"),
    ],
)  # fmt: skip
def test_a_schedule_is_called_the_fastest_only_where_no_prediction_is_lower(
    stages_ms, streams_ms, chosen, words
):
    scheduled = make_scheduled(measured=(None, None, None), chosen=chosen)
    seconds = [1e-3 * ms for ms in (*stages_ms, streams_ms)]
    candidates = tuple(
        replace(c, predicted_seconds=s) for c, s in zip(scheduled.candidates, seconds, strict=True)
    )
    scheduled = replace(scheduled, candidates=candidates)
    assert words in answer(scheduled, "analytic")
    page = Page(render_stages(make_schedules(scheduled, costs="analytic"))).text
    assert words in page
    fastest = scheduled.best.predicted_seconds == min(seconds)
    assert ("is predicted to be fastest" in page) == fastest


def test_the_terminal_shows_each_scheduler_of_each_batch():
    text = text_of(
        schedules_table(make_schedules(make_scheduled(), make_scheduled(8, chosen="sequential")))
    )
    first, second = text.split("Batch 8")
    row = next(line for line in first.splitlines() if line.startswith("ios (chosen)")).split("  ")
    assert [cell.strip() for cell in row if cell.strip()] == [
        "ios (chosen)", "11 ms", "12 ms (0.4 %)", "1.333 x", "7", "4", "321", "4.5 s",
        "a window of 8 ops",
    ]  # fmt: skip
    assert "2 streams" in first
    assert "sequential (chosen)" in second
    assert "ios (chosen)" not in second


@pytest.mark.parametrize("sizes", [{}, {"depth": 1, "branches": 13}, {"blocks": 30, "branches": 4}])
@pytest.mark.parametrize("scheduler", ["sequential", "ios", "dataflow"])
def test_every_kernel_is_drawn_once_and_no_box_on_another(sizes, scheduler):
    result = make_scheduled(**sizes)
    page = drawn(result, scheduler)
    names = re.findall(r"<title>(kernel\.\d+)\n", page)
    assert sorted(names) == sorted(work.name for work in result.kernels)
    pictures = Page(page).pictures
    assert sum(map(len, pictures)) == len(result.kernels)
    for boxes in pictures:
        for i, (x, y, width, height) in enumerate(boxes):
            assert x >= drawing.GUTTER
            for other_x, other_y, _, _ in boxes[:i]:
                assert abs(x - other_x) >= width or abs(y - other_y) >= height


@pytest.mark.parametrize("scheduler", ["sequential", "ios", "dataflow"])
def test_lines_run_down_and_all_edges_are_drawn(scheduler):
    result = make_scheduled()
    picture = Page(drawn(result, scheduler))
    lines = [a["d"] for tag, a in picture.tags if tag == "path"]
    curves = re.findall(r"M\d+ (\d+)C[\d ]*? (\d+)(?=M|$)", "\n".join(lines), re.M)
    edges = sum(before.bit_count() for before in result.block.predecessors)
    assert len(curves) == edges
    assert all(int(start) < int(end) for start, end in curves)
    events = "".join(a["d"] for _, a in picture.tags if a.get("class") == "event")
    assert events.count("C") == len(result.candidate(scheduler).streams.waits)


def test_long_schedules_are_drawn_in_pieces_that_end_with_blocks():
    result = make_scheduled(blocks=40)
    best = result.best
    found = drawing.pieces(result, best)
    assert [i for piece in found for i in piece] == list(range(len(best.stages)))
    for piece in found[:-1]:
        assert drawing.FEW <= sum(len(best.stages[i].kernels) for i in piece) <= drawing.MANY
    assert min(best.stages[found[1].start].kernels) in {block[0] for block in result.blocks}
    page = drawn(result, best.scheduler)
    assert page.count("<details open>") == 3 < page.count("<details")
    assert "stages 1 to 11: blocks 1 to 6, 26 kernels" in page
    whole = replace(result, blocks=())  # unknown blocks: pieces end where they must
    assert len(drawing.pieces(whole, best)) == 2


def test_size_is_bounded_and_the_chosen_schedules_are_drawn_first():
    many = [make_scheduled(batch, blocks=33, branches=7) for batch in (1, 2, 4, 8, 16)]
    assert len(many[0].kernels) == 496
    schedules = make_schedules(*many)
    found = drawable(schedules)
    assert all("ios" in of for of in found)
    assert sum(map(len, found)) < 15
    first = next(i for i, of in enumerate(drawable(schedules, 3000)) if not of)
    assert first == 2  # of 1,256 boxes and lines each
    page = render_stages(schedules)
    assert len(page) < 3_000_000
    assert "Not drawn: the page would be too large" in page
    long_names = replace(
        many[0], kernels=make_scheduled(name="n" * 999, blocks=33, branches=7).kernels
    )
    assert len(render_stages(make_schedules(*[long_names] * 5))) < 5_000_000


def test_a_schedule_that_equals_an_earlier_one_is_not_drawn_again():
    result = make_scheduled()
    twin = replace(result.best, scheduler="dos")
    page = render_stages(make_schedules(replace(result, candidates=(*result.candidates, twin))))
    assert "dos found what ios found." in page


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(UnwritableError):
        save_page(render_stages(make_schedules()), tmp_path / "no" / "page.html")
