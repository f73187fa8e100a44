#!/usr/bin/env bash
# A short visit to a machine with a card: what shows whether it is right, then how fast it is.
#
#   tests/gpu/visit/visit.sh pack          here, for a machine without a network: wheels in .whl
#   tests/gpu/visit/visit.sh [STAGE …]     there, in the project's root; results in $OUT
#
#   tests     tests/test_gpu.py and tests/gpu                                    at the same time
#   checks    `selftest --no-speed`: small models of every kind
#   commands  every command that shows or measures a model; screens in commands.txt
#   rates     1B and 8B with random weights, part by part                        alone
#   kernels   what has a kernel of Triton's alone: errors and times, beside PyTorch's
#   plain     `rates` without Triton's kernels
#   receipt   `selftest -o receipt.json`                                         alone
#
# $VISIT_TOTAL, 400 seconds, is for all of them, and $VISIT_STAGE, 150, for each. A second visit,
# after mending: `VISIT_TOTAL=240 visit.sh tests rates receipt`. Without a card everything runs on
# the processor. Exit 1 where a stage failed or there was no time for it.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../../.."
python=${PYTHON:-python3}

if [ "${1:-}" = pack ]; then # for x86-64 and Python 3.12; PyTorch is there
    mkdir -p .whl
    exec "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
        --abi cp312 --abi abi3 --abi none --platform manylinux_2_28_x86_64 \
        --platform manylinux2014_x86_64 --platform any -d .whl \
        gguf prompt-toolkit wcwidth typer rich click shellingham annotated-doc \
        jsonschema jsonschema-specifications referencing rpds-py
fi

OUT=${OUT:-$(mktemp -d)}
stages=${*:-tests checks commands rates kernels plain receipt}
total=${VISIT_TOTAL:-400} most=${VISIT_STAGE:-150}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$PWD:$PWD/tests:$site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=1 LLMCLI_CONFIG= LLMCLI_OFFLINE=1 LLMCLI_CACHE=$site/cache
export TRITON_CACHE_DIR=$site/triton COLUMNS=150
if ls .whl/*.whl >/dev/null 2>&1; then
    "$python" -m pip install -q --no-index --no-deps --target "$site" .whl/*.whl
fi
[ -e llmcli/kernels/_native.abi3.so ] ||
    "$python" -c 'import sys; from setuptools import setup; sys.argv = ["setup.py", "build_ext", "--inplace"]; setup()' >"$site/build.txt" 2>&1

device=$("$python" - "$site/config.json" "$OUT/log.txt" <<END
import json, platform, sys
import torch
from llmcli.commands.selftest.measure.run import SHAPES
cuda = torch.cuda.is_available()
layers = {} if cuda else {"num_hidden_layers": 1, "vocab_size": 1024}
with open(sys.argv[1], "w") as config, open(sys.argv[2], "a") as log:
    json.dump(SHAPES["1B"] | {"architectures": ["LlamaForCausalLM"]} | layers, config)
    name = torch.cuda.get_device_name() if cuda else "no card"
    print(platform.python_version(), torch.__version__, name, file=log)
print("cuda" if cuda else "cpu")
END
)
failed=0
log() { printf '%4ds  %s\n' "$SECONDS" "$*" | tee -a "$OUT/log.txt"; }

stage() { # name, command …: its output in name.txt
    local name=$1 begin=$SECONDS limit=$((total - SECONDS)) rc
    shift
    case " $stages " in *" $name "*) ;; *) return 0 ;; esac
    [ "$limit" -lt "$most" ] || limit=$most
    if [ "$limit" -lt 5 ]; then
        log "$name: no time"
        return 1
    fi
    VISIT_SECONDS=$((limit * 3 / 4)) timeout -k 5 "$limit" "$@" >"$OUT/$name.txt" 2>&1
    rc=$?
    log "$name: exit $rc after $((SECONDS - begin)) s"
    [ "$rc" = 0 ] || tail -n 15 "$OUT/$name.txt"
    return "$rc"
}

commands() { # one after the other: 1B has random weights
    local text="When Mary and John went to the store, John gave a drink to"
    "$python" "$here/commands.py" <<END
env
info -m tiny
generate "$text" -m tiny --device $device -n 40 --greedy
generate "$text" -m tiny --device $device -n 40 --seed 3 --dtype bfloat16 --json
attention "$text" -m tiny --device $device --layer 1 --head 0
lens "$text" -m tiny --device $device
shapes -m tiny --activations --tokens 12
score "$text" -m tiny --device $device
explain "blocks.1.attn.pattern[2,-1,2]" "$text" -m tiny --device $device --depth 2
load -m tiny --device $device
ladder "$text" -m tiny --device $device
timing "$text" -m tiny --device $device -n 16 --pairs 3
timing --ids 1,2,3,4 -m $site --random-weights --device $device --dtype bfloat16 -n 16 --pairs 3
bench -m $site --random-weights --device $device --dtype bfloat16 -p 64 -n 16 -r 2
END
}

cat "$OUT/log.txt"
waiting=()
# what loads a large model is left out, for there is none, and what compiles for other cards
stage tests "$python" -m pytest tests/test_gpu.py tests/gpu -n 4 --tb=short -rf -p no:cacheprovider \
    -k "not visit and not twins_and_targets and not loaded_as_it_is and not memory_is_required" & waiting+=($!)
OMP_NUM_THREADS=2 stage checks "$python" -m llmcli selftest --no-speed --device "$device" \
    -o "$OUT/checks.json" & waiting+=($!)
export -f commands && export python here site device
stage commands bash -c commands & waiting+=($!)
for one in "${waiting[@]}"; do wait "$one" || failed=1; done

shapes="1B 8B"
[ "$device" = cuda ] || shapes=1B
# shellcheck disable=SC2086
stage rates "$python" "$here/rates.py" $shapes || failed=1
stage kernels "$python" "$here/kernels.py" || failed=1
# shellcheck disable=SC2086
LLMCLI_TRITON=off stage plain "$python" "$here/rates.py" $shapes || failed=1
stage receipt "$python" -m llmcli selftest --device "$device" -o "$OUT/receipt.json" || failed=1
log "done: $OUT"
cat "$OUT"/rates.txt "$OUT"/kernels.txt "$OUT"/receipt.txt 2>/dev/null | cut -c1-160
exit "$failed"
