#!/usr/bin/env bash
# Measures the base model of an embedded default, and writes its model card (models/tiny/README.md, say):
#     bash scripts/model_card.sh [--domain NAME]
# Plays the test tasks of run.sh with two dialogues each, seed 0, then asks the gates (scripts/critics.py): about a
# minute on two cores, pages two. What was measured stays in out/card (OUT: another folder).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
take_domain "$@"
set_up_domain
out=${OUT:-out}/card/$domain seed=0
mkdir -p "$out"
tasks test "${TEST_TASKS:-$num_test}" 1000
evaluate base $base
$py 05_evaluate.py base="$out/base.jsonl" $similarity --out "$out/report"
gates=
if [ $domain != frontend ]; then
    $py scripts/critics.py --trajectories "$out/base.jsonl" --gates $base --out "$out/gates"
    gates="--gates $out/gates/gates.json"
fi
$py scripts/model_card.py $base --metrics "$out/report/metrics.json" $gates
