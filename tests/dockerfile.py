"""A Dockerfile as a list of instructions, and its installation steps carried out without Docker."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        stage: name of the stage it stands in; empty before the first.
        name: its keyword, in capitals.
        text: what follows the keyword, continuation lines joined.
    """

    stage: str
    name: str
    text: str


def parse(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, in order; every stage must have a name."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    stage, found = "", []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            if name == "FROM":
                stage = rest.split(" AS ")[1]
            found.append(Instruction(stage, name, rest))
    return found


def chain(instructions: list[Instruction], stage: str, variant: str) -> list[Instruction]:
    """All instructions that a stage is made of, those of the stages it stands on first."""
    own = [instruction for instruction in instructions if instruction.stage == stage]
    if not own:
        return []
    below = own[0].text.split(" AS ")[0].replace("$VARIANT", variant)
    return chain(instructions, below, variant) + own


def install(steps: list[Instruction], source: Path, target: Path, environment: Path) -> None:
    """Carries out COPY, and RUN where it calls pip, as Docker would: by ``sh``, in the working directory.

    Args:
        steps: instructions of one image. What concerns the system (packages of the distribution, the user) is left out.
        source: the build context.
        target: stands for the working directory of the steps.
        environment: a virtual environment that stands for the image's Python.
    """
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = f"{environment / 'bin'}{os.pathsep}{keep['PATH']}"
    for step in steps:
        if step.name == "COPY":
            *files, destination = shlex.split(step.text)
            for file in files:
                _copy(source / file, target / destination, directory=destination.endswith("/"))
        elif step.name == "RUN" and "pip install" in step.text:
            done = subprocess.run(
                ["sh", "-c", step.text],
                cwd=target,
                env=keep | {"PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"RUN {step.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _copy(file: Path, destination: Path, *, directory: bool) -> None:
    if file.is_dir():
        shutil.copytree(file, destination, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(file, destination / file.name if directory else destination)


def problems(text: str, context: Path) -> list[str]:
    """What is wrong with a Dockerfile by this project's rules, one line each.

    Args:
        text: the Dockerfile.
        context: the folder it is built from, with its ``.dockerignore``.
    """
    instructions = parse(text)
    return [*_sources(instructions), *_steps(instructions), *_copies(instructions, context), *_user(instructions)]


def _sources(instructions: list[Instruction]) -> list[str]:
    stages: set[str] = set()
    found = []
    for instruction in instructions:
        if instruction.name == "FROM":
            image = instruction.text.split(" AS ")[0]
            known = any(re.fullmatch(re.escape(image).replace(r"\$VARIANT", r"\w+"), stage) for stage in stages)
            if not known and not re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", image):
                found.append(f"'{image}' is not pinned to an exact version")
            stages.add(instruction.stage)
    return found


def _steps(instructions: list[Instruction]) -> list[str]:
    found = []
    for instruction in instructions:
        step = instruction.text
        if instruction.name == "ADD":
            found.append(f"ADD can fetch and unpack; use COPY: {step}")
        if instruction.name != "RUN":
            continue
        if re.search(r"\b(curl|wget)\b[^|]*\|", step):
            found.append(f"what is downloaded is run unseen: {step}")
        if "apt-get install" in step and "--no-install-recommends" not in step:
            found.append(f"apt-get installs what is only recommended: {step}")
        if "apt-get update" in step and not step.endswith("rm -rf /var/lib/apt/lists/*"):
            found.append(f"the package lists stay in the layer: {step}")
        if step.count("pip install") != step.count("pip install --no-deps") + step.count("pip install --constraint"):
            found.append(f"pip may choose versions of its own: {step}")
    return found


def _copies(instructions: list[Instruction], context: Path) -> list[str]:
    allowed = {
        line[1:] for line in (context / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    }
    files = [file for step in instructions if step.name == "COPY" for file in shlex.split(step.text)[:-1]]
    return [f"COPY {file}: there is no such file" for file in files if not (context / file).exists()] + [
        f"COPY {file}: .dockerignore leaves it out" for file in files if not {file, file.partition("/")[0]} & allowed
    ]


def _user(instructions: list[Instruction]) -> list[str]:
    last = [step for step in instructions if step.stage == instructions[-1].stage]
    names = [step.name for step in last]
    users = [step.text for step in last if step.name == "USER"]
    found = []
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("the last stage ends as root")
    elif "RUN" in names[names.index("USER") :] or names[-1] != "CMD":
        found.append("the last stage installs after USER, or does not end with CMD")
    if "HEALTHCHECK" not in names:
        found.append("the last stage has no HEALTHCHECK")
    return found
