"""A rehearsal of a bad day: a sweep on a cluster of three nodes that loses a worker and a node on the way.

    python benchmarks/rehearsal.py                    # tiny-qwen2 and tiny-qwen3 through vLLM; minutes
    python benchmarks/rehearsal.py --engine planted   # two planted models; a minute

It starts a Ray head and two nodes on the loopback interface, submits ``jobs/sweep.py`` with ``ray job submit``, kills a
worker of the first model and a node under the second while requests are measured, and compares what was found with a
quiet run of the same grid on a ledger of its own. Exit code 0 if both found the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow.parquet as pq
import yaml

from processes import free_ports

if TYPE_CHECKING:
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TASKS = ["tiny_copy", "tiny_sort", "tiny_modsum"]
PATIENCE_S = 240.0


def main() -> int:
    """Runs the grid twice, disturbed and quiet, and prints what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["vllm", "planted"], default="vllm", help="who answers")
    arguments = parser.parse_args()
    # Ray's sockets lie in its folder, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        settle(folder)
        plan = grid(arguments.engine)
        cells = [f"{model}-tiny-default" for model in plan["models"]]
        file = folder / "grid.yaml"
        file.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
        with cluster(folder) as (address, nodes):
            say("three nodes are up")
            if not disturbed_run(file, folder / "disturbed", cells, address, nodes, folder / "ray.log"):
                return 1
        quiet = [sys.executable, "jobs/sweep.py", str(file), "--out", str(folder / "quiet")]
        with (folder / "quiet.log").open("wb") as log:
            code = subprocess.run(quiet, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
        say(f"the quiet run ended with exit code {code}")
        if code:
            show(folder / "quiet.log")
        return 0 if code == 0 and compare(folder / "disturbed", folder / "quiet", cells) else 1


def grid(engine: str) -> dict[str, Any]:
    """Two models and three capabilities, as the grid file holds them."""
    base: dict[str, Any] = {
        "search_items": 40,
        "held_out_items": 40,
        "engine": {"name": engine, "workers": 2, "threads": 1, "unit_tokens": 300},
        "design": {"requests": 400, "density": 0.07, "fragile_density": 0.07, "pilot": {"heads_a_mask": 1}},
        "select": {"candidates": 6, "items": 20, "limit": 3},
        "confirm": {"random_draws": 3, "curve": 4, "bootstrap": 200},
        "crosscheck": {"enabled": False},
    }
    if engine == "vllm":
        base["engine"]["dtype"] = "float32"  # in bfloat16 an outcome depends a little on what shares its batch
        models: dict[str, dict[str, Any]] = {name: {"model": name} for name in ("tiny-qwen2", "tiny-qwen3")}
    else:
        shape = {"layers": 6, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 256}
        options = {"shape": shape, "delay_s": 0.1}
        models = {
            f"planted-{seed}": {"model": "planted", "engine": {"planted": {**options, "seed": seed}}} for seed in (1, 2)
        }
    return {"base": base, "models": models, "task_sets": {"tiny": TASKS}}


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, Cluster]]:
    """A Ray head without cores and two nodes with two each, on the loopback interface, ended with the block.

    Yields:
        The address of the job server, and the nodes.
    """
    from ray.cluster_utils import Cluster  # `ray start` takes no second node on the loopback interface

    (port,) = free_ports(1)
    common: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
    dashboard: dict[str, Any] = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=0, **dashboard, **common)
        for name in ("one", "two"):
            # In a folder of its own, as on a machine of its own: nodes that share one take the working directory of a
            # running job away from each other.
            nodes.add_node(num_cpus=2, include_dashboard=False, temp_dir=str(folder / name), **common)
        address = f"http://127.0.0.1:{port}"
        listing = ("job", "list", "--address", address)
        wait_for("the job server", folder / "ray.log", lambda: ray_command(folder / "ray.log", *listing).wait() == 0)
        yield address, nodes
    finally:
        nodes.shutdown()  # type: ignore[no-untyped-call]  # Ray leaves it untyped


