"""Calls what the page's scripts export, without a browser."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from xinference_xavier.serving.ui.routes import files


class Scripts:
    """The scripts in `folder`, as a browser loads them."""

    def __init__(self, folder: Path) -> None:
        assert shutil.which("node"), "node is missing: install Node.js 20 or later"
        self._folder = folder
        for path, content in files().items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        (folder / "package.json").write_text('{"type": "module"}')

    def call(self, path: str, function: str, *arguments: object) -> Any:
        """What the exported `function` of the script `path` returns, in English."""
        program = f"""
            globalThis.localStorage = {{ getItem: () => "en" }};
            globalThis.navigator ??= {{ language: "en" }};
            const script = await import({json.dumps(str(self._folder / path))});
            const result = script[{json.dumps(function)}](...{json.dumps(arguments)});
            console.log(JSON.stringify(result));
        """
        done = subprocess.run(
            ["node", "--input-type=module", "--eval", program],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        return json.loads(done.stdout)
