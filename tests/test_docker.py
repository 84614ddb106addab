from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from benchmarks.processes import free_ports
from cs_localize import __version__
from tests.ci_scripts import ROOT
from tests.dockerfile import chain, install, parse, problems
from tests.studies import wait_for

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
TOKEN = "0123456789abcdef" * 4


class Section(BaseModel):
    """A key that the models below do not name is an error, as it would be to Docker Compose."""

    model_config = ConfigDict(extra="forbid")


class Build(Section):
    context: str = ""
    dockerfile: str = ""
    args: dict[Literal["VARIANT", "USER_ID"], str | int]


class Bind(Section):
    type: Literal["bind"]
    source: str
    target: str
    bind: dict[Literal["create_host_path"], bool]


class Condition(Section):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class Device(Section):
    driver: Literal["nvidia"]
    count: Literal["all"] | int
    capabilities: list[Literal["gpu"]]


class Reservations(Section):
    devices: list[Device]


class Resources(Section):
    reservations: Reservations


class Deploy(Section):
    resources: Resources


class Service(Section):
    image: str = Field(pattern=r"^cs-localize:(cpu|gpu)$")
    build: Build
    environment: dict[Literal["RAY_AUTH_MODE", "RAY_AUTH_TOKEN"], str] = {}
    init: bool = False
    shm_size: str = Field("64mb", pattern=r"^\d+(mb|gb)$")
    cap_drop: list[Literal["ALL"]] = []
    security_opt: list[Literal["no-new-privileges:true"]] = []
    restart: str = Field("no", pattern=r"^(no|always|unless-stopped|on-failure(:\d+)?)$")
    command: list[str] = []
    ports: list[str] = []
    networks: list[str] | dict[str, dict[Literal["aliases"], list[str]]] = []
    volumes: list[str | Bind] = []
    depends_on: dict[str, Condition] = {}
    cpus: float | None = None
    deploy: Deploy | None = None


class Network(Section):
    internal: bool = False


class Compose(Section):
    name: str = ""
    services: dict[str, Service]
    networks: dict[str, Network] = {}
    volumes: dict[str, dict[str, str]] = {}


def compose(file: str = "compose.yaml", **given: str) -> Compose:
    """A compose file as Docker would read it: variables filled in, extensions dropped."""
    variables = {"RAY_AUTH_TOKEN": TOKEN} | given

    def fill(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables[match["name"]] if match["required"] else variables.get(match["name"], match["default"])

    text = (ROOT / "docker" / file).read_text(encoding="utf-8")
    variable = r"\$\$|\$\{(?P<name>\w+):(?:(?P<required>\?)|-(?P<default>[^}]*))[^}]*\}"
    filled = re.sub(variable, fill, text)
    tree: dict[str, Any] = yaml.safe_load(filled)
    return Compose.model_validate({key: value for key, value in tree.items() if not key.startswith("x-")})


def test_the_dockerfile_breaks_none_of_the_rules() -> None:
    assert problems(DOCKERFILE, ROOT) == []


@pytest.mark.parametrize(
    ("good", "bad", "objection"),
    [
        ("python:3.11.14-slim-bookworm", "python:latest", "not pinned"),
        ("python:3.11.14-slim-bookworm", "python:3.11-slim", "not pinned"),
        ("FROM packages-$VARIANT", "FROM elsewhere", "not pinned"),
        ("USER researcher", "USER root", "ends as root"),
        ("USER researcher", "WORKDIR /", "ends as root"),
        ("USER researcher", "USER researcher\nRUN true", "after USER"),
        ("HEALTHCHECK", "LABEL", "no HEALTHCHECK"),
        ("RUN python", "RUN curl https://example.org/a | sh && python", "unseen"),
        ("COPY cs_localize", "ADD cs_localize", "use COPY"),
        ("COPY cs_localize", "COPY nothing_here", "no such file"),
        ("COPY cs_localize", "COPY tests", "leaves it out"),
        ("&& rm -rf /var/lib/apt/lists/*", "&& true", "lists stay"),
        ("--no-install-recommends", "--quiet", "recommended"),
        ("--no-deps -r requirements.lock", "-r requirements.lock", "versions of its own"),
    ],
)
def test_each_rule_for_dockerfiles_can_be_broken(good: str, bad: str, objection: str) -> None:
    assert good in DOCKERFILE
    assert any(objection in problem for problem in problems(DOCKERFILE.replace(good, bad), ROOT))


def test_the_image_is_built_on_the_python_that_the_lock_was_made_for() -> None:
    (image,) = {step.text.split()[0] for step in parse(DOCKERFILE) if step.name == "FROM" and ":" in step.text}
    assert image.startswith("python:3.11.")


def test_the_gpu_variant_takes_the_versions_of_the_lock_for_all_the_project_asks_for_but_torch_and_vllm() -> None:
    (step,) = (s.text for s in parse(DOCKERFILE) if s.stage == "packages-gpu" and "pip install" in s.text)
    chosen = re.search(r"\^\((\S+)\)==", step)
    assert chosen is not None
    lock = (ROOT / ".ci" / "requirements.lock").read_text(encoding="utf-8")
    shared = re.findall(rf"^({chosen[1]})==", lock, flags=re.MULTILINE)
    assert sorted(chosen[1].split("|")) == sorted(shared)
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        re.split(r"[\[<>=]", line)[0] for line in table["optional-dependencies"]["measure"] + table["dependencies"]
    }
    light = {"aiohttp", "filelock", "jinja2", "markupsafe", "pyyaml", "requests", "rich"}  # no outcome depends on them
    assert {name.replace("_", "-") for name in asked} - light - {"torch"} == set(shared)


