"""The page as a file: self-contained, small, safe and complete, in colours that can be distinguished.

test_page_browser.py opens it in a browser.
"""

import json
import re
import sys
from importlib.machinery import PathFinder
from itertools import combinations, pairwise
from pathlib import Path

import pytest

import uneven.timeline.page
from tests.timeline.synthetic import MS, history, lanes_of, make_run
from uneven.errors import InputError, MachineError
from uneven.timeline.page import plan_facts, write_page
from uneven.timeline.record import TRAINING, Event
from uneven.timeline.sample import Sample
from uneven.timeline.timeline import Timeline

pytest.importorskip("bokeh", reason="pages need bokeh: pip install -e '.[pages]'")

STYLE = Path(uneven.timeline.page.__file__).with_name("page.css").read_text()


def page(tmp_path: Path, timeline: Timeline, *, epochs: int = 3, title: str = "A run", **facts: str) -> str:
    path = tmp_path / "page.html"
    write_page(path, timeline, history(epochs), title, facts)
    return path.read_text()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a usual run: it takes a second."""
    folder = tmp_path_factory.mktemp("page")
    return page(folder, make_run(), title="lenet async", model="lenet", devices="cpu, cpu@0.4")


def test_a_page_has_its_title_facts_charts_and_keys(text: str) -> None:
    assert "<title>lenet async</title>" in text
    for name, fact in (("model", "lenet"), ("devices", "cpu, cpu@0.4")):
        assert f"<dt>{name}</dt><dd>{fact}</dd>" in text
    figures = ["lanes", "busy", "shares", "anchor", "loss-time", "loss-samples", "quality-time", "quality-samples"]
    assert re.findall(r'<figure id="([\w-]+)"', text) == figures
    keys = [re.sub("<.*?>", "", key) for key in re.findall(r'<button[^>]*class="key".*?</button>', text)]
    assert keys[: len(TRAINING)] == list(TRAINING)
    assert {"setup, compile, evaluation", "idle gap", "round", "lr scale", "accuracy", "train loss"} <= set(keys)
    assert "NaN" not in json.dumps(keys)


def test_the_table_counts_all_of_a_lane(tmp_path: Path) -> None:
    lane = [
        ("setup", 100 * MS),
        ("compute", 700 * MS),
        ("data", 50 * MS),
        ("compute", 50 * MS),
        ("evaluation", 100 * MS),
    ]
    text = page(tmp_path, lanes_of(lane))
    head = re.findall(r"<th>([^<]+)</th>", text.partition('<table id="idle">')[2].partition("</thead>")[0])
    cells = re.findall(r"<td[^>]*>([\d.]+) s<small>([\d.]+) %", text)
    assert dict(zip(head, [("0: cpu@0", ""), *cells], strict=True)) == {
        "device": ("0: cpu@0", ""),
        "computes": ("0.75", "75.0"),
        "start-up": ("0.10", "10.0"),
        "evaluation": ("0.10", "10.0"),
        "data": ("0.05", "5.0"),
    }


def test_a_page_begins_with_the_verdict_and_speaks_of_communication(text: str) -> None:
    body = re.sub(r"<script\b.*?</script>", "", text.partition("<body>")[2], flags=re.DOTALL)
    sentence = re.search(r'<p class="sentence">(.*?)</p>', body)
    assert sentence is not None
    assert re.fullmatch(
        r"This run gave [\d,.]+ of the [\d,.]+ samples/s that you own \(\d+ %\); "
        r"equal-batch DDP could give at most [\d,.]+ \(\d+ %\)\.",
        sentence.group(1),
    )
    assert body.index('class="verdict"') < body.index("<dl>") < body.index("<figure")
    assert "<th>communication</th>" in body
    assert "transfer" not in body
    assert len(re.findall(r"<th>", body.partition('<table id="idle">')[2].partition("</thead>")[0])) <= 11


def test_a_plan_in_the_folder_is_held_against_the_run(tmp_path: Path) -> None:
    assert plan_facts(tmp_path / "plan.json") == {}
    plan = {"predicted": {"seconds_per_epoch": 12.14, "efficiency": 0.951}, "achieved": {"seconds_per_epoch": 12.9}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    text = page(tmp_path, lanes_of([("compute", 50 * MS)]))
    assert "<dt>predicted</dt><dd>12.1 s per epoch, efficiency 0.95</dd>" in text
    assert "<dt>achieved</dt><dd>12.9 s per epoch</dd>" in text
    for broken in ("[]", "{", '{"predicted": 5, "achieved": {"efficiency": "x"}}'):
        (tmp_path / "plan.json").write_text(broken)
        assert plan_facts(tmp_path / "plan.json") == {}


def test_nothing_is_wider_than_a_narrow_screen() -> None:
    widths = [int(px) for px in re.findall(r"(?<![-\w])(?:min-)?width: (\d+)px", STYLE)]
    assert max(widths) <= 390 - 20
    tracks = [int(px) for px in re.findall(r"minmax\((\d+)px", STYLE)]
    assert max(tracks) <= 390 - 20


def test_a_device_s_curve_is_smooth_and_has_a_lane_of_its_own() -> None:
    from uneven.timeline.busy import busy_chart
    from uneven.timeline.charts import TimeAxis

    run = make_run(ranks=2, steps=600)
    axis = TimeAxis.until(5.0, ["0: cpu"])
    chart = busy_chart(run, {}, axis)
    lines = {one.name: one.data_source.data["high"] for one in chart.figure.renderers if "Line" in str(one.glyph)}
    assert {"busy-0", "busy-1", "busy-cpu", "busy-process", "busy-gpu-0"} == set(lines)
    spans = {name: (min(high), max(high)) for name, high in lines.items()}
    places = sorted(spans.values())
    assert all(upper < lower for (_, upper), (lower, _) in pairwise(places)), "none crosses another"


def test_a_run_without_shares_anchor_or_epochs_has_sentences_instead(tmp_path: Path) -> None:
    text = page(tmp_path, lanes_of([("compute", 50 * MS)]), epochs=0)
    assert re.findall(r'<figure id="([\w-]+)"', text) == ["lanes", "busy"]
    for sentence in ("there are no shares", "There is no anchor", "No epoch has ended"):
        assert sentence in text
    base = lanes_of([("compute", 50 * MS)], [("compute", 50 * MS)])
    fixed = Timeline(
        base.lanes, base.accounts, [Event(5, 0, "shares", {"slot": 0, "shares": [64, 64], "alone": []})], []
    )
    assert "The shares did not change: 50 % / 50 %." in page(tmp_path, fixed)


def test_shares_are_those_since_the_last_change_of_ranks(tmp_path: Path) -> None:
    """Earlier ones are of other ranks: of fewer, where one has joined."""
    base = lanes_of([("compute", 50 * MS)], [("compute", 50 * MS)])
    joined = [
        Event(5 * MS, 0, "shares", {"slot": 0, "shares": [64], "alone": []}),
        Event(19 * MS, 0, "shares", {"slot": 9, "shares": [32, 32], "alone": []}),
        Event(20 * MS, 0, "generation", {"number": 1, "why": "rank 1 joins", "ranks": 2, "ms": 2.0}),
    ]
    text = page(tmp_path, Timeline(base.lanes, base.accounts, joined, []))
    assert "The shares did not change: 50 % / 50 %." in text


def test_unusual_runs_have_a_page_too(tmp_path: Path) -> None:
    """Setup alone without events; a loss that is not finite; a metric that only some epochs have."""
    write_page(tmp_path / "one.html", lanes_of([("setup", 5)]))
    entries = history(3)
    entries[1]["train_loss"] = float("nan")
    del entries[0]["accuracy"]
    entries[2]["note"] = "words"
    write_page(tmp_path / "two.html", make_run(), entries, "odd", {})
    with pytest.raises(InputError, match="no spans"):
        write_page(tmp_path / "three.html", Timeline([], [], [], []))


def test_a_page_loads_nothing(text: str) -> None:
    markup = re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""\b(?:src|href|action)\s*=|url\(|@import|https?://""", markup)
    assert not re.search(r"<script[^>]+\bsrc\b|<link\b|<iframe\b|<img\b", text.partition("<body>")[2])
    assert not re.search(r"<script[^>]+\bsrc\s*=", text)
    assert "default-src 'none'" in text


