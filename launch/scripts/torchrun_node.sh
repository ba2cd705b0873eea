#!/usr/bin/env bash
# Starts one node's share of a run of several nodes. Run it once on each node, with the same arguments:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 NPROC_PER_NODE=8 torchrun_node.sh L0_sanity layout.dp=16
#
#   NNODES          number of nodes
#   NODE_RANK       number of this node, from 0; node 0 is the one that MASTER_ADDR names
#   MASTER_ADDR     name or address of node 0, as the other nodes reach it
#   MASTER_PORT     a free port of node 0
#   NPROC_PER_NODE  ranks on each node (the number of its GPUs)
#
# All of them must be set: a guessed address or node number makes every node wait for ever for the others.
# The rendezvous is the static one, in which NODE_RANK decides the ranks (under c10d it would be ignored).
# The folder out=... must be shared by all nodes.
set -euo pipefail

missing=()
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE; do
    [[ -n "${!name:-}" ]] || missing+=("$name")
done
if ((${#missing[@]})); then
    echo "torchrun_node.sh: these variables must be set: ${missing[*]}. See the head of $0." >&2
    exit 2
fi
for name in NNODES NODE_RANK MASTER_PORT NPROC_PER_NODE; do
    [[ "${!name}" =~ ^[0-9]+$ ]] || {
        echo "torchrun_node.sh: $name must be a whole number: $name='${!name}'." >&2
        exit 2
    }
done
if ((NODE_RANK >= NNODES)); then
    echo "torchrun_node.sh: NODE_RANK must be less than NNODES: NODE_RANK=$NODE_RANK, NNODES=$NNODES." >&2
    exit 2
fi
if (($# == 0)); then
    echo "torchrun_node.sh: name a recipe: torchrun_node.sh RECIPE [key=value ...]." >&2
    exit 2
fi

PYTHON="${PYTHON:-python}"
if ((NODE_RANK == 0)); then # a held port would only be noticed after a minute, in many lines of C++
    "$PYTHON" - "$MASTER_PORT" <<'PY'
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("", int(sys.argv[1])))
    except OSError as error:
        sys.exit(f"torchrun_node.sh: MASTER_PORT={sys.argv[1]} cannot be used on this node: {error.strerror}.")
PY
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run \
    --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$NPROC_PER_NODE" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    -m isozyme.launch train "$@"