def test_the_head_publishes_its_job_server_on_the_loopback_interface_alone() -> None:
    services = compose().services
    assert services["head"].ports == ["127.0.0.1:8265:8265"]
    assert services["worker"].ports == []


def test_without_a_token_nothing_starts_and_every_node_asks_for_it() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    assert "${RAY_AUTH_TOKEN:?" in text
    for service in compose().services.values():
        assert service.environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


def test_workers_reach_nothing_but_the_network_of_the_cluster() -> None:
    read = compose()
    assert read.services["worker"].networks == ["cluster"]
    assert set(read.services["head"].networks) == {"cluster", "outside"}
    assert {name for name, network in read.networks.items() if network.internal} == {"cluster"}


def test_workers_wait_for_a_healthy_head_and_call_it_by_the_name_it_goes_by() -> None:
    services = compose().services
    networks = services["head"].networks
    assert isinstance(networks, dict)
    (name,) = networks["cluster"]["aliases"]
    assert services["worker"].depends_on["head"].condition == "service_healthy"
    assert f"--address={name}:6379" in services["worker"].command
    assert f"getent ahostsv4 {name}" in services["head"].command[-1]


def test_no_container_keeps_privileges_or_the_small_shared_memory_of_docker() -> None:
    for service in compose().services.values():
        assert service.cap_drop == ["ALL"]
        assert service.security_opt == ["no-new-privileges:true"]
        assert service.shm_size == "1gb"


def test_the_object_store_fits_the_shared_memory() -> None:
    for service in compose().services.values():
        (stored,) = re.findall(r"--object-store-memory=(\d+)", " ".join(service.command))
        assert int(stored) < 2**30


def test_the_head_writes_studies_and_models_and_workers_only_read_models() -> None:
    services = compose(STUDY_FOLDER="/home/me/study").services
    bind = services["head"].volumes[1]
    assert isinstance(bind, Bind)
    assert services["head"].volumes[0] == "models:/models"
    assert (bind.source, bind.target, bind.bind) == ("/home/me/study", "/study", {"create_host_path": False})
    assert services["worker"].volumes == ["models:/models:ro"]
    assert set(compose().volumes) == {"models"}


def test_what_is_mounted_is_where_the_image_looks_for_it_and_belongs_to_its_user() -> None:
    text = " ".join(step.text for step in parse(DOCKERFILE) if step.stage == "base")
    assert "CS_LOCALIZE_HOME=/models" in text
    assert "HF_HOME=/models/" in text
    assert "--owner researcher --group researcher /models /study" in text


def test_the_default_study_folder_is_there_and_holds_a_study() -> None:
    bind = compose().services["head"].volumes[1]
    assert isinstance(bind, Bind)
    assert (ROOT / "docker" / bind.source / "three.yaml").is_file()


def test_a_worker_offers_ray_the_cores_that_docker_gives_it() -> None:
    worker = compose(WORKER_CPUS="6").services["worker"]
    assert worker.cpus == 6
    assert "--num-cpus=6" in worker.command


def test_the_gpu_file_changes_the_image_and_gives_the_worker_every_gpu() -> None:
    services = compose("compose.gpu.yaml").services
    assert {service.image for service in services.values()} == {"cs-localize:gpu"}
    assert {service.build.args["VARIANT"] for service in services.values()} == {"gpu"}
    assert services["head"].deploy is None
    assert services["worker"].deploy is not None
    assert services["worker"].deploy.resources.reservations.devices[0].count == "all"
    assert services.keys() == compose().services.keys()


