"""The user's own `./conf` folder as a place where Hydra looks before the package's."""

from hydra._internal.core_plugins.file_config_source import FileConfigSource


class UserFiles(FileConfigSource):
    """A folder whose groups go before the package's; the primary config stays the package's.

    A `config.yaml` in the working directory is often that of another program.
    """

    @staticmethod
    def scheme() -> str:
        """What its place on the search path begins with."""
        return "user"

    def is_config(self, config_path: str) -> bool:
        """Whether the folder answers for this file."""
        return config_path.strip("/") not in ("config", "config.yaml") and super().is_config(
            config_path
        )
