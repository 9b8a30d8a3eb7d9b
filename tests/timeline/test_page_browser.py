"""The page in a real browser: it opens without a complaint, asks for nothing, and does what its charts promise."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.timeline.chromium import Tab, chromium, find_chromium
from tests.timeline.synthetic import history, make_run
from uneven.timeline.idle import idle_gaps
from uneven.timeline.page import write_page
from uneven.timeline.record import STATES

pytest.importorskip("bokeh", reason="pages need bokeh: pip install -e '.[pages]'")
PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")

OVER_TIME = ["lanes", "busy", "shares", "anchor", "loss-time", "quality-time"]
OVER_SAMPLES = ["loss-samples", "quality-samples"]

# What the tests ask of the page again and again.
WORDS = """
globalThis.fig = (name) => Bokeh.documents[0].roots().find((one) => one.name === name);
globalThis.drawn = (name) => fig("lanes").renderers.filter((one) => one.name === name);
globalThis.rest = () => new Promise((done) => {
  const check = () => Bokeh.documents[0].is_idle ? done(true) : requestAnimationFrame(check);
  requestAnimationFrame(check);
});
globalThis.place = (name, x, y) => {
  const view = Bokeh.index[fig(name).id], box = view.canvas.el.getBoundingClientRect();
  return [box.x + view.frame.x_scale.compute(x), box.y + view.frame.y_scale.compute(y)];
};
globalThis.select = (query, node = document) => [...node.querySelectorAll(query),
  ...[...node.querySelectorAll("*")].flatMap((element) => element.shadowRoot ? select(query, element.shadowRoot) : [])];
