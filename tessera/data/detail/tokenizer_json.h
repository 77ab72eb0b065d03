// tokenizer.json, the file of Hugging Face's tokenizers.
//
// Understood: model BPE; pre_tokenizer ByteLevel, or a Sequence of Split (by an
// expression in splitter.cpp) and ByteLevel; normalizer null or NFC; decoder
// ByteLevel; post_processor null, ByteLevel, TemplateProcessing or a Sequence
// of these; added tokens. Whatever else would change ids is refused by name.
// Errors: TS_CHECK_IO names `source` and the piece.
#pragma once

#include <string>

#include "tessera/data/tokenizer_spec.h"

namespace tessera::data::detail {

TokenizerSpec read_tokenizer_json(const std::string& text,
                                  const std::string& source);
std::string write_tokenizer_json(const TokenizerSpec& spec);
// tokenizer_config.json: tells transformers to take tokenizer.json as it is,
// whatever the model beside it.
std::string write_tokenizer_config(const TokenizerSpec& spec,
                                   const std::string& end_of_text);

}  // namespace tessera::data::detail