def disturbed_run(file: Path, out: Path, cells: list[str], address: str, nodes: Cluster, log: Path) -> bool:
    """Submits the grid, kills a worker of the first cell and a node under the second; says whether it ended well."""
    job = ray_command(
        *(log, "job", "submit", "--address", address, "--working-dir", str(ROOT)),
        *("--", "python", "jobs/sweep.py", str(file), "--out", str(out)),
    )
    for cell, victim in zip(cells, ("worker", "node"), strict=True):
        events = out / "cells" / cell / "events.jsonl"
        wait_for(f"the search of {cell}", log, partial(searching, events), job)
        worker = psutil.Process(told(events, "worker_ready")[-1]["pid"])
        if victim == "worker":
            worker.kill()
        else:
            nodes.remove_node(node_of(worker, nodes), allow_graceful=False)
        say(f"{cell}: killed a {victim} in the middle of the search")
        wait_for("the driver to notice", log, partial(told, events, "worker_lost"), job)
        for lost in told(events, "worker_lost"):
            say(f"{cell}: worker {lost['worker']} lost with {lost['units']} units of work in its hands")
    wait_for("the end of the job", log, lambda: job.poll() is not None)
    code = job.returncode
    say(f"the disturbed run ended with exit code {code}")
    if code:
        show(log)
    return code == 0


def node_of(worker: psutil.Process, nodes: Cluster) -> Node:
    """The node whose raylet started the worker."""
    above = {parent.pid for parent in worker.parents()}
    found: Node = next(
        node for node in nodes.worker_nodes if above & {raylet.process.pid for raylet in node.all_processes["raylet"]}
    )
    return found


def compare(disturbed: Path, quiet: Path, cells: list[str]) -> bool:
    """Prints, cell by cell, what both runs found and whether it is the same."""
    same = True
    for cell in cells:
        found, expected = (
            json.loads((out / "cells" / cell / "heads.json").read_text(encoding="utf-8")) for out in (disturbed, quiet)
        )
        for one in (found, expected):
            del one["provenance"]["command"]  # it names the folder
        named, wanted = (
            {task: finding["named"] for task, finding in one["tasks"].items()} for one in (found, expected)
        )
        same &= named == wanted and found["universal"] == expected["universal"]
        say(f"{cell}: disturbed {shown(named)} | quiet {shown(wanted)} | every figure equal: {yes(found == expected)}")
    twice = repeated_keys(disturbed / "ledger")
    say(f"keys of the disturbed ledger with two rows: {twice}")
    say(f"same findings: {yes(same)}")
    return same and not twice


def searching(events: Path) -> bool:
    """Whether the search itself is under way, with a worker that is up."""
    stages = [event for event in told(events) if event["event"].startswith("stage_")]
    under_way = bool(stages) and (stages[-1]["event"], stages[-1]["stage"]) == ("stage_started", "search")
    return under_way and bool(told(events, "worker_ready"))


def told(events: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a kind, or all."""
    if not events.exists():
        return []
    whole, _, _ = events.read_text(encoding="utf-8").rpartition("\n")  # the last line may be half written
    found = [json.loads(line) for line in whole.splitlines()]
    return [event for event in found if kind in (None, event["event"])]


def repeated_keys(ledger: Path) -> int:
    """How many keys of a ledger have more than one row."""
    keys: Counter[str] = Counter()
    for part in sorted(ledger.rglob("*.parquet")):
        keys.update(pq.read_table(part, columns=["key"]).column("key").to_pylist())
    return sum(count > 1 for count in keys.values())


def ray_command(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a ``ray`` command; what it prints goes to the log."""
    with log.open("ab") as stream:
        return subprocess.Popen([str(BIN / "ray"), *arguments], stdout=stream, stderr=stream)


def settle(folder: Path) -> None:
    """Sets the environment of this process and all it starts; Ray reads it when it is imported."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ |= {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then stays on the loopback interface
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is ended with this process


def wait_for(what: str, log: Path, condition: Callable[[], object], job: subprocess.Popen[bytes] | None = None) -> None:
    """Waits until something is so, and gives up when the job has ended without it."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline or (job is not None and job.poll() is not None):
            show(log)
            raise SystemExit(f"rehearsal: waited in vain for {what}")
        time.sleep(0.05)


def shown(named: dict[str, list[str]]) -> str:
    """Named heads on one line."""
    return ", ".join(f"{task} {' '.join(heads) or 'none'}" for task, heads in named.items())


def show(log: Path) -> None:
    """Prints the end of Ray's log."""
    sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-4000:])


def yes(so: bool) -> str:
    """Yes or no."""
    return "yes" if so else "no"


def say(line: str) -> None:
    """Prints at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
