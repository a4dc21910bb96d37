#!/usr/bin/env bash
# from_kit.sh KIT STAGE: test and measure on an NVIDIA card, on a machine without a network.
#
# KIT is a folder with two archives, vllm-*.tar.xz and deps.tar.xz: the CUDA build of vLLM, which may
# be reduced to one kind of card, and its dependencies except Python 3.12, torch, triton,
# transformers, pytest, psutil, httpx, xxhash, pandas and scipy, which the machine must have. STAGE
# is one of these; each takes less than ten minutes:
#   day      all of it in one call, the most telling first; results also in $OUT as they come
#   tests    tests/gpu, and the speed of copies between card and pool
#   eager    benchmarks.gpu with eager engines
#   graphs   the same with CUDA graphs
#   dry      without a card: imports vLLM and our package, with a stub for the driver
# Results are in build/gpu-report.json and at the end of docs/gpu.md.
set -euo pipefail
began=$SECONDS
kit=$(cd "$1" && pwd)
stage=$2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

site=${TMPDIR:-/tmp}/xavier-kit
if [ ! -e "$site/.complete" ]; then
	mkdir -p "$site"
	for archive in "$kit"/*.tar.xz; do tar -C "$site" -xJf "$archive"; done
	touch "$site/.complete"
fi
export PYTHONPATH=$site:$PWD VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE

run_tests() { # without the project's own configuration, which needs missing packages
	python3 -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode importlib \
		-p no:cacheprovider -W ignore -ra "$@" tests/gpu
}

case $stage in
day) exec python3 -m tests.gpu.day "${OUT:-build/gpu-day}" $((560 - SECONDS + began)) ;;
tests)
	status=0
	run_tests --durations 10 || status=$?
	python3 -m benchmarks.gpu copies
	exit $status
	;;
eager) python3 -m benchmarks.gpu hits no_hits ;;
graphs) python3 -m benchmarks.gpu hits no_hits --graphs ;;
dry)
	find "$site/vllm" -name '*.so' -exec nm -D --undefined-only {} + |
		sed -nE 's/.* U (cu[A-Z]\w*)$/int \1(void) { return 100; } \/\/ there is no device/p' |
		sort -u | gcc -shared -fPIC -o "$site/libcuda.so.1" -x c -
	export LD_LIBRARY_PATH=$site${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
	python3 - <<-'PROGRAM'
		import ctypes
		from pathlib import Path
		import torch, vllm
		ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
		for library in sorted(Path(vllm.__file__).parent.rglob("*_C*.so")):
		    torch.ops.load_library(library)
		    print("loaded", library.name)
		from xinference_xavier.engine.entry import XavierConnector, XavierSpec
		from xinference_xavier.transfer.__main__ import TransferActor
		print("vLLM", vllm.__version__, XavierConnector, XavierSpec, TransferActor)
	PROGRAM
	python3 -m benchmarks.gpu --help
	python3 -m tests.gpu.day "${OUT:-build/gpu-day}" 60 || true # each step says that there is no card
	run_tests --collect-only -q
	;;
*)
	echo "unknown stage: $stage" >&2
	exit 2
	;;
esac
