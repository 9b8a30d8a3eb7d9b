"""`uneven simulate`: the table, the document, the page and what is refused."""

import json
import sys
from pathlib import Path

import pytest

from uneven.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
PAIR = str(EXAMPLES / "two_gpus.toml")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["uneven", "simulate", *arguments])
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    out, err = capsys.readouterr()
    assert isinstance(code, int)
    return code, out, err


def test_the_table_the_document_and_the_page_tell_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "out.html"
    code, out, err = call(monkeypatch, capsys, PAIR, "--hours", "0.003", "--page", str(page))
    assert code == 0
    assert str(page) in err
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.endswith("%")}
    code, out, _ = call(monkeypatch, capsys, PAIR, "--hours", "0.003", "--json")
    document = json.loads(out)
    assert (code, document["ranks"], document["machines"]) == (0, 2, 1)
    html = page.read_text()
    for result in document["results"]:
        assert rows[result["policy"]][3] == f"{result['efficiency']:.3f}"
        assert f"efficiency {result['efficiency']:.3f}" in html
        assert f"{result['samples_per_s']:,.0f} samples/s" in html
        assert sum(result["time"].values()) == pytest.approx(1.0)
        assert [kind["name"] for kind in result["kinds"]] == ["fast GPU", "slow GPU"]
    assert [result["policy"] for result in document["results"]] == ["equal", "sync", "balanced", "cadence", "async"]
    assert "<script" not in html
    assert html.count('class="lane"') == 10


JOINED = """
[[devices]]
name = "fast"
sample_ms = 1.0

[[devices]]
name = "slow"
sample_ms = 2.0

[inside]
rate_mb_s = 1000

[faults]
joins_per_hour = 900
settle_s = 0.1

[job]
samples_per_epoch = 20000
batch_size = 64
"""


def test_kinds_hold_all_samples_also_those_of_ranks_that_joined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "joined.toml").write_text(JOINED)
    _, out, _ = call(monkeypatch, capsys, str(tmp_path / "joined.toml"), "--json")
    for result in json.loads(out)["results"]:
        assert result["joins"] > 0
        assert [kind["name"] for kind in result["kinds"]] == ["fast", "slow"]
        assert sum(kind["count"] for kind in result["kinds"]) == len(result["shares"]) == 2 + result["joins"]
        assert sum(kind["share"] for kind in result["kinds"]) == pytest.approx(1.0)


def test_no_time_is_told_where_no_sample_counts_and_ranks_count_for_their_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    faults = JOINED.replace("settle_s = 0.1", "failures_per_hour = 900\nsettle_s = 4")
    (tmp_path / "stormy.toml").write_text(faults.replace("= 20000", "= 2000000"))
    order = (str(tmp_path / "stormy.toml"), "--policy", "equal", "--hours", "0.02")
    _, out, _ = call(monkeypatch, capsys, *order)
    assert next(line.split()[1] for line in out.splitlines() if line.startswith("equal ")) == "-"
    _, out, _ = call(monkeypatch, capsys, *order, "--json")
    (result,) = json.loads(out)["results"]
    assert (result["samples"], result["seconds_per_epoch"]) == (0, None)
    for times in (result["time"], *(kind["time"] for kind in result["kinds"])):
        assert sum(times.values()) == pytest.approx(1.0)


def test_a_curve_has_a_row_for_each_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    eight = str(EXAMPLES / "eight_gpus.toml")
    code, out, _ = call(
        monkeypatch, capsys, eight, "--curve", "4,16", "--policy", "sync,async", "--hours", "0.002", "--json"
    )
    points = json.loads(out)["points"]
    assert code == 0
    assert [(point["ranks"], point["policy"]) for point in points] == [
        *((4, "sync"), (4, "async")),
        *((16, "sync"), (16, "async")),
    ]
    assert points[3]["samples_per_s"] > 3 * points[1]["samples_per_s"]
    assert points[2]["efficiency"] < points[3]["efficiency"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PAIR, "--policy", "fast"), "--policy 'fast' is not one of equal"),
        ((PAIR, "--hours", "0"), "--hours 0 must be above 0"),
        ((PAIR, "--curve", "many"), "--curve 'many' must be numbers of ranks"),
        ((PAIR, "--curve", "0"), "between 1 and 100,000"),
        ((PAIR, "--curve", "2", "--page", "x.html"), "leave out --curve"),
        ((PAIR, "--page", str(EXAMPLES)), "is a folder; name a file, as in --page "),
        ((PAIR, "--page", str(EXAMPLES / "nothing" / "x.html")), "nothing; make it, or name another one"),
        (("nothing.toml",), "nothing.toml: No such file"),
    ],
)
def test_what_is_wrong_ends_with_a_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_page_that_cannot_be_written_names_its_own_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, PAIR, "--hours", "0.003", "--page", "/dev/full")
    assert code == 3
    assert "efficiency" in out
    assert err == "uneven: cannot write to /dev: no space left; choose another folder with --page FILE\n"


def test_a_narrow_terminal_cuts_no_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = call(monkeypatch, capsys, PAIR, "--hours", "0.003")
        tables.append([line.split() for line in out.splitlines()])
    assert tables[0] == tables[1]
