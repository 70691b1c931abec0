"""The content of a scenario file: laid on other files, changed by the path of a key, not checked.

Names of files in it are relative to the file that names them.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from easerve.config import ConfigError, merge, read_yaml

YAML = (".yaml", ".yml")
FILES = ("model", "hardware", "costs.profile", "workload.trace")
"""Keys whose values are names of files; a model or hardware that comes with the package is none."""

EITHER = ("preset", "items")
"""What is asked, by a name or in full."""


def laid(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values laid on the content of a scenario, by the path of the key, with dots."""
    for path, value in changes.items():
        for key in reversed(path.split(".")):
            value = {key: value}
        content = _lay(content, value)
    return dict(content)


def _lay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Of two keys that exclude each other, the one that is laid on takes the other away."""
    workload = over.get("workload")
    asked = workload if isinstance(workload, Mapping) else {}
    for given, other in (EITHER, EITHER[::-1]):
        if given in asked and other not in asked:
            base = merge(base, {"workload": {other: None}})
    return merge(base, over)


def read_content(path: Path, below: Sequence[Path] = ()) -> dict[str, Any]:
    """What a scenario file says, laid on its base. ``below``: the files that lie on this one."""
    content = _located(path, _load(path))
    if "base" not in content:
        return content
    name, below = content.pop("base"), (*below, path.resolve())
    if not isinstance(name, str):
        raise ConfigError(f"{path}: base: expected the name of a file (got {name!r})")
    base = path.parent / name
    if base.resolve() in below:
        circle = " on ".join(each.name for each in (*below, base))
        raise ConfigError(f"{path}: base: files that lie on each other in a circle: {circle}")
    if not base.is_file():
        raise ConfigError(f"{path}: base: {base} is no file")
    return _lay(read_content(base, below), content)


def _load(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping with at least title, model and workload")
    return content


def _located(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Names of files as they are from here, in variants as well."""
    for *sections, key in (name.split(".") for name in FILES):
        inner: Any = content
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        _locate(path, inner, key, bool(sections))
    experiment = content.get("experiment")
    if isinstance(experiment, dict):
        for named in [experiment.get("variants"), *(experiment.get("grid") or ())]:
            for change in named.values() if isinstance(named, dict) else ():
                for name in FILES:
                    _locate(path, change, name, "." in name)
    return content


def _locate(path: Path, section: Any, key: str, always: bool) -> None:
    value = section.get(key) if isinstance(section, dict) else None
    if isinstance(value, str) and (always or "/" in value or value.endswith(YAML)):
        section[key] = os.path.normpath(path.parent / value)
