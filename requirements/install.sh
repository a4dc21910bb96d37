#!/usr/bin/env bash
# install.sh PYTHON ARGUMENTS…: `uv pip install` into PYTHON's environment, from where pip would.
# uv does not read pip's configuration, and by default trusts the first index that has a package.
set -euo pipefail
python=$1
shift
setting() { "$python" -m pip config get "global.$1" 2>/dev/null || true; }

find_links=${PIP_FIND_LINKS:-$(setting find-links)}
index=${PIP_INDEX_URL:-$(setting index-url)}
export UV_FIND_LINKS="${find_links//[[:space:]]/,}"
export UV_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-$(setting extra-index-url)}"
export UV_DEFAULT_INDEX="${index:-https://pypi.org/simple}"
export UV_INDEX_STRATEGY=unsafe-best-match UV_SYSTEM_CERTS=1

"$python" -m uv --version >/dev/null 2>&1 ||
	"$python" -m pip --disable-pip-version-check install -qq "$(grep '^uv==' "$(dirname "$0")/cpu.txt")"
exec "$python" -m uv pip install --quiet --python "$python" "$@"