def test_every_file_and_variable_that_the_readme_of_docker_names_exists() -> None:
    readme = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    used = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "docker").iterdir() if file.suffix != ".md")
    for file in re.findall(r"docker/[\w.-]+", readme):
        made = file in ("docker/.env", "docker/requirements-gpu.lock")  # by the commands beside them
        assert made or (ROOT / file).exists(), file
    for variable in re.findall(r"\b[A-Z]+_[A-Z]+(?==)", readme):
        assert variable in used, variable


def new_environment(folder: Path) -> Path:
    """An empty virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


def run_elsewhere(environment: Path, *command: str) -> str:
    """Output of a command of an environment, in a folder and with variables that do not lead to this repository."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    tool = environment / "bin" / command[0]
    done = subprocess.run(
        [str(tool), *command[1:]], cwd=environment, env=keep, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_step_that_installs_the_project_works_above_packages_that_are_there_already(tmp_path: Path) -> None:
    environment = new_environment(tmp_path / "environment")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # The packages of the running environment stand for those that the stage below has installed, its own included.
    subprocess.run([environment / "bin" / "python", "-m", "pip", "uninstall", "-qq", "--yes", "setuptools"], check=True)
    (site / "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    target = tmp_path / "target"
    target.mkdir()

    install([step for step in parse(DOCKERFILE) if step.stage == "node"], ROOT, target, environment)

    assert run_elsewhere(environment, "cs-localize", "--version") == f"cs-localize {__version__}\n"
    assert "antonyms" in run_elsewhere(environment, "cs-localize", "tasks")
    where = run_elsewhere(environment, "python", "-c", "import cs_localize; print(cs_localize.__file__)")
    assert Path(where.strip()).is_relative_to(environment)


@pytest.mark.full
@pytest.mark.timeout(1800)  # a gigabyte is unpacked, and the doctor loads three engines
@pytest.mark.vllm
@pytest.mark.model
@pytest.mark.ray
def test_every_installation_step_of_the_cpu_image_works_in_an_empty_environment(tmp_path: Path) -> None:
    environment = new_environment(tmp_path / "environment")
    target = tmp_path / "target"
    target.mkdir()

    install(chain(parse(DOCKERFILE), "node", "cpu"), ROOT, target, environment)

    assert "FAIL" not in run_elsewhere(environment, "cs-localize", "doctor")


def ray_environment(token: str = TOKEN) -> dict[str, str]:
    """The variables of a container, in the environment of this process."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        **compose(RAY_AUTH_TOKEN=token).services["head"].environment,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }


@contextmanager
def started(command: list[str]) -> Iterator[None]:
    """A command for the time of the block."""
    process = subprocess.Popen(command, env=ray_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def here(command: list[str], gcs: int, dashboard: int) -> list[str]:
    """A command of the compose file for this machine, on ports that are free."""
    text = "\0".join(command).replace("ray-head", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
    text = text.replace("--dashboard-port=8265", f"--dashboard-port={dashboard}").replace("6379", str(gcs))
    return text.split("\0")


def health(gcs: int, token: str = TOKEN) -> int:
    """Exit code of the image's health check, told where the cluster is, since a test machine may have others."""
    (check,) = (step.text for step in parse(DOCKERFILE) if step.name == "HEALTHCHECK")
    command: list[str] = yaml.safe_load(check.split(" CMD ")[1])
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:], f"--address=127.0.0.1:{gcs}"],
        env=ray_environment(token),
        capture_output=True,
        check=False,
        timeout=60,
    )
    return done.returncode


def cores(gcs: int) -> float | None:
    """Cores that the cluster has to give, None while it does not know."""
    done = subprocess.run(
        [str(BIN / "ray"), "status", f"--address=127.0.0.1:{gcs}"],
        env=ray_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found = re.search(r"/([\d.]+) CPU$", done.stdout, flags=re.MULTILINE)
    return float(found[1]) if found else None


@pytest.mark.full
@pytest.mark.ray
def test_the_commands_of_the_compose_file_make_a_healthy_cluster_whose_cores_are_the_workers() -> None:
    gcs, dashboard = free_ports(2)
    services = compose(WORKER_CPUS="3").services
    assert health(gcs) != 0
    with started(here(services["head"].command, gcs, dashboard)):
        wait_for(lambda: health(gcs) == 0)
        assert health(gcs, "f" * 64) != 0
        assert cores(gcs) is None
        with started(here(services["worker"].command, gcs, dashboard)):
            wait_for(lambda: cores(gcs) == 3)
