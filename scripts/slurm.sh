#!/usr/bin/env bash
# The five stages on a Slurm cluster, from a login node: bash scripts/slurm.sh
# DRY=1 bash scripts/slurm.sh prints every command and submits nothing.
#
# A chain of jobs, each of which starts when the one before has ended well:
#     tasks -> offline -> critic -> policies (a job a method) -> test (an array, a job a model) -> evaluate
# offline and test serve the model that simulates the user on one more node of their own, and sweet's job of policies serves
# MODEL on SAMPLERS more, which sample its candidates (vLLM in an environment of its own; HUMAN=rules and SAMPLERS=0 need
# none). A lost rank: torchrun starts the ranks again. A lost node: Slurm queues the job again, and the
# stage goes on where it stopped. A job that has failed or met its time limit: the same command submits the chain again;
# what is done ends at once. The repository and OUT must be on a disk that all nodes share.
# shellcheck disable=SC2086,SC2206                                   # settings that hold flags are split into words
set -euo pipefail

# Settings. All can be set from outside.
set -a
NODES=${NODES:-2} GPUS=${GPUS:-8} HOURS=${HOURS:-24}                 # of each job; GPUs a node
SLURM_FLAGS=${SLURM_FLAGS:-}                                         # e.g. "--partition gpu --account me"
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct} OUT=${OUT:-out/slurm}
HUMAN=${HUMAN:-meta-llama/Llama-3.1-70B-Instruct} VLLM=${VLLM:-vllm} PORT=${PORT:-8000}
SAMPLERS=${SAMPLERS:-1}                                              # nodes; 0: the ranks sample, each with all of MODEL
TASKS=${TASKS:---source colbench}                                    # flags of 01
ROLLOUT=${ROLLOUT:---preset paper-backend --dtype bfloat16} SAMPLES=${SAMPLES:-3}
TRAIN=${TRAIN:---preset paper-backend --dtype bfloat16 --activation-checkpointing --micro-batch-size 1 --save-every 50}
METHODS=${METHODS:-sweet mtdpo rft}
DRY=${DRY:-}
COLBENCH_ROOT=${COLBENCH_ROOT:-$(cd "$(dirname "$0")/.." && pwd)}    # Slurm runs a copy of this file from elsewhere
set +a
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1                          # or restarted ranks look for those that were lost
cd "$COLBENCH_ROOT"
py=.venv/bin/python
read -ra methods <<< "$METHODS"
models=(base "${methods[@]}")

# ---------------------------------------------------------------------------------------------------------------------
# what jobs run

run() {
    if [ -n "$DRY" ]; then
        printf '   '
        printf ' %q' "$@"
        echo
    else
        "$@"
    fi
}

# The nodes of this job; servers have those behind the NODES of the stage.
nodes=(node0)
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST"); fi
[ -z "$DRY" ] || for ((i = 0; i <= NODES + SAMPLERS; i++)); do nodes[i]=node$i; done

# A stage on all ranks of the first NODES nodes. They meet at the first node.
ranks() {
    local first=("${nodes[@]:0:NODES}")
    run srun --nodes "$NODES" --ntasks "$NODES" --ntasks-per-node 1 --nodelist "$(IFS=,; echo "${first[*]}")" \
        --kill-on-bad-exit=1 .venv/bin/torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts 3 \
        --rdzv-backend c10d --rdzv-id "${SLURM_JOB_ID:-0}" --rdzv-endpoint "${nodes[0]}:29500" "$@"
}

# serve MODEL COUNT: starts that many servers, waits until they answer, and sets `served`. They end with the job.
serve() {
    local host server hosts=("${nodes[@]:NODES:$2}") servers=() urls=()
    for host in "${hosts[@]}"; do
        run srun --nodes 1 --ntasks 1 --nodelist "$host" "$VLLM" serve "$1" --tensor-parallel-size "$GPUS" \
            --port "$PORT" &
        servers+=($!)
        urls+=("http://$host:$PORT/v1")
        [ -z "$DRY" ] || wait $!
    done
    for host in "${hosts[@]}"; do
        until run curl --silent --fail "http://$host:$PORT/health"; do
            for server in "${servers[@]}"; do kill -0 "$server"; done         # ends this job if a server has ended
            sleep 10
        done
    done
    served=$(IFS=,; echo "${urls[*]}")#$1
}
serve_human() {
    simulator=$HUMAN
    if [ "$HUMAN" = rules ]; then return; fi
    serve "$HUMAN" 1
    simulator=$served
}

