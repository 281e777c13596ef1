"""The header of a run: lines with the settings that differ from the defaults, and the configuration in a file."""

import dataclasses
import shlex
import sys
import textwrap
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from partial_fc import checkpoint, flags
from partial_fc.accessories import spare
from partial_fc.findings import counted
from partial_fc.train.context import Context
from partial_fc.train.record.log import Line


def begin(run: Context, typed: Any) -> None:
    """Logs the settings that are not the defaults; rank 0 writes configuration.json. typed: before `named`."""
    path = run.root / "configuration.json"
    versions = [f"{name} {number}" for name, number in run.versions.items()]
    workers = flags.flat(run.config).get("num_workers")
    threads = f", {counted(workers, 'decoding thread')}" if workers else ""
    where = f"{run.world} on {run.device}{threads}; "
    short = ", ".join(one for one in versions if one.startswith(("partial-fc ", "torch ")))
    run.logger.info(Line(where + ", ".join(versions), where + short))
    lines = list(differences(typed))
    differing = "other than by default:" if lines else "all of it as by default"
    run.logger.info(f"recipe {run.recipe}, configuration in {path}; {differing}")
    for line in lines:
        run.logger.info(line)
    if run.world.rank == 0:
        spare(str(path), write, run, typed, path)


def differences(config: Any) -> Iterator[str]:
    """Yields a line for each group of flags, with those that differ from the recipe's defaults, as typed."""
    for group, values in changed(config).items():
        if values:
            # A flag and its value stay together.
            text = " ".join(_with_value(name, value).replace(" ", "\0") for name, value in values.items())
            for line in textwrap.wrap(f"{group}: {text}", 96, break_long_words=False, break_on_hyphens=False):
                yield f"  {line}".replace("\0", " ")


def changed(config: Any) -> dict[str, dict[str, Any]]:
    """Returns, by group of flags, name -> value of those that differ from the recipe's defaults."""
    found: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(config):
        group = getattr(config, field.name)
        if not dataclasses.is_dataclass(group):  # a flag without a group
            if group != field.default:
                found.setdefault("recipe", {})[field.name] = group
            continue
        if field.default is dataclasses.MISSING:  # has required flags
            default = {inner.name: inner.default for inner in dataclasses.fields(group)}
        else:
            default = flags.flat(field.default)
        found[field.name] = {flag: value for flag, value in flags.flat(group).items() if value != default[flag]}
    return found


def write(run: Context, typed: Any, path: Path) -> None:
    """Writes the file for reports and people: how the run was started last."""
    given = {name: value for values in changed(typed).values() for name, value in values.items()}
    checkpoint.write_json(
        {
            "recipe": run.recipe,
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": sys.argv,
            "world_size": run.world.size,
            "backend": run.world.backend,
            "device": str(run.device),
            "differs": given,
            "configuration": flags.flat(run.config),
            "versions": run.versions,
        },
        path,
    )


def _with_value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flags.switch(name, value)
    each = value if isinstance(value, tuple | list) else [value]
    return " ".join([flags.flag(name), *(shlex.quote(str(one)) for one in each)])
