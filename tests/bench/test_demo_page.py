"""The demo's page, on made-up runs: the verdict by the devices alone, and two runs on one time axis."""

import json
import re
from pathlib import Path

import pytest

from tests.bench.demo_results import SPEEDS, make_results, summary
from tests.bench.folders import make_timeline
from uneven.bench.demo import Results, folder_of
from uneven.bench.demo_page import demo_verdict, read_timelines, shown_mode, write_demo_page
from uneven.bench.orders import DemoOrder

pytest.importorskip("bokeh", reason="pages need bokeh: pip install -e '.[pages]'")


def order_in(folder: Path, *modes: str) -> DemoOrder:
    """With the timelines of these modes."""
    order = DemoOrder(out=folder, samples=2000, epochs=1)
    for mode in modes:
        run = folder_of(order, mode)
        run.mkdir(parents=True)
        (run / "timeline.json").write_text(json.dumps(make_timeline(["cpu", "cpu@0.4"], 2.0).to_json()))
    return order


def write(order: DemoOrder, results: Results) -> Path | None:
    timelines = read_timelines(order, results)
    return write_demo_page(order, results, timelines, demo_verdict(results, timelines))


def test_the_page_shows_ddp_beside_ours_below_the_verdict(tmp_path: Path) -> None:
    order = order_in(tmp_path, "torch-ddp", "cpu-async")
    (folder_of(order, "cpu-async") / "timeline.html").write_text("a page")
    path = write(order, make_results(*SPEEDS))
    assert path is not None
    assert path == tmp_path / "demo.html"
    text = path.read_text()
    body = re.sub(r"<script\b.*?</script>", "", text.partition("<body>")[2], flags=re.DOTALL)
    assert "cpu-async gave 3,430 of the 3,500 samples/s that you own (98 %)" in body
    assert "equal-batch DDP could give at most 2,000 (57 %)" in body
    assert re.findall(r'<figure id="([\w-]+)"', body) == ["lanes-0", "lanes-1"]
    assert body.index("PyTorch&#x27;s DDP: 15.6 s") < body.index("cpu-async: 8.7 s")
    assert 'href="lenet/cpu-async/seed-0/timeline.html"' in body
    assert "lenet/torch-ddp" not in body, "only pages that are there"
    assert len(text) < 3_000_000


def test_modes_that_were_not_run_are_on_the_page_with_the_reason(tmp_path: Path) -> None:
    results = make_results("solo-0", "solo-1", "torch-ddp", "cpu-async")
    results.modes = (*results.modes, "cpu-cadence", "cpu-sync")
    results.skipped["cpu-cadence"] = "no time"
    results.shortened = "fewer digits"
    path = write(order_in(tmp_path, "torch-ddp", "cpu-async"), results)
    assert path is not None
    text = path.read_text()
    assert "Not measured: cpu-cadence (no time)." in text
    assert "Not measured: cpu-sync (the demo was ended before)." in text
    assert "Shortened: fewer digits." in text


def test_no_verdict_is_made_of_disturbed_or_missing_runs(tmp_path: Path) -> None:
    results = make_results("solo-0", "solo-1", "torch-ddp", "cpu-async")
    results.summaries["solo-1"] = summary("solo-1", 10.0, is_disturbed=True)
    assert demo_verdict(results, {}).owned is None
    assert demo_verdict(results, {}).sentence.startswith("No verdict: other programs disturbed solo-1")
    assert "none of the policies" in demo_verdict(make_results("solo-0", "solo-1"), {}).sentence
    alone = demo_verdict(make_results("cpu-async"), {})
    assert "how fast each device is alone is not known" in alone.sentence
    assert shown_mode(make_results("cpu-balanced", "cpu-sync")) == "cpu-balanced"
    assert write(order_in(tmp_path), make_results("solo-0")) is None
    assert list(tmp_path.iterdir()) == []