globalThis.tooltip = (start) => new Promise((done) => {
  const check = () => {
    const texts = select(".tooltip").filter((element) => element.checkVisibility()).map((element) => element.innerText);
    const text = texts.find((text) => text.startsWith(start));
    text ? done(text) : requestAnimationFrame(check);
  };
  check();
});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, make_run(epochs=12), history(12), "lenet <async>", {"model": "lenet"})
    return path


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, page: Path) -> Iterator[Tab]:
    assert PROGRAM is not None
    with chromium(PROGRAM, tmp_path_factory.mktemp("profile")) as browser:
        tab = browser.tab()
        tab.send("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        tab.open(page)
        tab.ask(WORDS)
        yield tab


@pytest.fixture
def tab(fresh: Tab) -> Tab:
    """The page as it is when it is opened."""
    fresh.ask("fig('lanes').reset.emit()")
    fresh.ask("rest()")
    return fresh


def ranges(tab: Tab, names: list[str]) -> list[list[float]]:
    intervals: list[list[float]] = tab.ask(
        f"{names}.map((name) => [fig(name).x_range.start, fig(name).x_range.end])",
    )
    return intervals


def press(tab: Tab, kind: str, x: float, y: float, button: str = "left") -> None:
    tab.send(
        "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(button == "left"), clickCount=1
    )


def test_it_opens_without_a_complaint_and_asks_for_nothing(tab: Tab, page: Path) -> None:
    assert tab.complaints() == []
    assert [url for url in tab.requests() if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
    assert tab.ask("document.title") == "lenet <async>"
    assert tab.ask("document.querySelector('h1').textContent") == "lenet <async>"


def test_every_chart_is_drawn(tab: Tab) -> None:
    names = tab.ask("[...document.querySelectorAll('figure')].map((one) => one.id)")
    assert sorted(names) == sorted(OVER_TIME + OVER_SAMPLES)
    assert all(width > 300 for width in tab.ask(f"{names}.map((name) => fig(name).inner_width)"))
    seen = tab.ask("[...new Set(fig('lanes').renderers.map((one) => one.name))]")
    states = [f"state-{state}" for state in STATES if state not in ("checkpoint", "user")]
    assert {*states, "gaps", "merges", "round-collecting", "round-summing", "moments"} <= set(seen)
    labels = tab.ask("[...fig('lanes').left[0].major_label_overrides.values()]")
    assert labels == ["0: cpu@0", "1: cpu@1"]


def test_zooming_one_chart_zooms_all_over_time(tab: Tab) -> None:
    before = ranges(tab, OVER_TIME)
    others = ranges(tab, OVER_SAMPLES)
    assert len({tuple(interval) for interval in before}) == 1
    tab.ask("fig('busy').x_range.setv({start: 0.2, end: 0.3})")
    assert ranges(tab, OVER_TIME) == [[0.2, 0.3]] * len(OVER_TIME)
    assert ranges(tab, OVER_SAMPLES) == others
    tab.ask("fig('lanes').reset.emit()")
    assert ranges(tab, OVER_TIME) == before


def test_dragging_over_a_chart_zooms_in(tab: Tab) -> None:
    (start, y), (end, _) = tab.ask("[place('lanes', 0.2, 0.5), place('lanes', 0.6, 0.5)]")
    press(tab, "mouseMoved", start, y, "none")
    press(tab, "mousePressed", start, y)
    for part in (0.3, 0.6, 1.0):
        press(tab, "mouseMoved", start + part * (end - start), y)
    press(tab, "mouseReleased", end, y)
    tab.ask("rest()")
    (interval,) = ranges(tab, ["quality-time"])
    assert interval == pytest.approx([0.2, 0.6], abs=0.01)


def test_spans_are_stacked_when_zoomed_out_and_single_when_zoomed_in(tab: Tab) -> None:
    def shown() -> dict[str, bool]:
        pairs: list[list[object]] = tab.ask("drawn('state-wait').map((one) => [one.tags[1], one.visible])")
        return {str(level): bool(visible) for level, visible in pairs}

    assert shown() == {"fine": False, "coarse": True}
    tab.ask("fig('busy').x_range.setv({start: 0.2, end: 0.3})")
    assert shown() == {"fine": True, "coarse": False}


def test_a_key_shows_and_hides(tab: Tab) -> None:
    click = "[...document.querySelectorAll('.key')].find((key) => key.textContent === 'wait').click()"
    visible = "drawn('state-wait').some((one) => one.visible)"
    pressed = "[...document.querySelectorAll('.key')].find((key) => key.textContent === 'wait').ariaPressed"
    assert tab.ask(f"[{visible}, {pressed}]") == [True, "true"]
    tab.ask(click)
    assert tab.ask(f"[{visible}, {pressed}]") == [False, "false"]
    tab.ask("fig('busy').x_range.setv({start: 0.2, end: 0.3})")
    assert tab.ask(visible) is False
    tab.ask(click)
    assert tab.ask(f"[{visible}, {pressed}]") == [True, "true"]


def test_the_tooltip_of_a_gap_lists_its_causes(tab: Tab) -> None:
    gap = max((gap for gap in idle_gaps(make_run(epochs=12)) if gap.rank == 0), key=lambda gap: gap.length_ns)
    middle = (gap.start_ns + gap.end_ns) / 2e9
    press(tab, "mouseMoved", *tab.ask(f"place('lanes', {middle}, 1.87)"), "none")
    text = tab.ask("tooltip('idle')")
    assert text.splitlines()[0] == f"idle for {gap.length_ns / 1e6:.2f} ms, rank 0"
    assert [line.rpartition(" ")[0].rpartition(" ")[0] for line in text.splitlines()[1:]] == [c for c, _ in gap.parts]


def test_it_follows_light_and_dark(tab: Tab) -> None:
    asked = "[getComputedStyle(document.body).backgroundColor, drawn('state-compute')[0].glyph.fill_color.value,"
    asked += " getComputedStyle(document.documentElement).getPropertyValue('--compute').trim()]"
    seen = {}
    for scheme in ("light", "dark"):
        query = "matchMedia('(prefers-color-scheme: dark)')"
        tab.ask(f"globalThis.turned = new Promise((done) => {query}.addEventListener('change', done)); 0")
        tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        if scheme == "dark":
            tab.ask("turned.then(() => true)")
        seen[scheme] = tab.ask(asked)
        assert seen[scheme][1] == seen[scheme][2]
    assert all(one != other for one, other in zip(seen["light"], seen["dark"], strict=True))
    assert tab.complaints() == []


def test_it_fits_a_phone_and_leaves_touch_to_the_page(fresh: Tab, page: Path) -> None:
    """The last one: it opens the page anew."""
    fresh.send("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    fresh.send("Emulation.setTouchEmulationEnabled", enabled=True)
    fresh.open(page)
    fresh.ask(WORDS)
    assert fresh.ask("document.documentElement.scrollWidth") == 390
    assert all(0 < width < 390 for width in fresh.ask("Bokeh.documents[0].roots().map((one) => one.inner_width)"))
    labels = "fig('lanes').renderers.find((one) => one.name === 'epoch-names').data_source.data"
    pixels = f"[...{labels}.x].map((x) => x / fig('lanes').x_range.end * fig('lanes').inner_width)"
    shown = [(x, name) for x, name in zip(*fresh.ask(f"[{pixels}, {labels}.name]"), strict=True) if name]
    assert shown, "the last epoch at least"
    assert all(second - 6 * len(name) > first for (first, _), (second, name) in pairwise(sorted(shown)))
    cards = fresh.ask("[...document.querySelectorAll('#idle td')].map((one) => one.getBoundingClientRect().right)")
    assert max(cards) <= 390, "a row of the table is a card"
    active = "fig('lanes').toolbar.tools.filter((one) => one.active && one.event_types?.includes('pan')).length"
    assert fresh.ask(active) == 0
    assert fresh.complaints() == []
