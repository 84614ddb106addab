"""A Ray cluster of several nodes on this machine, in a process of its own: ``python -m tests.measure.nodes CPUS...``.

The process prints the cluster's address and how many nodes it has, then obeys lines: ``kill N`` kills the N-th node,
counted from 0 for the head, with everything that runs on it; ``add CPUS`` adds one. When its input ends, so does it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

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
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.measure.nodes", *map(str, self._cpus)],
            cwd=ROOT,
            env=environment | self.environment | {"RAY_TMPDIR": self._folder.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.environment["RAY_ADDRESS"] = self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()

    def kill(self, node: int) -> None:
        """Kills a node at once, with all of its workers."""
        self._tell(f"kill {node}")

    def add(self, cpus: int) -> None:
        """Adds a node and waits until it has joined."""
        self._tell(f"add {cpus}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster ended; its message is above"
        return line.strip()


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
