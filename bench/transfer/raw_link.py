"""What the link itself carries, to hold a channel against: one large plain copy, in GB/s."""

import socket
import threading
import time
from collections.abc import Callable

import torch

REPEATS = 5


def raw_gb_per_s(channel: str, device: str, num_bytes: int) -> tuple[str, float]:
    """(what was measured, GB/s). On GPUs from the second visible one to the first, where there are two; `tcp` on a CPU
    through a socket of this host; other channels of the CPU by memcpy."""
    if device != "cpu":
        source = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
        what = "copy from GPU to GPU" if source == "cuda:1" else "copy within the GPU"
        there, here = (torch.zeros(num_bytes, dtype=torch.uint8, device=name) for name in (source, "cuda:0"))
        return what, fastest(num_bytes, lambda: here.copy_(there), torch.cuda.synchronize)
    if channel in ("tcp", "nixl"):
        return "socket of this host", fastest(num_bytes, lambda: through_socket(num_bytes))
    there, here = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    return "memcpy", fastest(num_bytes, lambda: here.copy_(there))


def fastest(num_bytes: int, move: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        wait()
        start = time.perf_counter()
        move()
        wait()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best / 1e9


def through_socket(num_bytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    data, place = bytes(1 << 20), bytearray(1 << 20)
    num_pieces = max(1, num_bytes >> 20)

    def send() -> None:
        for _ in range(num_pieces):
            sender.sendall(data)
        sender.close()

    thread = threading.Thread(target=send)
    thread.start()
    while receiver.recv_into(place):
        pass
    thread.join()
    receiver.close()
