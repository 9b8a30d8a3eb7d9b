"""Bandwidth and latency of shared memory against Gloo: `python tools/transport_cost.py --ranks 2,4 --device cuda:0`.

Each rank is a process with a core of its own where there are enough. Both transports sum the same tensor in turn, in
the same processes; a line has the median of each and the ratio with its 95 % interval. On CUDA the time is that until
the device has the sum. Gigabytes are those of the tensor over the time of its sum.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch

from uneven.bench.interval import interval
from uneven.comm.exchange import Sizes
from uneven.comm.group import Group
from uneven.comm.shared_memory import SharedMemoryGroup, share
from uneven.comm.store import open_store, reach_store
from uneven.comm.torch_group import TorchGroup

SIZES = {"4 kB": 4_000, "250 kB": 250_000, "1 MB": 1_000_000, "100 MB": 100_000_000}
REPEATS = {"4 kB": 400, "250 kB": 300, "1 MB": 200, "100 MB": 25}


def time_one(group: Group, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    group.all_reduce(tensor).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - began


def measure(
    gloo: TorchGroup, shared: Group, device: torch.device, repeats: float
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of (Gloo, shared memory) for every size."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, size in SIZES.items():
        tensor = torch.zeros(size // 4, device=device)
        pairs = []
        for _ in range(max(4, int(REPEATS[name] * repeats))):
            times = []
            for group in (gloo, shared):
                group.all_reduce(torch.zeros(1)).wait()  # all begin together
                times.append(time_one(group, tensor))
            pairs.append((times[0], times[1]))
        found[name] = pairs[2:]
    return found


def run_rank(rank: int, size: int, port: int, device: str, repeats: float, sizes: Sizes | None, results: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    place = torch.device(device)
    store = reach_store("127.0.0.1", port)
    gloo = TorchGroup(store, rank, size)
    shared = share(gloo, store, place, sizes=sizes)
    assert isinstance(shared, SharedMemoryGroup)
    found = measure(gloo, shared, place, repeats)
    if rank == 0:
        results.put(found)
        results.close()
        results.join_thread()
    gloo.all_reduce(torch.zeros(1)).wait()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=float, default=1.0, help="times the usual number")
    parser.add_argument("--ring", type=int, help="bytes of a rank's ring")
    parser.add_argument("--piece", type=int, help="bytes of a piece")
    given = parser.parse_args()
    sizes = Sizes(given.ring, given.piece) if given.ring and given.piece else None
    context = multiprocessing.get_context("spawn")
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, {given.device}\n")
    print("| ranks | tensor | Gloo ms | shared memory ms | Gloo GB/s | shared memory GB/s | Gloo / shared |")
    print("|---|---|---|---|---|---|---|")
    for size in map(int, given.ranks.split(",")):
        store, port = open_store()
        results = context.Queue()
        arguments = (size, port, given.device, given.repeats, sizes, results)
        ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(size)]
        for process in ranks:
            process.start()
        found = results.get(timeout=600)
        for process in ranks:
            process.join()
        del store
        for name, pairs in found.items():
            gloo, shared = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio, half = interval([one / two for one, two in pairs])
            rate = [SIZES[name] / seconds / 1e9 for seconds in (gloo, shared)]
            columns = (
                f"{gloo * 1e3:.3f} | {shared * 1e3:.3f} | {rate[0]:.2f} | {rate[1]:.2f} | {ratio:.1f} +- {half:.1f}"
            )
            print(f"| {size} | {name} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
