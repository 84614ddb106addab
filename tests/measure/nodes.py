"""A Ray cluster of several nodes on this machine, in a process of its own: ``python -m tests.measure.nodes CPUS...``.

The process prints the cluster's address and how many nodes it has, then obeys lines: ``kill N`` kills the N-th node,
counted from 0 for the head, with everything that runs on it; ``add CPUS`` adds one. When its input ends, so does it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from benchmarks.processes import LineProcess

ROOT = Path(__file__).resolve().parents[2]


class LocalCluster:
    """The cluster, for the time of a ``with`` block; nothing of it listens beyond this machine.

    Args:
        cpus: cores of each node, the head first.

    Attributes:
        environment: what a driver sets to find it, besides its own environment.
    """

    def __init__(self, *cpus: int) -> None:
        self._cpus = cpus
        self.environment: dict[str, str] = {}

    def __enter__(self) -> LocalCluster:
        # A folder of its own: in the usual one Ray leaves a note that makes this the cluster of the whole machine.
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.environment = {"PYTHONPATH": str(ROOT), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the loopback alone
        self._process = LineProcess(
            ["-m", "tests.measure.nodes", *map(str, self._cpus)],
            environment | self.environment | {"RAY_TMPDIR": self._folder.name},
            ROOT,
        )
        self.environment["RAY_ADDRESS"] = self._process.answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.end(patience_s=60)
        self._folder.cleanup()

    def kill(self, node: int) -> None:
        """Kills a node at once, with all of its workers."""
        self._process.ask(f"kill {node}")

    def add(self, cpus: int) -> None:
        """Adds a node and waits until it has joined."""
        self._process.ask(f"add {cpus}")


def main(cpus: list[int]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints must not mix with the answers
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes = [cluster.add_node(**options(each)) for each in cpus]
    print(cluster.address, file=answers, flush=True)
    for line in sys.stdin:
        verb, number = line.split()
        if verb == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            nodes.append(cluster.add_node(**options(int(number))))
        print(line.strip(), file=answers, flush=True)
    cluster.shutdown()


def options(cpus: int) -> dict[str, object]:
    return {
        "num_cpus": cpus,
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
        "object_store_memory": 80 * 2**20,
    }


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
