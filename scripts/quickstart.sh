#!/usr/bin/env bash
# ./dev quickstart [FOLDER]: a language model, from nothing, on two ranks, in a
# few minutes: on the King James Bible from Debian, or on the text in FOLDER.
source scripts/common.sh

folder=${1:-}
[[ -z $folder || -d $folder ]] || fail "quickstart: $folder is no folder."
set_up_first

# Prose that Debian has; without it, the text that LibTorch brings.
if [[ -z $folder ]] && ! command -v bible >/dev/null; then
  set_up_first --with "bible-kjv bible" || folder=$(
    echo "quickstart: training on LibTorch's own headers instead" >&2
    [[ -n ${TESSERA_TORCH:-} ]] && echo "$TESSERA_TORCH/include" ||
      $python -c 'import os, torch; print(os.path.dirname(torch.__file__) + "/include")'
  )
fi
name=kjv
[[ -z $folder ]] || name=$(basename "$(realpath "$folder")")
here=quickstart/$name

# Another folder of the same name is not gone on with.
source_of_text=$([[ -z $folder ]] && echo "Debian's bible-kjv" || realpath "$folder")
[[ ! -f $here/source || $(<"$here/source") == "$source_of_text" ]] || fail \
  "quickstart: $here was trained on $(<"$here/source"), not on $source_of_text. Remove $here, or give the folder another name."

make_text() {
  if [[ -z $folder ]]; then
    bible -f 'Gen1:1-Rev22:21' | python3 scripts/quickstart_text.py "$here/text" kjv
  else
    python3 scripts/quickstart_text.py "$here/text" "$folder"
  fi
}

say() { printf '\n== %s\n' "$1"; }

build tessera
tessera=$PWD/$build/cli/tessera
config=$PWD/examples/quickstart/quickstart.json

if [[ -f $here/tokenizer.json ]]; then
  say "$here is there already: going on with it (remove it to begin anew)"
else
  say "Text: $here/text"
  make_text
  echo "$source_of_text" >"$here/source"
  say "Tokenizer: byte-level BPE of 2048 tokens, trained on the text"
  "$tessera" tokenize train --input "$here/text/train.txt" --vocab-size 2048 \
    --output "$here/tokenizer.json"
fi

say "Training on two ranks"
(cd "$here" && "$tessera" train "$config" --nproc 2)
run=$here/runs/quickstart

say "What was learned"
"$tessera" tokenize encode --input "$here/text/valid.txt" \
  --tokenizer "$here/tokenizer.json" --output "$here/valid.bin" >/dev/null
python3 scripts/quickstart_summary.py "$run/metrics.jsonl" "$here/valid.bin"

say "A sample"
prompt="And it came to pass"
[[ $name == kjv ]] || prompt=$(python3 -c '
import sys
print(open(sys.argv[1], encoding="utf-8").read(40).split("\n")[0])' "$here/text/valid.txt")
"$tessera" generate --model "$run" --prompt "$prompt" --max-tokens 120

say "The model, as Hugging Face's transformers load it"
rm -rf "$here/hugging_face"  # of the run before
"$tessera" convert --from "$run" --to "$here/hugging_face"

say "What to try next"
cat <<TEXT
  build/$preset/cli/tessera generate --model $run --prompt "In the beginning"
  build/$preset/cli/tessera inspect $run
  (cd $here && $PWD/build/$preset/cli/tessera train $config --nproc 2 --run.name=longer --run.steps=1000)
  ./dev quickstart /path/to/your/own/text
  less examples/quickstart/quickstart.json   what was trained; 'tessera schema' has every key
TEXT