def test_texts_of_the_user_are_escaped(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script>"
    run = make_run()
    lanes = [type(lane)(lane.rank, nasty, lane.spans) for lane in run.lanes]
    events = [*run.events, Event(5, 0, "alert", {"what": nasty})]
    text = page(tmp_path, Timeline(lanes, run.accounts, events, run.samples), title=nasty, fact=nasty)
    assert "<script>alert(1)" not in text


@pytest.mark.soak
def test_a_million_spans_of_eight_ranks_make_a_small_page(tmp_path: Path) -> None:
    run = make_run(ranks=8, steps=31_250, epochs=90)
    assert sum(len(lane.spans) for lane in run.lanes) > 1_000_000
    rounds = [
        Event(event.t_ns + shift, event.rank, event.kind, event.fields)
        for event in run.events
        for shift in range(0, 100_000 if event.kind == "round" else 1, 1_000)
    ]
    samples = [
        Sample(t * MS, 50.0, 90.0, 10**9, 10**8, tuple((i, 9.0, 9) for i in range(8))) for t in range(0, 200_000, 5)
    ]
    big = Timeline(run.lanes, run.accounts, sorted(rounds, key=lambda event: event.t_ns), samples)
    text = page(tmp_path, big, epochs=90)
    assert len(text) < 3_000_000
    assert "stay stacked at every zoom" in text
    assert "longest of" in text
    assert "rounds are drawn" in text


def test_without_bokeh_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoBokeh(PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, path: object = None, target: object = None) -> None:  # type: ignore[override]
            return None

    for name in [name for name in sys.modules if name.partition(".")[0] == "bokeh"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoBokeh])
    with pytest.raises(MachineError, match=r"pip install 'uneven\[pages\]'"):
        write_page(tmp_path / "page.html", make_run())
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="a part of the path is a file"):
        write_page(tmp_path / "file" / "page.html", lanes_of([("compute", 50 * MS)]))


# Colour vision deficiencies at full strength, in linear RGB (Machado, Oliveira and Fernandes, 2009).
VISION = {
    "full": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)


def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    srgb = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb]
    seen = [min(1.0, max(0.0, c)) for c in times(VISION[vision], linear)]
    x, y, z = (c / w for c, w in zip(times(XYZ, seen), WHITE, strict=True))
    fx, fy, fz = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("is_dark", [False, True])
def test_states_differ_in_every_kind_of_colour_vision(vision: str, is_dark: bool) -> None:
    light, _, dark = STYLE.partition("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark.partition("* {")[0] if is_dark else light))
    named = [*TRAINING, "apart", "paper"]
    for first, second in combinations(named, 2):
        pair = zip(lab(colours[first], vision), lab(colours[second], vision), strict=True)
        distance = sum((a - b) ** 2 for a, b in pair) ** 0.5
        assert distance > 20, f"{first} and {second}: {distance:.0f}"
