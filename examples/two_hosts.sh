#!/usr/bin/env bash
# xinference on two machines: the supervisor and a worker on the first, a worker on the second.
#
#   on the first:   examples/two_hosts.sh first  10.0.0.1
#   on the second:  examples/two_hosts.sh second 10.0.0.2 10.0.0.1
#
# Needs on both machines: the same versions of xinference, vLLM and xinference-xavier in one Python
# environment, with its programs in PATH; the address of the other; and, if there is a firewall:
#   into the first:   9997 (REST), 9998 (supervisor, trackers) and 9999 (worker) from the second
#   into the second:  9999 (worker) from the first
#   both ways:        the ephemeral ports (net.ipv4.ip_local_port_range)
#
# xinference 4.1 requires an account: create the first one on its web page, with the setup token that
# the first machine shows, and log in. If nobody else can reach it, you can export
# XINFERENCE_AUTH_ADVANCED=false on both machines beforehand instead.
#
# Ctrl-C ends what runs on a machine. Press it on the second machine first: its worker would wait
# long for a supervisor that is gone.
#
# Then, from anywhere:
#   xinference login --endpoint http://10.0.0.1:9997 --username NAME --password PASSWORD
#   xinference launch --endpoint http://10.0.0.1:9997 --model-name qwen2.5-instruct \
#       --model-engine vLLM --size-in-billions 7 --model-format pytorch \
#       --replica 2 --enable_xavier true
#   xinference-xavier doctor --endpoint http://10.0.0.1:9997
#   python -m examples.long_document_questions --endpoint http://10.0.0.1:9997 --model qwen2.5-instruct
set -euo pipefail

ROLE=${1:?first or second}
# The machine's own address, not 0.0.0.0: xinference passes it to the others unchanged.
OWN=${2:?the address of this machine}
FIRST=${3:-$OWN}
ENDPOINT=http://$FIRST:9997
export XINFERENCE_EXTENSIONS=xinference_xavier:extension

trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM

if [ "$ROLE" = first ]; then
    xinference-supervisor -H "$OWN" -p 9997 --supervisor-port 9998 &
fi
until curl --silent --fail --output /dev/null "$ENDPOINT/v1/cluster/auth"; do sleep 1; done
xinference-worker -e "$ENDPOINT" -H "$OWN" --worker-port 9999 &
wait -n || true
echo "one of the processes has ended: stopping the others on this machine" >&2
exit 1
