#!/usr/bin/env bash
# from_kit.sh KIT STAGE: tests and figures of one NVIDIA card on a machine without a network.
#
# KIT is a folder with two archives, vllm-*.tar.xz and deps.tar.xz: the CUDA build of vLLM, which may
# be cut down to one kind of card, and what it needs beside Python 3.12, torch, triton, transformers,
# pytest, psutil, httpx and xxhash, which the machine has. Each STAGE takes less than ten minutes:
#   tests    tests/gpu, and how quick copies between card and pool are
#   eager    benchmarks.gpu with eager engines
#   graphs   the same with CUDA graphs
#   dry      without a card: whether vLLM and all of ours can be imported; a stub stands for the driver
# Results are in build/gpu-report.json and at the end of docs/gpu.md.
set -euo pipefail
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

run_tests() { # without the project's own configuration, which needs more than this machine has
	python3 -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode importlib \
		-p no:cacheprovider -W ignore -ra "$@" tests/gpu
}

case $stage in
tests)
	status=0
	run_tests --durations 10 || status=$?
	python3 -m benchmarks.gpu copies
	exit $status
	;;
eager) python3 -m benchmarks.gpu hits no_hits ;;
graphs) python3 -m benchmarks.gpu hits no_hits --graphs ;;
dry)
	gcc -shared -o "$site/libcuda.so.1" -x c /dev/null
	export LD_LIBRARY_PATH=$site${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
	python3 -c 'import vllm, vllm._C; print("vLLM", vllm.__version__)'
	python3 -m benchmarks.gpu --help
	run_tests --collect-only -q
	;;
*)
	echo "there is no stage $stage" >&2
	exit 2
	;;
esac