rollout() { ranks 02_rollout.py --simulator "$simulator" $ROLLOUT "$@"; }
train() { ranks "$@" --trajectories "$OUT/offline.jsonl" --model "$MODEL" $TRAIN; }

step() {
    case $1 in
        tasks)
            run $py 01_generate_tasks.py $TASKS --split train --out "$OUT/train.jsonl"
            run $py 01_generate_tasks.py $TASKS --split test --out "$OUT/test.jsonl" ;;
        offline)
            serve_human
            rollout --tasks "$OUT/train.jsonl" --agent "$MODEL" --samples "$SAMPLES" --out "$OUT/offline.jsonl" ;;
        critic)
            train 03_train_critic.py --out "$OUT/critic" ;;
        policies)
            local method=${methods[SLURM_ARRAY_TASK_ID]} critic=()
            if [ "$method" = sweet ]; then critic=(--critic "$OUT/critic"); fi
            if [ "$method" = sweet ] && [ "$SAMPLERS" -gt 0 ]; then
                if [ -n "$DRY" ] || [ ! -e "$OUT/sweet/candidates.jsonl" ]; then serve "$MODEL" "$SAMPLERS"; fi
                critic+=(--sampler "${served:-http://none#$MODEL}")          # another address is the same command
            fi
            train 04_train_policy.py --method "$method" "${critic[@]}" --out "$OUT/$method" ;;
        test)
            local name=${models[SLURM_ARRAY_TASK_ID]} agent
            agent=$OUT/$name
            if [ "$name" = base ]; then agent=$MODEL; fi
            serve_human
            rollout --tasks "$OUT/test.jsonl" --agent "$agent" --out "$OUT/$name.jsonl" ;;
        evaluate)
            local files=() name
            for name in "${models[@]}"; do files+=("$name=$OUT/$name.jsonl"); done
            run $py 05_evaluate.py "${files[@]}" --baseline base --costs --out "$OUT/report" ;;
    esac
}

if [ $# -gt 0 ]; then
    step "$1"
    exit
fi

# ---------------------------------------------------------------------------------------------------------------------
# the chain

after=
# submit STEP NODES GPUS [flags of sbatch …]: a job after the last one
submit() {
    local name=$1 count=$2 gpus=$3 command
    command=(sbatch --parsable --job-name "colbench-$name" --nodes "$count" --requeue --open-mode append
             --time "$HOURS:00:00" --output "$OUT/logs/$name-%j.log" --export=ALL --kill-on-invalid-dep=yes)
    if [ "$gpus" -gt 0 ]; then command+=(--exclusive --gpus-per-node "$gpus"); fi
    if [ -n "$after" ]; then command+=(--dependency "afterok:$after"); fi
    command+=("${@:4}" $SLURM_FLAGS scripts/slurm.sh "$name")
    if [ -n "$DRY" ]; then
        after="\$$name"
        echo "$name:"
        run "${command[@]}"
    else
        after=$("${command[@]}")
        after=${after%%;*}                                           # id;cluster
        echo "$name: job $after"
    fi
}
# show STEP [INDEX …]: with DRY, what its jobs run
show() {
    if [ -z "$DRY" ]; then return; fi
    local name=$1 index
    for index in "${@:2}"; do SLURM_ARRAY_TASK_ID=$index step "$name"; done
}

talk=$NODES
if [ "$HUMAN" != rules ]; then talk=$((NODES + 1)); fi
run mkdir -p "$OUT/logs"
submit tasks 1 0
show tasks 0
submit offline "$talk" "$GPUS"
show offline 0
submit critic "$NODES" "$GPUS"
show critic 0
before=$after policies=
for index in "${!methods[@]}"; do                                    # jobs of their own: sweet has more nodes
    count=$NODES after=$before
    if [ "${methods[index]}" = sweet ]; then count=$((NODES + SAMPLERS)); fi
    submit policies "$count" "$GPUS" --array "$index"
    show policies "$index"
    policies+=:$after
done
after=${policies#:}
submit test "$talk" "$GPUS" --array "0-$((${#models[@]} - 1))"
show test "${!models[@]}"
submit evaluate 1 0
show evaluate 0
