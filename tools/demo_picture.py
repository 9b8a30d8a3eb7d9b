"""Make docs/images/ddp-and-async.png anew: the lanes of PyTorch's DDP and of async on one time axis, from a real demo.

    uneven demo --modes solo-0,solo-1,torch-ddp,cpu-async     # on an idle machine
    python tools/demo_picture.py [runs/demo] [docs/images/ddp-and-async.png]

Needs bokeh and Chromium. Prints what its caption must say: how long both took, and whether other programs ran.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from uneven.bench.demo import MODEL, Results
from uneven.bench.demo_page import lanes_html, read_timelines
from uneven.bench.orders import DemoOrder
from uneven.timeline.document import render_document

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SIZE = "1180,640"


def main(runs: Path, picture: Path) -> None:
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        sys.exit("no Chromium on this machine")
    summaries = {path.parts[-3]: json.loads(path.read_text()) for path in runs.glob(f"{MODEL}/*/seed-0/summary.json")}
    devices = next(tuple(one["devices"]) for one in summaries.values() if len(one["devices"]) > 1)
    results = Results(devices, tuple(summaries), summaries)
    script, lanes = lanes_html(results, read_timelines(DemoOrder(out=runs), results))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "lanes.html"
        style = "<style>header, .hint, .note { display: none } main { padding: 4px 16px } section { margin: 0 }</style>"
        page.write_text(render_document("", "", f"{style}<section>{lanes}</section>", script))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
        window = [f"--window-size={SIZE}", f"--user-data-dir={folder}/profile", f"--screenshot={picture.resolve()}"]
        subprocess.run([program, *options, *window, page.as_uri()], check=True, capture_output=True, timeout=300)
    for row in results.rows:
        disturbed = ", other programs ran" if row.is_disturbed else ""
        print(f"{row.mode}: {row.seconds:.1f} s of training on {', '.join(devices)}{disturbed}")
    print(f"wrote {picture}")


if __name__ == "__main__":
    here = Path(__file__).parent.parent
    given = [Path(argument) for argument in sys.argv[1:]]
    main(*(*given, *(Path("runs/demo"), here / "docs" / "images" / "ddp-and-async.png")[len(given) :]))
