#!/usr/bin/env bash
# first_token.sh TESSERA...: in the folder where it is started, from the licences
# that every Debian has to a text that a trained model writes. TESSERA: how the
# program is called.
set -euo pipefail
cat /usr/share/common-licenses/GPL-3 /usr/share/common-licenses/LGPL-2.1 >text.txt
cat >run.json <<'JSON'
{
  "run": {"name": "first", "steps": 3},
  "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 2, "ffn": 128, "vocab": 512, "max_seq": 64},
  "data": {"train": "text.txt", "tokenizer": "tokenizer.json", "seq_len": 32},
  "batch": {"global": 4},
  "mesh": {"dp": 2}
}
JSON
"$@" --version
"$@" tokenize train --input text.txt --vocab-size 512 --output tokenizer.json
"$@" train run.json --nproc 2
"$@" generate --model runs/first --prompt "This program is" --max-tokens 8
