"""The metadata that depends on where the project is published.

A release sets `REPOSITORY`, such as `https://host/owner/name`, and `REF`, its tag. Then the README
links to the files there, as a package index needs it. Otherwise its links stay relative.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Published(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text()
        if repository := os.environ.get("REPOSITORY"):
            files = f"{repository}/blob/{os.environ['REF']}"
            readme = linked(readme, files)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{files}/docs/index.md",
                "Changelog": f"{files}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def linked(text: str, files: str) -> str:
    """The Markdown with relative links and pictures made absolute."""
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)([^)]+)", rf"\1{files}/\2?raw=true", text)
    return re.sub(r"(\]\()(?!\w+:|#)", rf"\1{files}/", text)
