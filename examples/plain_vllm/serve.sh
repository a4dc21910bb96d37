#!/usr/bin/env bash
# Two vLLM servers that share what they have computed, and their tracker; no xinference.
#
#   examples/plain_vllm/serve.sh MODEL [arguments of vllm serve]
#
# Needs vLLM and xinference-xavier in one Python environment, with its programs in PATH. With vLLM's
# CPU build, add: --block-size 128 --dtype float32
#
# Environment variables: HOST (127.0.0.1), TRACKER_PORT (9920), PORTS ("8001 8002", one for each
# server) and POOL (1GiB, the host memory of each server's pool). An interrupt ends everything.
set -euo pipefail

MODEL=${1:?say which model: serve.sh MODEL [arguments of vllm serve]}
shift
HOST=${HOST:-127.0.0.1}
TRACKER=$HOST:${TRACKER_PORT:-9920}
NAME=plain

# Everything that was started ends with this script, however the script ends.
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM

xinference-xavier tracker "$NAME" --address "$TRACKER" &

SERVE=(vllm serve)
if ! python -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
    # The program of vLLM's CPU build looks for a package of the other name and fails.
    SERVE=(python -m vllm.entrypoints.openai.api_server --model)
fi
for PORT in ${PORTS:-8001 8002}; do
    # All get the same configuration but for their names, which events have.
    CONFIG=$(xinference-xavier transfer-config "$NAME" --address "$TRACKER" --name "vllm-$PORT" --xavier_pool_bytes "${POOL:-1GiB}")
    # The usage of each answer tells how many tokens were reused.
    "${SERVE[@]}" "$MODEL" --host "$HOST" --port "$PORT" --kv-transfer-config "$CONFIG" \
        --enable-prompt-tokens-details "$@" &
done

wait -n || true  # one of them has ended, which should not happen
echo "one of the processes has ended: stopping the others" >&2
exit 1
