"""What the package uses of Hydra beyond its documented interface: all of it, and nothing else.

A new release of Hydra may change any of it without notice. `tests/test_private_names.py` uses each
and says in its name what would break.
"""

# Composes a config; subclassed to compose the same overrides once.
from hydra._internal.config_loader_impl import ConfigLoaderImpl

# A folder of config files; subclassed to leave one of them out.
from hydra._internal.core_plugins.file_config_source import FileConfigSource

# Holds a loader for the functions that show configs, and runs sweeps.
from hydra._internal.hydra import Hydra

# Returns where Hydra searches for configs: its own, plug-ins' and those of a folder.
from hydra._internal.utils import create_config_search_path

__all__ = ["ConfigLoaderImpl", "FileConfigSource", "Hydra", "create_config_search_path"]
