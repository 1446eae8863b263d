"""A run of two nodes for tests: targets in one process, drafters in another. An item goes between them as a
line of JSON with its context.

    split_trainer.py drafter                        prints its port, takes what comes until the targets are
    gone split_trainer.py target PORT                    works until its stdin ends

Two workers each; target i feeds drafter i. A target step makes one item, a drafter step takes two: what the
drafter took is its answer, one line of JSON on stdout at its end, ``[[drafter step, [target steps]], ...]``.
About 100 items a second; every fifth drafter step fails.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import otel_dflash

WORKERS = 2
ITEMS_PER_STEP = 2
PACE_S = 0.02


def target_loop(worker: otel_dflash.Worker, connection: socket.socket, ended: threading.Event) -> None:
    number = 0
    while not ended.is_set():
        number += 1
        with worker.step() as step:
            with worker.model_forward:
                ended.wait(PACE_S)
            with worker.pack_hidden:
                pass
            step.set(tokens=number)
            with worker.queue_put:
                item = {"made_by": step.id, "context": step.produced()}
                connection.sendall(json.dumps(item).encode() + b"\n")
    connection.close()
    worker.close()


def drafter_loop(worker: otel_dflash.Worker, connection: socket.socket, taken: list[Any]) -> None:
    with connection.makefile() as lines:
        while line := lines.readline():
            with suppress(ArithmeticError), worker.step() as step:
                items = []
                for _ in range(ITEMS_PER_STEP):
                    with worker.queue_get:
                        line = line or lines.readline()
                        if not line:
                            break
                        item = json.loads(line)
                        step.consumed(item["context"])
                    items.append(item["made_by"])
                    line = ""
                taken.append([step.id, items])
                with worker.forward:
                    if len(taken) % 5 == 0:
                        raise ArithmeticError
                with worker.optimizer:
                    pass
    worker.close()


def serve(telemetry: otel_dflash.Telemetry) -> None:
    taken: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connections = [server.accept()[0] for _ in range(WORKERS)]
    threads = [
        threading.Thread(
            target=drafter_loop, args=(telemetry.worker("drafter", index, gpu=index), connection, taken)
        )
        for index, connection in enumerate(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(taken), flush=True)


def produce(telemetry: otel_dflash.Telemetry, port: int) -> None:
    ended = threading.Event()
    threads = [
        threading.Thread(
            target=target_loop,
            args=(
                telemetry.worker("target", index, gpu=index),
                socket.create_connection(("127.0.0.1", port)),
                ended,
            ),
        )
        for index in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    select.select([sys.stdin], [], [])
    ended.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    if sys.argv[1] == "drafter":
        serve(otel_dflash.start())
    else:
        produce(otel_dflash.start(), int(sys.argv[2]))
