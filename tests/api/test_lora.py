"""The example with LoRA, smaller: it trains, on devices that hold the rest in shards."""

from pathlib import Path

from tests.api.starts import BIN, start

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"
SIZE, SMALL = '"width": 320, "inner": 864, "layers": 10', '"width": 64, "inner": 96, "layers": 2'


def test_it_trains_on_devices_that_say_what_they_hold(tmp_path: Path) -> None:
    source = EXAMPLE.read_text()
    assert SIZE in source
    script = tmp_path / "lora.py"
    script.write_text(source.replace(SIZE, SMALL))
    done = start([BIN / "uneven", "run", script], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "memory without activations: cpu " in done.stderr
    before, after = (float(word) for word in done.stdout.split()[-3::2])
    assert after < before
