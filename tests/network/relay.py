"""A slow cable between two namespaces: `python relay.py NAMESPACE NAMESPACE MILLISECONDS`, until it is ended.

Kernels without netem cannot delay packets, so this process does: it holds two TAP devices, one in each namespace, and
passes every Ethernet frame on after the delay. Prints "up" when frames can travel.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LONGEST_QUEUE = 4096  # frames; a real queue drops too
INTERFACE = "slow0"
ADDRESSES = ("10.78.0.1", "10.78.0.2")


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def move(name: str, namespace: str, address: str) -> None:
    """The TAP device into the namespace, as `slow0`."""
    for command in (
        f"ip link set {name} netns {namespace} name {INTERFACE}",
        f"ip -n {namespace} addr add {address}/24 dev {INTERFACE}",
        f"ip -n {namespace} link set {INTERFACE} up",
    ):
        subprocess.run(command.split(), check=True)


def relay(devices: tuple[int, int], delay_s: float) -> None:
    """Frames of each device leave by the other, in order, `delay_s` later."""
    waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    while True:
        due = [queue[0][0] for queue in waiting if queue]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select(devices, [], [], timeout_s)
        for device in ready:
            queue = waiting[devices.index(device)]
            for _ in range(64):
                try:
                    frame = os.read(device, 65536)
                except BlockingIOError:
                    break
                if len(queue) < LONGEST_QUEUE:
                    queue.append((time.monotonic() + delay_s, frame))
        now = time.monotonic()
        for place, queue in enumerate(waiting):
            while queue and queue[0][0] <= now:
                os.write(devices[1 - place], queue.popleft()[1])


def main() -> None:
    namespaces, delay_s = sys.argv[1:3], float(sys.argv[3]) / 1e3
    names = [f"tap{os.getpid()}{end}" for end in "ab"]
    first, second = (open_tap(name) for name in names)
    for name, namespace, address in zip(names, namespaces, ADDRESSES, strict=True):
        move(name, namespace, address)
    print("up", flush=True)
    relay((first, second), delay_s)


if __name__ == "__main__":
    main()
