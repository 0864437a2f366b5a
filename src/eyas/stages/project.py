"""An opened project: its paths, configuration and everything derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from eyas.base.layout import Layout
from eyas.config.load import load_config
from eyas.config.resolve import Resolved, resolve
from eyas.config.schema import EyasConfig
from eyas.stages.digests import DigestCache


class Project:
    """A project folder and its configuration; opening it changes nothing.

    Attributes:
        layout: where everything lies.
        config: the validated configuration.
        overrides: what of it was given beside eyas.toml, as ``dotted.key=value``.
    """

    def __init__(self, layout: Layout, config: EyasConfig, overrides: Sequence[str] = ()) -> None:
        self.layout = layout
        self.config = config
        self.overrides = tuple(overrides)

    @classmethod
    def open(cls, root: Path, overrides: Sequence[str] = ()) -> Project:
        """Open the project in ``root``. Raises NoProject, ConfigError or FormatTooNew."""
        root = root.resolve()
        return cls(Layout(root), load_config(root, overrides), overrides)

    @cached_property
    def resolved(self) -> Resolved:
        """Derived values. Raises TargetError when the target's configuration is not readable."""
        return resolve(self.config, self.layout.root)

    @cached_property
    def digests(self) -> DigestCache:
        return DigestCache(self.layout.state / "digests.json")

    @property
    def fingerprint_cache(self) -> Path:
        return self.layout.state / "fingerprints.json"

    def source_path(self, path: str) -> Path:
        """A path of the configuration; a relative one counts from the project folder."""
        return (self.layout.root / Path(path).expanduser()).resolve()
